"""What callers hand in: each argument of each public call, with values that are no such thing.

Each pair of a call and a value ends in the same way: the result is right, or a TypeError, ValueError or CapacityError names the
argument. Then nothing is held, and the timeouts of other callers still go off.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import dataclasses
import decimal
import fractions
import itertools
import math
import pickle
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shmring
import shmring.threads
from shmring import door
from shmring.client.deadlines import Deadlines
from shmring.core import compiled, messages
from shmring.door import count_of, parse_nbytes, seconds_of, timeout_of
from shmring.threads.loop_calls import LoopCall, keep
from tests.tables import for_each
from tests.waiting import eventually, turns

pytestmark = pytest.mark.filterwarnings("error::ResourceWarning")

HANGS_S = 60.0

VALUES: dict[str, Any] = {
    "nan": math.nan,
    "inf": math.inf,
    "-1": -1,
    "True": True,
    "a text": "5",
    "bytes": b"5",
    "None": None,
    "2**63": 2**63,
    "2**64": 2**64,
    "2**5000": 2**5000,
    "2**20000": 2**20000,
    "complex": 1j,
    "Decimal": decimal.Decimal("0.01"),
    "Decimal NaN": decimal.Decimal("NaN"),
    "Decimal sNaN": decimal.Decimal("sNaN"),
    "float32 NaN": np.float32(math.nan),
    "complex64": np.complex64(1),
    "int64": np.int64(8),
    "bool_": np.bool_(True),
    "object": object(),
    "a list": [5],
    "half a surrogate pair": "\ud800",
    "NUL": "a\0b",
    "1 MB of text": "x" * (1 << 20),
    "1 MB of bytes": b"x" * (1 << 20),
}

#: What a call may raise for such a value: with the argument's name in its text.
REFUSALS = (TypeError, ValueError, shmring.CapacityError)


# -- the functions ---------------------------------------------------------------------------------------------------------


@for_each(
    ("timeout", "seconds"),
    [
        (None, None),
        (0, 0.0),
        (3, 3.0),
        (0.25, 0.25),
        (-1, 0.0),
        (-math.inf, 0.0),
        (math.inf, None),
        (2**64, None),
        (2**5000, None),
        (-(2**5000), 0.0),
        (door.LONGEST_S, None),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (decimal.Decimal("0.5"), 0.5),
        (decimal.Decimal("Infinity"), None),
        (fractions.Fraction(1, 4), 0.25),
        (fractions.Fraction(10**400), None),
    ],
)
def test_a_timeout_is_seconds_or_none(timeout: Any, seconds: float | None) -> None:
    right = timeout_of(timeout)
    assert right == seconds
    assert right is None or type(right) is float


@for_each("timeout", [True, np.bool_(False), "5", b"5", 1j, np.complex64(1), object(), [1], torch.tensor(1.0), np.ones(1)])
def test_what_is_no_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(TypeError, match="timeout is a number of seconds, or None, not "):
        timeout_of(timeout)


@for_each("timeout", [math.nan, np.float32(math.nan), decimal.Decimal("NaN"), decimal.Decimal("sNaN")])
def test_nan_is_no_timeout(timeout: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout is a number of seconds, or None, not .*(?i:nan)"):
        timeout_of(timeout)


def test_an_options_time_has_a_range() -> None:
    assert seconds_of(np.int64(5), "linger_s") == 5.0
    assert seconds_of(math.inf, "linger_s") == door.LONGEST_S
    for wrong in (-0.1, math.nan, -math.inf):
        with pytest.raises(ValueError, match="linger_s"):
            seconds_of(wrong, "linger_s")
    with pytest.raises(ValueError, match=r"busy_poll_s must be between 0 and 0\.1 seconds, not 1"):
        seconds_of(1, "busy_poll_s", most=0.1)
    with pytest.raises(TypeError, match="linger_s is a number of seconds, not None"):
        seconds_of(None, "linger_s")


def test_sizes_and_counts_are_integers_of_any_type() -> None:
    for made in (np.int64(8), np.uint8(8), torch.tensor(8)):
        assert parse_nbytes(made) == count_of(made, "most") == 8
    with pytest.raises(shmring.CapacityError, match="nbytes is more than any memory has"):
        parse_nbytes(2**63, "nbytes")
    with pytest.raises(shmring.CapacityError, match="nbytes is more than any memory has"):
        parse_nbytes("9999999999TiB", "nbytes")
    with pytest.raises(ValueError, match="most must be at least 1, not 0"):
        count_of(0, "most")


def test_a_wrong_value_is_shown_in_one_line_and_cut() -> None:
    class Unshown:
        def __repr__(self) -> str:
            raise ValueError("not now")

    assert door.shown("a\n\u2028b") == r"'a\n\u2028b'"
    assert (len(door.shown("x" * 1000)), door.shown("x" * 1000)[-4:]) == (80, "x...")
    assert door.shown(Unshown()) == "<Unshown>"


def test_limits_that_stand_in_two_places_are_equal() -> None:
    assert door.MAX_NAME_CHARACTERS == compiled.MAX_NAME_CHARACTERS
    assert door.KEY_NBYTES == messages.KEY_NBYTES


# -- every argument of every call --------------------------------------------------------------------------------------


@dataclasses.dataclass
class World:
    """An engine that answers, another one that a test handles itself, and their peers."""

    ring: shmring.Ring
    idle: shmring.Ring
    client: shmring.Client
    other: shmring.Client
    place: dict[str, str]
    numbers: Iterator[int] = dataclasses.field(default_factory=itertools.count)

    @contextlib.asynccontextmanager
    async def claimed(self) -> AsyncIterator[shmring.Claim]:
        submission = await self.other.submit(1)
        try:
            with await self.idle.claim() as claim:
                yield claim
        finally:
            with contextlib.suppress(StopAsyncIteration, shmring.RemoteError, TimeoutError):
                await submission.next()
            submission.abort()

    async def for_a_moment(self, work: Any) -> None:
        """Of calls that go on until the ring is closed: lets one begin, and ends it."""
        task = asyncio.ensure_future(work)
        await turns(5)
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if not task.cancelled():
            task.result()


async def echo(claim: shmring.Claim) -> None:
    await claim.reply(claim.payload)


async def never() -> None:
    await asyncio.Event().wait()


async def batch(claims: list[shmring.Claim]) -> list[object]:
    return [claim.payload for claim in claims]


async def leave(opened: Any) -> None:
    """Awaits something, and closes it."""
    opened = await opened if isinstance(opened, Awaitable) else opened
    for each in opened if isinstance(opened, list) else [opened]:
        closing = None if each is None or not hasattr(each, "close") else each.close()
        if closing is not None:
            await closing


async def used(submission: Any) -> None:
    submission = await submission if isinstance(submission, Awaitable) else submission
    await submission.result()


async def all_of(stream: Any) -> None:
    async for reply in stream:
        del reply


@pytest.fixture
async def world(serve: Any, connect: Any, socket_dir: Path) -> World:
    ring = await serve(echo, calls={"never": never})
    idle = await serve(name="idle", broadcast_nbytes="64KiB")
    return World(ring, idle, await connect(), await connect(name="idle"), {"socket_dir": str(socket_dir)})


Try = Callable[[World, Any], Awaitable[Any]]
KEY = bytes(32)
BYTES = torch.zeros(2000)

#: What tries each call with a value, and the argument that an error names.
Tries = dict[str, tuple[str, Try]]


def tries(call: str, arguments: str, attempt: Callable[..., Awaitable[Any]]) -> Tries:
    """Of a call: each of these arguments, which an attempt takes by its name."""
    return {f"{call} {name}": (name, lambda w, v, name=name: attempt(w, **{name: v})) for name in arguments.split()}


CLIENT: Tries = {
    **tries("request", "timeout request_id key engine retry", lambda w, **o: w.client.request(1, **o)),
    **tries("stream", "timeout request_id key engine retry", lambda w, **o: all_of(w.client.stream(1, **o))),
    **tries("submit", "request_id key engine", lambda w, **o: used(w.client.submit(1, **o))),
    **tries("submit_nowait", "request_id key engine", lambda w, **o: used(w.client.submit_nowait(1, **o))),
    "abort": ("request_id", lambda w, v: now(w.client.abort(v))),
    "abort several": ("request_id", lambda w, v: now(w.client.abort([v]))),
    **tries("call", "method", lambda w, method: w.client.call(method)),
    **tries("call", "engine", lambda w, **o: w.client.call("never", timeout=0, **o)),
    **tries("call", "timeout", lambda w, **o: w.for_a_moment(w.client.call("never", **o))),
    **tries("find", "key timeout engine", lambda w, key=KEY, **o: leave(w.client.find(key, **o))),
    **tries("keep", "key timeout engine", lambda w, key=KEY, **o: leave(w.client.keep(key, BYTES, **o))),
    **tries("slot", "nbytes timeout drain device key engine", lambda w, nbytes=8, **o: leave(w.client.slot(nbytes, **o))),
    **tries("slot_nowait", "nbytes device ask key engine", lambda w, nbytes=8, **o: leave(w.client.slot_nowait(nbytes, **o))),
    "slots sizes": ("size", lambda w, v: leave(w.client.slots(v))),
    "slots a size": ("size", lambda w, v: leave(w.client.slots([v, v, v, v, v]))),
    **tries("slots", "timeout engine", lambda w, **o: leave(w.client.slots([8], **o))),
    "check_capacity": ("size", lambda w, v: now(w.client.check_capacity(v, v))),
    **tries("check_capacity", "engine", lambda w, engine: now(w.client.check_capacity(8, engine=engine))),
    **tries("choose", "key", lambda w, key: now(w.client.choose(key=key))),
    **tries("wait_connected", "timeout engine", lambda w, **o: w.client.wait_connected(**o)),
    **tries("wait_prefaulted", "timeout", lambda w, timeout: w.client.wait_prefaulted(timeout)),
    "tensor shape": ("shape", lambda w, v: in_slot(w, lambda slot: slot.tensor(v, torch.uint8))),
    "tensor extent": ("shape", lambda w, v: in_slot(w, lambda slot: slot.tensor((v,), torch.uint8))),
    "tensor dtype": ("dtype", lambda w, v: in_slot(w, lambda slot: slot.tensor((1,), v))),
    "array extent": ("shape", lambda w, v: in_slot(w, lambda slot: slot.array((v,), "u1"))),
    **tries("inspect", "name socket_dir timeout", lambda w, **o: shmring.inspect(**{"name": "idle"} | w.place | o)),
    "connect name": ("name", lambda w, v: leave(shmring.connect(v, connect_timeout_s=0, **w.place))),
    "connect names": ("name", lambda w, v: leave(shmring.connect(["idle", v], **w.place))),
    **tries("connect", "route", lambda w, route: leave(shmring.connect(["idle"], route=route, **w.place))),
    **tries("connect", "config", lambda w, config: now(shmring.connect("idle", config))),
    **tries(
        "connect",
        "description connect_timeout_s lease_idle_s",
        lambda w, **o: leave(shmring.connect("idle", **w.place, **o)),
    ),
}

RING: Tries = {
    **tries("claim_many", "most linger_s", lambda w, most=2, **o: w.for_a_moment(w.idle.claim_many(most, **o))),
    **tries("run", "max_concurrency", lambda w, max_concurrency: w.for_a_moment(w.idle.run(echo, max_concurrency))),
    **tries("run_batches", "most linger_s", lambda w, most=2, **o: w.for_a_moment(w.idle.run_batches(batch, most, **o))),
    **tries(
        "wait_workers", "count timeout", lambda w, count=1, timeout=None: w.for_a_moment(w.idle.wait_workers(count, timeout))
    ),
    **tries("broadcast", "to timeout", lambda w, **o: w.idle.broadcast(1, **o)),
    "broadcast to ranks": ("rank", lambda w, v: w.idle.broadcast(1, to=[v])),
    **tries("broadcast_nowait", "to", lambda w, to: now(w.idle.broadcast_nowait(1, to=to))),
    **tries("gather", "to timeout", lambda w, **o: w.idle.gather(1, **o)),
    **tries("drop_worker", "rank reason", lambda w, rank=7, reason="": now(w.idle.drop_worker(rank, reason))),
    **tries("drain", "timeout", lambda w, timeout: of_a_ring(w, lambda ring: ring.drain(timeout))),
    **tries("close", "reason", lambda w, reason: of_a_ring(w, lambda ring: ring.close(reason))),
    "add_to_snapshots": ("describe_program", lambda w, v: of_a_ring(w, lambda ring: now(ring.add_to_snapshots(v)))),
    **tries("injector", "name", lambda w, name: leave(now(w.idle.injector(name)))),
    "fail": ("error", lambda w, v: on_claim(w, lambda claim: now(claim.fail(v)))),
    "time_out": ("message", lambda w, v: on_claim(w, lambda claim: now(claim.time_out(v)))),
    "on_abort": ("callback", lambda w, v: on_claim(w, lambda claim: now(claim.on_abort(v)))),
    **tries("share", "to timeout", lambda w, **o: on_claim(w, lambda claim: claim.share(**o))),
    **tries(
        "serve", "name calls", lambda w, name="made", **o: leave(shmring.serve(name, slab_nbytes="256KiB", **w.place, **o))
    ),
    **tries("serve", "config", lambda w, config: now(shmring.serve("made", config))),
    **tries("serve", "socket_dir", lambda w, socket_dir: now(shmring.transport.listener.socket_path("made", socket_dir))),
    "join name": ("name", lambda w, v: leave(shmring.join(v, 0, connect_timeout_s=0, **w.place))),
    **tries("join", "rank label", lambda w, rank=0, **o: leave(shmring.join("idle", rank, **w.place, **o))),
    **tries("join", "config", lambda w, config: now(shmring.join("idle", 0, config))),
}


async def now(result: Any) -> Any:
    return result


async def in_slot(world: World, use: Callable[[shmring.Slot], Any]) -> None:
    async with world.client.slot(64) as slot:
        use(slot)


async def on_claim(world: World, use: Callable[[shmring.Claim], Any]) -> None:
    async with world.claimed() as claim:
        await use(claim)


async def of_a_ring(world: World, use: Callable[[shmring.Ring], Any]) -> None:
    name = f"made-{next(world.numbers)}"
    async with shmring.serve(name, **world.place, slab_nbytes="256KiB", prefault=False) as ring:
        await use(ring)


#: How a call may end otherwise, with a value that is a right one.
OTHERWISE = (TimeoutError, shmring.WouldBlock, shmring.EngineDeadError, shmring.WorkerLostError, shmring.RemoteError)


@for_each("calls", [CLIENT, RING], ids=["client", "ring"])
@pytest.mark.both_loops
async def test_each_argument_is_right_or_refused_by_name(calls: Tries, world: World) -> None:
    wrong = []
    for call, (argument, attempt) in calls.items():
        for name, value in VALUES.items():
            try:
                async with asyncio.timeout(HANGS_S) as limit:
                    await attempt(world, value)
            except REFUSALS as error:
                if argument not in str(error) or len(str(error)) > 500:
                    wrong.append(f"{call} = {name}: {type(error).__name__}: {str(error)[:200]}")
            except OTHERWISE as error:
                if limit.expired():
                    wrong.append(f"{call} = {name}: it hangs")
                elif len(str(error)) > 1000:
                    wrong.append(f"{call} = {name}: {type(error).__name__} of {len(str(error))} characters")
            except Exception as error:  # noqa: BLE001 - each is a finding
                wrong.append(f"{call} = {name}: {type(error).__name__}: {str(error)[:200]}")
        with pytest.raises(TimeoutError):  # other callers' still go off
            await world.client.call("never", timeout=0.001)
        await eventually(lambda: not held_of(world))
    assert not wrong, "\n" + "\n".join(wrong)
    assert not world.client._deadlines._heap


def held_of(world: World) -> dict[str, int]:
    names = ("slots_writing", "slots_submitted", "waiting", "in_flight", "reply_slots_held", "kept_pins")
    numbers = [world.client.statistics(), world.other.statistics()]
    return {name: held for name in names if (held := sum(getattr(each, name) for each in numbers))}


@for_each("kind", [shmring.RingConfig, shmring.ClientConfig, shmring.WorkerConfig])
def test_each_option_is_right_or_refused_by_name(kind: Any) -> None:
    wrong = []
    for field, (name, value) in itertools.product(dataclasses.fields(kind), VALUES.items()):
        try:
            config = kind(**{field.name: value})
        except REFUSALS as error:
            if field.name not in str(error) or len(str(error)) > 500:
                wrong.append(f"{field.name} = {name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            made = getattr(config, field.name)
            if field.name.endswith("_s") and type(made) is not float:
                wrong.append(f"{field.name} = {name} is {made!r}")
            if field.name.endswith("_nbytes") and made is not None and type(made) is not int:
                wrong.append(f"{field.name} = {name} is {made!r}")
            if field.name.startswith("max_") and made is not None and type(made) is not int:
                wrong.append(f"{field.name} = {name} is {made!r}")
    assert not wrong, "\n" + "\n".join(wrong)


# -- the same, for threads -------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class ThreadsWorld:
    """A ring that threads serve, a client and a worker of it."""

    ring: shmring.threads.Ring
    client: shmring.threads.Client
    worker: shmring.threads.Worker

    def answered(self, use: Callable[[shmring.threads.Claim, shmring.threads.Submission], object]) -> None:
        """Makes a request, and lets a function have both sides of it."""
        submission = self.client.submit(1)
        try:
            with self.ring.claim(HANGS_S) as claim:
                use(claim, submission)
        finally:
            submission.abort()

    def told(self, use: Callable[[shmring.threads.Message], object]) -> None:
        self.ring.broadcast(1, timeout=HANGS_S)
        with self.worker.receive(HANGS_S) as message:
            use(message)


def finished(claim: shmring.threads.Claim, wait: Callable[[], object]) -> None:
    claim.done(1)
    wait()


@pytest.fixture(params=["thread", "both"])
def threads_world(socket_dir: Path, request: pytest.FixtureRequest) -> Iterator[ThreadsWorld]:
    place: Any = {"socket_dir": str(socket_dir)}
    options: Any = {"slab_nbytes": "1MiB", "broadcast_nbytes": "64KiB", "served_by": request.param}
    with (
        shmring.threads.serve("threads", **options, **place) as ring,
        shmring.threads.connect("threads", **place) as client,
        shmring.threads.join("threads", 0, **place) as worker,
    ):
        ring.wait_workers(1, HANGS_S)
        yield ThreadsWorld(ring, client, worker)


THREADS: dict[str, tuple[str, Callable[[ThreadsWorld, Any], object]]] = {
    "claim timeout": ("timeout", lambda w, v: w.ring.claim(v)),
    "take client_id": ("client_id", lambda w, v: w.ring.take(v, 1, 0)),
    "take request_id": ("request_id", lambda w, v: w.ring.take(w.client.client_id, v, 0)),
    "take timeout": ("timeout", lambda w, v: w.ring.take(1 << 40, 1, v)),
    "claim reply timeout": ("timeout", lambda w, v: w.answered(lambda claim, _: claim.reply(1, timeout=v))),
    "claim done timeout": ("timeout", lambda w, v: w.answered(lambda claim, _: claim.done(1, timeout=v))),
    "claim fail": ("error", lambda w, v: w.answered(lambda claim, _: claim.fail(v))),
    "claim time_out": ("message", lambda w, v: w.answered(lambda claim, _: claim.time_out(v))),
    "claim on_abort": ("callback", lambda w, v: w.answered(lambda claim, _: claim.on_abort(v))),
    "next timeout": ("timeout", lambda w, v: w.answered(lambda c, s: finished(c, lambda: s.next(timeout=v)))),
    "result timeout": ("timeout", lambda w, v: w.answered(lambda c, s: finished(c, lambda: s.result(timeout=v)))),
    "wait timeout": ("timeout", lambda w, v: w.answered(lambda c, s: finished(c, lambda: s.wait(timeout=v)))),
    "gather to": ("to", lambda w, v: unanswered(w, lambda: w.ring.gather(1, to=v, timeout=0))),
    "broadcast timeout": ("timeout", lambda w, v: left(w, lambda: w.ring.broadcast(1, timeout=v))),
    "broadcast to": ("to", lambda w, v: left(w, lambda: w.ring.broadcast(1, to=v))),
    "receive timeout": ("timeout", lambda w, v: received(lambda: w.worker.receive(v))),
    "receive busy_poll_s": ("busy_poll_s", lambda w, v: received(lambda: w.worker.receive(0, busy_poll_s=v))),
    "message reply timeout": ("timeout", lambda w, v: w.told(lambda message: message.reply(1, timeout=v))),
    "request timeout": ("timeout", lambda w, v: w.client.request(1, timeout=0 if v is None else v)),
    "submit timeout": ("timeout", lambda w, v: w.client.submit(1, timeout=v).abort()),
    "submit request_id": ("request_id", lambda w, v: w.client.submit(1, request_id=v).abort()),
    "slot timeout": ("timeout", lambda w, v: w.client.slot(8, timeout=v).close()),
    "slot nbytes": ("nbytes", lambda w, v: w.client.slot(v).close()),
    "serve untaken_s": ("untaken_s", lambda w, v: shmring.threads.serve("x", untaken_s=v, served_by="x")),
    "serve served_by": ("served_by", lambda w, v: shmring.threads.serve("x", served_by=v, socket_dir="/nowhere")),
    "join rank": ("rank", lambda w, v: None if v is None else shmring.threads.join("x", v, connect_timeout_s=0)),
}


def received(receive: Callable[[], shmring.threads.Message]) -> None:
    receive().leave()


def left(world: ThreadsWorld, send: Callable[[], object]) -> None:
    send()
    received(lambda: world.worker.receive(HANGS_S))


def unanswered(world: ThreadsWorld, gather: Callable[[], object]) -> None:
    try:
        gather()
    except shmring.WorkersBehindError:  # but it was sent
        received(lambda: world.worker.receive(HANGS_S))


#: These wait without end, or as long as the value says: a right one is not tried.
LONG = {"inf", "None", "2**63", "2**64", "2**5000", "2**20000", "int64"}
WAITS = {"claim timeout", "receive timeout", "request timeout"}


def test_each_argument_of_a_threads_call_is_right_or_refused_by_name(threads_world: ThreadsWorld) -> None:
    wrong: list[str] = []

    def attempt_all() -> None:
        for (call, (argument, attempt)), (name, value) in itertools.product(THREADS.items(), VALUES.items()):
            if call in WAITS and name in LONG:
                continue
            at[0] = f"{call} = {name}"
            try:
                attempt(threads_world, value)
            except REFUSALS as error:
                if argument not in str(error) and "served_by" not in str(error):
                    wrong.append(f"{at[0]}: {type(error).__name__}: {str(error)[:200]}")
            except (*OTHERWISE, shmring.AbortedError, shmring.LocalProtocolError, OSError, StopIteration):
                pass
            except Exception as error:  # noqa: BLE001 - each is a finding
                wrong.append(f"{at[0]}: {type(error).__name__}: {str(error)[:200]}")

    at = [""]
    thread = threading.Thread(target=attempt_all, daemon=True)
    thread.start()
    thread.join(HANGS_S)
    assert not thread.is_alive(), f"it waits for ever: {at[0]}"
    assert not wrong, "\n" + "\n".join(wrong)
    with pytest.raises(TimeoutError):
        threads_world.ring.claim(0.01)


@pytest.mark.parametrize("served_by", ["thread", "callers"])
def test_a_listed_call_is_answered_whatever_fails_in_the_loop(socket_dir: Path, served_by: Any) -> None:
    with shmring.threads.serve("x", socket_dir=str(socket_dir), slab_nbytes="256KiB", served_by=served_by) as ring:

        class Failing(LoopCall):
            def begin(self) -> None:
                raise RuntimeError("before it began")

        with pytest.raises(RuntimeError, match="before it began"):
            ring._thread.result_of(Failing(keep, (None,), keep))

        class Ending(LoopCall):
            def begin(self) -> None:
                self.on_end += [seen.set, lambda: 1 / 0, seen_too.set]
                super().begin()

        seen, seen_too = threading.Event(), threading.Event()
        with contextlib.suppress(ZeroDivisionError):
            assert ring._thread.result_of(Ending(int, ("5",), keep)) == 5
        assert seen.is_set()
        assert seen_too.is_set()
        ring._thread._loop.set_exception_handler(lambda *_: None)
        ring._thread.post(lambda: 1 / 0)
        assert ring.statistics().clients == 0  # whoever stands behind it is still served


def test_a_result_that_cant_be_wrapped_fails_its_call(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        shmring.threads.serve("x", socket_dir=str(socket_dir), slab_nbytes="1MiB"),
        shmring.threads.connect("x", socket_dir=str(socket_dir)) as client,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(shmring.threads.Submission, "__init__", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                client.submit(1)
        client.submit(2).abort()


# -- pickle and copy -------------------------------------------------------------------------------------------------------


WAYS_TO_COPY = [pickle.dumps, copy.copy, copy.deepcopy]


@pytest.mark.both_loops
async def test_what_is_one_thing_is_neither_pickled_nor_copied(world: World) -> None:
    client, worker = world.client, await shmring.join("idle", 0, **world.place)
    kept = await client.keep(KEY, BYTES)
    acquiring = client.slot(8)
    async with client.slot(64) as slot, world.claimed() as claim:
        view = slot.tensor((4,), torch.float32).fill_(2.0)
        submission = await client.submit(1)
        await world.idle.broadcast(1)
        message = await worker.receive()
        ones = [client, client.engines["test"], world.ring, worker, slot, claim, submission, kept, message, acquiring]
        for one, way in itertools.product([*ones, shmring.connect("idle")], WAYS_TO_COPY):
            with pytest.raises(TypeError, match=f"^a {type(one).__name__} can't be pickled or copied: "):
                way(one)
        with pytest.raises(TypeError, match=r"a Client can't be pickled or copied: .* connect in the new one"):
            copy.deepcopy({"client": client})
        copied = copy.deepcopy(view)
        assert copied.tolist() == [2.0, 2.0, 2.0, 2.0]
        message.leave()
        del view
    copied += 1  # it is memory of its own
    kept.close()
    await (await acquiring).__aexit__(None, None, None)
    assert await submission.result() == 1
    assert await client.request(1) == 1  # none of that has closed it
    await worker.close()


def test_nor_is_what_threads_hold(threads_world: ThreadsWorld) -> None:
    world = threads_world
    kept = world.client.keep(KEY, BYTES)
    with world.client.slot(64) as slot:

        def refuse(claim: shmring.threads.Claim, submission: shmring.threads.Submission) -> None:
            ones = [world.client, world.client.engines["threads"], world.ring, world.worker, slot, claim, submission, kept]
            for one, way in itertools.product(ones, WAYS_TO_COPY):
                with pytest.raises(TypeError, match=f"^a {type(one).__name__} can't be pickled or copied: "):
                    way(one)

        world.answered(refuse)
    kept.close()


# -- what callers have called back -----------------------------------------------------------------------------------------


CALLER: contextvars.ContextVar[str] = contextvars.ContextVar("CALLER", default="nobody")


@pytest.mark.both_loops
async def test_an_abort_is_told_in_the_context_of_who_asked(world: World) -> None:
    seen: list[str] = []

    async def handle(caller: str, claim: shmring.Claim, *context: contextvars.Context) -> None:
        CALLER.set(caller)
        for each in context or (None,):
            claim.on_abort(lambda: seen.append(CALLER.get()), context=each)

    CALLER.set("the test")
    submission = await world.other.submit(1)
    given = contextvars.Context()
    given.run(CALLER.set, "the given one")
    with await world.idle.claim() as claim:
        await asyncio.gather(*(asyncio.create_task(handle(caller, claim)) for caller in ("one", "two")))
        await asyncio.create_task(handle("three", claim, given))
        submission.abort()
        await eventually(lambda: len(seen) == 3)
        claim.on_abort(lambda: seen.append(CALLER.get()))  # it was aborted: at once
        claim.on_abort(lambda: seen.append(CALLER.get()), context=given)
    assert seen == ["one", "two", "the given one", "the test", "the given one"]


@pytest.mark.both_loops
async def test_a_control_call_sees_the_context_of_who_serves(socket_dir: Path) -> None:
    async def caller() -> str:
        here, before = "the call", CALLER.get()
        CALLER.set(here)
        return before

    CALLER.set("who serves")
    place = {"socket_dir": str(socket_dir)}
    async with shmring.serve("told", calls={"caller": caller}, slab_nbytes="256KiB", **place) as ring:
        ring.add_to_snapshots(lambda: {"caller": CALLER.get()})
        CALLER.set("who calls")
        async with shmring.connect("told", **place) as client:
            assert [await client.call("caller") for _ in range(2)] == ["who serves"] * 2
        assert (await shmring.inspect("told", **place)).program == {"caller": "who serves"}
        assert CALLER.get() == "who calls"


def test_what_threads_have_called_back_sees_their_context(socket_dir: Path) -> None:
    place: Any = {"socket_dir": str(socket_dir)}

    async def caller() -> str:
        return CALLER.get()

    def serve_and_be_told() -> None:
        CALLER.set("who serves")
        with (
            shmring.threads.serve("told", calls={"caller": caller}, slab_nbytes="1MiB", **place) as ring,
            shmring.threads.connect("told", **place) as client,
        ):
            assert client.call("caller") == "who serves"
            submission = client.submit(1)
            told, seen = threading.Event(), []
            with ring.claim(HANGS_S) as claim:
                CALLER.set("who works")
                claim.on_abort(lambda: (seen.append(CALLER.get()), told.set()))
                CALLER.set("who aborts")
                submission.abort()
                assert told.wait(HANGS_S)
            assert seen == ["who works"]

    contextvars.copy_context().run(serve_and_be_told)


class Begun(Coroutine[Any, Any, Any]):
    """A coroutine that has made its first step already, and waits in what that returned."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_in: Any) -> None:
        self._coroutine, self._waits_in, self._is_given = coroutine, waits_in, False

    def send(self, value: Any) -> Any:
        if self._is_given:
            return self._coroutine.send(value)
        self._is_given = True
        return self._waits_in

    def throw(self, *error: Any) -> Any:
        self._is_given = True
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        raise NotImplementedError


def begin_at_once(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Future[Any]:
    """What ``asyncio.eager_task_factory`` of Python 3.12 does: a task's first step is made where the task is created."""
    try:
        waits_in = coroutine.send(None)
    except StopIteration as stopped:
        done = loop.create_future()
        done.set_result(stopped.value)
        return done
    return asyncio.Task(Begun(coroutine, waits_in), loop=loop, **options)


@pytest.mark.both_loops
async def test_a_ring_that_is_closed_by_what_it_hears_claims_nothing_more(socket_dir: Path) -> None:
    """With tasks that begin at once, a control call runs while the record that carries it is heard. What waits is still there
    when it has run: the ring ends what it has when the peer has gone that has said nothing yet.
    """
    closing: list[asyncio.Future[None]] = []

    async def stop() -> None:
        closing.append(asyncio.ensure_future(ring.close()))
        await asyncio.sleep(0)

    place = {"socket_dir": str(socket_dir)}
    ring = await shmring.serve("stops", calls={"stop": stop}, slab_nbytes="1MiB", **place)
    client = await shmring.connect("stops", **place)
    await client.wait_prefaulted()
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(socket_dir / "stops.sock"))
        await eventually(lambda: ring._shell._handshakes._running)
        submission = client.submit_nowait(1)
        call = client.call("stop")
        answer = call.send(None)  # its record is written, and the loop has had no turn since
        loop.set_task_factory(begin_at_once)
        try:
            with pytest.raises(shmring.ClosedError):
                await ring.claim()
            assert closing, "it was closed by what it heard"
        finally:
            loop.set_task_factory(None)
    await closing[0]
    await asyncio.wait([answer])
    assert answer.exception() is None, "the call itself ends before the ring does"
    call.close()
    with pytest.raises((shmring.EngineDeadError, shmring.AbortedError)):
        await submission.result()
    await client.close()


@pytest.mark.both_loops
async def test_an_abort_callback_may_close_the_ring_fail_or_abort_others(world: World) -> None:
    errors: list[Any] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: errors.append(context["exception"]))
    first, second, third = [await world.other.submit(number) for number in range(3)]
    claims = [await world.idle.claim() for _ in range(3)]
    closing: list[asyncio.Future[None]] = []
    claims[0].on_abort(lambda: 1 / 0)
    claims[0].on_abort(second.abort)
    claims[1].on_abort(lambda: closing.append(asyncio.ensure_future(world.idle.close())))
    first.abort()
    await eventually(lambda: closing)
    await closing[0]
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert all(claim.aborted for claim in claims)
    for claim in claims:
        claim.release()
    with pytest.raises((shmring.EngineDeadError, shmring.AbortedError)):
        await third.result()
    loop.set_exception_handler(None)


@pytest.mark.both_loops
async def test_a_timer_that_cant_be_set_leaves_other_timeouts_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines = Deadlines()
    loop = asyncio.get_running_loop()

    async def wait(timeout: float) -> None:
        with deadlines.within(timeout, lambda: "nothing"):
            await asyncio.Event().wait()

    other = asyncio.create_task(wait(0.2))
    await asyncio.sleep(0)
    with monkeypatch.context() as patched:
        patched.setattr(type(deadlines), "_expire", property(lambda _: 1 / 0))  # as of a loop that refuses it
        with pytest.raises(ZeroDivisionError):
            await wait(0.1)
    assert len(deadlines._heap) == 1
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(other, HANGS_S)
    assert loop.is_running()


@pytest.mark.both_loops
async def test_one_that_cant_say_what_it_waits_for_takes_no_timeout_away() -> None:
    deadlines = Deadlines()
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)

    def waits_for() -> str:
        raise ValueError("it can't be said")

    async def wait(timeout: float, what: Callable[[], str]) -> None:
        with deadlines.within(timeout, what):
            await asyncio.Event().wait()

    waiting = [wait(0.01, waits_for), wait(0.01, lambda: "nothing"), wait(0.02, lambda: "nothing")]
    results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), HANGS_S)
    assert [type(result) for result in results] == [TimeoutError] * 3
