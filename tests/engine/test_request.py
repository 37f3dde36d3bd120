"""A request in the engine's hands, with real claims: what is sent at once, what is kept, how it ends."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import torch

import shmring
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
    Text,
    ToolCall,
)
from shmring.engine.request import EngineRequest, check_payload
from tests.tables import for_each

REPLY = EncodeReply(torch.ones(1, 4))
LARGE_REPLY = EncodeReply(torch.ones(1, 10_000))
PICTURE = Picture(torch.full((5000,), 3, dtype=torch.uint8))


@pytest.fixture
async def ring(serve: Any) -> shmring.Ring:
    ring: shmring.Ring = await serve(payload_type=EngineRequestPayload, reply_nbytes=65536)
    return ring


class Exchange:
    """A claimed request, and what its frontend has got of it."""

    request: EngineRequest
    task: asyncio.Task[None]

    def __init__(self, client: shmring.Client) -> None:
        self.client = client
        self.replies: list[Any] = []

    async def read(self, payload: Any, reply_type: Any) -> None:
        async for reply in self.client.stream(payload, timeout=10, reply_type=reply_type):
            self.replies.append(reply)


@pytest.fixture
async def ask(ring: shmring.Ring, connect: Any) -> AsyncIterator[Any]:
    """``await ask(payload)``: a claimed request, and the reader of its replies."""
    exchanges: list[Exchange] = []

    async def ask_one(payload: Any = None, reply_type: Any = EncodeReply) -> Exchange:
        exchange = Exchange(await connect())
        exchange.task = asyncio.create_task(exchange.read(payload or EncodeRequest([PICTURE]), reply_type))
        exchange.request = EngineRequest(1, await ring.claim(), deque())
        exchanges.append(exchange)
        return exchange

    yield ask_one
    for exchange in exchanges:
        exchange.task.cancel()
        await asyncio.wait([exchange.task])


def occupy_the_reply_reserve(ring: shmring.Ring, client_id: int) -> Any:
    """Takes nearly all of it; returns what frees it."""
    blocking = ring._shell._book.acquire_reply(client_id, 60_000)
    assert blocking is not None
    return lambda: ring._shell.carry_out(ring._shell._book.discard_reply(client_id, blocking.generation))


async def test_it_knows_its_payload_and_its_size(ask: Any) -> None:
    request = (await ask(EncodeRequest([Text("not counted"), PICTURE, PICTURE], priority=3, deadline=4.5))).request
    assert (request.nbytes, request.priority, request.deadline) == (10_000, 3, 4.5)
    assert request.payload.inputs[1].pixels.sum() == 15_000
    request.claim.release()
    assert request.payload is None


async def test_a_finished_one_releases_its_slot_and_is_answered(ring: shmring.Ring, ask: Any) -> None:
    exchange = await ask()
    assert exchange.request.deliver(REPLY, finished=True) is None
    assert exchange.request.over
    assert ring.statistics().slots_in_use == 0
    await exchange.task
    assert torch.equal(exchange.replies[0].embeddings, REPLY.embeddings)


async def test_the_caller_gets_the_error(ask: Any) -> None:
    exchange = await ask()
    exchange.request.fail(ValueError("no good"))
    with pytest.raises(shmring.RemoteError, match="ValueError: no good"):
        await exchange.task


async def test_the_caller_gets_a_timeout_when_the_time_is_over(ring: shmring.Ring, ask: Any) -> None:
    exchange = await ask()
    exchange.request.time_out()
    with pytest.raises(TimeoutError, match="deadline"):
        await exchange.task
    assert ring.statistics().slots_in_use == 0


async def test_an_aborted_one_is_released_in_silence(ring: shmring.Ring, ask: Any, eventually: Any) -> None:
    exchange = await ask()
    exchange.task.cancel()
    await eventually(lambda: exchange.request.claim.aborted)
    assert ring.statistics().slots_claimed == 1
    assert exchange.request.deliver(REPLY, finished=True) is None
    exchange.request.leave()
    assert ring.statistics().slots_in_use == 0
    assert ring.statistics().replies == 0


async def test_what_can_not_be_sent_now_is_sent_later_without_its_slot(ring: shmring.Ring, ask: Any) -> None:
    exchange = await ask()
    free = occupy_the_reply_reserve(ring, exchange.request.claim.client_id)
    exchange.request.claim.release()
    flushing = exchange.request.deliver(LARGE_REPLY, finished=True)
    assert flushing is not None
    await asyncio.sleep(0)
    assert not flushing.done()
    assert ring.statistics().slots_in_use == 0, "it must not wait with its slot"
    free()
    await flushing
    await exchange.task
    assert torch.equal(exchange.replies[0].embeddings, LARGE_REPLY.embeddings)


async def test_a_reply_that_never_fits_fails_the_request(ask: Any) -> None:
    exchange = await ask()
    assert exchange.request.deliver(EncodeReply(torch.ones(1, 100_000)), finished=True) is None
    with pytest.raises(shmring.RemoteError, match="CapacityError"):
        await exchange.task


def piece(number: int, reason: Any = None) -> GenerateReply:
    return GenerateReply(f"{number} ", [number], 7, number, reason, stop_text="END" if reason == "stop" else None)


@pytest.mark.parametrize("finished_while_sending", [True, False])
async def test_pieces_for_a_slow_reader_become_one_in_order(
    ring: shmring.Ring, ask: Any, monkeypatch: pytest.MonkeyPatch, finished_while_sending: bool
) -> None:
    """Its connection takes nothing for a while; then what has been kept goes as one piece, behind what was being sent."""
    exchange = await ask(GenerateRequest([]), GenerateReply)
    may_send = asyncio.Event()
    real_reply = exchange.request.claim.reply

    async def slow_reply(claim: Any, payload: Any) -> None:
        await may_send.wait()
        await real_reply(payload)

    def blocked(claim: Any, payload: Any) -> None:
        raise shmring.WouldBlock("it reads slowly")

    with monkeypatch.context() as patched:
        patched.setattr(shmring.Claim, "reply", slow_reply)
        patched.setattr(shmring.Claim, "reply_nowait", blocked)
        flushing = exchange.request.deliver(piece(1), finished=False)
        assert flushing is not None
        await asyncio.sleep(0)
        for number in (2, 3, 4):
            assert exchange.request.deliver(piece(number), finished=False) is None, "somebody is sending already"
        if finished_while_sending:
            exchange.request.deliver(piece(5, "length"), finished=True)
        may_send.set()
        await flushing
    if not finished_while_sending:
        assert not exchange.request.over
        assert exchange.request.deliver(piece(5, "length"), finished=True) is None
    await exchange.task
    assert "".join(reply.text for reply in exchange.replies) == "1 2 3 4 5 "
    assert [token for reply in exchange.replies for token in reply.token_ids] == [1, 2, 3, 4, 5]
    assert len(exchange.replies) == (2 if finished_while_sending else 3)
    assert (exchange.replies[-1].finish_reason, exchange.replies[-1].completion_tokens) == ("length", 5)


async def test_a_request_that_is_aborted_while_its_pieces_are_kept_lets_go_of_them(
    ring: shmring.Ring, ask: Any, eventually: Any
) -> None:
    exchange = await ask()
    free = occupy_the_reply_reserve(ring, exchange.request.claim.client_id)
    flushing = exchange.request.deliver(LARGE_REPLY, finished=True)
    assert flushing is not None
    exchange.task.cancel()
    await flushing
    assert exchange.request.claim.aborted
    exchange.request.leave()
    free()
    await eventually(lambda: ring.statistics().slots_in_use == 0)


async def test_pieces_are_joined_up_to_what_a_message_can_hold(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = await ask(GenerateRequest([]), GenerateReply)

    def blocked(claim: Any, payload: Any) -> None:
        raise shmring.WouldBlock("it reads slowly")

    with monkeypatch.context() as patched:
        patched.setattr(shmring.Claim, "reply_nowait", blocked)
        flushing = exchange.request.deliver(piece(0), finished=False)
        for number in range(1, 10_000):
            exchange.request.deliver(piece(number), finished=False)
        exchange.request.deliver(piece(10_000, "stop"), finished=True)
        await flushing
    await exchange.task
    assert 5 < len(exchange.replies) < 50
    assert "".join(reply.text for reply in exchange.replies) == "".join(f"{number} " for number in range(10_001))


async def test_of_an_answer_that_is_not_streamed_the_first_piece_comes_at_once_and_the_rest_at_its_end(
    ask: Any, eventually: Any
) -> None:
    exchange = await ask(GenerateRequest([], [PICTURE], stream=False), GenerateReply)
    pieces = [piece(number, "stop" if number == 5 else None) for number in range(1, 6)]
    lists = [one.token_ids for one in pieces]
    exchange.request.deliver(None, finished=False)  # a step that prepared
    exchange.request.deliver(pieces[0], finished=False)
    await eventually(lambda: len(exchange.replies) == 1)
    for one in pieces[1:]:
        assert exchange.request.deliver(one, finished=one is pieces[-1]) is None
    await exchange.task
    _, rest = exchange.replies
    assert (rest.text, rest.token_ids, rest.completion_tokens, rest.finish_reason) == ("2 3 4 5 ", [2, 3, 4, 5], 5, "stop")
    assert rest.stop_text == "END"
    assert lists == [[1], [2], [3], [4], [5]], "they may be the executor's"


async def test_a_short_answer_without_media_that_is_not_streamed_is_one_message(ask: Any) -> None:
    exchange = await ask(GenerateRequest([], stream=False), GenerateReply)
    before = time.monotonic()
    exchange.request._send_at = before + 60  # however busy the machine is
    for number in range(1, 6):
        assert exchange.request.deliver(piece(number, "stop" if number == 5 else None), finished=number == 5) is None
    await exchange.task
    [whole] = exchange.replies
    assert (whole.token_ids, whole.completion_tokens, whole.finish_reason) == ([1, 2, 3, 4, 5], 5, "stop")
    assert before <= whole.first_at <= time.monotonic(), "when its first token came"


async def test_the_first_piece_of_an_answer_that_takes_longer_does_not_wait_for_it(ask: Any, eventually: Any) -> None:
    exchange = await ask(GenerateRequest([], stream=False), GenerateReply)
    assert 0 < exchange.request._send_at - exchange.request.arrived_at < 1
    exchange.request._send_at = time.monotonic()
    exchange.request.deliver(piece(1), finished=False)
    await eventually(lambda: len(exchange.replies) == 1)
    exchange.request.deliver(piece(2), finished=False)
    exchange.request.deliver(piece(3, "stop"), finished=True)
    await exchange.task
    assert [(reply.token_ids, reply.first_at > 0) for reply in exchange.replies] == [([1], True), ([2, 3], False)]


async def test_an_answer_that_is_not_streamed_is_sent_once_a_second(ask: Any, eventually: Any) -> None:
    """Its tokens are counted also if its caller hangs up."""
    exchange = await ask(GenerateRequest([], stream=False), GenerateReply)
    sent = 0
    started = time.monotonic()
    while len(exchange.replies) < 3:
        sent += 1
        exchange.request.deliver(piece(sent), finished=False)
        await asyncio.sleep(0.01)
    assert 1.9 < time.monotonic() - started < 10
    exchange.request.deliver(piece(sent + 1, "stop"), finished=True)
    await exchange.task
    assert "".join(reply.text for reply in exchange.replies) == "".join(f"{number} " for number in range(1, sent + 2))


async def test_answers_that_are_not_streamed_are_joined_each_for_itself(ask: Any) -> None:
    exchange = await ask(GenerateRequest([], [PICTURE], SamplingParams(n=3), stream=False), GenerateReply)
    for number in (1, 2, 3):
        for index in range(3):
            one = piece(number, "stop" if number == 3 else None)
            one.index = index
            one.text = f"{index}:{one.text}"
            exchange.request.deliver(one, finished=(number, index) == (3, 2))
    await exchange.task
    first, rest = exchange.replies[:3], exchange.replies[3:]
    assert [(reply.index, reply.text) for reply in first] == [(index, f"{index}:1 ") for index in range(3)]
    assert [(reply.index, reply.text) for reply in rest] == [(index, f"{index}:2 {index}:3 ") for index in range(3)]


async def test_what_is_joined_keeps_the_order_of_reasoning_text_and_calls(ask: Any) -> None:
    exchange = await ask(GenerateRequest([], stream=False), GenerateReply)
    order = ["reasoning", "reasoning", "text", "text", "call", "call", "text", "reasoning", "call", "text"]
    exchange.request.deliver(piece(0), finished=False)
    for number, kind in enumerate(order, 1):
        one = GenerateReply("", [number], 7, number, "stop" if number == len(order) else None)
        if kind == "call":
            one.tool_calls = [ToolCall(f"f{number}", "{}")]
        else:
            setattr(one, kind, f"{number} ")
        exchange.request.deliver(one, finished=number == len(order))
    await exchange.task
    parts = [(reply.reasoning, reply.text, [call.name for call in reply.tool_calls]) for reply in exchange.replies[1:]]
    assert parts == [
        ("1 2 ", "", []),
        ("", "3 4 ", ["f5", "f6"]),
        ("", "7 ", []),
        ("8 ", "", []),
        ("", "", ["f9"]),
        ("", "10 ", []),
    ]


@for_each(
    "what",
    [
        {"text": "x" * 1_000},
        {"reasoning": "x" * 1_000},
        {"tool_calls": [ToolCall("f", "x" * 1_000)]},
    ],
)
async def test_pieces_of_any_kind_become_no_larger_than_a_message(ask: Any, what: dict[str, Any]) -> None:
    exchange = await ask(GenerateRequest([], stream=False), GenerateReply)
    for number in range(100):
        finished = number == 99
        reply = GenerateReply("", [number], 7, number, "stop" if finished else None)
        exchange.request.deliver(msgspec.structs.replace(reply, **what), finished=finished)
    await exchange.task
    assert max(len(reply.token_ids) for reply in exchange.replies) <= 5
    assert [token for reply in exchange.replies for token in reply.token_ids] == list(range(100))


async def test_embeddings_are_no_answer_to_a_conversation(ask: Any) -> None:
    exchange = await ask(GenerateRequest([]), GenerateReply)
    assert isinstance(exchange.request.counted(StepOutput(piece(1), finished=False)), StepOutput)
    assert isinstance(exchange.request.counted(StepOutput(REPLY, finished=False)), RuntimeError)
    exchange.request.deliver(piece(1, "stop"), finished=True)
    await exchange.task


async def test_one_that_ends_while_its_reply_waits_leaves_the_line(ring: shmring.Ring, ask: Any) -> None:
    exchange = await ask()
    free = occupy_the_reply_reserve(ring, exchange.request.claim.client_id)
    flushing = exchange.request.deliver(LARGE_REPLY, finished=True)
    await asyncio.sleep(0)
    assert ring.statistics().replies_waiting == 1
    exchange.request.time_out()
    with pytest.raises(asyncio.CancelledError):
        await flushing
    assert ring.statistics().replies_waiting == 0
    with pytest.raises(TimeoutError):
        await exchange.task
    free()


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
    request = GenerateRequest([ChatMessage("user", [])], sampling=SamplingParams(n=16, max_tokens=4096, logprobs=20))
    with pytest.raises(ValueError, match=r"4096 tokens of 16 answers, each with 21 logprobs, .* lower max_tokens to 780"):
        check_payload(request)
    for sampling in (
        SamplingParams(n=16, max_tokens=780, logprobs=20),
        SamplingParams(n=16, max_tokens=2**40),
        SamplingParams(n=16, logprobs=20),  # executors end its answers there
        SamplingParams(n=0, max_tokens=1, logprobs=-1),  # which others refuse
    ):
        check_payload(GenerateRequest(sampling=sampling))
