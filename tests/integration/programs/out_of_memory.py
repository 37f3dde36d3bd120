"""One allocation fails in the middle of a call: the first one, then the second one, until none does. Nothing may be lost.

``python -m tests.integration.programs.out_of_memory [CALL ...]`` writes a line for each call that it has tried:
``name: calls, how often memory was missing, how often that has ended a connection``, and for a loss another one that begins
with ``LOST``.

What waits is tried as far as its first suspension. An event loop needs memory as well, and nothing can go on without it.

Where an end fails in the middle of a record, it can't know what is lost, and ends the connection. Then all requests and
messages of it must end. Memory that the other process may still use comes back when that ends, which this program does not see.

Two faults of others end the interpreter where memory is missing:

- msgspec 0.22, where it can't make its buffer longer, gives up a reference to it that it has not. So ``keep`` is left out::

    encoder, thing = msgspec.msgpack.Encoder(), bytes(31)
    _testcapi.set_nomemory(1, 2)
    encoder.encode(thing)  # SIGSEGV

- Code of Cython 3.3.0 and 3.3.1 gives the item of a list comprehension up twice where it can't make the list longer (3.2.9 does
  not). Any later allocation may then end the interpreter. So the core makes no list of what it has just made by a comprehension
  where a request ends::

    def listed(make):
        return [make() for _ in range(1)]  # compiled; if append fails, sys.getrefcount() of what make() gives is one too low
"""

from __future__ import annotations

import _testcapi
import asyncio
import contextlib
import dataclasses
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
        self.session = session_of(client)

    @property
    def is_over(self) -> bool:
        """Whether a connection has ended."""
        return self.session.error is not None or self.worker._connection._reason is not None

    def losses(self) -> list[str]:
        """What is not given back, though nobody has anything."""
        ring, client = self.ring.statistics(), self.client.statistics()
        numbers = {
            "requests in flight": len(self.session.end.pending),
            "running": ring.running,
            "waiting": ring.waiting,
            "messages": ring.broadcasts_outstanding,
        }
        if not self.is_over:
            numbers |= {
                "the client's slots": client.slots_in_use,
                "slots of replies": client.reply_slots_held,
                "the engine's slots": ring.slots_in_use,
                "reply space": ring.reply_nbytes - ring.reply_free_nbytes,
                "pins": ring.kept_pinned,
            }
        return [f"{name}: {number}" for name, number in numbers.items() if number]

    def check_books(self) -> None:
        shell = self.ring._shell
        shell._book.check()
        for slots in self.session.slots:
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
    """In its block, the allocation of this number fails; ``seen`` then says whether there was one. None: none fails."""

    def __init__(self, number: int | None) -> None:
        self.number = number
        self.seen = False

    def __enter__(self) -> Missing:
        gc.collect()  # empties the interpreter's lists of objects that it keeps for reuse
        if self.number is not None:
            _testcapi.set_nomemory(self.number, self.number + 1)
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if self.number is None:
            return False
        try:
            for _ in range(self.number + 2):  # it fails here if there were fewer in the block
                bytearray(600)
            self.seen = True
        except MemoryError:
            pass
        _testcapi.remove_mem_hooks()
        is_torchs = isinstance(error, RuntimeError) and "allocate" in str(error)
        return self.seen and (
            is_torchs or isinstance(error, MemoryError | shmring.ShmringError)
        )  # the latter: what follows from it


def first_step(awaitable: Any) -> Any:
    """Runs what is awaited as far as its first suspension, where it is cancelled; returns its result, if it has one."""

    async def run() -> Any:
        return await awaitable

    coroutine = run()
    try:
        waited = coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    if waited is not None:
        waited.cancel()  # as a task does
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


@dataclasses.dataclass
class Progress:
    number: int = 0
    seen: int = 0
    ended: int = 0
    calm: int = 0
    lost: str = ""


async def try_call(name: str, ends: Ends, progress: Progress) -> None:
    """Fails the next allocations of a call, until a connection ends, something is lost, or there are no more."""
    function = CALLS[name]
    for _ in range(3):  # what is made once is made now
        await asyncio.wait_for(function(ends, Missing(None)), _SETTLE_S)
    while progress.calm < _CALM and not ends.is_over and not progress.lost:
        missing = Missing(progress.number)
        try:
            await asyncio.wait_for(function(ends, missing), _SETTLE_S)
        except Exception as error:  # noqa: BLE001 - it is shown
            await asyncio.sleep(0)
            if not ends.is_over:
                progress.lost = f"{type(error).__name__}: {str(error)[:100]}"
        progress.seen += missing.seen
        progress.calm = 0 if missing.seen else progress.calm + 1
        until = asyncio.get_running_loop().time() + _SETTLE_S
        while (losses := ends.losses()) and asyncio.get_running_loop().time() < until:
            gc.collect()
            await asyncio.sleep(0.01)
        try:
            ends.check_books()
        except AssertionError as error:
            losses.append(f"a book: {error}")
        progress.lost = progress.lost or ", ".join(losses)
        progress.ended += ends.is_over
        progress.number += 1


#: Tried only if they are named.
LEFT_OUT = ("keep",)


async def main(names: list[str]) -> None:
    for name in names or [name for name in CALLS if name not in LEFT_OUT]:
        progress = Progress()
        while progress.calm < _CALM and not progress.lost:
            async with asyncio.timeout(120), opened() as ends:
                await try_call(name, ends, progress)
        print(f"{name}: {progress.number}, {progress.seen}, {progress.ended}", flush=True)
        if progress.lost:
            print(f"LOST {name}, allocation {progress.number - 1}: {progress.lost}", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore", ResourceWarning)
    torch.set_num_threads(1)
    gc.disable()  # it would come in the middle of any call
    gc.freeze()
    asyncio.run(main(sys.argv[1:]))
