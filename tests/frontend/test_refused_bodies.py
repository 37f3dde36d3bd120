"""Bodies that are refused, of all routes: one table of what a body has that can't be, and one of what a model can't do.

Each refusal is checked whole: its status, its code, the part of the body that it names as the caller wrote it, and its form,
which is that of the route's API. It is short whatever was sent, also where the answer was to be a stream, and nothing of such a
request reaches the engine.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from shmring.engine.protocol import CAPABILITIES, InputSpec, ModelDescription, PictureSpec
from tests.frontend.talking import LONG, MODEL, PLAIN_MODEL, TASKS, OpenTalk, Talk, model, picture_url
from tests.tables import for_each

CHAT, RESPONSES, COMPLETIONS = "/v1/chat/completions", "/v1/responses", "/v1/completions"
MESSAGES, COUNT_TOKENS, TOKENIZE, DETOKENIZE = "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize"
EMBEDDINGS, SCORE, RERANK = "/v1/embeddings", "/score", "/rerank"
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"

USER: dict[str, Any] = {"role": "user", "content": "Hi"}
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [USER]},
    RESPONSES: {"input": "Hi"},
    COMPLETIONS: {"prompt": "Hi"},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
    COUNT_TOKENS: {"messages": [USER]},
    TOKENIZE: {},
    DETOKENIZE: {"tokens": [1]},
    EMBEDDINGS: {},
    SCORE: {"queries": "right", "documents": ["up", "right"]},
    RERANK: {"query": "right", "documents": ["up", "right"]},
    TRANSCRIPTIONS: {},
    TRANSLATIONS: {},
}
UNSUPPORTED = "unsupported_value"
STREAMS = {CHAT, RESPONSES, COMPLETIONS, MESSAGES}

BROKEN = "data:image/png;base64,AAAA"
CUT = picture_url()[:-1000]
DEEP: Any = {}
for _ in range(70):
    DEEP = {"not": DEEP}
NESTED = "[" * 30_000 + "]" * 30_000

# -- chats ---------------------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": name}} for name in "fg"]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
SCHEMA = {"type": "object"}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
HEAD = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]'
LIKELY = {"logprobs": True, "top_logprobs": 20}
MOST_TOKENS = (256 << 10) // 21
LOWER = "more than the 262144 logprobs that a request may have: lower max_tokens to"


def called(arguments: str) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": arguments}}]}]}


def allowed(*names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}}}


def parts(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def each(code: str = "", text: str = "", **values: list[Any]) -> list[Any]:
    """Rows of fields that the error names, with each of these values."""
    return [({name: value}, name, code, text) for name, wrong in values.items() for value in wrong]


# Each row has what is wrong and what the error names; and its code, unless it is invalid_value, and a part of its message.
OF_CHATS: list[Any] = [
    *((body, None, "invalid_json") for body in (b"", b"{", b"nonsense", b"\xff\xfe", b'{"model": "\xff"}')),
    *((b'{"model": "%s"}' % text, None, "invalid_json") for text in (b"\xed\xa0\x80", b"\\ud800", b"\\ud800x", b"\\udc00")),
    (b'\xef\xbb\xbf{"model": "m"}', None, "invalid_json"),
    (HEAD + b', "seed": NaN}', None, "invalid_json"),
    (HEAD + b', "unknown": ' + b"[" * 30_000 + b"}", None, "invalid_json"),
    *((HEAD + b', "functions": ' + deep * 30_000 + b"}", None, "invalid_json") for deep in (b"[", b'{"a":')),
    (b"{}", "model"),
    (b'{"model": "m"}', "messages"),
    *((HEAD + b', "%s": %s}' % (name, b"9" * 10_000), name.decode()) for name in (b"seed", b"n")),
    (HEAD + b', "temperature": 1e400}', "temperature"),
    *each(
        seed=[10**26, 1.5],
        temperature=[-0.1, 2.1, True],
        top_p=[0, 1.1],
        max_tokens=[0],
        max_completion_tokens=[-1],
        priority=[1e30],
        stop=[["x"] * 17, "", "x" * 1025],
        stream=["yes"],
        n=[0, 129, "2", True],
        presence_penalty=[2.1],
        frequency_penalty=["x"],
        min_tokens=[-1],
        stop_token_ids=[[0] * 129],
        logprobs=[1],
        top_logprobs=[3],
        messages=[[], "hello"],
        tool_choice=["required"],
        response_format=["json"],
        structured_outputs=[{}, {"json_object": False}, {"regex": "a", "choice": ["a"]}, {"json": {}, "choice": ["a"]}],
    ),
    *each(
        UNSUPPORTED, "is not supported", use_beam_search=[True, 0, "false"], modalities=[["text", "audio"]], guided_json=[{}]
    ),
    *(({"stop": [value]}, "stop[0]") for value in (1, "", "x" * 1025)),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    *(({"min_tokens": 4, name: 3}, "min_tokens") for name in ("max_tokens", "max_completion_tokens")),
    ({"min_tokens": 4, "response_format": {"type": "json_object"}}, "min_tokens", UNSUPPORTED),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    *((LIKELY | {name: MOST_TOKENS + 1}, "max_tokens", "", LOWER) for name in ("max_tokens", "max_completion_tokens")),
    (LIKELY | {"max_tokens": 4096, "n": 16}, "max_tokens", "", LOWER),
    # messages
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "x" * 100_000, "content": ""}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "function", "content": "4"}]}, "messages[1].role", UNSUPPORTED),
    ({"messages": [USER | {"tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    (parts({"type": "text"}), "messages[0].content[0].text"),
    (parts({"image_url": {"url": "u"}}), "messages[0].content[0].type"),
    (parts({"type": "image_url", "image_url": 5}), "messages[0].content[0].image_url"),
    (parts({"type": "image"}), "messages[0].content[0].type", "", "text, image_url, input_audio, audio_url or video_url"),
    ({"messages": parts(*["x"] * 2048)["messages"] * 3}, "messages", "too_many_parts", "have 6144 parts, at most 4096"),
    (called("[1]"), "messages[0].tool_calls[0].function.arguments"),
    (called('{"a": [' + "[]," * 40_000 + "1]}"), "messages", "too_many_values"),
    (called('{"a": "' + "x" * 5_000_000 + '"}'), "messages", "text_too_long"),
    # tools
    ({"tool_choice": "sometimes", "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": TOOLS}, "tool_choice"),
    ({"tool_choice": {"type": "custom", "custom": {"name": "g"}}, "tools": TOOLS}, "tool_choice.type"),
    ({"tool_choice": {"type": "function"}, "tools": TOOLS}, "tool_choice.function"),
    (allowed("g", "h"), "tool_choice"),
    (allowed(), "tool_choice.allowed_tools.tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "g"}}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [*TOOLS, {"type": "function"}]}, "tools[2].function"),
    ({"tools": TOOLS, "structured_outputs": {"regex": "a"}}, "structured_outputs", UNSUPPORTED),
    *(
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": value}}]},
            "tools[0].function.parameters",
            "",
            why,
        )
        for value, why in (({"maximum": 10**19 * 2}, "more than 64 bits"), (DEEP, "values in one another"))
    ),
    ({"chat_template_kwargs": DEEP}, "chat_template_kwargs", "", "values in one another"),
    # forms
    ({"response_format": {"type": "structural_tag"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    *((schema(value), "response_format.json_schema.schema") for value in ("{}", DEEP)),
    ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"json": True}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": '"' + "a" * 200_000 + '"'}}, "structured_outputs.json", "text_too_long"),
    ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex"),
    ({"structured_outputs": {"regex": "a" * 200_000}}, "structured_outputs.regex", "text_too_long"),
    *(({"structured_outputs": {"choice": value}}, "structured_outputs.choice") for value in ([], ["a"] * 1025)),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar", UNSUPPORTED),
    (
        {"structured_outputs": {"regex": "a", "whitespace_pattern": " "}},
        "structured_outputs.whitespace_pattern",
        UNSUPPORTED,
    ),
]

# -- completions and tokens ----------------------------------------------------------------------------------------------

OF_COMPLETIONS: list[Any] = [
    ({"prompt": ["a"] * 129}, "prompt", "too_many_prompts"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": ["a", 1]}, "prompt[1]"),
    ({"prompt": [[1], []]}, "prompt[1]"),
    ({"prompt": ["x" * (3 << 20)] * 2}, "prompt", "text_too_long"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt[0]"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [-1]}, "prompt[0]"),
    *(({"prompt": value}, "prompt") for value in ([], None, {})),
    ({"prompt": ["Hi"] * 16, "logprobs": 20, "max_tokens": 4096}, "max_tokens", "", LOWER),
]
OF_TOKENS: list[Any] = [
    ({}, "prompt"),
    ({"prompt": "a", "messages": [USER]}, "prompt"),
    (parts({"type": "image_url", "image_url": {"url": BROKEN}}), "messages[0].content[0].image_url", "unsupported_input"),
    ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens", UNSUPPORTED),
]

# -- responses -----------------------------------------------------------------------------------------------------------

FUNCTION = {"type": "function", "name": "f", "parameters": SCHEMA}
MADE = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RETURNED = {"type": "function_call_output"}
INCLUDE = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
FIND = {"type": "function", "name": "find"}
CLOCK = {"type": "function", "name": "clock"}
CRM = {"type": "namespace", "name": "crm", "description": "All about customers.", "tools": [FIND, FIND | {"name": "drop"}]}
MAIL = CRM | {"name": "mail", "tools": [FIND]}


def item(*items: Any) -> dict[str, Any]:
    return {"input": list(items)}


def content(*parts: Any) -> dict[str, Any]:
    return item(USER | {"content": list(parts)})


def form_of(**fields: Any) -> dict[str, Any]:
    return {"text": {"format": {"type": "json_schema", **fields}}}


def choice(tools: list[Any], /, **fields: Any) -> dict[str, Any]:
    return {"tools": tools, "tool_choice": fields}


def crm(**fields: Any) -> dict[str, Any]:
    return {"tools": [CLOCK, CRM | fields]}


OF_RESPONSES: list[Any] = [
    *each(
        store=["yes"],
        input=[[], None, [USER] * 5000],
        tool_choice=["required"],
        max_output_tokens=[0],
        chat_template_kwargs=[DEEP],
        tools=[[FUNCTION] * 1025],
    ),
    *each("previous_response_not_found", previous_response_id=["resp_1"]),
    *each(UNSUPPORTED, background=[True], conversation=["conv_1"], n=[2], prompt=[{"id": "x"}]),
    (item({"content": "Hi"}), "input[0].role"),
    (item({"role": "tool", "content": "x"}), "input[0].role"),
    (item(USER, {"role": "user"}), "input[1].content"),
    (item({"type": "web_search_call", "id": "x"}), "input[0].type"),
    (content({"type": "input_file", "file_id": "x"}), "input[0].content[0].type"),
    (content({"type": "input_image", "file_id": "x"}), "input[0].content[0].file_id", UNSUPPORTED),
    (content({"type": "input_image"}), "input[0].content[0].image_url"),
    (content({"type": "reasoning_text", "text": ""}), "input[0].content[0].type"),
    (content("x", {"type": "input_image", "image_url": BROKEN}), "input[0].content[1].image_url", "invalid_image"),
    (item({"type": "item_reference"}), "input[0].id"),
    (item(USER, MADE, MADE | {"arguments": "["}), "input[2].arguments"),
    (item(USER, MADE | {"name": None}), "input[1].name"),
    (item(USER, RETURNED | {"output": "x"}), "input[1].call_id"),
    (item(USER, RETURNED | {"call_id": "c"}), "input[1].output"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [FUNCTION | {"name": ""}]}, "tools[0].name"),
    (choice([FUNCTION], type="allowed_tools", mode="auto", tools=[]), "tool_choice.tools"),
    ({"reasoning": {"effort": 3}}, "reasoning.effort"),
    ({"metadata": {"a": "x" * 513}}, "metadata[...]"),
    (form_of(schema={}), "text.format.name"),
    (form_of(name="x"), "text.format.schema"),
    ({"include": ["message.output_text.likelihoods"]}, "include[0]"),
    (INCLUDE | {"top_logprobs": 21}, "top_logprobs"),
    (INCLUDE | {"max_output_tokens": 100_000}, "max_output_tokens"),
    # namespaces
    (choice([CLOCK, CRM, MAIL], type="function", name="find"), "tool_choice"),  # there are two
    (choice([CLOCK, CRM, MAIL], type="function", name="lose"), "tool_choice"),
    (crm(name=None), "tools[1].name"),
    (crm(tools=None), "tools[1].tools"),
    (crm(tools=[FIND, {"type": "function"}]), "tools[1].tools[1].name"),
    (crm(tools=[FIND | {"name": "x" * 256}]), "tools[1].tools[0].name"),
    (crm(tools=[FIND, FIND | {"name": "b", "parameters": {"x": 1 << 70}}]), "tools[1].tools[1].parameters"),
    (crm(tools=[]) | {"tool_choice": {"type": "function", "name": "find"}}, "tool_choice"),
    ({"tools": [CRM, FIND | {"name": "crm__find"}]}, "tools[1].name"),  # two that the model can't tell
    ({"tools": [CRM | {"tools": [{"type": "custom", "name": "x"}]}]}, "tools[0].tools[0].type", UNSUPPORTED),
    # too much
    (item(*[USER] * 100_000), None, "too_many_values"),
    (item(*[USER | {"content": [{"type": "input_text", "text": "x"}] * 2500}] * 2), "input", "too_many_parts"),
    (item(*[USER | {"content": "x" * 999_999}] * 5), "input", "text_too_long"),
    (item(USER, *[MADE | {"arguments": json.dumps({"x": [0] * 30_000})}] * 2), "input", "too_many_values"),
    (item(USER, *[MADE | {"arguments": '{"x":"' + "x" * 999_999 + '"}'}] * 5), "input", "text_too_long"),
    ({"tools": [FUNCTION | {"parameters": DEEP}]}, "tools[0].parameters"),
    ({"text": {"format": {"type": "text", "schema": DEEP}}}, "text.format.schema"),
    *(
        (f'{{"model":"m","input":[{{"type":"reasoning","{name}":{NESTED}}}]}}'.encode(), place, code)
        for name, place, code in (
            *((name, None, "invalid_json") for name in ("summary", "x")),
            *((name, f"input[0].{name}[0]", "") for name in ("output", "content")),
        )
    ),
    # long texts, which are files nowhere here
    *((item(USER, MADE | {name: LONG}), f"input[1].{name}", "text_too_long") for name in ("call_id", "name", "arguments")),
    *(
        (fields, place, "text_too_long")
        for fields, place in (
            ({"metadata": {"a": LONG}}, "metadata"),
            ({"stop": LONG}, "stop"),
            ({"stop": ["x", LONG]}, "stop[1]"),
            ({"user": LONG}, "user"),
            ({"instructions": LONG}, "instructions"),
            ({"model": LONG}, "model"),
            ({"reasoning": {"effort": LONG}}, "reasoning.effort"),
            ({"tools": [FUNCTION | {"description": LONG}]}, "tools[0].description"),
            ({"tools": [FUNCTION | {"parameters": {LONG: 1}}]}, "tools[0].parameters"),
            (form_of(name=LONG, schema={}), "text.format.name"),
            ({"chat_template_kwargs": {"x": [LONG]}}, "chat_template_kwargs"),
            ({"logit_bias": {"1": 2}, "user": LONG}, "user"),
        )
    ),
]

# -- messages ------------------------------------------------------------------------------------------------------------

TOOL = {"name": "f", "input_schema": SCHEMA}
SOURCE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
TEXT = {"type": "text", "text": "x"}
FIRST = "messages[0].content[0]"


def of_assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": list(blocks)}, USER]}


OF_MESSAGES: list[Any] = [
    *each(
        max_tokens=[None, 0],
        messages=[[]],
        tools=[[TOOL] * 1025],
        tool_choice=[{"type": "any"}],
        stop_sequences=[["x"] * 17],
        temperature=[3],
    ),
    *each(UNSUPPORTED, priority=[-1], container=["x"]),
    ({"messages": [USER, {"role": "assistant", "content": "The"}]}, "messages[1].role", UNSUPPORTED),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    (parts({"type": "document", "source": {}}), f"{FIRST}.type"),
    (parts(SOURCE | {"source": {"type": "file", "file_id": "x"}}), f"{FIRST}.source.type"),
    (parts(TEXT, SOURCE), "messages[0].content[1].source", "invalid_image"),
    (parts(RESULT, TEXT, SOURCE), "messages[0].content[2].source", "invalid_image"),
    (parts(RESULT | {"content": [SOURCE]}), f"{FIRST}.content[0].source", "invalid_image"),
    (parts(RESULT | {"content": [TEXT, SOURCE], "is_error": True}), f"{FIRST}.content[1].source", "invalid_image"),
    (parts(USE), f"{FIRST}.type"),
    (of_assistant(RESULT), f"{FIRST}.type"),
    (of_assistant(TEXT, USE | {"input": [1]}), "messages[0].content[1].input"),
    ({"system": [{"type": "image"}]}, "system[0].type"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", UNSUPPORTED),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading", UNSUPPORTED),
    (choice([TOOL], type="tool"), "tool_choice.name"),
    (choice([TOOL], type="tool", name="g"), "tool_choice"),
    ({"output_config": {"effort": 3}}, "output_config.effort"),
    ({"stop_sequences": ["x" * 1025]}, "stop_sequences[0]"),
    *(
        (fields, place, "text_too_long")
        for fields, place in (
            (of_assistant(USE | {"input": {"x": LONG}}), f"{FIRST}.input"),
            (of_assistant(USE | {"name": LONG}), f"{FIRST}.name"),
            (parts(RESULT | {"tool_use_id": LONG}), f"{FIRST}.tool_use_id"),
            (parts(RESULT | {"content": LONG}), f"{FIRST}.content"),
            (parts(RESULT | {"content": LONG, "is_error": True}), f"{FIRST}.content"),
            (parts({"type": "text", "text": LONG}), f"{FIRST}.text"),
            ({"system": LONG}, "system"),
            ({"stop_sequences": [LONG]}, "stop_sequences[0]"),
            ({"tools": [TOOL | {"description": LONG}]}, "tools[0].description"),
        )
    ),
]

# -- embeddings and scores -----------------------------------------------------------------------------------------------

IMAGE = {"type": "image_url", "image_url": {"url": picture_url(), "detail": "auto"}}
NO_TEXT = {"type": "text", "text": ""}


def pictures(*urls: str) -> dict[str, Any]:
    return parts(*({"type": "image_url", "image_url": {"url": url}} for url in urls))


OF_EMBEDDINGS: list[Any] = [
    (b'{"model": ', None, "invalid_json"),
    (b"[]", None),
    *each(model=[7], encoding_format=["int8", "y" * 100_000], messages=["hello"], input=[[1, "a"], [1, [2]]]),
    *each("missing_input", input=["", [], None]),
    *(({"dimensions": value, "input": "a"}, "dimensions") for value in (0, 1.5, 5)),
    (parts({"type": "image_url"}), f"{FIRST}.image_url"),
    (parts({"type": "file", "file": {}}), f"{FIRST}.type"),
    (parts(IMAGE, {"type": "image_url", "image_url": {"url": 3}}), "messages[0].content[1].image_url.url"),
    (parts(IMAGE, NO_TEXT), "messages[0].content[1].text"),
    ({"messages": [{"content": ""}]}, "messages[0].content"),
    *(({"input": [[token]]}, "input[0][0]") for token in (-1, 2**31, 1.5)),
    ({"input": [[1, 2], []]}, "input[1]"),
    *(({"input": ["a", other]}, "input[1]") for other in (1, "")),
    ({"input": ["a", LONG]}, "input[1]", "text_too_long"),
    ({"input": "a", **parts(IMAGE)}, "input"),
    ({"messages": []}, "input", "missing_input"),
    (parts(), "messages", "missing_input"),
    # Before one of them is looked at, since there may be millions.
    *(({"input": [empty] * 9}, "input", "too_many_inputs") for empty in ("", [])),
    (parts(*[NO_TEXT] * 9), "messages", "too_many_inputs"),
    *(
        (pictures(*urls), f"messages[0].content[{place}].image_url", "invalid_image")
        for place, urls in ((1, (picture_url(), "data:,no picture", CUT)), (2, (picture_url(), picture_url(), CUT)))
    ),
]
OF_SCORES: list[Any] = [
    *each(documents=[None, [], ""], queries=[None, ["a", "b", "c"]], text_1=["a"]),
    ({"documents": ["a"] * 10}, "documents", "too_many_inputs"),
    ({"documents": ["up", ""]}, "documents[1]"),
    *(({"documents": [{"content": value}]}, "documents[0].content") for value in ([], ["a", "b"])),
    ({"documents": [1]}, "documents[0]"),
]
OF_RANKS: list[Any] = [
    *each(query=[["a"]], documents=[[]], top_n=[-1]),
    ({"max_tokens_per_doc": 5}, "max_tokens_per_doc", UNSUPPORTED),
    ({"documents": ["up", BROKEN]}, "documents[1]", "invalid_image"),
    ({"documents": ["x" * (3 << 20)] * 6}, "documents", "text_too_long"),
]

# -- recordings ----------------------------------------------------------------------------------------------------------

OF_RECORDINGS: list[Any] = [
    *each(
        model=[""],
        file=[None],
        response_format=["xml", "diarized_json"],
        temperature=["hot", "2", ["0", "1"]],
        stream=["maybe"],
    ),
    *each("invalid_audio", file=[b"no recording", b""]),
    *each(UNSUPPORTED, top_p=["0.5"], priority=["-1"]),
    ({"stream": "true", "response_format": "srt"}, "response_format", UNSUPPORTED),
    *(({"timestamp_granularities[]": value}, "timestamp_granularities") for value in ("word", "segment")),
    ({"include[]": "logprobs"}, "include", UNSUPPORTED),
    ({"prompt": "x" * 70_000}, "prompt", "text_too_long"),
]

REFUSED = {
    CHAT: OF_CHATS,
    COMPLETIONS: OF_COMPLETIONS,
    TOKENIZE: OF_TOKENS,
    RESPONSES: OF_RESPONSES,
    MESSAGES: OF_MESSAGES,
    EMBEDDINGS: OF_EMBEDDINGS,
    SCORE: OF_SCORES,
    RERANK: OF_RANKS,
    TRANSCRIPTIONS: OF_RECORDINGS,
    TRANSLATIONS: [({"to_language": "fr"}, "to_language", UNSUPPORTED)],
}
ROWS = [(route, *row, *("", "")[len(row) - 2 :]) for route, rows in REFUSED.items() for row in rows]


async def error_of(talk: Talk, route: str, fields: Any, *, stream: bool = False) -> tuple[int, dict[str, Any]]:
    """Returns the status and the error that such a body gets; the error has the form of the route's API."""
    body = fields if isinstance(fields, bytes) else {"model": "m", **BODIES[route], **fields}
    if route in (TRANSCRIPTIONS, TRANSLATIONS):
        file = body.pop("file", b"a file")
        form = httpx.Request(
            "POST", "http://test", data=body, files={"x": (None, "y")} if file is None else {"file": ("a", file)}
        )
        response = await talk.send(route, form.read(), headers={"content-type": form.headers["content-type"]})
    else:
        response = await talk.send(route, {"stream": True, **body} if stream else body)
    answer = response.json()
    if route in (MESSAGES, COUNT_TOKENS):
        from anthropic.types import ErrorResponse  # here: see the fixture ``anthropic``

        ErrorResponse.model_validate(answer, strict=True)
    else:
        assert (set(answer), set(answer["error"])) == ({"error"}, {"message", "type", "param", "code"})
    assert answer["error"]["type"] == (
        "not_found_error" if "type" in answer and response.status_code == 404 else "invalid_request_error"
    )
    return response.status_code, answer["error"]


@pytest.fixture
async def talk(open_talk: OpenTalk) -> Talk:
    return await open_talk(max_inputs=8)


@for_each(("route", "fields", "param", "code", "text"), ROWS)
async def test_what_is_wrong_is_named_as_its_caller_wrote_it(
    talk: Talk, route: str, fields: Any, param: str | None, code: str, text: str
) -> None:
    is_json = not isinstance(fields, bytes)
    talk.requests.clear()
    for stream in {False, is_json and route in STREAMS}:
        status, error = await error_of(talk, route, fields, stream=stream)
        refusal = (status, error["param"], error["code"])
        assert refusal == (413 if code == "too_many_values" else 400, param, code or "invalid_value"), error
        assert text in error["message"]
        assert len(error["message"]) < 400
        assert "cut-" not in error["message"]
        if route == RESPONSES:  # what it is translated to is not what its caller has written
            assert "messages[" not in error["message"]
            assert "response_format" not in error["message"]
        assert "$.stop[" not in error["message"] or route != MESSAGES
    assert talk.requests == []
    assert talk.engine.client.ring.statistics().slots_in_use == 0


# -- what a model can't do -----------------------------------------------------------------------------------------------

CAN_NOT: list[tuple[ModelDescription, list[Any]]] = [
    (
        PLAIN_MODEL,
        [
            (CHAT, {"n": 2}, "n"),
            (CHAT, {"min_tokens": 2}, "min_tokens"),
            (CHAT, {"presence_penalty": 0.1}, "presence_penalty"),
            (CHAT, {"frequency_penalty": 0.1}, "frequency_penalty"),
            (CHAT, {"stop_token_ids": [1]}, "stop_token_ids"),
            (CHAT, {"logprobs": True}, "logprobs"),
            (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
            (CHAT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
            (CHAT, {"tools": TOOLS}, "tools"),
            (CHAT, {"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
            (CHAT, {"messages": [{"role": "tool", "content": "4", "tool_call_id": "c"}]}, "messages"),
            (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            (RESPONSES, {"text": {"format": {"type": "json_object"}}}, "text.format"),
            (RESPONSES, {"tools": [FUNCTION]}, "tools"),
            (RESPONSES, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
            (RESPONSES, {"input": [MADE]}, "input"),
            (RESPONSES, INCLUDE, "include"),
            (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}, "output_config.format"),
            (
                TRANSCRIPTIONS,
                {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
                "timestamp_granularities",
            ),
        ],
    ),
    (
        model(strict_tools=False),
        [
            (CHAT, {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format"),
            (RESPONSES, {"tools": [FUNCTION], "text": {"format": {"type": "json_object"}}}, "text.format"),
        ],
    ),
]


@pytest.mark.parametrize(("description", "rows"), CAN_NOT, ids=["plain", "without strict tools"])
async def test_what_a_model_can_not_do_is_named_with_the_model(
    open_talk: OpenTalk, description: ModelDescription, rows: list[Any]
) -> None:
    talk = await open_talk(description=description)
    for route, fields, param in rows:
        for stream in (False, True):
            status, error = await error_of(talk, route, fields, stream=stream)
            assert (status, error["param"], error["code"]) == (400, param, UNSUPPORTED), (route, fields, error)
            is_capability = route == CHAT and param in (*CAPABILITIES, "response_format") and description is PLAIN_MODEL
            text = f"{param} is not supported by the model 'm' (executor test)" if is_capability else "the model 'm'"
            assert text in error["message"]
    assert talk.requests == []


@pytest.mark.parametrize(
    ("kinds", "fields", "message"),
    [
        (InputSpec(picture=PictureSpec()), {"input": "a text"}, "does not embed text"),
        (InputSpec(text=True), {"input": [[5, 6], "a"]}, "does not embed tokens"),
    ],
    ids=["texts", "tokens"],
)
async def test_inputs_that_a_model_does_not_embed_are_refused(
    open_talk: OpenTalk, kinds: InputSpec, fields: dict[str, Any], message: str
) -> None:
    talk = await open_talk(description=model(input=kinds))
    status, error = await error_of(talk, EMBEDDINGS, fields)
    assert (status, error["code"], error["param"]) == (400, "unsupported_input", "input")
    assert message in error["message"]
    assert talk.requests == []


NAMES = {
    CHAT: "chat completions",
    RESPONSES: "chat completions",
    MESSAGES: "chat completions",
    COMPLETIONS: "completions",
    COUNT_TOKENS: "tokenizing",
    TOKENIZE: "tokenizing",
    DETOKENIZE: "tokenizing",
    EMBEDDINGS: "embeddings",
    SCORE: "embeddings",
    RERANK: "embeddings",
    TRANSCRIPTIONS: "transcriptions",
    TRANSLATIONS: "translations",
}


@pytest.mark.parametrize("tasks", [["encode"], TASKS[1:]], ids=["embeds", "does all but embed"])
async def test_a_model_says_what_it_does_to_who_asks_for_something_else(open_talk: OpenTalk, tasks: list[str]) -> None:
    """And a server has no other model."""
    talk = await open_talk(description=msgspec.structs.replace(MODEL, tasks=tasks))
    for route, name in NAMES.items():
        fields = {TOKENIZE: {"prompt": "a"}, EMBEDDINGS: {"input": "a"}}.get(route, {})
        if (name == "embeddings") != (tasks == ["encode"]):
            status, error = await error_of(talk, route, fields)
            assert (status, error["code"], error["param"]) == (400, "unsupported_task", "model"), route
            assert (
                f"'m' does not do {name}, it does {'embeddings' if tasks == ['encode'] else 'chat completions'}"
                in error["message"]
            )
        status, error = await error_of(talk, route, {**fields, "model": "another"})
        assert (status, error["code"], error["param"]) == (404, "model_not_found", "model"), route
    assert talk.requests == []
