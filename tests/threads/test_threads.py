"""Both ends without an event loop: blocking calls from any thread, and what interrupts them."""

from __future__ import annotations

import contextlib
import gc
import select
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import uvloop

import shmring
from shmring import threads
from shmring.memory import copier
from shmring.threads import Claim, Client, Ring
from shmring.threads.loop_calls import LoopCall
from shmring.threads.loop_thread import LoopThread
from tests.garbage import uncollected
from tests.integration.test_forged import Forger
from tests.nursery import Forked, Nursery
from tests.running_threads import Stop, Thread
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


def is_whole(ring: Ring) -> bool:
    """Whether nothing of the slab is in use, but for what connected clients lease."""
    now = ring.statistics()
    return (now.waiting, now.running, now.slots_in_use) == (0, 0, 0)


#: Of tests that hold up the loop's thread, or interrupt what would be in the middle of the loop.
in_a_thread_of_its_own = pytest.mark.parametrize("serve", ["thread"], indirect=True)


@pytest.fixture(params=["thread", "both"])
def serve(socket_dir: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Ring]]:
    """``serve(name="test", **options)``: a small ring, closed again."""
    with contextlib.ExitStack() as rings:

        def start(name: str = "test", **options: Any) -> Ring:
            settings: dict[str, Any] = {"slab_nbytes": "1MiB", "inline_nbytes": "1KiB", "socket_dir": str(socket_dir)}
            settings["served_by"] = request.param
            return rings.enter_context(threads.serve(name, **(settings | options)))

        yield start


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[Callable[..., Client]]:
    """``connect(name="test", **options)``: a client with small leases, closed again."""
    with contextlib.ExitStack() as clients:

        def start(name: str = "test", **options: Any) -> Client:
            settings: dict[str, Any] = {"lease_nbytes": "64KiB", "inline_nbytes": "1KiB", "socket_dir": str(socket_dir)}
            return clients.enter_context(threads.connect(name, **(settings | options)))

        yield start


@pytest.fixture
def ring(serve: Any) -> Ring:
    opened: Ring = serve()
    return opened


@pytest.fixture
def client(ring: Ring, connect: Any) -> Client:
    connected: Client = connect()
    return connected


@pytest.fixture
def answering(ring: Ring) -> Thread:
    """A thread that answers each request with its payload."""

    def answer() -> None:
        for claim in ring:
            with claim:
                claim.reply(claim.payload)
            del claim

    return Thread(answer)


@pytest.fixture
def prelude(socket_dir: Path) -> str:
    """Of programs: ``options`` for either end."""
    return f"import time, torch, shmring\nfrom shmring import threads\noptions = {{'socket_dir': {str(socket_dir)!r}}}\n"


@pytest.fixture
def start(nursery: Nursery, prelude: str, tmp_path: Path) -> Iterator[Callable[[str], Forked]]:
    """``start(program)``: a process with ``options`` for either end; killed in the end."""
    started: list[Forked] = []

    def start(program: str) -> Forked:
        started.append(nursery.start_text(tmp_path / f"output-{len(started)}", prelude + program))
        return started[-1]

    yield start
    for forked in started:
        forked.process.kill()


# -- requests -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("answering")
def test_a_request_is_answered(client: Client, ring: Ring) -> None:
    assert torch.equal(client.request({"x": torch.arange(5000)}, timeout=5)["x"], torch.arange(5000))
    assert client.client_id == client.statistics().client_id == 1
    assert client.connected
    client.wait_connected(5)
    client.wait_prefaulted(5)
    until(lambda: is_whole(ring))


def test_a_stream_yields_replies_and_leaving_it_early_aborts(client: Client, ring: Ring) -> None:
    def answer() -> None:
        for _ in range(2):
            with ring.claim() as claim:
                for number in range(3):
                    claim.reply(number)
                if claim.payload == "endless":
                    aborted = threading.Event()
                    claim.on_abort(aborted.set)
                    assert aborted.wait(10)
                    claim.reply("too late")  # raises this claim's AbortedError, which ends with the block

    engine = Thread(answer)
    assert list(client.stream("three", timeout=10)) == [0, 1, 2]
    for reply in client.stream("endless"):
        assert reply == 0
        break
    engine.ended()


def test_a_stream_ends_though_the_error_that_left_it_is_kept(client: Client, ring: Ring) -> None:
    """The error's traceback keeps the stream: nobody's finaliser ends it."""
    stream = client.stream("endless")
    claims = Thread(lambda: (claim := ring.claim(10), claim.reply("first"))[0])
    assert next(stream) == "first"
    claim = claims.ended()
    with pytest.raises(Stop) as caught:
        stream.throw(Stop())  # type: ignore[attr-defined]  # it is a generator
    until(lambda: claim.aborted)
    claim.release()
    del caught


def test_a_stream_keeps_no_reply_that_its_reader_has_dropped(client: Client, ring: Ring) -> None:
    stream = client.stream("two")
    claims = Thread(lambda: (claim := ring.claim(10), claim.reply(torch.ones(5000)))[0])
    assert next(stream).sum() == 5000
    until(lambda: client.statistics().reply_slots_held == 0)
    claims.ended().done("second")
    assert list(stream) == ["second"]


@pytest.mark.usefixtures("answering")
def test_several_slots_are_acquired_at_once(client: Client) -> None:
    slots = client.slots([3000, 5000], timeout=5)
    assert [slot.nbytes for slot in slots] == [3000, 5000]
    for slot in slots:
        with slot:
            assert client.request(slot.tensor((3000,), torch.uint8).fill_(1), timeout=5).sum() == 3000
    assert client.statistics().copies == 0
    until(lambda: client.statistics().slots_writing == client.statistics().slots_submitted == 0)
    with pytest.raises(ValueError, match="at least one"):
        client.slots([])


def test_attributes_say_what_those_of_the_asyncio_client_say(serve: Any, connect: Any) -> None:
    ring = serve(kept_nbytes="128KiB")
    client = connect()
    assert client.epoch == client.statistics().epoch > 0
    assert client.kept_nbytes == 128 << 10
    assert (client.names, client.lost_error, client.closed) == (("test",), None, False)
    ring.close()
    until(lambda: not client.connected)
    assert (client.epoch, client.client_id, client.kept_nbytes) == (0, 0, 0)


@pytest.mark.usefixtures("answering")
def test_what_was_written_into_a_slot_is_sent_from_there(client: Client, ring: Ring) -> None:
    with client.slot(shmring.nbytes_for(((5000,), torch.int64), ((10,), torch.int64))) as slot:
        view = slot.tensor((5000,), torch.int64).copy_(torch.arange(5000))
        array = slot.array((10,), np.int64)
        array[:] = 7
        reply = client.request([view, array], timeout=5)
        assert torch.equal(reply[0], torch.arange(5000))
        assert reply[1].sum() == 70
        del view, array
    with client.slot_nowait(5000, ask=False) as other:
        pass
    with pytest.raises(shmring.ClosedError, match="left"):
        other.tensor((1,), torch.uint8)
    assert client.statistics().in_place == 2
    assert client.statistics().copies == 0
    del reply
    until(lambda: client.statistics().slots_writing == client.statistics().slots_submitted == 0)
    until(lambda: is_whole(ring))


def test_errors_are_those_of_the_asyncio_end(client: Client, ring: Ring) -> None:
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    with client.slot(ring.statistics().leasable_nbytes // 2):
        for attempt in (
            lambda: client.submit_nowait(torch.ones(600_000, dtype=torch.uint8)),
            lambda: client.slot_nowait(600_000),
        ):
            with pytest.raises(shmring.WouldBlock, match=r"request\(\), submit\(\) and slot\(\) wait for them"):
                attempt()
    with pytest.raises(shmring.CapacityError):
        client.slot(1 << 40)
    with pytest.raises(shmring.CapacityError):
        client.check_capacity(1 << 40)
    with pytest.raises(TypeError, match="payload"):
        client.submit(object())
    with pytest.raises(shmring.RemoteError, match="no method"):
        client.call("nothing", timeout=5)
    submission = client.submit("fails")
    ring.claim(5).fail(ValueError("wrong"))
    with pytest.raises(shmring.RemoteError, match="wrong"):
        submission.result(timeout=5)
    late = client.submit("late")
    ring.claim(5).time_out("its time is over")
    with pytest.raises(TimeoutError, match="its time is over"):
        late.result(timeout=5)
    two = client.submit("two")
    with ring.claim(5) as claim:
        claim.reply(1)
        claim.done(2)
    assert two.next() == 1
    assert two.next(timeout=5) == 2
    with pytest.raises(StopIteration):
        two.next()
    silent = client.submit("silent")
    ring.claim(5).done()
    assert silent.wait(timeout=5) is None
    failing = client.submit("fails")
    ring.claim(5).fail(ValueError("wrong"))
    with pytest.raises(shmring.RemoteError, match="wrong"):
        failing.wait()
    named = client.submit("named", request_id="mine")
    claim = ring.claim(5)
    assert claim.name == "mine"
    assert client.abort("mine") == 1
    with pytest.raises(shmring.AbortedError):
        named.result()
    until(lambda: claim.aborted)
    with pytest.raises(shmring.AbortedError):
        claim.reply("too late")
    claim.release()
    with pytest.raises(shmring.LocalProtocolError, match="released"):
        _ = claim.payload


def thread_names() -> list[str]:
    """Of the threads of both ends; other tests' pools have other names."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(("shmring ring", "shmring this client"))]


def test_what_is_not_there_when_the_ring_opens_is_an_error_and_leaves_no_thread(serve: Any, connect: Any) -> None:
    with pytest.raises(shmring.EngineDeadError):
        connect("nobody", connect_timeout_s=0.1)
    serve()
    with pytest.raises(shmring.LocalProtocolError):
        serve()
    with pytest.raises(ValueError, match="untaken_s"):
        serve("other", untaken_s=0)
    assert thread_names() == ["shmring ring 'test'"]


def test_every_wait_ends_with_its_timeout_and_leaves_nothing(ring: Ring, connect: Any) -> None:
    client = connect(lease_nbytes="1MiB")
    held = client.slot(800_000)
    waits: list[tuple[str, Callable[[], Any]]] = [
        ("a request to come", lambda: ring.claim(0.01)),
        ("request 77 of client 1 to come", lambda: ring.take(1, 77, 0.01)),
        ("space: .* callers hold 1 slots", lambda: client.slot(800_000, timeout=0.01)),
        ("space: .* callers hold 1 slots", lambda: client.slots([400_000, 400_000], timeout=0.01)),
        ("space: ", lambda: client.submit(torch.ones(800_000, dtype=torch.uint8), timeout=0.01)),
        ("at 'test': the engine's reply; 1 requests", lambda: client.request("nobody answers", timeout=0.01)),
        ("at 'test': the engine's reply; 1 requests", lambda: next(client.stream("nobody answers", timeout=0.01))),
    ]
    for what, wait in waits:
        with pytest.raises(TimeoutError, match=f"longer than the 0.01 s it was given: {what}"):
            wait()
        until(lambda: client.statistics().in_flight == 0)
    until(lambda: client.statistics().in_flight == client.statistics().waiting == 0 == ring.untaken)
    submission = client.submit("later")
    for wait_for in (submission.next, submission.wait, submission.result):  # only the last one aborts the request
        with pytest.raises(TimeoutError, match=r"0\.01 s it was given: at 'test': the engine's reply; 1 requests"):
            wait_for(timeout=0.01)
    with pytest.raises(shmring.AbortedError):
        submission.wait()
    until(lambda: ring.untaken == 0)
    held.close()
    until(lambda: is_whole(ring) and client.statistics().slots_writing == 0)


# -- taking one request -------------------------------------------------------------------------------------------------


def test_a_request_is_taken_whether_it_came_before_or_comes_later(ring: Ring, client: Client) -> None:
    first, second = client.submit("first"), client.submit("second")
    until(lambda: ring.untaken == 2)
    taken = ring.take(client.client_id, second.request_id, 5)
    assert (taken.payload, taken.client_id, taken.request_id) == ("second", client.client_id, second.request_id)
    waiting = Thread(ring.take, client.client_id, second.request_id + 1, 10)
    third = client.submit("third")
    assert waiting.ended().payload == "third"
    waiting.result.done()
    taken.done()
    ring.claim(5).done()
    for submission in (first, second, third):
        with pytest.raises(shmring.RemoteError, match="without a reply"):
            submission.result(timeout=5)


@in_a_thread_of_its_own
def test_what_has_arrived_is_taken_without_the_loop(ring: Ring, client: Client) -> None:
    submission = client.submit(torch.ones(5000))
    until(lambda: ring.untaken == 1)
    go_on = threading.Event()
    ring._thread.post(go_on.wait)  # the loop's thread is busy until this is set
    claim = ring.take(client.client_id, submission.request_id)
    assert claim.payload.sum() == 5000
    claim.done()
    go_on.set()
    until(lambda: is_whole(ring))


def test_whoever_waits_for_a_request_gets_it_before_those_who_wait_for_any(ring: Ring, client: Client) -> None:
    anybody = [Thread(ring.claim, 10) for _ in range(3)]
    taker = Thread(ring.take, client.client_id, 1, 10)
    until(lambda: ring._arrivals._takers and len(ring._arrivals._claimers) == 3)
    client.submit("for the taker")
    assert taker.ended().payload == "for the taker"
    for number in range(3):
        client.submit(number)
    assert sorted(thread.ended().payload for thread in anybody) == [0, 1, 2]


def test_what_can_not_be_taken_says_why_at_once(serve: Any, connect: Any) -> None:
    ring = serve(payload_type=dict[str, int])
    client = connect()
    number = client.client_id
    taken, aborted = client.submit({"a": 1}), client.submit({"b": 2})
    until(lambda: ring.untaken == 2)
    ring.take(number, taken.request_id).done()
    with pytest.raises(shmring.LocalProtocolError, match="taken before"):
        ring.take(number, taken.request_id)
    aborted.abort()
    until(lambda: ring.untaken == 0)
    with pytest.raises(shmring.AbortedError, match="aborted by its frontend"):
        ring.take(number, aborted.request_id)
    with pytest.raises(shmring.LocalProtocolError, match="has ended"):  # that was said once
        ring.take(number, aborted.request_id)
    wrong = client.submit("no dict")
    with pytest.raises(shmring.RemoteProtocolError, match="can't be taken up: ValidationError"):
        ring.take(number, wrong.request_id)
    waiting = Thread(ring.take, number, 99)
    until(lambda: ring._arrivals._takers)
    with pytest.raises(shmring.LocalProtocolError, match="two threads"):
        ring.take(number, 99)
    client.close()
    with pytest.raises(shmring.AbortedError, match="not connected"):
        waiting.ended()
    with pytest.raises(shmring.AbortedError, match="not connected"):
        ring.take(number, 100)


@in_a_thread_of_its_own
def test_a_request_that_is_aborted_before_the_ring_has_read_it_is_no_riddle(ring: Ring, client: Client) -> None:
    """Both messages come in one turn of the ring's loop."""
    go_on = threading.Event()
    ring._thread.post(go_on.wait)
    submission = client.submit("never mind")
    submission.abort()
    until(lambda: client.statistics().aborted == 1)
    go_on.set()
    until(lambda: ring.statistics().aborted == 1 and ring.untaken == 0)
    with pytest.raises(shmring.AbortedError, match="aborted by its frontend"):
        ring.take(client.client_id, submission.request_id)
    until(lambda: is_whole(ring))


@in_a_thread_of_its_own
@pytest.mark.parametrize("payload", [b"\xa1\xff", b"\x92\xc0", b"\xc7\x01\x53\x00"], ids=["no text", "cut off", "no tensor"])
async def test_a_frontend_that_lies_is_disconnected_and_nothing_else(
    payload: bytes, serve: Any, connect: Any, socket_dir: Path
) -> None:
    """Its request is taken up while what it has sent is being read, in which its connection is then closed."""
    ring = serve("honest")
    client = connect("honest")
    forger = await Forger.attach(socket_dir)
    waiting = Thread(ring.take, forger.welcome.client_id, 2)
    go_on = threading.Event()
    ring._thread.post(go_on.wait)
    await forger.send(forger.say(1), forger.say(msgspec.Raw(payload), request_id=2), forger.say(3, request_id=3))
    go_on.set()
    until(lambda: ring.statistics().protocol_errors == 1 and ring.untaken == 0)
    with pytest.raises((shmring.RemoteProtocolError, shmring.AbortedError)):
        waiting.ended()
    with pytest.raises(shmring.AbortedError, match="not connected"):
        ring.take(forger.welcome.client_id, 3)
    submission = client.submit(torch.ones(5000))
    ring.take(client.client_id, submission.request_id, 10).done("honest")
    assert submission.result(timeout=10) == "honest"
    forger.close()


def test_what_nobody_takes_fails_after_a_while(serve: Any, connect: Any) -> None:
    ring = serve(untaken_s=0.1)
    client = connect()
    submission = client.submit(torch.ones(5000))
    with pytest.raises(TimeoutError, match=r"nobody took request 1 of client 1 within 0.1 s"):
        submission.result(timeout=10)
    assert ring.untaken == 0
    assert is_whole(ring)
    with pytest.raises(TimeoutError, match="nobody took"):
        ring.take(client.client_id, submission.request_id)
    late = client.submit("taken in time")
    claim = ring.take(client.client_id, late.request_id, 5)
    client.submit("untaken")
    until(lambda: ring.statistics().failed == 2)
    claim.done("the other one has failed meanwhile")
    assert late.result(timeout=5) == "the other one has failed meanwhile"


def test_many_requests_that_ended_untaken_are_remembered_up_to_a_limit(
    ring: Ring, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.threads.ring._REMEMBERED", 3)
    for _ in range(5):
        client.submit("x").abort()
    client.submit("last")
    until(lambda: [request_id for _, request_id in list(ring._arrivals._ended)] == [3, 4, 5])
    client.close()
    until(lambda: not ring._arrivals._ended)


FRONTEND = """
with threads.connect("test", **options) as client:
    submission = client.submit_nowait([torch.ones(5000)])
    print(client.client_id, submission.request_id, flush=True)
    time.sleep(60)
"""


def test_a_killed_frontends_requests_are_not_waited_for(ring: Ring, start: Any) -> None:
    frontend = start(FRONTEND)
    client_id, request_id = map(int, frontend.says())
    until(lambda: ring.untaken == 1)
    waiting = Thread(ring.take, client_id, request_id + 1)
    until(lambda: ring._arrivals._takers)
    frontend.process.kill()
    with pytest.raises(shmring.AbortedError, match="not connected"):
        waiting.ended()
    with pytest.raises(shmring.AbortedError):
        ring.take(client_id, request_id)
    until(lambda: ring.statistics().free_nbytes == ring.statistics().leasable_nbytes)


def test_a_killed_frontends_claim_keeps_its_memory_until_it_is_done(ring: Ring, start: Any) -> None:
    frontend = start(FRONTEND)
    client_id, request_id = map(int, frontend.says())
    claim = ring.take(client_id, request_id, 5)
    aborted = threading.Event()
    claim.on_abort(aborted.set)
    frontend.process.kill()
    assert aborted.wait(10)
    assert claim.aborted
    assert claim.payload[0].sum() == 5000
    assert ring.statistics().free_nbytes < ring.statistics().leasable_nbytes
    claim.done()
    del claim
    until(lambda: ring.statistics().free_nbytes == ring.statistics().leasable_nbytes)


def test_what_is_aborted_is_not_handed_out_either_before_its_callback_has_run(ring: Ring, client: Client) -> None:
    submissions = [client.submit(number) for number in range(3)]
    until(lambda: ring.untaken == 3)
    claims = dict(ring._arrivals.claims)
    for submission in submissions[:2]:
        submission.abort()
    until(lambda: ring.untaken == 1)
    ring._arrivals.claims.update(claims)  # as it is between the abort and the callback in the loop
    ring._arrivals.claims.move_to_end((client.client_id, 3))
    with pytest.raises(shmring.AbortedError):
        ring.take(client.client_id, 1)
    last = ring.claim(5)
    assert last.payload == 2
    last.done()
    until(lambda: is_whole(ring))


# -- many threads -------------------------------------------------------------------------------------------------------


def test_many_threads_share_both_ends(ring: Ring, connect: Any) -> None:
    clients = [connect(), connect()]

    def answer() -> None:
        for claim in ring:
            with claim:
                x = claim.payload["x"]
                claim.reply({"sum": int(x.sum()), "x": x + 1})
                del x
            del claim

    def ask(client: Client, number: int) -> None:
        for turn in range(60):
            nbytes = 100 if turn % 3 else 3000
            x = torch.full((nbytes,), number, dtype=torch.int64)
            if turn % 5 == 4:
                with client.slot(x.nbytes, timeout=30) as slot:
                    y = slot.tensor(x.shape, x.dtype).copy_(x)
                    reply = client.request({"x": y}, timeout=30)
                    del y
            elif turn % 7 == 6:
                client.submit({"x": x}, timeout=30).abort()
                continue
            else:
                reply = client.request({"x": x}, timeout=30)
            assert reply["sum"] == number * nbytes
            assert torch.equal(reply["x"], x + 1)
            del reply

    engines = [Thread(answer) for _ in range(3)]
    askers = [Thread(ask, client, number) for number, client in enumerate(clients * 4)]
    for asker in askers:
        asker.ended(60)
    until(lambda: is_whole(ring) and ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes)
    for client in clients:
        now = client.statistics()
        assert (now.in_flight, now.waiting, now.slots_writing, now.slots_submitted) == (0, 0, 0, 0)
    ring.close()
    for engine in engines:
        engine.ended()


def test_a_long_copy_holds_up_nobody_else(ring: Ring, connect: Any, answering: Thread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither that of submit_nowait, which the asyncio end makes in its loop."""
    del ring, answering
    client = connect(copy_offload_nbytes="16KiB")
    copying, go_on = threading.Event(), threading.Event()
    copy = copier._copy

    def slow_copy(*arguments: Any) -> None:
        copying.set()
        assert go_on.wait(10)
        copy(*arguments)

    monkeypatch.setattr(copier, "_copy", slow_copy)
    submitting = Thread(client.submit_nowait, torch.full((40_000,), 3, dtype=torch.uint8))
    assert copying.wait(10)
    assert client.request("small", timeout=10) == "small"
    with pytest.raises(shmring.WouldBlock):  # its slot is taken already
        client.submit_nowait(torch.ones(40_000, dtype=torch.uint8), ask=False)
    go_on.set()
    assert submitting.ended().result(timeout=10).sum() == 120_000
    until(lambda: client.statistics().in_flight == client.statistics().slots_submitted == 0)


# -- finalisers ---------------------------------------------------------------------------------------------------------


class Garbage:
    """Does something when the garbage collector finds it."""

    def __init__(self, finalise: Callable[[], object]) -> None:
        self._finalise = finalise
        self._cycle = self

    def __del__(self) -> None:
        self._finalise()


@pytest.mark.parametrize("where", ["loop", "caller", "other"])
def test_finalisers_may_end_what_they_hold_in_any_thread(where: str, ring: Ring, client: Client) -> None:
    """Garbage is collected in the loop's thread, within a call that this thread waits for, or in a thread of its own."""
    submission = client.submit(torch.ones(5000))
    aborted = client.submit("aborted")
    slot = client.slot(5000)
    ring.take(client.client_id, aborted.request_id, 5)
    with uncollected():
        for finalise in (ring.take(client.client_id, submission.request_id, 5).done, aborted.abort, slot.close):
            Garbage(finalise)
        if where == "loop":
            ring._thread.call(gc.collect)
        elif where == "caller":
            client._thread.call(gc.collect)
        else:
            Thread(gc.collect).ended()
    del finalise, slot
    with pytest.raises(shmring.RemoteError, match="without a reply"):
        submission.result(timeout=5)
    with pytest.raises(shmring.AbortedError):
        aborted.result(timeout=5)
    until(lambda: client.statistics().slots_writing == client.statistics().slots_submitted == 0)


@in_a_thread_of_its_own
def test_ending_a_claim_does_not_wait_for_the_loop(ring: Ring, client: Client) -> None:
    submission = client.submit(torch.ones(5000))
    claim = ring.claim(5)
    go_on = threading.Event()
    ring._thread.post(go_on.wait)
    claim.done()
    assert claim.released
    assert not submission.ended
    go_on.set()
    until(lambda: submission.ended)


@in_a_thread_of_its_own
def test_callbacks_run_in_the_loops_thread_where_waiting_is_an_error(ring: Ring, client: Client) -> None:
    submission = client.submit("x")
    claim = ring.claim(5)
    errors: list[shmring.LocalProtocolError] = []

    def callback() -> None:
        for wait in (ring.claim, lambda: claim.reply(1), ring.statistics, ring.close):
            try:
                wait()
            except shmring.LocalProtocolError as error:
                errors.append(error.with_traceback(None))
        claim.release()

    claim.on_abort(callback)
    submission.abort()
    until(lambda: len(errors) == 4)
    assert all("its own thread" in str(error) for error in errors)
    late = threading.Event()
    claim.on_abort(late.set)
    assert late.wait(10)
    ring.statistics()


# -- interruptions ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def interrupted(when: Callable[[], Any]) -> Iterator[None]:
    """This block is interrupted as by Ctrl-C as soon as a condition is true."""
    main = threading.main_thread().ident
    assert main == threading.get_ident()

    begun = threading.Event()

    def interrupt() -> None:
        assert begun.wait(10)
        until(when)
        signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever other tests have left
    try:
        interrupter = Thread(interrupt)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - the signal comes in here, and not before
            begun.set()
            yield
        interrupter.ended()
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupted_request_is_aborted(ring: Ring, client: Client) -> None:
    claims: list[Claim] = []

    def is_claimed() -> bool:
        claims.append(ring.claim(10))
        return True

    with interrupted(is_claimed):
        client.request({"x": torch.ones(5000)})
    until(lambda: claims[0].aborted)
    claims.pop().done()
    submission = client.submit("x")
    with interrupted(lambda: submission._in_loop._waiter is not None):
        submission.result()
    until(lambda: submission.ended and ring.untaken == 0)
    until(lambda: client.statistics().in_flight == client.statistics().slots_submitted == 0)
    assert is_whole(ring)


def test_an_interrupted_stream_is_aborted(ring: Ring, client: Client) -> None:
    claims: list[Claim] = []
    replies: list[str] = []

    def is_waited_for_again() -> bool:
        claims.append(ring.claim(10))
        claims[0].reply("first")
        return bool(until(lambda: replies))

    with interrupted(is_waited_for_again):
        replies.extend(client.stream({"x": torch.ones(5000)}))
    assert replies == ["first"]
    until(lambda: claims[0].aborted)
    claims.pop().done()
    until(lambda: client.statistics().in_flight == client.statistics().slots_submitted == 0)
    assert is_whole(ring)


def test_an_interrupted_connect_leaves_no_thread(connect: Any, socket_dir: Path) -> None:
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(socket_dir / "mute.sock"))
        mute.listen()
        with interrupted(lambda: select.select([mute], [], [], 0)[0]):  # the thread waits for the welcome
            connect("mute", connect_timeout_s=60)
        until(lambda: not thread_names())


def test_an_interrupted_wait_for_space_passes_its_turn_on(ring: Ring, connect: Any) -> None:
    client = connect(lease_nbytes="1MiB")
    held = client.slot(800_000)
    with interrupted(lambda: client.statistics().waiting):
        client.slot(800_000)
    until(lambda: client.statistics().waiting == 0)
    with interrupted(lambda: client.statistics().waiting):
        client.submit(torch.ones(800_000, dtype=torch.uint8))
    until(lambda: client.statistics().waiting == 0)
    held.close()
    client.slot(800_000, timeout=5).close()
    until(lambda: is_whole(ring) and client.statistics().slots_writing == 0)


@in_a_thread_of_its_own
def test_an_interrupted_thread_leaves_the_request_to_others(ring: Ring, client: Client) -> None:
    with interrupted(lambda: ring._arrivals._claimers):
        ring.claim()
    with interrupted(lambda: ring._arrivals._takers):
        ring.take(client.client_id, 1)
    until(lambda: not ring._arrivals._takers and not ring._arrivals._claimers)
    client.submit("still there")
    claim = ring.take(client.client_id, 1, 5)
    assert claim.payload == "still there"
    claim.done()


@in_a_thread_of_its_own
def test_an_exception_that_is_set_from_outside_ends_a_wait_for_what_never_comes(ring: Ring) -> None:
    waiting = Thread(ring.claim)
    until(lambda: ring._arrivals._claimers)
    waiting.stop()
    waiting.is_stopped()
    until(lambda: not ring._arrivals._claimers)


@in_a_thread_of_its_own
@pytest.mark.parametrize("how", ["claim", "take"])
def test_an_exception_that_is_set_from_outside_gives_back_what_was_handed_over(how: str, ring: Ring, client: Client) -> None:
    """Python raises it when the wait is over, and by then the claim may be there."""
    waiting = Thread(ring.claim) if how == "claim" else Thread(ring.take, client.client_id, 1)
    until(lambda: ring._arrivals._takers or ring._arrivals._claimers)
    waiting.stop()
    submissions = [client.submit("first"), client.submit("second")]
    waiting.is_stopped()
    until(lambda: ring.untaken == 2 and not ring._thread._running)
    assert [claim.payload for claim in (ring.claim_nowait(), ring.claim_nowait())] == ["first", "second"]
    del submissions


def test_an_exception_that_is_set_from_outside_gives_back_what_a_client_was_given(ring: Ring, connect: Any) -> None:
    client = connect(lease_nbytes="1MiB")
    payload = torch.ones(800_000, dtype=torch.uint8)
    calls: list[Callable[[], Any]] = [
        lambda: client.slot(800_000),
        lambda: client.slots([400_000, 400_000]),
        lambda: client.submit(payload),
        lambda: next(client.stream(payload)),
    ]
    for call in calls:
        held = client.slot(800_000, timeout=10)
        waiting = Thread(call)
        until(lambda: client.statistics().waiting == 1)
        waiting.stop()
        held.close()
        waiting.is_stopped()
        until(lambda: client.statistics().in_flight == client.statistics().slots_writing == 0)
        until(lambda: ring.untaken == 0 and client.statistics().slots_submitted == 0)
    assert is_whole(ring)


def test_an_exception_that_is_set_from_outside_ends_a_stream_whose_reply_came(ring: Ring, client: Client) -> None:
    tracebacks: list[Any] = []

    def first_of_a_stream() -> None:
        try:
            next(client.stream("two replies"))
        except Stop as error:
            tracebacks.append(error.__traceback__)  # which keeps the stream
            raise

    waiting = Thread(first_of_a_stream)
    claim = ring.claim(10)
    waiting.stop()
    claim.reply(torch.ones(5000))
    waiting.is_stopped()
    until(lambda: claim.aborted)
    claim.release()
    until(lambda: is_whole(ring) and client.statistics().reply_slots_held == 0)


def test_what_goes_back_is_the_first_again_unless_it_was_aborted(ring: Ring, client: Client) -> None:
    submissions = [client.submit(number) for number in range(3)]
    aborted, first = ring.claim(5), ring.claim(5)
    until(lambda: ring.untaken == 1)
    submissions[0].abort()
    until(lambda: aborted.aborted)
    ring._thread.call(ring._arrivals.put_back, aborted)
    assert aborted.released
    assert ring.untaken == 1
    ring._thread.call(ring._arrivals.put_back, first)
    with pytest.raises(shmring.AbortedError, match="aborted by its frontend"):
        ring.take(client.client_id, 1)
    assert [ring.claim_nowait().payload for _ in range(2)] == [1, 2]


# -- the end ------------------------------------------------------------------------------------------------------------


def test_closing_wakes_all_waiting_callers(ring: Ring, connect: Any) -> None:
    client = connect(lease_nbytes="1MiB")
    held = client.slot(800_000)
    submission = client.submit("unanswered")
    claim = ring.claim(5)
    at_client = [
        Thread(client.request, "unanswered, too"),
        Thread(client.slot, 800_000),
        Thread(client.submit, torch.ones(800_000, dtype=torch.uint8)),
        Thread(submission.next),
    ]
    until(lambda: ring.untaken == 1 and client.statistics().waiting == 2)
    until(lambda: submission._in_loop._waiter is not None)
    client.close()
    for thread in at_client:
        with pytest.raises(shmring.ClosedError, match="this client of 'test' is closed"):
            thread.ended()
    until(lambda: claim.aborted)
    other = connect()
    at_ring = [Thread(ring.claim), Thread(ring.take, other.client_id, 1), Thread(list, ring)]
    until(lambda: ring._arrivals._takers and len(ring._arrivals._claimers) == 2)
    ring.close("that is all")
    for thread in at_ring[:2]:
        with pytest.raises(shmring.ClosedError, match="ring 'test' is closed"):
            thread.ended()
    assert at_ring[2].ended() == []
    for use in (ring.claim, ring.claim_nowait, lambda: ring.take(1, 1), ring.statistics, lambda: claim.reply(1)):
        with pytest.raises(shmring.ClosedError):
            use()
    for attempt in (client.request, client.submit, client.submit_nowait, client.slot, client.slot_nowait, client.call):
        with pytest.raises(shmring.ClosedError):
            attempt("x")
    assert client.closed
    until(lambda: not other.connected)
    assert "that is all" in str(other.lost_error)
    claim.done()  # what ends something does nothing any more
    submission.abort()
    held.close()
    ring.close()
    client.close()


def test_calls_that_race_with_closing_end(ring: Ring, connect: Any) -> None:
    for _ in range(10):
        client = connect()
        begun = threading.Barrier(5)

        def call(client: Client = client, begun: threading.Barrier = begun) -> None:
            begun.wait(10)
            with contextlib.suppress(shmring.ClosedError):
                while True:
                    client.statistics()

        callers = [Thread(call) for _ in range(4)]
        begun.wait(10)
        client.close()
        for caller in callers:
            caller.ended()
    until(lambda: ring.statistics().clients == 0)


def test_no_call_is_left_in_the_queue_of_a_loop_that_has_ended() -> None:
    """Whoever comes between its last turn and its end is answered by its thread, and whoever comes later by himself."""

    class End:
        async def close(self) -> None:
            pass

    async def make() -> End:
        return End()

    class Loop(uvloop.Loop):  # type: ignore[misc]
        def close(self) -> None:
            thread._queue.append(last)
            self.call_soon_threadsafe(thread._carry_out)
            super().close()

    last = LoopCall(int, (), lambda _: None)
    thread = LoopThread("this end", make)
    thread._loop.close()
    thread._loop = Loop()
    thread.open()
    assert thread.call(int) == 0
    thread.close()
    assert isinstance(last.error, shmring.ClosedError)
    thread._is_closed = False  # as it was when the next caller looked
    with pytest.raises(shmring.ClosedError, match="this end is closed"):
        thread.call(int)


def test_an_engine_that_dies_fails_what_waits_and_the_next_one_is_used(start: Any, connect: Any) -> None:
    program = """
with threads.serve("test", slab_nbytes="1MiB", **options) as ring:
    print("ready", flush=True)
    for claim in ring:
        with claim:
            if claim.payload == "answer":
                claim.done("answered")
            else:
                time.sleep(60)
"""
    engine = start(program)
    assert engine.says() == ["ready"]
    client = connect(reconnect=True)
    assert client.request("answer", timeout=10) == "answered"
    waiting = Thread(client.request, "wait")
    until(lambda: client.statistics().in_flight == 1)
    engine.process.kill()
    with pytest.raises(shmring.EngineDeadError):
        waiting.ended()
    assert start(program).says() == ["ready"]
    client.wait_connected(30)
    assert client.request("answer", timeout=10) == "answered"
    assert client.statistics().reconnections == 1


@pytest.mark.usefixtures("no_new_segments")
@pytest.mark.parametrize("how", ["falls off the end", "sys.exit", "a finaliser closes"])
@pytest.mark.parametrize("served_by", ["thread", "both"])
def test_a_program_that_ends_without_closing_ends_quietly(how: str, served_by: str, nursery: Nursery, prelude: str) -> None:
    ending = {
        "falls off the end": "",
        "sys.exit": "import sys; sys.exit(0)",
        "a finaliser closes": """
class Holder:
    def __init__(self):
        self.ends, self.request, self.closed_error = [client, ring], client.request, shmring.ClosedError
    def __del__(self):
        try:
            self.request("the thread that would do this never runs again")
        except self.closed_error:
            for end in self.ends:
                end.close()
holder = Holder()
""",
    }[how]
    program = f"""
import threading
from tests.waiting import until
ring = threads.serve("test", slab_nbytes="1MiB", served_by={served_by!r}, **options)
client = threads.connect("test", **options)
threading.Thread(target=client.request, args=("unanswered",), daemon=True).start()
claim = ring.claim(10)
submission = client.submit(torch.ones(5000))
view = ring.claim(10).payload
slot = client.slot(5000)
tensor = slot.tensor((5000,), torch.uint8)
threading.Thread(target=ring.claim, daemon=True).start()
print("leaving", flush=True)
{ending}
"""
    ended = nursery.run_text(prelude + program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "leaving\n", "")


def test_kept_content_is_found_by_any_thread(serve: Any, connect: Any) -> None:
    ring = serve()
    client = connect()
    key = bytes(32)
    assert client.find(key) is None
    with client.slot(5000) as slot:
        view = slot.tensor((5000,), torch.uint8).fill_(2)
        with client.keep(key, {"x": view}) as kept:
            assert (kept.key, kept.nbytes) == (key, 5000)
        del view
    until(lambda: ring.statistics().kept_pinned == 0)
    threads_ = [Thread(client.find, key) for _ in range(8)]
    for thread in threads_:
        found = thread.ended()
        with found:
            assert int(found.payload["x"].sum()) == 10_000
        with pytest.raises(shmring.ClosedError):
            _ = found.payload
    until(lambda: ring.statistics().kept_pinned == 0)
    assert client.statistics().copies == 0
    with pytest.raises(ValueError, match="32 bytes"):
        client.find(b"short")
