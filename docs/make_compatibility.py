"""The tables of docs/compatibility.md, made of those below: ``python docs/make_compatibility.py`` writes them.

What stands before the first of them is written by hand, in the page.

``tests/frontend/test_compatibility.py`` asks the application whether each row is true. The names are those of vLLM 0.32.0: its
routes, and the fields of its requests' types.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from shmring.frontend.anthropic.messages_request import CountTokensRequest, MessagesRequest
from shmring.frontend.openai.chat import ChatRequest
from shmring.frontend.openai.completions import CompletionRequest
from shmring.frontend.openai.embeddings import EmbeddingRequest
from shmring.frontend.openai.responses_request import ResponsesRequest
from shmring.frontend.openai.scoring import RerankRequest, ScoreRequest
from shmring.frontend.openai.speech import TranscriptionRequest, TranslationRequest
from shmring.frontend.openai.tokens import DetokenizeRequest, TokenizeRequest
from shmring.frontend.openai.unsupported import Unsupported

PAGE = Path(__file__).with_name("compatibility.md")

#: Routes of vLLM that are here.
ROUTES = {
    "GET /health": "a body says why not, if the engine is not well",
    "GET /metrics": "vLLM's names with `shmring_` where a number has its meaning ([all](reference.md#get-metrics))",
    "GET /openapi.json": "",
    "GET /docs": "",
    "GET /v1/models": "also one model: `GET /v1/models/NAME`",
    "GET /version": "",
    "POST /v1/chat/completions": "",
    "POST /v1/responses": "`n` and `max_tokens` are of chats",
    "GET /v1/responses/{response_id}": "whole; for `--response-lifetime`, within `--response-store-nbytes`, and for its caller "
    "alone. `DELETE` forgets it; `/input_items` lists its input",
    "POST /v1/messages": "as Anthropic's API: a picture is a block `image`; the server runs no tools of its own",
    "POST /v1/messages/count_tokens": "with a model; pictures count as well",
    "POST /v1/audio/transcriptions": "with a Whisper model; streams are OpenAI's",
    "POST /v1/audio/translations": "as `/v1/audio/transcriptions`, in English",
    "POST /v1/completions": "",
    "POST /tokenize": "with a model",
    "POST /detokenize": "with a model",
    "GET /ping": "as `/health`",
    "POST /ping": "as `/health`",
    "GET /load": "requests in the engines, those of all frontends",
    "POST /pause": "with `--admin-key`; `mode` `abort` and `wait`; requests that come meanwhile wait, until their deadlines",
    "POST /resume": "with `--admin-key`",
    "GET /is_paused": "with `--admin-key`",
    "POST /start_profile": "with `--admin-key` and `--profiler-dir`",
    "POST /stop_profile": "with `--admin-key`; the answer names the files",
    "POST /abort_requests": "with `--admin-key`; those of all frontends, from the moment when their head has come; "
    "they end with an error: `aborted`",
    "POST /score": "cosines of embeddings, by any model that embeds; cross-encoders are not served",
    "POST /v1/score": "as `/score`",
    "POST /rerank": "by the same cosines",
    "POST /v1/rerank": "as `/rerank`",
    "POST /v2/rerank": "as `/rerank`",
    "POST /v1/embeddings": "one embedding for each part ([decision 11](decisions/0011-an-embedding-for-each-part.md))",
}

#: Routes of vLLM that are here and always refuse.
REFUSED_ROUTES = {"POST /v1/responses/{response_id}/cancel": "a 400, as nothing goes on in the background"}

#: Routes of vLLM that are not here, with what does the same.
MISSING_ROUTES = {
    "POST /v1/chat/completions/batch": "",
    "POST /v1/chat/completions/render": "",
    "POST /v1/completions/render": "",
    "POST /pooling": "",
    "POST /classify": "",
    "POST /v2/embed": "",
    "POST /cohere/v2/chat": "",
    "POST /generative_scoring": "",
    "POST /inference/v1/generate": "",
    "POST /invocations": "",
    "GET /tokenizer_info": "",
    "GET /server_info": "",
    "POST /v1/load_lora_adapter": "",
    "POST /v1/unload_lora_adapter": "",
    "POST /reset_mm_cache": "`EngineClient.reset_mm_cache`",
    "POST /reset_prefix_cache": "",
    "POST /reset_encoder_cache": "",
    "POST /collective_rpc": "`EngineClient.collective_rpc`",
    "POST /sleep": "",
    "POST /wake_up": "",
    "GET /is_sleeping": "",
    "POST /scale_elastic_ep": "",
    "POST /init_weight_transfer_engine": "",
    "POST /update_weights": "",
}


#: Options of `vllm serve` that are here by the same name, with what they are besides.
OPTIONS = {
    **dict.fromkeys(("--allow-credentials", "--allowed-headers", "--allowed-methods", "--allowed-origins"), ""),
    **dict.fromkeys(("--allowed-local-media-path", "--allowed-media-domains", "--host", "--port", "--root-path", "--uds"), ""),
    **dict.fromkeys(("--limit-mm-per-prompt", "--media-io-kwargs", "--mm-processor-kwargs", "--model"), ""),
    **dict.fromkeys(("--max-num-seqs", "--shutdown-timeout"), ""),
    **dict.fromkeys(("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-certfile", "--ssl-keyfile"), ""),
    "--api-key": "several as several such options",
    "--api-server-count": "",
    "--config": "a YAML file",
    "--data-parallel-size": "also `-dp`; all on this machine",
    "--disable-uvicorn-access-log": "the opposite of `--access-log`, and the default",
    "--dtype": "an option of the executor",
    "--log-level": "",
    "--max-model-len": "an option of the executor",
    "--mm-processor-cache-gb": "a part of the slab",
    "--otlp-traces-endpoint": "",
    "--served-model-name": "several as several such options",
    "--uvicorn-log-level": "another name of `--log-level`",
}


class Fields(msgspec.Struct, frozen=True):
    """The fields of vLLM's requests to one route. Each has a value that asks for something: what the test sends.

    Attributes:
        kind: our type of the request.
        base: a request that needs nothing else.
        required: fields that a request must have.
        works, taken, refused, named: see the page.
        notes: of fields.
        beside: what a field needs beside it.
    """

    kind: type[msgspec.Struct]
    base: Mapping[str, Any]
    required: tuple[str, ...]
    works: Mapping[str, Any]
    taken: Mapping[str, Any]
    refused: Mapping[str, Any]
    named: Mapping[str, Any]
    notes: Mapping[str, str] = {}
    beside: Mapping[str, Mapping[str, Any]] = {}


_OTHER_OPTIONS = """\
Dashes and underscores in options are the same. Other options of `vllm serve` 0.32 are refused by an error that says what does
the same here, or why it is needless; those of vLLM's engine with a word on `--executor-options`, which has what the executor
takes.
"""

MODEL = "a model"
A_RESPONSE = "that of an answer"  # in whose place the test puts one
#: A WAV file of a tenth of a second, in bytes: its body is a form.
RECORDING = struct.pack("<4sI4s4sIHHIIHH4sI", b"RIFF", 3236, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16, b"data", 3200)
RECORDING += bytes(3200)

_TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
_CONVERSATION = {"prompt": None, "messages": [{"role": "user", "content": "Hi"}]}

_GENERATION_WORKS = {
    "frequency_penalty": 0.5,
    "ignore_eos": True,
    "logit_bias": {"5": 1.5},
    "max_tokens": 3,
    "min_p": 0.1,
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": 0.5,
    "priority": 2,
    "repetition_penalty": 1.2,
    "response_format": {"type": "json_object"},
    "seed": 4,
    "stop": ["x"],
    "stop_token_ids": [1],
    "stream": True,
    "stream_options": {"include_usage": True},
    "structured_outputs": {"regex": "a"},
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
}

_GENERATION_REFUSED = {
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "ec_transfer_params": {"a": 1},
    "echo": True,
    "include_stop_str_in_output": True,
    "kv_transfer_params": {"a": 1},
    "length_penalty": 2.0,
    "logprob_token_ids": [1],
    "prompt_logprobs": 1,
    "repetition_detection": {"max_pattern_size": 2},
    "return_mm_kwargs": True,
    "return_token_ids": True,
    "return_token_offsets": True,
    "return_tokens_as_token_ids": True,
    "routed_experts_prompt_start": 1,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "thinking_token_budget": 5,
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "use_beam_search": True,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}

_GENERATION_NAMED = {"cache_salt": "x", "mm_payload": "none", "request_id": "x", "session_id": "x", "stream_interval": 2}

_OURS = "with a model"

_GENERATION_NOTES = {
    "frequency_penalty": _OURS,
    "min_tokens": f"{_OURS}; not beside a form of the answer",
    "n": f"{_OURS}; up to `--max-num-seqs`",
    "presence_penalty": _OURS,
    "response_format": f"{_OURS}: `json_object` and `json_schema`; beside tools where calls can be "
    "required: then an answer is JSON, or calls. A schema that can't be kept to is refused",
    "stop": "up to 16 texts, of 1024 characters at most",
    "stop_token_ids": _OURS,
    "structured_outputs": f"{_OURS}: `json`, `json_object`, `regex` and `choice`",
    "priority": "lower is sooner",
    "request_id": "the header `X-Request-Id` does that",
    "stream_options": "`continuous_usage_stats` is named",
}

# Those that vLLM has in responses, too.
_GENERATION_FIELDS_OF_RESPONSES = frozenset(
    {
        *("cache_salt", "ec_transfer_params", "frequency_penalty", "ignore_eos", "include_stop_str_in_output"),
        *("kv_transfer_params", "logit_bias", "min_p", "mm_payload", "presence_penalty", "priority", "repetition_penalty"),
        *("request_id", "return_mm_kwargs", "seed", "session_id", "skip_special_tokens", "stop", "stop_token_ids", "stream"),
        *("structured_outputs", "temperature", "top_k", "top_p", "vllm_xargs", "watermarking"),
    }
)


def _of_responses(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in fields if name in _GENERATION_FIELDS_OF_RESPONSES}


_LOGPROBS = "message.output_text.logprobs"
_RESPONSES_TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]

_SCORING_REFUSED = {
    "chat_template_kwargs": {"a": 1},
    "instruction": "x",
    "max_tokens_per_doc": 5,
    "max_tokens_per_query": 5,
    "mm_processor_kwargs": {"a": 1},
    "padding": "max_length",
    "truncate_prompt_tokens": 5,
    "truncation_side": "left",
    "use_activation": False,
}
_SCORING_NAMED = {"cache_salt": "x", "request_id": "x"}
_SCORING_NOTES = {"priority": _GENERATION_NOTES["priority"], "request_id": _GENERATION_NOTES["request_id"]}
_NO_QUERIES = {"queries": None, "documents": None}

_MESSAGES_TOOLS = [{"name": "f", "input_schema": {"type": "object", "properties": {}}}]
_MESSAGES_WORKS = {
    "chat_template_kwargs": {"a": 1},
    "output_config": {"effort": "high"},
    "system": "Be brief.",
    "tool_choice": {"type": "any"},
    "tools": _MESSAGES_TOOLS,
}
_MESSAGES_REFUSED = {
    "mcp_servers": [{"name": "x"}],
    "output_format": {"type": "json_schema"},
}
_MESSAGES_NAMED = {"context_management": {"edits": []}}
_MESSAGES_TAKEN = {"cache_control": {"type": "ephemeral"}}
_MESSAGES_NOTES = {
    "cache_control": "also that of blocks",
    "messages": "`is_error` of a tool's result: the model reads `Error: ` before the result, since chat templates have no "
    "place for it. `thinking` of earlier answers is named",
    "output_config": "`effort`: as `reasoning_effort` of chats; `format`: a JSON schema, not beside tools",
    "thinking": "with `disabled`, thinking is left out of the answer; `chat_template_kwargs` say whether the model thinks. "
    "`budget_tokens` is named",
    "tools": "as in chats; those that the vendor's server runs are named",
}

_SPEECH_WORKS = {
    "priority": "2",
    "prompt": "It rains.",
    "response_format": "verbose_json",
    "seed": "4",
    "stream": "true",
    "temperature": "0.5",
}
_SPEECH_TAKEN = {"stream_include_usage": "true"}
_SPEECH_REFUSED = {
    "hotwords": "x",
    "include_stop_str_in_output": "true",
    "length_penalty": "2",
    "max_completion_tokens": "5",
    "n": "2",
    "stream_continuous_usage_stats": "true",
    "to_language": "fr",
    "use_beam_search": "true",
    "watermarking": "true",
}
_SPEECH_NOTES = {
    "file": "any recording of the [formats](#formats) above",
    "prompt": "before the first window of 30 s",
    "response_format": "`json`, `text`, `srt`, `verbose_json` and `vtt`; a stream has `json`",
    "stream_include_usage": "the last event always has the usage",
}

FIELDS = {
    "POST /v1/chat/completions": Fields(
        ChatRequest,
        base={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
        required=("messages", "model"),
        works=_GENERATION_WORKS
        | {
            "chat_template_kwargs": {"a": 1},
            "logprobs": True,
            "max_completion_tokens": 3,
            "parallel_tool_calls": False,
            "reasoning_effort": "high",
            "tool_choice": "required",
            "tools": _TOOLS,
            "top_logprobs": 2,
        },
        taken={"user": "me"},
        refused=_GENERATION_REFUSED
        | {
            "add_generation_prompt": False,
            "add_special_tokens": True,
            "chat_template": "x",
            "continue_final_message": True,
            "documents": [{"text": "x"}],
            "include_reasoning": False,
            "media_io_kwargs": {"video": {"num_frames": 4}},
            "mm_processor_kwargs": {"a": 1},
            "return_prompt_text": True,
        },
        named=_GENERATION_NAMED,
        notes=_GENERATION_NOTES
        | {
            "chat_template_kwargs": "variables that the template does not have are refused",
            "reasoning_effort": "a variable of the template; named if it has none",
            "logprobs": f"{_OURS}; those of the model itself, before penalties and temperature",
            "tool_choice": "`required` and a named function, which is called once, where the model writes its calls as JSON "
            "between two marks; refused with `--executor vllm`",
            "tools": f"{_OURS}, if the model's template takes them and transformers can read its calls; "
            "`strict` where calls can be required, and is named elsewhere; beside functions, tools of other types are named",
            "top_logprobs": "up to 20; of all answers to a request, 262,144 together",
        },
        beside={
            "parallel_tool_calls": {"tools": _TOOLS},
            "stream_options": {"stream": True},
            "tool_choice": {"tools": _TOOLS},
            "top_logprobs": {"logprobs": True},
        },
    ),
    "POST /v1/responses": Fields(
        ResponsesRequest,
        base={"model": MODEL, "input": "Hi"},
        required=("input", "model"),
        works=_of_responses(_GENERATION_WORKS)
        | {
            "chat_template_kwargs": {"a": 1},
            "instructions": "Be brief.",
            "max_output_tokens": 3,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "previous_response_id": A_RESPONSE,
            "reasoning": {"effort": "high"},
            "store": False,
            "include": [_LOGPROBS],
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "top_logprobs": 2,
            "tools": _RESPONSES_TOOLS,
            "user": "me",
        },
        taken={},
        refused=_of_responses(_GENERATION_REFUSED)
        | {
            "background": True,
            "enable_response_messages": True,
            "include_reasoning": False,
            "max_tool_calls": 1,
            "media_io_kwargs": {"video": {"num_frames": 4}},
            "mm_processor_kwargs": {"a": 1},
            "previous_input_messages": [{"role": "user"}],
            "prompt": {"id": "x"},
            "service_tier": "flex",
            "truncation": "auto",
        },
        named=_of_responses(_GENERATION_NAMED) | {"prompt_cache_key": "x"},
        notes={
            "include": f"`{_LOGPROBS}`: {_OURS}; those of the text's tokens. `reasoning.encrypted_content` is taken, since "
            "reasoning is in the answer anyway, in plain text; and what is of the vendor's own tools, since there are none",
            "input": "a text, or items: messages, `function_call`, `function_call_output`, `item_reference`; `reasoning` is "
            "named",
            "previous_response_id": "of a response that is kept",
            "store": "true by default, unless the server keeps none",
            "metadata": "is in the answer; up to 16 names of 64 characters, with texts of 512",
            "priority": _GENERATION_NOTES["priority"],
            "reasoning": "`effort`: as `reasoning_effort` of chats; other fields are named",
            "request_id": _GENERATION_NOTES["request_id"],
            "stop": _GENERATION_NOTES["stop"],
            "text": "`format`: as `response_format` of chats; other fields are named",
            "tool_choice": "as in chats",
            "tools": "of the type `function`, as in chats, also in a `namespace`: the model is told of `find` in `crm` as "
            "`crm__find`, and a call names both apart; beside these, those that the vendor's server runs are named",
            "top_logprobs": f"up to 20, beside `{_LOGPROBS}` in `include`, and named without it; of an answer, 262,144 "
            "logprobs together",
            "user": "is in the answer",
        },
        beside={
            "parallel_tool_calls": {"tools": _RESPONSES_TOOLS},
            "tool_choice": {"tools": _RESPONSES_TOOLS},
            "top_logprobs": {"include": [_LOGPROBS]},
        },
    ),
    "POST /v1/messages": Fields(
        MessagesRequest,
        base={"model": MODEL, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]},
        required=("max_tokens", "messages", "model"),
        works=_MESSAGES_WORKS
        | {
            "priority": 2,
            "stop_sequences": ["x"],
            "stream": True,
            "temperature": 0.5,
            "thinking": {"type": "disabled"},
            "top_k": 4,
            "top_p": 0.5,
        },
        taken=_MESSAGES_TAKEN | {"metadata": {"user_id": "me"}},
        refused=_MESSAGES_REFUSED
        | {
            "container": "x",
            "ec_transfer_params": {"a": 1},
            "kv_transfer_params": {"a": 1},
            "return_mm_kwargs": True,
            "service_tier": "flex",
            "speed": "fast",
            "vllm_xargs": {"a": 1},
            "watermarking": True,
        },
        named=_MESSAGES_NAMED | {"cache_salt": "x", "inference_geo": "eu", "mm_payload": "none"},
        notes=_MESSAGES_NOTES | {"priority": _GENERATION_NOTES["priority"], "stop_sequences": _GENERATION_NOTES["stop"]},
        beside={"tool_choice": {"tools": _MESSAGES_TOOLS}},
    ),
    "POST /v1/messages/count_tokens": Fields(
        CountTokensRequest,
        base={"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]},
        required=("messages", "model"),
        works={name: value for name, value in _MESSAGES_WORKS.items() if name != "tool_choice"},
        taken=_MESSAGES_TAKEN | {"thinking": {"type": "disabled"}, "tool_choice": {"type": "auto"}},
        refused=_MESSAGES_REFUSED,
        named=_MESSAGES_NAMED,
        notes={name: note for name, note in _MESSAGES_NOTES.items() if name != "thinking"},
    ),
    "POST /v1/audio/transcriptions": Fields(
        TranscriptionRequest,
        base={"file": RECORDING, "model": MODEL},
        required=("file", "model"),
        works=_SPEECH_WORKS | {"language": "en", "timestamp_granularities[]": "word"},
        taken=_SPEECH_TAKEN,
        refused=_SPEECH_REFUSED
        | {
            "frequency_penalty": "0.5",
            "min_p": "0.1",
            "presence_penalty": "0.5",
            "repetition_penalty": "1.2",
            "top_k": "4",
            "top_p": "0.5",
            "vllm_xargs": '{"a": 1}',
        },
        named={},
        notes=_SPEECH_NOTES
        | {
            "timestamp_granularities[]": "of `verbose_json`: `segment`, the default, or `word` with `--executor transformers`, "
            "if the model names its `alignment_heads`"
        },
        beside={"timestamp_granularities[]": {"response_format": "verbose_json"}, "stream_include_usage": {"stream": "true"}},
    ),
    "POST /v1/audio/translations": Fields(
        TranslationRequest,
        base={"file": RECORDING, "model": MODEL},
        required=("file", "model"),
        works=_SPEECH_WORKS,
        taken=_SPEECH_TAKEN,
        refused=_SPEECH_REFUSED,
        named={},
        notes=_SPEECH_NOTES,
        beside={"stream_include_usage": {"stream": "true"}},
    ),
    "POST /v1/completions": Fields(
        CompletionRequest,
        base={"model": MODEL, "prompt": "Once"},
        required=("model", "prompt"),
        works=_GENERATION_WORKS | {"add_special_tokens": False, "logprobs": 2},
        taken={"user": "me"},
        refused=_GENERATION_REFUSED | {"prompt_embeds": "x", "suffix": "x"},
        named=_GENERATION_NAMED,
        notes=_GENERATION_NOTES
        | {
            "logprobs": f"{_OURS}; up to 20; of all answers to a request, 262,144 together",
            "prompt": "texts or arrays of tokens; with `n`, up to 128 answers",
        },
        beside={"stream_options": {"stream": True}},
    ),
    "POST /tokenize": Fields(
        TokenizeRequest,
        base={"model": MODEL, "prompt": "Once"},
        required=("model",),
        works={
            "add_special_tokens": False,
            "messages": [{"role": "user", "content": "Hi"}],
            "prompt": "Twice",
            "tools": _TOOLS,
            "chat_template_kwargs": {"a": 1},
        },
        taken={},
        refused={
            "add_generation_prompt": False,
            "chat_template": "x",
            "continue_final_message": True,
            "media_io_kwargs": {"video": {"num_frames": 4}},
            "mm_processor_kwargs": {"a": 1},
            "return_token_strs": True,
        },
        named={},
        notes={
            "add_special_tokens": "with `prompt`",
            "messages": "instead of `prompt`; without media",
            "prompt": "a text",
        },
        beside={
            "chat_template_kwargs": _CONVERSATION,
            "messages": {"prompt": None},
            "tools": _CONVERSATION,
        },
    ),
    "POST /detokenize": Fields(
        DetokenizeRequest,
        base={"model": MODEL, "tokens": [1]},
        required=("model", "tokens"),
        works={},
        taken={},
        refused={},
        named={},
    ),
    "POST /v1/embeddings": Fields(
        EmbeddingRequest,
        base={"model": MODEL, "input": ["a"]},
        required=("model",),
        works={
            "dimensions": 2,
            "encoding_format": "base64",
            "input": ["b"],
            "messages": [{"role": "user", "content": "b"}],
            "priority": 2,
        },
        taken={"user": "me"},
        refused={
            "add_generation_prompt": True,
            "add_special_tokens": False,
            "chat_template": "x",
            "chat_template_kwargs": {"a": 1},
            "continue_final_message": True,
            "embed_dtype": "float16",
            "endianness": "big",
            "media_io_kwargs": {"video": {"num_frames": 4}},
            "mm_processor_kwargs": {"a": 1},
            "padding": "max_length",
            "truncate_prompt_tokens": 5,
            "truncation_side": "left",
            "use_activation": False,
        },
        named={"cache_salt": "x", "request_id": "x"},
        notes={
            "encoding_format": "`float` and `base64`",
            "input": "texts or arrays of tokens, those with `--executor transformers`",
            "messages": "instead of `input`",
            "priority": _GENERATION_NOTES["priority"],
            "request_id": _GENERATION_NOTES["request_id"],
        },
        beside={"messages": {"input": []}},
    ),
    "POST /score": Fields(
        ScoreRequest,
        base={"model": MODEL, "queries": "a", "documents": ["b"]},
        required=("documents", "model", "queries"),
        works={
            "data_1": "c",
            "data_2": ["c"],
            "items": ["c"],
            "priority": 2,
            "text_1": "c",
            "text_2": ["c"],
        },
        taken={"user": "me"},
        refused=_SCORING_REFUSED,
        named=_SCORING_NAMED,
        notes=_SCORING_NOTES
        | {
            "data_1": "instead of `queries`",
            "data_2": "instead of `documents`",
            "documents": 'texts, or `{"content": [...]}` with one part',
            "items": "instead of `documents`",
            "queries": "one, or as many as there are documents",
            "text_1": "instead of `queries`",
            "text_2": "instead of `documents`",
        },
        beside={
            "data_1": _NO_QUERIES | {"data_2": ["b"]},
            "data_2": _NO_QUERIES | {"data_1": "a"},
            "items": {"documents": None},
            "text_1": _NO_QUERIES | {"text_2": ["b"]},
            "text_2": _NO_QUERIES | {"text_1": "a"},
        },
    ),
    "POST /rerank": Fields(
        RerankRequest,
        base={"model": MODEL, "query": "a", "documents": ["b", "c"]},
        required=("documents", "model", "query"),
        works={"priority": 2, "top_n": 1},
        taken={"user": "me"},
        refused=_SCORING_REFUSED,
        named=_SCORING_NAMED,
        notes=_SCORING_NOTES | {"documents": 'texts, or `{"content": [...]}` with one part; texts are in the answer'},
    ),
}

#: Routes with the route that most of their fields are as of.
_LIKE = {
    "POST /v1/completions": "POST /v1/chat/completions",
    "POST /v1/messages/count_tokens": "POST /v1/messages",
    "POST /v1/audio/translations": "POST /v1/audio/transcriptions",
    "POST /rerank": "POST /score",
}


def make_page() -> str:
    """Returns the page's text: what stands before the tables now, and new tables."""
    by_hand, heading, _ = PAGE.read_text().partition("## Routes\n")
    assert heading
    here = [(f"`{route}`", "works", note) for route, note in ROUTES.items()]
    here += [(f"`{route}`", "refused", note) for route, note in REFUSED_ROUTES.items()]
    missing = [(f"`{route}`", "not there", note) for route, note in MISSING_ROUTES.items() if note]
    sections = [f"{by_hand}## Routes\n\n{_table('route', here + missing)}\nNo other route of vLLM is there.\n"]
    there = [(f"`{option}`", "works", note) for option, note in sorted(OPTIONS.items())]
    sections.append(f"## Options of `vllm serve`\n\n{_table('option', there)}\n{_OTHER_OPTIONS}")
    rows = {route: _rows(fields) for route, fields in FIELDS.items()}
    for route in FIELDS:
        other = _LIKE.get(route)
        same = [row for row in rows[route] if other is not None and row in rows[other]]
        more = [(name, f"as of `{other}`", "") for name, *_ in same]
        shown = [row for row in rows[route] if row not in same]
        sections.append(f"## `{route}`\n\n{_table('field', shown + more)}")
    return "\n".join(sections)


def _rows(fields: Fields) -> list[tuple[str, str, str]]:
    outcomes = dict.fromkeys(fields.required, "works, and is required")
    for outcome in ("works", "taken", "refused", "named"):
        outcomes |= dict.fromkeys(getattr(fields, outcome), outcome)
    possible = {
        name: " or ".join(f"`{msgspec.json.encode(value).decode()}`" for value in values)
        for name, values in Unsupported(fields.kind).items()
    }
    return [(f"`{name}`", outcomes[name], fields.notes.get(name) or possible.get(name, "")) for name in sorted(outcomes)]


def _table(first: str, rows: list[tuple[str, str, str]]) -> str:
    """Returns a table in which names of which the same is said share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, *said in rows:
        names.setdefault((said[0], said[1]), []).append(name)
    lines = [f"| {first} | here | |", "|---|---|---|"]
    lines.extend(f"| {', '.join(same)} | {' | '.join(said)} |" for said, same in names.items())
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page())
