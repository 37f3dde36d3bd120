"""Answers of ``POST /v1/responses``, whole and as events: what a chat answers, written as items.

What the model writes for itself, text and calls of tools are items of their own, in the order in which they come. Each item
has its events: it is added, it grows, it is done. A whole answer is what the last event of a stream has.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shmring.engine.protocol import FinishReason, GenerateReply
from shmring.engine.protocol import ToolCall as EngineToolCall
from shmring.frontend.errors import ApiError, ErrorBody
from shmring.frontend.http.responses import new_id, random_digits
from shmring.frontend.http.sse import event
from shmring.frontend.openai.chat import ChatLogprob, describe_tokens
from shmring.frontend.openai.responses_request import Reasoning, ResponsesRequest, TextConfig
from shmring.frontend.openai.responses_tools import ChatTools, ResponsesTool, ResponsesToolChoice, shown
from shmring.frontend.openai.text_tokens import TextTokens
from shmring.frontend.openai.typed_events import TypedEventsWriter

__all__ = ["ResponsesAnswer", "ResponsesEvent", "ResponsesWriter", "number_of", "response_id_of"]

_NUMBER_DIGITS = 20

_Status = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    """The text of a message."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    """The text of an item of reasoning."""

    text: str = ""


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: _Status = "in_progress"
    content: list[OutputText] = []
    role: Literal["assistant"] = "assistant"


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """What the model wrote for itself, where that is told apart."""

    id: str
    status: _Status = "in_progress"
    content: list[ReasoningText] = []
    summary: list[Any] = []


class FunctionCallItem(msgspec.Struct, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    call_id: str
    name: str
    namespace: str | UnsetType = UNSET
    arguments: str = ""
    status: _Status = "in_progress"


_Item = OutputMessage | ReasoningItem | FunctionCallItem


class InputTokensDetails(msgspec.Struct):
    """Nothing is kept of prompts, so none of their tokens are counted here."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct):
    """Tokens up to the end of the reasoning that the answer begins with."""

    reasoning_tokens: int = 0


class ResponsesUsage(msgspec.Struct):
    """Tokens used; those of media count in the input."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails


class IncompleteDetails(msgspec.Struct):
    """Why an answer is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ResponsesAnswer(msgspec.Struct, kw_only=True):
    """The answer to `POST /v1/responses` without `stream`, and to `GET /v1/responses/{response_id}`. `store` says whether it is
    kept."""

    id: str
    created_at: int
    model: str
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    reasoning: Reasoning
    temperature: float
    text: TextConfig | None
    tool_choice: ResponsesToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    user: str | None
    output: list[_Item]
    status: _Status = "in_progress"
    usage: ResponsesUsage | None = None
    incomplete_details: IncompleteDetails | None = None
    object: Literal["response"] = "response"
    error: None = None
    previous_response_id: str | None = None
    background: Literal[False] = False
    store: bool = False
    truncation: Literal["disabled"] = "disabled"

    @property
    def has_logprobs(self) -> bool:
        """Whether it says how likely tokens were, which takes many bytes."""
        return any(part.logprobs for item in self.output if isinstance(item, OutputMessage) for part in item.content)


class ResponsesEvent(msgspec.Struct, kw_only=True):
    """An event of a stream, with the fields that events of its type have. An answer that fails ends with `error`."""

    type: str
    sequence_number: int
    response: ResponsesAnswer | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: _Item | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[ChatLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    error: ErrorBody | UnsetType = UNSET
    message: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    param: str | UnsetType | None = UNSET


class ResponsesWriter(TypedEventsWriter):
    """Writes one answer. An event shows what there is when it is yielded: encode it before the next one.

    Args:
        request: its settings are in the answer.
        tools: what the model was told of.

    Attributes:
        answer: so far.
    """

    answer: ResponsesAnswer

    def __init__(self, request: ResponsesRequest, tools: ChatTools) -> None:
        self._tools = tools
        self._digits = random_digits()[:_NUMBER_DIGITS]
        self.answer = ResponsesAnswer(
            id=response_id_of(self._digits),
            created_at=int(time.time()),
            model=request.model,
            instructions=request.instructions,
            max_output_tokens=request.max_output_tokens,
            metadata=request.metadata or {},
            parallel_tool_calls=request.parallel_tool_calls is not False,
            reasoning=request.reasoning or Reasoning(),
            temperature=1.0 if request.temperature is None else request.temperature,
            text=request.text,
            tool_choice=request.tool_choice or "auto",
            tools=shown(request.tools or []),
            top_logprobs=request.top_logprobs or 0,
            top_p=1.0 if request.top_p is None else request.top_p,
            user=request.user,
            output=[],
            previous_response_id=request.previous_response_id,
            store=request.store is not False,
        )
        self._numbers = itertools.count()
        self._open: OutputMessage | ReasoningItem | None = None  # the last item, while it grows
        self._texts: list[str] = []  # of that item
        self._tokens = TextTokens()
        self._logprobs: list[ChatLogprob] = []  # of that item, too
        self._reasoning_tokens = 0

    def _begin(self, _: GenerateReply) -> Iterator[ResponsesEvent]:
        """Yields the first events."""
        yield self._event("response.created", response=self.answer)
        yield self._event("response.in_progress", response=self.answer)

    def _add(self, piece: GenerateReply) -> Iterator[ResponsesEvent]:
        """Yields the events of a piece."""
        self._tokens.add(piece.logprobs)
        if piece.reasoning:
            self._tokens.take(piece.reasoning)
            yield from self._grow(ReasoningItem, piece.reasoning)
            if len(self.answer.output) == 1:
                self._reasoning_tokens = piece.completion_tokens
        if piece.text:
            logprobs = describe_tokens(self._tokens.take(piece.text))
            yield from self._grow(OutputMessage, piece.text, logprobs)
        if piece.tool_calls:
            self._tokens.drop()
        for call in piece.tool_calls:
            yield from self._close("completed")
            yield from self._call(call)

    def _finish(self, last: GenerateReply, reason: FinishReason) -> Iterator[ResponsesEvent]:
        """Yields the events of the end, but for the last one; the answer is complete then."""
        answer = self.answer
        if not answer.output:
            yield from self._grow(OutputMessage, "")  # clients look for a message in an answer
        answer.status = "incomplete" if reason == "length" else "completed"
        answer.incomplete_details = IncompleteDetails() if reason == "length" else None
        yield from self._close(answer.status)
        tokens = last.prompt_tokens, last.completion_tokens, last.prompt_tokens + last.completion_tokens
        answer.usage = ResponsesUsage(*tokens, InputTokensDetails(), OutputTokensDetails(self._reasoning_tokens))

    def _end(self) -> ResponsesEvent:
        """Returns the last event."""
        return self._event(f"response.{self.answer.status}", response=self.answer)

    def fail(self, error: ApiError) -> bytes:
        """Returns the last event of an answer that fails. Clients look for the error in it, or for its parts."""
        body = error.envelope().error
        return event(self._event("error", error=body, message=body.message, code=body.code, param=body.param), "error")

    def _grow(
        self, kind: type[OutputMessage | ReasoningItem], text: str, logprobs: Sequence[ChatLogprob] = ()
    ) -> Iterator[ResponsesEvent]:
        item = self._open
        if item is None or type(item) is not kind:
            yield from self._close("completed")
            is_message = kind is OutputMessage
            self._open = item = kind(self._name("msg" if is_message else "rs"))
            self.answer.output.append(item)
            yield self._event("response.output_item.added", output_index=self._index, item=item)
            yield self._event_of_text(item, "content_part.added", part=OutputText() if is_message else ReasoningText())
        self._texts.append(text)
        self._logprobs += logprobs
        if text:
            yield self._event_of_text(item, f"{_name_of(item)}.delta", logprobs, delta=text)

    def _close(self, status: _Status) -> Iterator[ResponsesEvent]:
        """The item that grew is done."""
        item, self._open = self._open, None
        if item is None:
            return
        text, logprobs = "".join(self._texts), self._logprobs
        self._texts, self._logprobs = [], []
        if isinstance(item, OutputMessage):
            item.content = [OutputText(text, logprobs=logprobs)]
        else:
            item.content = [ReasoningText(text)]
        item.status = status
        yield self._event_of_text(item, f"{_name_of(item)}.done", logprobs, text=text)
        yield self._event_of_text(item, "content_part.done", part=item.content[0])
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _call(self, call: EngineToolCall) -> Iterator[ResponsesEvent]:
        """A call comes whole."""
        namespace, name = self._tools.split(call.name)
        item = FunctionCallItem(self._name("fc"), new_id("call_"), name, namespace or UNSET)
        self.answer.output.append(item)
        place = {"item_id": item.id, "output_index": self._index}
        yield self._event("response.output_item.added", output_index=self._index, item=item)
        item.arguments, item.status = call.arguments, "completed"
        yield self._event("response.function_call_arguments.delta", delta=call.arguments, **place)
        yield self._event("response.function_call_arguments.done", name=name, arguments=call.arguments, **place)
        yield self._event("response.output_item.done", output_index=self._index, item=item)

    def _name(self, kind: str) -> str:
        """Returns the name of the next item."""
        return f"{kind}_{self._digits}{len(self.answer.output) + 1:04x}"

    @property
    def _index(self) -> int:
        return len(self.answer.output) - 1

    def _event_of_text(
        self, item: OutputMessage | ReasoningItem, name: str, logprobs: Sequence[ChatLogprob] = (), **fields: Any
    ) -> ResponsesEvent:
        if name.startswith("output_text"):
            fields["logprobs"] = list(logprobs)
        return self._event(f"response.{name}", item_id=item.id, output_index=self._index, content_index=0, **fields)

    def _event(self, kind: str, /, **fields: Any) -> ResponsesEvent:
        return ResponsesEvent(type=kind, sequence_number=next(self._numbers), **fields)


def response_id_of(number: str) -> str:
    """Returns the name of the answer whose number this is (:func:`number_of`)."""
    return f"resp_{number}0000"


def number_of(name: str) -> str:
    """Returns what the names of an answer and of its items have in common, and those of no other answer have."""
    return name.partition("_")[2][:_NUMBER_DIGITS]


def _name_of(item: OutputMessage | ReasoningItem) -> str:
    return "output_text" if isinstance(item, OutputMessage) else "reasoning_text"
