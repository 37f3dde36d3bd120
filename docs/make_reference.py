"""The tables of docs/reference.md, made of the code: ``python docs/make_reference.py`` writes them, and a test compares.

What stands around the tables is written by hand, in the page. Where :func:`tables` has the heading of a section, the rows of
its first table are made anew.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

import shmring
import shmring.threads
from shmring.engine.__main__ import main as engine_command
from shmring.engine.executors.synthetic import SyntheticOptions
from shmring.engine.executors.transformers import TransformersOptions
from shmring.engine.metrics import EngineMetrics
from shmring.engine.store.__main__ import main as store_command
from shmring.frontend.__main__ import main as frontend_command
from shmring.frontend.commands.ray_options import DeploymentSettings
from shmring.frontend.commands.serve import serve as serve_command
from shmring.frontend.errors import ErrorCode
from shmring.frontend.media.decoder_pool import DecoderStatistics
from shmring.frontend.operator.metrics import COUNTED
from shmring.service.flags import descriptions
from shmring.service.numbers import described
from shmring.service.option_table import Option

PAGE = Path(__file__).with_name("reference.md")

Row = Sequence[str]


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
        "claim claim_nowait claim_many run run_batches injector drain take take_named untaken wait_workers ranks broadcast "
        "broadcast_nowait gather drop_worker statistics inspect add_to_snapshots close name config epoch address",
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
        "request stream submit submit_nowait abort slot slot_nowait slots find find_many find_nowait wait_kept keep "
        "keep_nowait call check_capacity choose loads "
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
        "`Keeping`: content that will be kept",
        "keeping",
        shmring.Keeping,
        shmring.threads.Keeping,
        "key ended error wait",
    ),
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

# What is said of `shmring.threads`, where it differs.
_NOT_THERE, _ONLY_THERE = " Not in threads.", " In threads only."

_DEFAULT_IN_HELP = re.compile(r"\s*\[default: (.*?)\]")
_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))

# Records of numbers, and whether their tables say what only grows.
_NUMBERS: dict[str, tuple[type, bool]] = {
    "The decoders of one frontend: `decoders` of `GET /health`": (DecoderStatistics, False),
    "The engine: `EngineClient.statistics()`": (EngineMetrics, True),
    "The engine's end of the ring: `ring.statistics()`": (shmring.RingStatistics, True),
    "A worker: each of `ring.statistics().workers`": (shmring.WorkerStatistics, False),
    "A frontend's end of the ring: `client.statistics()`": (shmring.ClientStatistics, False),
}
_METRICS = "`GET /metrics`"


def make_page() -> str:
    """Returns the page's text: what stands around the tables now, and new tables.

    Raises:
        LookupError: a table of numbers has a row that no number makes.
    """
    page = PAGE.read_text()
    for heading, rows in tables().items():
        page = _with_rows(page, heading, "".join(f"| {' | '.join(map(_markdown, row))} |\n" for row in rows))
    return page


def tables() -> dict[str, Iterable[Row]]:
    """Returns the rows of each table, by the heading of its section."""
    opening = ("serve", "connect", "join", "inspect", "start_store", "nbytes_for")
    codes = sorted(ErrorCode, key=lambda code: code.status)
    return {
        "Opening an end": [
            _call(f"shmring.{name}", getattr(shmring, name), f"shmring.threads.{name}", getattr(shmring.threads, name, None))
            for name in opening
        ],
        **{section.heading: [_member(section, name) for name in section.members.split()] for section in SECTIONS},
        "What callers of the server get": [(str(code.status), f"`{code}`", code.meaning) for code in codes],
        "`shmring serve`": _options(serve_command),
        "`shmring engine`": _options(engine_command, beside=serve_command),
        "`shmring frontend`": _options(frontend_command, beside=serve_command),
        "`shmring store`": _options(store_command, beside=serve_command),
        "`shmring.frontend.ray:app`, on Ray Serve": _fields(DeploymentSettings),
        "`RingConfig`": _fields(shmring.RingConfig),
        "`ClientConfig`": _fields(shmring.ClientConfig),
        "`WorkerConfig`": _fields(shmring.WorkerConfig),
        "`--executor-options` of the executor `transformers`": _fields(TransformersOptions),
        "`--executor-options` of the executor `synthetic`": _fields(SyntheticOptions),
        _METRICS: [
            (f"`{each.exposed_name}`", each.kind, each.unit, each.text)
            for each in COUNTED
            if not each.name.startswith("shmring_engine_") or each.labels or not each.source
        ],
        **{heading: _numbers(record, says_kind) for heading, (record, says_kind) in _NUMBERS.items()},
    }


def _with_rows(page: str, heading: str, rows: str) -> str:
    before, title, section = page.partition(f"\n### {heading}\n")
    assert title, f"{PAGE.name} has no section {heading}"
    intro, head, old, rest = re.split(r"(^\|[-:|]+\|\n)((?:\|.*\n)*)", section, maxsplit=1, flags=re.MULTILINE)
    if heading in (_METRICS, *_NUMBERS) and (unknown := [name for name in _names(old) if name not in _names(rows)]):
        raise LookupError(
            f"{PAGE.name}, {heading}: no number is called {', '.join(unknown)}. Make it a field of its record, with a "
            "Number(...) (shmring/service/numbers.py), and run this again; if it has gone, delete the row"
        )
    return f"{before}{title}{intro}{head}{rows}{rest}"


def _names(table: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)


def _markdown(text: str) -> str:
    text = re.sub(r":\w+:`~?([^`]*)`", r"`\1`", text.replace("``", "`"))
    return text.replace("|", "\\|").strip()


# -- calls -----------------------------------------------------------------------------------------------------------------


def _member(section: Section, name: str) -> Row:
    label = f"{section.variable}.{name}"
    own, twin = (getattr(end, name, None) for end in (section.asyncio_class, section.blocking_class))
    if inspect.isroutine(own) or inspect.isroutine(twin):
        return _call(label, own, label, twin)
    own_texts, twin_texts = attributes(section.asyncio_class), attributes(section.blocking_class)
    where = _NOT_THERE if name not in twin_texts else _ONLY_THERE if name not in own_texts else ""
    return f"`{label}`", f"{(twin_texts | own_texts)[name]}{where}"


def _call(label: str, own: Callable[..., Any] | None, twin_label: str, twin: Callable[..., Any] | None) -> Row:
    if own is None:
        assert twin is not None
        return f"`{_signature(twin_label, twin)}`", f"{_first_sentence(inspect.getdoc(twin) or '')}{_ONLY_THERE}"
    where = _NOT_THERE if twin is None else _in_threads(own, twin_label, twin)
    return f"`{_before(label, own)}{_signature(label, own)}`", f"{_first_sentence(inspect.getdoc(own) or '')}{where}"


def _in_threads(own: Callable[..., Any], twin_label: str, twin: Callable[..., Any]) -> str:
    """Says what differs in arguments: those that are there besides, else all."""
    here, there = _parameters(own), _parameters(twin)
    more = [parameter for parameter in there if parameter not in here]
    if [parameter for parameter in there if parameter not in more] != here:
        return f" In threads: `{_signature(twin_label, twin)}`"
    shown = ", ".join(str(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)) for parameter in more)
    return f" In threads also: `{shown}`" if more else ""


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


def _parameters(call: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = [parameter for name, parameter in inspect.signature(call).parameters.items() if name != "self"]
    return [parameter.replace(annotation=inspect.Parameter.empty, default=_default(parameter)) for parameter in parameters]


def _arguments(call: Callable[..., Any]) -> str:
    return str(inspect.Signature(_parameters(call)))


def _signature(label: str, call: Callable[..., Any]) -> str:
    return label + _arguments(call).replace("**overrides", "**fields")


class _Shown(str):
    """A default as the page shows it."""

    def __repr__(self) -> str:
        return str(self)


def _default(parameter: inspect.Parameter) -> Any:
    if parameter.default is Any:
        return _Shown("Any")
    is_nothing = type(parameter.default) is object
    return _Shown("...") if is_nothing else parameter.default


def attributes(end: type) -> dict[str, str]:
    """Returns what the docstrings of a class and those above it, and of its properties, say of its attributes."""
    texts = {name: _first_sentence(paragraphs[0]) for name, paragraphs in descriptions(end).items()}
    for name in dir(end):
        member = inspect.getattr_static(end, name)
        if not name.startswith("_") and not inspect.isroutine(getattr(end, name)) and (text := inspect.getdoc(member)):
            texts[name] = _first_sentence(text)
    return texts


def _first_sentence(text: str) -> str:
    paragraph = re.split(r"(?<=[.:]) (?=[A-Z`])", " ".join(text.split("\n\n")[0].split()))[0]
    return paragraph[:1].upper() + paragraph[1:].rstrip(".:") + "."


# -- options and fields ----------------------------------------------------------------------------------------------------


def _options(command: click.Command, beside: click.Command | None = None) -> list[Row]:
    """Returns a row for each option, but for those that mean the same beside another command."""
    known = _described(beside) if beside is not None else []
    return [row for row in _described(command) if row not in known]


def _described(command: click.Command) -> list[Row]:
    rows = []
    for option in command.params:
        if isinstance(option, Option) and not option.hidden:
            text = option.help or ""
            stated = _DEFAULT_IN_HELP.search(text)
            default = stated[1] if stated else _value(option.default, option.name or "")
            meaning = f"{_DEFAULT_IN_HELP.sub('', text)} {option.reasons}"
            rows.append((", ".join(f"`{opt}`" for opt in option.opts), default, meaning))
    return rows


def _fields(record: type) -> list[Row]:
    """Returns a row for each field; one that an option describes in the same words names that."""
    options = {_letters(meaning): name for name, _, meaning in _described(serve_command)}
    texts = {field: " ".join(paragraphs) for field, paragraphs in descriptions(record).items()}
    meanings = {field: f"as {options[said]}" if (said := _letters(text)) in options else text for field, text in texts.items()}
    return [(f"`{field}`", _value(default, field), meanings[field]) for field, default in _defaults(record).items()]


def _letters(text: str) -> str:
    return re.sub(r"\W", "", text).lower()


def _defaults(record: type) -> dict[str, Any]:
    if issubclass(record, msgspec.Struct):
        return {field.name: field.default for field in msgspec.structs.fields(record)}
    instance = record()
    return {field.name: getattr(instance, field.name) for field in dataclasses.fields(record)}


def _value(value: Any, name: str) -> str:
    if value is None or value == () or "UNSET" in repr(value).upper():  # what click has in place of no default
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and "nbytes" in name:
        for size, unit in _UNITS:
            if value and value % size == 0:
                return f"{value // size}{unit}"
    return f"`{value}`" if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


# -- numbers ---------------------------------------------------------------------------------------------------------------


def _numbers(record: type, says_kind: bool) -> list[Row]:
    rows = []
    for name, each in described(record):
        kind = "identity" if each.unit == "identity" else each.kind
        rows.append((f"`{name}`", *([kind] if says_kind else []), each.unit, each.text))
    return rows


if __name__ == "__main__":
    try:
        PAGE.write_text(make_page())
    except LookupError as error:
        sys.exit(str(error))
