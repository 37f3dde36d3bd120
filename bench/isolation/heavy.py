"""The heavy caller, as a process of its own: ``python -m bench.isolation.heavy ADDRESS PATH KEY CONNECTIONS [hangs-up]
[chunked] < body``.

It posts the body again and again on so many connections until it is ended, and reads the answers, or hangs up. It says on
stdout that it is under way; and on SIGTERM, as JSON, how many answers of each status it got.
"""

from __future__ import annotations

import asyncio
import collections
import itertools
import json
import os
import signal
import sys
from typing import NamedTuple

from bench.isolation.attacks import NUMBER

_CHUNK_NBYTES = 256 << 10
_NUMBERS = itertools.count(os.getpid() << 32)  # so that no process before this one has sent them


class _Heavy(NamedTuple):
    """What is posted, and how."""

    address: str
    path: str
    key: str
    body: bytes
    hangs_up: bool = False
    chunked: bool = False


async def _post(heavy: _Heavy) -> str:
    host, _, port = heavy.address.rpartition(":")
    body = heavy.body
    if NUMBER.encode() in body:
        body = body.replace(NUMBER.encode(), str(next(_NUMBERS)).encode())
    framing = "Transfer-Encoding: chunked" if heavy.chunked else f"Content-Length: {len(body)}"
    if heavy.chunked:
        body = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST {heavy.path} HTTP/1.1\r\nHost: {heavy.address}\r\nContent-Type: application/json\r\n"
            f"Authorization: Bearer {heavy.key}\r\n{framing}\r\nConnection: close\r\n\r\n".encode()
        )
        view = memoryview(body)
        for start in range(0, len(body), _CHUNK_NBYTES):
            writer.write(view[start : start + _CHUNK_NBYTES])
            await writer.drain()
        if heavy.hangs_up:
            return "hung up"
        status = (await reader.readline()).split(b" ")[1].decode()
        while await reader.read(_CHUNK_NBYTES):
            pass
        return status
    finally:
        writer.close()


async def _repeat(heavy: _Heavy, answers: collections.Counter[str]) -> None:
    while True:
        try:
            answers[await _post(heavy)] += 1
        except (OSError, IndexError) as error:
            answers[type(error).__name__] += 1
            await asyncio.sleep(0.01)


async def _main(heavy: _Heavy, connections: int) -> None:
    answers = collections.Counter[str]()
    tasks = [asyncio.create_task(_repeat(heavy, answers)) for _ in range(connections)]
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("under way", flush=True)
    await told.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(answers))


if __name__ == "__main__":
    address, path, key, connections, *how = sys.argv[1:]
    where = _Heavy(address, path, key, sys.stdin.buffer.read(), "hangs-up" in how, "chunked" in how)
    asyncio.run(_main(where, int(connections)))
