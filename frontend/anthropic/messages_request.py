"""Requests of ``POST /v1/messages`` and ``/v1/messages/count_tokens``. Each becomes the request of a chat, so what holds for
chats holds for it as well: what is refused, and how much is accepted.

A message of Anthropic's can be several of a chat's. What tools have returned stands in a message of the user, and chats have a
message for each. Reasoning of earlier answers is not shown to the model again; the answer's header names it, as it names
ignored fields.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import BodyParser, misplaced
from shmring.frontend.inference import Generation
from shmring.frontend.openai.chat import ChatMessageParam, ChatRequest, RefusalPart, Translation
from shmring.frontend.openai.generation import TokenCount
from shmring.frontend.openai.messages import MAX_MESSAGES, MAX_PARTS, ContentPart, ImagePart, PictureFile, Priority, TextPart
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

_Nothing: TypeAlias = Annotated[Any, Meta(description="Means nothing here.")]


class TextBlock(msgspec.Struct, tag_field="type", tag="text"):
    """Text."""

    text: str
    cache_control: _Nothing = None
    citations: _Nothing = None


class Base64Source(msgspec.Struct, tag_field="type", tag="base64"):
    """A picture's file, in base64. What it is, is read from the file itself."""

    data: str
    media_type: _Nothing = None


class UrlSource(msgspec.Struct, tag_field="type", tag="url"):
    """Where a picture is: a `data:` URL, or what the server is allowed to fetch."""

    url: str


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

    thinking: str
    signature: _Nothing = None


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """What the model wrote for itself, of an earlier answer, encrypted: nobody can read it."""

    data: str


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

_OF_PART = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\](.*)", re.DOTALL)
_OF_CALL = re.compile(r"messages\[(\d+)\]\.tool_calls\[(\d+)\]\.(?:function\.)?(\w+)")
_OF_MESSAGE = re.compile(r"messages\[(\d+)\]\.(\w+)")
_OF_TOOL = re.compile(r"(tools\[\d+\])\.function(?:\.(\w+))?(.*)", re.DOTALL)
_OF_FORMAT = re.compile(r"response_format(\.json_schema)?")
_FIRST = re.compile(r"\w+")
_NAMES = {"stop": "stop_sequences", "reasoning_effort": "output_config.effort", "image_url": "source"}
_NAMES |= {"arguments": "input", "parameters": "input_schema", "tool_call_id": "tool_use_id"}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclasses.dataclass
class _Place:
    """Where a message of the chat stands in the request.

    Attributes:
        message: itself: a message, or a block of one.
        content: its content.
        parts: of its content, if it has several.
        calls: of tools.
    """

    message: str
    content: str
    parts: list[str] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)


class _TranslatedMessages(Translation):
    """The request of a chat, and where its parts stood.

    Args:
        request: gets empty of its messages, which are most of its memory.

    Raises:
        ApiError: it asks for something that is not implemented, or a block stands where it can't.
    """

    def __init__(self, request: CountTokensRequest) -> None:
        self._left_out: list[str] = []
        self._messages: list[ChatMessageParam] = []
        self._places: list[_Place] = []
        super().__init__(self._translate(request), self._left_out)
        self._messages = []  # the chat has them

    def place_of(self, param: str | None) -> str | None:
        """Returns where in the caller's request the parameter stands that an error about the chat names."""
        if param is None:
            return None
        if part := _OF_PART.fullmatch(param):
            return f"{self._places[int(part[1])].parts[int(part[2])]}{_renamed(part[3])}"
        if call := _OF_CALL.fullmatch(param):
            return f"{self._places[int(call[1])].calls[int(call[2])]}.{_NAMES.get(call[3], call[3])}"
        if message := _OF_MESSAGE.fullmatch(param):
            place = self._places[int(message[1])]
            return place.content if message[2] == "content" else f"{place.message}.{_NAMES.get(message[2], message[2])}"
        if tool := _OF_TOOL.fullmatch(param):
            return f"{tool[1]}{_renamed(f'.{tool[2]}') if tool[2] else ''}{tool[3]}"
        return _OF_FORMAT.sub("output_config.format", _FIRST.sub(lambda name: _NAMES.get(name[0], name[0]), param, count=1))

    def _translate(self, request: CountTokensRequest) -> ChatRequest:
        check_supported(request, _UNSUPPORTED[MessagesRequest if isinstance(request, MessagesRequest) else CountTokensRequest])
        if request.system is not None:
            self._add("system", "system", "system")
            self._add_content(request.system, "system")
        messages, request.messages = request.messages, []
        if messages[-1].role == "assistant":
            text = "the last message is the assistant's, and answers that go on from it are not supported: end with the user's"
            raise ApiError(ErrorCode.UNSUPPORTED_VALUE, text, param=f"messages[{len(messages) - 1}].role")
        for index, message in enumerate(messages):
            self._take_message(message, f"messages[{index}]")
        try:
            return msgspec.convert(_made_fields(request, self._messages), ChatRequest)
        except msgspec.ValidationError as error:
            raise misplaced(str(error), self.place_of) from None

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
                self._left_out.append(place)
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
        self._messages.append(message)
        self._places.append(_Place(place, content))
        return message

    def _add_content(self, content: str | list[TextBlock] | list[TextBlock | ImageBlock], place: str) -> None:
        """Adds content to the last message."""
        if isinstance(content, str):
            self._messages[-1].content = content
            return
        for index, block in enumerate(content):
            self._add_part(block, f"{place}[{index}]")

    def _add_part(self, block: TextBlock | ImageBlock, place: str) -> None:
        parts = self._messages[-1].content
        assert isinstance(parts, list)
        parts.append(_part(block))
        self._places[-1].parts.append(place)

    def _add_call(self, block: ToolUseBlock, role: str, place: str) -> None:
        if role != "assistant":
            raise ApiError(ErrorCode.INVALID_VALUE, "only an assistant calls tools", param=f"{place}.type")
        check_values(block.input, f"{place}.input")
        calls = self._messages[-1].tool_calls = self._messages[-1].tool_calls or []
        calls.append(ToolCall(block.id, FunctionCall(block.name, msgspec.json.encode(block.input).decode())))
        self._places[-1].calls.append(place)


def read_messages(request: CountTokensRequest) -> Generation:
    """Returns what a request asks for; empties its messages.

    Raises:
        ApiError: it asks for something that is not implemented, or a block stands where it can't.
    """
    return _TranslatedMessages(request).read()


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


def _renamed(path: str) -> str:
    """Returns the rest of a path, which begins with a dot, with the names of this API."""
    return ".".join(_NAMES.get(name, name) for name in path.split("."))
