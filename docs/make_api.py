"""The tables of docs/api.md, made of the code: ``python docs/make_api.py`` writes them, and a test compares.

What stands before the tables is written by hand, in the page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import shmring
import shmring.threads
from shmring.service.flags import descriptions

PAGE = Path(__file__).with_name("api.md")

_OPENING = "Opening an end"


class Section(NamedTuple):
    """A class of the asyncio end, its twin without an event loop, and which of their members are for users.

    Attributes:
        heading: of its table.
        variable: what an instance is called there.
        asyncio_class, blocking_class: the two.
        members: in the order of the table.
    """

    heading: str
    variable: str
    asyncio_class: type
    blocking_class: type
    members: str


SECTIONS = (
    Section(
        "`Ring`: what `serve` returns",
        "ring",
        shmring.Ring,
        shmring.threads.Ring,
        "claim claim_nowait claim_many run run_batches injector drain take untaken wait_workers ranks broadcast "
        "broadcast_nowait gather drop_worker statistics inspect add_to_snapshots close name config epoch",
    ),
    Section(
        "`Claim`: a request at the engine",
        "claim",
        shmring.Claim,
        shmring.threads.Claim,
        "payload reply reply_nowait done fail time_out release share share_nowait to to_nowait on_gpu use_on_gpu on_abort "
        "client_id request_id for_engine name nbytes aborted ended released",
    ),
    Section(
        "`Client`: what `connect` returns",
        "client",
        shmring.Client,
        shmring.threads.Client,
        "request stream submit submit_nowait abort slot slot_nowait slots find keep call check_capacity choose loads "
        "wait_connected wait_prefaulted statistics close engines client_id connected closed lost_error epoch kept_nbytes "
        "resent names config",
    ),
    Section(
        "`EngineConnection`: what `client.engines` has for each engine",
        "engine",
        shmring.EngineConnection,
        shmring.threads.EngineConnection,
        "name connected client_id epoch lost_error kept_nbytes copies statistics",
    ),
    Section(
        "`EngineLoad`: what `client.loads()` says of an engine",
        "load",
        shmring.EngineLoad,
        shmring.EngineLoad,
        "in_flight waiting responds",
    ),
    Section(
        "`Submission`: a request at the frontend",
        "submission",
        shmring.Submission,
        shmring.threads.Submission,
        "result next wait abort request_id name engine ended has_replied",
    ),
    Section(
        "`Slot`: memory to write tensors into",
        "slot",
        shmring.Slot,
        shmring.threads.Slot,
        "tensor array close nbytes engine",
    ),
    Section("`Kept`: kept content", "kept", shmring.Kept, shmring.threads.Kept, "payload key nbytes close"),
    Section(
        "`Worker`: what `join` returns",
        "worker",
        shmring.Worker,
        shmring.threads.Worker,
        "receive receive_nowait close engine_is_stopped rank name epoch config",
    ),
    Section(
        "`Message`: what a worker receives",
        "message",
        shmring.Message,
        shmring.threads.Message,
        "payload beside wants_reply reply leave left answered sequence",
    ),
)

# Compiled, so that neither a flag nor an annotation says that they are awaited.
_COMPILED_AWAITED = frozenset(
    {"ring.claim", "ring.claim_many", "claim.reply", "client.submit", "submission.result", "submission.next", "submission.wait"}
)
# What they return is used with ``async with``, or awaited.
_BLOCKS = frozenset({"client.slot", "shmring.serve", "shmring.connect", "shmring.join"})


def make_page() -> str:
    """Returns the page's text: what stands before the tables now, and new tables."""
    by_hand, heading, _ = PAGE.read_text().partition(f"## {_OPENING}\n")
    assert heading
    opening = [
        _call(f"shmring.{name}", getattr(shmring, name), f"shmring.threads.{name}", getattr(shmring.threads, name, None))
        for name in ("serve", "connect", "join", "inspect", "nbytes_for")
    ]
    parts = [_table(_OPENING, opening)]
    parts.extend(_table(section.heading, [_row(section, name) for name in section.members.split()]) for section in SECTIONS)
    return by_hand + "\n".join(parts)


def _row(section: Section, name: str) -> str:
    label = f"{section.variable}.{name}"
    own, twin = (getattr(end, name, None) for end in (section.asyncio_class, section.blocking_class))
    if inspect.isroutine(own) or inspect.isroutine(twin):
        return _call(label, own, label, twin)
    texts = {**_attributes(section.blocking_class), **_attributes(section.asyncio_class)}
    ends = ["the same" if name in _attributes(end) else "" for end in (section.asyncio_class, section.blocking_class)]
    return _cells(f"`{label}`" if ends[0] else "", ends[1] if ends[0] else f"`{label}`", texts[name])


def _call(label: str, own: Callable[..., Any] | None, twin_label: str, twin: Callable[..., Any] | None) -> str:
    shown = "" if own is None else f"`{_before(label, own)}{_signature(label, own)}`"
    twin_shown = "" if twin is None else f"`{_signature(twin_label, twin)}`"
    if own is not None and twin is not None and _arguments(own) == _arguments(twin):
        twin_shown = "the same"
    return _cells(shown, twin_shown, _first_sentence(inspect.getdoc(own if own is not None else twin) or ""))


def _before(label: str, call: Callable[..., Any]) -> str:
    if label in _BLOCKS:
        return "async with "
    if inspect.isasyncgenfunction(call):
        return "async for ... in "
    if "nbytes_for" in label:
        return ""
    returned = str(getattr(call, "__annotations__", {}).get("return", ""))
    is_awaited = inspect.iscoroutinefunction(call) or returned.startswith("Awaitable") or label in _COMPILED_AWAITED
    return "await " if is_awaited else ""


def _arguments(call: Callable[..., Any]) -> str:
    parameters = [parameter for name, parameter in inspect.signature(call).parameters.items() if name != "self"]
    shown = [parameter.replace(annotation=inspect.Parameter.empty, default=_default(parameter)) for parameter in parameters]
    return str(inspect.Signature(shown))


def _signature(label: str, call: Callable[..., Any]) -> str:
    return label + _arguments(call).replace("**overrides", "**fields")


class _Shown:
    """A default as the page shows it."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is Any:
        return _Shown("Any")
    is_nothing = type(parameter.default) is object
    return _Shown("...") if is_nothing else parameter.default


def _attributes(end: type) -> dict[str, str]:
    """What the docstrings of a class and those above it, and of its properties, say of its attributes."""
    texts = {name: _first_sentence(paragraphs[0]) for name, paragraphs in descriptions(end).items()}
    for name in dir(end):
        member = inspect.getattr_static(end, name)
        if not name.startswith("_") and not inspect.isroutine(getattr(end, name)) and (text := inspect.getdoc(member)):
            texts[name] = _first_sentence(text)
    return texts


def _first_sentence(text: str) -> str:
    """Returns the first sentence of a docstring."""
    paragraph = re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0]
    return paragraph[:1].upper() + paragraph[1:].rstrip(".:") + "."


def _cells(*cells: str) -> str:
    return "| " + " | ".join(_markdown(cell) for cell in cells) + " |"


def _table(heading: str, rows: list[str]) -> str:
    return "\n".join([f"## {heading}", "", "| `shmring` | `shmring.threads` | |", "|---|---|---|", *rows]) + "\n"


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`"))
    return text.replace("|", "\\|").strip()


if __name__ == "__main__":
    PAGE.write_text(make_page())
