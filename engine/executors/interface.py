"""The interface of executors: four methods that the engine calls from one thread.

Life of a request in the engine: it waits in the scheduler; a step admits it, and from then on it is part of every step
until it has finished, failed, was aborted or has run out of time. :class:`Executor` says what a step is. Media are views of
the slab: by default they are the executor's for the first step only, after which their slots go back, so that a stream of a
thousand tokens does not keep a video in the slab.

``docs/executors.md`` shows how to write one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from shmring.engine.overload import OverloadedError
from shmring.engine.protocol import EncodeReply, EncodeRequest, GenerateReply, GenerateRequest, ModelDescription

__all__ = [
    "COMES_AGAIN",
    "GOES_ON",
    "ContextLengthError",
    "Executor",
    "ExecutorDeadError",
    "ExecutorOptions",
    "FormError",
    "FormRefusedError",
    "OverloadedError",
    "StepInput",
    "StepOutput",
    "priced",
]


class ExecutorDeadError(Exception):
    """Raised by an executor that can never execute anything again; the engine then ends, and says why."""


class ContextLengthError(ValueError):
    """A request is longer than the model takes; its caller must shorten it.

    Attributes:
        prompt_tokens: of the request, media included; at least so many if ``estimated``.
        max_tokens: what the request asks for beside them; None if it names no number.
        max_model_len: tokens of prompt and answer together that the model takes.
        estimated: whether the prompt is known to be too long before it was made into tokens.
    """

    def __init__(self, prompt_tokens: int, max_tokens: int | None, max_model_len: int, *, estimated: bool = False) -> None:
        counted = f"{'at least ' if estimated else ''}{prompt_tokens} tokens, media included"
        limit = f"the model takes {max_model_len} tokens in all"
        room = max_model_len - prompt_tokens
        if room < 1 or max_tokens is None:
            message = f"the prompt has {counted}; {limit}, the answer's included: shorten the prompt"
        else:
            message = f"the prompt has {counted}, and max_tokens is {max_tokens}; {limit}: lower max_tokens to {room} or less"
        super().__init__(message)
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.max_model_len = max_model_len
        self.estimated = estimated

    @classmethod
    def check(cls, prompt_tokens: int, max_tokens: int | None, max_model_len: int) -> int:
        """Returns how many tokens an answer may have: ``max_tokens``, or all that the model has room for.

        Raises:
            ContextLengthError: prompt and answer do not fit the model together.
        """
        room = max_model_len - prompt_tokens
        if room < 1 or (max_tokens is not None and max_tokens > room):
            raise cls(prompt_tokens, max_tokens, max_model_len)
        return room if max_tokens is None else max_tokens


class FormRefusedError(ValueError):
    """An answer can't have the form that is asked for. Its text says why, and names the schema that is at fault as
    :func:`~shmring.engine.protocol.parameters_of` does, if it is that of a function."""


class FormError(ValueError):
    """An answer can't be gone on with, since it takes too long to say what of its form may be next."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """The argument that an executor is made with: ``factory(options)``.

    Attributes:
        model: a local path or a hub's name, if it loads one.
        mm_processor_kwargs: how media are prepared, as vLLM spells them; an executor refuses keys that it does not know.
        options: further options of the executor.
    """

    model: str | None = None
    mm_processor_kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class StepInput(msgspec.Struct, frozen=True):
    """A request's part in a step.

    Attributes:
        request_id: unique in this engine's life.
        payload: the request; None in steps after its inputs were given back.
        answers: how many of its ``n`` answers there is room for by now, those that have ended included; None: for all. The
            others are to be begun when there is.
    """

    request_id: int
    payload: EncodeRequest | GenerateRequest | None
    answers: int | None = None


class StepOutput(msgspec.Struct, frozen=True):
    """The output of a step for one request.

    Attributes:
        reply: what its caller is sent; None: nothing yet. The object is the engine's from then on, which may add later pieces
            to it. Embeddings may come in parts, in the order of the inputs: all parts together have one for each.
        finished: whether the request is complete.
        keep_inputs: whether the next step needs the request's payload again. Otherwise its slots go back now.
        others: further replies, where a request has several answers.
        seconds: what the request took of the step. Nothing: an equal share of what others did not take.
        beside_s: seconds of a processor that other threads have taken for it, beside this step or earlier ones; told once.
        prompt_tokens: of the request, where they are known before there is a reply.
    """

    reply: EncodeReply | GenerateReply | None = None
    finished: bool = True
    keep_inputs: bool = False
    others: Sequence[GenerateReply] = ()
    seconds: float = 0.0
    beside_s: float = 0.0
    prompt_tokens: int = 0

    @classmethod
    def of(cls, replies: Sequence[GenerateReply], prompt_tokens: int = 0, *, finished: bool) -> StepOutput:
        """Returns the output of a request with some answers, of which something is new, or nothing."""
        if not replies:
            return cls(finished=finished, prompt_tokens=prompt_tokens)
        return cls(replies[0], finished=finished, others=replies[1:])


#: A request that goes on: its inputs are given back now; or they are needed again in the next step.
GOES_ON, COMES_AGAIN = StepOutput(finished=False), StepOutput(finished=False, keep_inputs=True)


def priced(output: StepOutput | Exception, seconds: float, beside_s: float = 0.0) -> StepOutput | Exception:
    """Returns an output that says that its request took so many seconds more of the step, and beside it. An error says nothing
    of it."""
    if isinstance(output, Exception) or (seconds <= 0 and beside_s <= 0):
        return output
    return msgspec.structs.replace(output, seconds=output.seconds + seconds, beside_s=output.beside_s + beside_s)


#: What requests wait for that no step can go on with yet, and how a sentence on several of them says it.
BEING_PREPARED = {
    "its form is being prepared": "forms (schemas, patterns)",
    "its prompt is being prepared": "prompts to be laid out",
}


@runtime_checkable
class Executor(Protocol):
    """An executor computes. It is called from one thread, one step at a time, never from the event loop.

    The tensors of a payload are views of the slab: read them only while the payload is handed in, never write to them, and copy
    tensors that you need for longer. Any public method beside these can be called by
    :meth:`shmring.engine.client.EngineClient.collective_rpc`; ``reset_mm_cache``, if there is one, has a call of its
    own. For operators, an attribute ``spent_s``, if there is one, says what steps were spent on so far: seconds by part. And a
    method ``waits_for``, if there is one, says in a few words what a request of the step waits for, by its ``request_id``, or
    nothing; :data:`BEING_PREPARED` has the words for requests that no step can go on with yet. And a method ``working_s``, if
    there is one, says for how many seconds threads have been at work beside steps on what has not ended, by part (``forms``,
    ``preparing``) and owner. Both are called from the event loop, while a step may be running.
    """

    def describe(self) -> ModelDescription:
        """Says what it does."""

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Executes one step for all requests in it, or a part of it: other requests wait for its end. A request that goes on
        is part of the next step (:mod:`shmring.engine.executors.encoding` shares such steps out), or of a later one if the
        executor's description says that it can be paused.

        The requests of who has used least of earlier steps come first. Whatever there is too little of in a step goes to them.

        Returns:
            For each request its output, or the error with which it alone fails. ``ValueError`` says that the request is
            at fault.

        Raises:
            ExecutorDeadError: it will never work again.
            Exception: the step had no effect. Its requests are then executed one by one, and those that raise fail.
        """

    def forget(self, request_id: int) -> None:
        """A request that was in a step has ended: finished, failed, aborted or out of time. Lets go of its state."""

    def close(self) -> None:
        """Frees its resources."""
