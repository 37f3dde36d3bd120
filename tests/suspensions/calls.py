"""The calls: each is made once, and leaves nothing behind if it is not interrupted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import torch

import shmring
from tests.suspensions.world import KEY, LIMIT_S, World, tensor

Call = Callable[[World], Awaitable[None]]


# -- a client's ----------------------------------------------------------------------------------------------------------------


def _request(nbytes: int, **options: Any) -> Call:
    async def call(world: World) -> None:
        reply = await world.client.request({"x": tensor(nbytes)}, **options)
        assert reply["x"].numel() == nbytes

    return call


async def _fails(world: World) -> None:
    with contextlib.suppress(shmring.RemoteError):
        await world.client.request({"fails": True, "x": tensor(5000)})


async def _stream(world: World) -> None:
    async for reply in world.client.stream({"x": tensor(30_000), "twice": True}):
        del reply


async def _stream_left(world: World) -> None:
    async with contextlib.aclosing(world.client.stream({"x": tensor(30_000), "twice": True})) as stream:  # type: ignore[type-var]
        async for _ in stream:
            break


async def _submit(world: World) -> None:
    submission = await world.client.submit({"x": tensor(50_000)})
    await submission.result()


async def _submit_and_read(world: World) -> None:
    submission = await world.client.submit({"x": tensor(5000), "twice": True})
    await submission.next()
    await submission.next()
    await submission.wait()


async def _last_first(world: World) -> None:
    submissions = [await world.client.submit({"x": tensor(30_000)}) for _ in range(4)]
    for submission in reversed(submissions):
        await submission.result()


async def _slot(world: World) -> None:
    async with world.client.slot(300_000) as slot:
        slot.tensor((9,), torch.uint8)
        await asyncio.sleep(0)


async def _slots(world: World) -> None:
    for slot in await world.client.slots([100_000, 100_000, 50_000], timeout=LIMIT_S):
        slot.close()


async def _send_slot(world: World) -> None:
    async with world.client.slot(5000) as slot:
        view = slot.tensor((5000,), torch.uint8).fill_(1)
        await world.client.request({"x": view, "y": tensor(30_000)}, timeout=LIMIT_S)


async def _find(world: World) -> None:
    kept = await world.client.find(KEY)
    if kept is not None:
        with kept:
            assert kept.payload["x"].numel()


async def _keep(world: World) -> None:
    with await world.client.keep(KEY, {"x": tensor(40_000)}, timeout=LIMIT_S) as kept:
        await world.client.request({"x": kept.payload["x"]}, timeout=LIMIT_S)


async def _keep_slot(world: World) -> None:
    async with world.client.slot(40_000) as slot:
        view = slot.tensor((40_000,), torch.uint8)
        with await world.client.keep(bytes(31) + b"1", {"x": view}):
            pass


async def _call(world: World) -> None:
    assert await world.client.call("slow") == "slow"


async def _connect(world: World) -> None:
    async with shmring.connect("w", socket_dir=world.directory) as client:
        await client.request({"x": tensor(5000)})


async def _connect_to_two(world: World) -> None:
    async with shmring.connect(["w", "other"], socket_dir=world.directory, connect_timeout_s=0.1) as client:
        await client.request({"x": tensor(5000)}, timeout=LIMIT_S)


async def _wait(world: World) -> None:
    await world.client.wait_prefaulted(LIMIT_S)
    await world.client.wait_connected(LIMIT_S)


async def _inspect(world: World) -> None:
    await shmring.inspect("w", socket_dir=world.directory)


async def _join(world: World) -> None:
    async with shmring.join("w", 1, socket_dir=world.directory):
        await asyncio.sleep(0)


async def _serve(world: World) -> None:
    async with (
        shmring.serve("fresh", socket_dir=world.directory, slab_nbytes="256KiB"),
        shmring.connect("fresh", socket_dir=world.directory) as client,
    ):
        await client.wait_prefaulted()


# -- an engine's ---------------------------------------------------------------------------------------------------------------


async def _broadcast(world: World) -> None:
    await world.ring.broadcast({"x": tensor(50_000)}, timeout=LIMIT_S)


async def _broadcasts(world: World) -> None:
    for _ in range(8):
        await world.ring.broadcast({"x": tensor(30_000)}, timeout=LIMIT_S)


async def _gather(world: World) -> None:
    assert await world.ring.gather({"x": tensor(50_000)}, timeout=LIMIT_S) == ["replied"]


async def _gathers(world: World) -> None:
    await asyncio.gather(*(world.ring.gather({"x": tensor(30_000), "n": number}) for number in range(6)))


async def _claim(world: World) -> None:
    with await world.ring.claim() as claim:
        await claim.reply({"x": tensor(50_000)})


async def _claim_and_end(world: World) -> None:
    with await world.ring.claim() as claim:
        await claim.done({"x": tensor(50_000)})


async def _claim_many(world: World) -> None:
    for claim in await world.ring.claim_many(4, linger_s=0.01):
        with claim:
            await claim.reply(1)


async def _share(world: World) -> None:
    with await world.ring.claim() as claim:
        await claim.share({"beside": tensor(20_000)}, timeout=LIMIT_S)
        await claim.reply(1)


async def _run(world: World) -> None:
    async def handle(claim: shmring.Claim) -> None:
        await claim.reply({"x": tensor(30_000)})

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.03):
            await world.ring.run(handle)


async def _run_batches(world: World) -> None:
    async def handle(claims: list[shmring.Claim]) -> list[object]:
        await asyncio.sleep(0)
        return [{"x": tensor(30_000)} for _ in claims]

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.03):
            await world.ring.run_batches(handle, 2, linger_s=0.005)


async def _iterate(world: World) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.03):
            async for claim in world.ring:
                with claim:
                    await claim.reply(1)


#: Where a handler answers.
CALLS: dict[str, Call] = {
    "request": _request(10),
    "request, copied": _request(5000),
    "request, on a thread": _request(50_000, request_id="named", timeout=LIMIT_S),
    "request, large": _request(300_000, timeout=LIMIT_S),
    "request that fails": _fails,
    "stream": _stream,
    "stream, left": _stream_left,
    "submit": _submit,
    "submit, next and wait": _submit_and_read,
    "submit, read last first": _last_first,
    "slot": _slot,
    "slots": _slots,
    "slot, sent": _send_slot,
    "find": _find,
    "keep": _keep,
    "keep of a slot": _keep_slot,
    "call": _call,
    "connect": _connect,
    "connect to two": _connect_to_two,
    "wait": _wait,
    "inspect": _inspect,
    "join": _join,
    "serve": _serve,
    "broadcast": _broadcast,
    "broadcasts": _broadcasts,
    "gather": _gather,
    "gathers": _gathers,
}

#: Where three requests wait for the call.
HANDLERS: dict[str, Call] = {
    "claim": _claim,
    "claim, done": _claim_and_end,
    "claim_many": _claim_many,
    "share": _share,
    "run": _run,
    "run_batches": _run_batches,
    "iterate": _iterate,
}
