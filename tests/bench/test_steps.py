"""``bench steps`` measures steps in which each answer gets a token and no prompt is read."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from bench import step_program, steps
from bench.machine import ROOT
from shmring.engine.executors.interface import ExecutorOptions

pytest.importorskip("transformers")

from shmring.engine.executors import passes
from shmring.engine.executors.transformers import TransformersExecutor


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TransformersExecutor]:
    """Reads prompts in small pieces, by a clock that it moves: a step costs 1,000 s if it reads a prompt, or 1 s an answer."""
    monkeypatch.setattr(passes, "_PIECE_TOKENS", 7)
    monkeypatch.setattr(passes, "_IDLE_TOKENS", 20)
    path = importlib.import_module("tests.engine.tiny_models").write_tiny_model(tmp_path / "llama", "llama")
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    clock = SimpleNamespace(now=0)
    advance = executor._model.advance

    def cost(pieces: Any) -> Any:
        clock.now += 1000 if any(context.prompt is not None for context, _ in pieces) else len(pieces)
        return advance(pieces)

    monkeypatch.setattr(executor._model, "advance", cost)
    now = lambda: clock.now  # noqa: E731 - two clocks, of which one would do
    monkeypatch.setattr(step_program, "time", SimpleNamespace(process_time=now, perf_counter=now))
    yield executor
    executor.close()


@pytest.mark.slow
def test_steps_count_in_which_all_answers_are_written(executor: TransformersExecutor) -> None:
    found = step_program._measure_case(executor, 40, 3, 50)
    assert found["CPU ms a step, 40 x 3"] == 3000
    assert found["all CPU s, 40 x 3 + 50"] > 3000, "prompts, too, which were read in several steps"


def test_a_case_without_such_a_step_is_no_measurement(executor: TransformersExecutor) -> None:
    with pytest.raises(RuntimeError, match="40 x 3: the first answer has ended before the last one began"):
        step_program._measure_case(executor, 40, 3, 4)


def test_choosing_is_measured_by_what_is_asked_for() -> None:
    found = step_program.measure_choosing(3000)
    assert [name.partition(", ")[2] for name in found] == list(step_program.OPTIONS)
    assert all(milliseconds > 0 for milliseconds in found.values())


@pytest.mark.slow
def test_the_program_runs_beside_any_bench(tmp_path: Path) -> None:
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "shmring").symlink_to(ROOT / "shmring")
    command = [sys.executable, "-P", "-c", f"import runpy; runpy.run_path({str(steps.PROGRAM)!r})"]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_is_no_peer_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(steps.steps_command, ["--beside", str(tmp_path)])
    assert result.exit_code == 2
    assert f"{tmp_path} is no checkout of shmring" in result.output


def test_the_same_prompts_and_answers_are_compared() -> None:
    ours, theirs = {"all CPU s, 32 x 1 + 128": 2.0, "CPU ms a step": 9.0}, {"all CPU s, 32 x 1 + 128": 3.0}
    findings = steps.PLAN.findings({"steps of the executor": {"this": [ours], "generate_batch": [theirs]}})
    assert [(verdict.measured, verdict.met) for verdict in findings.targets] == [("1.5 x", True)]
    assert [row[:3] for row in findings.tables[0].rows] == [
        ["all CPU s, 32 x 1 + 128", "this", "2.0"],
        ["all CPU s, 32 x 1 + 128", "generate_batch", "3.0"],
        ["CPU ms a step", "this", "9.0"],
    ]


@pytest.mark.slow  # it imports all that a model needs, in a process
def test_a_peer_that_fails_is_named_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(steps.BenchError, match=f"transformers of {steps.ROOT}: ValueError: Unrecognized model"):
        steps._measure(steps.ROOT, "this", tmp_path)


@pytest.mark.slow  # a thread of transformers' own
def test_transformers_own_batching_writes_as_many_tokens(tmp_path: Path) -> None:
    path = importlib.import_module("tests.engine.tiny_models").write_tiny_model(tmp_path / "llama", "llama")
    found = step_program.measure_continuous(str(path), [(9, 1), (40, 3)], 5)
    assert list(found) == ["all CPU s, 9 x 1 + 5", "all CPU s, 40 x 3 + 5"]
    assert all(seconds > 0 for seconds in found.values())
