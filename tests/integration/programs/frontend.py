"""A frontend process for tests: ``frontend.py MODE NAME SOCKET_DIR``. It says on stdout how far it has come, and goes on.

idle         holds a lease in which nothing lies
write        holds a slot that it writes to all the time
submit       has a request submitted, which the engine holds
stream       reads a stream
load         sends requests of many sizes, in place and copied, checks every answer, and prints how many it has had
texts        reads a stream of messages, and says every thousand
flood        stops itself; continued, it sends until the ring to the engine is full
torn         has half written a message that it has not published
pauses       sends small requests with pauses of all lengths between them, and says when it is through
disconnect   has ended its connection, and lives
keep         has given content to keep, which it holds
keeping      gives content to keep all the time
finding      looks for content and sends it, again and again, and says after each twenty
pinned       has kept content in a request that the engine holds, and has left it
fork         has forked a child that holds its socket; prints the child's pid
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time

import torch

import shmring
from shmring.core.compiled import RecordWriter
from shmring.core.messages import PROTOCOL_VERSION, Hello
from shmring.transport.endpoint import attach_engine
from shmring.transport.rings import map_rings
from tests.records import submit_of
from tests.sessions import attachment_of, session_of

AT_RECORDS = 4096  # of a message ring


def tensor(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def say(*words: object) -> None:
    print(*words, flush=True)


async def idle(client: shmring.Client) -> None:
    say("idle")
    await asyncio.Event().wait()


async def write(client: shmring.Client) -> None:
    async with client.slot(500_000) as slot:
        view = slot.tensor((500_000,), torch.uint8)
        say("writing")
        while True:
            view.add_(1)
            await asyncio.sleep(0)


async def submit(client: shmring.Client) -> None:
    submission = await client.submit({"mode": "hold", "x": tensor(500_000, 0)})
    say("submitted")
    await submission.result()


async def stream(client: shmring.Client) -> None:
    replies = 0
    async for _ in client.stream({"mode": "stream", "x": tensor(50_000, 0)}):
        replies += 1
        if replies == 10:
            say("streaming")


async def check_answer(client: shmring.Client, seed: int) -> None:
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


async def load(client: shmring.Client) -> None:
    done = 0

    async def worker(number: int) -> None:
        nonlocal done
        for seed in range(number, 1 << 30, 8):
            await check_answer(client, seed)
            done += 1
            if done % 20 == 0:
                say(done)

    await asyncio.gather(*(worker(number) for number in range(8)))


async def texts(client: shmring.Client) -> None:
    replies = 0
    async for text in client.stream({"mode": "texts", "x": tensor(10, 0)}):
        assert text == "x" * 1000
        replies += 1
        if replies % 1000 == 0:
            say(replies)


async def flood(client: shmring.Client) -> None:
    say("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
    why = ""
    while not why:
        try:
            client.submit_nowait({"mode": "hold", "x": tensor(10, 0), "text": "x" * 10_000})
        except shmring.WouldBlock as error:
            why = str(error)
    assert "reads more slowly than it is written to" in why, why
    say("full", client.statistics().in_flight)
    await asyncio.Event().wait()


async def torn(client: shmring.Client) -> None:
    """On a connection of its own, whose ring it can write to byte by byte."""
    engine = await attach_engine(attachment_of(client).place, Hello(PROTOCOL_VERSION, 65536, "torn"), frozenset({os.getuid()}))
    _, outgoing = map_rings(engine.ring_fds, engine.welcome.message_ring_nbytes)
    writer = RecordWriter(outgoing, engine.socket.fileno())
    writer.write(submit_of(None, None, epoch=engine.welcome.epoch, request_id=1))
    writer.ring_bell()
    memory, at = memoryview(outgoing), AT_RECORDS + int.from_bytes(memoryview(outgoing)[:8], "little")
    memory[at : at + 4] = (1000).to_bytes(4, "little")
    memory[at + 4 : at + 504] = bytes(range(250)) * 2
    say("torn")
    await asyncio.Event().wait()


async def pauses(client: shmring.Client) -> None:
    chance = random.Random(1)
    for number in range(1500):
        await check_small(client, number)
        pause_s = chance.choice((0.0, 0.0, 0.00002, 0.0001, 0.0005, 0.002))
        if pause_s:
            time.sleep(pause_s) if chance.random() < 0.5 else await asyncio.sleep(pause_s)  # a busy loop
    assert client.connected
    say("through", session_of(client).link.bells)


async def check_small(client: shmring.Client, number: int) -> None:
    data = torch.full((8,), number % 250, dtype=torch.uint8)
    answer = await client.request({"mode": "answer", "x": data}, timeout=10)
    assert answer["sum"] == 8 * (number % 250)


async def disconnect(client: shmring.Client) -> None:
    async with client.slot(100_000) as slot:
        view = slot.tensor((100_000,), torch.uint8)
        assert client.connected
        session_of(client).link.abort()
        say("disconnected")
        while True:
            view.add_(1)
            await asyncio.sleep(0.001)


def key(number: int) -> bytes:
    return number.to_bytes(32, "little")


async def keep(client: shmring.Client) -> None:
    kept = await client.keep(key(1), {"x": tensor(500_000, 1)})
    say("kept")
    await asyncio.Event().wait()
    kept.close()


async def keeping(client: shmring.Client) -> None:
    for number in range(1 << 30):
        async with client.slot(300_000) as slot:
            view = slot.tensor((300_000,), torch.uint8)
            view.fill_(number % 251)
            with await client.keep(key(1000 + number % 40), {"x": view}):
                answer = await client.request({"mode": "answer", "x": view}, timeout=30)
                assert answer["sum"] == 300_000 * (number % 251), "a wrong answer"
            del view
        if number == 20:
            say("keeping")


async def finding(client: shmring.Client) -> None:
    done = 0
    while True:
        number = done % 30
        kept = await client.find(key(number))
        if kept is None:
            kept = await client.keep(key(number), {"x": tensor(200_000, number)})
        with kept:
            answer = await client.request({"mode": "answer", "x": kept.payload["x"]}, timeout=30)
            assert torch.equal(answer["x"], tensor(200_000, number)), "what is kept has changed"
        done += 1
        if done % 20 == 0:
            say(done)


async def pinned(client: shmring.Client) -> None:
    with await client.keep(key(1), {"x": tensor(500_000, 1)}) as kept:
        submission = await client.submit({"mode": "hold", "x": kept.payload["x"]})
    say("pinned")
    await submission.result()


async def fork(client: shmring.Client) -> None:
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
