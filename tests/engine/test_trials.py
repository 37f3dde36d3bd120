"""A form that passed its trial does not fail later; and no trial costs anybody else anything."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shmring.engine.executors.interface import OverloadedError
from tests.tables import for_each

transformers = pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from shmring.engine.executors import trials  # noqa: E402 - after the skip
from shmring.engine.executors.forms import Form  # noqa: E402
from shmring.engine.executors.grammars import Grammar, Grammars  # noqa: E402
from shmring.engine.executors.preparing import Stages  # noqa: E402
from shmring.engine.executors.shared_threads import Job  # noqa: E402
from shmring.engine.executors.trials import FormTokens, Trials  # noqa: E402
from tests.engine.forms import FORMS  # noqa: E402

_LIMIT_S = 60
_REFUSED = {"too many patterns", "an unknown format", "500 names, none required", "100000 times the same"}
_SLOW = ("regex", "(a{1000}){200}")  # takes all of its seconds: each mask takes a tenth


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Callable[..., Path]) -> Any:
    return transformers.AutoTokenizer.from_pretrained(tiny_model("llama"))


@pytest.fixture
def make_trials(tokenizer: Any) -> Iterator[Callable[[], Trials]]:
    made: list[Trials] = []

    def make() -> Trials:
        made.append(Trials(FormTokens(tokenizer)))
        return made[-1]

    yield make
    for each in made:
        each.close()
        assert each._process._program.process is None


def begin(trial_of: Trials, form: Form, owner: str = "") -> tuple[Stages[None], Job[str]]:
    """Has a form tried; returns what a request of it waits for."""
    stages = trial_of.stages(form, owner)
    job = next(stages).job
    assert job is not None
    return stages, job


def go_on(stages: Stages[None], job: Job[str]) -> None:
    """Waits for a trial; raises why a form can't be."""
    job.exception(_LIMIT_S)
    with pytest.raises(StopIteration):
        next(stages)


def outcome(trial_of: Trials, form: Form, owner: str = "") -> None:
    go_on(*begin(trial_of, form, owner))


def ready(grammars: Grammars, form: Form) -> Grammar:
    stages = grammars.stages(1, form, 1, "")
    while True:
        try:
            job = next(stages).job
        except StopIteration as stopped:
            [grammar] = stopped.value
            return grammar
        assert job is not None
        job.exception(_LIMIT_S)


@pytest.fixture(scope="module")
def grammars(tokenizer: Any) -> Iterator[Grammars]:
    made = Grammars(SimpleNamespace(tokenizer=tokenizer, eos_token_ids={tokenizer.eos_token_id}))  # type: ignore[arg-type]
    yield made
    made.close()


@pytest.mark.slow
@for_each("name", [*FORMS])
def test_what_passed_does_not_fail_later(grammars: Grammars, tokenizer: Any, name: str) -> None:
    """Answers of 200 tokens by chance; a fault is told before they have begun."""
    if name in _REFUSED:
        with pytest.raises(ValueError, match="form of the answer can't be compiled"):
            ready(grammars, FORMS[name])
        return
    for seed in range(3):
        grammar, chance = ready(grammars, FORMS[name]), random.Random(seed)
        for _ in range(200):
            while not grammar.is_ready():
                grammars.wait()
            scores = np.zeros(len(tokenizer), np.float32)
            grammar.restrict(scores)
            scores[tokenizer.eos_token_id] = -np.inf
            allowed = np.flatnonzero(np.isfinite(scores)).tolist()
            if not allowed:
                break
            # By turns: any token, one of the shortest, the longest of some.
            some = [chance.choice(allowed) for _ in range(8)]
            by_turns = some[0], chance.choice(allowed[:60]), max(some, key=lambda token: len(tokenizer.decode([token])))
            grammar.take(by_turns[seed])
            if grammar.complete:
                break
        grammars.forget(1)


@pytest.mark.slow
def test_a_trial_is_ended_when_it_has_used_its_seconds(make_trials: Callable[[], Trials]) -> None:
    _, trial = begin(make_trials(), _SLOW)
    assert trial.result(_LIMIT_S) == "it takes more than 2 s or 512 MiB"
    assert 1 < trial.seconds < 4


def test_trials_of_an_owner_wait_for_each_other_and_others_come_between(
    make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried, may_end = make_trials(), threading.Event()
    order: list[str] = []

    def run(_: object, grammar: str) -> tuple[str, float]:
        order.append(grammar)
        assert may_end.wait(_LIMIT_S)
        return "", 2.0

    monkeypatch.setattr(trials._TrialProcess, "run", run)
    many = [begin(tried, ("regex", f"a{number}"), "many") for number in range(8)]
    few = [begin(tried, ("regex", f"b{number}"), "few") for number in range(2)]
    while len(order) < 2:
        time.sleep(0.001)
    assert ("a0" in order[0], "b0" in order[1]) == (True, True)
    may_end.set()
    for stages, trial in many + few:
        go_on(stages, trial)


def test_a_form_that_nobody_waits_for_is_not_tried(make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch) -> None:
    tried, may_end = make_trials(), threading.Event()
    begun: list[str] = []

    def run(_: object, grammar: str) -> tuple[str, float]:
        begun.append(grammar)
        assert may_end.wait(_LIMIT_S)
        return "", 0.0

    monkeypatch.setattr(trials._TrialProcess, "run", run)
    entered = [begin(tried, ("regex", f"a{number}")) for number in range(20)]
    stages, last = begin(tried, ("regex", "a19"), "another")
    assert last is entered[19][1]
    while not begun:  # the first one, which is not given up any more
        time.sleep(0.001)
    for given_up, _ in entered:
        given_up.close()
    may_end.set()
    go_on(stages, last)
    assert len(begun) == 2
    assert len(tried._kept) == 2
    outcome(tried, ("regex", "a5"))  # it may be tried another time


def test_so_many_outcomes_are_kept(make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = make_trials()
    begun: list[str] = []
    monkeypatch.setattr(trials._TrialProcess, "run", lambda _, grammar: begun.append(grammar) or ("", 0.0))
    monkeypatch.setattr(trials, "_KEPT", 3)
    for number in (1, 2, 3, 1, 4, 5, 1, 4, 5):
        outcome(tried, ("regex", f"a{number}"))
    assert len(begun) == 5
    outcome(tried, ("regex", "a2"))
    assert len(begun) == 6


def test_more_may_be_waited_for_than_are_kept(make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = make_trials()
    monkeypatch.setattr(trials, "_KEPT", 2)
    for stages, trial in [begin(tried, ("regex", f"a{number}")) for number in range(9)]:
        go_on(stages, trial)
    assert len(tried._kept) == 2


def test_a_form_that_can_not_be_is_known_the_next_time(
    make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = make_trials()
    with pytest.raises(ValueError, match="form of the answer can't be compiled") as first:
        outcome(tried, ("regex", "(("))
    monkeypatch.setattr(trials._TrialProcess, "run", lambda *_: ("", 0.0))
    with pytest.raises(ValueError, match="form of the answer can't be compiled") as second:
        outcome(tried, ("regex", "(("))
    assert str(second.value) == str(first.value)


@for_each(("error", "raised"), [(OverloadedError("busy"), OverloadedError), (OSError("no process"), RuntimeError)])
def test_what_may_succeed_another_time_is_tried_again(
    make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error

    tried = make_trials()
    with monkeypatch.context() as patch:
        patch.setattr(trials._TrialProcess, "run", fail)
        with pytest.raises(raised, match=str(error)) as caught:
            outcome(tried, ("regex", "a+"))
        assert caught.value is not error, "it has frames"
    outcome(tried, ("regex", "a+"))


def test_a_form_that_has_no_turn_may_be_sent_again(make_trials: Callable[[], Trials], monkeypatch: pytest.MonkeyPatch) -> None:
    tried = make_trials()
    with monkeypatch.context() as patch:
        patch.setattr(trials, "_TIMEOUT_S", 0.0)
        with pytest.raises(OverloadedError, match="was not compiled within 0 s; try again later"):
            outcome(tried, ("regex", "a+"))
    outcome(tried, ("regex", "a+"))


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_child(tried: Trials) -> int:
    deadline_s = time.monotonic() + _LIMIT_S
    while time.monotonic() < deadline_s:
        process = tried._process._program.process
        if process is not None and (children := children_of(process.pid)):
            return children[0]
        time.sleep(0.001)
    raise AssertionError("no trial was begun")


@pytest.mark.slow
@for_each("times", [1, 2])
def test_the_death_of_a_trial_is_not_the_callers_fault(make_trials: Callable[[], Trials], times: int) -> None:
    tried = make_trials()
    stages, trial = begin(tried, _SLOW)
    killed = set()
    while len(killed) < times:
        child = wait_for_child(tried)
        if child not in killed:
            os.kill(child, signal.SIGKILL)
            killed.add(child)
    if times == 1:
        assert trial.result(_LIMIT_S) == "it takes more than 2 s or 512 MiB"
    else:
        with pytest.raises(RuntimeError, match="forms can't be tried: something ends the processes"):
            go_on(stages, trial)
    outcome(tried, ("regex", "a+"))


@pytest.mark.slow
def test_the_process_that_forks_trials_is_started_again(make_trials: Callable[[], Trials]) -> None:
    tried = make_trials()
    _, trial = begin(tried, _SLOW)
    child = wait_for_child(tried)
    process = tried._process._program.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    assert trial.result(_LIMIT_S) == "it takes more than 2 s or 512 MiB"
    assert tried._process._program.process is not process
    outcome(tried, ("regex", "a+"))
    assert not Path(f"/proc/{child}").exists(), "it ended with the process that had forked it"


def test_closing_ends_what_is_being_tried(make_trials: Callable[[], Trials]) -> None:
    tried = make_trials()
    running = [begin(tried, _SLOW, owner) for owner in "ab"]
    stages, waiting = begin(tried, ("regex", "a+"), "a")
    child = wait_for_child(tried)
    tried.close()
    for _, trial in running:
        with pytest.raises(RuntimeError, match="forms can't be tried"):
            trial.result(_LIMIT_S)
    assert waiting.cancelled()
    stages.close()
    deadline_s = time.monotonic() + _LIMIT_S
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
