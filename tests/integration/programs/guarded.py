"""Processes for the guarantees: ``guarded.py MODE NAME SOCKET_DIR [OPTION]``. They say on stdout how far they have come.

engine           serves 8 MiB, OPTION requests at a time, in a backing that may follow; says when it has nothing of a process
                 any more, and when
poor engine      the same with at most OPTION descriptors
half             a frontend that has written half of a slot, and goes on when there is a file ``go``
hang up forked   a frontend that has dropped its connection, which a forked child holds; it goes on writing
many             a frontend process with at most OPTION descriptors, which connects until it can't
leave a segment  an engine that dies between creating its segment and unlinking the name
small            an engine and a client with a /dev/shm of 8 MiB of their own
scribble         a frontend that writes to a reply in a slot
start and stop   an engine that starts and stops OPTION times
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import dataclasses
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path

import posix_ipc
import torch
import uvloop

import shmring
from shmring.config import Backing
from shmring.memory import slab
from shmring.memory.slab import SHM_DIRECTORY
from tests.sessions import session_of

NBYTES = 400_000
CLONE_NEWNS = 0x00020000
MS_REC_PRIVATE = 0x4000 | (1 << 18)


def say(*words: object) -> None:
    print(*words, flush=True)


def limit_descriptors(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))


# -- engines -----------------------------------------------------------------------------------------------------------


class Reclaims(logging.Handler):
    """Says which process the ring has reclaimed memory of, and when."""

    def emit(self, record: logging.LogRecord) -> None:
        if "reclaimed" in record.msg and isinstance(record.args, tuple):
            say("reclaimed", record.args[0].pid, time.monotonic_ns())  # type: ignore[union-attr]


async def handle(claim: shmring.Claim) -> None:
    mode, tensor = claim.payload["mode"], claim.payload["x"]
    if mode == "hold":
        await asyncio.Event().wait()
    await claim.reply({"sum": int(tensor.sum()), "x": tensor})
    while mode == "stream":
        await claim.reply({"x": tensor})


async def engine(name: str, socket_dir: str, concurrency: str, backing: Backing = "auto") -> None:
    logger = logging.getLogger("shmring.ring")
    logger.setLevel(logging.INFO)
    logger.addHandler(Reclaims())
    ring: shmring.Ring | None = None

    async def statistics() -> dict[str, int]:
        assert ring is not None
        ring._shell._book.check()
        return dataclasses.asdict(ring.statistics())

    async def never() -> None:
        await asyncio.Event().wait()

    ring = await shmring.serve(
        name,
        slab_nbytes="8MiB",
        reply_nbytes="2MiB",
        backing=backing,
        socket_dir=socket_dir,
        calls={"statistics": statistics, "never": never},
        pin="off",  # CUDA takes dozens of descriptors, of which some of these engines have few
    )
    say("ready")
    await ring.run(handle, max_concurrency=int(concurrency))


async def poor_engine(name: str, socket_dir: str, descriptors: str) -> None:
    limit_descriptors(int(descriptors))
    await engine(name, socket_dir, "64")


async def leave_a_segment(name: str, socket_dir: str, prefix: str) -> None:
    def die(path: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    slab.NAME_PREFIX = prefix
    posix_ipc.unlink_shared_memory = die
    await shmring.serve(name, slab_nbytes="1MiB", socket_dir=socket_dir)


async def start_and_stop(name: str, socket_dir: str, times: str) -> None:
    for _ in range(int(times)):
        async with shmring.serve(name, slab_nbytes="1MiB", socket_dir=socket_dir):
            pass
    say("stopped")


# -- frontends ---------------------------------------------------------------------------------------------------------


async def connected(name: str, socket_dir: str, timeout_s: float = 30.0) -> shmring.Client:
    return await shmring.connect(name, socket_dir=socket_dir, lease_nbytes="512KiB", connect_timeout_s=timeout_s)


async def half(name: str, socket_dir: str) -> None:
    async with await connected(name, socket_dir) as client, client.slot(NBYTES) as slot:
        view = slot.tensor((NBYTES,), torch.uint8)
        view[: NBYTES // 2] = 1
        say("half")
        while not Path(socket_dir, "go").exists():
            await asyncio.sleep(0.005)
        view[NBYTES // 2 :] = 2
        answer = await client.request({"mode": "answer", "x": view})
        say("right" if answer["sum"] == NBYTES // 2 * 3 else f"wrong {answer['sum']}")


async def hang_up_forked(name: str, socket_dir: str) -> None:
    client = await connected(name, socket_dir)
    slot = await client.slot(NBYTES)
    view = slot.tensor((NBYTES,), torch.uint8)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    assert client.connected
    session_of(client).link.abort()
    say("forked", child)
    while True:
        view.add_(1)
        await asyncio.sleep(0.001)


def count_descriptors(limit: int) -> int:
    """How many are open, counted without opening one."""
    count = 0
    for fd in range(limit):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            count += 1
    return count


async def many(name: str, socket_dir: str, descriptors: str) -> None:
    """Connects until that fails, and says how; what there is goes on, and one less makes room for one more."""
    data = torch.ones(NBYTES // 10, dtype=torch.uint8)  # now: at first torch looks at the processors, by descriptors
    limit_descriptors(int(descriptors))
    clients: list[shmring.Client] = []
    error: Exception | None = None
    while error is None:
        try:
            clients.append(await connected(name, socket_dir, timeout_s=1.0))
        except (shmring.ShmringError, OSError) as caught:
            error = caught
    say("failed", len(clients), type(error).__name__, error)
    for client in clients:
        assert (await client.request({"mode": "answer", "x": data}))["sum"] == NBYTES // 10
    before = count_descriptors(int(descriptors))
    for _ in range(3):
        with contextlib.suppress(shmring.ShmringError, OSError):
            clients.append(await connected(name, socket_dir, timeout_s=1.0))
    say("leaked", count_descriptors(int(descriptors)) - before)
    await clients.pop().close()
    again = await connected(name, socket_dir)
    assert (await again.request({"mode": "answer", "x": data}))["sum"] == NBYTES // 10
    say("recovered")


# -- both --------------------------------------------------------------------------------------------------------------


def mount_small_shm() -> bool:
    """Gives this process a /dev/shm of 8 MiB of its own; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC_PRIVATE, None):
        return False
    return not libc.mount(b"tmpfs", os.fsencode(SHM_DIRECTORY), b"tmpfs", 0, b"size=8m")


async def small(name: str, socket_dir: str) -> None:
    if not mount_small_shm():
        say("skipped")
        return
    for nbytes in ("16MiB", "9MiB"):
        await refused(name, socket_dir, nbytes)
    filler = SHM_DIRECTORY / "filler"
    filler.write_bytes(bytes(6 << 20))
    await refused(name, socket_dir, "4MiB")
    filler.unlink()
    async with (
        shmring.serve(
            name, slab_nbytes="4MiB", reply_nbytes="1MiB", backing="/dev/shm", socket_dir=socket_dir, prefault=False
        ) as ring,
        await connected(name, socket_dir) as client,
    ):
        fill(filler)  # others take the rest
        serving = asyncio.create_task(ring.run(handle))
        data = torch.ones(2 << 20, dtype=torch.uint8)
        for _ in range(10):  # every page of the slab is written to: it was reserved, so there is no SIGBUS
            assert (await client.request({"mode": "answer", "x": data[: 1 << 19]}))["sum"] == 1 << 19
            async with client.slot(2 << 20) as slot:
                slot.tensor((2 << 20,), torch.uint8).fill_(1)
        await client.close()
        await ring.close()
        await serving
    say("survived", *(path.name for path in SHM_DIRECTORY.iterdir() if path != filler))
    fill(filler)
    for nbytes in ("4MiB", "16MiB"):
        await where_it_fits(name, socket_dir, nbytes)
    filler.unlink()
    await where_it_fits(name, socket_dir, "4MiB")


def fill(filler: Path) -> None:
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(1 << 16))


async def where_it_fits(name: str, socket_dir: str, nbytes: str) -> None:
    """Says how much of a slab is in /dev/shm, if the ring is to find out where it fits."""
    async with shmring.serve(name, slab_nbytes=nbytes, reply_nbytes="1MiB", socket_dir=socket_dir) as ring:
        async with await connected(name, socket_dir) as client:
            serving = asyncio.create_task(ring.run(handle))
            for _ in range(10):
                async with client.slot(2 << 20) as slot:
                    data = slot.tensor((2 << 20,), torch.uint8).fill_(1)
                    assert (await client.request({"mode": "answer", "x": data[: 1 << 19]}))["sum"] == 1 << 19
        say("auto", nbytes, ring.statistics().shm_nbytes, *(path.name for path in SHM_DIRECTORY.glob("shmring*")))
        await ring.close()
        await serving


async def scribble(name: str, socket_dir: str) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    client = await connected(name, socket_dir)
    reply = (await client.request({"mode": "answer", "x": torch.ones(NBYTES, dtype=torch.uint8)}))["x"]
    say("read", int(reply.sum()))
    reply.add_(1)
    say("written")


async def refused(name: str, socket_dir: str, nbytes: str) -> None:
    try:
        async with shmring.serve(name, slab_nbytes=nbytes, backing="/dev/shm", socket_dir=socket_dir):
            say("served", nbytes)
    except shmring.SlabError as error:
        say("refused", nbytes, error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(globals()[sys.argv[1].replace(" ", "_")](*sys.argv[2:]))
