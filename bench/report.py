"""``bench report``: docs/benchmarks.md and its plots, and the README's plot, from results that were stored.

Nothing is measured here and no number is written by hand: what the document says is in the JSON files beside it, and running
this again gives the same text. A transport run (``"mode": "transport"``) gives tables, plots, the targets, and the section
about where shmring is not the best choice, which is found by looking for peers that were better. Results of other modes
are shown as they tell it themselves (:class:`bench.results.Findings`).

A verdict counts while the code that it is about is the code that was measured (:mod:`bench.ages`). Others say that they are
stale, and what they were.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import click
import msgspec

from bench import ages, plots, targets
from bench.command_line import gaps_table, machine_line
from bench.fan_out import report as fan_out
from bench.gpu import command as gpu
from bench.isolation import command as isolation
from bench.messages import Case
from bench.modes import command_of
from bench.peers import FORMER, PEERS
from bench.records import Result, Results, peer_title, transport_tables
from bench.results import Coverage, Findings, Table, Verdict, checkout, format_nbytes, format_rate, format_times
from bench.serving import report as serving
from bench.sglang import command as sglang
from bench.vllm import command as vllm

_BETTER = 1.05  # by how much a peer must be better to be called that; less is within the spread of most cases

_HEAD = """\
# Benchmarks

`python -m bench report` makes this page from the JSON files in `bench/results/`. No number is written by hand. Look at the
ratios: both of their numbers come from one run on one machine. Another machine has other numbers.
"""

_METHOD = """\
The producer and the consumer are two processes, each with an event loop (uvloop). Every message is checked: its sequence
number, its dtype, its shape, and four samples of its content, which follow from the number. Each peer is used as its users use
it. The head of its file in `bench/peers/` says how, and what was done to make the comparison fair.

The repetitions of all transports take turns (A B C A B C), so that another program on the machine disturbs all of them alike. A
ratio is taken within each repetition, and the tables show medians. The base case has one producer, 16 messages in flight and
float32; the other cases change one of these each. At most 1 GB is in flight, so there are fewer large messages in flight: the
case says how many.

- **latency** is one-way. It begins before the producer hands a message to the transport, and ends when the consumer has the
  tensor. With several messages in flight, it includes the wait behind earlier ones. With one, it is the transport's own.
- **copied out**: the consumer copies every byte into a warm buffer of its own before the message counts, as an engine would.
- **CPU** is the user and system time of all threads of a process while it is timed. The benchmark's own stamps and checks are
  part of it; the daemons of a transport are not. What a process does only once is not part of it either: before the timing
  begins, all processes send for a while, and shmring has mapped the pages of its slab (about 0.2 s per GB).
- **resident memory** does not count shared memory and the tensor that is sent.
- **lag**: the event loop has a callback every 5 ms. The lag is the longest delay of one; waits for a core are not counted.
- **memcpy, cold** copies to another place each time, through four times the last-level cache. **memcpy, hot** copies to the
  same place each time. Both are glibc's, in one process, timed right after shmring's base case. shmring can be faster than the
  cold one, for two reasons: it uses the memory that was released last, so a small slot is still in the cache; and it copies a
  large tensor without reading the memory that it overwrites.
"""


_COUNTED = """\
A verdict counts as long as the code that was measured has not changed. The table above says how many commits have changed it
since then, up to {head}. A *stale* verdict is about older code: it is shown, and does not count. A verdict of unknown age does
not count either: this repository does not have its commit, or what was measured was in no commit.
"""

_GPU = "gpu"
#: Of modes, where a capital letter does not make them.
_NAMES = {_GPU: "GPU", "sglang": "SGLang", "vllm": "vLLM"}
#: What knows the targets of a mode; some know a plot, too.
_MODES = {_GPU: gpu, "fan-out": fan_out, "vllm": vllm, "sglang": sglang, "serve": serving, "isolation": isolation}


class ReportError(click.ClickException):
    """There is nothing to report, or a file holds something else."""


class _Mode(msgspec.Struct):
    mode: str


#: Results by the names of their files; transports first.
_Stored: TypeAlias = Mapping[str, Results | Findings]
#: How many commits have changed what a mode measures since a commit: see :func:`bench.ages.age`.
_Age: TypeAlias = Callable[[str, str | None], int | None]


def build(results_directory: Path, docs_directory: Path, age: _Age = ages.age) -> Path:
    """Writes ``benchmarks.md``, ``benchmarks/*.svg`` and ``speed.svg`` into the directory of documents.

    ``speed.svg`` is the README's plot, of the result that is called ``transport``.

    Args:
        results_directory, docs_directory: where results are, and where the document goes.
        age: of a result.

    Returns:
        The path of ``benchmarks.md``.

    Raises:
        ReportError: there is no result, or a file is none.
        MissingPlotter: matplotlib is not installed.
    """
    stored = _read(results_directory)
    sections = [_HEAD, "## Stored results\n", _stored_table(stored, age).markdown()]
    sections += ["## Targets\n", *_targets(stored, age), "## Method\n", _METHOD]
    for name, result in stored.items():
        drawn = _draw(results_directory / f"{name}.json", result, docs_directory / "benchmarks" / name)
        plotted = [f"![{path.stem}](benchmarks/{path.name})\n" for path in drawn]
        sections += _transport(name, result, plotted) if isinstance(result, Results) else _other(name, result, plotted)
    if isinstance(overview := stored.get("transport"), Results):
        plots.draw_overview(overview, docs_directory / "speed", kinds=("svg",))
    sections += ["## Measuring again\n", _again(stored)]
    path = docs_directory / "benchmarks.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(section.rstrip("\n") + "\n" for section in sections))
    return path


def status(results_directory: Path) -> Table:
    """Returns a table of the stored results: what each has of its plan, what sources it comes from, and how old it is.

    Raises:
        ReportError: there is no result, or a file is none.
    """
    return _stored_table(_read(results_directory), ages.age)


def _read(directory: Path) -> _Stored:
    stored: dict[str, Results | Findings] = {}
    for path in sorted(directory.glob("*.json"), key=lambda path: path.stem):
        content = path.read_bytes()
        try:
            mode = msgspec.json.decode(content, type=_Mode).mode
            kind: type[Results | Findings] = Results if mode == "transport" else Findings
            stored[path.stem] = msgspec.json.decode(content, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _wrong(path, error) from error
    if not stored:
        raise ReportError(f"no results in {directory}: python -m bench transport --json {directory / 'transport.json'}")
    return dict(sorted(stored.items(), key=lambda item: isinstance(item[1], Findings)))


def _wrong(path: Path, error: Exception) -> ReportError:
    return ReportError(f"{path} holds no results of a benchmark: {error}; measure again, or remove it")


def _draw(path: Path, result: Results | Findings, stem: Path) -> list[Path]:
    """Draws what there is to draw of a file; what another program has drawn of it is taken as it is."""
    if isinstance(result, Results):
        return plots.draw(result, stem, kinds=("svg",))
    if hasattr(_MODES.get(result.mode), "draw"):
        try:
            paths: list[Path] = _MODES[result.mode].draw(result, stem, kinds=("svg",))
            return paths
        except msgspec.ValidationError as error:
            raise _wrong(path, error) from error
    drawn = stem.with_suffix(".svg")
    return [drawn] if drawn.exists() else []


# -- of all results ----------------------------------------------------------------------------------------------------


def _commit(result: Results | Findings) -> str | None:
    return None if result.machine is None else result.machine.commit


def _stored_table(stored: _Stored, age: _Age) -> Table:
    columns = ["result", "measured, of what was planned", "sources", "the code that was measured, since then"]
    rows = []
    for name, result in sorted(stored.items()):
        measured = "the plan is not known" if result.coverage is None else result.coverage.summary()
        rows.append([name, measured, checkout(_commit(result)), ages.age_in_words(age(result.mode, _commit(result)))])
    return Table("stored results", columns, rows, texts=tuple(columns))


def _missing(coverage: Coverage | None) -> Iterator[str]:
    """What a result lacks of its plan."""
    if coverage is None:
        yield "The plan of this result is not known, so something may be missing.\n"
        return
    yield f"{coverage.summary()}.\n"
    if not coverage.complete:
        yield gaps_table(coverage).markdown()


class _Judged(NamedTuple):
    """A verdict; the name of the result that it comes from, and the age of that."""

    verdict: Verdict
    result: str = ""
    changes: int | None = None

    @property
    def counts(self) -> bool:
        """Whether it was measured, with the code as it is."""
        return self.verdict.met is not None and self.changes == 0

    @property
    def is_stale(self) -> bool:
        return self.verdict.met is not None and bool(self.changes)

    @property
    def word(self) -> str:
        if self.verdict.met is None or self.counts:
            return f"**{self.verdict.word}**"
        return f"{'stale' if self.is_stale else 'age unknown'}: was {self.verdict.word}"

    @property
    def place(self) -> tuple[str, str]:
        """What it is about."""
        return self.verdict.what, self.verdict.at


def _targets(stored: _Stored, age: _Age) -> Iterator[str]:
    """The table of targets, and how many of them are met and missed by the code as it is."""
    judged = list(_judged(stored, {name: age(result.mode, _commit(result)) for name, result in stored.items()}))
    counted = [one.verdict for one in judged if one.counts]
    met, missed = (sum(verdict.met is which for verdict in counted) for which in (True, False))
    explained = missed - sum(verdict.fails for verdict in counted)
    explained_too = f" ({explained} of them for a reason that a decision gives)" if explained else ""
    unmeasured = sum(one.verdict.met is None for one in judged)
    stale = sum(one.is_stale for one in judged)
    unknown = len(judged) - len(counted) - stale - unmeasured
    yield (
        f"{len(counted)} of {len(judged)} verdicts count: {met} met, {missed} missed{explained_too}. Not counted: {stale} "
        f"stale, {unknown} of unknown age, {unmeasured} not measured.\n"
    )
    yield _COUNTED.format(head=ages.head() or "the present one")
    rows = [
        (one.verdict.what, one.verdict.at, one.verdict.asked, one.verdict.measured, one.word, one.result, one.verdict.detail)
        for one in judged
    ]
    yield Table("", ["target", "at", "asked", "measured", "", "result", "in detail"], rows).markdown()


def _judged(stored: _Stored, changes: Mapping[str, int | None]) -> Iterator[_Judged]:
    """Of each target, what the longest run says that measured it, one of this code before others; or what another mode says."""
    runs = [(name, result) for name, result in stored.items() if isinstance(result, Results)]
    runs.sort(key=lambda run: (changes[run[0]] != 0, -run[1].repetitions * run[1].timed_s * len(run[1].results)))
    for target in targets.TARGETS:
        judged = [_Judged(target.judge(run), name, changes[name]) for name, run in runs]
        measured = [one for one in judged if one.verdict.met is not None]
        yield from [*measured, *judged][:1]
    told: dict[str, list[_Judged]] = {}
    for name, result in stored.items():
        if isinstance(result, Findings) and result.targets:
            told.setdefault(result.mode, []).extend(_Judged(verdict, name, changes[name]) for verdict in result.targets)
    for mode, module in _MODES.items():
        if mode not in told:
            detail = command_of(mode)
            yield from (_Judged(msgspec.structs.replace(verdict, detail=detail)) for verdict in module.announced())
    for of_mode in told.values():
        yield from _said_once(of_mode)


def _said_once(judged: Sequence[_Judged]) -> Iterator[_Judged]:
    """Leaves out what one run did not measure and another one did, or measured with older code than another one."""
    known = {one.place for one in judged if one.verdict.met is not None}
    counted = {one.place for one in judged if one.counts}
    for one in judged:
        if one.verdict.met is not None:
            if one.counts or one.place not in counted:
                yield one
        elif one.place not in known:
            known.add(one.place)
            yield one


def _again(stored: _Stored) -> str:
    """How each was measured, without peers that are measured no more; nothing, if it was of nothing else."""
    lines = []
    for name, result in sorted(stored.items()):
        typed = result.command or command_of(result.mode)
        command = re.sub(rf" --peer ({'|'.join(FORMER)})\b", "", typed)
        if "--peer" in command or "--peer" not in typed:
            lines.append(f"{command} --json bench/results/{name}.json")
    return "\n".join(["```sh", *lines, "python -m bench report", "```", ""])


# -- transports --------------------------------------------------------------------------------------------------------


def _transport(name: str, results: Results, plotted: Sequence[str]) -> Iterator[str]:
    yield f"## Transports ({name})\n"
    yield f"{machine_line(results.machine)}.\n"
    versions = ", ".join(f"{peer_title(peer)}: {version}" for peer, version in sorted(results.versions.items()))
    yield (
        f"Measured {results.started}; {results.repetitions} repetitions of {results.timed_s:g} s. In the minute before, "
        f"{results.load_before:.1f} processes wanted a core on average. {versions}.\n"
    )
    yield from plotted
    yield "### By size\n"
    yield from _by_size(results)
    yield "### Where shmring is not the best choice\n"
    yield from _not_best(results)
    yield "### Not measured\n"
    yield from _missing(results.coverage)
    yield "### Every case\n"
    yield "<details><summary>A table for each case, with costs and outer percentiles</summary>\n"
    yield "Where a cell has two numbers, the first is of the producers, the second of the consumer.\n"
    yield from _titled(transport_tables(results))
    yield "</details>\n"


def _titled(tables: Iterable[Table]) -> Iterator[str]:
    for table in tables:
        yield f"{table.title}:\n"
        yield table.markdown()


def _by_size(results: Results) -> Iterator[str]:
    """Tables of the base case: a row for each peer, a column for each size."""
    sizes = sorted({result.case.nbytes for result in results.results})
    for title, window, text in _SUMMARIES:
        cells = [
            (peer_title(result.peer), format_nbytes(result.case.nbytes), text(result))
            for result in results.results
            if result.case == Case(result.case.nbytes, window=window).bounded()
        ]
        if cells:
            yield f"{title}\n"
            yield Table.crossed(title, "transport", cells, [format_nbytes(nbytes) for nbytes in sizes]).markdown()


_SUMMARIES: tuple[tuple[str, int, Callable[[Result], str]], ...] = (
    ("Messages per second, 16 in flight:", 16, lambda result: format_rate(result.messages_per_s.median)),
    (
        "shmring with one copy, as multiples of the peer's messages per second, 16 in flight:",
        16,
        lambda result: format_times(result.shmring_ratio.median),
    ),
    ("One-way latency in microseconds, one in flight:", 1, lambda result: f"{result.latency_p50_us.median:,.0f}"),
    ("CPU microseconds per message, both sides, 16 in flight:", 16, lambda result: f"{result.cpu_us:,.0f}"),
)


# -- where it is not the best ------------------------------------------------------------------------------------------

_MEASURES: tuple[tuple[str, Callable[[Result], float]], ...] = (
    ("messages/s", lambda result: 1 / result.messages_per_s.median),
    ("median latency", lambda result: result.latency_p50_us.median),
    ("CPU per message", lambda result: result.cpu_us),
)


def _not_best(results: Results) -> Iterator[str]:
    """What the run has found, as a table for each of ours; then what no run needs to find."""
    yield (
        f"The tables have each case in which a peer was better by more than {_BETTER - 1:.0%}: the best peer, and how many "
        "times better it was. Transports that copy are compared with each other, and so are those that are written in place.\n"
    )
    for ours, title in (("shmring", "One copy"), ("shmring-in-place", "In place")):
        rows = list(_lost(results, ours))
        yield f"{title}:\n"
        columns = ["case", *(name for name, _ in _MEASURES)]
        yield Table(title, columns, rows).markdown() if rows else "No peer was better in any case.\n"
    yield (
        "Whatever the numbers say, shmring is not for you between machines, between parties that do not trust each other, or "
        "within one process: see the [README](../README.md#when-not-to-use-it).\n"
    )


def _lost(results: Results, ours: str) -> Iterator[tuple[str, ...]]:
    in_place = PEERS[ours].in_place
    for case in dict.fromkeys(result.case for result in results.results):
        mine = results.find(ours, case)
        others = [
            result
            for result in results.results
            if result.case == case and not result.peer.startswith("shmring")
            if result.peer in PEERS and PEERS[result.peer].in_place == in_place
        ]
        if mine is None or not others:
            continue
        cells = [_best_other(mine, others, number) for _, number in _MEASURES]
        if any(cells):
            yield case.title, *cells


def _best_other(mine: Result, others: Sequence[Result], number: Callable[[Result], float]) -> str:
    best = min(others, key=number)
    times = number(mine) / number(best)
    if times <= _BETTER:
        return ""
    spins = "" if PEERS[best.peer].event_driven else " (spins)"
    return f"{peer_title(best.peer)}{spins}: {format_times(times)}"


# -- other modes -------------------------------------------------------------------------------------------------------


def _other(name: str, findings: Findings, plotted: Sequence[str]) -> Iterator[str]:
    title = _NAMES.get(findings.mode) or findings.mode.capitalize()
    yield f"## {title}{'' if name == findings.mode else f' ({name})'}\n"
    if findings.machine is not None:
        yield f"{machine_line(findings.machine)}.\n"
    yield from plotted
    yield from _titled(findings.tables)
    if findings.notes:
        yield "\n".join(f"- {note}" for note in findings.notes) + "\n"
    if findings.coverage is None or not findings.coverage.complete:
        yield "Not measured:\n"
        yield from _missing(findings.coverage)
