"""A frontend process for tests: ``frontend.py MODE NAME SOCKET_DIR``. It says on stdout how far it has come, and goes on.

write        holds a slot that it writes to all the time
submit       has a request submitted, which the engine holds
stream       reads a stream
load         sends requests of many sizes, in place and copied, checks every answer, and prints how many it has had
disconnect   has ended its connection, and lives
fork         has forked a child that holds its socket; prints the child's pid
"""

from __future__ import annotations

import asyncio
import os
import sys
import time

import torch

import shmring


def tensor(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def say(*words: object) -> None:
    print(*words, flush=True)


async def write(client: shmring.RingClient) -> None:
    async with client.slot(500_000) as slot:
        view = slot.tensor((500_000,), torch.uint8)
        say("writing")
        while True:
            view.add_(1)
            await asyncio.sleep(0)


async def submit(client: shmring.RingClient) -> None:
    submission = await client.submit({"mode": "hold", "x": tensor(500_000, 0)})
    say("submitted")
    await submission.result()


async def stream(client: shmring.RingClient) -> None:
    replies = 0
    async for _ in client.stream({"mode": "stream", "x": tensor(50_000, 0)}):
        replies += 1
        if replies == 10:
            say("streaming")


async def check_answer(client: shmring.RingClient, seed: int) -> None:
    nbytes = (10, 900, 5_000, 70_000, 300_000)[seed % 5] + seed % 7
    data = tensor(nbytes, seed)
    expected = int(data.sum())
    if seed % 2:
        async with client.slot(nbytes) as slot:
            view = slot.tensor((nbytes,), torch.uint8)
            view.copy_(data)
            answer = await client.request({"mode": "answer", "x": view}, timeout=30)
            del view
    else:
        answer = await client.request({"mode": "answer", "x": data}, timeout=30)
    assert (answer["n"], answer["sum"]) == (nbytes, expected), "a wrong answer"
    assert torch.equal(answer["x"], data), "a wrong reply"


async def load(client: shmring.RingClient) -> None:
    done = 0

    async def worker(number: int) -> None:
        nonlocal done
        for seed in range(number, 1 << 30, 8):
            await check_answer(client, seed)
            done += 1
            if done % 20 == 0:
                say(done)

    await asyncio.gather(*(worker(number) for number in range(8)))


async def disconnect(client: shmring.RingClient) -> None:
    async with client.slot(100_000) as slot:
        view = slot.tensor((100_000,), torch.uint8)
        assert client._session is not None
        client._session.connection.abort()
        say("disconnected")
        while True:
            view.add_(1)
            await asyncio.sleep(0.001)


async def fork(client: shmring.RingClient) -> None:
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    say("forked", child)
    await asyncio.Event().wait()


async def main(mode: str, name: str, socket_dir: str) -> None:
    torch.set_num_threads(1)
    async with shmring.connect(name, socket_dir=socket_dir, connect_timeout_s=30) as client:
        await globals()[mode](client)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
