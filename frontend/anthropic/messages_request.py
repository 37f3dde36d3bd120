"""Requests of ``POST /v1/messages`` and ``/v1/messages/count_tokens``. Each becomes the request of a chat, so what holds for
chats holds for it as well: what is refused, and how much is accepted.

A message of Anthropic's can be several of a chat's. What tools have returned stands in a message of the user, and chats have a
message for each. Reasoning of earlier answers is not shown to the model again; the answer's header names it, as it names
ignored fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser, misplaced
from shmring.frontend.inference import Generation
from shmring.frontend.openai.chat import ChatMessageParam, ChatRequest, Places, RefusalPart, Translation
from shmring.frontend.openai.generation import TokenCount
from shmring.frontend.openai.messages import (
    MAX_MESSAGES,
    MAX_PARTS,
    MAY_BE_LONG,
    ContentPart,
    ImagePart,
    PictureFile,
    Priority,
    TextPart,
)
from shmring.frontend.openai.tools import OF_TYPE, FunctionCall, ToolCall, check_values
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "COUNT_TOKENS_PARSER",
    "MESSAGES_PARSER",
    "VERSIONS",
    "CountTokensAnswer",
    "CountTokensRequest",
    "MessagesRequest",
    "begin_messages",
    "read_count_tokens",
    "read_messages",
]

#: Of the API, as the header ``anthropic-version`` has them: those that have these answers. The last one takes fewer requests.
VERSIONS = ("2023-06-01", "2026-10-21")

_Nothing: TypeAlias = Annotated[Any, Meta(description="Means nothing here.", extra=MAY_BE_LONG)]
_Long: TypeAlias = Annotated[str, Meta(extra=MAY_BE_LONG)]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: _Nothing = None
    citations: _Nothing = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """A picture's file, in base64. What it is, is read from the file itself."""

    data: _Long
    media_type: _Nothing = None


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """Where a picture is: a `data:` URL, or what the server is allowed to fetch."""

    url: _Long


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """A picture."""

    source: Base64Source | UrlSource
    cache_control: _Nothing = None


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool, of an earlier answer."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: _Nothing = None
    caller: _Nothing = None


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a tool has returned. With `is_error`, the model reads `Error: ` before it."""

    tool_use_id: str
    content: str | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    cache_control: _Nothing = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote for itself, of an earlier answer."""

    thinking: _Long
    signature: _Nothing = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """What the model wrote for itself, of an earlier answer, encrypted: nobody can read it."""

    data: _Long


_Block = TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock
_Texts = str | Annotated[list[TextBlock], Meta(max_length=MAX_PARTS)]
_Parts: TypeAlias = list[ContentPart | RefusalPart | str]


class Message(msgspec.Struct):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Meta(max_length=MAX_PARTS)]


class MessagesTool(msgspec.Struct):
    """A tool that may be called; `input_schema` is a JSON schema."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: Annotated[str | None, Meta(description=OF_TYPE.replace("function", "custom"))] = None
    strict: bool | None = None
    cache_control: _Nothing = None
    eager_input_streaming: _Nothing = None
    defer_loading: Annotated[Any, only(False)] = None


class MessagesToolChoice(msgspec.Struct):
    """Whether tools may be called, or must be: `any`, or the one of this `name`."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: Annotated[bool | None, Meta(description="With true, an answer ends with its first call.")] = None


class Thinking(msgspec.Struct):
    """With `disabled`, what the model writes for itself is left out. Whether it does is for its template's variables to say."""

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(msgspec.Struct):
    """JSON of a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct):
    """How the answer is to be. `effort` is the variable `reasoning_effort` of the model's chat template."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """The body of `POST /v1/messages/count_tokens`: a conversation, as for an answer."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: _Texts | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables of the model's chat template.")] = None
    cache_control: _Nothing = None
    mcp_servers: Annotated[Any, only([])] = None
    output_format: Annotated[Any, only()] = None


class CountTokensAnswer(msgspec.Struct):
    """The answer to `POST /v1/messages/count_tokens`: tokens of the prompt, those of pictures and tools included."""

    input_tokens: int


class MessagesRequest(CountTokensRequest, kw_only=True):
    """The body of `POST /v1/messages`."""

    max_tokens: TokenCount
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: _Nothing = None
    priority: Priority | None = None
    service_tier: Annotated[Any, only("auto", "standard_only")] = None
    speed: Annotated[Any, only("standard")] = None
    container: Annotated[Any, only()] = None
    return_mm_kwargs: Annotated[Any, only(False)] = None
    watermarking: Annotated[Any, only(False)] = None
    kv_transfer_params: Annotated[Any, only()] = None
    ec_transfer_params: Annotated[Any, only()] = None
    vllm_xargs: Annotated[Any, only({})] = None


_UNSUPPORTED = {kind: Unsupported(kind) for kind in (CountTokensRequest, MessagesRequest)}
_UNSUPPORTED_OF_TOOLS = Unsupported(MessagesTool)

_BLOCK_TYPES = "text, image, tool_use, tool_result, thinking or redacted_thinking"
_ERROR = "Error: "  # before what a tool has returned: chat templates have no other place for it

#: For bodies of requests.
MESSAGES_PARSER = BodyParser(MessagesRequest, _BLOCK_TYPES)
COUNT_TOKENS_PARSER = BodyParser(CountTokensRequest, _BLOCK_TYPES)

_NAMES = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort", "image_url": "source"}
_NAMES |= {"arguments": "input", "parameters": "input_schema", "tool_call_id": "tool_use_id"}
_FORMAT = "output_config.format"
_PLACES = {"response_format": _FORMAT, "response_format.json_schema": _FORMAT}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class _Conversation:
    """The messages of a chat that a request becomes.

    Attributes:
        messages: so far.
        places: where their parts stand in the request.
        left_out: the parts of the request that are not among them.
    """

    def __init__(self) -> None:
        self.messages: list[ChatMessageParam] = []
        self.places = Places(_NAMES, _PLACES)
        self.left_out: list[str] = []
        self._path = ""  # of the last message

    def take(self, request: CountTokensRequest) -> None:
        """Takes the messages of a request, which gets empty of them: they are most of its memory.

        Raises:
            ApiError: a block stands where it can't.
        """
        if request.system is not None:
            self._add("system", "system", "system")
            self._add_content(request.system, "system")
        messages, request.messages = request.messages, []
        if messages[-1].role == "assistant":
            text = "the last message is the assistant's, and answers that go on from it are not supported: end with the user's"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=f"messages[{len(messages) - 1}].role")
        for index, message in enumerate(messages):
            self._take_message(message, f"messages[{index}]")

    def _take_message(self, message: Message, param: str) -> None:
        content = f"{param}.content"
        if isinstance(message.content, str):
            self._add(message.role, param, content)
            self._add_content(message.content, content)
            return
        is_open = False  # whether the last message of the chat can have further parts
        for index, block in enumerate(message.content):
            place = f"{content}[{index}]"
            if isinstance(block, ToolResultBlock):
                self._take_result(block, message.role, place)
                is_open = False
                continue
            if isinstance(block, ThinkingBlock | RedactedThinkingBlock):
                self.left_out.append(place)
                continue
            if not is_open:
                self._add(message.role, param, content)
                is_open = True
            if isinstance(block, ToolUseBlock):
                self._add_call(block, message.role, place)
            else:
                self._add_part(block, place)
        if not message.content:
            self._add(message.role, param, content)

    def _take_result(self, block: ToolResultBlock, role: str, place: str) -> None:
        if role != "user":
            text = "what a tool has returned stands in a message of the user"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param=f"{place}.type")
        self._add("tool", place, f"{place}.content").tool_call_id = block.tool_use_id
        content = block.content or ""
        if block.is_error and isinstance(content, str):
            content = f"{_ERROR}{content}"
        elif block.is_error:
            self._add_part(TextBlock(_ERROR), f"{place}.content")
        self._add_content(content, f"{place}.content")

    def _add(self, role: Literal["user", "assistant", "system", "tool"], place: str, content: str) -> ChatMessageParam:
        message = ChatMessageParam(role, [])
        self._path = f"messages[{len(self.messages)}]"
        self.messages.append(message)
        self.places[self._path], self.places[f"{self._path}.content"] = place, content
        return message

    def _add_content(self, content: str | list[TextBlock] | list[TextBlock | ImageBlock], place: str) -> None:
        """Adds content to the last message."""
        if isinstance(content, str):
            self.messages[-1].content = content
            return
        for index, block in enumerate(content):
            self._add_part(block, f"{place}[{index}]")

    def _add_part(self, block: TextBlock | ImageBlock, place: str) -> None:
        parts = self.messages[-1].content
        assert isinstance(parts, list)
        self.places[f"{self._path}.content[{len(parts)}]"] = place
        parts.append(_part(block))

    def _add_call(self, block: ToolUseBlock, role: str, place: str) -> None:
        if role != "assistant":
            raise ApiError(ErrorCode.INVALID_VALUE, "only an assistant calls tools", param=f"{place}.type")
        check_values(block.input, f"{place}.input")
        calls = self.messages[-1].tool_calls = self.messages[-1].tool_calls or []
        path = f"{self._path}.tool_calls[{len(calls)}]"
        self.places[path] = self.places[f"{path}.function"] = place
        calls.append(ToolCall(block.id, FunctionCall(block.name, msgspec.json.encode(block.input).decode())))


def read_messages(request: CountTokensRequest) -> Generation:
    """Returns what a request asks for; empties its messages.

    Raises:
        ApiError: it asks for something that is not implemented, or a block stands where it can't.
    """
    check_supported(request, _UNSUPPORTED[MessagesRequest if isinstance(request, MessagesRequest) else CountTokensRequest])
    conversation = _Conversation()
    conversation.take(request)
    places = conversation.places
    for index in range(len(request.tools or [])):
        places[f"tools[{index}].function"] = f"tools[{index}]"
    try:
        chat = msgspec.convert(_made_fields(request, conversation.messages), ChatRequest)
    except msgspec.ValidationError as error:
        raise misplaced(str(error), places.of) from None
    return Translation(chat, conversation.left_out, places).read()


def read_count_tokens(request: CountTokensRequest) -> Generation:
    """Returns of what tokens are to be counted; empties the request's messages. Raises as :func:`read_messages`."""
    generation = read_messages(request)
    generation.requests[0].strict_tools = []  # they are for an answer
    return generation


def begin_messages(http_request: Request) -> None:
    """Has the answer name the request where Anthropic's clients look for it.

    Raises:
        ApiError: the header ``anthropic-version`` says a version of the API that has other answers.
    """
    state = http_request.scope["state"]
    state["headers"] = (state.get("headers") or {}) | {"request-id": state["request_id"]}
    if http_request.headers.get("anthropic-version", VERSIONS[0]) not in VERSIONS:
        text = f"this server answers as in the versions {' and '.join(VERSIONS)} of the API, which the header says"
        raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param="anthropic-version")


def _part(block: TextBlock | ImageBlock) -> ContentPart:
    if isinstance(block, TextBlock):
        return TextPart(block.text)
    if isinstance(block.source, UrlSource):
        return ImagePart(block.source.url)
    return PictureFile(data=block.source.data)


def _made_fields(request: CountTokensRequest, messages: list[ChatMessageParam]) -> dict[str, Any]:
    choice, output = request.tool_choice, request.output_config or OutputConfig()
    made: dict[str, Any] = {
        "model": request.model,
        "messages": messages,
        "tools": [_tool(tool, f"tools[{index}]") for index, tool in enumerate(request.tools or [])],
        "tool_choice": None if choice is None else _choice(choice),
        "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
        "reasoning_effort": output.effort,
        "chat_template_kwargs": request.chat_template_kwargs,
    }
    if output.format is not None:
        check_values(output.format.schema, "output_config.format.schema")
        made["response_format"] = {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": output.format.schema},
        }
    if isinstance(request, MessagesRequest):
        made |= {name: getattr(request, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "priority", "stream")}
        made["stop"] = request.stop_sequences
    return made


def _tool(tool: MessagesTool, place: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}
    check_supported(tool, _UNSUPPORTED_OF_TOOLS, f"{place}.")
    if tool.input_schema is None:
        raise ApiError(ErrorCode.INVALID_VALUE, "a tool must have an input_schema", param=f"{place}.input_schema")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


def _choice(choice: MessagesToolChoice) -> str | dict[str, Any]:
    if choice.type != "tool":
        return _CHOICES[choice.type]
    if choice.name is None:
        raise ApiError(ErrorCode.INVALID_VALUE, "a tool_choice of the type tool must have a name", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}
