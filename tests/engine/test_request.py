"""A request in the engine's hands: what is sent at once, what is kept, how it ends.

Its claim is made up, and so is the clock: a connection that takes nothing is a claim without room. Requests of real rings are
in ``test_core.py``; what only a real message shows is here.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import shmring
from shmring.engine import request as module
from shmring.engine.executors.interface import StepOutput
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    EngineRequestPayload,
    GenerateReply,
    GenerateRequest,
    MediumPart,
    Picture,
    SamplingParams,
    SpeechSegment,
    Text,
    TokenLogprobs,
    ToolCall,
)
from shmring.engine.request import EndedRequest, EngineRequest, check_payload
from tests.tables import for_each

REPLY = EncodeReply(torch.ones(1, 4))
PICTURE = Picture(torch.full((5000,), 3, dtype=torch.uint8))
TOO_LARGE = shmring.CapacityError("it does not fit", needed=2, capacity=1)
HOW = {  # what a caller is told
    "room": ["done"],
    "an abort": [],
    "its deadline": ["the request's deadline has passed in the engine"],
    "an error": [f"CapacityError: {TOO_LARGE}"],
}


class MadeUpClaim:
    """Remembers what was sent and how it ended. Without ``room`` nothing can be sent; ``error`` is what sending raises."""

    client_id = 1
    name = "name"

    def __init__(self, payload: Any) -> None:
        self.payload = payload
        self.released = self.aborted = False
        self.error: Exception | None = None
        self.sent: list[Any] = []
        self.ended: list[Any] = []
        self.room = asyncio.Event()
        self.room.set()

    def reply_nowait(self, reply: Any) -> None:
        assert not self.ended
        if self.aborted:
            raise shmring.AbortedError("it is")
        if self.error is not None:
            raise self.error
        if not self.room.is_set():
            raise shmring.WouldBlock("no room")
        self.sent.append(msgspec.structs.replace(reply))

    async def reply(self, reply: Any) -> None:
        reply = msgspec.structs.replace(reply)  # what is added to it later is not sent
        while not self.room.is_set():
            await self.room.wait()
        self.reply_nowait(reply)

    def release(self) -> None:
        self.released = True

    def done(self) -> None:
        self.time_out("done")

    def fail(self, error: BaseException) -> None:
        self.time_out(f"{type(error).__name__}: {error}")

    def time_out(self, text: str) -> None:
        assert not self.ended
        self.ended.append(text)
        self.released = True


def made(payload: Any = None) -> tuple[EngineRequest, MadeUpClaim, deque[EndedRequest]]:
    claim, ended_lately = MadeUpClaim(payload or EncodeRequest([PICTURE])), deque[EndedRequest]()
    return EngineRequest(1, claim, ended_lately), claim, ended_lately  # type: ignore[arg-type] # it has what is used


async def test_it_knows_its_payload_and_its_size() -> None:
    request, claim, _ = made(EncodeRequest([Text("not counted"), PICTURE, PICTURE], priority=3, deadline=4.5))
    assert (request.nbytes, request.priority, request.deadline, request.payload) == (10_000, 3, 4.5, claim.payload)
    claim.release()
    assert request.payload is None


@for_each(
    ("end", "how", "noted"),
    [
        (lambda request: request.deliver(REPLY, finished=True), ["done"], ""),
        (lambda request: request.fail(ValueError("no good")), ["ValueError: no good"], "ValueError"),
        (lambda request: request.time_out(), HOW["its deadline"], "TimeoutError"),
        (lambda request: request.leave(), [], "aborted"),
    ],
)
async def test_however_it_ends_its_slots_are_released_and_its_caller_is_told(end: Any, how: list[str], noted: str) -> None:
    request, claim, ended_lately = made()
    end(request)
    assert (request.over, claim.released, claim.ended) == (True, True, how)
    assert [ended.error for ended in ended_lately] == [noted]


@for_each("what", HOW)
async def test_what_can_not_be_sent_now_is_sent_later_unless_the_request_ends(what: str) -> None:
    request, claim, _ = made()
    claim.room.clear()
    flushing = request.deliver(REPLY, finished=True)
    assert flushing is not None
    await asyncio.sleep(0)
    assert (claim.sent, flushing.done(), request.over) == ([], False, False)
    request._unsent.append(REPLY)  # as if it were kept behind the one that is being sent
    if what == "its deadline":
        request.time_out()
    claim.aborted = what == "an abort"
    claim.error = TOO_LARGE if what == "an error" else None
    claim.room.set()
    await asyncio.wait([flushing])
    assert (len(claim.sent), claim.ended) == (2 if what == "room" else 0, HOW[what])
    assert flushing.cancelled() == (what == "its deadline")
    assert flushing.cancelled() or flushing.exception() is None
    assert (list(request._unsent), request._flushing) == ([], None)


@for_each("error", [TOO_LARGE, TypeError("no payload"), None])
async def test_what_can_not_be_sent_at_all_fails_the_request_and_what_nobody_waits_for_is_dropped(
    error: Exception | None,
) -> None:
    request, claim, _ = made()
    claim.error, claim.aborted = error, error is None
    assert request.deliver(REPLY, finished=True) is None
    assert (claim.ended, list(request._unsent)) == ([f"{type(error).__name__}: {error}"] if error else [], [])


# -- pieces of answers ---------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A piece that an executor delivers: what it says, of which answer, how much, and how many of its tokens are described."""

    kind: str = "text"
    index: int = 0
    length: int = 1
    described: int = 0
    after_s: float = 0.0  # the step before
    has_room: bool = True  # for the connection's next message, if its reader is slow
    yields: bool = False  # whether the loop runs after it


STEP = st.builds(
    Step,
    st.sampled_from(["text", "reasoning", "call", "nothing"]),
    st.integers(0, 2),
    st.sampled_from([1, 900, 3000]),
    st.sampled_from([0, 1, 40]),
    st.sampled_from([0.0, 0.06, 0.6]),
    st.booleans(),
    st.booleans(),
)
TURNS = [Step(kind) for kind in ("text", "text", "reasoning", "text", "call", "call", "text", "reasoning", "call", "text")]


@given(st.lists(STEP, min_size=1, max_size=40), st.sampled_from(["streamed", "with media", "whole"]), st.booleans())
@example(TURNS, "whole", False)
@example([Step(index=index, after_s=0.04) for index in (2, 0, 1)] * 9, "whole", False)
@example([Step(index=index, after_s=0.6) for index in (2, 0, 1)] * 9, "with media", False)
@example([Step(kind, length=900) for kind in ("text", "reasoning", "call") for _ in range(9)], "with media", False)
@example([Step("nothing", described=1)] * 300, "with media", False)
@example([Step(has_room=number in (0, 5), yields=True) for number in range(6)], "streamed", True)
def test_pieces_are_joined_in_order_each_answer_for_itself_and_sent_when_they_must_be(
    steps: list[Step], how: str, is_slow: bool
) -> None:
    clock = SimpleNamespace(now=100.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
        asyncio.run(deliver(steps, how, is_slow, clock))


async def deliver(steps: list[Step], how: str, is_slow: bool, clock: SimpleNamespace) -> None:
    media = [PICTURE] if how == "with media" else []
    request, claim, _ = made(GenerateRequest([], media, SamplingParams(n=3), stream=how == "streamed"))
    pieces = [reply_of(number, step, number == len(steps) - 1) for number, step in enumerate(steps)]
    delivered, lists = [msgspec.structs.replace(piece) for piece in pieces], [piece.token_ids for piece in pieces]
    send_at, came_at, flushing = 100.1, dict[int, float](), list[asyncio.Task[None] | None]()
    for piece, step in zip(pieces, steps, strict=True):
        clock.now += step.after_s
        claim.room.set() if step.has_room or not is_slow else claim.room.clear()
        finished, is_first, before = piece is pieces[-1], step.index not in came_at, len(claim.sent)
        came_at.setdefault(step.index, clock.now)
        flushing.append(request.deliver(piece, finished=finished))
        if not is_slow:
            must_be_sent = finished or how == "streamed" or clock.now >= send_at or (is_first and how == "with media")
            assert (len(claim.sent) > before) == must_be_sent
            send_at = clock.now + 1 if must_be_sent else send_at
            for one, other in itertools.pairwise(claim.sent[before:]):
                assert one.index != other.index or is_break(one, other) or size(one) >= 4096 or len(one.logprobs) >= 64
        if step.yields:
            await asyncio.sleep(0)
    claim.room.set()
    await asyncio.gather(*(task for task in flushing if task is not None))
    assert claim.ended == ["done"]
    for index in came_at:
        mine, sent = ([piece for piece in some if piece.index == index] for some in (delivered, claim.sent))
        assert told(sent) == told(mine)
        assert [piece.first_at for piece in sent] == [0.0 if how == "streamed" else came_at[index], *[0.0] * (len(sent) - 1)]
    assert all(size(piece) < 4096 + 3000 and len(piece.logprobs) < 64 + 40 for piece in claim.sent)
    assert lists == [[number] for number in range(len(steps))], "they may be the executor's"


def reply_of(number: int, step: Step, finished: bool) -> GenerateReply:
    text = chr(97 + number % 26) * step.length
    says: dict[str, Any] = {"call": {"tool_calls": [ToolCall("f", text)]}, "nothing": {}}.get(step.kind, {step.kind: text})
    piece = GenerateReply("", [number], 7 + number, number, "stop" if finished else None, index=step.index)
    piece.logprobs = [TokenLogprobs(b"%d" % number, -1.0, [])] * step.described
    piece.segments = [SpeechSegment(number, 1.0, "", [], 0.0, 0.0, 0.0)]
    piece.stop_text, piece.language = ("END" if finished else None), f"language {number}"
    return msgspec.structs.replace(piece, **says)


def told(pieces: list[GenerateReply]) -> list[Any]:
    """What a reader sees: kinds in their order, character by character; all that has a list; and what the last piece says."""
    shown: list[tuple[str, str]] = []
    for piece in pieces:
        assert not (piece.reasoning and (piece.text or piece.tool_calls)), (
            "how many tokens reasoning took is said where it ends"
        )
        shown += [("reasoning", character) for character in piece.reasoning] + [("text", character) for character in piece.text]
        shown += [("call", call.arguments) for call in piece.tool_calls]
    lists = [[value for piece in pieces for value in getattr(piece, name)] for name in ("token_ids", "logprobs", "segments")]
    last = pieces[-1]
    return [shown, lists, last.prompt_tokens, last.completion_tokens, last.finish_reason, last.stop_text, last.language]


def size(piece: GenerateReply) -> int:
    said = len(piece.text) + len(piece.reasoning) + sum(len(call.arguments) for call in piece.tool_calls)
    return max(said, len(piece.token_ids))


def is_break(one: GenerateReply, other: GenerateReply) -> bool:
    """Whether two pieces as one would change the order of what they say, or hide where reasoning ends."""
    says, others = bool(one.text or one.tool_calls), bool(other.text or other.tool_calls)
    return bool((one.reasoning and others) or (says and other.reasoning) or (one.tool_calls and other.text))


@for_each("media", [[], [PICTURE]])
async def test_an_answer_of_which_a_step_prepares_only_is_not_begun(media: list[Any]) -> None:
    request, claim, _ = made(GenerateRequest([], media, stream=False))
    request.deliver(None, finished=False)
    assert (claim.sent, request.over) == ([], False)


async def all_of(replies: AsyncIterator[GenerateReply]) -> list[GenerateReply]:
    return [reply async for reply in replies]


async def test_pieces_are_joined_up_to_what_a_message_can_hold(serve: Any, connect: Any) -> None:
    """With a real ring: of tokens alone, and of those that are described, at their longest."""
    ring, client = await serve(payload_type=EngineRequestPayload), await connect()
    for count, described in ((10_001, []), (200, [TokenLogprobs(b"token" * 4, -1.0, [(b"token" * 4, -1.0)] * 20)])):
        asked = client.stream(GenerateRequest([], stream=False), timeout=60, reply_type=GenerateReply)
        reading = asyncio.create_task(all_of(asked))
        request = EngineRequest(1, await ring.claim(), deque())
        request._send_at += 600  # however slow this is
        for number in range(count):
            finished = number == count - 1
            piece = GenerateReply("", [number], 7, number, "stop" if finished else None, logprobs=described)
            flushing = request.deliver(piece, finished=finished)
        if flushing is not None:
            await flushing
        replies = await reading
        assert [token for reply in replies for token in reply.token_ids] == list(range(count))
        most = 64 if described else 4096
        assert [len(reply.token_ids) for reply in replies] == [*[most] * (count // most), count % most]


# -- what is checked -----------------------------------------------------------------------------------------------------


async def test_a_request_has_one_embedding_for_each_input_and_a_conversation_has_none() -> None:
    for payload, count, finished, is_wrong in (
        (GenerateRequest([]), 1, False, True),
        (EncodeRequest([PICTURE] * 2), 1, False, False),
        (EncodeRequest([PICTURE] * 2), 1, True, True),
        (EncodeRequest([PICTURE] * 2), 3, False, True),
        (EncodeRequest([PICTURE] * 2), 2, True, False),
    ):
        output = StepOutput(EncodeReply(torch.ones(count, 4)), finished=finished)
        assert isinstance(made(payload)[0].counted(output), RuntimeError) == is_wrong
    answer = StepOutput(GenerateReply("", [1], 7, 1), finished=True)
    assert made(GenerateRequest([]))[0].counted(answer) is answer


@for_each("index", [-1, 1, 99])
def test_a_message_must_name_media_that_are_there(index: int) -> None:
    request = GenerateRequest([ChatMessage("user", [MediumPart(0)]), ChatMessage("user", [MediumPart(index)])], [PICTURE])
    with pytest.raises(ValueError, match=r"messages\[1\] names medium"):
        check_payload(request)
    request.messages.pop()
    check_payload(request)


def test_a_request_to_encode_has_something_to_encode() -> None:
    with pytest.raises(ValueError, match="at least one input"):
        check_payload(EncodeRequest([]))
    check_payload(EncodeRequest([PICTURE]))


def test_a_request_has_only_so_many_logprobs() -> None:
    with pytest.raises(ValueError, match=r"4096 tokens of 16 answers, each with 21 logprobs, .* lower max_tokens to 780"):
        check_payload(GenerateRequest(sampling=SamplingParams(n=16, max_tokens=4096, logprobs=20)))
    # Without max_tokens, executors end answers there; others refuse an n of 0.
    for n, most, logprobs in ((16, 780, 20), (16, 2**40, None), (16, None, 20), (0, 1, -1)):
        check_payload(GenerateRequest(sampling=SamplingParams(n=n, max_tokens=most, logprobs=logprobs)))
