"""What is ended from inside a call: by a signal handler, a payload's own code, a hook that decodes it, or a cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import signal
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import pytest
import torch

import shmring
from tests.claiming import claimed
from tests.waiting import cancel, eventually, hold, settled, turns

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(60)]

OPTIONS: dict[str, Any] = {
    "broadcast_nbytes": "256KiB",
    "worker_backlog": 4,
    "message_ring_nbytes": "16KiB",
    "inline_nbytes": "1KiB",
}


def meddling(action: Callable[[], object]) -> object:
    """A payload with code of its own, which runs while it is packed."""

    @dataclasses.dataclass
    class Meddling:
        x: int = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "x":
                action()
            return object.__getattribute__(self, name)

    return Meddling()


@contextlib.contextmanager
def signalled(function: str, action: Callable[[], object]) -> Iterator[None]:
    """A signal handler does something as soon as this thread is in a function of this name."""

    def handle(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_name != function:
            frame = frame.f_back
        if frame is not None and not acting:
            acting.append(True)
            try:
                action()
            finally:
                acting.clear()

    def ring() -> None:
        while not over.wait(0.005):
            signal.pthread_kill(here, signal.SIGUSR1)

    acting: list[bool] = []  # signals come within the action as well
    here, over, ringing = threading.get_ident(), threading.Event(), threading.Thread(target=ring)
    before = signal.signal(signal.SIGUSR1, handle)
    ringing.start()
    try:
        yield
    finally:
        over.set()
        ringing.join()
        signal.signal(signal.SIGUSR1, before)


# -- a worker without a loop ---------------------------------------------------------------------------------------------------


@pytest.fixture
def ring(socket_dir: Path) -> Iterator[shmring.threads.Ring]:
    with shmring.threads.serve("test", slab_nbytes="1MiB", socket_dir=str(socket_dir), **OPTIONS) as ring:
        yield ring


@pytest.fixture
def join(ring: shmring.threads.Ring, socket_dir: Path) -> Iterator[Callable[..., shmring.threads.Worker]]:
    with contextlib.ExitStack() as opened:

        def open_worker(**options: Any) -> shmring.threads.Worker:
            worker = opened.enter_context(shmring.threads.join("test", 0, socket_dir=str(socket_dir), **options))
            assert ring.wait_workers(1, timeout=10) == (0,)
            return worker

        yield open_worker


def gather(ring: shmring.threads.Ring, payload: object) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.extend(ring.gather(payload, timeout=30))
        except Exception as error:  # noqa: BLE001 - it is looked at
            outcome.append(error.with_traceback(None))

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


@pytest.mark.parametrize("timeout", [None, 30.0])
@pytest.mark.timeout(20)
def test_a_signal_handler_may_close_a_worker_whose_thread_waits(join: Any, timeout: float | None) -> None:
    worker = join()
    with signalled("next", worker.close), pytest.raises(shmring.ClosedError, match=r"worker 0 .* is closed"):
        worker.receive(timeout)
    assert worker._connection._pidfd < 0, "who left last has tidied up"
    worker.close()


@pytest.mark.timeout(20)
def test_a_signal_handler_may_close_a_worker_whose_thread_waits_to_reply(
    ring: shmring.threads.Ring, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = join()
    gathering, outcome = gather(ring, "?")
    with worker.receive(10) as message:
        monkeypatch.setattr(worker._connection, "_write", lambda record: False)  # as if the engine did not read
        with signalled("_wait_and_write", worker.close), pytest.raises(shmring.ClosedError, match="is closed"):
            message.reply("x" * 100)
    gathering.join()
    assert isinstance(outcome[0], shmring.WorkerLostError)
    assert worker._connection._pidfd < 0


@pytest.mark.timeout(20)
def test_a_hook_that_decodes_and_the_code_of_a_reply_may_close_a_worker(ring: shmring.threads.Ring, join: Any) -> None:
    class Step(msgspec.Struct):
        tensor: torch.Tensor

        def __post_init__(self) -> None:
            workers[-1].close()
            workers[-1].close()

    workers = [join(payload_type=Step)]
    ring.broadcast({"tensor": torch.arange(20_000)}, timeout=10)
    with workers[0].receive(10) as message:
        assert message.payload.tensor.sum() == 19_999 * 10_000
    with pytest.raises(shmring.ClosedError):
        workers[0].receive(10)
    workers.append(join())
    gathering, outcome = gather(ring, "?")
    with workers[1].receive(10) as message, pytest.raises(shmring.ClosedError):
        message.reply(meddling(workers[1].close))
    gathering.join()
    assert isinstance(outcome[0], shmring.WorkerLostError)
    assert all(worker._connection._pidfd < 0 for worker in workers)


@pytest.mark.timeout(20)
def test_whoever_would_wait_for_itself_is_told_so(ring: shmring.threads.Ring, join: Any) -> None:
    class Step(msgspec.Struct):
        number: int

        def __post_init__(self) -> None:
            with pytest.raises(shmring.LocalProtocolError, match="this thread receives already"):
                worker.receive()

    def receive_again() -> None:
        with pytest.raises(shmring.LocalProtocolError, match="this thread receives already"):
            worker.receive(1)
        handled.append(True)

    worker, handled = join(payload_type=Step), list[bool]()
    ring.broadcast({"number": 1}, timeout=10)
    with worker.receive(10) as message:
        assert message.payload.number == 1
    with signalled("next", receive_again):
        while not handled:
            with pytest.raises(TimeoutError):
                worker.receive(0.05)


@pytest.mark.timeout(20)
def test_a_reply_that_found_no_room_in_time_may_be_tried_again(
    ring: shmring.threads.Ring, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = join()
    gathering, outcome = gather(ring, "?")
    with worker.receive(10) as message:
        with monkeypatch.context() as patch:
            patch.setattr(worker._connection, "_write", lambda record: False)
            with pytest.raises(TimeoutError, match="to read a reply"):
                message.reply("first", timeout=0.01)
        with worker._connection._sending._lock, pytest.raises(TimeoutError, match="to read a reply"):
            message.reply("second", timeout=0.01)  # another thread replies, and takes long
        message.reply("third", timeout=10)
    gathering.join()
    assert outcome == ["third"]


@pytest.mark.timeout(20)
def test_a_failure_that_an_interruption_cut_off_is_said_with_the_next_call(
    ring: shmring.threads.Ring, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(record: bytes) -> bool:
        raise KeyboardInterrupt

    worker = join()
    gathering, outcome = gather(ring, "?")
    message = worker.receive(10)
    with monkeypatch.context() as patch:
        patch.setattr(worker._connection, "_write", interrupt)
        with pytest.raises(KeyboardInterrupt):
            message.leave()
    with pytest.raises(shmring.WouldBlock):
        worker.receive_nowait()
    gathering.join()
    assert isinstance(outcome[0], shmring.WorkerFailedError)
    assert "without a reply" in str(outcome[0])


@pytest.mark.timeout(20)
def test_an_interruption_in_the_middle_of_a_reply_ends_the_worker_and_convicts_nobody(
    ring: shmring.threads.Ring, join: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = join()
    gathering, outcome = gather(ring, "?")
    write, written = worker._connection._write, list[bytes]()

    def write_one(record: bytes) -> bool:
        if written:
            raise KeyboardInterrupt
        written.append(record)
        return bool(write(record))

    with worker.receive(10) as message, monkeypatch.context() as patch:
        patch.setattr(worker._connection, "_write", write_one)
        with pytest.raises(KeyboardInterrupt):
            message.reply("x" * 100_000)
    with pytest.raises(shmring.ClosedError, match="in the middle of a reply"):
        worker.receive(10)
    gathering.join()
    assert isinstance(outcome[0], shmring.WorkerLostError)
    assert ring._in_loop.statistics().protocol_errors == 0


@pytest.mark.timeout(20)
def test_an_error_without_a_text_fails_a_gather_as_well(ring: shmring.threads.Ring, join: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    worker = join()
    gathering, outcome = gather(ring, "?")
    with pytest.raises(Mute), worker.receive(10):
        raise Mute
    gathering.join()
    assert outcome[0].type_name == "Mute"


@pytest.mark.timeout(20)
def test_a_signal_handler_may_close_a_client_or_a_ring_whose_thread_waits(ring: shmring.threads.Ring, socket_dir: Path) -> None:
    client = shmring.threads.connect("test", socket_dir=str(socket_dir))
    with signalled("wait", client.close), pytest.raises(shmring.ClosedError):
        client.request("nobody answers")
    while ring.statistics().clients:  # until then, its request can be claimed
        time.sleep(0.001)
    with signalled("wait", ring.close), pytest.raises(shmring.ClosedError):
        ring.claim()


@pytest.mark.timeout(20)
def test_a_signal_handler_may_close_what_its_thread_is_closing(ring: shmring.threads.Ring, socket_dir: Path) -> None:
    for end in (shmring.threads.connect("test", socket_dir=str(socket_dir)), ring):
        with signalled("close", end.close):
            end.close()


# -- a worker in a loop --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def join_here(serve: Any, socket_dir: Path) -> AsyncIterator[Callable[..., Awaitable[shmring.Worker]]]:
    async with contextlib.AsyncExitStack() as opened:

        async def open_worker(rank: int = 0) -> shmring.Worker:
            return await opened.enter_async_context(shmring.join("test", rank, socket_dir=str(socket_dir)))

        yield open_worker


def link_of(ring: shmring.Ring) -> Any:
    [worker] = ring._shell.workers._workers.values()
    return worker.link


async def cancelled(replying: asyncio.Task[None]) -> None:
    assert await cancel(replying)


@pytest.mark.parametrize("then", ["replies again", "leaves", "has left"])
async def test_a_reply_that_is_cancelled_before_it_was_sent_was_none(serve: Any, join_here: Any, then: str) -> None:
    ring = await serve(**OPTIONS)
    worker = await join_here()
    long, gathering = (asyncio.ensure_future(ring.gather(payload)) for payload in ("long", "short"))
    first, message = await worker.receive(), await worker.receive()
    go_on = hold(link_of(ring))
    before = asyncio.create_task(first.reply("x" * 100_000))
    await turns()
    replying = asyncio.create_task(message.reply("first"))
    await turns()
    with pytest.raises(shmring.LocalProtocolError, match="replied to before"):
        await message.reply("at the same time")
    if then == "has left":
        message.leave()
    await cancelled(replying)
    if then == "replies again":
        replying = asyncio.create_task(message.reply("second"))
        await turns()
    message.leave()
    go_on()
    await before
    first.leave()
    assert await asyncio.wait_for(long, 10) == ["x" * 100_000]
    if then == "replies again":
        await replying
        assert await asyncio.wait_for(gathering, 10) == ["second"]
    else:
        with pytest.raises(shmring.WorkerFailedError, match="gave up replying" if then == "has left" else "without a reply"):
            await asyncio.wait_for(gathering, 10)


async def test_a_long_reply_that_is_cancelled_in_the_middle_arrives_whole(serve: Any, join_here: Any) -> None:
    ring = await serve(**OPTIONS)
    worker = await join_here()
    for number in range(2):
        gathering = asyncio.ensure_future(ring.gather(number))
        with await worker.receive() as message:
            go_on = hold(link_of(ring))
            replying = asyncio.create_task(message.reply("x" * 100_000))
            await turns()
            await cancelled(replying)
        go_on()
        assert await asyncio.wait_for(gathering, 10) == ["x" * 100_000]
    assert ring.statistics().protocol_errors == 0


async def test_nobody_hears_of_a_reply_that_was_cancelled_in_the_middle_and_then_failed(serve: Any, join_here: Any) -> None:
    ring = await serve(**OPTIONS)
    worker = await join_here()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    gathering = asyncio.ensure_future(ring.gather("?"))
    with await worker.receive() as message:
        go_on = hold(link_of(ring))
        replying = asyncio.create_task(message.reply("x" * 100_000))
        await turns()
        await cancelled(replying)
        del replying
        await worker.close()
    go_on()
    with pytest.raises(shmring.WorkerLostError):
        await asyncio.wait_for(gathering, 10)
    await turns()
    gc.collect()
    assert reported == []


async def test_who_closes_in_the_middle_of_a_reply_fails_its_gather_and_convicts_nobody(serve: Any, join_here: Any) -> None:
    ring = await serve(**OPTIONS)
    worker = await join_here()
    gathering = asyncio.ensure_future(ring.gather("?"))
    with await worker.receive() as message:
        go_on = hold(link_of(ring))
        replying = asyncio.create_task(message.reply("x" * 100_000))
        await turns()
        await worker.close()
        with pytest.raises(shmring.ClosedError):
            await replying
    go_on()
    with pytest.raises(shmring.WorkerLostError):
        await asyncio.wait_for(gathering, 10)
    assert ring.statistics().protocol_errors == 0


# -- an engine -----------------------------------------------------------------------------------------------------------------


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("how", ["reply_nowait", "reply", "done"])
@pytest.mark.parametrize("end", ["done", "fail", "abort"])
async def test_a_reply_whose_code_ends_its_request_is_not_sent(serve: Any, connect: Any, how: str, end: str) -> None:
    """Its frontend would take a reply after the end for a breach of the rules, and its other requests would die."""
    ring, client = await serve(), await connect()
    submission, other = await client.submit("x"), await client.submit("y")
    claim, kept = await ring.claim(), await ring.claim()

    def end_it() -> None:
        if end == "done":
            claim.done()
        elif end == "fail":
            claim.fail(ValueError("it went wrong"))
        else:
            submission.abort()
            ring._shell.end.claim_next()  # as in a call that looks first
            for frontend in ring._shell._frontends.values():
                frontend.link.poll()

    async def send() -> None:
        sending = getattr(claim, how)(meddling(end_it))
        if sending is not None:
            await sending

    with pytest.raises((shmring.LocalProtocolError, shmring.AbortedError)):
        await send()
    claim.release()
    await turns()
    await kept.done("fine")
    assert await other.result() == "fine"
    assert submission.ended
    assert client.connected


async def test_a_reply_whose_code_ends_its_request_waits_for_no_space(serve: Any, connect: Any) -> None:
    ring, client = await serve(reply_nbytes="64KiB"), await connect()
    submissions = [await client.submit("x"), await client.submit("y")]
    claim, other = await ring.claim(), await ring.claim()
    await other.reply(torch.zeros(50_000, dtype=torch.uint8))  # which the client has not taken yet
    reply = claim.reply([meddling(claim.done), torch.zeros(50_000, dtype=torch.uint8)])
    with contextlib.closing(reply), pytest.raises(shmring.LocalProtocolError, match="has ended"):
        reply.send(None)  # as far as it comes without waiting
    await eventually(lambda: submissions[0].ended)
    assert not submissions[1].ended


async def test_an_end_of_a_claim_says_no_more_though_its_caller_does_not_look(serve: Any, connect: Any) -> None:
    ring, client = await serve(), await connect()
    _, claim = await claimed(ring, client, "x")
    end = ring._shell.end
    packed = end.pack_reply(claim, "late")
    claim.done()
    for send in (end.send_reply, end.finish_with):
        with pytest.raises(shmring.LocalProtocolError, match="has ended"):
            send(claim, packed, None)


async def test_a_request_that_is_aborted_while_it_is_decoded_is_not_handed_out(serve: Any, connect: Any) -> None:
    class Step(msgspec.Struct):
        tensor: torch.Tensor

        def __post_init__(self) -> None:
            submissions[0].abort()
            with contextlib.suppress(shmring.WouldBlock):
                ring.claim_nowait()

    ring, client = await serve(payload_type=Step), await connect()
    submissions = [await client.submit({"tensor": torch.ones(5000)})]
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    with pytest.raises(shmring.AbortedError):
        await submissions[0].next()
    assert client.connected
    await client.close()
    await settled(ring)


async def test_an_error_whose_text_can_not_be_had_ends_nothing_by_halves(serve: Any, connect: Any) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no text")

    ring, client = await serve(), await connect()
    submission, claim = await claimed(ring, client, "x")
    with pytest.raises(ValueError, match="no text"):
        claim.fail(Mute())
    claim.fail(KeyError("better"))
    with pytest.raises(shmring.RemoteError, match="KeyError"):
        await submission.next()
