"""Fields of requests that this server does not implement. The type of a request declares such a field with :func:`only` and the
values that change nothing, because clients often send these values. Any other value is refused.

Fields that no type declares are ignored, and the answer names them (:mod:`shmring.frontend.http.parsing`). So a type must
declare each field that would change an answer. ``docs/compatibility.md`` lists the fields of vLLM.
"""

from __future__ import annotations

import operator
from typing import Any

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError, ErrorCode

__all__ = ["Unsupported", "check_supported", "only"]

_NEUTRAL = "neutral"  # where the ``extra`` of a field's ``Meta`` has the values that change nothing


def only(*neutral: Any) -> Meta:
    """Marks a field that is not implemented. Null and the given values change nothing, and are accepted; others are refused."""
    values = " or ".join(msgspec.json.encode(value).decode() for value in neutral)
    return Meta(
        description=f"Not supported: it can be {values}." if neutral else "Not supported: leave it out.",
        extra={_NEUTRAL: neutral},
    )


class Unsupported(dict[str, tuple[Any, ...]]):
    """A type's fields that are not implemented, each with the values that change nothing."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        metas = {field.name: getattr(field.type, "__metadata__", ()) for field in msgspec.structs.fields(kind)}
        super().__init__(
            (name, meta.extra[_NEUTRAL]) for name, found in metas.items() for meta in found if _NEUTRAL in (meta.extra or {})
        )
        self._values_of = operator.attrgetter(*self, "__class__")  # all in one call: a request has sixty of these fields

    def are_unset_in(self, given: msgspec.Struct) -> bool:
        """Whether all of these fields are unset in an object, as in nearly all requests."""
        return self._values_of(given).count(None) == len(self)


def check_supported(given: msgspec.Struct, unsupported: Unsupported, place: str = "") -> None:
    """Refuses a request that uses a field which is not implemented.

    Args:
        given: a request, or a part of one.
        unsupported: the fields of its type that are not implemented.
        place: where the part is in the request. In the error, this stands before the name of the field.

    Raises:
        ApiError: a field has a value that would change the answer.
    """
    if unsupported.are_unset_in(given):
        return
    for field, neutral in unsupported.items():
        value = getattr(given, field)
        if value is None or any(_is_same(value, allowed) for allowed in neutral):
            continue
        possible = f"; it can be {msgspec.json.encode(neutral[0]).decode()}, or left out" if neutral else ""
        text = f"{field} is not supported by this server{possible}"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=f"{place}{field}")


def _is_same(value: Any, allowed: Any) -> bool:
    """Whether two JSON values are equal. In Python, 1 is equal to true; in JSON it is not."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)
