"""Answers of chats and completions, whole and as events: each answer is a choice.

An :class:`AnswerForm` is all in which the two differ.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from shmring.engine.protocol import FinishReason, GenerateReply, TokenLogprobs
from shmring.frontend.answer import Answer
from shmring.frontend.http.responses import new_id
from shmring.frontend.http.sse import DONE, event
from shmring.frontend.openai.generation import GenerationRequest

__all__ = ["AnswerForm", "ChoicesWriter", "Usage"]


class Usage(msgspec.Struct):
    """Tokens used; those of media count in the prompt."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclasses.dataclass(frozen=True)
class AnswerForm:
    """How requests of one kind are answered.

    Attributes:
        prefix: of names of answers.
        whole, event: the types of an answer and of a stream's events: their name, time, model, choices and usage.
        choice: one choice of a whole answer: its pieces, why it ended, which it is, and how likely its tokens were.
        opening: the choice of a stream's first event, by its number. None: it begins with the text.
        piece: the choice of an event with text, or of the last one, which says why the answer ended; which one it is, and how
            likely its tokens were.
        logprobs: how likely tokens were, behind so many characters of text. All fields of it are lists, so that parts of an
            answer can be joined.
    """

    prefix: str
    whole: Callable[..., msgspec.Struct]
    event: Callable[..., msgspec.Struct]
    choice: Callable[[Sequence[GenerateReply], FinishReason, int, Any], msgspec.Struct]
    opening: Callable[[int], msgspec.Struct] | None
    piece: Callable[[GenerateReply | None, FinishReason | None, int, Any], msgspec.Struct]
    logprobs: Callable[[Sequence[TokenLogprobs], int], Any]


class ChoicesWriter:
    """Writes the answer to one request.

    Args:
        form: of the answer.
        request: says for which model it is, and what else a stream includes.
    """

    fail = None  # errors of streams are as everywhere

    def __init__(self, form: AnswerForm, request: GenerationRequest) -> None:
        self._form = form
        self._model = request.model
        self._includes_usage = request.stream_options is not None and bool(request.stream_options.include_usage)

    async def whole(self, answer: Answer) -> msgspec.Struct:
        """Returns the whole answer."""
        form, parts = self._form, [_Part(self._form) for _ in range(answer.count)]
        async for piece in answer:
            parts[piece.index].add(piece)
        choices = []
        for index, part in enumerate(parts):
            reason = part.pieces[-1].finish_reason
            assert reason is not None, "an answer that has come to its end says why"
            choices.append(form.choice(part.pieces, reason, index, part.logprobs))
        return form.whole(new_id(f"{form.prefix}-"), int(time.time()), self._model, choices, _usage(answer))

    async def events(self, answer: Answer) -> AsyncGenerator[bytes, None]:
        """Yields the answer as events: its opening, its text as it comes, why it ended, and its usage if wanted."""
        form = self._form
        no_usage = None if self._includes_usage else UNSET
        template = form.event(new_id(f"{form.prefix}-"), int(time.time()), self._model, [], no_usage)

        def chunk(choice: msgspec.Struct) -> bytes:
            return event(msgspec.structs.replace(template, choices=[choice]))

        parts = [_Part(form, keep=False) for _ in range(answer.count)]
        if form.opening is not None:
            for index in range(len(parts)):
                yield chunk(form.opening(index))
        async for piece in answer:
            logprobs = parts[piece.index].add(piece)
            if piece.text or piece.tool_calls or piece.reasoning or logprobs is not None:
                yield chunk(form.piece(piece, None, piece.index, logprobs))
            if piece.finish_reason is not None:
                yield chunk(form.piece(None, piece.finish_reason, piece.index, None))
        if self._includes_usage:
            yield event(msgspec.structs.replace(template, usage=_usage(answer)))
        yield DONE


class _Part:
    """What has come of one answer of a request.

    Attributes:
        pieces: all of them; none, if they are not kept.
        logprobs: of their tokens, if they were asked for.
    """

    def __init__(self, form: AnswerForm, *, keep: bool = True) -> None:
        self._form = form
        self._keep = keep
        self._characters = 0
        self.pieces: list[GenerateReply] = []
        self.logprobs: Any = None

    def add(self, piece: GenerateReply) -> Any:
        """Takes the next piece; returns how likely its tokens were, as the form says it, or None."""
        logprobs = self._form.logprobs(piece.logprobs, self._characters) if piece.logprobs else None
        # A text may be held back, if it may become a stop text; its tokens are told at once.
        self._characters += sum(token.characters for token in piece.logprobs) if piece.logprobs else len(piece.text)
        piece.logprobs = []  # they are said in the form now, which is a half of their memory
        if not self._keep:
            return logprobs
        if self.logprobs is None:
            self.logprobs = logprobs
        elif logprobs is not None:
            for name in logprobs.__struct_fields__:
                getattr(self.logprobs, name).extend(getattr(logprobs, name))
        self.pieces.append(piece)
        return logprobs


def _usage(answer: Answer) -> Usage:
    tokens = answer.prompt_tokens, answer.completion_tokens
    return Usage(*tokens, sum(tokens))
