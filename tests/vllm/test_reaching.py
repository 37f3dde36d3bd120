"""How an API server reaches the ring of its engine core: that one and no other, and again and again."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from shmring import threads
from shmring.client.pauses import FIRST_S, LONGEST_S
from shmring.core.loggers import logger_of
from shmring.errors import EngineDeadError
from shmring.integrations.reaching import KeptConnection, OtherRingError, Reach, check_epoch
from shmring.integrations.vllm.engine import LostTensorError, Receiver
from shmring.integrations.vllm.engine_ring import EngineRing
from shmring.integrations.vllm.frontend import AsyncFrontend, SyncFrontend
from shmring.integrations.vllm.link import AsyncLink, Where, client_config
from shmring.integrations.vllm.workers import Queues
from tests.nursery import Nursery
from tests.sessions import session_of
from tests.vllm.test_exchange import ENGINE, Exchange, Stream, described, picture, request_with, settings
from tests.waiting import eventually, until

INLINE = "tensors go inline until the ring of engine core 0 is reached: "
AGAIN = "go through shared memory (test-0)"


@pytest.fixture(autouse=True)
def rings(socket_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    monkeypatch.setattr("shmring.integrations.vllm.engine._FREE_S", 0.01)
    caplog.set_level("INFO")


@pytest.fixture
def serve() -> Iterator[Callable[..., Receiver]]:
    receivers: list[Receiver] = []

    def make(**changes: Any) -> Receiver:
        receivers.append(Receiver(settings(**changes), 0, copies=False, pin="off"))
        return receivers[-1]

    yield make
    for receiver in receivers:
        receiver.close()


Connect = Callable[..., Exchange]


@pytest.fixture
async def begin() -> AsyncIterator[Connect]:
    """Makes an API server that asks its engine core, a receiver, what its ring is; it begins to connect."""
    frontends: list[AsyncFrontend] = []

    def make(receiver: Any, find_ring: Any = None) -> Exchange:
        async def tell_drops(*_: Any) -> bool:
            return True

        async def ask(_: bytes) -> Where:
            return Where.of(receiver.where())

        frontend = AsyncFrontend(settings(), [ENGINE], 1, tell_drops, keeps=True, find_ring=find_ring or ask)
        frontends.append(frontend)
        frontend.start()
        return Exchange(receiver, frontend)

    yield make
    for frontend in frontends:
        link = frontend._links[ENGINE]
        client, trying = link._client, link._trying
        frontend.close()
        await eventually(lambda client=client, trying=trying: trying.done() and (client is None or client.closed))


def link_of(exchange: Exchange) -> Any:
    return exchange.frontend._links[ENGINE]


async def goes_inline(exchange: Exchange) -> None:
    sent = picture()
    await exchange.send(sent)
    assert exchange.stream.messages.pop() == [(sent, None)]


def test_pauses_are_bounded_and_the_log_says_what_has_changed(caplog: pytest.LogCaptureFixture) -> None:
    reach = Reach("engine core 0", logger_of("vllm.shmring"))
    assert reach.reason == "connecting"
    for _ in range(2):
        pauses_s = [reach.failed("it is silent") for _ in range(10)]
        assert (pauses_s[0], pauses_s[1], max(pauses_s)) == (FIRST_S, 2 * FIRST_S, LONGEST_S)
        assert reach.reason == "engine"
        reach.reached()
    assert caplog.text.count(INLINE + "it is silent") == 2


async def test_requests_begin_one_attempt_together() -> None:
    attempts: list[int] = []

    class Silent(KeptConnection):
        async def _connect(self) -> Any:
            attempts.append(1)
            await asyncio.Event().wait()

    connection = Silent("engine core 0", logger_of("vllm.shmring"))
    for _ in range(3):
        connection.keep_trying()
        await asyncio.sleep(0)
    assert attempts == [1]
    await connection.close()


def test_a_ring_is_the_one_that_was_meant() -> None:
    check_epoch(5, 5, "core")
    check_epoch(5, 0, "core")  # it is known by its name alone
    with pytest.raises(OtherRingError, match="another engine has the name 'core' now"):
        check_epoch(5, 6, "core")


# -- an engine core that keeps silent ---------------------------------------------------------------------------------------


SERVES_UNTIL_TOLD = """if True:
    import os, signal, sys
    from shmring.integrations.vllm.engine import Receiver
    from tests.vllm.test_exchange import settings
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.environ["XDG_RUNTIME_DIR"] = sys.argv[1]
    receiver = Receiver(settings(), 0, copies=False, pin="off")
    print(*receiver.where(), flush=True)
    signal.sigwait([signal.SIGTERM])
    receiver.close()
"""


async def test_an_engine_core_that_is_stopped_while_it_is_connected_to_is_reached_when_it_goes_on(
    nursery: Nursery, tmp_path: Path, begin: Connect, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.integrations.vllm.link._CONNECT_S", 0.5)
    core = nursery.start_text(tmp_path / "output", SERVES_UNTIL_TOLD, os.environ["XDG_RUNTIME_DIR"])
    where = Where.of(await core.said())
    core.signal(signal.SIGSTOP)

    async def find(_: bytes) -> Where:
        return where

    exchange = begin(None, find)
    await goes_inline(exchange)
    await eventually(lambda: link_of(exchange).reason == "engine", 300)
    await goes_inline(exchange)
    assert exchange.counts() == {"inline connecting": 1, "inline engine": 1}
    core.signal(signal.SIGCONT)
    await eventually(lambda: link_of(exchange).is_connected, 300)
    await exchange.send(picture())
    assert exchange.counts()["copied"] == 1
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 1)
    core.signal(signal.SIGTERM)
    await core.died()


async def test_an_engine_core_that_does_not_say_how_it_is_is_asked_again(
    serve: Callable[..., Receiver],
    begin: Connect,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is stopped between the handshake and its report."""
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 0.05)
    receiver = await asyncio.to_thread(serve)
    goes_on, report = threading.Event(), receiver.report
    monkeypatch.setattr(receiver, "report", lambda: goes_on.wait(300) and report())
    exchange = begin(receiver)
    await eventually(lambda: link_of(exchange).reason == "engine", 300)
    await goes_inline(exchange)
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 60.0)
    goes_on.set()
    await eventually(lambda: link_of(exchange).is_connected, 300)
    sent = picture()
    assert (await exchange.exchange(sent))[0].equal(sent)
    assert exchange.counts() == {"inline engine": 1, "copied": 1}
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 1)


async def test_a_question_that_is_not_answered_is_not_asked_twice(
    serve: Callable[..., Receiver], begin: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 0.01)
    receiver = await asyncio.to_thread(serve)
    asked, answer = [], asyncio.get_running_loop().create_future()

    async def find(engine: bytes) -> Where:
        asked.append(engine)
        return Where.of(await answer)

    exchange = begin(receiver, find)
    await eventually(lambda: link_of(exchange)._reach._pause_s >= 0.08, 300)  # after three attempts
    assert asked == [ENGINE]
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 60.0)
    answer.set_result(receiver.where())
    await eventually(lambda: link_of(exchange).is_connected, 300)
    assert asked == [ENGINE]


async def test_a_connection_that_is_lost_is_made_again(
    serve: Callable[..., Receiver], begin: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = await asyncio.to_thread(serve)
    exchange = begin(receiver)
    link = link_of(exchange)
    await eventually(lambda: link.is_connected, 300)
    await exchange.exchange(kept := picture())
    first = link._client
    session_of(first)._lose(EngineDeadError("lost"))
    await goes_inline(exchange)
    await eventually(lambda: link.is_connected, 300)
    assert link._client is not first
    assert first.closed
    for _ in range(2):
        (came,) = await exchange.exchange(kept)  # nothing is believed of what was kept for the first one
        assert came.equal(kept)
    assert exchange.counts() == {"copied": 2, "kept": 1, "inline engine": 1}
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 2)


async def test_an_engine_core_that_keeps_silent_keeps_no_other_one_from_being_told_what_to_drop() -> None:
    engines = [number.to_bytes(2, "little") for number in (0, 1)]
    receivers = [Receiver(settings(), number, copies=False, pin="off") for number in (0, 1)]
    silent = asyncio.get_running_loop().create_future()

    async def tell_drops(engine: bytes, client_id: int, request_ids: list[int]) -> bool:
        if engine == engines[0]:
            await silent
        await asyncio.to_thread(receivers[1].drop, client_id, request_ids)
        return True

    frontend = AsyncFrontend(settings(), engines, 1, tell_drops, keeps=True)
    frontend.start()
    links = [frontend._links[engine] for engine in engines]
    await eventually(lambda: all(link.is_connected for link in links), 300)
    for engine, receiver in zip(engines, receivers, strict=True):
        stream, request = Stream(), request_with(picture())
        await frontend.divert(request, engine, stream.encode(frontend, request))
        await asyncio.to_thread(stream.decode, receiver)
        del request
    gc.collect()
    await eventually(lambda: receivers[1].report()["kept_tensors"] == 0, 300)
    assert receivers[0].report()["kept_tensors"] == 1
    frontend.close()
    await eventually(lambda: all(link._client is not None and link._client.closed for link in links), 300)
    for receiver in receivers:
        await asyncio.to_thread(receiver.close)


async def test_a_link_tries_again_by_itself(serve: Callable[..., Receiver]) -> None:
    receiver = await asyncio.to_thread(serve)
    answers = iter([ValueError("no"), OSError("no"), Where.of(receiver.where())])

    async def find() -> Where:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    link = AsyncLink(0, find, client_config(settings(), 1), settings(), 0)
    link.keep_trying()
    await eventually(lambda: link.is_connected, 300)
    await link.close()


async def test_what_is_closed_tries_no_more(serve: Callable[..., Receiver], begin: Connect) -> None:
    exchange = begin(await asyncio.to_thread(serve))
    link = link_of(exchange)
    await eventually(lambda: link.is_connected, 300)
    tried = link._trying
    await link.close()
    link.keep_trying()
    assert link._trying is tried


# -- a ring that is not the one that was meant --------------------------------------------------------------------------------


async def test_of_two_engine_cores_with_one_name_the_second_is_without_until_the_name_is_free(
    serve: Callable[..., Receiver], begin: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    first = await asyncio.to_thread(serve)
    second = await asyncio.to_thread(serve)
    assert (
        caplog.text.count("engine core 0 has no slab, and tensors go inline: an engine named 'test-0' is running already") == 1
    )
    ours, theirs = begin(first), begin(second)
    await eventually(lambda: link_of(ours).is_connected and link_of(theirs).reason == "engine", 300)
    assert INLINE + "an engine named 'test-0' is running already" in caplog.text
    await ours.exchange(picture())
    await goes_inline(theirs)
    assert theirs.counts() == {"inline engine": 1}
    assert first._ring.statistics().clients == 1
    await asyncio.to_thread(first.close)
    await eventually(lambda: link_of(theirs).is_connected, 300)
    sent = picture()
    assert (await theirs.exchange(sent))[0].equal(sent)
    assert theirs.counts() == {"inline engine": 1, "copied": 1}


async def test_a_ring_of_the_name_that_another_engine_has_by_then_is_left_alone(
    serve: Callable[..., Receiver], begin: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    other = await asyncio.to_thread(serve)
    name, epoch = other.where()  # type: ignore[misc]

    async def find(_: bytes) -> Where:
        return Where(name, epoch + 1)

    exchange = begin(other, find)
    await eventually(lambda: link_of(exchange).reason == "engine", 300)
    await goes_inline(exchange)
    assert exchange.counts() == {"inline engine": 1}
    assert INLINE + "another engine has the name 'test-0' now" in caplog.text
    assert other.report()["slots_in_use"] == 0


def test_engine_cores_make_names_up(serve: Callable[..., Receiver]) -> None:
    names = {where[0] for where in (serve(name="").where(), serve(name="").where()) if not isinstance(where, str)}
    assert len(names) == 2


def test_a_reference_that_comes_to_an_engine_core_without_a_ring_fails_its_request(serve: Callable[..., Receiver]) -> None:
    first, second = serve(), serve()
    frontend = SyncFrontend(settings(), [ENGINE])
    sent = picture()
    references: list[Any] = []
    frontend.divert(request_with(sent), ENGINE, lambda: references.append(frontend(sent)))
    assert second(*described(sent), references[0]).numel() == 0
    error = second.take_losses()
    assert isinstance(error, LostTensorError)
    assert "this engine core has no slab: an engine named 'test-0' is running already" in str(error)
    assert first(*described(sent), references[0]).equal(sent)
    second.drop(1, [1, 2])  # nor does that end its input thread
    frontend.close()


def test_an_engine_core_without_a_ring_is_not_waited_for(serve: Callable[..., Receiver]) -> None:
    serve()
    second = serve()
    second.close()
    assert second.where() == "it has ended"
    assert threads.connect("test-0", lease_nbytes=4096).close() is None  # type: ignore[func-returns-value]


def test_where_another_engine_has_the_name_workers_have_a_ring_of_their_own(serve: Callable[..., Receiver]) -> None:
    serve()
    engine_ring = EngineRing(settings())
    engine_ring.expect(0)
    writer = Queues(None, settings(), engine_ring)(1, 1)
    assert writer.export_handle().ring != "test-0"
    assert not engine_ring.has_workers
    writer.shutdown()


@pytest.fixture
def log_that_raises() -> Iterator[list[str]]:
    """A filter of the server's log fails at each line; returns these lines."""
    lines: list[str] = []

    class Failing(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            lines.append(record.getMessage())
            raise RuntimeError("this filter has a bug")

    failing, logger = Failing(), logging.getLogger("vllm.shmring")
    logger.addFilter(failing)
    yield lines
    logger.removeFilter(failing)


async def test_a_log_that_raises_keeps_nobody_from_anything(
    log_that_raises: list[str], serve: Callable[..., Receiver], begin: Connect
) -> None:
    first = await asyncio.to_thread(serve)
    second = await asyncio.to_thread(serve)
    exchange = begin(second)
    await eventually(lambda: link_of(exchange).reason == "engine", 300)
    await goes_inline(exchange)
    await asyncio.to_thread(first.close)
    await eventually(lambda: link_of(exchange).is_connected, 300)
    sent = picture()
    assert (await exchange.exchange(sent))[0].equal(sent)
    for said in ("has no slab", "go inline until", "has a slab of", "go through shared memory"):
        assert any(said in line for line in log_that_raises), said


# -- without an event loop --------------------------------------------------------------------------------------------------


class Asked:
    """In place of vLLM's client: questions, and whether they are answered."""

    def __init__(self, receiver: Receiver) -> None:
        self.receiver = receiver
        self.answers = True
        self.questions: list[Future[Any]] = []

    def __call__(self, _: bytes) -> Future[Any]:
        self.questions.append(Future())
        if self.answers:
            self.questions[-1].set_result(self.receiver.where())
        return self.questions[-1]


def send(frontend: SyncFrontend, receiver: Receiver) -> bool:
    """Sends a request; returns whether its tensor went through the slab."""
    sent = picture()
    references: list[Any] = []
    frontend.divert(request_with(sent), ENGINE, lambda: references.append(frontend(sent)))
    if references[0] is None:
        return False
    assert receiver(*described(sent), references[0]).equal(sent)
    assert receiver.take_losses() is None
    return True


def test_without_a_loop_a_silent_engine_core_holds_nobody_and_is_reached_later(
    serve: Callable[..., Receiver],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 0.05)
    receiver = serve()
    asked = Asked(receiver)
    asked.answers = False
    frontend = SyncFrontend(settings(), [ENGINE], None, asked)
    assert not send(frontend, receiver)
    until(lambda: frontend._links[ENGINE].reason == "engine")
    assert not send(frontend, receiver)
    monkeypatch.setattr("shmring.integrations.vllm.link._ANSWER_S", 60.0)
    (question,) = asked.questions
    question.set_result(receiver.where())
    until(lambda: frontend._links[ENGINE].is_connected)
    assert send(frontend, receiver)
    until(lambda: AGAIN in caplog.text)
    assert (caplog.text.count(INLINE), caplog.text.count(AGAIN)) == (1, 1)
    frontend.close()


def test_without_a_loop_an_engine_core_that_gets_a_ring_later_is_asked_with_a_later_request(
    serve: Callable[..., Receiver],
) -> None:
    first, second = serve(), serve()
    frontend = SyncFrontend(settings(), [ENGINE], None, Asked(second))
    assert not send(frontend, second)
    assert first.report()["slots_in_use"] == 0
    first.close()
    until(lambda: send(frontend, second))
    assert frontend._traffic.tensors["copied", ""] == 1
    assert {reason for way, reason in frontend._traffic.tensors if way == "inline"} <= {"connecting", "engine"}
    frontend.close()


def test_without_a_loop_a_ring_of_the_name_that_another_engine_has_is_left_alone(
    serve: Callable[..., Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    other = serve()
    name, epoch = other.where()  # type: ignore[misc]

    def ask(_: bytes) -> Future[Any]:
        answer: Future[Any] = Future()
        answer.set_result([name, epoch + 1])
        return answer

    frontend = SyncFrontend(settings(), [ENGINE], None, ask)
    assert not send(frontend, other)
    assert frontend._traffic.tensors == {("inline", "engine"): 1}
    until(lambda: INLINE + "another engine has the name 'test-0' now" in caplog.text)
    assert other.report()["slots_in_use"] == 0
    frontend.close()


def test_without_a_loop_a_connection_that_is_lost_is_made_again(
    serve: Callable[..., Receiver], caplog: pytest.LogCaptureFixture
) -> None:
    receiver = serve()
    frontend = SyncFrontend(settings(), [ENGINE], None, Asked(receiver))
    assert send(frontend, receiver)
    client = frontend._links[ENGINE]._client
    assert client is not None
    client._thread.call(lambda: session_of(client._in_loop)._lose(EngineDeadError("lost")))
    until(lambda: send(frontend, receiver))
    until(lambda: caplog.text.count(AGAIN) == 2)
    assert caplog.text.count(INLINE) == 1
    frontend.close()


def test_without_a_loop_vllms_client_may_have_ended(serve: Callable[..., Receiver]) -> None:
    receiver = serve()

    def ask(_: bytes) -> Future[Any]:
        raise RuntimeError("the engine core is dead")

    frontend = SyncFrontend(settings(), [ENGINE], None, ask)
    assert not send(frontend, receiver)
    assert frontend._traffic.tensors == {("inline", "engine"): 1}
    frontend.close()
