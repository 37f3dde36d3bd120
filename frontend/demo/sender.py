"""The other process of the demonstration's first part: sends tensors, or holds slots until it is killed.

It reads one order after the other from its standard input, in JSON, answers each in a line, and ends with its input.
"""

from __future__ import annotations

import asyncio
import collections
import os
import socket
import sys
import time
from typing import Literal

import msgspec
import torch
import uvloop

import shmring

__all__ = ["HEADER", "Order", "Sent", "main"]

HEADER = msgspec.msgpack.encode({"shape": [1 << 31], "dtype": "float32"})  # what a socket's message begins with
_WINDOW = 8  # messages in flight


class Order(msgspec.Struct):
    """What to do: send so many tensors of so many bytes, or hold so many slots of that size until it is killed."""

    way: Literal["shmring", "socket", "hold"]
    nbytes: int
    count: int


class Sent(msgspec.Struct):
    """It was done; ``cpu_s`` is this process's CPU time for it."""

    cpu_s: float


async def _send(client: shmring.Client, tensor: torch.Tensor, count: int) -> None:
    in_flight: collections.deque[shmring.Submission] = collections.deque()
    for _ in range(count):
        if len(in_flight) == _WINDOW:
            await in_flight.popleft().wait()
        in_flight.append(await client.submit({"tensor": tensor}))
    for submission in in_flight:
        await submission.wait()


async def _send_through(stream: asyncio.StreamWriter, tensor: torch.Tensor, count: int) -> None:
    for _ in range(count):
        stream.write(HEADER)
        stream.write(tensor.numpy().data)
        await stream.drain()


async def _main(ring: str, socket_fd: int) -> None:
    _, stream = await asyncio.open_connection(sock=socket.socket(fileno=socket_fd))
    async with shmring.connect(ring) as client:
        await client.wait_prefaulted()
        while line := await asyncio.to_thread(sys.stdin.readline):
            order = msgspec.json.decode(line, type=Order)
            tensor = torch.ones(order.nbytes // 4)
            held: list[object] = []
            began_s = time.process_time()
            if order.way == "shmring":
                await _send(client, tensor, order.count)
            elif order.way == "socket":
                await _send_through(stream, tensor, order.count)
            else:
                held += [await client.slot(order.nbytes) for _ in range(order.count)]
                held += [await client.submit({"tensor": tensor}) for _ in range(order.count)]
            os.write(1, msgspec.json.encode(Sent(time.process_time() - began_s)) + b"\n")
            if held:
                await asyncio.Event().wait()


def main() -> None:
    """The program: its arguments are the ring's name, and the number of its end of a socket."""
    uvloop.run(_main(sys.argv[1], int(sys.argv[2])))
