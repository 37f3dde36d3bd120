"""The first part of the demonstration: what the transport does, without a server.

Another process sends tensors to this one, through shmring and through a Unix socket (asyncio's streams), in turn. Each is
looked at where it arrives. Then that process is killed while it has slots, and requests in line: its memory comes back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table

import shmring
from shmring.frontend.demo.sender import HEADER, Order, Sent
from shmring.processes.process import Process

__all__ = ["show_transport"]

_SIZES = {64 << 10: 1000, 1 << 20: 200, 16 << 20: 24}  # bytes of a tensor, and how many are sent each time
_ROUNDS = 3
_HELD, _HELD_NBYTES = 8, 4 << 20
_LIMIT_S = 60.0


async def show_transport(console: Console) -> list[str]:
    """Shows it; returns a list of problems."""
    name = f"demo-{os.getpid()}"
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours, limit=2 * max(_SIZES))
    with theirs, contextlib.closing(writer):
        async with shmring.serve(name, slab_nbytes="512MiB") as ring:
            program = "from shmring.frontend.demo import sender; sender.main()"
            command = [sys.executable, "-P", "-c", program, name, str(theirs.fileno())]
            with Process.start(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                sender = _Sender(process)
                async with asyncio.timeout(_LIMIT_S):
                    console.print(await _unless_it_dies(process, _compare(ring, reader, sender)))
                    return await _kill(console, ring, sender)


class _Sender:
    """The other process, as this one sees it."""

    def __init__(self, process: Process) -> None:
        self.process = process

    def begin(self, order: Order) -> None:
        """Has it carry an order out."""
        self.process.write(msgspec.json.encode(order).decode() + "\n")

    async def ended(self) -> Sent:
        """Returns when that was done."""
        return msgspec.json.decode(await asyncio.to_thread(self.process.line), type=Sent)


async def _unless_it_dies(process: Process, comparing: Coroutine[Any, Any, Table]) -> Table:
    task = asyncio.ensure_future(comparing)
    process.when_ended(task.cancel)
    try:
        return await task
    except (asyncio.CancelledError, asyncio.IncompleteReadError, msgspec.DecodeError, OSError):
        if process.lives:
            raise
        raise RuntimeError("the process that sends tensors has died") from None


async def _compare(ring: shmring.Ring, reader: asyncio.StreamReader, sender: _Sender) -> Table:
    table = Table(title="Tensors from one process to another: shmring beside a socket", caption="CPU of both processes")
    for heading in ("a tensor", "socket GB/s", "shmring GB/s", "faster", "socket CPU us", "shmring CPU us", "less CPU"):
        table.add_column(heading, justify="right", no_wrap=True)
    for nbytes, count in _SIZES.items():
        found: dict[str, list[tuple[float, float]]] = {"socket": [], "shmring": []}
        for _ in range(_ROUNDS):
            for way, runs in found.items():
                runs.append(await _time(way, nbytes, count, ring, reader, sender))
        (slow, dear), (fast, cheap) = (
            (statistics.median(gb_per_s for gb_per_s, _ in runs), statistics.median(cpu_us for _, cpu_us in runs))
            for runs in found.values()
        )
        size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
        table.add_row(
            *(size, f"{slow:.2f}", f"{fast:.2f}", f"[bold]{fast / slow:.1f} x[/]"),
            *(f"{dear:,.0f}", f"{cheap:,.0f}", f"{dear / cheap:.1f} x"),
        )
    return table


async def _time(
    way: str, nbytes: int, count: int, ring: shmring.Ring, reader: asyncio.StreamReader, sender: _Sender
) -> tuple[float, float]:
    """Returns GB/s, and CPU time of a tensor in microseconds."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    sender.begin(Order("shmring" if way == "shmring" else "socket", nbytes, count))
    total = 0.0
    if way == "shmring":
        for _ in range(count):
            with await ring.claim() as claim:
                total += float(claim.payload["tensor"][-1])
    else:
        for _ in range(count):
            await reader.readexactly(len(HEADER))
            tensor = torch.frombuffer(bytearray(await reader.readexactly(nbytes)), dtype=torch.float32)
            total += float(tensor[-1])
    taken_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    cpu_s += (await sender.ended()).cpu_s
    if total != count:
        raise RuntimeError(f"what came through {way} is not what was sent")
    return nbytes * count / taken_s / 1e9, cpu_s / count * 1e6


async def _kill(console: Console, ring: shmring.Ring, sender: _Sender) -> list[str]:
    """Kills the process that sends; returns a list of problems."""
    sender.begin(Order("hold", _HELD_NBYTES, _HELD))
    await sender.ended()
    before = ring.statistics()
    began_s = time.perf_counter()
    sender.process.send(signal.SIGKILL)
    while ring.statistics().clients and time.perf_counter() - began_s < _LIMIT_S:  # noqa: ASYNC110 # what is shown is how soon
        await asyncio.sleep(0.0005)
    after, taken_ms = ring.statistics(), (time.perf_counter() - began_s) * 1000
    console.print(
        f"The other process was killed. It had {before.leased_nbytes >> 20} MiB of the slab, and {before.waiting} requests; "
        f"{taken_ms:.1f} ms later it had {after.leased_nbytes} bytes, and {after.waiting} requests.\n",
        highlight=False,
    )
    return [] if not (after.leased_nbytes or after.waiting) else [f"a killed process left {after.leased_nbytes} bytes"]
