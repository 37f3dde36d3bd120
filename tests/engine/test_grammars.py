"""Answers of random models have the form that was asked for, and no form costs anybody else anything."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from shmring.engine.executors.interface import ExecutorOptions, OverloadedError, StepInput
from shmring.engine.protocol import ChatMessage, GenerateRequest, SamplingParams, StructuredOutputsParams, TextPart
from tests.stepping import answer, run
from tests.tables import for_each

transformers = pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from shmring.engine.executors import grammars  # noqa: E402 - after the skip
from shmring.engine.executors.grammars import Grammars, form_of  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["é", "b"]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2},
    },
    "required": ["name", "age", "kind", "parts"],
    "additionalProperties": False,
    "$defs": {
        "part": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": False}
    },
}


@pytest.fixture(scope="module")
def executor(tiny_model: Callable[..., Path]) -> TransformersExecutor:
    return TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama"))))


@pytest.fixture(autouse=True)
def nothing_is_kept(executor: TransformersExecutor) -> Iterator[None]:
    yield
    assert (executor._answers, executor._grammars._awaited, executor._model.contexts.shelves) == ({}, {}, [])


def ask(text: str = "Hi", structure: StructuredOutputsParams | None = None, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**({"max_tokens": 300, "structured_outputs": structure} | sampling))
    return GenerateRequest([ChatMessage("user", [TextPart(text)])], sampling=params)


def told(executor: TransformersExecutor, request: GenerateRequest) -> tuple[str, str | None]:
    replies = answer(executor, request)
    assert sum(len(reply.token_ids) for reply in replies) == replies[-1].completion_tokens
    return "".join(reply.text for reply in replies), replies[-1].finish_reason


@for_each("seed", [*range(8), None])
def test_json_of_a_schema(executor: TransformersExecutor, seed: int | None) -> None:
    structure = StructuredOutputsParams(json=json.dumps(SCHEMA))
    sampling = {"temperature": 0} if seed is None else {"seed": seed, "temperature": 1.5, "top_p": 0.9, "presence_penalty": 1.0}
    text, reason = told(executor, ask(structure=structure, **sampling))
    assert reason == "stop"  # it has an end, since all in it has
    jsonschema_rs.validate(SCHEMA, json.loads(text))


def test_any_json_object_that_ends_is_one(executor: TransformersExecutor) -> None:
    ends = 0
    for seed in range(12):
        bias = {executor._checkpoint.tokenizer.convert_tokens_to_ids("}"): 12.0}
        text, reason = told(executor, ask(structure=StructuredOutputsParams(json_object=True), seed=seed, logit_bias=bias))
        if reason == "stop":
            assert isinstance(json.loads(text), dict)
            ends += 1
    assert ends > 3


def test_an_answer_that_is_cut_says_so(executor: TransformersExecutor) -> None:
    text, reason = told(executor, ask(structure=StructuredOutputsParams(json=json.dumps(SCHEMA)), max_tokens=3))
    assert (reason, text[:1]) == ("length", "{")


@for_each("ignore_eos", [False, True])
def test_a_pattern_and_a_choice_end_where_nothing_can_follow(executor: TransformersExecutor, ignore_eos: bool) -> None:
    pattern = r"[a-f]{3}-[0-9]+x"  # not \d: llguidance may know newer digits of Unicode than Python
    text, reason = told(executor, ask(structure=StructuredOutputsParams(regex=pattern), ignore_eos=ignore_eos))
    assert (re.fullmatch(pattern, text) is not None, reason) == (True, "stop")
    choice = ['say "no"\n', "日本\u001f", "\U0001f642", "|"]
    found = {
        told(executor, ask(structure=StructuredOutputsParams(choice=choice), ignore_eos=ignore_eos, seed=seed, temperature=2.0))
        for seed in range(30)
    }
    assert {reason for _, reason in found} == {"stop"}
    assert len(found) > 1
    assert {text for text, _ in found} <= set(choice)


def test_a_form_touches_no_other_answer(executor: TransformersExecutor) -> None:
    """Those beside it, in the same steps, are as they are alone."""
    free = {number: ask(f"Tell me {number}", temperature=0, max_tokens=60, ignore_eos=True) for number in (1, 2, 3)}
    formed = {9: ask(structure=StructuredOutputsParams(json=json.dumps(SCHEMA)), temperature=0)}
    alone = run(executor, free)
    beside = run(executor, free | formed)
    for number in free:
        assert [reply.token_ids for reply in beside[number]] == [reply.token_ids for reply in alone[number]]
    jsonschema_rs.validate(SCHEMA, json.loads("".join(reply.text for reply in beside[9])))


def test_several_answers_have_the_form_each(executor: TransformersExecutor) -> None:
    replies = answer(executor, ask(structure=StructuredOutputsParams(json=json.dumps(SCHEMA)), n=3, seed=3, temperature=1.5))
    texts = ["".join(reply.text for reply in replies if reply.index == index) for index in range(3)]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert len(set(texts)) > 1


def test_answers_of_a_form_do_not_use_up_each_others_states(executor: TransformersExecutor) -> None:
    """Each has a matcher of its own, although copies of one would be had for less."""
    properties = {name: {"type": "string", "maxLength": 4000} for name in "abcd"}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    form = form_of(StructuredOutputsParams(json=json.dumps(schema)))
    forms = Grammars(executor._checkpoint)
    tokenizer = executor._checkpoint.tokenizer
    for turn, long in enumerate("abcd" * 2):
        while (ready := forms.ready(turn, lambda: form, 2)) is None:
            forms.wait(1)
        text = json.dumps({name: "x" * (3600 if name == long else 1) for name in "abcd"})
        for grammar in ready:
            for token in tokenizer(text, add_special_tokens=False)["input_ids"]:
                grammar.take(token)


# -- forms that cost too much, or are none --------------------------------------------------------------------------------

COMBINED = {
    "allOf": [
        {"anyOf": [{"type": "object", "properties": {f"p{i}{j}": {"type": "string"}}} for j in range(4)]} for i in range(12)
    ]
}
WIDE = {"type": "object", "properties": {str(number): {} for number in range(10_000)}}
# Fits a stack of 8 MiB hardly or not: which of the two must be found out in a process.
LINKED = {
    "$ref": "#/$defs/a0",
    "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(1088)},
}
LINKED["$defs"]["a1088"] = {"type": "string"}  # type: ignore[index]
NESTED: dict[str, Any] = {"type": "string"}
for _ in range(150):
    NESTED = {"anyOf": [NESTED]}


@for_each(
    "structure",
    [
        StructuredOutputsParams(json="{"),
        StructuredOutputsParams(json="5"),
        StructuredOutputsParams(json='"x"'),
        StructuredOutputsParams(json=json.dumps({"type": "cat"})),
        StructuredOutputsParams(json=json.dumps({"$ref": "https://example.com/schema"})),
        StructuredOutputsParams(json=json.dumps({"$ref": "#/nowhere"})),
        StructuredOutputsParams(json="false"),
        StructuredOutputsParams(json=json.dumps({"not": {"type": "string"}})),
        StructuredOutputsParams(json=json.dumps(NESTED)),
        StructuredOutputsParams(json=json.dumps(COMBINED)),
        StructuredOutputsParams(regex="(("),
        StructuredOutputsParams(regex="(?=a)b"),
        StructuredOutputsParams(regex=r"[^\s\S]"),
        StructuredOutputsParams(regex="(" * 3000 + ")" * 3000),
        StructuredOutputsParams(regex="a" * 200_000),
        StructuredOutputsParams(regex="a?" * 20_000),
        StructuredOutputsParams(regex="(a*b)*" * 20_000),
        StructuredOutputsParams(json='{"type": "integer", "multipleOf": 199999993}'),
        StructuredOutputsParams(json=json.dumps(LINKED)),
        StructuredOutputsParams(choice=[str(number) for number in range(2000)]),
        StructuredOutputsParams(),
    ],
    ids=lambda structure: str(structure)[:80],
)
def test_what_can_not_be_compiled_is_the_callers_fault(
    executor: TransformersExecutor, structure: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_MAX_SECONDS", 1)  # of the processor: some take what they may
    for _ in range(2):  # and again, from what is kept
        with pytest.raises(ValueError, match="form of the answer") as caught:
            answer(executor, ask(structure=structure))
        assert len(str(caught.value)) < 500


def test_a_form_that_takes_too_long_is_given_up_and_nobody_waits_for_it(executor: TransformersExecutor) -> None:
    hostile = ask(structure=StructuredOutputsParams(json=json.dumps(WIDE)))
    (first, second) = executor.execute([StepInput(8, hostile), StepInput(2, ask(max_tokens=1))])
    assert first.keep_inputs  # type: ignore[union-attr]
    assert second.finished  # type: ignore[union-attr]
    formed = ask(structure=StructuredOutputsParams(choice=["quick"]))
    assert told(executor, formed) == ("quick", "stop")
    assert 8 in executor._grammars._awaited, "it is still being tried"
    outcome: Any = None
    while not isinstance(outcome, Exception):
        (outcome,) = executor.execute([StepInput(8, hostile)])
    assert "form of the answer" in str(outcome)  # it takes more than 2 s of a processor; a busy machine does not give it these


class DoneAMomentLater(Future[Any]):
    """A trial that ends between two looks at it."""

    looks = 0

    def done(self) -> bool:
        self.looks += 1
        return super().done() and self.looks > 1


def test_a_trial_may_end_while_it_is_looked_at(executor: TransformersExecutor) -> None:
    tried = DoneAMomentLater()
    tried.set_result(None)
    form = grammars.form_of(StructuredOutputsParams(choice=["quick"]))
    executor._grammars._awaited[8] = form, tried
    while (found := executor._grammars.ready(8, lambda: form)) is None:
        executor._grammars.wait(1.0)
    assert len(found) == 1


def test_a_form_that_nobody_waits_for_is_not_compiled(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    tried: list[str] = []

    def wait(form: grammars.Form, _: object) -> None:
        tried.append(form[1])
        go_on.wait(60)

    monkeypatch.setattr(grammars, "try_form", wait)
    forms = Grammars(executor._checkpoint)
    for number in range(20):
        assert forms.ready(number, lambda number=number: ("regex", f"a{number}")) is None
    forms.ready(30, lambda: ("regex", "a19"))
    for number in range(20):
        forms.forget(number)
    go_on.set()
    while forms.ready(30, lambda: ("regex", "a19")) is None:
        forms.wait(1)
    assert len(tried) <= grammars._THREADS + 1
    assert not forms._awaited


def test_closing_ends_what_is_being_tried(executor: TransformersExecutor) -> None:
    forms = Grammars(executor._checkpoint)
    for number in range(6):
        wide = json.dumps(WIDE | {"title": str(number)})
        assert forms.ready(number, lambda wide=wide: ("json", wide)) is None
    while not forms._trials:
        forms.wait(0.01)
    trials = list(forms._trials)
    forms.close()
    for trial in trials:
        trial.wait(60)
    forms._threads.shutdown(wait=True)
    assert {trial.returncode for trial in trials} == {-9}
    assert not forms._trials


def test_so_many_forms_are_kept(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "try_form", lambda *_: None)
    monkeypatch.setattr(grammars, "_KEPT", 3)
    forms = Grammars(executor._checkpoint)
    for number in (1, 2, 3, 1, 4, 5):
        form = "regex", f"a{number}"
        while forms.ready(number, lambda form=form: form) is None:
            forms.wait(1)
    assert [text for _, text in forms._kept] == ["a1", "a4", "a5"]


def test_more_forms_may_be_waited_for_than_are_kept(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "try_form", lambda *_: None)
    monkeypatch.setattr(grammars, "_KEPT", 2)
    forms = Grammars(executor._checkpoint)
    waiting = set(range(9))
    while waiting:
        waiting -= {number for number in waiting if forms.ready(number, lambda number=number: ("regex", f"a{number}"))}
        forms.wait(1)
    assert (len(forms._kept), forms._awaited) == (2, {})


@for_each(("error", "raised"), [(OverloadedError("busy"), OverloadedError), (OSError("no process"), RuntimeError)])
def test_what_may_succeed_another_time_is_tried_again(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, error: Exception, raised: type[Exception]
) -> None:
    forms = Grammars(executor._checkpoint)

    def fail(*_: object) -> None:
        raise error

    def ready() -> Any:
        while (grammar := forms.ready(1, lambda: ("regex", "a+"))) is None:
            forms.wait(1)
        return grammar

    with monkeypatch.context() as patch:
        patch.setattr(grammars, "try_form", fail)
        with pytest.raises(raised, match=str(error)):
            ready()
    monkeypatch.setattr(grammars, "try_form", lambda *_: None)
    assert ready() is not None


def test_a_form_that_has_no_turn_may_be_sent_again(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    structure = StructuredOutputsParams(choice=["red", "busy"])
    with monkeypatch.context() as patch:
        patch.setattr(grammars, "_TIMEOUT_S", 0.0)
        with pytest.raises(OverloadedError, match="was not compiled within 0 s; try again later"):
            answer(executor, ask(structure=structure))
    assert told(executor, ask(structure=structure))[0] in structure.choice


def test_a_failure_is_kept_without_its_frames(executor: TransformersExecutor) -> None:
    with pytest.raises(ValueError, match="form of the answer") as caught:
        answer(executor, ask(structure=StructuredOutputsParams(regex="((")))
    [kept] = [future for form, future in executor._grammars._kept.items() if form == ("regex", "((")]
    assert isinstance(kept, Future)
    assert kept.exception() is not caught.value


@for_each("lacking", ["library", "tokenizer"])
def test_without_the_library_or_a_fit_tokenizer_it_is_refused(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    with monkeypatch.context() as without:
        if lacking == "library":
            without.setitem(sys.modules, "llguidance", None)
        else:
            without.setattr(type(executor._checkpoint.tokenizer), "backend_tokenizer", None)
        with pytest.raises(ValueError, match=f"response_format.*{'llguidance' if lacking == 'library' else 'a tokenizer of'}"):
            answer(executor, ask(structure=StructuredOutputsParams(json_object=True)))


def test_min_tokens_can_not_be_asked_for_beside(executor: TransformersExecutor) -> None:
    with pytest.raises(ValueError, match="min_tokens can't"):
        answer(executor, ask(structure=StructuredOutputsParams(json_object=True), min_tokens=3))


def test_scores_beyond_the_tokenizers_tokens_are_left_out(executor: TransformersExecutor) -> None:
    forms = Grammars(executor._checkpoint)
    form = form_of(StructuredOutputsParams(choice=["a"]))
    while (ready := forms.ready(1, lambda: form)) is None:
        forms.wait(1)
    [grammar] = ready
    size = len(executor._checkpoint.tokenizer)
    token = executor._checkpoint.tokenizer.convert_tokens_to_ids("a")
    for count in (size + 100, size - 2):
        scores = np.zeros(count, np.float32)
        grammar.restrict(scores)
        assert np.flatnonzero(np.isfinite(scores)).tolist() == [token]
