"""What far clients do beside a near one, as a process of its own: ``python -m bench.far.loads LOAD ADDRESS``.

It says on stdout that it is under way, and goes on until it is ended.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import secrets
import socket
import sys

import torch

import shmring
from bench.children import on_uvloop
from bench.far.serving import TOKEN
from shmring.door import far_address_of
from shmring.memory.bundles import bundle
from shmring.transport.far_wire import Hello, Request, frame, hello_bytes

_SLOW, _SLOW_NBYTES, _SLOW_PAUSE_S = 64, 1 << 20, 0.05
_KEPT = 500  # of silent connections, at this side: the engine has closed most of them
_FLOOD, _FLOOD_NBYTES = 16, 1 << 20


async def _slow(host: str, port: int, name: str) -> None:
    """Sends a request, a KB at a time."""
    sent = bundle({"x": torch.ones(_SLOW_NBYTES, dtype=torch.uint8)}, max_tensors=1, max_payload_nbytes=4096, max_values=16)
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection(host, port)
            with contextlib.closing(writer):
                writer.write(hello_bytes(Hello(TOKEN.encode(), name, secrets.token_bytes(16))))
                writer.write(frame(Request(1, "", sent.payload), _SLOW_NBYTES))
                for _ in range(_SLOW_NBYTES >> 10):
                    writer.write(bytes(1 << 10))
                    await writer.drain()
                    await asyncio.sleep(_SLOW_PAUSE_S)
        await asyncio.sleep(_SLOW_PAUSE_S)


async def slow_senders(address: str) -> None:
    """They hold what far clients may fill."""
    await asyncio.gather(*(_slow(*far_address_of(address)) for _ in range(_SLOW)))


async def silent_connections(address: str) -> None:
    """As many as can be made, one after the other, thousands a second; nothing is said on any."""
    place = far_address_of(address)
    kept: collections.deque[socket.socket] = collections.deque()
    loop = asyncio.get_running_loop()
    while True:
        connected = socket.socket()
        connected.setblocking(False)
        with contextlib.suppress(OSError):
            await loop.sock_connect(connected, (place.host, place.port))
        kept.append(connected)
        if len(kept) > _KEPT:
            kept.popleft().close()


async def flood(address: str) -> None:
    """Requests as fast as they are answered."""
    x = torch.ones(_FLOOD_NBYTES, dtype=torch.uint8)

    async def ask(client: shmring.Client) -> None:
        while True:
            await client.request({"x": x})

    async with shmring.connect(address, token=TOKEN) as client:
        await asyncio.gather(*(ask(client) for _ in range(_FLOOD)))


LOADS = {
    f"{_SLOW} slow senders": slow_senders,
    "connections that say nothing": silent_connections,
    f"a flood, {_FLOOD} x 1 MB in flight": flood,
}


async def _main(load: str, address: str) -> None:
    running = asyncio.ensure_future(LOADS[load](address))
    await asyncio.sleep(0.2)
    print("under way", flush=True)
    await running


if __name__ == "__main__":
    on_uvloop(_main(*sys.argv[1:]))
