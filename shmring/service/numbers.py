"""Records of numbers are the only place of a number. A field has its name and how it is counted; the docstring of the class has
its meaning.

``GET /metrics``, the tables of docs/reference.md and what Ray shows of an engine are made from that.

In a docstring, a meaning begins with the unit: "requests that wait for a step". Histograms, and numbers whose names end in
``_s`` or ``_seconds``, are in seconds. What only grows is a counter, and says so beside its type (:data:`Count`) or in the
field's metadata (records of the transport); other numbers are gauges.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, get_args, get_origin, get_type_hints

from shmring.service.distributions import Distribution
from shmring.service.flags import descriptions

__all__ = ["Count", "Counted", "CountsByLabel", "Described", "Number", "described", "numbers_of"]

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]

#: Of fields that only grow.
Count: TypeAlias = Annotated[int, "counter"]
CountsByLabel: TypeAlias = Annotated[dict[tuple[str, ...], int], "counter"]


@dataclasses.dataclass(frozen=True)
class Number:
    """How a field is shown in Prometheus. For ``Annotated``.

    Attributes:
        name: there.
        labels: names of its labels. The field is then a dictionary, from labels to values.
        across_frontends: how a gauge's values of several frontends are combined.
    """

    name: str
    labels: tuple[str, ...] = ()
    across_frontends: Literal["livesum", "livemax"] = "livesum"


@dataclasses.dataclass(frozen=True)
class Counted:
    """A number in Prometheus.

    Attributes:
        name: there; a counter's ends with ``_total`` besides.
        kind: counters count up from a start, gauges have the present value.
        unit: the unit of the number; "s" is seconds.
        text: its meaning, in Markdown.
        source: where it is read from: the name of a record, a dot and a field. "http", "answers", "keys" and "process" are
            counted by this frontend, "intake" by its media, "client" by its end of a ring; "engine", "ring" and "times" come
            from an engine. Empty: it is known when it is asked for.
        labels, across_frontends: as of :class:`Number`. Of an engine, the dictionary is flat (see
            :class:`~shmring.engine.counted.EngineNumbers`), and there is one label.
    """

    name: str
    kind: Kind
    unit: str
    text: str
    source: str = ""
    labels: tuple[str, ...] = ()
    across_frontends: Literal["livesum", "livemax"] = "livesum"

    @property
    def exposed_name(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def help(self) -> str:
        """Unit and text as a sentence, for Prometheus."""
        text = re.sub(r" \(\[.*?\]\(.*?\)\)|`", "", self.text)
        sentence = text if self.unit in ("s", "0 or 1") else f"{self.unit} {text}"
        return f"{sentence[0].upper()}{sentence[1:]}."


class Described(NamedTuple):
    """What a record says of a field: its type, what stands beside that in ``Annotated``, and else as :class:`Counted`."""

    type: Any
    marks: tuple[Any, ...]
    kind: Kind
    unit: str
    text: str


def described(record: type) -> Iterator[tuple[str, Described]]:
    """Yields what a record says of its fields and properties, by their names."""
    hints = get_type_hints(record, include_extras=True)
    counters = {field.name for field in dataclasses.fields(record) if field.metadata.get("kind") == "counter"}
    texts = {name: paragraphs[0] for name, paragraphs in descriptions(record).items()}
    for name, member in vars(record).items():
        if isinstance(member, property):
            hints[name], texts[name] = int, str(member.__doc__)
    for name, hint in hints.items():
        type_, marks = (hint.__origin__, hint.__metadata__) if get_origin(hint) is Annotated else (hint, ())
        is_histogram = Distribution in (type_, *get_args(type_))
        kind: Kind = "histogram" if is_histogram else "counter" if "counter" in marks or name in counters else "gauge"
        unit, text = _unit_and_text(name, type_, texts[name].rstrip(".").replace("``", "`"), in_seconds=is_histogram)
        yield name, Described(type_, marks, kind, unit, text)


def _unit_and_text(name: str, type_: Any, text: str, *, in_seconds: bool) -> tuple[str, str]:
    if type_ is bool:
        return "true or false", text
    if in_seconds or name.endswith(("_s", "_seconds")):
        return "s", text.removeprefix("seconds ")
    unit, _, rest = text.partition(" ")
    return unit.lower().rstrip(",:"), rest


def numbers_of(record: type, source: str, name_of: Callable[[str], str | None] = lambda _: None) -> Iterator[Counted]:
    """Yields the numbers of a record that Prometheus is shown, and those of the records in it.

    Args:
        record: their class.
        source: what it is called.
        name_of: names the field in Prometheus that does not say it itself; None: it is not shown. Identities never are.
    """
    for field, each in described(record):
        if isinstance(each.type, type) and dataclasses.is_dataclass(each.type):
            yield from numbers_of(each.type, f"{source}.{field}", name_of)
            continue
        mark = next((mark for mark in each.marks if isinstance(mark, Number)), None)
        if mark is None and (name := name_of(field)) is not None and each.unit != "identity":
            mark = Number(name)
        if mark is not None:
            yield Counted(mark.name, each.kind, each.unit, each.text, f"{source}.{field}", mark.labels, mark.across_frontends)
