"""The document: made of stored results and of nothing else, whichever modes there are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench import plots, report
from bench.__main__ import main
from bench.allocation.command import Stored as Filled
from bench.machine import ROOT, Machine
from bench.messages import Case
from bench.results import Coverage, Findings, Planned, Status, Table, Verdict, write_json
from bench.transport import Stored
from tests.tables import for_each


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory with a transport run."""
    directory = tmp_path / "results"
    columns, reason = ["transport", "4 KB"], "not installed: pip install eclipse-zenoh"
    findings = Findings(
        "transport",
        msgspec.convert(machine_of("abc"), Machine),
        tables=[Table("messages per second, 1 producer, 16 in flight", columns, [["shmring, one copy", "100"]])],
        targets=[Verdict("connecting", "any size", "<= 5 ms", "2 ms", True), Verdict("speed", "64 MB", ">= 1 x")],
        results=[
            Stored(Case(nbytes, window=window), peer, 100.0, 10.0, 1.0)
            for nbytes in (4096, 1 << 20, 64 << 20)
            for window in (16, 1)
            for peer in ("shmring", "pyzmq")
        ],
        coverage=Coverage.of([Planned("4 KB", ["zenoh"], 3)], {}, {("4 KB", "zenoh"): (Status.EXCLUDED, reason)}),
    )
    write_json(findings, directory / "transport.json")
    return directory


def other(directory: Path, name: str, **content: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the plots out, which take most of the time."""
    monkeypatch.setattr(plots, "draw", lambda stored, path: False)
    monkeypatch.setattr(plots, "draw_overview", lambda stored, machine, path: False)


def current(mode: str, commit: str | None) -> int | None:
    """The age of results of the code as it is."""
    return 0


def section(text: str, title: str) -> str:
    return text.partition(f"\n{title}\n")[2].partition("\n#")[0]


@for_each("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_what_is_stored_is_what_is_read(path: Path, tmp_path: Path) -> None:
    """No field that no report, plot or comparison knows; no single repetition or request."""
    findings = msgspec.json.decode(path.read_bytes(), type=Findings)
    kind: Any = {"allocator": list[Filled], "transport": list[Stored]}.get(findings.mode)
    results = None if kind is None else msgspec.convert(findings.results, kind)
    write_json(msgspec.structs.replace(findings, results=results), tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_bytes()) == json.loads(path.read_bytes())


def test_a_document_says_what_was_measured(stored: Path, tmp_path: Path) -> None:
    text = report.build(stored, tmp_path / "docs", age=current).read_text()
    transport = section(text, "## Transport")
    assert "1, 2 cores" in transport
    assert "not installed: pip install eclipse-zenoh" in transport
    assert "| shmring, one copy | 100 |" in transport
    assert "(benchmarks/transport.svg)" in transport
    assert (tmp_path / "docs" / "benchmarks" / "transport.svg").exists()
    assert (tmp_path / "docs" / "speed.svg").exists()
    targets = section(text, "### Transport")
    assert "| connecting | any size | <= 5 ms | 2 ms | **met** |  | transport |" in targets
    assert "| speed | 64 MB | >= 1 x |  | **not measured** |  | transport |" in targets
    assert "1 of 2 verdicts count: 1 met, 0 missed. Not counted: 0 stale, 0 of unknown age, 1 not measured." in text


@pytest.mark.usefixtures("undrawn")
def test_other_modes_are_shown_as_they_tell_it(stored: Path, tmp_path: Path) -> None:
    other(
        stored,
        "request",
        mode="request",
        results=[{"ignored": 1}],
        tables=[{"title": "Round trips", "columns": ["peer", "per second"], "rows": [["shmring", 21000], ["a|b", 1.5]]}],
        notes=["Measured at night."],
    )
    text = report.build(stored, tmp_path / "docs").read_text()
    shown = section(text, "## Request")
    assert "Round trips:\n\n| peer | per second |\n|---|---:|\n| shmring | 21000 |\n| a/b | 1.5 |" in shown
    assert "- Measured at night." in shown
    assert "python -m bench request --json bench/results/request.json" in text


@pytest.mark.usefixtures("undrawn")
def test_how_to_measure_again_is_what_was_typed(stored: Path, tmp_path: Path) -> None:
    other(stored, "short", mode="transport", results=[], command="python -m bench quick")
    other(stored, "serve", mode="serve", command="python -m bench serve --preset pr32104")
    again = report.build(stored, tmp_path / "docs").read_text().partition("## Measuring again")[2]
    assert "python -m bench quick --json bench/results/short.json" in again
    assert "python -m bench transport --json bench/results/transport.json" in again
    assert "python -m bench serve --preset pr32104 --json bench/results/serve.json" in again


def test_of_several_results_what_was_measured_is_said_once(tmp_path: Path) -> None:
    nothing = {"what": "speed", "at": "all", "asked": ">= 1 x", "measured": "", "met": None}
    something = nothing | {"measured": "2 x", "met": True}
    for name, targets in (
        ("serve", [nothing]),
        ("serve-more", [something]),
        ("serve-same", [something]),
        ("soak", [something]),
    ):
        other(tmp_path / "results", name, mode=name.partition("-")[0], targets=targets)
    text = report.build(tmp_path / "results", tmp_path / "docs", age=current).read_text()
    assert "| speed | all | >= 1 x | 2 x | **met** |  | serve-more |" in section(text, "### Serve")
    assert "| speed | all | >= 1 x | 2 x | **met** |  | soak |" in section(text, "### Soak")
    assert text.count("| speed |") == 2


# -- verdicts of other code ----------------------------------------------------------------------------------------------


def machine_of(commit: str) -> dict[str, Any]:
    names = ("cpu", "kernel", "python", "torch", "numpy", "msgspec", "uvloop", "shmring")
    return {**dict.fromkeys(names, "1"), "cores": 2, "memory_nbytes": 1, "commit": commit}


def of_age(changes: dict[str | None, int | None]) -> Callable[[str, str | None], int | None]:
    return lambda mode, commit: changes.get(commit)


def test_a_verdict_of_other_code_says_so_and_is_not_counted(tmp_path: Path) -> None:
    good = {"what": "a", "at": "all", "asked": ">= 1 x", "measured": "2 x", "met": True}
    bad = good | {"what": "b", "measured": "0.5 x", "met": False, "detail": "it varies"}
    directory = tmp_path / "results"
    other(directory, "serve", mode="serve", machine=machine_of("new"), targets=[good, bad])
    other(directory, "vllm", mode="vllm", machine=machine_of("old"), results=[], targets=[good, bad])
    other(directory, "fan-out", mode="fan-out", machine=machine_of("nobody's"), results=[], targets=[bad])
    text = report.build(directory, tmp_path / "docs", age=of_age({"new": 0, "old": 7})).read_text()
    found = text.partition("## Targets")[2].partition("\n## ")[0]
    assert "verdicts count: 1 met, 1 missed. Not counted: 2 stale, 1 of unknown age, " in found
    assert "| a | all | >= 1 x | 2 x | **met** |  | serve |" in found
    assert "| b | all | >= 1 x | 0.5 x | **missed** | it varies | serve |" in found
    assert "| a | all | >= 1 x | 2 x | stale: was met |  | vllm |" in found
    assert "| b | all | >= 1 x | 0.5 x | stale: was missed | it varies | vllm |" in found
    assert "| b | all | >= 1 x | 0.5 x | age unknown: was missed | it varies | fan-out |" in found
    ages = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1] for row in section(text, "## Stored results").splitlines()}
    assert (ages["serve"], ages["vllm"], ages["fan-out"]) == ("the same |", "changed by 7 commits |", "not known |")


def test_what_was_measured_again_with_this_code_is_said_once(tmp_path: Path) -> None:
    target = {"what": "speed", "at": "all", "asked": ">= 1 x", "measured": "0.5 x", "met": False}
    directory = tmp_path / "results"
    other(directory, "serve", mode="serve", machine=machine_of("old"), targets=[target])
    other(directory, "serve-new", mode="serve", machine=machine_of("new"), targets=[target | {"measured": "2 x", "met": True}])
    text = report.build(directory, tmp_path / "docs", age=of_age({"old": 1, "new": 0})).read_text()
    [speed] = [line for line in section(text, "### Serve").splitlines() if line.startswith("| speed")]
    assert "| 2 x | **met** |  | serve-new |" in speed


def test_a_document_without_transports_is_one_too(tmp_path: Path) -> None:
    other(tmp_path / "results", "soak", mode="soak", tables=[{"title": "Memory", "columns": ["a"], "rows": []}])
    assert "## Soak" in report.build(tmp_path / "results", tmp_path / "docs").read_text()


@for_each("content", ["{}", "[", '{"mode": "transport", "results": [1]}', '{"mode": "x", "tables": [1]}'])
def test_a_file_that_holds_something_else_is_an_error(stored: Path, tmp_path: Path, content: str) -> None:
    (stored / "wrong.json").write_text(content)
    arguments = ["report", "--results", str(stored), "--docs", str(tmp_path / "docs")]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 1
    assert "wrong.json holds no results of a benchmark" in outcome.stderr


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="python -m bench transport --json"):
        report.build(tmp_path, tmp_path / "docs")
