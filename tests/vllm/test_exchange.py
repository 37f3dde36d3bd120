"""Both halves of the plug-in with a real ring between them, and in place of vLLM a queue of encoded requests.

What vLLM does to a request is a few lines here: it asks the consumer for each tensor, sends what that returns, and asks the
provider at the other end. Everything else is the plug-in's own code.
"""

from __future__ import annotations

import asyncio
import gc
import os
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmring.errors import EngineDeadError
from shmring.integrations.vllm import cancellation
from shmring.integrations.vllm.engine import HandedOver, Receiver
from shmring.integrations.vllm.frontend import AsyncFrontend, SyncFrontend
from shmring.integrations.vllm.settings import Settings
from tests.sessions import session_of
from tests.waiting import eventually

ENGINE = (0).to_bytes(2, "little")
MB = 1 << 20


def settings(**changes: Any) -> Settings:
    defaults = {
        "slab_nbytes": 64 * MB,
        "min_nbytes": 64 << 10,
        "keep_nbytes": 24 * MB,
        "wait_s": 5.0,
        "take_timeout_s": 5.0,
        "check": True,
        "name": "test",
    }
    return Settings(**{**defaults, **changes})


def request_with(*tensors: Any) -> SimpleNamespace:
    """A request as vLLM's: each tensor an item of processed media."""
    elements = {str(number): SimpleNamespace(data=tensor) for number, tensor in enumerate(tensors)}
    return SimpleNamespace(mm_features=[SimpleNamespace(data=elements), SimpleNamespace(data=None)], prompt_embeds=None)


def picture(nbytes: int = 8 * MB) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes,), dtype=torch.uint8)


def quantized() -> torch.Tensor:
    """A kind of tensor that shmring does not carry."""
    with warnings.catch_warnings(action="ignore"):  # torch will not have them for ever
        return torch.quantize_per_tensor(torch.zeros(1 << 20), 0.1, 0, torch.qint8)


class Stream:
    """In place of vLLM: messages in order, from its encoder to its decoder."""

    def __init__(self) -> None:
        self.messages: list[list[Any]] = []
        self.fails = False

    def encode(self, frontend: Any, request: Any) -> Callable[[], asyncio.Future[None]]:
        """Returns what vLLM's ``_send_input`` does with a request."""

        def send() -> asyncio.Future[None]:
            frontend.new_message()
            tensors = [element.data for feature in request.mm_features if feature.data for element in feature.data.values()]
            message = [(tensor, frontend(tensor)) for tensor in tensors]
            if self.fails:
                raise RuntimeError("the engine core is dead")
            self.messages.append(message)
            sent = asyncio.get_running_loop().create_future()
            sent.set_result(None)
            return sent

        return send

    def decode(self, receiver: Receiver) -> list[torch.Tensor]:
        """Returns the tensors of the next message, as vLLM's input thread gets them."""
        message = self.messages.pop(0)
        tensors = [tensor if meta is None else receiver(*described(tensor), meta) for tensor, meta in message]
        if error := receiver.take_losses():
            raise error
        return tensors


def described(tensor: torch.Tensor) -> tuple[str, tuple[int, ...]]:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


@pytest.fixture
def rings(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings of this test are its own."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))


@pytest.fixture
def serve(rings: None) -> Iterator[Callable[..., Receiver]]:
    receivers = []

    def make(*, copies: bool = False, **changes: Any) -> Receiver:
        receivers.append(Receiver(settings(**changes), 0, copies=copies, pin="off"))
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.close()


class Exchange:
    """A frontend, an engine core's half, and the stream between them."""

    def __init__(self, receiver: Receiver, frontend: AsyncFrontend) -> None:
        self.receiver = receiver
        self.frontend = frontend
        self.stream = Stream()

    async def send(self, *tensors: Any) -> None:
        request = request_with(*tensors)
        await self.frontend.divert(request, ENGINE, self.stream.encode(self.frontend, request))

    async def exchange(self, *tensors: Any) -> list[torch.Tensor]:
        """Sends a request and decodes it, on a thread as vLLM does."""
        await self.send(*tensors)
        return await self.decode()

    async def decode(self) -> list[torch.Tensor]:
        return await asyncio.to_thread(self.stream.decode, self.receiver)

    async def report(self) -> dict[str, Any]:
        return await asyncio.to_thread(self.receiver.report)

    def counts(self) -> dict[str, int]:
        tensors = self.frontend._traffic.tensors
        return {f"{way} {reason}".strip(): count for (way, reason), count in tensors.items()}


@pytest.fixture
async def connected(serve: Callable[..., Receiver]) -> AsyncIterator[Callable[..., Awaitable[Exchange]]]:
    exchanges: list[Exchange] = []

    async def make(*, keeps: bool = True, copies: bool = False, **changes: Any) -> Exchange:
        receiver = await asyncio.to_thread(serve, copies=copies, **changes)

        async def tell_drops(engine: bytes, client_id: int, request_ids: list[int]) -> bool:
            await asyncio.to_thread(receiver.drop, client_id, request_ids)
            return True

        exchange = Exchange(receiver, AsyncFrontend(settings(**changes), [ENGINE], 1, tell_drops, keeps=keeps))
        exchanges.append(exchange)
        exchange.frontend.start()
        await eventually(lambda: exchange.frontend._links[ENGINE].is_connected)
        return exchange

    yield make
    for exchange in exchanges:
        link = exchange.frontend._links[ENGINE]
        client, trying = link._client, link._trying
        exchange.frontend.close()
        await eventually(lambda client=client, trying=trying: trying.done() and (client is None or client.closed))


async def test_a_tensor_arrives_and_its_slot_comes_back(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False)
    sent = picture()
    (came,) = await exchange.exchange(sent)
    assert torch.equal(came, sent)
    assert exchange.counts() == {"copied": 1}
    assert (await exchange.report())["slots_in_use"] == 1
    del came
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)


async def test_what_is_sent_again_takes_no_copy(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    sent = picture()
    for _ in range(3):
        (came,) = await exchange.exchange(sent)
        assert torch.equal(came, sent)
    assert exchange.counts() == {"copied": 1, "kept": 2}
    statistics = exchange.frontend._links[ENGINE]._client.statistics()  # type: ignore[union-attr]
    assert statistics.copied_nbytes == 8 * MB


async def test_two_requests_with_a_new_tensor_at_once_make_one_copy(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    sent = picture()
    await asyncio.gather(*(exchange.send(sent) for _ in range(4)))
    for _ in range(4):
        (came,) = await exchange.decode()
        assert torch.equal(came, sent)
    assert exchange.counts() == {"copied": 1, "kept": 3}


async def test_what_has_died_is_dropped_without_another_request(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    sent = picture()
    await exchange.exchange(sent)
    assert (await exchange.report())["kept_tensors"] == 1
    del sent
    gc.collect()
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)


async def test_a_server_that_rests_goes_on_with_the_next_request(
    connected: Callable[..., Awaitable[Exchange]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.integrations.vllm.frontend._DROP_S", 0.001)
    monkeypatch.setattr("shmring.integrations.vllm.frontend._REST_S", 3600.0)
    exchange = await connected()
    sent = picture()
    await exchange.exchange(sent)
    await eventually(lambda: bool(exchange.frontend._links[ENGINE].came._waiters))
    del sent
    gc.collect()
    assert (await exchange.report())["kept_tensors"] == 1
    await exchange.exchange(torch.ones(3))  # for which there is nothing to do
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)


async def test_what_is_evicted_is_dropped_with_the_next_message_and_lives_while_it_is_viewed(
    connected: Callable[..., Awaitable[Exchange]],
) -> None:
    exchange = await connected()
    pictures = [picture() for _ in range(4)]  # three fit
    (first,) = await exchange.exchange(pictures[0])
    for sent in pictures[1:]:
        await exchange.exchange(sent)
    report = await exchange.report()
    assert (report["kept_tensors"], report["slots_in_use"]) == (3, 4)
    assert torch.equal(first, pictures[0])
    del first
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 3)
    assert exchange.counts() == {"copied": 4}


async def test_kept_tensors_make_room_for_what_finds_none(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(slab_nbytes=32 * MB, keep_nbytes=16 * MB, wait_s=0.5)
    kept = [picture(), picture()]
    for tensor in kept:
        await exchange.exchange(tensor)
    large = picture(20 * MB)
    assert (await exchange.exchange(large))[0] is large
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)
    (came,) = await exchange.exchange(large)
    assert torch.equal(came, large)
    assert exchange.counts() == {"copied": 3, "inline space": 1}


async def test_what_an_api_server_had_kept_goes_with_it(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    sent = picture()
    await exchange.exchange(sent)
    await exchange.send(sent)
    await exchange.frontend._links[ENGINE].close()
    await eventually(lambda: (report := exchange.receiver.report())["slots_in_use"] == report["kept_tensors"] == 0)
    assert exchange.receiver.report()["quarantined_bytes"] == 0
    with pytest.raises(RuntimeError, match="AbortedError: client 1 is not connected"):
        await exchange.decode()


async def test_many_pictures_in_a_small_slab_are_all_right(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(slab_nbytes=32 * MB, keep_nbytes=16 * MB, wait_s=0.02)
    pictures = [picture() for _ in range(6)]
    for number in range(60):
        sent = pictures[number * 7 % 6]
        (came,) = await exchange.exchange(sent)
        assert torch.equal(came, sent)
        del came
    report = await exchange.report()
    assert report["lost"] == 0
    assert report["slots_in_use"] <= 2 + 1  # one may be about to come back


async def test_what_finds_no_space_goes_inline(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False, slab_nbytes=16 * MB, wait_s=0.5)
    held = await exchange.exchange(picture())
    small = picture(2 * MB)
    sent = picture()
    came = await exchange.exchange(small, sent)
    assert torch.equal(came[0], small)
    assert came[1] is sent  # inline: vLLM's encoder got no reference for it
    assert exchange.counts() == {"copied": 2, "inline space": 1}
    del held


async def test_a_request_waits_for_space_once(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False, slab_nbytes=16 * MB, wait_s=1.0)
    held = await exchange.exchange(picture())
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    tensors = [picture() for _ in range(30)]
    assert all(came is sent for came, sent in zip(await exchange.exchange(*tensors), tensors, strict=True))
    assert loop.time() - began_s < 30  # as long as thirty waits would last, at least
    assert exchange.counts() == {"copied": 1, "inline space": 30}
    del held


async def test_what_was_placed_when_the_connection_is_lost_goes_inline(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    await exchange.exchange(kept := picture())
    send = exchange.stream.encode(exchange.frontend, request := request_with(kept))

    def send_late() -> Any:
        link = exchange.frontend._links[ENGINE]
        assert link._client is not None
        session_of(link._client)._lose(EngineDeadError("lost"))  # type: ignore[union-attr]
        return send()

    await exchange.frontend.divert(request, ENGINE, send_late)
    assert exchange.stream.messages.pop() == [(kept, None)]
    assert exchange.counts() == {"copied": 1, "inline engine": 1}


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (lambda: quantized(), "kind"),
        (lambda: picture(80 * MB), "size"),
    ],
)
async def test_what_shmring_refuses_goes_inline_and_is_counted(
    connected: Callable[..., Awaitable[Exchange]], tensor: Callable[[], torch.Tensor], reason: str
) -> None:
    exchange = await connected()
    sent = tensor()
    came = await exchange.exchange(sent)
    assert came[0] is sent
    assert exchange.counts() == {f"inline {reason}": 1}


async def test_small_tensors_and_those_of_other_messages_are_left_alone(
    connected: Callable[..., Awaitable[Exchange]],
) -> None:
    exchange = await connected()
    small = picture(1024)
    assert (await exchange.exchange(small))[0] is small
    assert exchange.frontend(picture()) is None  # a message that was not announced
    assert exchange.counts() == {}


async def test_many_small_tensors_are_not_all_copied_in_the_loop(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False)
    tensors = [picture(MB) for _ in range(10)]
    sending = asyncio.ensure_future(exchange.send(*tensors))
    client = exchange.frontend._links[ENGINE]._client
    assert client is not None
    await asyncio.sleep(0)
    assert client.statistics().copied_nbytes == 4 * MB
    await sending
    came = await exchange.decode()
    assert all(torch.equal(*pair) for pair in zip(came, tensors, strict=True))


async def test_what_no_request_should_be_like_is_sent_all_the_same(
    connected: Callable[..., Awaitable[Exchange]], caplog: pytest.LogCaptureFixture
) -> None:
    exchange = await connected()
    request = SimpleNamespace(mm_features=[SimpleNamespace(data=[1, 2])])
    sent: list[object] = []

    async def send() -> None:
        sent.append(request)

    await exchange.frontend.divert(request, ENGINE, send)
    assert sent == [request]
    assert "a request goes as without it" in caplog.text


async def test_a_sparse_tensor_is_left_alone(
    connected: Callable[..., Awaitable[Exchange]], caplog: pytest.LogCaptureFixture
) -> None:
    exchange = await connected()
    sent = torch.zeros(1 << 20).to_sparse()
    assert (await exchange.exchange(sent))[0] is sent
    assert exchange.counts() == {}
    assert "should not be" not in caplog.text


async def test_a_tensor_twice_in_a_request_goes_once(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False)
    sent = picture()
    came = await exchange.exchange(sent, sent)
    assert all(torch.equal(tensor, sent) for tensor in came)
    assert exchange.counts() == {"copied": 1, "inline twice": 1}


async def test_what_was_placed_for_a_message_that_is_not_sent_comes_back(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False)
    exchange.stream.fails = True
    with pytest.raises(RuntimeError, match="the engine core is dead"):
        await exchange.send(picture())
    await eventually(lambda: exchange.receiver.report()["slots_in_use"] == 0)
    assert exchange.counts() == {}


async def test_drops_of_a_message_that_is_not_sent_go_with_another(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keep_nbytes=8 * MB)
    await exchange.exchange(kept := picture())
    exchange.stream.fails = True
    with pytest.raises(RuntimeError):
        await exchange.send(picture())  # which evicts the first
    exchange.stream.fails = False
    await exchange.exchange(other := picture())
    assert (await exchange.report())["kept_tensors"] == 1
    del kept, other


async def test_a_stale_reference_fails_its_request_and_no_other(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(keeps=False, take_timeout_s=0.05)
    sent = picture()
    await exchange.send(sent)
    ((tensor, reference),) = exchange.stream.messages[0]
    client_id, request_id, is_kept, epoch = reference["shmring"]
    exchange.stream.messages.insert(0, [(tensor, {"shmring": [client_id, request_id + 1000, is_kept, epoch]})])
    exchange.stream.messages.insert(0, [(tensor, {"shmring": [client_id + 7, 1, is_kept, epoch]})])
    exchange.stream.messages.insert(0, [(tensor, {"shmring": [client_id, request_id, is_kept, epoch + 1]})])
    exchange.stream.messages.insert(0, [(tensor, {"nonsense": 1})])
    other = "it is in the slab of another engine core"
    for reason in ("KeyError", other, "AbortedError: client 8 is not connected", "TimeoutError"):
        with pytest.raises(RuntimeError, match=reason):
            await exchange.decode()
    assert torch.equal((await exchange.decode())[0], sent)
    assert (await exchange.report())["lost"] == 4


async def test_a_wrong_checksum_or_shape_is_a_loss(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    sent = picture()
    await exchange.send(sent)
    ((_, reference),) = exchange.stream.messages[0]
    exchange.stream.messages.insert(0, [(sent, {**reference, "crc": 1})])
    exchange.stream.messages.insert(0, [(sent.view(-1, 2), reference)])
    for reason in ("what is there is torch.uint8 of", "its checksum is wrong"):
        with pytest.raises(RuntimeError, match=reason):
            await exchange.decode()
    assert torch.equal((await exchange.decode())[0], sent)


async def test_where_vllm_keeps_what_it_gets_the_slab_is_not_pinned(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected(copies=True)
    sent = picture()
    (came,) = await exchange.exchange(sent)
    assert torch.equal(came, sent)
    assert (await exchange.report())["slots_in_use"] == 0
    assert exchange.frontend._links[ENGINE].book is None


async def test_when_the_engine_core_has_gone_everything_goes_inline(connected: Callable[..., Awaitable[Exchange]]) -> None:
    exchange = await connected()
    link = exchange.frontend._links[ENGINE]
    await exchange.exchange(sent := picture())
    await asyncio.to_thread(exchange.receiver.close)
    await eventually(lambda: not link.is_connected)
    await exchange.send(sent)
    assert exchange.stream.messages.pop() == [(sent, None)]
    assert exchange.counts() == {"copied": 1, "inline engine": 1}
    await eventually(lambda: link.book is None)


@pytest.mark.parametrize("directory", ["", "x" * 100])
async def test_without_a_ring_everything_goes_inline_and_the_log_says_so(
    rings: None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    """There is none, or its path is longer than a socket's can be."""
    monkeypatch.setattr("shmring.integrations.vllm.link._CONNECT_S", 0.01)
    monkeypatch.setenv("XDG_RUNTIME_DIR", os.path.join(os.environ["XDG_RUNTIME_DIR"], directory))

    async def tell_drops(*_: Any) -> bool:
        raise AssertionError("there is nothing to drop")

    frontend = AsyncFrontend(settings(), [ENGINE], 1, tell_drops, keeps=True)
    stream, request = Stream(), request_with(sent := picture())
    await frontend.divert(request, ENGINE, stream.encode(frontend, request))
    await eventually(lambda: frontend._links[ENGINE].reason != "connecting")
    await frontend.divert(request, ENGINE, stream.encode(frontend, request))
    assert stream.messages == [[(sent, None)]] * 2
    assert frontend._traffic.tensors == {("inline", "connecting"): 1, ("inline", "engine"): 1}
    assert caplog.text.count("tensors go inline until the ring of engine core 0 is reached: ") == 1
    frontend.close()


async def test_a_cancelled_caller_is_cancelled_after_its_request_was_sent(
    connected: Callable[..., Awaitable[Exchange]],
) -> None:
    """vLLM can't forget a request whose adding was cancelled; without the plug-in it can't be."""
    exchange = await connected()
    steps = []

    async def caller() -> None:
        await exchange.send(picture())
        steps.append("sent")
        await asyncio.get_running_loop().create_future()

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert steps == ["sent"]
    assert len(exchange.stream.messages) == 1


async def test_a_timeout_that_comes_while_work_is_done_is_a_timeout() -> None:
    done = asyncio.Event()
    timeout = asyncio.timeout(0.01)

    async def work() -> None:
        while not timeout.expired():
            await asyncio.sleep(0.001)
        done.set()

    async def caller() -> None:
        async with timeout:
            await cancellation.held_back(work())
            assert done.is_set()
            await asyncio.get_running_loop().create_future()

    with pytest.raises(TimeoutError):
        await caller()


def test_without_a_loop(serve: Callable[..., Receiver]) -> None:
    receiver = serve()
    frontend = SyncFrontend(settings(), [ENGINE])
    sent, refused = picture(), quantized()
    request = request_with(sent, refused)
    came = []

    def send() -> None:
        for tensor in (sent, refused):
            reference = frontend(tensor)
            came.append(tensor if reference is None else receiver(*described(tensor), reference))

    frontend.divert(request, ENGINE, send)
    assert torch.equal(came[0], sent)
    assert came[1] is refused
    assert frontend._traffic.tensors == {("copied", ""): 1, ("inline", "kind"): 1}
    frontend.close()


def test_what_was_handed_over_is_unpacked_once() -> None:
    handed = HandedOver(("request", 3))
    assert (len(handed), handed[1]) == (2, 3)
    request, wave = handed
    assert (request, wave) == ("request", 3)
    assert len(handed) == 0
