"""Types of command line options: sizes, numbers, JSON objects. The commands of engine, frontend and server use them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click
import msgspec

from shmring.door import parse_nbytes

__all__ = ["COUNT", "JSON_OBJECT", "NBYTES", "SECONDS", "FiniteRange"]

if TYPE_CHECKING:
    _IntegerType = click.ParamType[int]
    _ObjectType = click.ParamType[dict[str, Any]]
else:
    _IntegerType = _ObjectType = click.ParamType  # older versions of click do not allow a subscript at run time


class _Nbytes(_IntegerType):
    """A size: bytes, or text such as 64MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Returns bytes."""
        try:
            nbytes = parse_nbytes(value)
        except (ValueError, TypeError) as error:
            self.fail(str(error), param, ctx)
        if nbytes < 1:
            self.fail("a size is at least 1 byte", param, ctx)
        return nbytes


class _JsonObject(_ObjectType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> dict[str, Any]:
        """Returns the object."""
        if isinstance(value, dict):
            return value
        try:
            return msgspec.json.decode(value, type=dict[str, Any])
        except msgspec.DecodeError as error:
            self.fail(f"{error}; write a JSON object such as '{{\"num_frames\": 8}}'", param, ctx)


class FiniteRange(click.FloatRange):
    """A number in a range. It refuses NaN, which passes every comparison with a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Returns the number."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


NBYTES = _Nbytes()
JSON_OBJECT = _JsonObject()
COUNT = click.IntRange(min=1)
SECONDS = FiniteRange(min=0, min_open=True)
