"""The pages: made of stored results and of nothing else, whichever modes there are; each number dated."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from bench import plots, report
from bench.__main__ import OF_A_RELEASE, main
from bench.command_line import Command
from bench.machine import ROOT, Machine, commit_of
from bench.messages import Case
from bench.results import Coverage, Findings, Gap, Planned, Status, Table, Verdict, write_json
from bench.transport import Stored
from tests.tables import for_each

RESULTS, DOCS = ROOT / "bench" / "results", ROOT / "docs"
BUDGET = report.Budget("4e1074dbf33b4594", {})
GOOD = Verdict("speed", "all", ">= 1 x", "2 x", True)
BAD = Verdict("speed", "all", ">= 1 x", "0.5 x", False, "small: 0.5")


def machine_of(commit: str | None, date: str = "2026-11-28", cpu: str = "1") -> Machine:
    names = ("kernel", "python", "torch", "numpy", "msgspec", "uvloop", "shmring")
    versions = dict.fromkeys(names, "1")
    return msgspec.convert({**versions, "cpu": cpu, "cores": 2, "memory_nbytes": 1, "commit": commit, "date": date}, Machine)


def findings_of(mode: str, *targets: Verdict, machine: Machine | None = None, **content: Any) -> Findings:
    return Findings(mode, machine or machine_of("0123456789ab"), targets=list(targets), **content)


def section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


# -- the pages that are there --------------------------------------------------------------------------------------------


def test_the_pages_say_what_their_generator_says_at_this_commit() -> None:
    made = report.pages(report.read(RESULTS), report.Budget.read())
    there = {str(path.relative_to(DOCS)): path.read_text() for path in (DOCS / "benchmarks").glob("*.md")}
    assert {"benchmarks.md": (DOCS / "benchmarks.md").read_text(), **there} == made, "python -m bench report"


def test_a_person_can_read_the_first_page() -> None:
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    assert len(lines) < 260
    of_runs = [findings for findings in report.read(RESULTS).values() if findings.machine is not None]
    assert all(findings.machine and findings.machine.date and findings.machine.commit for findings in of_runs)
    made = report.pages(report.read(RESULTS), report.Budget.read()).values()
    tables = [part for page in made for part in page.split("\n\n**")[1:] if "\n| claim |" in part]
    dated = re.compile(r"[\w-]+\*\*, measured on \d{4}-\d\d-\d\d, [0-9a-f]{8}\+?, [A-Z]\b.*\n\n\| claim \|")
    assert len(tables) == sum(page.count("\n| claim |") for page in made) > 10, "each table of claims is below a result"
    assert [part for part in tables if not dated.match(part)] == []


@for_each("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_is_stored_is_what_is_read(path: Path, tmp_path: Path) -> None:
    """No field that no report, plot or comparison knows; no single repetition or request."""
    findings = msgspec.json.decode(path.read_bytes(), type=Findings)
    results = msgspec.convert(findings.results, list[Stored]) if findings.mode == "transport" else None
    write_json(msgspec.structs.replace(findings, results=results), tmp_path / path.name)
    assert json.loads((tmp_path / path.name).read_bytes()) == json.loads(path.read_bytes())


@for_each("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_what_a_page_shows_can_be_measured_again(path: Path) -> None:
    """The command that it names is one, measures all of these, and claims no less."""
    findings = msgspec.json.decode(path.read_bytes(), type=Findings)
    command = main.commands.get(findings.mode)
    if not isinstance(command, Command):
        return
    assert shlex.split(findings.command)[:4] == ["python", "-m", "bench", findings.mode]
    options = command.make_context(findings.mode, shlex.split(findings.command)[4:]).params
    plan = command.plan.chosen(options["cases"], options["peers"])
    measured = {(plan.title(case), subject) for case, subjects in plan.cases.items() for subject in subjects}
    assert findings.coverage is not None
    assert {(each.case, subject) for each in findings.coverage.planned for subject in each.subjects} <= measured
    titles = {plan.titles.get(subject, subject) for _, subject in measured}
    assert {str(row[1]) for table in findings.tables if table.texts == (table.columns[1],) for row in table.rows} <= titles
    if not callable(plan.targets):
        claims = {(target.what, target.at) for target in plan.targets}
        assert {(each.what, each.at) for each in findings.targets} <= claims


def test_storing_a_result_does_not_say_of_the_next_one_that_its_code_has_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    names = ["bench/results/cost.json", "docs/benchmarks.md", "bench/cost.py"]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("before")
    assert commit_of(tmp_path) is None
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "all")
    said = []
    for name in names:
        (tmp_path / name).write_text("after")
        said.append(commit_of(tmp_path))
    assert [len(commit or "") for commit in said] == [12, 12, 12 + len("-dirty")]


# -- how they are made ---------------------------------------------------------------------------------------------------


def test_a_page_says_what_was_measured_and_when_and_where() -> None:
    reason = "not installed: pip install eclipse-zenoh"
    findings = findings_of(
        "transport",
        GOOD,
        Verdict("connecting", "any size", "<= 5 ms"),
        tables=[Table("messages per second", ["transport", "4 KB"], [["shmring, one copy", "100"], ["a|b", 1.5]])],
        notes=["Measured at night."],
        command="python -m bench transport --peer zenoh",
        coverage=Coverage([Planned("4 KB", ["zenoh"], 3)], [Gap("4 KB", "zenoh", 0, Status.EXCLUDED, reason)]),
    )
    stored = {"transport": findings, "soak": findings_of("soak", machine=machine_of("fedcba98-dirty", cpu="2"))}
    made = report.pages(stored, BUDGET)
    assert list(made) == ["benchmarks.md", "benchmarks/peers.md"]
    transport = section(made["benchmarks/peers.md"], "Transport")
    assert "01234567, A, by `python -m bench transport --peer zenoh`.\n\n| claim |" in transport
    assert "| speed | all | >= 1 x | 2 x | met |" in transport
    assert "connecting" not in transport, "nothing was measured, so it is no claim"
    assert "**transport**, measured on 2026-11-28, 01234567, A, by `python -m bench transport --peer zenoh`." in transport
    assert "messages per second:\n\n| transport | 4 KB |\n|---|---:|\n| shmring, one copy | 100 |\n| a/b | 1.5 |" in transport
    assert "- Measured at night." in transport
    assert f"| 4 KB | zenoh | not possible: {reason} |" in transport
    head = section(made["benchmarks.md"], "What was measured")
    assert "1 claims: 1 met, 0 missed" in head
    assert "| [transport](benchmarks/peers.md#transport) | 2026-11-28, 01234567, A | 0 of 1 measurements in 1 case" in head
    assert "| [soak](#soak) | 2026-11-28, fedcba98+, B | the plan is not known | 0 | 0 |" in head
    assert "\n| B | 2 | 2 |" in head


def test_what_a_row_has_in_common_with_the_one_above_is_said_once() -> None:
    def claim(what: str, at: str = "all") -> Verdict:
        return msgspec.structs.replace(GOOD, what=what, at=at)

    targets = [
        claim("copy: speed of a", "4 KB"),
        claim("copy: speed of a", "8 MB"),
        claim("copy: speed of b"),
        claim("latency"),
    ]
    table = Table("Speeds", ["case", "of"], [["4 KB", "a"], ["4 KB", "b"], ["8 MB", "b"]], grouped=True)
    made = report.pages({"cost": findings_of("cost", *targets, tables=[table, table])}, BUDGET)["benchmarks.md"]
    assert re.findall(r"^\| (.*?) ?\| (?:4 KB|8 MB|all) \|", made, re.MULTILINE) == [
        "copy: speed of a",
        "",
        "... speed of b",
        "latency",
    ]
    assert "| 4 KB | a |\n|  | b |\n| 8 MB | b |\n" in made


def test_what_is_left_to_the_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "_LEFT_TO_THE_FILE", {"cost": ("64 in flight", "8 MB")})
    rows = [["4 KB", "a"], ["8 MB", "a"], ["8 MB", "b"]]
    tables = [Table(f"{count} in flight", ["case", "of"], rows, grouped=True) for count in (16, 64)]
    made = report.pages({"cost": findings_of("cost", tables=tables)}, BUDGET)["benchmarks.md"]
    assert "16 in flight:\n\n| case | of |\n|---|---:|\n| 4 KB | a |\n\n- Not shown" in made
    assert "64 in flight:" not in made
    assert '- Not shown, but in `bench/results/cost.json`: "8 MB", "64 in flight".' in made


def test_a_miss_says_where_and_which_decision_explains_it() -> None:
    known = msgspec.structs.replace(BAD, what="fill", decision=8)
    made = report.pages({"cost": findings_of("cost", BAD, known)}, BUDGET)["benchmarks.md"]
    assert "| speed | all | >= 1 x | 0.5 x | missed: small: 0.5 |" in made
    assert "| fill | all | >= 1 x | 0.5 x | missed: decision 8: small: 0.5 |" in made
    assert "2 claims: 0 met, 2 missed (1 of them for a reason that a decision gives)" in made


@for_each(("first", "second", "said"), [("2026-11-27", "2026-11-28", "0.5 x"), ("2026-11-28", "2026-11-27", "2 x")])
def test_of_several_results_the_last_measurement_is_the_claim(first: str, second: str, said: str) -> None:
    stored = {
        "cost": findings_of("cost", GOOD, machine=machine_of("0" * 12, first)),
        "cost-again": findings_of("cost", BAD, machine=machine_of("1" * 12, second)),
        "cost-nothing": findings_of(
            "cost", msgspec.structs.replace(GOOD, met=None), machine=machine_of("2" * 12, "2026-11-29")
        ),
        "steps": findings_of("steps", GOOD),
    }
    made = report.pages(stored, BUDGET)["benchmarks.md"]
    assert f"| speed | all | >= 1 x | {said} |" in section(made, "Cost")
    assert made.count("| speed |") == 2
    assert section(made, "Cost").count("measured on") == 3, "each result is shown"


def test_what_was_allowed_to_grow_is_said() -> None:
    def said(**allowed: dict[str, object]) -> str:
        budget = msgspec.convert({"beside": "4e1074dbf33b", "allowed": allowed}, report.Budget)
        return report.pages({"cost": findings_of("cost", GOOD)}, budget)["benchmarks.md"].partition("## What")[0]

    assert "Nothing was allowed to grow since `4e1074db`. So claims of that commit and of later ones are carried" in said()
    grown = said(abort={"percent": 3.5, "why": "it is counted"})
    assert "but for what was allowed to grow since" in grown
    assert "| abort | 3.5 % | it is counted |" in grown


def test_a_mode_that_no_page_has_is_on_the_first_one() -> None:
    made = report.pages({"new": Findings("new", tables=[Table("Memory", ["a"], [])])}, BUDGET)
    assert "Memory:" in section(made["benchmarks.md"], "New")
    assert "| [new](#new) | not known |" in made["benchmarks.md"]


def test_pages_and_the_readmes_plot_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [Stored(Case(nbytes), peer, 100.0, 10.0, 1.0) for nbytes in (1 << 20, 64 << 20) for peer in ("shmring", "pyzmq")]
    write_json(findings_of("transport", results=drawn), tmp_path / "results" / "transport.json")
    paths: list[Path] = []
    monkeypatch.setattr(plots, "draw_overview", lambda stored, machine, path: paths.append(path))
    arguments = ["report", "--results", str(tmp_path / "results"), "--docs", str(tmp_path / "docs")]
    outcome = CliRunner().invoke(main, arguments)
    assert outcome.exit_code == 0, outcome.output
    assert paths == [tmp_path / "docs" / "speed.svg"]
    assert outcome.stdout.split() == [str(tmp_path / "docs" / name) for name in ("benchmarks.md", "benchmarks/peers.md")]
    assert "## Transport" in (tmp_path / "docs" / "benchmarks" / "peers.md").read_text()


# -- a release -----------------------------------------------------------------------------------------------------------


def test_all_that_a_release_claims_is_measured_and_a_miss_does_not_end_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode = 0

    def run(command: list[str], check: bool) -> Done:
        commands.append(command)
        done = Done()
        done.returncode = {"cost": 1, "serve": 3}.get(command[3], 0)
        return done

    monkeypatch.setattr("bench.__main__.subprocess.run", run)
    for name in ("cost", "cost-part", "serve-part"):
        write_json(findings_of(name), tmp_path / f"{name}.json")
    outcome = CliRunner().invoke(main, ["all", "--results", str(tmp_path), "--docs", str(tmp_path / "docs")])
    assert (outcome.exit_code, "ended: cost with 1, serve with 3" in outcome.stderr) == (1, True)
    assert tuple(command[3] for command in commands) == OF_A_RELEASE
    assert commands[0][4:] == ["--json", str(tmp_path / "transport.json")]
    assert {path.name for path in tmp_path.glob("*.json")} == {"cost.json", "serve-part.json"}, "parts of older runs are gone"
    assert "[cost](#cost)" in (tmp_path / "docs" / "benchmarks.md").read_text()
