"""``bench report``: docs/benchmarks.md and its plots, and the README's plot, from results that were stored.

What the document says is in the JSON files (:class:`bench.results.Findings`), and running this again gives the same text.
:mod:`bench.modes` says when a verdict counts.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeAlias

import click
import msgspec

from bench import modes, plots
from bench.command_line import gaps_table, machine_line
from bench.results import Findings, Table, Verdict, checkout
from bench.transport import Stored

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
ratio is taken within each repetition, and the tables show medians. Tensors are of float32. At most 1 GB is in flight, so there
are fewer large messages in flight.

- **latency** is one-way. It begins before the producer hands a message to the transport, and ends when the consumer has the
  tensor. With several messages in flight, it includes the wait behind earlier ones. With one, it is the transport's own.
- **CPU** is the user and system time of all threads of a process while it is timed. The benchmark's own stamps and checks are
  part of it; the daemons of a transport are not. What a process does only once is not part of it either: before the timing
  begins, all processes send for a while, and shmring has mapped the pages of its slab (about 0.2 s per GB).
- **resident memory** does not count shared memory and the tensor that is sent.
- **stall**: the event loop has a callback every 5 ms. A stall is the longest delay of one; waits for a core are not counted.
- **memcpy, cold** copies to another place each time, through four times the last-level cache. It is glibc's, in one process.
  shmring can be faster, for two reasons: it uses the memory that was released last, so a small slot is still in the cache; and
  it copies a large tensor without reading the memory that it overwrites.
- **where shmring is not the best choice**: each case in which a peer was better by more than 5 %; the best peer, and how many
  times better it was. Transports that copy are compared with each other, and so are those that are written in place. Whatever
  the numbers say, shmring is not for you between machines, between parties that do not trust each other, or within one process:
  see the [README](../README.md#when-not-to-use-it).
"""

_COUNTED = """\
A verdict counts as long as the code that was measured has not changed. The table above says how many commits have changed it
since then, up to {head}. A *stale* verdict is about older code: it is shown, and does not count. A verdict of unknown age does
not count either: this repository does not have its commit, or what was measured was in no commit.
"""

#: Of modes, where a capital letter does not make them.
_NAMES = {"gpu": "GPU", "sglang": "SGLang", "vllm": "vLLM"}


class ReportError(click.ClickException):
    """There is nothing to report, or a file holds something else."""


#: Results by the names of their files; transports first.
_Stored: TypeAlias = Mapping[str, Findings]
#: How many commits have changed what a mode measures since a commit: see :func:`bench.modes.age`.
_Age: TypeAlias = Callable[[str, str | None], int | None]


def build(results_directory: Path, docs_directory: Path, age: _Age = modes.age) -> Path:
    """Writes ``benchmarks.md``, ``benchmarks/*.svg`` and ``speed.svg`` into the directory of documents.

    ``speed.svg`` is the README's plot, of the result that is called ``transport``. Returns the path of ``benchmarks.md``.
    """
    stored = _read(results_directory)
    sections = [_HEAD, "## Stored results\n", _stored_table(stored, age).markdown()]
    sections += ["## Targets\n", *_targets(stored, age), "## Method of transports\n", _METHOD]
    for name, findings in stored.items():
        plot = docs_directory / "benchmarks" / f"{name}.svg"
        if findings.mode == "transport":
            try:
                drawn = msgspec.convert(findings.results, list[Stored])
            except msgspec.ValidationError as error:
                raise _wrong(results_directory / f"{name}.json", error) from error
            plots.draw(drawn, plot)
            if name == "transport":
                plots.draw_overview(drawn, findings.machine, docs_directory / "speed.svg")
        sections += _section(name, findings, plot)
    sections += ["## Measuring again\n", _again(stored)]
    path = docs_directory / "benchmarks.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(section.rstrip("\n") + "\n" for section in sections))
    return path


def status(results_directory: Path) -> Table:
    """Returns a table of the stored results: what each has of its plan, what sources it comes from, and how old it is."""
    return _stored_table(_read(results_directory), modes.age)


def _read(directory: Path) -> _Stored:
    stored: dict[str, Findings] = {}
    for path in sorted(directory.glob("*.json"), key=lambda path: path.stem):
        try:
            stored[path.stem] = msgspec.json.decode(path.read_bytes(), type=Findings)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _wrong(path, error) from error
    if not stored:
        raise ReportError(f"no results in {directory}: python -m bench transport --json {directory / 'transport.json'}")
    return dict(sorted(stored.items(), key=lambda item: item[1].mode != "transport"))


def _wrong(path: Path, error: Exception) -> ReportError:
    return ReportError(f"{path} holds no results of a benchmark: {error}; measure again, or remove it")


def _commit(findings: Findings) -> str | None:
    return None if findings.machine is None else findings.machine.commit


def _stored_table(stored: _Stored, age: _Age) -> Table:
    columns = ["result", "measured, of what was planned", "sources", "the code that was measured, since then"]
    rows = []
    for name, findings in sorted(stored.items()):
        measured = "the plan is not known" if findings.coverage is None else findings.coverage.summary()
        rows.append([name, measured, checkout(_commit(findings)), modes.age_in_words(age(findings.mode, _commit(findings)))])
    return Table("stored results", columns, rows, texts=tuple(columns))


# -- targets -------------------------------------------------------------------------------------------------------------


class _Judged(NamedTuple):
    """A verdict; the name and the mode of the result that it comes from, and the age of that."""

    verdict: Verdict
    result: str
    mode: str
    changes: int | None

    @property
    def counts(self) -> bool:
        """Whether it was measured, with the code as it is."""
        return self.verdict.met is not None and self.changes == 0

    @property
    def is_stale(self) -> bool:
        return self.verdict.met is not None and bool(self.changes)

    @property
    def row(self) -> tuple[str, ...]:
        """As the table has it; where the target is missed, with the numbers that say so."""
        verdict, word = self.verdict, f"**{self.verdict.word}**"
        if verdict.met is not None and not self.counts:
            word = f"{'stale' if self.is_stale else 'age unknown'}: was {verdict.word}"
        missed_at = verdict.detail if verdict.met is False else ""
        return verdict.what, verdict.at, verdict.asked, verdict.measured, word, missed_at, self.result


def _targets(stored: _Stored, age: _Age) -> Iterator[str]:
    """A table of targets for each mode, and how many of them are met and missed by the code as it is."""
    judged = _said_once(
        _Judged(verdict, name, findings.mode, age(findings.mode, _commit(findings)))
        for name, findings in stored.items()
        for verdict in findings.targets
    )
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
    yield _COUNTED.format(head=modes.head() or "the present one")
    for mode, of_mode in itertools.groupby(judged, key=lambda one: one.mode):
        yield f"### {_title(mode)}\n"
        columns = ["target", "at", "asked", "measured", "", "missed at", "result"]
        yield Table("", columns, [one.row for one in of_mode]).markdown()


def _said_once(judged: Iterator[_Judged]) -> list[_Judged]:
    """Of each target of a mode, what was measured with this code, else what was measured, else that nothing was."""
    found: dict[tuple[str, str, str], _Judged] = {}
    for one in judged:
        place = one.mode, one.verdict.what, one.verdict.at
        if place not in found or (one.counts, one.verdict.met is not None) > (
            found[place].counts, found[place].verdict.met is not None
        ):  # fmt: skip
            found[place] = one
    order = list(dict.fromkeys(one.mode for one in found.values()))
    return sorted(found.values(), key=lambda one: order.index(one.mode))


# -- each result ---------------------------------------------------------------------------------------------------------


def _title(mode: str) -> str:
    return _NAMES.get(mode) or mode.capitalize()


def _section(name: str, findings: Findings, plot: Path) -> Iterator[str]:
    yield f"## {_title(findings.mode)}{'' if name == findings.mode else f' ({name})'}\n"
    if findings.machine is not None:
        yield f"{machine_line(findings.machine)}.\n"
    if plot.exists():
        yield f"![{name}](benchmarks/{plot.name})\n"
    for table in findings.tables:
        yield f"{table.title}:\n"
        yield table.markdown()
    if findings.notes:
        yield "\n".join(f"- {note}" for note in findings.notes) + "\n"
    if findings.coverage is None:
        yield "Not measured:\n"
        yield "The plan of this result is not known, so something may be missing.\n"
    elif not findings.coverage.complete:
        yield "Not measured:\n"
        yield f"{findings.coverage.summary()}.\n"
        yield gaps_table(findings.coverage).markdown()


def _again(stored: _Stored) -> str:
    commands = {name: findings.command or f"python -m bench {findings.mode}" for name, findings in sorted(stored.items())}
    lines = [f"{command} --json bench/results/{name}.json" for name, command in commands.items()]
    return "\n".join(["```sh", *lines, "python -m bench report", "```", ""])
