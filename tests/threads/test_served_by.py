"""A ring that is served by those who call it: no thread is woken, and none is waited for, whoever calls or is interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import threads
from shmring.threads import Claim, Client, Ring, Submission, Worker
from tests.forked import in_child
from tests.nursery import Nursery
from tests.running_threads import Thread
from tests.threads.test_threads import interrupted, is_whole
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)

ROOT = Path(__file__).resolve().parents[2]
LONG_S = 15.0  # longer than these tests wait for anything, so that nobody is woken by time alone
BOTH_KINDS = pytest.mark.parametrize("served_by", ["callers", "both"])


@pytest.fixture
def nobody_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has neither the threads that wait nor the timers of a ring wake a loop: a bell that is not rung is missed."""
    for period in ("threads.callers_loop.LOOK_UP_S", "ring.handshakes._LOOK_S", "ring.inspection._LOOK_S"):
        monkeypatch.setattr(f"shmring.{period}", LONG_S)


@pytest.fixture
def serve(socket_dir: Path) -> Iterator[Callable[..., Ring]]:
    """``serve(served_by="callers", **options)``: a small ring, closed again."""
    with contextlib.ExitStack() as rings:

        def start(served_by: Any = "callers", **options: Any) -> Ring:
            settings: dict[str, Any] = {"slab_nbytes": "1MiB", "broadcast_nbytes": "4MiB", "socket_dir": str(socket_dir)}
            return rings.enter_context(threads.serve("test", served_by=served_by, **(settings | options)))

        yield start


@pytest.fixture
def join(socket_dir: Path) -> Iterator[Callable[..., Worker]]:
    """``join(ring, rank=0, **options)``: a worker in this process, whom the ring has let in."""
    with contextlib.ExitStack() as workers:

        def start(ring: Ring, rank: int = 0, **options: Any) -> Worker:
            joining = Thread(lambda: threads.join("test", rank, socket_dir=str(socket_dir), **options))
            ring.wait_workers(len(ring.ranks) + 1, timeout=20)
            return workers.enter_context(joining.ended())

        yield start


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[Callable[..., Client]]:
    """``connect(ring)``: a client in this process, whom the ring has let in."""
    with contextlib.ExitStack() as clients:

        def start(ring: Ring) -> Client:
            connecting = Thread(lambda: threads.connect("test", socket_dir=str(socket_dir), lease_nbytes="64KiB"))
            served(ring, lambda: not connecting.is_alive())
            return clients.enter_context(connecting.ended())

        yield start


@pytest.fixture
def served_by() -> str:
    return "callers"


@pytest.fixture
def ring(serve: Any, served_by: str) -> Ring:
    return serve(served_by)


@pytest.fixture
def worker(ring: Ring, join: Any) -> Worker:
    return join(ring)


@pytest.fixture
def client(ring: Ring, connect: Any) -> Client:
    return connect(ring)


@pytest.fixture
def submission(client: Client) -> Submission:
    return client.submit_nowait("x")


@pytest.fixture
def claim(ring: Ring, submission: Submission) -> Claim:
    return ring.claim(10)


@pytest.fixture
def answers(ring: Ring, worker: Worker) -> Iterator[Thread]:
    """A thread that replies to each message of the worker, until the ring is closed."""
    thread = answering(worker)
    yield thread
    ring.close()
    thread.ended()


def served(ring: Ring, condition: Callable[[], Any]) -> Any:
    """Serves a ring as a loop of its user's would, until something is true; nothing is claimed."""

    def look() -> Any:
        ring._thread.turn()
        return condition()

    return until(look)


def answering(worker: Worker) -> Thread:
    """A thread that replies to each message with its payload, until the worker is closed."""

    def reply() -> None:
        for message in worker:
            with message:
                message.reply(message.payload)
            del message

    return Thread(reply)


def runs_no_thread(kind: str) -> bool:
    return not any(kind in thread.name for thread in threading.enumerate())


# -- without a thread --------------------------------------------------------------------------------------------------


def test_callers_serve_a_ring_without_any_thread(serve: Any, join: Any) -> None:
    before = set(threading.enumerate())
    ring = serve("callers")
    worker = join(ring)
    answers = answering(worker)
    large = torch.full((2 << 20,), 3, dtype=torch.uint8)
    for number in range(20):
        assert ring.broadcast({"n": number}, timeout=10) == (0,)
        assert ring.gather([number, large], timeout=10)[0][0] == number
    assert ring.broadcast_nowait({"n": 20}) == (0,)
    assert set(threading.enumerate()) - before <= {answers}
    ring.close()
    answers.ended()


@BOTH_KINDS
def test_a_loop_of_its_users_serves_clients_and_shares_their_claims(ring: Ring, worker: Worker, client: Client) -> None:
    submission = client.submit_nowait({"x": torch.arange(5000)})
    claim = None
    while claim is None:
        with contextlib.suppress(shmring.WouldBlock):
            claim = ring.claim_nowait()
    assert claim.share({"named": submission.request_id}, timeout=10) == (0,)
    assert claim.share_nowait() == (0,)
    claim.done({"sum": int(claim.payload["x"].sum())})
    with worker.receive(10) as message:
        assert message.beside == {"named": submission.request_id}
        assert torch.equal(message.payload["x"], torch.arange(5000))
    with worker.receive(10, busy_poll_s=0.001) as message:
        assert message.beside is None
    assert served(ring, lambda: submission.ended)
    assert submission.result(timeout=10) == {"sum": 12497500}
    del claim, message
    served(ring, lambda: is_whole(ring))


def test_requests_are_claimed_in_order_and_taken_by_name_by_who_waits(ring: Ring, client: Client) -> None:
    waiting = Thread(ring.take, client.client_id, 3, 20)
    for number in range(1, 4):
        client.submit_nowait(number)
    assert waiting.ended().payload == 3
    for number in (1, 2):
        claim = ring.claim(10)
        assert claim.payload == number
        claim.done()
    with pytest.raises(TimeoutError):
        ring.claim(0.01)
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    with pytest.raises(shmring.AbortedError, match="not connected"):
        ring.take(client.client_id + 1, 1, 10)


def test_slots_of_shared_claims_go_back_while_others_are_called(ring: Ring, worker: Worker, client: Client) -> None:
    """Nobody waits for them here; each call looks, a moment after the last one did."""
    client.submit_nowait(torch.ones(5000))
    with ring.claim(10) as claim:
        claim.share(timeout=10)
        del claim
    worker.receive(10).leave()

    def is_back() -> bool:
        ring.broadcast("next", timeout=10)
        worker.receive(10).leave()
        return client.statistics().slots_in_use == 0

    until(is_back)


@pytest.mark.usefixtures("nobody_looks_up")
@pytest.mark.parametrize("served_by", ["both"])
def test_between_calls_a_thread_stands_by_and_lets_go_when_somebody_waits(ring: Ring, socket_dir: Path) -> None:
    runner = ring._thread
    with threads.connect("test", socket_dir=str(socket_dir)) as client:  # nobody calls
        client.submit_nowait(torch.ones(5000))
        until(lambda: ring.untaken == 1)
        assert ring.claim_nowait().payload.sum() == 5000
    until(lambda: runner._leader == -1)
    with pytest.raises(TimeoutError):
        ring.claim(0.01)
    until(lambda: runner._leader == -1)  # again
    waiting = Thread(ring.claim)
    until(lambda: runner._leader == waiting.ident)
    ring.close()
    with pytest.raises(shmring.ClosedError):
        waiting.ended()
    assert runs_no_thread("ring 'test'")


def test_a_thread_that_stands_by_does_nothing_as_long_as_there_are_calls(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.threads.callers_loop._IDLE_S", 3600.0)
    ring = serve("both")
    runner = ring._thread
    for call in (ring.statistics, lambda: ring.broadcast("x"), lambda: ring.gather("x"), ring.claim_nowait):
        runner._called_s = time.monotonic() - 1800
        with contextlib.suppress(shmring.WouldBlock):
            call()
        assert runner._do(runner._lead_if_idle) > 1800  # it looks again when nobody has called until then
    waiting = Thread(ring.claim)
    until(lambda: runner._is_asleep)
    runner._called_s -= 7200
    assert runner._do(runner._lead_if_idle) < 1800  # another thread leads, perhaps for hours
    ring.close()
    with pytest.raises(shmring.ClosedError):
        waiting.ended()


# -- errors of workers -------------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_a_worker_that_leaves_fails_or_is_dropped_ends_a_gather_at_once(ring: Ring, worker: Worker, join: Any) -> None:
    def fail() -> None:
        with contextlib.suppress(KeyError), worker.receive(20):
            raise KeyError("no such layer")

    failing = Thread(fail)
    with pytest.raises(shmring.WorkerFailedError, match="no such layer", check=lambda error: error.rank == 0):
        ring.gather("x", timeout=20)
    failing.ended()
    leaving = Thread(lambda: (worker.receive(20), worker.close())[1])
    with pytest.raises(shmring.WorkerLostError, match="has left"):
        ring.gather("x", timeout=20)
    leaving.ended()
    assert served(ring, lambda: ring.ranks == ())
    assert ring.gather("to nobody", timeout=20) == []
    other = join(ring, 1)
    dropping = Thread(lambda: (other.receive(20), ring.drop_worker(1, "not wanted")))
    with pytest.raises(shmring.WorkerLostError, match="was dropped"):
        ring.gather("x", timeout=20)
    dropping.ended()
    with pytest.raises(shmring.ClosedError, match="not wanted"):
        other.receive(20)
    with pytest.raises(shmring.WorkerLostError):
        ring.broadcast("x", to=[1], timeout=20)


def test_who_does_not_reply_or_leave_in_time_is_named(serve: Any, join: Any) -> None:
    ring = serve("callers", worker_backlog=2)
    worker = join(ring)
    with pytest.raises(shmring.WorkersBehindError, match="for the replies of workers 0") as caught:
        ring.gather("x", timeout=0.02)
    assert (caught.value.ranks, caught.value.sent) == ((0,), True)
    ring.broadcast("x")
    with pytest.raises(shmring.WouldBlock):
        ring.broadcast_nowait("too many")
    with pytest.raises(shmring.WorkersBehindError) as caught:
        ring.broadcast("too many", timeout=0.02)
    assert (caught.value.ranks, caught.value.sent) == ((0,), False)
    with pytest.raises(shmring.WorkersBehindError) as caught:
        ring.gather("too many", timeout=0.02)
    assert caught.value.sent is False
    waiting = Thread(lambda: ring.gather("then", timeout=20))
    answers = answering(worker)
    assert waiting.ended() == ["then"]
    assert ring.gather("late replies are nobody's", timeout=20) == ["late replies are nobody's"]
    assert ring.statistics().late_answers == 1
    ring.close()
    answers.ended()


@pytest.mark.parametrize("busy_poll_s", [-0.001, 1.0])
def test_how_long_to_look_has_limits(ring: Ring, worker: Worker, busy_poll_s: float) -> None:
    with pytest.raises(ValueError, match="busy_poll_s"):
        ring.gather("x", busy_poll_s=busy_poll_s)
    with pytest.raises(ValueError, match="busy_poll_s"):
        worker.receive(busy_poll_s=busy_poll_s)
    for timeout in ("soon", b"x"):
        with pytest.raises(TypeError, match="timeout is a number"):
            ring.broadcast("x", timeout=timeout)


def test_busy_poll_s_of_a_gather_needs_a_ring_that_callers_serve(serve: Any) -> None:
    ring = serve("thread")
    with pytest.raises(ValueError, match="served_by their callers"):
        ring.gather("x", busy_poll_s=0.001)
    with pytest.raises(ValueError, match="'thread', 'callers' or 'both', not 'nobody'"):
        threads.serve("other", served_by="nobody")  # type: ignore[call-overload]


def test_a_reply_that_comes_while_the_engine_looks_rings_no_bell(ring: Ring, worker: Worker, answers: Thread) -> None:
    ring.gather("x", timeout=20)
    [link] = [joined.link for joined in ring._in_loop._shell.workers._workers.values()]

    def looked() -> bool:
        """Whether a reply was found by looking: the core may have been another process's each time."""
        served(ring, lambda: not link.awake)
        bells = worker._connection._writer.bells
        assert ring.gather("x", timeout=20, busy_poll_s=0.1) == ["x"]
        return worker._connection._writer.bells == bells

    until(looked)


def test_more_replies_are_found_by_looking_than_a_turn_delivers(serve: Any, join: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No turn of the loop begins a new share meanwhile."""
    monkeypatch.setattr("shmring.threads.callers_loop._TURN_S", 3600.0)
    ring = serve("callers")
    worker, runner = join(ring), ring._thread
    for number in range(200):
        gathering = runner.at_once(ring._in_loop._shell.workers.ask_now, number, None)
        with worker.receive(10) as message:
            message.reply(number)
        runner.at_once(gathering.look, 0.1)
        assert gathering.is_over, number
        assert gathering.result() == [number]
        gathering.forget()


# -- several threads ---------------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_threads_share_a_ring_and_each_gets_its_own(ring: Ring, join: Any, connect: Any) -> None:
    """Those who wait run the loop for one another."""
    workers = [join(ring, rank) for rank in range(2)]
    client = connect(ring)
    answers = [answering(worker) for worker in workers]

    def gather(base: int) -> None:
        for number in range(100):
            assert ring.gather(base + number, timeout=20) == [base + number] * 2

    def claim() -> None:
        for _ in range(100):
            with ring.claim(20) as claim:
                claim.reply(claim.payload)
            del claim

    gathering = [Thread(gather, base) for base in (1000, 2000)]
    claiming = [Thread(claim) for _ in range(2)]
    for number in range(200):
        assert client.request(number, timeout=20) == number
    for thread in (*gathering, *claiming):
        thread.ended(30)
    assert is_whole(ring)
    ring.close()
    for thread in answers:
        thread.ended()


@pytest.mark.usefixtures("nobody_looks_up")
def test_who_waits_is_told_by_the_thread_that_answers_it(ring: Ring) -> None:
    """Whoever leads sleeps then, and whoever follows; neither looks up by itself."""
    runner = ring._thread
    waiting = [Thread(ring.claim) for _ in range(2)]
    until(lambda: runner._is_asleep and len(runner._running) == 2)
    calls = list(runner._running)
    for call in (calls[1], calls[0]):
        runner.at_once(call.answer, "found")
        until(lambda: sum(thread.is_alive() for thread in waiting) == len(runner._running))
    assert [thread.ended() for thread in waiting] == ["found", "found"]


@pytest.mark.usefixtures("nobody_looks_up")
def test_who_follows_leads_when_the_leader_has_left(ring: Ring, connect: Any) -> None:
    runner, client = ring._thread, connect(ring)
    waiting = [Thread(ring.claim) for _ in range(3)]
    until(lambda: runner._is_asleep and len(runner._running) == 3)
    for number in range(3):
        client.submit_nowait(number)
    assert sorted(thread.ended().payload for thread in waiting) == [0, 1, 2]


def test_a_ring_is_used_beside_a_running_loop(ring: Ring, answers: Thread) -> None:
    async def main() -> list[Any]:
        mine = asyncio.get_running_loop()
        replies = ring.gather("x", timeout=20)
        assert asyncio.get_running_loop() is mine
        await asyncio.sleep(0)
        return replies

    assert asyncio.run(main()) == ["x"]


def test_callbacks_and_finalisers_in_the_middle_of_a_call_may_not_wait(
    ring: Ring, submission: Submission, claim: Claim
) -> None:
    errors: list[str] = []

    def callback() -> None:
        for wait in (ring.claim, lambda: claim.reply(1), ring.statistics, ring.close, lambda: ring.broadcast(1)):
            with pytest.raises(shmring.LocalProtocolError, match="in the middle of it") as caught:
                wait()
            errors.append(str(caught.value))
        claim.release()

    claim.on_abort(callback)
    submission.abort()
    served(ring, lambda: len(errors) == 5)
    served(ring, lambda: is_whole(ring))


def test_what_is_posted_while_another_thread_is_inside_is_carried_out_by_it(
    ring: Ring, submission: Submission, claim: Claim
) -> None:
    inside, go_on = threading.Event(), threading.Event()
    holding = Thread(ring._thread._do, lambda: (inside.set(), go_on.wait(20)))  # which gives the loop no turn
    assert inside.wait(20)
    claim.done()  # waits for nobody
    assert not claim.ended
    go_on.set()
    holding.ended()
    assert claim.ended
    served(ring, lambda: submission.ended)


def test_what_is_posted_is_carried_out_while_another_thread_waits(
    ring: Ring, client: Client, submission: Submission, claim: Claim
) -> None:
    waiting = Thread(ring.claim)
    until(lambda: ring._thread._is_asleep)
    claim.done()
    assert claim.ended
    submission.wait(timeout=10)
    client.submit_nowait("y")
    assert waiting.ended().payload == "y"


# -- interruptions -----------------------------------------------------------------------------------------------------


def test_who_is_interrupted_asleep_gives_up_its_call_and_the_ring_goes_on(ring: Ring, worker: Worker, client: Client) -> None:
    for wait in (ring.claim, lambda: ring.take(client.client_id, 1), lambda: ring.gather("x")):
        with interrupted(lambda: ring._thread._is_asleep):
            wait()
    assert not ring._arrivals._takers
    assert not ring._arrivals._claimers
    client.submit_nowait("still there")
    assert ring.take(client.client_id, 1, 10).payload == "still there"
    answers = answering(worker)
    assert ring.gather("y", timeout=20) == ["y"]
    ring.close()
    answers.ended()


@contextlib.contextmanager
def signalled_asleep(ring: Ring, handler: Callable[..., object]) -> Iterator[None]:
    """In this block, the handler of a signal runs when this thread sleeps in a call."""
    before = signal.signal(signal.SIGUSR1, handler)
    main = threading.get_ident()
    try:
        sending = Thread(lambda: (until(lambda: ring._thread._is_asleep), signal.pthread_kill(main, signal.SIGUSR1)))
        yield
        sending.ended()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_handler_may_close_the_ring_that_its_thread_waits_for(ring: Ring) -> None:
    def close(*_: object) -> None:
        ring.close()
        with pytest.raises(shmring.ClosedError):
            ring.claim()

    with signalled_asleep(ring, close), pytest.raises(shmring.ClosedError):
        ring.claim()
    assert ring._thread._is_over


def test_a_signal_handler_may_not_wait_where_its_thread_waits(ring: Ring, worker: Worker) -> None:
    errors: list[str] = []

    def wait(*_: object) -> None:
        with pytest.raises(shmring.LocalProtocolError, match="waits for it already") as caught:
            ring.gather("x", timeout=20)
        errors.append(str(caught.value))
        ring.broadcast("what never waits is fine")

    with signalled_asleep(ring, wait), pytest.raises(TimeoutError):
        ring.claim(1)
    assert len(errors) == 1
    worker.receive(10).leave()
    assert worker.receive(10).payload == "what never waits is fine"


def test_a_ring_that_was_interrupted_in_the_middle_of_its_work_says_so_and_can_be_closed(
    ring: Ring, submission: Submission, claim: Claim
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    claim.on_abort(interrupt)
    submission.abort()
    with pytest.raises(KeyboardInterrupt):
        served(ring, lambda: False)
    for call in (ring.claim, ring.statistics, lambda: ring.broadcast(1)):
        with pytest.raises(shmring.ClosedError, match="interrupted in the middle of its work"):
            call()
    ring.close()
    with pytest.raises(shmring.ClosedError, match="is closed"):
        ring.claim()


# -- its end -----------------------------------------------------------------------------------------------------------


@BOTH_KINDS
def test_closing_ends_every_wait_and_twice_is_once(ring: Ring, worker: Worker) -> None:
    waiting = [Thread(wait) for wait in (ring.claim, ring.claim, lambda: ring.gather("x"), lambda: ring.wait_workers(5))]
    runner = ring._thread
    until(lambda: len(runner._running) == 4 and runner._leader)
    closing = [Thread(ring.close) for _ in range(3)]
    for thread in closing:
        thread.ended()
    for thread in waiting:
        with pytest.raises((shmring.ClosedError, shmring.WorkerLostError)):
            thread.ended()
    ring.close()
    worker.receive(10).leave()
    with pytest.raises(shmring.ClosedError, match="is closing"):
        worker.receive(10)
    assert runs_no_thread("ring 'test'")


@BOTH_KINDS
def test_what_can_not_be_opened_says_why_and_leaves_nothing(ring: Ring, serve: Any, served_by: str) -> None:
    with pytest.raises(shmring.LocalProtocolError, match="is running already"):
        serve(served_by)
    assert ring.statistics().clients == 0
    with pytest.raises(shmring.SlabError):
        threads.serve("other", slab_nbytes="1000TiB", socket_dir=ring.config.socket_dir, served_by=served_by)  # type: ignore[call-overload]


@pytest.mark.usefixtures("no_new_segments")
@BOTH_KINDS
@pytest.mark.parametrize("ending", ["", "raise SystemExit(0)", "threading.Thread(target=ring.claim, daemon=True).start()"])
def test_a_program_that_ends_without_closing_ends_quietly(
    nursery: Nursery, socket_dir: Path, served_by: str, ending: str
) -> None:
    program = f"""
import threading, torch
from shmring import threads
from tests.waiting import until
options = {{"socket_dir": {str(socket_dir)!r}}}
ring = threads.serve("test", slab_nbytes="1MiB", broadcast_nbytes="1MiB", served_by={served_by!r}, **options)
joining = threading.Thread(target=lambda: joined.append(threads.join("test", 0, **options)))
joined = []
joining.start()
ring.wait_workers(1, timeout=20)
joining.join()
ring.broadcast(torch.ones(5000))
message = joined[0].receive(10)
view = message.payload
{ending}
"""
    ended = nursery.run_text(program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.usefixtures("no_new_segments")
@BOTH_KINDS
@pytest.mark.usefixtures("nobody_looks_up")
def test_a_forked_child_can_not_use_it_and_does_its_parent_no_harm(ring: Ring, answers: Thread) -> None:
    ring.gather("x", timeout=20)

    def as_child() -> None:
        for call in (ring.claim, ring.claim_nowait, ring.statistics, lambda: ring.broadcast(1), lambda: ring.gather(1)):
            with pytest.raises(shmring.ClosedError, match="fork"):
                call()
        ring.close()
        ring._thread._loop.__del__()

    in_child(as_child)
    assert ring.gather("y", timeout=20) == ["y"]
    waiting = Thread(ring.claim)  # a thread that sleeps is still woken
    until(lambda: ring._thread._is_asleep)
    Thread(ring.close).ended()
    with pytest.raises(shmring.ClosedError):
        waiting.ended()
    answers.ended()
    gc.collect()
