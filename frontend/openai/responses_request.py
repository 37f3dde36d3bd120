"""Requests of ``POST /v1/responses``. Each becomes the request of a chat, so what holds for chats holds for it as well: what is
refused, and how much is accepted.

A caller sends the whole conversation each time, what the model has answered included: items of an answer are items of a
request. Or it names an answer that the server has kept (:mod:`.stored_responses`), and sends what follows; or it names items of
answers. Calls of tools that follow an assistant's message belong to that message, as chat templates
have it. Reasoning of earlier answers is not shown to the model again; the answer's header names it, as it names ignored fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.parsing import MEANS_NOTHING, BodyParser, misplaced
from shmring.frontend.openai.chat import ChatMessageParam, ChatRequest, Places, RefusalPart, Translation
from shmring.frontend.openai.generation import GenerationRequest, Logprobs, TokenCount
from shmring.frontend.openai.messages import MAX_MESSAGES, MAX_PARTS, MAY_BE_LONG, ContentPart, ImagePart, TextPart
from shmring.frontend.openai.responses_tools import ChatTools, ResponsesTool, ResponsesToolChoice, name_in_chat
from shmring.frontend.openai.tools import FunctionCall, ToolCall, check_values
from shmring.frontend.openai.unsupported import Unsupported, check_supported, only

__all__ = [
    "RESPONSES_PARSER",
    "Conversation",
    "InputItem",
    "Reasoning",
    "ResponsesRequest",
    "TextConfig",
    "is_reference",
    "translated",
]

_MEANS_NOTHING = "Means nothing here."
_Nothing: TypeAlias = Annotated[Any, Meta(description=_MEANS_NOTHING, extra=MAY_BE_LONG)]
_NoText: TypeAlias = Annotated[str | None, Meta(description=_MEANS_NOTHING, extra=MAY_BE_LONG)]
_NOTHING: Any = None


class InputTextPart(msgspec.Struct, tag_field="type", tag="input_text"):
    """Text in a message."""

    text: str


class OutputTextPart(msgspec.Struct, tag_field="type", tag="output_text"):
    """Text of an earlier answer. Nothing else of it is kept: logprobs may be a thousand times as long."""

    text: str
    annotations: Annotated[msgspec.Raw, Meta(description=_MEANS_NOTHING)] = _NOTHING
    logprobs: Annotated[msgspec.Raw, Meta(description=_MEANS_NOTHING)] = _NOTHING

    def __post_init__(self) -> None:
        self.annotations = self.logprobs = _NOTHING


class InputImagePart(msgspec.Struct, tag_field="type", tag="input_image"):
    """A picture in a message."""

    image_url: Annotated[str | None, Meta(extra=MAY_BE_LONG)] = None
    detail: Annotated[str | None, Meta(description=_MEANS_NOTHING, extra={MEANS_NOTHING: ("auto",)} | MAY_BE_LONG)] = None
    file_id: Annotated[Any, only()] = None


class ReasoningTextPart(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """What the model wrote for itself, in an item of the type `reasoning`."""

    text: Annotated[str, Meta(extra=MAY_BE_LONG)]


_Part = InputTextPart | OutputTextPart | InputImagePart | ReasoningTextPart | RefusalPart | ContentPart
_Content = str | Annotated[list[_Part | str], Meta(max_length=MAX_PARTS)]


class InputItem(msgspec.Struct, omit_defaults=True):
    """A message, a call of a tool, what a tool has returned, reasoning of an earlier answer; or one of these by its `id`."""

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: _Content | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: Annotated[str | None, Meta(description="Of a call: that of the function.")] = None
    arguments: str | None = None
    output: _Content | None = None
    encrypted_content: _Nothing = None
    summary: _Nothing = None
    id: Annotated[str | None, Meta(description="Of an `item_reference`: which item of an answer that is kept.")] = None
    status: _NoText = None
    phase: _NoText = None


class TextFormat(msgspec.Struct, omit_defaults=True):
    """The form of the answer, as `response_format` of chats."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """How the answer's text is to be."""

    format: TextFormat | None = None


class Reasoning(msgspec.Struct):
    """With `effort`: the variable `reasoning_effort` of the model's chat template."""

    effort: str | None = None


_STORE = "Whether the server keeps the answer for a while; it does by default, unless it keeps none at all."

_LOGPROBS: Literal["message.output_text.logprobs"] = "message.output_text.logprobs"
_Included: TypeAlias = Literal[
    "message.output_text.logprobs",
    # What is there anyway.
    "message.input_image.image_url",
    "reasoning.encrypted_content",
    # Results of tools that the server does not run.
    "web_search_call.action.sources",
    "web_search_call.results",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]
_INCLUDE = f"`{_LOGPROBS}`: how likely the text's tokens were. The others say what is there anyway, or can't be there."

_Metadata = dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]]  # as in OpenAI's API


class ResponsesRequest(GenerationRequest, kw_only=True):
    """The body of `POST /v1/responses`. With `previous_response_id`, `input` is what follows that response."""

    input: str | Annotated[list[InputItem], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: Annotated[bool | None, Meta(description="With false, an answer ends with its first call.")] = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[_Metadata, Meta(max_length=16)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Meta(description="Variables of the model's chat template.")] = None
    store: Annotated[bool | None, Meta(description=_STORE)] = None
    background: Annotated[Any, only(False)] = None
    previous_response_id: Annotated[str | None, Meta(description="The answer to go on from, which the server keeps.")] = None
    conversation: Annotated[Any, only()] = None
    prompt: Annotated[Any, only()] = None
    include: Annotated[list[_Included] | None, Meta(description=_INCLUDE)] = None
    max_tool_calls: Annotated[Any, only()] = None
    top_logprobs: Annotated[Logprobs | None, Meta(description=f"With `{_LOGPROBS}` in `include`.")] = None
    truncation: Annotated[Any, only("disabled")] = None
    service_tier: Annotated[Any, only("auto", "default")] = None
    include_reasoning: Annotated[Any, only(True)] = None
    enable_response_messages: Annotated[Any, only(False)] = None
    previous_input_messages: Annotated[Any, only([])] = None
    media_io_kwargs: Annotated[Any, only({})] = None
    mm_processor_kwargs: Annotated[Any, only({})] = None
    # Of other routes, where these have another name or another meaning.
    max_tokens: Annotated[Any, only()] = None
    response_format: Annotated[Any, only()] = None
    n: Annotated[Any, only(1)] = None

    @property
    def includes_logprobs(self) -> bool:
        """Whether the answer says how likely the tokens of its text were."""
        return _LOGPROBS in (self.include or [])


_UNSUPPORTED = Unsupported(ResponsesRequest)
_UNSUPPORTED_OF_PICTURES = Unsupported(InputImagePart)
# Other fields of a chat are made of other fields.
_MADE = ("messages", "tools", "tool_choice", "max_completion_tokens", "response_format", "reasoning_effort", "top_logprobs")
_SAME = frozenset(ResponsesRequest.__struct_fields__) & frozenset(ChatRequest.__struct_fields__) - {*_MADE}

_PART_TYPES = "input_text, input_image, input_audio, audio_url, video_url, output_text or refusal"

#: For bodies of requests.
RESPONSES_PARSER = BodyParser(ResponsesRequest, _PART_TYPES)

_NAMES = {"max_completion_tokens": "max_output_tokens", "max_tokens": "max_output_tokens", "logprobs": "include"}
_NAMES |= {"reasoning_effort": "reasoning.effort", "id": "call_id", "tool_call_id": "call_id"}
_PLACES = {"messages": "input", "response_format": "text.format", "response_format.json_schema": "text.format"}


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What a request goes on with, of what the server keeps.

    Attributes:
        before: the items before those of the request.
        found: the items that it refers to, by their names.
    """

    before: list[InputItem] = dataclasses.field(default_factory=list)
    found: Mapping[str, InputItem] = dataclasses.field(default_factory=dict)

    def items_of(self, request: ResponsesRequest) -> list[InputItem]:
        """Returns all items, those of the request last."""
        items = [InputItem(role="user", content=request.input)] if isinstance(request.input, str) else request.input
        return [*self.before, *(self.found.get(item.id or "", item) if is_reference(item) else item for item in items)]


def is_reference(item: InputItem) -> bool:
    """Whether an item only names another one. Clients may leave its type out."""
    is_bare = item.type == "message" and (item.role, item.content) == (None, None)
    return item.type == "item_reference" or (is_bare and item.id is not None)


def translated(request: ResponsesRequest, conversation: Conversation | None = None) -> tuple[Translation, ChatTools]:
    """Makes the request of a chat, and its tools; empties the input, which is most of the request's memory.

    Args:
        request: of a caller.
        conversation: what it goes on with.

    Raises:
        ApiError: the request asks for something that is not implemented, or an item lacks something.
    """
    check_supported(request, _UNSUPPORTED)
    messages: list[ChatMessageParam] = []
    places = Places(_NAMES, _PLACES)
    ignored = ["top_logprobs"] if request.top_logprobs and not request.includes_logprobs else []
    if request.instructions is not None:
        messages.append(ChatMessageParam("system", request.instructions))
        places["messages[0]"] = places["messages[0].content"] = "instructions"
    conversation = conversation or Conversation()
    items, is_text, before = conversation.items_of(request), isinstance(request.input, str), len(conversation.before)
    request.input = ""
    for index, item in enumerate(items):
        param = "previous_response_id" if index < before else "input" if is_text else f"input[{index - before}]"
        if item.type == "reasoning":
            ignored += [param] if index >= before else []
        elif item.type == "function_call":
            if not messages or messages[-1].role != "assistant":
                messages.append(ChatMessageParam("assistant"))
            name, arguments, call_id = (_text_of(item, field, param) for field in ("name", "arguments", "call_id"))
            messages[-1].tool_calls = calls = messages[-1].tool_calls or []
            path = f"messages[{len(messages) - 1}].tool_calls[{len(calls)}]"
            places[path] = places[f"{path}.function"] = param
            calls.append(ToolCall(call_id, FunctionCall(name_in_chat(item.namespace, name), arguments)))
        else:
            path, content = f"messages[{len(messages)}]", "output" if item.type == "function_call_output" else "content"
            places[path], places[f"{path}.content"] = param, param if is_text or index < before else f"{param}.{content}"
            messages.append(_message(item, param))
    tools = ChatTools(request.tools or [], request.tool_choice)
    for index, place in enumerate(tools.places):
        places[f"tools[{index}]"] = places[f"tools[{index}].function"] = place
    try:
        chat = msgspec.convert(_made_fields(request, messages, tools), ChatRequest)
    except msgspec.ValidationError as error:
        raise misplaced(str(error), places.of) from None
    for name in _SAME:
        setattr(chat, name, getattr(request, name))
    return Translation(chat, ignored, places), tools


def _made_fields(request: ResponsesRequest, messages: list[ChatMessageParam], tools: ChatTools) -> dict[str, Any]:
    return {
        "model": request.model,
        "messages": messages,
        "tools": tools.tools,
        "tool_choice": tools.choice,
        "max_completion_tokens": request.max_output_tokens,
        "response_format": _response_format(request.text),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "logprobs": request.includes_logprobs,
        "top_logprobs": request.top_logprobs if request.includes_logprobs else None,
    }


def _response_format(text: TextConfig | None) -> dict[str, Any] | None:
    if text is None or text.format is None:
        return None
    check_values(text.format.schema, "text.format.schema")
    if text.format.type != "json_schema":
        return {"type": text.format.type}
    schema = msgspec.to_builtins(text.format)
    return {"type": schema.pop("type"), "json_schema": schema}


def _text_of(item: InputItem, field: str, param: str) -> str:
    text: str | None = getattr(item, field)
    if text is None:
        raise ApiError(ErrorCode.INVALID_VALUE, f"a {item.type} must have a {field}", param=f"{param}.{field}")
    return text


def _message(item: InputItem, param: str) -> ChatMessageParam:
    if item.type == "function_call_output":
        call_id = _text_of(item, "call_id", param)
        return ChatMessageParam("tool", _content(item.output, f"{param}.output"), tool_call_id=call_id)
    if item.role is None:
        raise ApiError(ErrorCode.INVALID_VALUE, "a message must have a role", param=f"{param}.role")
    return ChatMessageParam(item.role, _content(item.content, f"{param}.content"))


def _content(content: _Content | None, param: str) -> str | list[ContentPart | RefusalPart | str] | None:
    if not isinstance(content, list):
        return content
    return [_part(part, f"{param}[{index}]") for index, part in enumerate(content)]


def _part(part: _Part | str, param: str) -> ContentPart | RefusalPart | str:
    match part:
        case InputTextPart() | OutputTextPart():
            return TextPart(part.text)
        case InputImagePart():
            check_supported(part, _UNSUPPORTED_OF_PICTURES, f"{param}.")
            if part.image_url is None:
                raise ApiError(ErrorCode.INVALID_VALUE, "a picture must have an image_url", param=f"{param}.image_url")
            return ImagePart(part.image_url)
        case ReasoningTextPart():
            text = "a message has no reasoning; send it as an item of the type 'reasoning'"
            raise ApiError(ErrorCode.INVALID_VALUE, text, param=f"{param}.type")
    return part
