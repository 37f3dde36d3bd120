"""Both ends of a tour through every transition of every life cycle: ``tour.py engine|frontend NAME SOCKET_DIR``.

With ``SHMRING_CRASH_AT=<table>.<state>.<event>.<moment>`` a process dies at that transition, when it happens first after
the tour has begun: just ``before`` it, or ``after`` what it has caused was carried out (in the loop's next round). Which
process, ``SHMRING_CRASH_WHO`` says: ``self``, or the ``peer``, so that each end dies at the transitions of both.

The engine's ``reached`` call and the frontend's last words tell which transitions a tour has seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
import uvloop

import shmring
from shmring.core.compiled import watch

SLAB_NBYTES = "4MiB"
NBYTES = 50_000
LARGE_NBYTES = 900_000  # more than the base lease

reached: set[str] = set()


# -- the hook ----------------------------------------------------------------------------------------------------------


def install_hook(tour: Path) -> None:
    """Counts the transitions of this process's books, and makes one of them the last thing that a process does.

    Args:
        tour: holds ``engine=<pid>`` and ``frontend=<pid>`` once the tour has begun.
    """
    crash_at = os.environ.get("SHMRING_CRASH_AT", "none.none.none.before")
    point, _, moment = crash_at.rpartition(".")
    ours = "engine" if "engine" in sys.argv[1] else "frontend"
    theirs = "frontend" if ours == "engine" else "engine"
    victim = ours if os.environ.get("SHMRING_CRASH_WHO", "self") == "self" else theirs

    def crash() -> None:
        pids = dict(line.split("=") for line in tour.read_text().split())
        os.kill(int(pids[victim]), signal.SIGKILL)

    def before(table: str, state: Any, event: Any) -> None:
        name = f"{table}.{state.name}.{event.name}"
        if not tour.exists() or name in reached:
            return
        reached.add(name)
        if name == point and moment == "before":
            crash()
        if name == point and moment == "after":
            asyncio.get_running_loop().call_soon(crash)

    watch(before)


# -- the engine --------------------------------------------------------------------------------------------------------


async def handle(claim: shmring.Claim) -> None:
    mode, tensor = claim.payload["mode"], claim.payload["x"]
    match mode:
        case "answer":
            await claim.reply({"x": tensor})
        case "hold":
            await asyncio.Event().wait()
        case "stream":
            while True:
                await claim.reply({"x": tensor})
        case "fail":
            raise ValueError("as ordered")
        case "time out":
            claim.time_out("as ordered")
        case "keep":  # a view outlives the claim
            asyncio.get_running_loop().call_later(0.02, tensor.numel)
        case "let go":  # the slot drains while the request is still running
            claim.release()
            await claim.reply("released")
            await asyncio.Event().wait()


async def run_engine(name: str, socket_dir: str) -> None:
    ring: shmring.Ring | None = None

    async def statistics() -> dict[str, int]:
        assert ring is not None
        ring._shell._book.check()
        return dataclasses.asdict(ring.statistics())

    async def reached_here() -> list[str]:
        return sorted(reached)

    async def never() -> None:
        await asyncio.Event().wait()

    ring = await shmring.serve(
        name,
        slab_nbytes=SLAB_NBYTES,
        reply_nbytes="1MiB",
        socket_dir=socket_dir,
        calls={"statistics": statistics, "reached": reached_here, "never": never},
    )
    print("ready", os.getpid(), flush=True)
    # Two at a time: a third request waits, unclaimed.
    await ring.run(handle, max_concurrency=2)


# -- the frontend ------------------------------------------------------------------------------------------------------


def order(mode: str, tensor: torch.Tensor | None = None) -> dict[str, Any]:
    return {"mode": mode, "x": torch.ones(NBYTES, dtype=torch.uint8) if tensor is None else tensor}


async def until(client: shmring.Client, condition: Callable[[], bool]) -> None:
    """Waits for the client's own book, which ends with its engine; the test has the deadline."""
    while not condition():
        if client.lost_error is not None:
            raise client.lost_error
        await asyncio.sleep(0.001)


async def copied(client: shmring.Client) -> None:
    assert (await client.request(order("answer")))["x"].numel() == NBYTES
    with contextlib.suppress(shmring.RemoteError):
        await client.request(order("fail"))
    with contextlib.suppress(TimeoutError):
        await client.request(order("time out"))
    with contextlib.suppress(shmring.RemoteError):  # no reply
        await client.request(order("keep"))


async def in_place(client: shmring.Client) -> None:
    """A slot that is sent, kept, sent again, and left in each of the ways in which a slot can be left."""
    for drain in (False, True):
        async with client.slot(NBYTES, drain=drain) as slot:
            view = slot.tensor((NBYTES,), torch.uint8).fill_(1)
            for _ in range(2):
                await client.request(order("answer", view))
                await until(client, lambda: client.statistics().slots_cached == 1)
        del view
        await until(client, lambda: client.statistics().slots_in_use == 0)


async def discarded(client: shmring.Client) -> None:
    for drain in (False, True):
        async with client.slot(NBYTES, drain=drain) as slot:
            view = slot.tensor((NBYTES,), torch.uint8).fill_(1)
        del view
        await until(client, lambda: client.statistics().slots_in_use == 0)


async def kept(client: shmring.Client) -> None:
    """A slot that the engine keeps, and the same key again, whose slot comes back."""
    for number in range(2):
        async with client.slot(NBYTES) as slot:
            view = slot.tensor((NBYTES,), torch.uint8).fill_(1)
            with await client.keep(number.to_bytes(32, "little"), {"x": view}) as content:
                await client.request(order("answer", content.payload["x"]))
        del view
    (await client.keep(bytes(32), {"x": torch.ones(NBYTES)})).close()
    await until(client, lambda: client.statistics().slots_in_use == 0)


async def left_while_submitted(client: shmring.Client) -> None:
    """The frontend leaves the slot before the engine has released it, and a view of it lives on."""
    async with client.slot(NBYTES, drain=True) as slot:
        view = slot.tensor((NBYTES,), torch.uint8).fill_(1)
        submission = await client.submit(order("hold", view))
    submission.abort()
    await until(client, lambda: client.statistics().slots_draining == 1)
    del view
    await until(client, lambda: client.statistics().slots_in_use == 0)


async def aborted(client: shmring.Client) -> None:
    """Aborted while claimed, before it was claimed, and while it drains."""
    held = [await client.submit(order("hold")) for _ in range(2)]
    waiting = await client.submit(order("hold"))
    while (await client.call("statistics"))["running"] < 2:
        pass
    waiting.abort()
    for submission in held:
        submission.abort()
    draining = await client.submit(order("let go"))
    assert await draining.next() == "released"
    draining.abort()
    await until(client, lambda: client.statistics().slots_in_use == 0)


async def streamed(client: shmring.Client) -> None:
    stream = client.stream(order("stream"))
    for _ in range(5):
        await anext(stream)
    await stream.aclose()
    await until(client, lambda: client.statistics().slots_in_use == 0)


async def leased(client: shmring.Client) -> None:
    """A further lease comes and goes; a second client of this process comes, and leaves in order."""
    await client.request(order("answer", torch.ones(LARGE_NBYTES, dtype=torch.uint8)))
    await until(client, lambda: client.statistics().leases == 1)
    async with shmring.connect(client.names[0], client.config) as second:
        await second.request(order("answer"))


STOPS: tuple[Callable[[shmring.Client], Awaitable[None]], ...] = (
    leased,  # first, since no stop but the last may end with a transition that only it has
    copied,
    in_place,
    kept,
    discarded,
    left_while_submitted,
    aborted,
    streamed,
)


async def run_frontend(name: str, socket_dir: str) -> None:
    config = shmring.ClientConfig(
        socket_dir=socket_dir, lease_nbytes="512KiB", lease_idle_s=0.02, connect_timeout_s=0.5, prefault=False
    )
    try:
        async with shmring.connect(name, config) as client:
            for stop in STOPS:
                await stop(client)
    except shmring.EngineDeadError as error:
        print("lost", type(error).__name__, flush=True)
        return
    print("toured", *sorted(reached), flush=True)


def main(end: str, name: str, socket_dir: str) -> None:
    tour = Path(socket_dir, "tour")
    if end == "frontend":
        engine, *_ = Path(socket_dir, f"{name}.lock").read_text().split()  # its pid comes first
        tour.with_suffix(".new").write_text(f"engine={engine}\nfrontend={os.getpid()}\n")
        tour.with_suffix(".new").rename(tour)
    install_hook(tour)
    uvloop.run((run_engine if end == "engine" else run_frontend)(name, socket_dir))


if __name__ == "__main__":
    main(*sys.argv[1:])
