"""The heavy caller, as a process of its own: ``python -m bench.isolation.heavy ADDRESS CONNECTIONS [hangs-up] < body``.

It posts the body again and again on so many connections until it is ended, and reads the answers, or hangs up. It says on
stdout that it is under way; and on SIGTERM, as JSON, how many answers of each status it got.
"""

from __future__ import annotations

import asyncio
import collections
import json
import signal
import sys

_CHUNK_NBYTES = 256 << 10


async def _post(address: str, body: bytes, *, hangs_up: bool) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(
            f"POST /v1/embeddings HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode()
        )
        view = memoryview(body)
        for start in range(0, len(body), _CHUNK_NBYTES):
            writer.write(view[start : start + _CHUNK_NBYTES])
            await writer.drain()
        if hangs_up:
            return "hung up"
        status = (await reader.readline()).split(b" ")[1].decode()
        while await reader.read(_CHUNK_NBYTES):
            pass
        return status
    finally:
        writer.close()


async def _repeat(address: str, body: bytes, answers: collections.Counter[str], *, hangs_up: bool) -> None:
    while True:
        try:
            answers[await _post(address, body, hangs_up=hangs_up)] += 1
        except (OSError, IndexError) as error:
            answers[type(error).__name__] += 1
            await asyncio.sleep(0.01)


async def _main(address: str, connections: int, *, hangs_up: bool) -> None:
    body, answers = sys.stdin.buffer.read(), collections.Counter[str]()
    tasks = [asyncio.create_task(_repeat(address, body, answers, hangs_up=hangs_up)) for _ in range(connections)]
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    print("under way", flush=True)
    await told.wait()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    print(json.dumps(answers))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], int(sys.argv[2]), hangs_up="hangs-up" in sys.argv))
