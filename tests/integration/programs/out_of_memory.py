"""One allocation fails in the middle of a call: the first one, then the second one, until none does. Nothing may be lost.

``python -m tests.integration.programs.out_of_memory [CALL ...]`` writes a line for each call that it has tried:
``name: calls, how often memory was missing``, and for each loss another one that begins with ``LOST``.

What waits is tried as far as its first suspension. An event loop needs memory as well, and nothing can go on without it.
"""

from __future__ import annotations

import _testcapi
import asyncio
import contextlib
import gc
import inspect
import sys
import tempfile
import warnings
from collections.abc import AsyncIterator, Callable
from typing import Any

import torch

import shmring
from tests.sessions import session_of

_CALM = 6  # so many calls in a row without a missing allocation: it would have come by then
_SETTLE_S = 20.0

X = torch.ones(20_000, dtype=torch.uint8)  # goes in a slot
KEY = bytes(32)


class Ends:
    """A ring, a client of it, and a worker."""

    def __init__(self, ring: shmring.Ring, client: shmring.Client, worker: shmring.Worker) -> None:
        self.ring, self.client, self.worker = ring, client, worker

    def losses(self) -> list[str]:
        """What is not given back, though nobody has anything."""
        ring, client = self.ring.statistics(), self.client.statistics()
        numbers = {
            "the client's slots": client.slots_in_use,
            "slots of replies": client.reply_slots_held,
            "requests in flight": client.in_flight,
            "the engine's slots": ring.slots_in_use,
            "running": ring.running,
            "waiting": ring.waiting,
            "reply space": ring.reply_nbytes - ring.reply_free_nbytes,
            "pins": ring.kept_pinned,
            "messages": ring.broadcasts_outstanding,
        }
        return [f"{name}: {number}" for name, number in numbers.items() if number]

    def check_books(self) -> None:
        shell = self.ring._shell
        shell._book.check()
        for slots in session_of(self.client).slots:
            slots.book.check()


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Ends]:
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"socket_dir": directory, "connect_timeout_s": 60.0}
        async with (
            shmring.serve(
                "m", socket_dir=directory, slab_nbytes="1MiB", kept_nbytes="256KiB", broadcast_nbytes="256KiB"
            ) as ring,
            shmring.connect("m", **options) as client,
        ):
            worker = await shmring.join("m", 0, **options)
            await ring.wait_workers(1)
            yield Ends(ring, client, worker)
            await worker.close()


class Missing:
    """In its block, the allocations from number ``start`` to ``stop`` fail; ``seen`` then says whether that was noticed."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self.seen = False

    def __enter__(self) -> Missing:
        gc.collect()  # empties the interpreter's lists of objects that it keeps for reuse
        if self.stop:
            _testcapi.set_nomemory(self.start, self.stop)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        _testcapi.remove_mem_hooks()
        self.seen = isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate" in str(error))  # torch
        return self.seen


def first_step(awaitable: Any) -> Any:
    """Runs what is awaited as far as its first suspension, where it is cancelled; returns its result, if it has one."""

    async def run() -> Any:
        return await awaitable

    coroutine = run()
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    with contextlib.suppress(asyncio.CancelledError):
        coroutine.throw(asyncio.CancelledError())
    return None


def end(claim: shmring.Claim) -> None:
    """Ends a request, if it has not ended."""
    if not (claim.ended and claim.released):
        claim.fail(ValueError("memory was missing"))


async def read_out(submission: shmring.Submission) -> None:
    """Reads a request to its end."""
    with contextlib.suppress(shmring.RemoteError, shmring.AbortedError, StopAsyncIteration):
        while True:
            await submission.next()


async def answer_all(ends: Ends) -> None:
    """Ends the requests that have come."""
    await asyncio.sleep(0)
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            with ends.ring.claim_nowait():
                pass


# -- the calls ---------------------------------------------------------------------------------------------------------------


async def slot_nowait(ends: Ends, missing: Missing) -> None:
    slot = None
    with missing:
        slot = ends.client.slot_nowait(3000)
    if slot is not None:
        slot.close()


async def slot(ends: Ends, missing: Missing) -> None:
    slot = None
    with missing:
        slot = first_step(ends.client.slot(3000))
    if slot is not None:
        slot.close()


async def tensor_in_slot(ends: Ends, missing: Missing) -> None:
    with ends.client.slot_nowait(3000) as slot, missing:
        slot.tensor((100,), torch.float32)


async def leaving_slot(ends: Ends, missing: Missing) -> None:
    slot = ends.client.slot_nowait(3000)
    with missing:
        slot.close()
    slot.close()


async def submit_nowait(ends: Ends, missing: Missing) -> None:
    submission = None
    with missing:
        submission = ends.client.submit_nowait({"x": X})
    await answer_all(ends)
    if submission is not None:
        await read_out(submission)


async def submit_in_place(ends: Ends, missing: Missing) -> None:
    submission = None
    with ends.client.slot_nowait(20_000) as slot:
        x = slot.tensor((20_000,), torch.uint8)
        with missing:
            submission = ends.client.submit_nowait({"x": x})
        await answer_all(ends)
        if submission is not None:
            await read_out(submission)


async def submit(ends: Ends, missing: Missing) -> None:
    submission = None
    with missing:
        submission = first_step(ends.client.submit({"x": X}))
    await answer_all(ends)
    if submission is not None:
        await read_out(submission)


async def request(ends: Ends, missing: Missing) -> None:
    with missing:
        first_step(ends.client.request({"x": X}))
    await answer_all(ends)


async def abort(ends: Ends, missing: Missing) -> None:
    submission = ends.client.submit_nowait({"x": X})
    with missing:
        submission.abort()
    submission.abort()
    await answer_all(ends)


async def claim_nowait(ends: Ends, missing: Missing) -> None:
    submission = ends.client.submit_nowait({"x": X})
    claim = None
    with missing:
        claim = ends.ring.claim_nowait()
    if claim is not None:
        end(claim)
    await answer_all(ends)
    await read_out(submission)


async def claim(ends: Ends, missing: Missing) -> None:
    submission = ends.client.submit_nowait({"x": X})
    claim = None
    with missing:
        claim = first_step(ends.ring.claim())
    if claim is not None:
        end(claim)
    await answer_all(ends)
    await read_out(submission)


async def claim_many(ends: Ends, missing: Missing) -> None:
    submissions = [ends.client.submit_nowait({"x": X}) for _ in range(3)]
    claims: Any = None
    with missing:
        claims = first_step(ends.ring.claim_many(3))
    for claim in claims or ():
        end(claim)
    claims = claim = None
    await answer_all(ends)
    for submission in submissions:
        await read_out(submission)


async def _claimed(ends: Ends, act: Callable[[shmring.Claim], object], missing: Missing) -> None:
    submission = ends.client.submit_nowait({"x": X})
    claim = await ends.ring.claim()
    with missing:
        act(claim)
    end(claim)
    await read_out(submission)


async def reply_nowait(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: claim.reply_nowait({"x": X}), missing)


async def reply(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: first_step(claim.reply({"x": X})), missing)


async def done(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: claim.done(), missing)


async def done_with_reply(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: first_step(claim.done({"x": X})), missing)


async def release(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: claim.release(), missing)


async def fail(ends: Ends, missing: Missing) -> None:
    error = ValueError("no")
    await _claimed(ends, lambda claim: claim.fail(error), missing)


async def share_nowait(ends: Ends, missing: Missing) -> None:
    await _claimed(ends, lambda claim: claim.share_nowait(), missing)
    await drain(ends)


async def reading_reply(ends: Ends, missing: Missing) -> None:
    submission = ends.client.submit_nowait({"x": X})
    with await ends.ring.claim() as claim:
        claim.reply_nowait({"x": X})
    with missing:
        first_step(submission.next())
    await read_out(submission)


async def keep(ends: Ends, missing: Missing) -> None:
    kept = None
    with missing:
        kept = first_step(ends.client.keep(KEY, {"x": X}))
    if kept is not None:
        kept.close()


async def find(ends: Ends, missing: Missing) -> None:
    with await ends.client.keep(KEY, {"x": X}):
        found = None
        with missing:
            found = first_step(ends.client.find(KEY))
        if found is not None:
            found.close()


async def kept_payload(ends: Ends, missing: Missing) -> None:
    with await ends.client.keep(KEY, {"x": X}) as kept, missing:
        kept.payload["x"]


async def leaving_kept(ends: Ends, missing: Missing) -> None:
    kept = await ends.client.keep(KEY, {"x": X})
    kept.payload["x"]
    with missing:
        kept.close()
    kept.close()


async def drain(ends: Ends) -> None:
    """Leaves the messages that have come."""
    with contextlib.suppress(shmring.WouldBlock):
        while True:
            with ends.worker.receive_nowait():
                pass


async def broadcast_nowait(ends: Ends, missing: Missing) -> None:
    with missing:
        ends.ring.broadcast_nowait({"x": X})
    await drain(ends)


async def gather(ends: Ends, missing: Missing) -> None:
    with missing:
        first_step(ends.ring.gather({"x": X}))
    await drain(ends)


async def receive_nowait(ends: Ends, missing: Missing) -> None:
    ends.ring.broadcast_nowait({"x": X})
    message = None
    with missing:
        message = ends.worker.receive_nowait()
    if message is not None:
        message.leave()
    message = None
    await drain(ends)


async def replying_worker(ends: Ends, missing: Missing) -> None:
    gathering = asyncio.ensure_future(ends.ring.gather({"x": X}))
    message = await ends.worker.receive()
    with missing:
        first_step(message.reply({"x": X}))
    message.leave()
    with contextlib.suppress(shmring.WorkerFailedError):
        await asyncio.wait_for(gathering, _SETTLE_S)


async def leaving_message(ends: Ends, missing: Missing) -> None:
    ends.ring.broadcast_nowait({"x": X})
    message = await ends.worker.receive()
    with missing:
        message.leave()
    message.leave()


CALLS: dict[str, Callable[[Ends, Missing], Any]] = {
    name: function
    for name, function in list(globals().items())
    if inspect.iscoroutinefunction(function) and list(inspect.signature(function).parameters) == ["ends", "missing"]
}


async def try_call(name: str, ends: Ends) -> None:
    function = CALLS[name]
    for _ in range(3):  # what is made once is made now
        await asyncio.wait_for(function(ends, Missing(0, 0)), _SETTLE_S)
    number = seen = calm = 0
    lost: dict[str, list[int]] = {}
    while calm < _CALM:
        missing = Missing(number, number + 1)
        try:
            await asyncio.wait_for(function(ends, missing), _SETTLE_S)
        except Exception as error:  # noqa: BLE001 - it is shown
            lost.setdefault(f"{type(error).__name__}: {str(error)[:100]}", []).append(number)
        seen, calm = seen + missing.seen, 0 if missing.seen else calm + 1
        until = asyncio.get_running_loop().time() + _SETTLE_S
        while (losses := ends.losses()) and asyncio.get_running_loop().time() < until:
            gc.collect()
            await asyncio.sleep(0.01)
        try:
            ends.check_books()
        except AssertionError as error:
            losses.append(f"a book: {error}")
        if losses:
            lost.setdefault(", ".join(losses), []).append(number)
            break
        number += 1
    print(f"{name}: {number}, {seen}", flush=True)
    for what, numbers in lost.items():
        print(f"LOST {name}, allocation {numbers}: {what}", flush=True)


async def main(names: list[str]) -> None:
    for name in names or CALLS:
        async with asyncio.timeout(300), opened() as ends:
            await try_call(name, ends)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ResourceWarning)
    torch.set_num_threads(1)
    gc.disable()  # it would come in the middle of any call
    gc.freeze()
    asyncio.run(main(sys.argv[1:]))
