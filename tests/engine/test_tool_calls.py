"""Tools in conversations: how a model's template gets them, and how calls are read in what the model writes."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema_rs
import pytest
import torch

from shmring.engine.executors.interface import ContextLengthError, ExecutorOptions
from shmring.engine.protocol import (
    ChatMessage,
    GenerateReply,
    GenerateRequest,
    SamplingParams,
    StructuredOutputsParams,
    TextPart,
    ToolCall,
)
from tests.stepping import answer
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors import sampling, tool_calls  # noqa: E402 - after the skip
from shmring.engine.executors.tool_calls import Parts, ResponseReader  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402
from tests.engine.asking import text_of  # noqa: E402


def tool(name: str, parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def closed(definitions: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has these properties, all of them and no others."""
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return schema | ({"$defs": definitions} if definitions else {})


WEATHER = tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}})
STRICT = tool("weather", closed(city={"enum": ["Ulm", "Aš"]}, days={"type": "integer", "minimum": 0, "maximum": 9}))
NESTED = tool('pla"ce é', closed({"point": closed(x={"type": "boolean"})}, at={"$ref": "#/$defs/point"}))

# As Qwen's and many other models'; the end of a message is that of the tiny models.
RESPONSES: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant: ",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*<\|end\|>", "content": "text"},
    },
}

TEMPLATE = (
    "{% if tools %}TOOLS {{ tools | tojson }}<|end|>\n{% endif %}{% if style %}STYLE {{ style }}<|end|>\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls %}CALL {{ call.function.name }} {{ call.function.arguments.city }}{% endfor %}"
    "{% if message.tool_call_id %}OF {{ message.tool_call_id }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

ONE = '<tool_call>{"name": "weather", "arguments": {"city": "Ulm", "days": "3"}}</tool_call>'
OTHER = '\n<tool_call>{"name": "weather", "arguments": {}}</tool_call>'


def responses(*left_out: str, **change: Any) -> dict[str, Any]:
    """The template of responses, where calls are written otherwise."""
    calls = {name: value for name, value in RESPONSES["fields"]["tool_calls"].items() if name not in left_out} | change
    return RESPONSES | {"fields": RESPONSES["fields"] | {"tool_calls": calls}}


def reader_of(template: dict[str, Any] = RESPONSES, tool: dict[str, Any] = WEATHER, *, parallel: bool = True) -> ResponseReader:
    return ResponseReader(template, "user: Hi<|end|>\nassistant: ", [tool], parallel=parallel)


def pieces_of(text: str, length: int) -> list[str]:
    return [text[start : start + length] for start in range(0, len(text), length)]


def read(pieces: Iterable[str], *, parallel: bool = True) -> tuple[Parts, ResponseReader]:
    reader = reader_of(parallel=parallel)
    whole = Parts()
    for piece in pieces:
        add(whole, reader.push(piece))
    add(whole, reader.push("", ended=True))
    return whole, reader


def add(whole: Parts, parts: Parts) -> None:
    whole.text += parts.text
    whole.reasoning += parts.reasoning
    whole.tool_calls = whole.tool_calls + parts.tool_calls


@for_each("length", [1, 2, 7, 1000])
def test_text_reasoning_and_calls_are_told_apart_however_they_are_cut(length: int) -> None:
    text = f"<think>I look.</think>Let me see.{ONE}{OTHER}"
    whole, reader = read(pieces_of(text, length))
    assert (whole.text, whole.reasoning) == ("Let me see.", "I look.")
    assert whole.tool_calls == [
        ToolCall("weather", '{"city":"Ulm","days":3}', index=0),  # a number, as the schema says
        ToolCall("weather", "{}", index=1),
    ]
    assert (reader.called, reader.complete) == (2, False)


def test_with_one_call_at_a_time_the_answer_ends_with_the_first() -> None:
    whole, reader = read([ONE + OTHER], parallel=False)
    assert [call.index for call in whole.tool_calls] == [0]
    assert reader.complete


@for_each("length", [1, 1000])
def test_a_call_that_a_limit_has_cut_is_left_out(length: int) -> None:
    whole = f"a < b.{ONE}{OTHER}"
    for end in range(len(whole)):
        reader, parts, cut = reader_of(), Parts(), whole[:end]
        *pieces, last = pieces_of(cut, length) or [""]
        for piece in pieces:
            add(parts, tool_calls.read(reader, piece, None)[0])
        rest, reason = tool_calls.read(reader, last, "length")
        add(parts, rest)
        assert reason == "length"
        assert len(parts.tool_calls) == (cut.count("</tool_call>"))
        assert parts.text.strip().removesuffix("<").strip() in "a < b."  # a single character of a mark may be text
        assert parts.text.startswith(cut[:5])


def test_of_calls_without_json_half_a_one_is_no_call_and_a_whole_one_is() -> None:
    template = responses(
        "close",
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
        close_pattern=r"</function>\s*</tool_call>",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"},
        transform={"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    )
    text = "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"
    for cut, count in ((text, 1), (text[:-1], 0), (text[:40], 0)):
        parts, reason = tool_calls.read(reader_of(template), cut, "length")
        assert (len(parts.tool_calls), parts.text, reason) == (count, "", "length")


@for_each(
    "broken",
    [
        '<tool_call>{"name": weather}</tool_call>',
        '<tool_call>{"name": "weather"',
        '<tool_call>["weather"]</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "no json"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": null}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": ' + "[" * 5000 + "</tool_call>",
    ],
)
@for_each("length", [1, 1000])
def test_a_call_that_can_not_be_read_is_text(broken: str, length: int) -> None:
    text = f"See: {broken} and more"
    whole, reader = read(pieces_of(text, length))
    assert "".join(whole.text.split()) == "".join(text.split())
    assert (whole.tool_calls, reader.called) == ([], 0)


def test_a_run_of_white_space_is_given_out_before_it_takes_long() -> None:
    """The parser's patterns take quadratic time in it: 14 s for 40,000 spaces."""
    whole, reader = read([*[" " * 64] * 640, "b" + ONE])
    assert whole.text == " " * 40_960 + "b" + ONE
    assert (whole.tool_calls, reader._parser) == ([], None)


def test_a_schema_that_the_parser_does_not_expect_makes_a_call_text() -> None:
    parts = reader_of(tool=tool("weather", {"properties": {"city": {"anyOf": 5}}})).push(ONE, ended=True)
    assert (parts.text, parts.tool_calls) in ((ONE, []), ("", [ToolCall("weather", '{"city":"Ulm","days":"3"}')]))


def test_a_region_may_have_a_list_of_calls() -> None:
    template = responses(
        "open_pattern",
        "repeats",
        open="[CALLS]",
        close="[END]",
        transform={"type": "function", "function": {"name": "{name}", "arguments": "{arguments}"}},
        transform_each=True,
    )
    calls = '[{"name": "weather", "arguments": {}}, {"name": "weather", "arguments": {"city": "Ulm"}}]'
    parts = reader_of(template).push(f"[CALLS]{calls}[END]", ended=True)
    assert [(call.arguments, call.index) for call in parts.tool_calls] == [("{}", 0), ('{"city":"Ulm"}', 1)]
    parts = reader_of(template, parallel=False).push(f"[CALLS]{calls}[END]", ended=True)
    assert [call.arguments for call in parts.tool_calls] == ["{}"]


# -- the executor ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_tools(tiny_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tiny-tools"
    shutil.copytree(tiny_model("llama"), path)
    config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    config.max_position_embeddings = 4096  # each letter of a schema is a token
    config.num_hidden_layers = 1  # a random model with fewer is as random, and answers in half of the time
    config.save_pretrained(path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = RESPONSES
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def executor(with_tools: Path) -> Iterator[TransformersExecutor]:
    made = TransformersExecutor(ExecutorOptions(model=str(with_tools)))
    yield made
    made.close()


def conversation(*messages: ChatMessage, sampling: dict[str, Any] | None = None, **fields: Any) -> GenerateRequest:
    user = ChatMessage("user", [TextPart("Hi")])
    params = SamplingParams(**({"max_tokens": 200, "temperature": 0} | (sampling or {})))
    return GenerateRequest([user, *messages], sampling=params, **fields)


class Told(NamedTuple):
    """An answer as its reader has it in the end."""

    text: str
    calls: list[ToolCall]
    reason: str | None
    replies: list[GenerateReply]

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]


def told(executor: TransformersExecutor, request: GenerateRequest) -> Told:
    replies = answer(executor, request)
    assert [reply.finish_reason for reply in replies[:-1]] == [None] * (len(replies) - 1)
    assert sum(len(reply.token_ids) for reply in replies) == replies[-1].completion_tokens
    calls = [call for reply in replies for call in reply.tool_calls]
    return Told(text_of(replies), calls, replies[-1].finish_reason, replies)


def check(tool: dict[str, Any], *calls: ToolCall) -> None:
    for call in calls:
        assert call.name == tool["function"]["name"]
        jsonschema_rs.validate(tool["function"]["parameters"], json.loads(call.arguments))


def prompt_of(executor: TransformersExecutor, request: GenerateRequest) -> str:
    [tokens] = answer(
        executor,
        GenerateRequest(request.messages, tokenize=True, tools=request.tools, template_options=request.template_options),
    )
    [text] = answer(executor, GenerateRequest(prompt=tokens.token_ids, tokenize=True))
    return text.text


@pytest.fixture
def write(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``write("Hello")``: what the model chooses, token by token, and then its end. (It is random and knows no tools.)"""

    def choose(text: str) -> None:
        tokens = iter(executor._checkpoint.tokenizer(text + "<|end|>")["input_ids"])

        def next_token(_: sampling.Sampler, logits: torch.Tensor, grammar: None) -> int:
            return int(next(tokens))

        monkeypatch.setattr(sampling.Sampler, "choose", next_token)

    return choose


def test_the_template_gets_tools_calls_and_what_they_returned(executor: TransformersExecutor) -> None:
    assert executor.describe().tools
    assert executor.describe().template_options
    called = ChatMessage("assistant", [TextPart("")], [ToolCall("weather", '{"city": "Ulm"}', "c1")])
    returned = ChatMessage("tool", [TextPart("Rain")], tool_call_id="c1")
    text = prompt_of(executor, conversation(called, returned, tools=[WEATHER], template_options={"style": "brief"}))
    tools, style, user, call, result, opening = text.split("<|end|>\n")
    assert tools.startswith('TOOLS [{"type": "function", "function": {"name": "weather"')
    assert (style, user, opening) == ("STYLE brief", "user: Hi", "assistant: ")
    assert (call, result) == ("assistant: CALL weather Ulm", "tool: RainOF c1")


@for_each("calls", [1, 2])
def test_an_answer_calls_tools(executor: TransformersExecutor, write: Callable[[str], None], calls: int) -> None:
    write("Let me see." + ONE + OTHER)
    text, made, reason, replies = told(executor, conversation(tools=[WEATHER], parallel_tool_calls=calls > 1))
    assert (text, [call.name for call in made], reason) == ("Let me see.", ["weather"] * calls, "tool_calls")
    assert len(replies) > 2  # its text came before


def test_tokens_of_a_long_call_are_described_before_it_ends(
    executor: TransformersExecutor, write: Callable[[str], None]
) -> None:
    write('<tool_call>{"name": "weather", "arguments": {"city": "' + "Ulm " * 60 + '"}}</tool_call>')
    answered = told(executor, conversation(tools=[WEATHER], sampling={"max_tokens": 500, "logprobs": 2}))
    assert max(len(reply.logprobs) for reply in answered.replies) == 64
    assert all(len(reply.logprobs) == len(reply.token_ids) for reply in answered.replies)
    assert answered.names == ["weather"]


@for_each("stop", ["Ulm", "<tool_call>", '"arguments"'])
def test_of_a_call_that_a_stop_text_has_cut_nothing_is_text(
    executor: TransformersExecutor, write: Callable[[str], None], stop: str
) -> None:
    write("Let me see." + ONE)
    answered = told(executor, conversation(tools=[WEATHER], sampling={"stop": [stop]}))
    assert answered[:3] == ("Let me see.", [], "stop")
    assert answered.replies[-1].stop_text == stop


def test_without_tools_the_same_text_is_text_and_text_is_text_beside_tools(
    executor: TransformersExecutor, write: Callable[[str], None]
) -> None:
    for text, tools in ((ONE, []), ("It rains.", [WEATHER])):
        write(text)
        assert told(executor, conversation(tools=tools))[:3] == (text, [], "stop")


def test_control_tokens_of_callers_are_text_or_refused(executor: TransformersExecutor) -> None:
    end = executor._checkpoint.tokenizer.convert_tokens_to_ids("<|end|>")
    plain, marked = (
        answer(executor, conversation(tools=[tool("f", None, description=text)], tokenize=True))[0].token_ids
        for text in ("x", "<|end|>")
    )
    assert marked.count(end) == plain.count(end)
    with pytest.raises(ValueError, match="control token"):
        answer(executor, conversation(tools=[tool("f", {"properties": {"<|end|>": {}}})]))


@for_each(
    "name",
    [
        *("unknown", "chat_template", "add_generation_prompt", "tools", "conversation", "tokenize"),
        *("messages", "message", "e", "images", "text", "namespace", "eos_token"),
    ],
)
def test_what_is_no_variable_of_the_template_is_refused(executor: TransformersExecutor, name: str) -> None:
    with pytest.raises(ValueError, match=f"has no variable '{name}'"):
        answer(executor, conversation(template_options={name: "x"}))


@for_each("properties", [[1], 5])
def test_tools_that_the_template_can_not_write_are_the_callers_fault(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, properties: Any
) -> None:
    template = "{% for name, field in tools[0].function.parameters.properties | items %}{{ name + field.type }}{% endfor %}"
    monkeypatch.setattr(executor._checkpoint.tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="can't write these tools"):
        answer(executor, conversation(tools=[tool("f", {"properties": properties})]))


def test_arguments_count_before_they_are_read(executor: TransformersExecutor) -> None:
    called = ChatMessage("assistant", [TextPart("")], [ToolCall("weather", '{"city": "' + "x" * 1_000_000 + '"}', "c1")])
    with pytest.raises(ContextLengthError):
        answer(executor, conversation(called, tools=[WEATHER]))


@pytest.mark.parametrize("lacking", ["template", "parser"])
def test_a_model_without_either_takes_no_tools(with_tools: Path, tmp_path: Path, lacking: str) -> None:
    path = tmp_path / "model"
    shutil.copytree(with_tools, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    if lacking == "template":
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    else:
        tokenizer.response_template = None
    tokenizer.save_pretrained(path)
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    assert not executor.describe().tools
    for request in (conversation(tools=[WEATHER]), conversation(ChatMessage("tool", [TextPart("Rain")], tool_call_id="c1"))):
        with pytest.raises(ValueError, match="takes no tools"):
            answer(executor, request)


# -- calls that are required ----------------------------------------------------------------------------------------------

BY_CHANCE: dict[str, Any] = {"max_tokens": 2000, "temperature": 1.3}


def required(seed: int, *tools: Any, **fields: Any) -> GenerateRequest:
    return conversation(tools=list(tools), tool_choice="required", sampling=BY_CHANCE | {"seed": seed}, **fields)


@for_each("seed", range(6))
def test_a_random_model_that_must_call_does(executor: TransformersExecutor, seed: int) -> None:
    text, [call], reason, _ = told(executor, required(seed, STRICT, NESTED, parallel_tool_calls=False))
    assert (text, reason) == ("", "tool_calls")
    check(STRICT if call.name == "weather" else NESTED, call)


def test_several_calls_may_be_made(executor: TransformersExecutor) -> None:
    requests = [required(seed, STRICT) for seed in range(8)]
    for request in requests:
        request.sampling.logit_bias = {executor._checkpoint.tokenizer.eos_token_id: 4.0}  # not for dozens of calls
    made = [told(executor, request).calls for request in requests]
    check(STRICT, *itertools.chain(*made))
    counts = {len(calls) for calls in made}
    assert min(counts) >= 1
    assert len(counts) > 1


@for_each(
    "change",
    [
        {"content": "xml-inline", "content_args": {"tag_pattern": "<(?P<key>a)>(?P<value>b)"}},
        {"open_pattern": r"<tool_call>call:(?P<name>\w+)", "transform": {"name": "{name}", "arguments": "{content}"}},
        {"transform_each": True},
        {"close": ["</tool_call>", "</tool>"]},
    ],
)
def test_a_model_whose_calls_are_written_otherwise_can_not_be_made_to_call(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    monkeypatch.setattr(executor._prompts.texts, "response_template", responses(**change))
    with pytest.raises(ValueError, match="can't be made to call a tool"):
        answer(executor, required(1, STRICT))


def test_a_prompt_that_has_begun_reasoning_can_not_go_on_with_a_call(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        executor._checkpoint.tokenizer, "chat_template", TEMPLATE.replace("assistant: {%", "assistant: <think>{%")
    )
    with pytest.raises(ValueError, match="begins its answer with reasoning"):
        answer(executor, required(1, STRICT))
    assert answer(executor, conversation(tools=[STRICT]))


def test_a_call_can_not_be_required_without_tools_and_not_beside_a_form(executor: TransformersExecutor) -> None:
    with pytest.raises(ValueError, match="there are no tools"):
        answer(executor, required(1))
    with pytest.raises(ValueError, match="has a form of JSON, or none"):
        answer(executor, conversation(tools=[STRICT], sampling={"structured_outputs": StructuredOutputsParams(regex="a+")}))


def test_an_answer_has_its_form_or_calls_tools(executor: TransformersExecutor) -> None:
    schema = STRICT["function"]["parameters"]
    tokenizer = executor._checkpoint.tokenizer
    bias = {tokenizer.convert_tokens_to_ids("{"): 3.0, tokenizer.eos_token_id: 4.0}  # and not for dozens of calls
    kinds = set()
    for seed in range(12):
        sampling = {"seed": seed, "structured_outputs": StructuredOutputsParams(json=json.dumps(schema)), "logit_bias": bias}
        request = conversation(tools=[STRICT], strict_tools=["weather"], sampling=BY_CHANCE | sampling)
        text, calls, reason, _ = told(executor, request)
        assert bool(text.strip()) != bool(calls)
        assert reason == ("tool_calls" if calls else "stop")
        check(STRICT, *calls)
        if not calls:
            jsonschema_rs.validate(schema, json.loads(text))
        kinds.add(bool(calls))
    assert kinds == {False, True}


def chosen_before(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Has the model write a text, and go on as it likes, that is by chance."""
    tokens = iter(executor._checkpoint.tokenizer(text)["input_ids"])
    choose = sampling.Sampler.choose

    def next_token(sampler: sampling.Sampler, logits: torch.Tensor, grammar: Any) -> int:
        given = next(tokens, None)
        return choose(sampler, logits, grammar) if given is None else int(given)

    monkeypatch.setattr(sampling.Sampler, "choose", next_token)


@for_each("seed", range(4))
@for_each("before", ["Let me see.<tool_call>", "<think>Or <tool_call>?</think>\n<tool_call>\n"])
def test_a_random_model_that_calls_a_strict_tool_keeps_to_its_schema(
    executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, before: str, seed: int
) -> None:
    assert executor.describe().strict_tools
    chosen_before(executor, monkeypatch, before)
    sampling = BY_CHANCE | {"seed": seed}
    request = conversation(tools=[STRICT], strict_tools=["weather"], parallel_tool_calls=False, sampling=sampling)
    _, [call], reason, _ = told(executor, request)
    check(STRICT, call)
    assert reason == "tool_calls"


def test_a_strict_tool_leaves_all_but_calls_as_it_is(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(max_tokens: int, **fields: Any) -> Told:
        sampling = {"max_tokens": max_tokens, "temperature": 1.0, "seed": 5, "ignore_eos": True}
        return told(executor, conversation(tools=[STRICT], sampling=sampling, **fields))

    assert ask(60).text == ask(60, strict_tools=["weather"]).text
    # Behind a call it may say anything again, and call again.
    chosen_before(executor, monkeypatch, "<tool_call>")
    answered = ask(400, strict_tools=["weather"])
    assert answered.names[:1] == ["weather"]
    assert answered.replies[-1].completion_tokens == 400


def test_several_calls_of_a_strict_tool_keep_to_it(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = executor._checkpoint.tokenizer
    pieces = iter([*tokenizer("<tool_call>")["input_ids"], None, *tokenizer("\n<tool_call>")["input_ids"], None])
    choose = sampling.Sampler.choose
    within = [False]

    def next_token(sampler: sampling.Sampler, logits: torch.Tensor, grammar: Any) -> int:
        if grammar is None or not within[0]:
            given = next(pieces, tokenizer.eos_token_id)
            within[0] = given is None
            if given is not None:
                return int(given)
        assert grammar is not None
        return choose(sampler, logits, grammar)

    monkeypatch.setattr(sampling.Sampler, "choose", next_token)
    request = conversation(tools=[NESTED], strict_tools=[NESTED["function"]["name"]], sampling=BY_CHANCE | {"seed": 3})
    calls = told(executor, request).calls
    assert len(calls) == 2
    check(NESTED, *calls)


def test_a_tool_that_is_not_strict_may_have_any_schema(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = tool("odd", {"not": {"type": "string"}})
    chosen_before(executor, monkeypatch, '<tool_call>{"name": "odd", "arguments": {}}</tool_call><|end|>')
    assert told(executor, conversation(tools=[odd, STRICT], strict_tools=["weather"])).names == ["odd"]
    with pytest.raises(ValueError, match="can't be compiled"):
        answer(executor, conversation(tools=[odd, STRICT], strict_tools=["odd"]))


def test_marks_that_are_control_tokens_are_written_as_such(with_tools: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(with_tools, path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.response_template = responses("open_pattern", open="<|pad|>")
    tokenizer.save_pretrained(path)
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    request = required(2, STRICT, parallel_tool_calls=False)
    request.sampling.ignore_eos = True
    answered = told(executor, request)
    assert answered.replies[0].token_ids[0] == tokenizer.convert_tokens_to_ids("<|pad|>")
    assert answered.names == ["weather"]
    executor.close()


def test_what_is_wrong_with_the_schema_of_a_tool_names_the_tool(executor: TransformersExecutor) -> None:
    wrong = tool("place", {"type": "object", "properties": {"at": {"not": {"type": "string"}}}})
    for request in (required(1, STRICT, wrong), conversation(tools=[STRICT, wrong], strict_tools=["place"])):
        with pytest.raises(ValueError, match=r"""kept to "not" \(in the parameters of 'place', at #/properties/at\)"""):
            answer(executor, request)


@for_each("space", ["", " "])
def test_a_call_may_have_spaces_or_not(executor: TransformersExecutor, monkeypatch: pytest.MonkeyPatch, space: str) -> None:
    """As the model has learned to write it, in tokens of its own."""
    arguments = f'{{"city":{space}"Ulm",{space}"days":{space}3}}'
    call = f'<tool_call>{{"name":{space}"weather",{space}"arguments":{space}{arguments}}}</tool_call>'
    for request in (conversation(tools=[STRICT], strict_tools=["weather"]), required(1, STRICT)):
        with monkeypatch.context() as patch:
            chosen_before(executor, patch, f"{call}<|end|>")
            calls = told(executor, request).calls
        assert [json.loads(made.arguments) for made in calls] == [{"city": "Ulm", "days": 3}]
