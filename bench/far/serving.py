"""What receives, as a process of its own: ``python -m bench.far.serving SOCKET_DIR CERTIFICATE KEY``.

There are two engines that listen, with TLS and without, and likewise two servers of asyncio streams. All read one number of a
tensor, and answer with it. The process says on stdout, as JSON, where they are (:class:`Places`), and ends with its stdin.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import struct
import sys

import msgspec
import numpy as np

import shmring
from bench.children import on_uvloop

TOKEN = "a token of the benchmark's own"
#: Of a stream: the bytes of the tensor that follows, or the number that it is answered with.
NUMBER = struct.Struct("<Q")

_SLAB_NBYTES, _REPLY_NBYTES = 512 << 20, 16 << 20


class Places(msgspec.Struct, frozen=True):
    """Addresses of engines, their names on this host, and ports of streams: without TLS, and with it."""

    engines: tuple[str, str]
    names: tuple[str, str]
    ports: tuple[int, int]


async def _read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError), contextlib.closing(writer):
        while True:
            [nbytes] = NUMBER.unpack(await reader.readexactly(NUMBER.size))
            array = np.empty(nbytes, np.uint8)
            at = 0
            while at < nbytes:
                part = await reader.read(nbytes - at)
                if not part:
                    return
                array[at : at + len(part)] = np.frombuffer(part, np.uint8)
                at += len(part)
            writer.write(NUMBER.pack(int(array[0])))


async def _handle(claim: shmring.Claim) -> None:
    await claim.done(int(claim.payload["x"][0]))


async def _serve(socket_dir: str, certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    async with contextlib.AsyncExitStack() as stack:
        rings, servers = [], []
        for name, tls in (("bench-far", None), ("bench-far-tls", context)):
            ring = await stack.enter_async_context(
                shmring.serve(
                    name,
                    slab_nbytes=_SLAB_NBYTES,
                    reply_nbytes=_REPLY_NBYTES,
                    socket_dir=socket_dir,
                    listen="127.0.0.1:0",
                    token=TOKEN,
                    tls=tls,
                )
            )
            rings.append((ring, asyncio.create_task(ring.run(_handle))))
            servers.append(await stack.enter_async_context(await asyncio.start_server(_read, "127.0.0.1", 0, ssl=tls)))
        (plain, _), (encrypted, _) = rings
        first, second = (server.sockets[0].getsockname()[1] for server in servers)
        places = Places((plain.address, encrypted.address), (plain.name, encrypted.name), (first, second))
        print(msgspec.json.encode(places).decode(), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        for _, running in rings:
            running.cancel()


if __name__ == "__main__":
    on_uvloop(_serve(*sys.argv[1:]))
