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
from bench.allocation.command import Result as Filled
from bench.cost import Cost
from bench.fan_out import report as fan_out
from bench.gpu.command import Plotted
from bench.machine import ROOT
from bench.messages import Case
from bench.records import Results
from bench.results import Coverage, Findings, Planned, Spread, Status, write_json
from bench.vllm import command as vllm
from tests.tables import for_each

Make = Callable[..., Any]
KB = 1 << 10


@pytest.fixture
def stored(tmp_path: Path, made_result: Make, made_results: Make) -> Path:
    """A directory with a transport run in which inline msgpack is faster at 4 KB and iceoryx2 nowhere."""
    directory = tmp_path / "results"
    found = []
    for window in (16, 1):
        for nbytes, inline in ((4 * KB, 200.0), (64 * KB, 50.0)):
            case = Case(nbytes, window=window)
            found += [
                made_result("shmring", case, [100.0] * 3),
                made_result("shmring-in-place", case, [150.0] * 3, ratio=100 / 150),
                made_result("inline-msgpack", case, [inline] * 3, ratio=100 / inline),
                made_result("iceoryx2-loaned", case, [103.0] * 3, ratio=100 / 103, cpu_us=30.0),
            ]
    key, reason = (Case(4 * KB).title, "zenoh"), "not installed: pip install eclipse-zenoh"
    coverage = Coverage.of([Planned(key[0], ["zenoh"], 3)], {}, {key: (Status.EXCLUDED, reason)})
    results = msgspec.structs.replace(made_results(found, {4 * KB: 1e6, 64 * KB: 1e5}), coverage=coverage)
    write_json(results, directory / "transport.json")
    return directory


def other(directory: Path, name: str, **content: Any) -> None:
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the plots out, which take most of the time."""
    monkeypatch.setattr(plots, "draw", lambda results, stem, kinds: [])
    monkeypatch.setattr(plots, "draw_overview", lambda results, stem, kinds: [])


def read(path: Path) -> Results:
    return msgspec.json.decode(path.read_bytes(), type=Results)


def current(mode: str, commit: str | None) -> int | None:
    """The age of results of the code as it is."""
    return 0


def section(text: str, title: str) -> str:
    return text.partition(f"{title}\n")[2].partition("\n#")[0]


def test_results_are_read_back_as_they_were_written(stored: Path, made_results: Make) -> None:
    results = read(stored / "transport.json")
    assert results.find("shmring", Case(4 * KB)) is not None
    write_json(results, stored / "again.json")
    assert (stored / "again.json").read_bytes() == (stored / "transport.json").read_bytes()


@for_each("path", sorted((ROOT / "bench" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_what_is_stored_is_what_is_read(path: Path, tmp_path: Path) -> None:
    """No field that no report, plot or comparison knows; no single repetition or request of a mode that draws none."""
    content = json.loads(path.read_bytes())
    if content["mode"] == "transport":
        write_json(read(path), tmp_path / path.name)
    else:
        findings = msgspec.json.decode(path.read_bytes(), type=Findings)
        drawn = {"vllm": list[vllm.Stored], "fan-out": list[fan_out.Stored], "gpu": Plotted, "cost": list[Cost]}
        compared = {"allocator": list[Filled]}
        kind: Any = (drawn | compared).get(findings.mode)
        results = None if kind is None else msgspec.convert(findings.results, kind)
        write_json(msgspec.structs.replace(findings, results=results), tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_bytes()) == content


def test_a_document_says_what_was_measured(stored: Path, tmp_path: Path) -> None:
    text = report.build(stored, tmp_path / "docs").read_text()
    assert "A Processor, 2 cores" in text
    assert "not installed: pip install eclipse-zenoh" in section(text, "### Not measured")
    assert "**not measured**" in section(text, "## Targets")
    assert "| shmring, one copy | 100 | 100 |" in section(text, "### By size")
    every_case = section(text, "### Every case")
    assert "4 KB of float32, 1 producer, window 16" in every_case
    assert every_case.count("<details>") == every_case.count("</details>") == 1
    for name in ("throughput", "latency"):
        assert f"(benchmarks/transport-{name}.svg)" in text
        assert (tmp_path / "docs" / "benchmarks" / f"transport-{name}.svg").exists()


@pytest.mark.usefixtures("undrawn")
def test_it_says_where_others_are_better(stored: Path, tmp_path: Path) -> None:
    lost = section(report.build(stored, tmp_path / "docs").read_text(), "### Where shmring is not the best choice")
    copy, _, in_place = lost.partition("In place:")
    assert "| 4 KB of float32, 1 producer, window 16 | inline msgpack, same socket: 2.00 x |" in copy
    assert "64 KB" not in copy
    assert "iceoryx2" not in copy  # it copies nothing, so that it is no peer of what copies
    assert "No peer was better" in in_place


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
    results = read(stored / "transport.json")
    write_json(msgspec.structs.replace(results, command="python -m bench quick"), stored / "short.json")
    other(stored, "serve", mode="serve", command="python -m bench serve --preset pr32104")
    again = report.build(stored, tmp_path / "docs").read_text().partition("## Measuring again")[2]
    assert "python -m bench quick --json bench/results/short.json" in again
    assert "python -m bench transport --json bench/results/transport.json" in again
    assert "python -m bench serve --preset pr32104 --json bench/results/serve.json" in again


@pytest.mark.usefixtures("undrawn")
def test_of_two_runs_the_longer_one_judges_what_it_measured(stored: Path, tmp_path: Path) -> None:
    results = read(stored / "transport.json")
    faster = [
        msgspec.structs.replace(one, producer=msgspec.structs.replace(one.producer, connect_ms=Spread(9.0, 9.0, 9.0)))
        for one in results.results
    ]
    longer = msgspec.structs.replace(results, repetitions=results.repetitions + 1, results=faster)
    write_json(longer, stored / "longer.json")
    targets = section(report.build(stored, tmp_path / "docs", age=current).read_text(), "## Targets")
    [connecting] = [line for line in targets.splitlines() if line.startswith("| connecting")]
    assert "**missed**" in connecting
    assert targets.count("| connecting") == 1


@pytest.mark.usefixtures("undrawn")
def test_targets_of_other_modes_stand_with_the_rest(stored: Path, tmp_path: Path) -> None:
    target = {"what": "fill", "at": "a trace", "asked": ">= 90 %", "measured": "93 %", "met": True}
    other(stored, "allocator", mode="allocator", tables=[], targets=[target])
    found = section(report.build(stored, tmp_path / "docs", age=current).read_text(), "## Targets")
    assert "| fill | a trace | >= 90 % | 93 % | **met** | allocator |  |" in found
    assert "fill at first failure" not in found  # what was only announced


def test_of_a_mode_all_results_judge(stored: Path, tmp_path: Path) -> None:
    for name in ("serve", "serve-repeated"):
        target = {"what": f"target of {name}", "at": "all", "asked": ">= 1 x", "measured": "2 x", "met": True}
        other(stored, name, mode="serve", targets=[target])
    text = report.build(stored, tmp_path / "docs").read_text()
    assert "target of serve |" in text
    assert "target of serve-repeated |" in text


def test_what_one_run_leaves_out_is_not_missing_if_another_measured_it(stored: Path, tmp_path: Path) -> None:
    target = {"what": "speed", "at": "all", "asked": ">= 1 x"}
    nowhere = target | {"what": "memory"}
    other(stored, "serve", mode="serve", targets=[target | {"measured": "2 x", "met": True}, nowhere])
    other(stored, "serve-more", mode="serve", targets=[target, nowhere])
    found = section(report.build(stored, tmp_path / "docs", age=current).read_text(), "## Targets")
    assert "| speed | all | >= 1 x | 2 x | **met** |" in found
    assert (found.count("| speed |"), found.count("| memory |")) == (1, 1)


# -- verdicts of other code ----------------------------------------------------------------------------------------------


def machine_of(commit: str) -> dict[str, Any]:
    names = ("cpu", "kernel", "python", "torch", "numpy", "msgspec", "uvloop", "shmring")
    return {**dict.fromkeys(names, "1"), "cores": 2, "memory_nbytes": 1, "commit": commit}


def of_age(changes: dict[str | None, int | None]) -> Callable[[str, str | None], int | None]:
    return lambda mode, commit: changes.get(commit)


def test_a_verdict_of_other_code_says_so_and_is_not_counted(tmp_path: Path) -> None:
    good = {"what": "a", "at": "all", "asked": ">= 1 x", "measured": "2 x", "met": True}
    bad = good | {"what": "b", "measured": "0.5 x", "met": False}
    directory = tmp_path / "results"
    other(directory, "serve", mode="serve", machine=machine_of("new"), targets=[good, bad])
    other(directory, "vllm", mode="vllm", machine=machine_of("old"), results=[], targets=[good, bad])
    other(directory, "fan-out", mode="fan-out", machine=machine_of("nobody's"), results=[], targets=[bad])
    text = report.build(directory, tmp_path / "docs", age=of_age({"new": 0, "old": 7})).read_text()
    found = section(text, "## Targets")
    assert "verdicts count: 1 met, 1 missed. Not counted: 2 stale, 1 of unknown age, " in found
    assert "| a | all | >= 1 x | 2 x | **met** | serve |" in found
    assert "| b | all | >= 1 x | 0.5 x | **missed** | serve |" in found
    assert "| a | all | >= 1 x | 2 x | stale: was met | vllm |" in found
    assert "| b | all | >= 1 x | 0.5 x | stale: was missed | vllm |" in found
    assert "| b | all | >= 1 x | 0.5 x | age unknown: was missed | fan-out |" in found
    ages = {row.split(" | ")[0].strip("| "): row.split(" | ")[-1] for row in section(text, "## Stored results").splitlines()}
    assert (ages["serve"], ages["vllm"], ages["fan-out"]) == ("the same |", "changed by 7 commits |", "not known |")


@pytest.mark.usefixtures("undrawn")
def test_a_run_of_this_code_judges_before_a_longer_one_of_other_code(stored: Path, tmp_path: Path) -> None:
    results = read(stored / "transport.json")
    machine = msgspec.structs.replace(results.machine, commit="old")
    write_json(msgspec.structs.replace(results, repetitions=99, machine=machine), stored / "longer.json")
    text = report.build(stored, tmp_path / "docs", age=of_age({"abc": 0, "old": 1})).read_text()
    [connecting] = [line for line in section(text, "## Targets").splitlines() if line.startswith("| connecting")]
    assert "| **met** | transport |" in connecting


def test_what_was_measured_again_with_this_code_is_said_once(tmp_path: Path) -> None:
    target = {"what": "speed", "at": "all", "asked": ">= 1 x", "measured": "0.5 x", "met": False}
    directory = tmp_path / "results"
    other(directory, "serve", mode="serve", machine=machine_of("old"), targets=[target])
    other(directory, "serve-new", mode="serve", machine=machine_of("new"), targets=[target | {"measured": "2 x", "met": True}])
    text = report.build(directory, tmp_path / "docs", age=of_age({"old": 1, "new": 0})).read_text()
    [speed] = [line for line in section(text, "## Targets").splitlines() if line.startswith("| speed")]
    assert "| 2 x | **met** | serve-new |" in speed


def test_what_isolation_will_be_held_against_is_announced(tmp_path: Path) -> None:
    other(tmp_path, "soak", mode="soak")
    text = report.build(tmp_path, tmp_path / "docs").read_text()
    assert "| p99 of small requests beside: " in text
    assert "## Isolation" not in text
    other(tmp_path, "isolation", mode="isolation", tables=[{"title": "Waits", "columns": ["a"], "rows": [[1]]}])
    text = report.build(tmp_path, tmp_path / "docs").read_text()
    assert "Waits:" in section(text, "## Isolation")
    assert "python -m bench isolation --json bench/results/isolation.json" in text


def test_a_document_without_transports_is_one_too(tmp_path: Path) -> None:
    other(tmp_path / "results", "soak", mode="soak", tables=[{"title": "Memory", "columns": ["a"], "rows": []}])
    assert "## Soak" in report.build(tmp_path / "results", tmp_path / "docs").read_text()


@pytest.mark.parametrize("content", ["{}", "[", '{"mode": "transport"}', '{"mode": "x", "tables": [1]}'])
def test_a_file_that_holds_something_else_is_an_error(stored: Path, tmp_path: Path, content: str) -> None:
    (stored / "wrong.json").write_text(content)
    arguments = ["report", "--results", str(stored), "--docs", str(tmp_path / "docs")]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 1
    assert "wrong.json holds no results of a benchmark" in outcome.stderr


def test_nothing_to_report_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(report.ReportError, match="python -m bench transport --json"):
        report.build(tmp_path, tmp_path / "docs")
