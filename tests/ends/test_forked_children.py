"""What a forked child may do with the ends that it has inherited: with each public name of each of them.

A child has copies of all objects, and neither the memory nor the rings nor the right to the sockets that they stand for. So
each call there raises ``ClosedError``, or is harmless: it returns, and its parent does not notice. No call crashes, waits for
ever, or says something else. A name that is new is in none of the lists below, and fails the first test until somebody has
thought about it.

A call that is refused changes nothing, so these calls are made in one child for each end, one after the other. Each harmless
call is made in a child of its own, and the properties of an end are read in one. The children are forked while everything is in
use: messages are outstanding, replies and messages wait to be taken, slots are held, content is pinned.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import threads
from tests.claiming import claimed
from tests.nursery import Nursery
from tests.tables import for_each

pytestmark = pytest.mark.timeout(600)  # some 100 forks, in the first test that needs what came of them

_KEY = b"k" * 32
_held_slots: list[Any] = []  # the last one is of the client that is asked
_PATIENCE_S = 120  # after which a child that waits is ended; none takes a tenth of a second

Call = Callable[[Any], object]
_ERROR = ValueError("the engine's own")

_REQUESTS: dict[str, Call] = {
    "request": lambda client: client.request(1),
    "stream": lambda client: client.stream(1),
    "submit": lambda client: client.submit(1),
    "submit (named)": lambda client: client.submit(1, request_id="named"),
    "submit_nowait": lambda client: client.submit_nowait(1),
    "abort": lambda client: client.abort("named"),
    "slot": lambda client: client.slot(1),
    "slot_nowait": lambda client: client.slot_nowait(1),
    "slots": lambda client: client.slots([1, 2]),
    "find": lambda client: client.find(_KEY),
    "find (unknown)": lambda client: client.find(b"u" * 32),
    "find_many": lambda client: client.find_many([_KEY, b"u" * 32]),
    "find_nowait": lambda client: client.find_nowait(_KEY),
    "wait_kept": lambda client: client.wait_kept(_KEY, engine=client.names[0]),
    "wait_kept (unknown)": lambda client: client.wait_kept(b"u" * 32, engine=client.names[0]),
    "keep": lambda client: client.keep(b"n" * 32, torch.ones(1000)),
    "keep_nowait": lambda client: client.keep_nowait(b"n" * 32, torch.ones(1000), _held_slots[-1]),
    "check_capacity": lambda client: client.check_capacity(1),
    "wait_connected": lambda client: client.wait_connected(),
    "wait_prefaulted": lambda client: client.wait_prefaulted(),
    "call": lambda client: client.call("method", engine=client.names[0]),
    "choose": lambda client: client.choose(),
    "choose (by key)": lambda client: client.choose(key="session"),
    "loads": lambda client: client.loads(),
    "statistics": lambda client: client.statistics(),
}
_REPLIES: dict[str, Call] = {
    "next": lambda submission: submission.next(),
    "result": lambda submission: submission.result(),
    "wait": lambda submission: submission.wait(),
}
_TENSORS: dict[str, Call] = {
    "tensor": lambda slot: slot.tensor((1,), torch.uint8),
    "array": lambda slot: slot.array((1,), "u1"),
}
_PAYLOADS: dict[str, Call] = {"payload": lambda message: message.payload, "beside": lambda message: message.beside}
_FAN_OUT: dict[str, Call] = {
    "broadcast": lambda ring: ring.broadcast(1),
    "broadcast (with a tensor)": lambda ring: ring.broadcast(torch.ones(5000)),
    "gather": lambda ring: ring.gather(1),
    "drop_worker": lambda ring: ring.drop_worker(0),
    "wait_workers": lambda ring: ring.wait_workers(2),
    "wait_workers (that are there)": lambda ring: ring.wait_workers(1),
    "claim": lambda ring: ring.claim(),
    "claim_nowait": lambda ring: ring.claim_nowait(),
    "statistics": lambda ring: ring.statistics(),
    "inspect": lambda ring: ring.inspect(),
    "add_to_snapshots": lambda ring: ring.add_to_snapshots(dict),
}

#: What raises ClosedError, by class: how each name is called. What stands in brackets behind a name is another way to call it.
REFUSED: dict[type, dict[str, Call]] = {
    shmring.Ring: {
        **_FAN_OUT,
        "broadcast_nowait": lambda ring: ring.broadcast_nowait(1),
        "broadcast_nowait (with a tensor)": lambda ring: ring.broadcast_nowait(torch.ones(5000)),
        "claim_many": lambda ring: ring.claim_many(2),
        "injector": lambda ring: ring.injector(),
        "run": lambda ring: ring.run(lambda claim: claim.reply(1)),
        "run_batches": lambda ring: ring.run_batches(lambda claims: claims, 2),
        "drain": lambda ring: ring.drain(),
        "__anext__": lambda ring: ring.__anext__(),
    },
    shmring.Claim: {
        "payload": lambda claim: claim.payload,
        "reply": lambda claim: claim.reply(1),
        "reply (with a tensor)": lambda claim: claim.reply(torch.ones(5000)),
        "reply_nowait": lambda claim: claim.reply_nowait(1),
        "done (with a reply)": lambda claim: claim.done(1),
        "share": lambda claim: claim.share(1),
        "share_nowait": lambda claim: claim.share_nowait(1),
        "to": lambda claim: claim.to("cuda:0"),
        "to_nowait": lambda claim: claim.to_nowait("cuda:0"),
    },
    shmring.Worker: {
        "receive": lambda worker: worker.receive(),
        "receive_nowait": lambda worker: worker.receive_nowait(),
        "__anext__": lambda worker: worker.__anext__(),
    },
    shmring.Message: {**_PAYLOADS, "reply": lambda message: message.reply(1)},
    shmring.Client: _REQUESTS,
    shmring.EngineConnection: {"statistics": lambda engine: engine.statistics()},
    shmring.Submission: _REPLIES,
    shmring.Slot: _TENSORS,
    shmring.Kept: {"payload": lambda kept: kept.payload},
    shmring.Keeping: {"wait": lambda keeping: keeping.wait()},
    threads.Ring: {
        **_FAN_OUT,
        "broadcast_nowait": lambda ring: ring.broadcast_nowait(1),
        "take": lambda ring: ring.take(1, 1),
        "take_named": lambda ring: ring.take_named("name"),
        "__next__": lambda ring: next(ring),
    },
    threads.Claim: {
        "payload": lambda claim: claim.payload,
        "reply": lambda claim: claim.reply(1),
        "done (with a reply)": lambda claim: claim.done(1),
        "share": lambda claim: claim.share(1),
        "share_nowait": lambda claim: claim.share_nowait(1),
    },
    threads.Worker: {
        "receive": lambda worker: worker.receive(),
        "engine_is_stopped": lambda worker: worker.engine_is_stopped,
        "receive_nowait": lambda worker: worker.receive_nowait(),
        "__next__": lambda worker: next(worker),
    },
    threads.Message: {**_PAYLOADS, "reply": lambda message: message.reply(1)},
    threads.Client: _REQUESTS,
    threads.EngineConnection: {"statistics": lambda engine: engine.statistics()},
    threads.Submission: _REPLIES,
    threads.Slot: _TENSORS,
    threads.Kept: {"payload": lambda kept: kept.payload},
    threads.Keeping: {"wait": lambda keeping: keeping.wait()},
}


def _left(end: Any) -> object:
    return end.__exit__(None, None, None)


def _left_in_loop(end: Any) -> object:
    return end.__aexit__(None, None, None)


_CLOSED: dict[str, Call] = {"close": lambda end: end.close()}
_ENDS: dict[str, Call] = {
    "fail": lambda claim: claim.fail(_ERROR),
    "time_out": lambda claim: claim.time_out("late"),
    "release": lambda claim: claim.release(),
    "done": lambda claim: claim.done(),
    "on_abort": lambda claim: claim.on_abort(lambda: None),
    "__exit__": _left,
    "__exit__ (with an error)": lambda claim: claim.__exit__(ValueError, _ERROR, None),
}

#: What returns: it ends something, which its parent must not notice, or only says what this object knows by itself.
HARMLESS: dict[type, dict[str, Call]] = {
    shmring.Ring: {**_CLOSED, "__aexit__": _left_in_loop},
    shmring.Claim: _ENDS,
    shmring.Worker: {**_CLOSED, "__aexit__": _left_in_loop},
    shmring.Message: {"leave": lambda message: message.leave(), "__exit__": _left},
    shmring.Client: {**_CLOSED, "__aexit__": _left_in_loop},
    shmring.EngineConnection: {},
    shmring.Submission: {"abort": lambda submission: submission.abort()},
    shmring.Slot: {**_CLOSED, "__exit__": _left, "__aexit__": _left_in_loop},
    shmring.Kept: {**_CLOSED, "__exit__": _left},
    shmring.Keeping: {},
    threads.Ring: {**_CLOSED, "__exit__": _left},
    threads.Claim: {**_ENDS, "use_on_gpu": lambda claim: claim.use_on_gpu()},
    threads.Worker: {**_CLOSED, "__exit__": _left},
    threads.Message: {"leave": lambda message: message.leave(), "__exit__": _left},
    threads.Client: {**_CLOSED, "__exit__": _left},
    threads.EngineConnection: {},
    threads.Submission: {"abort": lambda submission: submission.abort()},
    threads.Slot: {**_CLOSED, "__exit__": _left},
    threads.Kept: {**_CLOSED, "__exit__": _left},
    threads.Keeping: {},
}

PROPERTIES = "its properties, read one after the other"
_PROTOCOLS = ("__anext__", "__next__", "__exit__", "__aexit__")


def bare(name: str) -> str:
    return name.split(" ")[0]


def is_call(kind: type, name: str) -> bool:
    return callable(getattr(kind, name))


def names_of(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} | {name for name in _PROTOCOLS if hasattr(kind, name)}


def title(kind: type) -> str:
    return f"threads.{kind.__name__}" if kind.__module__.startswith("shmring.threads") else kind.__name__


@for_each("kind", REFUSED, ids=title)
def test_every_public_call_is_in_one_of_the_lists(kind: type) -> None:
    """Properties that are not listed are read below, too; a call that is new has to be put into one of the lists."""
    listed = [*map(bare, REFUSED[kind]), *map(bare, HARMLESS[kind])]
    calls = {name for name in names_of(kind) if is_call(kind, name)}
    assert calls - set(listed) == set(), "what does a forked child get of this?"
    assert set(listed) - names_of(kind) == set(), "this is gone"


# -- what is in use at the fork ----------------------------------------------------------------------------------------------


def outcomes_in_child(attempts: Mapping[Any, Callable[[], object]]) -> dict[Any, str]:
    """Makes calls in a forked child, one after the other. If one of them ends the child, the others are made in another child.

    Returns:
        What came of each: ``returned``, its error, or the signal that ended the child.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            for attempt in attempts.values():
                signal.alarm(_PATIENCE_S)
                try:
                    attempt()
                    outcome = "returned"
                except BaseException as error:  # noqa: BLE001 - that is what is asked for
                    outcome = f"{type(error).__name__}: {error}"
                os.write(writing, outcome.encode()[:1000].replace(b"\n", b" ") + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode().splitlines()
    finally:
        status = os.waitpid(child, 0)[1]
    outcomes = dict(zip(attempts, said, strict=False))
    if left := [name for name in attempts if name not in outcomes]:
        outcomes[left[0]] = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "no outcome"
        outcomes |= outcomes_in_child({name: attempts[name] for name in left[1:]}) if left[1:] else {}
    return outcomes


def carried_out(call: Call, end: Any) -> None:
    """Calls, and awaits or iterates over what that returns, in a loop of the child's own."""

    async def run() -> None:
        result = call(end)
        if inspect.isasyncgen(result):
            await anext(result)
        elif inspect.isgenerator(result):
            next(result)
        elif hasattr(result, "__await__"):
            await result

    asyncio.run(run())


def read(end: Any, names: Sequence[str]) -> None:
    """Reads properties, one after the other; what fails says which."""
    for name in names:
        try:
            value = getattr(end, name)
            str(value() if name.startswith("__") else value)
        except Exception as error:
            raise RuntimeError(f"{name}: {error!r}") from error


def outcomes_of(*ends: Any, left_out: Sequence[str] = ()) -> dict[tuple[type, str], str]:
    outcomes: dict[tuple[type, str], str] = {}
    for end in ends:
        kind = next(kind for kind in REFUSED if isinstance(end, kind))
        for calls in (REFUSED[kind], *({name: call} for name, call in HARMLESS[kind].items())):
            made = {(kind, name): functools.partial(carried_out, call, end) for name, call in calls.items()}
            outcomes |= outcomes_in_child(made)
        known = {*left_out, *(bare(name) for name in (*REFUSED[kind], *HARMLESS[kind]))}
        properties = [name for name in sorted(names_of(kind) - known) if not is_call(kind, name)]
        reading = functools.partial(read, end, [*properties, "__repr__", "__str__"])
        outcomes |= outcomes_in_child({(kind, PROPERTIES): reading})
    return outcomes


def outcomes_of_several(client: Any) -> dict[tuple[type, str], str]:
    """Of a client of several engines, which has no ``client_id`` and no ``epoch``."""
    outcomes = outcomes_of(client, left_out=("client_id", "epoch"))
    return {(kind, f"{name} (of several engines)"): outcome for (kind, name), outcome in outcomes.items()}


async def with_loops(options: dict[str, Any]) -> dict[tuple[type, str], str]:
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ring = await enter(shmring.serve("forking", slab_nbytes="8MiB", pin="off", inline_nbytes="1KiB", **options))
        worker = await enter(shmring.join("forking", 0, **options))
        client = await enter(shmring.connect("forking", **options))
        routing = await enter(shmring.connect(["forking", "absent"], **options))
        submission, claim = await claimed(ring, client, {"x": torch.ones(5000)}, request_id="named")
        await claim.reply(torch.ones(5000))
        while not submission.has_replied:
            await asyncio.sleep(0)
        unanswered = await client.submit("waits for a claim")
        slot = await client.slot(5000)
        _held_slots.append(slot)
        kept = await client.keep(_KEY, torch.ones(5000))
        given = await client.slot(5000)
        keeping = client.keep_nowait(b"g" * 32, given.tensor((5000,), torch.uint8), given)
        assert kept.payload.sum() == 5000
        await ring.broadcast(torch.ones(5000))
        gathering = asyncio.ensure_future(ring.gather("reply"))
        held = await worker.receive()
        message = await worker.receive()
        await ring.broadcast("not received")
        outcomes = outcomes_of(ring, claim, worker, message, client, client.engines["forking"], submission, slot, kept, keeping)
        outcomes |= outcomes_of_several(routing)
        waits = REFUSED[shmring.Submission] | {"abort": HARMLESS[shmring.Submission]["abort"]}
        for name in ("next", "result", "wait", "abort"):
            waiting = functools.partial(carried_out, waits[name], unanswered)
            outcomes |= outcomes_in_child({(shmring.Submission, f"{name} (no reply has come)"): waiting})

        # Nobody here has noticed.
        assert ring.statistics().clients == 2
        assert ring.statistics().broadcasts_outstanding == 3
        assert ring.ranks == (0,)
        assert not claim.aborted
        assert (await submission.next()).sum() == 5000
        with claim:
            assert claim.payload["x"].sum() == 5000
        with await ring.claim() as second:
            await second.reply(7)
        assert await unanswered.result() == 7
        with held:
            assert held.payload.sum() == 5000
        with message:
            await message.reply("replied")
        assert await gathering == ["replied"]
        with await worker.receive() as last:
            assert last.payload == "not received"
        slot.tensor((5000,), torch.uint8)
        slot.close()
        kept.close()
        await keeping.wait()
        return outcomes


def with_threads(options: dict[str, Any], served_by: Any = "thread") -> dict[tuple[type, str], str]:
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        ring = enter(
            threads.serve("forking", slab_nbytes="8MiB", pin="off", inline_nbytes="1KiB", served_by=served_by, **options)
        )
        worker = enter(threads.join("forking", 0, **options))
        client = enter(threads.connect("forking", **options))
        routing = enter(threads.connect(["forking", "absent"], **options))
        submission = client.submit({"x": torch.ones(5000)}, request_id="named")
        claim = ring.claim(30)
        claim.reply(torch.ones(5000))
        unanswered = client.submit("waits for a claim")
        slot = client.slot(5000)
        _held_slots.append(slot)
        kept = client.keep(_KEY, torch.ones(5000))
        given = client.slot(5000)
        keeping = client.keep_nowait(b"g" * 32, given.tensor((5000,), torch.uint8), given)
        ring.broadcast(torch.ones(5000))
        replies: list[Any] = []
        gathering = threading.Thread(target=lambda: replies.extend(ring.gather("reply", timeout=60)))
        gathering.start()
        held = worker.receive(30)
        message = worker.receive(30)
        ring.broadcast("not received")
        outcomes = outcomes_of(ring, claim, worker, message, client, client.engines["forking"], submission, slot, kept, keeping)
        outcomes |= outcomes_of_several(routing)

        assert ring.statistics().clients == 2
        assert ring.statistics().broadcasts_outstanding == 3
        assert not claim.aborted
        assert submission.next(timeout=30).sum() == 5000
        with claim:
            assert claim.payload["x"].sum() == 5000
        with ring.claim(30) as second:
            second.reply(7)
        assert unanswered.result(timeout=30) == 7
        with held:
            assert held.payload.sum() == 5000
        with message:
            message.reply("replied")
        gathering.join()
        assert replies == ["replied"]
        with worker.receive(30) as last:
            assert last.payload == "not received"
        slot.tensor((5000,), torch.uint8)
        slot.close()
        kept.close()
        keeping.wait(timeout=60)
        return outcomes


def say_outcomes(directory: str, *served_by: str) -> None:
    """What a program prints that a nursery starts: its children, some hundreds, are as small as it is.

    Args:
        directory: for sockets.
        served_by: who serves a ring for threads. Without it, ends in loops have their turn as well.
    """
    logging.getLogger("shmring.waiting").disabled = True  # on a busy machine, an end may wait for the other one for long
    options = {"socket_dir": directory}
    outcomes = with_threads(options, *served_by)
    if not served_by:
        outcomes |= asyncio.run(with_loops(options))
    print(json.dumps([(title(kind), name, outcome) for (kind, name), outcome in outcomes.items()]))


_KINDS = {title(kind): kind for kind in REFUSED}


def outcomes_in(nursery: Nursery, directory: str, *served_by: str) -> dict[tuple[type, str], str]:
    program = "import sys; from tests.ends.test_forked_children import say_outcomes; say_outcomes(*sys.argv[1:])"
    done = nursery.run_text(program, directory, *served_by)
    assert (done.returncode, done.stderr) == (0, "")
    return {(_KINDS[kind], name): outcome for kind, name, outcome in json.loads(done.stdout)}


@pytest.fixture(scope="module")
def outcomes(nursery: Nursery) -> Iterator[dict[tuple[type, str], str]]:
    directory = tempfile.mkdtemp(prefix="shmr-", dir="/tmp")
    try:
        yield outcomes_in(nursery, directory)
    finally:
        shutil.rmtree(directory)


def is_refused(outcome: str) -> bool:
    return outcome.startswith("ClosedError: ") and "forked" in outcome


@for_each("kind", REFUSED, ids=title)
def test_a_forked_child_is_refused(kind: type, outcomes: dict[tuple[type, str], str]) -> None:
    made = {name: outcome for (of, name), outcome in outcomes.items() if of is kind}
    to_refuse = {name for name in made if name not in HARMLESS[kind] and bare(name) in map(bare, REFUSED[kind])}
    assert to_refuse >= set(REFUSED[kind])
    assert {name: made[name] for name in to_refuse if not is_refused(made[name])} == {}


@for_each("kind", REFUSED, ids=title)
def test_what_a_forked_child_may_call_returns(kind: type, outcomes: dict[tuple[type, str], str]) -> None:
    made = {name: outcome for (of, name), outcome in outcomes.items() if of is kind}
    harmless = {name for name in made if name in HARMLESS[kind] or bare(name) not in map(bare, REFUSED[kind])}
    assert harmless >= {*HARMLESS[kind], PROPERTIES}
    assert {name: made[name] for name in harmless if made[name] != "returned"} == {}


def test_a_forked_child_gets_the_same_of_a_ring_that_its_callers_serve(
    outcomes: dict[tuple[type, str], str], nursery: Nursery, socket_dir: Path
) -> None:
    of_callers = outcomes_in(nursery, str(socket_dir), "both")
    assert {key: is_refused(outcome) for key, outcome in of_callers.items()} == {
        key: is_refused(outcomes[key]) for key in of_callers
    }
