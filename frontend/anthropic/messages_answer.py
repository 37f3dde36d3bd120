"""Answers of ``POST /v1/messages``, whole and as events: what a chat answers, written as blocks of one message.

What the model writes for itself, text and calls of tools are blocks of their own, in the order in which they come. Each block
has its events: it starts, it grows, it stops. A whole answer is the message that the events of a stream build.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from shmring.engine.protocol import FinishReason, GenerateReply
from shmring.engine.protocol import ToolCall as EngineToolCall
from shmring.frontend.anthropic.messages_request import MessagesRequest
from shmring.frontend.http.responses import new_id
from shmring.frontend.openai.typed_events import TypedEventsWriter

__all__ = ["MessagesAnswer", "MessagesEvent", "MessagesWriter"]

_StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]

_EventType = Literal[
    "message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta", "message_stop"
]

_STOP_REASONS: dict[FinishReason, _StopReason] = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class AnswerText(msgspec.Struct, tag_field="type", tag="text"):
    """What the model says."""

    text: str = ""
    citations: None = None


class AnswerThinking(msgspec.Struct, tag_field="type", tag="thinking"):
    """What the model wrote for itself, where that is told apart. It is not signed."""

    thinking: str = ""
    signature: str = ""


class AnswerToolUse(msgspec.Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


_Block = AnswerText | AnswerThinking | AnswerToolUse


class MessagesUsage(msgspec.Struct):
    """Tokens used; those of pictures count in the input. None are said to be cached."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0


class MessagesAnswer(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """The answer to `POST /v1/messages` without `stream`. `stop_sequence` is the one that has ended it."""

    id: str
    model: str
    content: list[_Block]
    usage: MessagesUsage
    stop_reason: _StopReason | None = None
    stop_sequence: str | None = None
    role: Literal["assistant"] = "assistant"


class BlockDelta(msgspec.Struct, kw_only=True):
    """What is new of a block, or of the message: why it ended."""

    type: Literal["text_delta", "thinking_delta", "input_json_delta"] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    partial_json: str | UnsetType = UNSET
    stop_reason: _StopReason | UnsetType = UNSET
    stop_sequence: str | UnsetType | None = UNSET


class MessagesEvent(msgspec.Struct, kw_only=True):
    """An event of a stream, with the fields that events of its type have. One that fails ends with `MessagesErrorEnvelope`."""

    type: _EventType
    index: int | UnsetType = UNSET
    message: MessagesAnswer | UnsetType = UNSET
    content_block: _Block | UnsetType = UNSET
    delta: BlockDelta | UnsetType = UNSET
    usage: MessagesUsage | UnsetType = UNSET


class MessagesWriter(TypedEventsWriter):
    """Writes one answer. An event shows what there is when it is yielded: encode it before the next one.

    Args:
        request: of the answer.

    Attributes:
        answer: so far.
    """

    answer: MessagesAnswer

    def __init__(self, request: MessagesRequest) -> None:
        self.answer = MessagesAnswer(id=new_id("msg_"), model=request.model, content=[], usage=MessagesUsage(0, 0))
        self._shows_thinking = request.thinking is None or request.thinking.type != "disabled"
        self._open: AnswerText | AnswerThinking | None = None  # the last block, while it grows
        self._texts: list[str] = []  # of that block

    def _begin(self, first: GenerateReply) -> Iterator[MessagesEvent]:
        """Yields the first events."""
        self.answer.usage = MessagesUsage(first.prompt_tokens, first.completion_tokens)
        yield MessagesEvent(type="message_start", message=self.answer)
        yield MessagesEvent(type="ping")

    def _add(self, piece: GenerateReply) -> Iterator[MessagesEvent]:
        """Yields the events of a piece."""
        if piece.reasoning and self._shows_thinking:
            yield from self._grow(AnswerThinking, piece.reasoning)
        if piece.text:
            yield from self._grow(AnswerText, piece.text)
        for call in piece.tool_calls:
            yield from self._close()
            yield from self._call(call)

    def _finish(self, last: GenerateReply, reason: FinishReason) -> Iterator[MessagesEvent]:
        """Yields the events of the end, but for the last one."""
        yield from self._close()
        answer = self.answer
        answer.usage = MessagesUsage(last.prompt_tokens, last.completion_tokens)
        answer.stop_reason = _STOP_REASONS[reason]
        if reason == "stop" and last.stop_text is not None:
            answer.stop_reason, answer.stop_sequence = "stop_sequence", last.stop_text
        delta = BlockDelta(stop_reason=answer.stop_reason, stop_sequence=answer.stop_sequence)
        yield MessagesEvent(type="message_delta", delta=delta, usage=answer.usage)

    def _end(self) -> MessagesEvent:
        """Returns the last event."""
        return MessagesEvent(type="message_stop")

    def _grow(self, kind: type[AnswerText | AnswerThinking], text: str) -> Iterator[MessagesEvent]:
        if type(self._open) is not kind:
            yield from self._close()
            self._open = kind()
            yield self._start(self._open)
        self._texts.append(text)
        if kind is AnswerText:
            yield self._delta(type="text_delta", text=text)
        else:
            yield self._delta(type="thinking_delta", thinking=text)

    def _close(self) -> Iterator[MessagesEvent]:
        """The block that grew stops."""
        block, self._open = self._open, None
        if block is None:
            return
        text = "".join(self._texts)
        self._texts.clear()
        if isinstance(block, AnswerText):
            block.text = text
        else:
            block.thinking = text
        yield self._stop()

    def _call(self, call: EngineToolCall) -> Iterator[MessagesEvent]:
        """A call comes whole."""
        block = AnswerToolUse(new_id("toolu_"), call.name, {})
        yield self._start(block)
        block.input = msgspec.Raw(call.arguments.encode())  # type: ignore[assignment]  # an object, as it was written
        yield self._delta(type="input_json_delta", partial_json=call.arguments)
        yield self._stop()

    def _start(self, block: _Block) -> MessagesEvent:
        self.answer.content.append(block)
        return MessagesEvent(type="content_block_start", index=self._index, content_block=block)

    def _delta(self, **fields: Any) -> MessagesEvent:
        return MessagesEvent(type="content_block_delta", index=self._index, delta=BlockDelta(**fields))

    def _stop(self) -> MessagesEvent:
        return MessagesEvent(type="content_block_stop", index=self._index)

    @property
    def _index(self) -> int:
        return len(self.answer.content) - 1
