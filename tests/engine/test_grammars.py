"""Answers of random models have the form that was asked for, and no form costs anybody else anything."""

from __future__ import annotations

import importlib
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
import pytest

from shmring.engine.executors.interface import ExecutorOptions, FormError, StepInput, StepOutput
from shmring.engine.protocol import GenerateRequest, StructuredOutputsParams
from tests.stepping import answer, run
from tests.tables import for_each

transformers = pytest.importorskip("transformers")
pytest.importorskip("llguidance")

from shmring.engine.executors import grammars, trials  # noqa: E402 - after the skip
from shmring.engine.executors.forms import Form, form_of  # noqa: E402
from shmring.engine.executors.grammars import Grammar, Grammars  # noqa: E402
from shmring.engine.executors.preparing import Preparing  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402
from tests.engine import asking  # noqa: E402
from tests.engine.asking import text_of, tokens_of  # noqa: E402

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
def executor(load: Callable[..., TransformersExecutor]) -> TransformersExecutor:
    return load("llama")


@pytest.fixture(autouse=True)
def nothing_is_kept(executor: TransformersExecutor) -> Iterator[None]:
    yield
    assert (executor._grammars._given, executor._preparing._requests, executor._preparing._seconds) == ({}, {}, {})
    assert (executor._answers, executor._model.contexts.shelves) == ({}, [])


class Prepared:
    """Forms without an executor."""

    def __init__(self, executor: TransformersExecutor) -> None:
        self.forms = Grammars(executor._checkpoint)
        self.preparing = Preparing[list[Grammar]]()

    def begin(self, request_id: int, form: Form, count: int = 1, owner: str = "") -> None:
        self.preparing.begin(request_id, owner, self.forms.stages(request_id, form, count, owner))
        assert self.preparing.take(request_id) is None

    def ready(self, request_id: int, form: Form | None = None, count: int = 1, owner: str = "") -> list[Grammar]:
        """Waits for a form."""
        if form is not None:
            self.begin(request_id, form, count, owner)
        while (found := self.preparing.take(request_id)) is None:
            self.preparing.wait([request_id])
        return found


@pytest.fixture
def prepared(executor: TransformersExecutor) -> Iterator[Prepared]:
    made = Prepared(executor)
    yield made
    made.preparing.close()
    made.forms.close()


def take(grammar: Grammar, forms: Grammars, tokens: list[int]) -> None:
    for token in tokens:
        while not grammar.is_ready():
            forms.wait()
        scores = np.zeros(len(forms._tokens._tokenizer), np.float32)
        grammar.restrict(scores)
        assert np.isfinite(scores[token])
        grammar.take(token)


def ask(text: str = "Hi", structure: StructuredOutputsParams | None = None, **sampling: Any) -> GenerateRequest:
    return asking.ask(text, **({"temperature": 1.0, "max_tokens": 300, "structured_outputs": structure} | sampling))


def told(executor: TransformersExecutor, request: GenerateRequest) -> tuple[str, str | None]:
    replies = answer(executor, request)
    assert sum(len(reply.token_ids) for reply in replies) == replies[-1].completion_tokens
    return text_of(replies), replies[-1].finish_reason


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
        assert tokens_of(beside[number]) == tokens_of(alone[number])
    jsonschema_rs.validate(SCHEMA, json.loads(text_of(beside[9])))


def test_several_answers_have_the_form_each(executor: TransformersExecutor) -> None:
    replies = answer(executor, ask(structure=StructuredOutputsParams(json=json.dumps(SCHEMA)), n=3, seed=3, temperature=1.5))
    texts = [text_of(reply for reply in replies if reply.index == index) for index in range(3)]
    for text in texts:
        jsonschema_rs.validate(SCHEMA, json.loads(text))
    assert len(set(texts)) > 1


def test_answers_of_a_form_do_not_use_up_each_others_states(
    executor: TransformersExecutor, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has a matcher of its own, although copies of one would be had for less."""
    monkeypatch.setattr(grammars, "_LIMITS", grammars._LIMITS | {"max_lexer_states": 1000})
    monkeypatch.setattr(grammars, "_FEWEST_TOKENS", 10_000)
    properties = {name: {"type": "string", "maxLength": ord(name) * 10} for name in "ab"}
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    form = form_of(StructuredOutputsParams(json=json.dumps(schema)))
    for grammar, long in zip(prepared.ready(1, form, 2), "ab", strict=True):  # together, they need 1400
        text = json.dumps({name: "x" * (80 if name == long else 1) for name in "ab"})
        take(grammar, prepared.forms, executor._checkpoint.tokenizer(text, add_special_tokens=False)["input_ids"])


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
        StructuredOutputsParams(json=json.dumps(NESTED)),
        StructuredOutputsParams(json=json.dumps(COMBINED)),
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
def test_what_takes_too_much_to_compile_is_the_callers_fault(
    executor: TransformersExecutor, structure: StructuredOutputsParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What else can't be is in test_form_faults.py."""
    monkeypatch.setattr(trials, "_MAX_SECONDS", 1)  # of the processor: some take what they may
    monkeypatch.setattr(trials, "_TIMEOUT_S", 600.0)  # however busy the machine is
    executor._grammars._trials._process._program.close()  # which was told another number
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
    assert executor.waits_for(8) == "its form is being prepared"
    outcome: Any = None
    while not isinstance(outcome, Exception):
        (outcome,) = executor.execute([StepInput(8, hostile)])
    assert "form of the answer" in str(outcome)  # it takes more than 2 s of a processor; a busy machine does not give it these


def test_what_is_tried_and_compiled_for_others_keeps_no_known_form_waiting(
    prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, go_on = ("regex", "a+"), threading.Event()
    prepared.ready(0, known, owner="quick")
    with monkeypatch.context() as patch:
        patch.setattr(trials._TrialProcess, "run", lambda *_: go_on.wait(60) and ("", 0.0))
        for number in range(1, 17):
            prepared.begin(number, ("regex", f"b{number}"), owner=f"slow {number}")
        assert len(prepared.ready(20, known, owner="quick")) == 1
        go_on.set()
        for number in range(1, 17):
            assert prepared.ready(number)


def test_an_answer_waits_alone_for_its_next_tokens(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    formed = {1: ask(structure=StructuredOutputsParams(json=json.dumps(SCHEMA)), temperature=0)}
    expected = run(executor, formed)[1]
    go_on, began = threading.Event(), threading.Event()
    find = Grammar._find_next

    def find_slowly(grammar: Grammar) -> None:
        if hasattr(grammar, "job"):  # it is not being compiled
            began.set()
            assert go_on.wait(20)
        find(grammar)

    monkeypatch.setattr(Grammar, "_find_next", find_slowly)
    replies = []
    payload: Any = formed[1]
    while not began.is_set():
        [output] = executor.execute([StepInput(1, payload)])
        payload = payload if output.keep_inputs else None  # type: ignore[union-attr]
        replies += [output.reply]  # type: ignore[union-attr]
    chat = ask("Hello", temperature=0, max_tokens=40, ignore_eos=True)
    executor.execute([StepInput(1, None), StepInput(2, chat)])
    for _ in range(38):
        [waiting, written] = executor.execute([StepInput(1, None), StepInput(2, None)])
        assert waiting.reply is None  # type: ignore[union-attr]
        assert not written.finished  # type: ignore[union-attr]
        assert [executor.waits_for(number) for number in (1, 2)] == ["its form is being looked up", ""]
    assert executor.execute([StepInput(1, None), StepInput(2, None)])[1].finished  # type: ignore[union-attr]
    go_on.set()
    while not output.finished:  # type: ignore[union-attr]
        [output] = executor.execute([StepInput(1, None)])
        replies += [output.reply]  # type: ignore[union-attr]
    assert tokens_of(filter(None, replies)) == tokens_of(expected)


def test_a_form_is_paid_for_by_the_request_that_has_it_tried(executor: TransformersExecutor, prepared: Prepared) -> None:
    form = form_of(StructuredOutputsParams(regex="(a|b){3}(c|d){3}"))
    for request_id, owner in {1: "first", 2: "second", 3: "first"}.items():
        prepared.begin(request_id, form, owner=owner)
    stage = prepared.preparing.stage_of(2)
    assert stage is not None
    assert stage.job is not None
    stage.job.result(60)
    tried_s = stage.job.seconds
    assert 0 < tried_s < 2
    paid = {}
    for request_id in (2, 1, 3):
        assert prepared.preparing.take(request_id) is None
        paid[request_id] = prepared.preparing.take_seconds(request_id)
    assert paid == {1: {"forms": tried_s}, 2: {"forms": 0.0}, 3: {"forms": 0.0}}
    [grammar] = prepared.ready(1)
    assert 0 < prepared.preparing.take_seconds(1)["forms"] < 2, "it is compiled"
    grammar.take(executor._checkpoint.tokenizer.convert_tokens_to_ids("a"))
    grammar.job.result(60)
    assert 0 < prepared.forms.take_seconds(1) < 2
    assert prepared.forms.take_seconds(1) == 0


def test_a_request_that_fails_has_paid_for_its_trial(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials._TrialProcess, "run", lambda *_: ("too much", 1000.0))
    hostile, paid_s = ask(structure=StructuredOutputsParams(regex="dear")), 0.0
    before = executor.spent_s["forms"]
    while not isinstance(output := executor.execute([StepInput(1, hostile)])[0], Exception):
        paid_s += output.beside_s
        assert output.seconds < 1000, "no step took it"
    assert isinstance(output, ValueError)
    assert paid_s >= 1000
    assert executor.spent_s["forms"] >= before + 1000


def test_a_lexer_that_is_used_up_is_made_anew(
    executor: TransformersExecutor, prepared: Prepared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "_LIMITS", grammars._LIMITS | {"max_lexer_states": 1500})
    tokens = executor._checkpoint.tokenizer("The cat sits on the chair and looks " * 12 + "out.")["input_ids"]
    [grammar] = prepared.ready(1, ("regex", r"(\w+ ){0,300}\w+\."))
    first = grammar._matcher
    take(grammar, prepared.forms, tokens)
    assert grammar.complete
    assert grammar._matcher is not first
    monkeypatch.setattr(grammars, "_FEWEST_TOKENS", 10_000)
    [grammar] = prepared.ready(2, ("regex", r"(\w+ ){0,300}\w+\."))
    with pytest.raises(FormError, match="too complex"):
        take(grammar, prepared.forms, tokens)


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


def test_what_takes_long_of_the_tokens_is_made_when_the_model_is_loaded(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would stop all threads when the first form comes."""
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama"))))
    backend = importlib.import_module("tokenizers").Tokenizer
    for owner, name in ((importlib.import_module("llguidance"), "LLTokenizer"), (backend, "to_str"), (backend, "get_vocab")):
        monkeypatch.setattr(owner, name, None)
    assert told(executor, ask(structure=StructuredOutputsParams(choice=["quick"]))) == ("quick", "stop")
    executor.close()


def test_a_model_whose_tokens_llguidance_does_not_read_is_loaded_and_has_no_forms(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.import_module("tokenizers").Tokenizer, "to_str", lambda _: '{"version": "9"}')
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("llama"))))
    with pytest.raises(ValueError, match="answers can't have a form: llguidance can't read its tokens"):
        answer(executor, ask(structure=StructuredOutputsParams(choice=["quick"])))
    assert answer(executor, ask(max_tokens=2, ignore_eos=True))


def test_a_form_that_fails_later_says_so_by_its_type(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "_LIMITS", grammars._LIMITS | {"max_lexer_states": 300})
    structure = StructuredOutputsParams(regex=r"(\w+ ){50,300}\w+\.")
    replies, output = 0, StepOutput(finished=False, keep_inputs=True)
    batch = [StepInput(1, ask(structure=structure, seed=1))]
    while isinstance(output, StepOutput):
        [output] = executor.execute(batch)  # type: ignore[assignment]
        replies += isinstance(output, StepOutput) and output.reply is not None
        batch = [StepInput(1, batch[0].payload if getattr(output, "keep_inputs", False) else None)]
    assert isinstance(output, FormError)
    assert replies > 3


def test_min_tokens_can_not_be_asked_for_beside(executor: TransformersExecutor) -> None:
    with pytest.raises(ValueError, match="min_tokens can't"):
        answer(executor, ask(structure=StructuredOutputsParams(json_object=True), min_tokens=3))


def test_scores_beyond_the_tokenizers_tokens_are_left_out(executor: TransformersExecutor, prepared: Prepared) -> None:
    [grammar] = prepared.ready(1, form_of(StructuredOutputsParams(choice=["a"])))
    size = len(executor._checkpoint.tokenizer)
    token = executor._checkpoint.tokenizer.convert_tokens_to_ids("a")
    for count in (size + 100, size - 2):
        scores = np.zeros(count, np.float32)
        grammar.restrict(scores)
        assert np.flatnonzero(np.isfinite(scores)).tolist() == [token]
