"""The heavy caller, as a process of its own: ``python -m bench.isolation.heavy HEAVY < body``, with a :class:`Heavy` as JSON.

It posts the body again and again on its connections until it is ended, and reads the answers, or hangs up. It says on
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

import msgspec

from bench.isolation.attacks import NUMBER

_CHUNK_NBYTES = 256 << 10
_NUMBERS = itertools.count(os.getpid() << 32)  # so that no process before this one has sent them


class Heavy(msgspec.Struct, frozen=True):
    """Where and how a body is posted; see :class:`bench.isolation.attacks.Attack`."""

    address: str
    path: str
    key: str
    connections: int = 1
    hangs_up_after_s: float | None = None
    chunked: bool = False


async def _post(heavy: Heavy, body: bytes) -> str:
    host, _, port = heavy.address.rpartition(":")
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
        if heavy.hangs_up_after_s is not None:
            await asyncio.sleep(heavy.hangs_up_after_s)
            return "hung up"
        status = (await reader.readline()).split(b" ")[1].decode()
        while await reader.read(_CHUNK_NBYTES):
            pass
        return status
    finally:
        writer.close()


async def _repeat(heavy: Heavy, body: bytes, answers: collections.Counter[str]) -> None:
    while True:
        try:
            answers[await _post(heavy, body)] += 1
        except (OSError, IndexError) as error:
            answers[type(error).__name__] += 1
            await asyncio.sleep(0.01)


async def _main(heavy: Heavy, body: bytes) -> None:
    answers = collections.Counter[str]()
    tasks = [asyncio.create_task(_repeat(heavy, body, answers)) for _ in range(heavy.connections)]
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("under way", flush=True)
    await told.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(_main(msgspec.json.decode(sys.argv[1], type=Heavy), sys.stdin.buffer.read()))
