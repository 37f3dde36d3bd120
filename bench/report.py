"""``bench report``: docs/benchmarks.md, the pages in docs/benchmarks/, and the README's plot, from results that were stored.

A page says what the JSON files say (:class:`bench.results.Findings`), and what has been allowed to grow since
(tests/instructions/budget.json); and nothing else: no clock, no git and no code that is measured. So the same files give the
same pages at every commit, and a test compares them with those that are there. Each number has its date, its commit and its
machine; it is about that commit, and is not judged again.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from bench import plots
from bench.columns import READING
from bench.machine import ROOT, Machine
from bench.results import Findings, Table, Verdict, format_nbytes
from bench.transport import Stored

#: Results by the names of their files.
_Results: TypeAlias = Mapping[str, Findings]


class _Page(NamedTuple):
    """A page, and the modes whose claims and tables it has; of a mode that no page has, they are on the first one."""

    path: str
    title: str
    modes: Sequence[str]
    head: str


_RULE = """\
`python -m bench report` makes this page from the JSON files in `bench/results/`, and a test compares them.

**A claim is dated.** It is about the commit and the machine that stand above its table: `2026-11-28, 8d5e5d60, A`. It is
measured again before a release, by `make bench-all`. In between, `make instructions` counts the instructions of a message, of
a request and of a chat beside an earlier commit: a commit that adds some fails, or allows them and says why. A claim is carried
as long as that has held since its commit.

In tables, an empty first cell, three dots at the beginning of a claim, and an empty cell below "at" stand for what the row
above has there.

Look at the ratios: both of their numbers come from one run on one machine. Another machine has other numbers.
"""

_PEERS = """\
Producer and consumer are two processes, each with an event loop (uvloop). Every message is checked: its sequence number, dtype,
shape, and four samples of its content. The head of a peer's file in `bench/peers/` says how it is used. At most 1 GB is in
flight, so there are fewer large messages in flight.

- **latency** is one-way: from before the producer hands a message over until the consumer has the tensor. With several messages
  in flight, it includes the wait behind earlier ones.
- **CPU** is that of a process while it is timed, the benchmark's own stamps and checks included; without the daemons of a
  transport, and without what is done once (shmring maps the pages of its slab, about 0.2 s per GB).
- **resident memory** does not count shared memory and the tensor that is sent.
- **stall**: the longest delay of a callback that an event loop has every 5 ms, without waits for a core.
- **memcpy, cold** is glibc's, in one process, to another place each time, through four times the last-level cache. shmring can
  be faster: a small slot is still in the cache, and a large tensor is copied without reading the memory that it overwrites.
- **where shmring is not the best choice**: each case in which a peer was better by more than 5 %; the best peer, and how many
  times better it was.
"""

_PAGES = (
    _Page("benchmarks.md", "Benchmarks", ("cost", "allocator", "steps", "soak"), _RULE),
    _Page("benchmarks/peers.md", "Beside other transports", ("transport", "request", "fan-out"), _PEERS),
    _Page("benchmarks/server.md", "Of the server", ("serve", "isolation"), ""),
    _Page("benchmarks/gpu.md", "On a GPU", ("gpu",), ""),
    _Page(
        "benchmarks/vllm.md",
        "Inside vLLM",
        ("vllm", "vllm-workers", "vllm-embeds", "vllm-encoders"),
        "What it means for users is in [vLLM](../vllm.md) and [stages](../stages.md#vllm-encoder-outputs).\n",
    ),
    _Page(
        "benchmarks/stages.md",
        "Between stages",
        ("omni",),
        "What it means for users is in [Stages](../stages.md#vllm-omnis-stages).\n",
    ),
    _Page("benchmarks/sglang.md", "Inside SGLang", ("sglang",), "What it means for users is in [SGLang](../sglang.md).\n"),
    _Page("benchmarks/ray.md", "In a Ray cluster", ("ray",), "What it means for users is in [Ray](../clusters.md).\n"),
)

_AGAIN = """\
```sh
make bench-all            # everything on this page, and beside other transports; 40 minutes on two idle cores
make gpu-hour             # needs a GPU; eight minutes
python -m bench vllm      # needs .venv-vllm (make test-vllm); so do `omni`, and `sglang` and `ray` theirs
python -m tests.soak --minutes 60 --frontends 3 --seed 1
python -m bench report    # writes the pages
```

Each but the last stores with `--json bench/results/NAME.json`; `make bench-all` does so by itself, and then writes the pages.
"""

#: Tables and groups of rows that the pages do not show, by result: what stands in their titles, or in their first cells.
_LEFT_TO_THE_FILE = {
    "cost": ("both ends in one process",),
    "fan-out": ("to 2 workers", "to 8 workers"),
    "isolation": ("how long a small request takes",),
    "ray": ("1 in flight",),
    "request": ("64 in flight", "of each of 4 clients"),
    "soak": ("soak",),
    "transport": ("as multiples of the peer's messages per second",),
    "vllm-new": ("1 API server", "2 API servers"),
}

#: Of modes, where a capital letter does not make them.
_NAMES = {
    "gpu": "GPU",
    "omni": "vLLM-Omni",
    "sglang": "SGLang",
    "vllm": "vLLM",
    "vllm-workers": "vLLM-workers",
    "vllm-embeds": "vLLM-embeds",
    "vllm-encoders": "vLLM-encoders",
}


class _Allowance(msgspec.Struct, frozen=True):
    percent: float
    why: str


class Budget(msgspec.Struct, frozen=True):
    """The commit that instructions are compared with, and which cases were allowed to take more of them since."""

    beside: str
    allowed: dict[str, _Allowance]

    @classmethod
    def read(cls) -> Budget:
        return msgspec.json.decode((ROOT / "tests" / "instructions" / "budget.json").read_bytes(), type=cls)

    def parts(self) -> Iterator[str]:
        commit = f"`{self.beside[:8]}`"
        rest = (
            f" (`git merge-base --is-ancestor {self.beside[:8]} COMMIT` succeeds for these);"
            " older ones say what was true at theirs.\n"
        )
        if not self.allowed:
            yield f"Nothing was allowed to grow since {commit}. So claims of that commit and of later ones are carried{rest}"
            return
        yield f"Claims of {commit} and of later commits are carried, but for what was allowed to grow since{rest}"
        rows = [(case, f"{allowance.percent:g} %", allowance.why) for case, allowance in self.allowed.items()]
        yield Table("", ["case", "more instructions", "why"], rows, texts=("why",)).markdown()


def build(results_directory: Path, docs_directory: Path) -> list[Path]:
    """Writes the pages, and ``speed.svg``, the README's plot of the result that is called ``transport``.

    Returns the paths of the pages.
    """
    stored = read(results_directory)
    if (findings := stored.get("transport")) is not None and findings.mode == "transport":
        drawn = msgspec.convert(findings.results, list[Stored])
        plots.draw_overview(drawn, findings.machine, docs_directory / "speed.svg")
    written = []
    for name, text in pages(stored, Budget.read()).items():
        written.append(docs_directory / name)
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(text)
    return written


def pages(stored: _Results, budget: Budget) -> dict[str, str]:
    """Returns the text of each page for which there is something, by its path; of the first one in any case."""
    made = {}
    for page in _PAGES:
        of_page = {
            name: findings
            for mode in dict.fromkeys((*page.modes, *(each.mode for each in stored.values())))
            for name, findings in stored.items()
            if findings.mode == mode and _page_of(mode) is page
        }
        if of_page or page is _PAGES[0]:
            made[page.path] = "\n".join(part.rstrip("\n") + "\n" for part in _parts(page, stored, of_page, budget))
    return made


def _page_of(mode: str) -> _Page:
    return next((page for page in _PAGES if mode in page.modes), _PAGES[0])


def _parts(page: _Page, stored: _Results, of_page: _Results, budget: Budget) -> Iterator[str]:
    machines = _Machines(stored)
    yield f"# {page.title}\n"
    if page.head:
        yield page.head
    if page is _PAGES[0]:
        yield from budget.parts()
        yield f"{READING}\n"
        yield "## What was measured\n"
        yield _summary(stored)
        yield runs_table(stored).markdown()
        yield machines.table().markdown()
    else:
        yield "Dates, machines, and what carries a claim: [benchmarks](../benchmarks.md#what-was-measured).\n"
    for mode, results in itertools.groupby(of_page.items(), key=lambda item: item[1].mode):
        yield from _section(mode, dict(results), machines)
    if page is _PAGES[0]:
        yield "## Measuring again\n"
        yield _AGAIN


# -- where and when ------------------------------------------------------------------------------------------------------


class _Machines:
    """The machines of results, each with a letter. What software they had is a part of them, the kernel's build is not."""

    def __init__(self, stored: _Results) -> None:
        rows = [self._row(findings.machine) for findings in stored.values() if findings.machine is not None]
        self._letters = {row: chr(ord("A") + number) for number, row in enumerate(dict.fromkeys(sorted(rows)))}

    def when(self, findings: Findings) -> str:
        """Returns when, of what commit and where a result was measured."""
        if (machine := findings.machine) is None:
            return "not known"
        return ", ".join((machine.date or "no date", _commit(machine), self._letters[self._row(machine)]))

    def table(self) -> Table:
        columns = ["machine", "processor", "cores", "memory, last-level cache", "software"]
        return Table("", columns, [(letter, *row) for row, letter in self._letters.items()], texts=tuple(columns))

    @staticmethod
    def _row(machine: Machine) -> tuple[str, ...]:
        memory = f"{machine.memory_nbytes / 2**30:.0f} GiB, {format_nbytes(machine.cache_nbytes)}"
        return machine.cpu, str(machine.cores), memory, machine.software


def _commit(machine: Machine) -> str:
    if machine.commit is None:
        return "no commit"
    clean = machine.commit.removesuffix("-dirty")
    return clean[:8] + "+" * (clean != machine.commit)


def runs_table(stored: _Results) -> Table:
    """Returns a table of results: when each was measured, what it has of its plan, and what became of its targets."""
    machines, rows = _Machines(stored), []
    for name, findings in sorted(stored.items(), key=lambda item: (_PAGES.index(_page_of(item[1].mode)), item[0])):
        page = _page_of(findings.mode)
        title = f"[{name}]({page.path if page is not _PAGES[0] else ''}#{_title(findings.mode).lower()})"
        planned = "the plan is not known" if findings.coverage is None else findings.coverage.summary()
        counts = [sum(each.met is met for each in findings.targets) for met in (True, False)]
        rows.append([title, machines.when(findings), planned, *counts])
    texts = ("measured on", "measured, of what was planned")
    return Table("", ["result", *texts, "met", "missed"], rows, texts)


def _summary(stored: _Results) -> str:
    verdicts = [verdict for verdict, _ in _said_once(stored)]
    missed = [verdict for verdict in verdicts if not verdict.met]
    explained = sum(not verdict.fails for verdict in missed)
    return (
        f"{len(verdicts)} claims: {len(verdicts) - len(missed)} met, {len(missed)} missed ({explained} of them for a reason "
        "that a decision gives).\nA `+` behind a commit: the checkout had changes that are in no commit.\n"
    )


# -- what ----------------------------------------------------------------------------------------------------------------


def _title(mode: str) -> str:
    return _NAMES.get(mode) or mode.capitalize()


def _section(mode: str, results: _Results, machines: _Machines) -> Iterator[str]:
    yield f"## {_title(mode)}\n"
    claims = _said_once(results)
    said: set[str] = set()
    for name, findings in results.items():
        command = f", by `{findings.command.strip()}`" if findings.command else ""
        yield f"**{name}**, measured on {machines.when(findings)}{command}.\n"
        if rows := [_claim(verdict) for verdict, of in claims if of is findings]:
            yield Table("", ["claim", "at", "asked", "measured", ""], list(_shortened(rows)), texts=("at", "")).markdown()
        left: list[str] = []
        for table in findings.tables:
            if not (kept := _shown(table, _LEFT_TO_THE_FILE.get(name, ()), left)):
                continue
            yield f"{kept.title}:\n"
            yield kept.markdown()
        notes = [" ".join(new) for note in findings.notes if (new := [each for each in _sentences(note) if each not in said])]
        said.update(itertools.chain(*map(_sentences, findings.notes)))
        if left:
            shown = ", ".join(f'"{words}"' for words in dict.fromkeys(left))
            notes.append(f"Not shown, but in `bench/results/{name}.json`: {shown}.")
        if notes:
            yield "\n".join(f"- {note}" for note in notes) + "\n"
        if findings.coverage is None:
            yield "The plan of this result is not known, so something may be missing.\n"
        elif not findings.coverage.complete:
            yield f"Not measured: {findings.coverage.summary()}.\n"
            yield findings.coverage.table().markdown()


def _shown(table: Table, words: Sequence[str], left: list[str]) -> Table | None:
    """Returns what a page shows of a table, and adds the words for what it does not show to ``left``."""
    if there := [each for each in words if each in table.title]:
        left += there
        return None
    of_rows = [each for each in words if table.grouped and any(each in str(row[0]) for row in table.rows)]
    left += of_rows
    return msgspec.structs.replace(table, rows=[row for row in table.rows if not any(each in str(row[0]) for each in of_rows)])


def _sentences(note: str) -> list[str]:
    return re.split(r"(?<=[.:]) (?=[A-Z])", note)


def _claim(verdict: Verdict) -> tuple[str, ...]:
    """A row; where the target is missed, with the numbers that say so."""
    word = f"{verdict.word}: {verdict.detail}" if verdict.met is False and verdict.detail else verdict.word
    return verdict.what, verdict.at, verdict.asked, verdict.measured, word


def _shortened(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Yields rows without what the row above has as well: a claim, its beginning up to a colon, and where it was measured."""
    for before, (what, at, *rest) in itertools.pairwise([("", ""), *rows]):
        head = "".join(before[0].rpartition(": ")[:2])
        is_alike = bool(head) and what.startswith(head)
        shown = "" if what == before[0] else f"... {what.removeprefix(head)}" if is_alike else what
        yield (shown, "" if is_alike and shown and at == before[1] else at, *rest)


def _said_once(results: _Results) -> list[tuple[Verdict, Findings]]:
    """Of each target of a mode what was measured last; what was not measured is no claim."""
    found: dict[tuple[str, str, str], tuple[Verdict, Findings]] = {}
    for findings in results.values():
        for verdict in findings.targets:
            before = found.get(key := (findings.mode, verdict.what, verdict.at))
            if verdict.met is not None and (before is None or _day(before[1]) <= _day(findings)):
                found[key] = verdict, findings
    return list(found.values())


def _day(findings: Findings) -> str:
    return "" if findings.machine is None else findings.machine.date


# -- files ---------------------------------------------------------------------------------------------------------------


def read(directory: Path) -> _Results:
    """Returns what is stored in a directory, by name."""
    paths = sorted(directory.glob("*.json"), key=lambda path: path.stem)
    return {path.stem: msgspec.json.decode(path.read_bytes(), type=Findings) for path in paths}
