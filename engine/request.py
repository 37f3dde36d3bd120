"""A request in the engine: its claim, and the way of its replies to the frontend.

A step must not wait for a frontend that reads slowly. So replies are sent at once if they need not wait. Otherwise they are
kept in order, pieces of an answer joined into one, until a task has sent them. Kept replies are bounded: an answer's text by
its ``max_tokens``, logprobs by a limit for a request, embeddings by the inputs of the request.

Where nobody reads an answer before its end, a message for each token would cost both sides more than the token. So only the
first piece of such an answer is sent early: it says that the request's media are no longer needed, that its tokens count also
if the caller hangs up, and that no other engine is to be asked if this one dies. Without media, it may be a tenth of a second
late, within which a short answer is complete, and one message. Later pieces are kept until the answer ends, or for a second.

Source: vLLM's ``RequestOutputKind.FINAL_ONLY``.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import NamedTuple

from msgspec import UNSET

import shmring
from shmring.engine.accounts import Account
from shmring.engine.executors.interface import StepOutput
from shmring.engine.protocol import EncodeReply, EncodeRequest, GenerateReply, GenerateRequest, MediumPart, Text, tensor_of
from shmring.service.tracing import RequestTrace, is_tracing

__all__ = ["EndedRequest", "EngineRequest", "check_payload"]

_MAX_INT64 = (1 << 63) - 1
_PIECE_LENGTH = 4096  # tokens or characters from which pieces are joined no further: their message must fit a frame
_INTERVAL_S = 1.0  # between messages of an answer that nobody reads before its end
_FIRST_S = 0.1  # after which the first one of such an answer is sent, unless it says that media are no longer needed
_PIECE_LOGPROBS = 64  # the same of tokens that are described, each with up to 20 others


class EndedRequest(NamedTuple):
    """What is known of a request that has ended, for people.

    Attributes:
        at: when it ended, in time of ``time.monotonic()``.
        error: the type of what it failed with, or "aborted"; empty: it was answered.
        age_s: from its arrival to its end, in seconds.
        name, owner, prompt_tokens, tokens, seconds: as of :class:`EngineRequest`.
    """

    at: float
    error: str
    age_s: float
    name: str
    owner: str
    prompt_tokens: int
    tokens: int
    seconds: float


class EngineRequest:
    """A claimed request.

    Args:
        number: see below.
        claim: see below.
        ended_lately: where it is noted when it ends.

    Attributes:
        number: unique in this engine's life; what executors know it by.
        claim: the ring's claim.
        account, owner, priority, nbytes, num_seqs: for the scheduler; bytes are those of its tensors.
        arrived_at, admitted_at, first_reply_at: times of ``time.monotonic()``; 0: it is not so far.
        deadline: time of ``time.monotonic()`` after which it is given up, or None.
        is_tokenized: whether it only has a text tokenized, so that no token of its reply is a generated one.
        is_encoded: whether it asks for embeddings, and for no answer.
        expired: whether that time has passed while a step was running with it.
        revoked: why the engine ends it at the next boundary between steps, or None.
        seconds: that it took of steps, and of other threads beside them.
        prompt_tokens, tokens: of its prompt, and of its answers so far, as its executor has said.
        ended: whether it was answered, failed or timed out. An aborted one ends by itself (``claim.aborted``).
    """

    account: Account

    def __init__(self, number: int, claim: shmring.Claim, ended_lately: deque[EndedRequest]) -> None:
        payload: EncodeRequest | GenerateRequest = claim.payload
        self.number = number
        self.claim = claim
        self._ended_lately = ended_lately
        self.arrived_at = time.monotonic()
        self.admitted_at = 0.0
        self.first_reply_at = 0.0
        self.owner = payload.owner = payload.owner or f"client {claim.client_id}"  # executors share by owner, too
        self.priority = payload.priority
        self.deadline = payload.deadline
        self.nbytes = _nbytes(payload)
        self.num_seqs = payload.sampling.n if isinstance(payload, GenerateRequest) else 1
        self.is_tokenized = isinstance(payload, GenerateRequest) and payload.tokenize
        self.is_encoded = isinstance(payload, EncodeRequest)
        self._inputs = len(payload.inputs) if isinstance(payload, EncodeRequest) else 0
        self._encoded = 0
        self.seconds = 0.0
        self.prompt_tokens = 0
        self.tokens = 0
        self.expired = False
        self.revoked: Exception | None = None
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._is_streamed = not isinstance(payload, GenerateRequest) or payload.stream
        self._begun: set[int] = set()  # the answers whose first piece has come, where they are not streamed
        self._send_at = 0.0 if self.nbytes else self.arrived_at + _FIRST_S  # the next piece of such an answer
        self._unsent: deque[EncodeReply | GenerateReply] = deque()
        self._open: dict[int, GenerateReply] = {}  # of the unsent, the last piece of each answer, which others are joined to
        self._complete = False
        self._flushing: asyncio.Task[None] | None = None
        self._trace = _trace_of(payload, claim.name)

    @property
    def payload(self) -> EncodeRequest | GenerateRequest | None:
        """The payload, its tensors views of the slab; None once its slots were released."""
        if self.claim.released:
            return None
        payload: EncodeRequest | GenerateRequest = self.claim.payload
        return payload

    @property
    def over(self) -> bool:
        """Whether no step should spend time on it any more."""
        return self.ended or self.expired or self.revoked is not None or self.claim.aborted

    def counted(self, output: StepOutput | Exception) -> StepOutput | Exception:
        """Counts the embeddings of an output; returns it, or what is wrong: all parts together have one for each input."""
        if isinstance(output, Exception):
            return output
        if isinstance(output.reply, EncodeReply):
            self._encoded += len(output.reply.embeddings)
        if self._encoded != self._inputs and (self._encoded > self._inputs or output.finished):
            return RuntimeError(f"the executor's embeddings are {self._encoded}, where {self._inputs} are expected")
        return output

    def deliver(self, reply: EncodeReply | GenerateReply | None, *, finished: bool) -> asyncio.Task[None] | None:
        """Sends a reply, unless it may wait, and ends the request if it is finished. If that can't be done now, keeps both.

        Returns:
            A task that sends kept replies, if one was started. The caller need not await it, but must cancel it before it
            closes the ring.
        """
        if reply is not None:
            self._keep(reply)
            if self._trace is not None:
                self._trace.count(reply.prompt_tokens, len(reply.token_ids) if isinstance(reply, GenerateReply) else None)
        self._complete = finished
        if self._flushing is not None or (not self._is_streamed and self._may_wait(reply)) or self._flush_nowait():
            return None
        self._flushing = asyncio.get_running_loop().create_task(self._flush())
        return self._flushing

    async def _flush(self) -> None:
        """Sends kept replies, also those that are kept meanwhile. Cancelled if the request ends in another way."""
        try:
            while self._unsent:
                await self.claim.reply(self._next_piece())
        except shmring.AbortedError:
            self._drop_unsent()
        except (shmring.CapacityError, TypeError) as error:
            self.fail(error)
        else:
            self._finish_if_complete()
        finally:
            self._flushing = None

    def fail(self, error: BaseException) -> None:
        """Ends the request with an error; its slots are released."""
        self._end(type(error).__name__)
        self.claim.fail(error)

    def time_out(self) -> None:
        """Ends the request because its time is over; its slots are released."""
        self._end("TimeoutError")
        self.claim.time_out("the request's deadline has passed in the engine")

    def leave(self) -> None:
        """Releases the slots of a request that its frontend has aborted."""
        self._end("aborted")
        self.claim.release()

    def _keep(self, reply: EncodeReply | GenerateReply) -> None:
        if not isinstance(reply, GenerateReply):
            self._unsent.append(reply)
            return
        piece = self._open.get(reply.index)
        if piece is None or not _may_join(piece, reply):
            self._unsent.append(reply)
            self._open[reply.index] = reply
            if not self._is_streamed and reply.index not in self._begun:
                self._begun.add(reply.index)
                reply.first_at = time.monotonic()
            return
        piece.text += reply.text
        piece.token_ids = piece.token_ids + reply.token_ids  # not in place: the lists may be the executor's
        piece.prompt_tokens = reply.prompt_tokens
        piece.completion_tokens = reply.completion_tokens
        piece.finish_reason, piece.stop_text = reply.finish_reason, reply.stop_text
        piece.reasoning += reply.reasoning
        piece.language = reply.language
        if reply.tool_calls:
            piece.tool_calls = piece.tool_calls + reply.tool_calls
        if reply.logprobs:
            piece.logprobs = piece.logprobs + reply.logprobs
        if reply.segments:
            piece.segments = piece.segments + reply.segments

    def _next_piece(self) -> EncodeReply | GenerateReply:
        """Takes the oldest reply out: it is sent now, and nothing is joined to it any more."""
        reply = self._unsent.popleft()
        if isinstance(reply, GenerateReply) and self._open.get(reply.index) is reply:
            del self._open[reply.index]
        return reply

    def _may_wait(self, reply: EncodeReply | GenerateReply | None) -> bool:
        """Whether what is kept, this reply the last of it, is sent with what follows."""
        if self._complete:
            return False
        if not isinstance(reply, GenerateReply):
            return True
        now = time.monotonic()
        if now < self._send_at and not (reply.first_at and self.nbytes):
            return True
        self._send_at = now + _INTERVAL_S
        return False

    def _flush_nowait(self) -> bool:
        try:
            while self._unsent:
                self.claim.reply_nowait(self._unsent[0])
                self._next_piece()
        except shmring.WouldBlock:
            return False
        except shmring.AbortedError:
            self._drop_unsent()
            return True
        except (shmring.CapacityError, TypeError) as error:  # the executor's answer can't be sent
            self.fail(error)
            return True
        self._finish_if_complete()
        return True

    def _drop_unsent(self) -> None:
        self._unsent.clear()
        self._open.clear()

    def _finish_if_complete(self) -> None:
        if self._complete and not self.ended:
            self._end()
            self.claim.done()

    def _end(self, error: str = "") -> None:
        if not self.ended:
            now, claim = time.monotonic(), self.claim
            age_s, tokens = now - self.arrived_at, self.tokens
            self._ended_lately.append(
                EndedRequest(now, error, age_s, claim.name, self.owner, self.prompt_tokens, tokens, self.seconds)
            )
        self.ended = True
        trace, self._trace = self._trace, None
        if trace is not None:
            decode_at = 0.0 if self._inputs else self.first_reply_at  # embeddings have none
            begun = (("queue", self.arrived_at), ("prefill", self.admitted_at), ("decode", decode_at))
            trace.end([(phase, begun_at) for phase, begun_at in begun if begun_at], error)
        self._drop_unsent()
        if self.timer is not None:
            self.timer.cancel()
        if self._flushing is not None and self._flushing is not asyncio.current_task():
            self._flushing.cancel()  # it may be in line for reply space


def _trace_of(payload: EncodeRequest | GenerateRequest, name: str) -> RequestTrace | None:
    if payload.trace_headers is UNSET or not is_tracing():
        return None
    attributes: dict[str, str | int | float] = {"gen_ai.request.id": name}
    if isinstance(payload, GenerateRequest):
        sampling = payload.sampling
        attributes |= {
            "gen_ai.request.n": sampling.n,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
        if sampling.max_tokens is not None:
            # A larger number can't be sent, nor can any span beside it.
            attributes["gen_ai.request.max_tokens"] = min(sampling.max_tokens, _MAX_INT64)
    return RequestTrace(payload.trace_headers, attributes)


def _may_join(piece: GenerateReply, reply: GenerateReply) -> bool:
    """Whether two pieces of an answer can be one: it has room, and says reasoning, text and calls in this order."""
    if piece.reasoning and (reply.text or reply.tool_calls):
        return False  # how many tokens reasoning took is said where it ends
    if (piece.text and reply.reasoning) or (piece.tool_calls and (reply.text or reply.reasoning)):
        return False
    length = len(piece.text) + len(piece.reasoning)
    for call in piece.tool_calls:
        length += len(call.arguments)
    return max(length, len(piece.token_ids)) < _PIECE_LENGTH and len(piece.logprobs) < _PIECE_LOGPROBS


def _nbytes(payload: EncodeRequest | GenerateRequest) -> int:
    media = payload.inputs if isinstance(payload, EncodeRequest) else payload.media
    return sum(tensor_of(medium).nbytes for medium in media if not isinstance(medium, Text))


def check_payload(payload: EncodeRequest | GenerateRequest) -> None:
    """Checks what no executor should have to.

    Raises:
        ValueError: there is nothing to encode; or a message names a medium that the request does not have, or its answers may
            have too many logprobs.
    """
    if isinstance(payload, EncodeRequest) and not payload.inputs:
        raise ValueError("a request to encode has at least one input")
    if isinstance(payload, GenerateRequest):
        payload.sampling.max_described_tokens()
        for position, message in enumerate(payload.messages):
            for part in message.parts:
                if isinstance(part, MediumPart) and not 0 <= part.index < len(payload.media):
                    raise ValueError(f"messages[{position}] names medium {part.index}; the request has {len(payload.media)}")
