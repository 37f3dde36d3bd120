"""Hostile workers against a real engine.

An input is a script of steps. Some are the worker's, which sends, writes into its page and corrupts its rings as it likes,
and keeps to the rules where the script has it. The others are the engine's, which has an honest frontend and an honest worker
beside.

Whatever the hostile one does, the engine must not crash, hang or raise what its callers are not told of. Its books stay
sound, the two honest ones are served, and what the hostile one had comes back when it is dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import torch

import shmring
from shmring.core.compiled import WORKER_PAGE_NBYTES, Mapping, RecordReader, RecordWriter, largest_record_nbytes
from shmring.core.messages import PROTOCOL_VERSION, AnswerFailed, AnswerPart, Join, encode_message
from shmring.errors import RemoteProtocolError
from shmring.ring import limits
from shmring.transport.endpoint import join_engine
from shmring.transport.rings import map_rings
from tests.fuzz.scripts import Steps, changed, check_error, listening, over, play, stage, turns
from tests.records import tensor_extension

_ANSWER = 32  # the tag of a worker's reply
_RING_NBYTES = 16 << 10
_STAMPS_AT = 2048
_NAME = "served"
_OPTIONS: dict[str, Any] = {
    "slab_nbytes": "128KiB",
    "backing": "memfd",
    "prefault": False,
    "pin": "off",
    "inline_nbytes": 1024,
    "message_ring_nbytes": _RING_NBYTES,
    "worker_backlog": 4,
    "broadcast_nbytes": 32 << 10,
}


class _HostileWorker:
    """A worker's end of one connection, which does as it likes."""

    def __init__(self, joined: Any, steps: Steps) -> None:
        self.socket: socket.socket = joined.socket
        self.steps = steps
        self.incoming, self.outgoing = map_rings(joined.ring_fds, _RING_NBYTES)
        self.page = Mapping(joined.page_fd, WORKER_PAGE_NBYTES)
        self.reader = RecordReader(self.incoming, self.socket.fileno())
        self.writer = RecordWriter(self.outgoing, self.socket.fileno())
        self.got: list[tuple[int, int, int]] = []  # number, stamp and flags of messages
        for fd in (*joined.memory_fds, *joined.ring_fds, joined.page_fd, joined.pidfd):
            os.close(fd)

    @classmethod
    async def join(cls, steps: Steps) -> _HostileWorker:
        path = Path(listening()[1], f"{_NAME}.sock")
        return cls(await join_engine(path, Join(PROTOCOL_VERSION, 0, "hostile\x1b\n"), frozenset({os.getuid()})), steps)

    def hear(self) -> None:
        """Reads what the engine has sent."""
        with contextlib.suppress(RemoteProtocolError):
            while (record := self.reader.read()) is not None:
                _, sequence, stamp, flags, *_ = [*msgspec.msgpack.decode(record), 0, 0, 0]
                if isinstance(sequence, int):
                    self.got.append((sequence, stamp, flags))
            self.reader.ring_bell()

    def say(self, record: bytes) -> None:
        """Publishes a record, if there is room for it, and rings."""
        with contextlib.suppress(RemoteProtocolError):
            if 0 < len(record) <= largest_record_nbytes(_RING_NBYTES) and self.writer.write(record):
                self.writer.ring_bell()

    def tell(self, message: list[Any]) -> None:
        """The same of a message, some of whose numbers the script changes."""
        said = changed(message, self.steps, [number for got in self.got for number in got])
        with contextlib.suppress(OverflowError):
            self.say(msgspec.msgpack.encode(said))

    def act(self, choice: int) -> None:
        """One step."""
        self.hear()
        steps, (sequence, stamp, _) = self.steps, self.got[0] if self.got else (1, 0, 0)
        match choice % 10:
            case 0:
                self.tell([_ANSWER, sequence, None, {"n": 1}])
            case 1:
                self.tell([_ANSWER, sequence, bytes(100), tensor_extension(0, 0, 100, "uint8", (100,))])
            case 2:
                self.tell(msgspec.msgpack.decode(encode_message(AnswerFailed(sequence, "E\x1b", "text\n\x1b"))))
            case 3:
                part = msgspec.msgpack.encode([_ANSWER, sequence, None, "x" * 100])
                self.tell(msgspec.msgpack.decode(encode_message(AnswerPart(part[:50], True))))
                self.tell(msgspec.msgpack.decode(encode_message(AnswerPart(part[50:], False))))
            case 4 if self.got:
                self.got.pop(0)
                self.write(_STAMPS_AT + 8 * stamp, sequence.to_bytes(8, "little"))
            case 5:
                self.write(steps.byte() * 16, steps.bytes())
            case 6:
                self.say(steps.bytes())
            case 7:
                at, value = steps.byte(), steps.bytes()[:8]
                place = (0, 64, 128, 8, 72, 4096)[at % 6] + (at >> 4) * 8
                memoryview(self.outgoing if at & 8 else self.incoming)[place : place + len(value)] = value
                self.bell(b"\0")
            case 8:
                self.bell(steps.bytes() or b"\0")
            case 9 if steps.byte() & 7 == 7:
                with contextlib.suppress(OSError):
                    self.socket.shutdown(socket.SHUT_RDWR)

    def write(self, at: int, data: bytes) -> None:
        """Writes into its page."""
        data = data[: max(0, WORKER_PAGE_NBYTES - at)]
        memoryview(self.page)[at : at + len(data)] = data

    def bell(self, data: bytes) -> None:
        """Sends what may be a bell."""
        with contextlib.suppress(OSError):
            self.socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


class _Served:
    """An engine, its honest frontend and worker, and a hostile worker."""

    def __init__(self, ring: shmring.Ring, client: shmring.Client, worker: Any, hostile: _HostileWorker, steps: Steps) -> None:
        self.ring = ring
        self.client = client
        self.worker = worker
        self.hostile = hostile
        self.steps = steps
        self.claims: list[shmring.Claim] = []
        self.tasks: list[asyncio.Future[Any]] = []

    def act(self, choice: int) -> None:
        """One step of the engine, its frontend or its honest worker."""
        try:
            self._act(choice)
        except Exception as error:  # noqa: BLE001 - it is looked at
            check_error(error)

    def _act(self, choice: int) -> None:
        to = (None, (0,), (1,), (0, 1))[choice >> 4 & 3]
        payload = ({"step": 1}, {"x": torch.ones(100)}, {"x": torch.ones(2000)}, "x" * 500)[choice >> 6]
        match choice % 10:
            case 0:
                self.tasks.append(asyncio.ensure_future(self.ring.broadcast(payload, to=to, timeout=30)))
            case 1:
                self.ring.broadcast_nowait(payload, to=to)
            case 2:
                self.tasks.append(asyncio.ensure_future(self.ring.gather(payload, to=to, timeout=30)))
            case 3:
                self.tasks.append(asyncio.ensure_future(self.client.request({"x": torch.ones(500)})))
            case 4:
                self.claims.append(self.ring.claim_nowait())
            case 5 if self.claims:
                self.ring.broadcast_nowait({"shared": self.claims[-1].payload}, to=to)
            case 6 if self.claims:
                self.claims.pop(0).done()
            case 7:
                with self.worker.receive_nowait() as message:
                    assert message.payload is not None
                    if message.wants_reply:
                        self.tasks.append(asyncio.ensure_future(message.reply({"n": 2})))
            case 8:
                assert len(self.ring.statistics().workers) <= 2
            case 9 if self.tasks:
                self.tasks[(choice >> 4) % len(self.tasks)].cancel()

    def check(self) -> None:
        """The books are sound. Who waits may have memory for a message that is in no book yet."""
        self.ring._shell._book.check()
        if all(task.done() for task in self.tasks):
            self.ring._shell.workers.book.check()

    async def end(self) -> None:
        """The hostile worker is dead; the others are served, and nothing of it is left."""
        workers = self.ring._shell.workers
        self.hostile.socket.close()
        for worker in list(workers._workers.values()):
            if worker.rank == 0:
                worker.watch.close()
                worker.watch._on_death()
        for claim in self.claims:
            claim.done()
        self.claims.clear()
        answering = asyncio.ensure_future(self._serve())
        await over(self.tasks)
        for task in self.tasks:
            check_error(None if task.cancelled() else task.exception())
        await over([asyncio.ensure_future(self._ask())])
        answering.cancel()
        await over([answering])
        workers.look()
        assert self.ring.ranks == (1,)
        assert not workers.book.outstanding, "a message is kept for who is dead"
        self.check()

    async def _serve(self) -> None:
        """What an engine and an honest worker do all day."""

        async def read() -> None:
            async for message in self.worker:
                with message:
                    if message.wants_reply:
                        await message.reply({"n": 2})

        async def answer(claim: shmring.Claim) -> None:
            await claim.reply(1)

        await asyncio.gather(read(), self.ring.run(answer))

    async def _ask(self) -> None:
        assert await self.client.request({"x": torch.ones(500)}) == 1
        assert await self.ring.gather("x") == [{"n": 2}]


async def _scene(data: bytes) -> None:
    steps = Steps(data)
    directory = listening()[1]
    async with (
        shmring.serve(_NAME, socket_dir=directory, **_OPTIONS) as ring,
        shmring.connect(_NAME, socket_dir=directory, lease_nbytes=16 << 10, inline_nbytes=0, prefault=False) as client,
        shmring.join(_NAME, 1, socket_dir=directory, prefault=False) as worker,
    ):
        served = _Served(ring, client, worker, await _HostileWorker.join(steps), steps)
        await ring.wait_workers(2)
        while steps:
            choice, what = steps.byte(), steps.byte()
            match choice % 4:
                case 0 | 1:
                    served.act(what)
                case 2:
                    served.hostile.act(what)
                case _:
                    stage().now_s += (0.001, 0.01, 0.2, 5.0)[what % 4]
            await turns()
            served.check()
        await served.end()


def joined_workers(data: bytes) -> None:
    """A worker that has joined an engine does as it likes."""
    with patch.object(limits, "MAX_WORKERS", 2):
        play(_scene(data))


#: Honest scripts.
SEEDS: dict[str, list[bytes]] = {
    "joined-workers": [
        bytes([0, 1, 0, 7, 2, 4, 0, 65, 0, 7, 2, 4, 0, 8]),  # broadcasts
        bytes([0, 2, 2, 0, 0, 0, 7, 2, 4, 0, 2, 2, 2, 0, 0, 7, 2, 4]),  # gathers, of which one fails
        bytes([0, 2, 2, 3, 0, 0, 0, 7, 2, 4, 0, 66, 2, 1, 0, 0, 7, 2, 4]),  # replies in parts, and with a tensor
        bytes([0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 2, 4, 3, 1, 0, 3, 0, 4, 0, 5, 0, 6, 2, 4, 0, 7]),  # claims that are shared
        bytes([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7, 2, 4, 3, 2, 2, 8, 1, 0]),  # a worker that is behind
    ]
}
