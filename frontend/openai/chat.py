"""Chats: requests and answers of ``POST /v1/chat/completions``, whole and in pieces.

Fields that this server does not implement: :mod:`shmring.frontend.openai.unsupported`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shmring.engine.protocol import (
    ChatMessage,
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MediumPart,
    ModelDescription,
    TokenLogprobs,
    parameters_of,
)
from shmring.engine.protocol import TextPart as EngineTextPart
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.body_scan import MAX_VALUES, has_too_many_values
from shmring.frontend.http.parsing import MAX_IGNORED, BodyParser
from shmring.frontend.inference import Generation
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.choices import AnswerForm, Usage
from shmring.frontend.openai.generation import (
    GenerationRequest,
    GenerationWords,
    Logprobs,
    TokenCount,
    sampling_of,
)
from shmring.frontend.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    ContentPart,
    TextPart,
    check_characters,
    source_of,
)
from shmring.frontend.openai.tools import (
    DeltaToolCall,
    ToolCall,
    ToolChoice,
    Tools,
    called,
    called_now,
    check_values,
    choose_tools,
    engine_calls,
    other_tools,
)
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "CHAT_FORM",
    "CHAT_PARSER",
    "ChatCompletion",
    "ChatCompletionChunk",
    "ChatMessageParam",
    "ChatRequest",
    "ChatLogprob",
    "Choice",
    "ChunkChoice",
    "Delta",
    "Places",
    "ResponseMessage",
    "Translation",
    "describe_tokens",
    "engine_messages",
    "engine_request",
    "read_chat",
]


class RefusalPart(msgspec.Struct, tag_field="type", tag="refusal"):
    """What an assistant has said instead of an answer: a text like others."""

    refusal: str


class ChatMessageParam(msgspec.Struct):
    """A message of the conversation. Messages of functions are not supported; tools' are. A text alone can be a part."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Annotated[list[ContentPart | RefusalPart | str], Meta(max_length=MAX_PARTS)] | None = None
    refusal: Annotated[str | None, Meta(description="What an assistant has said instead of content.")] = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, only([])] = None


class ChatRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/chat/completions`; what OpenAI does not have, such as `top_k` and `priority`, is as in vLLM."""

    messages: Annotated[list[ChatMessageParam], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: TokenCount | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="With false, an answer ends with its first call.")] = None
    functions: Annotated[Any, only([])] = None
    function_call: Annotated[Any, only("none", "auto")] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Logprobs | None, Meta(description="With logprobs.")] = None
    modalities: Annotated[Any, only(["text"])] = None
    audio: Annotated[Any, only()] = None
    web_search_options: Annotated[Any, only()] = None
    continue_final_message: Annotated[Any, only(False)] = None
    add_generation_prompt: Annotated[Any, only(True)] = None
    add_special_tokens: Annotated[Any, only(False)] = None
    chat_template: Annotated[Any, only()] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables of the model's chat template.")] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    documents: Annotated[Any, only([])] = None
    reasoning_effort: Annotated[str | None, Meta(description="The variable of this name of the model's chat template.")] = None
    include_reasoning: Annotated[Any, only(True)] = None
    return_prompt_text: Annotated[Any, only(False)] = None


class ResponseMessage(msgspec.Struct):
    """The answer: a text, or calls of tools. `reasoning` is what the model wrote for itself, where that is told apart."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """How likely a token was: the logarithm of its probability. `bytes` are its own, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TopLogprob):
    """How likely a token of the answer was, and the tokens that were likeliest in its place."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """How likely the tokens of an answer were, before the request's parameters had a say."""

    content: list[ChatLogprob]


class Choice(msgspec.Struct):
    """An answer."""

    message: ResponseMessage
    finish_reason: FinishReason
    index: int = 0
    logprobs: ChatLogprobs | None = None


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
    tool_calls: list[DeltaToolCall] | None = None
    reasoning: str | None = None


class ChunkChoice(msgspec.Struct):
    """What is new of an answer; `finish_reason` is in the last of them."""

    delta: Delta
    finish_reason: FinishReason | None = None
    index: int = 0
    logprobs: ChatLogprobs | None = None


class ChatCompletionChunk(msgspec.Struct):
    """An event of a stream. With `include_usage`, the last one has no choices and the usage."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"


_NAME = re.compile(r"\w+")

#: The fields that are not implemented, each with the values that change nothing.
_UNSUPPORTED = Unsupported(ChatRequest)
_UNSUPPORTED_OF_MESSAGES = Unsupported(ChatMessageParam)

#: For bodies of requests.
CHAT_PARSER = BodyParser(ChatRequest)


def engine_request(request: ChatRequest) -> tuple[GenerateRequest, list[MediaSource]]:
    """Takes a request apart, and empties its messages, which are most of its memory.

    Raises:
        ApiError: it asks for something that is not implemented.
    """
    check_supported(request, _UNSUPPORTED)
    if request.top_logprobs and not request.logprobs:
        raise ApiError(ErrorCode.INVALID_VALUE, "top_logprobs are for logprobs: set logprobs", param="top_logprobs")
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    sampling = sampling_of(request, request.max_completion_tokens, logprobs)
    messages, request.messages = request.messages, []
    in_engine, sources = engine_messages(messages)
    tools = choose_tools(request.tools or [], request.tool_choice, parallel=request.parallel_tool_calls is not False)
    structure = sampling.structured_outputs
    if tools["tool_choice"] == "required":
        sampling.structured_outputs = None  # the answer is calls, and has nothing else
    elif tools["tools"] and structure is not None and (structure.regex is not None or structure.choice):
        text = "beside tools, the form of an answer is JSON: leave out one, or set tool_choice to none"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="structured_outputs")
    options = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        options["reasoning_effort"] = request.reasoning_effort
    check_values(options, "chat_template_kwargs")
    return GenerateRequest(
        in_engine,
        sampling=sampling,
        priority=request.priority or 0,
        template_options=options,
        **tools,
    ), sources


def read_chat(request: ChatRequest) -> Generation:
    """Returns what a request asks for; empties its messages.

    Raises:
        ApiError: it asks for something that is not implemented.
    """
    generate_request, sources = engine_request(request)
    return Generation("generate", request.model, [generate_request], sources, bool(request.stream), ChatWords(request))


class ChatWords(GenerationWords):
    """Where a request of a chat has what it asks for."""

    _request: ChatRequest

    def check(self, request: GenerateRequest, description: ModelDescription) -> list[str]:
        """Takes what has no effect with a model out of a request; returns the fields of the caller's that said so.

        These are what clients send to every model: tools of other types, strict tools where calls can't be kept to schemas, and
        an effort of which its template knows nothing.
        """
        asked, tools = self._request, self._request.tools or []
        ignored = [f"tools[{index}]" for index in other_tools(tools)] if request.tools else []
        if request.strict_tools and not description.strict_tools:
            strict, request.strict_tools = request.strict_tools, []
            ignored += [
                f"tools[{index}].function.strict"
                for index, tool in enumerate(tools)
                if tool.function is not None and tool.function.name in strict
            ]
        if (
            asked.reasoning_effort is not None
            and not description.reasoning_effort
            and "reasoning_effort" not in (asked.chat_template_kwargs or {})
        ):
            del request.template_options["reasoning_effort"]
            ignored.append("reasoning_effort")
        return ignored[:MAX_IGNORED]

    def place_of_form(self, message: str) -> str:
        """Returns where the form stands that an executor has refused with this message."""
        for index, tool in enumerate(self._request.tools or []):
            if tool.function is not None and parameters_of(tool.function.name) in message:
                return f"tools[{index}].function.parameters"
        return super().place_of_form(message)


class Places(dict[str, str]):
    """Where a request in another form has what it became in a chat.

    An entry is from the path of a part in the chat to that in the request. It holds for all that is in the part, but for what
    has an entry itself.

    Args:
        names: of fields that are called otherwise there, by their names in chats.
        places: of the parts of any such request.
    """

    def __init__(self, names: Mapping[str, str], places: Mapping[str, str]) -> None:
        super().__init__(places)
        self._names = names

    def of(self, path: str | None) -> str | None:
        """Returns the place of what has this path in the chat: that of the innermost part with an entry, and the rest."""
        if path is None:
            return None
        part = path
        while part and part not in self:
            part = part[: max(part.rfind("."), part.rfind("["), 0)]
        rest = _NAME.sub(lambda name: self._names.get(name[0], name[0]), path[len(part) :], count=1)
        return f"{self.get(part, '')}{rest}"


class Translation(ChatWords):
    """A request in another form that became a chat's, and its words: errors and headers name places as its caller wrote them.

    Args:
        chat: asks for the same.
        ignored: the first parts of the request that are not in it.
        places: of what is.
    """

    def __init__(self, chat: ChatRequest, ignored: list[str], places: Places) -> None:
        super().__init__(chat)
        self._ignored = ignored
        self._places = places

    def place_of(self, param: str | None) -> str | None:
        """Returns where in the caller's request the parameter stands that an error about the chat names."""
        return self._places.of(param)

    def read(self) -> Generation:
        """Returns what the request asks for; empties the messages of the chat.

        Raises:
            ApiError: it asks for something that is not implemented.
        """
        try:
            generation = read_chat(self._request)
        except ApiError as error:
            error.param = self.place_of(error.param)
            raise
        generation.words = self
        return generation

    def check(self, request: GenerateRequest, description: ModelDescription) -> list[str]:
        """Takes what has no effect with a model out of a request; returns that, and what is not in the chat."""
        ignored = super().check(request, description)
        return [*self._ignored, *(self.place_of(name) or name for name in ignored)]


def engine_messages(messages: list[ChatMessageParam]) -> tuple[list[ChatMessage], list[MediaSource]]:
    """Returns a conversation as the engine takes it, and the sources of its media, in order.

    Raises:
        ApiError: it has something that is not implemented, or too much.
    """
    count = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if count > MAX_PARTS:
        text = f"the messages have {count} parts, at most {MAX_PARTS} are accepted"
        raise ApiError(ErrorCode.TOO_MANY_PARTS, text, param="messages")
    _check_calls(messages)
    sources: list[MediaSource] = []
    in_engine = [_engine_message(message, f"messages[{index}]", sources) for index, message in enumerate(messages)]
    texts = (part.text for message in in_engine for part in message.parts if isinstance(part, EngineTextPart))
    check_characters("the messages have {} characters of text", texts, "messages")
    return in_engine, sources


def _check_calls(messages: list[ChatMessageParam]) -> None:
    """Refuses calls of tools that take long to read: their arguments are JSON in a text, which no scan of the body sees."""
    texts = [message.tool_call_id for message in messages if message.tool_call_id]
    calls = [call for message in messages for call in message.tool_calls or []]
    arguments = [call.function.arguments for call in calls]
    for call in calls:
        texts += (call.id, call.function.name)
    check_characters("the calls of tools have {} characters", (*texts, *arguments), "messages")
    if arguments and has_too_many_values(f"[{','.join(arguments)}]".encode()):
        text = f"the arguments of calls have more than the {MAX_VALUES} values that are accepted"
        raise ApiError(ErrorCode.TOO_MANY_VALUES, text, param="messages")


def _engine_message(message: ChatMessageParam, param: str, sources: list[MediaSource]) -> ChatMessage:
    """Returns a message as the engine takes it; its media are appended to the sources."""
    if message.role == "function":
        text = "messages of the role 'function' are not supported: call tools"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=f"{param}.role")
    check_supported(message, _UNSUPPORTED_OF_MESSAGES, f"{param}.")
    if message.tool_calls and message.role != "assistant":
        raise ApiError(ErrorCode.INVALID_VALUE, "only an assistant calls tools", param=f"{param}.tool_calls")
    calls = engine_calls(message.tool_calls or [], f"{param}.tool_calls")
    content = message.content
    if content is None and message.role == "assistant":
        content = message.refusal or ""  # what clients send back of an answer without content
    if content is None:
        raise ApiError(ErrorCode.INVALID_VALUE, "a message must have content", param=f"{param}.content")
    if isinstance(content, str):
        return ChatMessage(message.role, [EngineTextPart(content)], calls, message.tool_call_id)
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
    return ChatMessage(message.role, parts, calls, message.tool_call_id)


def _choice(pieces: Sequence[GenerateReply], reason: FinishReason, index: int, logprobs: ChatLogprobs | None) -> Choice:
    text = "".join([piece.text for piece in pieces])
    reasoning = "".join([piece.reasoning for piece in pieces])
    calls = called([call for piece in pieces for call in piece.tool_calls])
    message = ResponseMessage(text or (None if calls else ""), tool_calls=calls or UNSET, reasoning=reasoning or UNSET)
    return Choice(message, reason, index, logprobs)


def _piece(output: GenerateReply | None, reason: FinishReason | None, index: int, logprobs: ChatLogprobs | None) -> ChunkChoice:
    if output is None:
        return ChunkChoice(Delta(), reason, index)
    delta = Delta(
        content=output.text or None, tool_calls=called_now(output.tool_calls) or None, reasoning=output.reasoning or None
    )
    return ChunkChoice(delta, reason, index, logprobs)


def describe_tokens(tokens: Sequence[TokenLogprobs]) -> list[ChatLogprob]:
    """Returns how likely tokens were, each encoded at once: an answer of thousands would keep the loop for long at its end."""
    return [msgspec.Raw(msgspec.json.encode(_likely(token))) for token in tokens]  # type: ignore[misc]  # encoded ones


def _likely(token: TokenLogprobs) -> ChatLogprob:
    top = [TopLogprob(*_described(other, logprob)) for other, logprob in token.top]
    return ChatLogprob(*_described(token.token, token.logprob), top)


def _described(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return token.decode(errors="replace"), logprob, list(token)


#: How chats are answered.
CHAT_FORM = AnswerForm(
    prefix="chatcmpl",
    whole=ChatCompletion,
    event=ChatCompletionChunk,
    choice=_choice,
    opening=lambda index: ChunkChoice(Delta("assistant", ""), index=index),
    piece=_piece,
    logprobs=lambda tokens, _: ChatLogprobs(describe_tokens(tokens)),
)
