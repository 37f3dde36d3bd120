"""Chats: requests and answers of ``POST /v1/chat/completions``, whole and in pieces.

Fields that this server does not implement: :mod:`shmring.frontend.openai.unsupported`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shmring.engine.protocol import ChatMessage, FinishReason, GenerateRequest, MediumPart, SamplingParams
from shmring.engine.protocol import TextPart as EngineTextPart
from shmring.frontend.errors import ApiError
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.messages import (
    INT64,
    MAX_MESSAGES,
    MAX_PARTS,
    ContentPart,
    Priority,
    TextPart,
    check_length,
    source_of,
)
from shmring.frontend.openai.parsing import BodyParser
from shmring.frontend.openai.unsupported import check_supported, only, unsupported_of

__all__ = [
    "CHAT_PARSER",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatRequest",
    "Choice",
    "ChunkChoice",
    "Delta",
    "ResponseMessage",
    "Usage",
    "engine_request",
]

_MAX_TOKENS = 2**31 - 1
_MAX_STOP_TEXTS = 4  # as in OpenAI's API
_MAX_CHARACTERS = 4 << 20  # of all texts together: a million tokens, and a few milliseconds of the loops that they pass

_TokenCount = Annotated[int, Meta(ge=1, le=_MAX_TOKENS)]
_StopText = Annotated[str, Meta(min_length=1)]


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """What an assistant has said instead of an answer: a text like others."""

    refusal: str


class ChatMessageParam(msgspec.Struct):
    """A message of the conversation. Messages of tools and functions are not supported. A text alone can be a part."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart | RefusalPart | str], Meta(max_length=MAX_PARTS)] | None = None
    refusal: Annotated[str | None, Meta(description="What an assistant has said instead of content.")] = None
    tool_calls: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only([])] = None


class StreamOptions(msgspec.Struct):
    """What a stream is to tell besides the answer: with `include_usage`, its last chunk says how many tokens were used."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct):
    """The body of `POST /v1/chat/completions`; what OpenAI does not have, such as `top_k` and `priority`, is as in vLLM."""

    model: str
    messages: Annotated[list[ChatMessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: _TokenCount | None = None
    max_completion_tokens: _TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=_MAX_TOKENS)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=2)] | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    seed: Annotated[int, Meta(ge=-INT64, le=INT64 - 1)] | None = None
    stop: _StopText | Annotated[list[_StopText], Meta(max_length=_MAX_STOP_TEXTS)] | None = None
    user: str | None = None
    priority: Priority | None = None
    ignore_eos: Annotated[bool | None, Meta(description="Go on to max_tokens whatever the model says.")] = None
    n: Annotated[Any, only(1)] = None
    tools: Annotated[Any, only([])] = None
    tool_choice: Annotated[Any, only("none", "auto")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    response_format: Annotated[Any, only({"type": "text"})] = None
    logprobs: Annotated[Any, only(False)] = None
    top_logprobs: Annotated[Any, only(0)] = None
    presence_penalty: Annotated[Any, only(0)] = None
    frequency_penalty: Annotated[Any, only(0)] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    best_of: Annotated[Any, only(1)] = None
    use_beam_search: Annotated[Any, only(False)] = None
    min_tokens: Annotated[Any, only(0)] = None
    stop_token_ids: Annotated[Any, only([])] = None
    guided_json: Annotated[Any, only()] = None
    guided_regex: Annotated[Any, only()] = None
    guided_choice: Annotated[Any, only()] = None
    guided_grammar: Annotated[Any, only()] = None
    structured_outputs: Annotated[Any, only()] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    length_penalty: Annotated[Any, only(1)] = None
    bad_words: Annotated[Any, only([])] = None
    truncate_prompt_tokens: Annotated[Any, only()] = None
    prompt_logprobs: Annotated[Any, only()] = None
    echo: Annotated[Any, only(False)] = None
    include_stop_str_in_output: Annotated[Any, only(False)] = None
    skip_special_tokens: Annotated[Any, only(True)] = None
    reasoning_effort: Annotated[Any, only("none")] = None
    include_reasoning: Annotated[Any, only(True)] = None
    thinking_token_budget: Annotated[Any, only()] = None
    parallel_tool_calls: Annotated[Any, only(True)] = None
    documents: Annotated[Any, only([])] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    truncation_side: Annotated[Any, only()] = None
    allowed_token_ids: Annotated[Any, only()] = None
    logprob_token_ids: Annotated[Any, only([])] = None
    spaces_between_special_tokens: Annotated[Any, only(True)] = None
    watermarking: Annotated[Any, only(False)] = None
    repetition_detection: Annotated[Any, only()] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    return_token_ids: Annotated[Any, only(False)] = None
    return_tokens_as_token_ids: Annotated[Any, only(False)] = None
    return_token_offsets: Annotated[Any, only(False)] = None
    return_prompt_text: Annotated[Any, only(False)] = None
    return_mm_kwargs: Annotated[Any, only(False)] = None
    kv_transfer_params: Annotated[Any, only()] = None
    ec_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only({})] = None
    routed_experts_prompt_start: Annotated[Any, only(0)] = None


class Usage(msgspec.Struct):
    """Tokens used; those of media count in the prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ResponseMessage(msgspec.Struct):
    """The answer."""

    content: str
    role: Literal["assistant"] = "assistant"


class Choice(msgspec.Struct):
    """The one answer of a request."""

    message: ResponseMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: None = None


class ChatCompletion(msgspec.Struct):
    """The answer to `POST /v1/chat/completions` without `stream`."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"


class Delta(msgspec.Struct, omit_defaults=True):
    """What is new."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct):
    """What is new of the one answer; `finish_reason` is in the last of them."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: None = None


class ChatCompletionChunk(msgspec.Struct):
    """An event of a stream. With `include_usage`, the last one has no choices and the usage."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


#: The fields that are not implemented, each with the values that change nothing.
_UNSUPPORTED = unsupported_of(ChatRequest)
_UNSUPPORTED_OF_MESSAGES = unsupported_of(ChatMessageParam)

#: For bodies of requests.
CHAT_PARSER = BodyParser(ChatRequest)


def engine_request(request: ChatRequest) -> tuple[GenerateRequest, list[MediaSource]]:
    """Takes a request apart, and empties its messages, which are most of its memory.

    Returns:
        The request for the engine, still without its media, and the sources of the media, in order.

    Raises:
        ApiError: the request asks for something that is not implemented.
    """
    check_supported(request, _UNSUPPORTED)
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options are for streams: set stream", code="invalid_value", param="stream_options")
    messages, request.messages = request.messages, []
    count = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if count > MAX_PARTS:
        text = f"the messages have {count} parts, at most {MAX_PARTS} are accepted"
        raise ApiError(400, text, code="too_many_parts", param="messages")
    sources: list[MediaSource] = []
    engine_messages = [_engine_message(message, f"messages[{index}]", sources) for index, message in enumerate(messages)]
    _check_texts(engine_messages)
    return GenerateRequest(engine_messages, sampling=_sampling(request), priority=request.priority or 0), sources


def _check_texts(messages: list[ChatMessage]) -> None:
    characters = 0
    for index, message in enumerate(messages):
        for part in message.parts:
            if isinstance(part, EngineTextPart):
                check_length(part.text, f"messages[{index}].content")
                characters += len(part.text)
    if characters > _MAX_CHARACTERS:
        text = f"the messages have {characters} characters of text, at most {_MAX_CHARACTERS} are accepted"
        raise ApiError(400, text, code="text_too_long", param="messages")


def _engine_message(message: ChatMessageParam, param: str, sources: list[MediaSource]) -> ChatMessage:
    """Returns a message as the engine takes it; its media are appended to the sources."""
    if message.role in ("tool", "function"):
        text = f"messages of the role {message.role!r} are not supported: this server does not call tools"
        raise ApiError(400, text, code="unsupported_value", param=f"{param}.role")
    check_supported(message, _UNSUPPORTED_OF_MESSAGES, f"{param}.")
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal or ""  # what clients send back of an answer without content
    if content is None:
        raise ApiError(400, "a message must have content", code="invalid_value", param=f"{param}.content")
    if isinstance(content, str):
        return ChatMessage(message.role, [EngineTextPart(content)])
    parts: list[EngineTextPart | MediumPart] = []
    for index, part in enumerate(content):
        if isinstance(part, str):
            parts.append(EngineTextPart(part))
        elif isinstance(part, TextPart):
            parts.append(EngineTextPart(part.text))
        elif isinstance(part, RefusalPart):
            parts.append(EngineTextPart(part.refusal))
        else:
            parts.append(MediumPart(len(sources)))
            sources.append(source_of(part, f"{param}.content[{index}]"))
    return ChatMessage(message.role, parts)


def _sampling(request: ChatRequest) -> SamplingParams:
    most = request.max_completion_tokens if request.max_completion_tokens is not None else request.max_tokens
    stop = request.stop or []
    return SamplingParams(
        max_tokens=most,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=request.logit_bias or {},
        seed=request.seed,
        stop=[stop] if isinstance(stop, str) else stop,
        ignore_eos=bool(request.ignore_eos),
    )
