"""Hostile engines against the real ends of frontends and workers.

An input is a script: what the engine says when somebody attaches and what it passes beside that, and then steps. Each step is
the engine's, or the caller's at the other end. The engine keeps to the rules where the script has it, so that the lies come
at the right moments.

Whatever an engine does, its peer must not crash, hang, or raise what its callers are not told of. Its books stay sound, and
when the engine has gone, no descriptor and no mapping is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import itertools
import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import torch

import shmring
from shmring.client.client import Client
from shmring.client.connecting import open_client
from shmring.client.session import Session
from shmring.config import ClientConfig, WorkerConfig
from shmring.core.compiled import WORKER_PAGE_NBYTES, Mapping, RecordReader, RecordWriter, Submit, largest_record_nbytes
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    CallResult,
    EngineMessage,
    Failed,
    Find,
    Found,
    Keep,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    NotKept,
    RankTaken,
    Refused,
    Release,
    SlotRef,
    Welcome,
    WorkerWelcome,
    decode_frontend_message,
    encode_message,
)
from shmring.errors import RemoteProtocolError
from shmring.transport.load import create_load_page
from shmring.transport.rings import map_rings, sealed_memory, sealed_rings
from shmring.worker.joining import join_in_time
from shmring.worker.worker import Message, Worker
from tests.fuzz.scripts import MOST_TURNS, NAME, Steps, changed, check_error, listening, over, play, stage, turns
from tests.model.inside import read_record
from tests.records import done_of, reply_of, slot_extension, slot_header, tensor_extension
from tests.sessions import attachment_of

_LEASABLE_BLOCKS, _REPLY_BLOCKS, _BROADCAST_BLOCKS = 12, 2, 4
_SLAB_NBYTES = (1 + _LEASABLE_BLOCKS + _REPLY_BLOCKS) * BLOCK_NBYTES
_REPLIES_AT = (1 + _LEASABLE_BLOCKS) * BLOCK_NBYTES
_RING_NBYTES = 16 << 10
_INLINE_NBYTES = 1024
_BROADCAST = 120  # the tag of a message to workers
_MAX_TENSORS = 16
_MAX_VALUES = 1 << 12
_KEYS = [bytes([number]) * 32 for number in range(3)]
_READ_ONLY = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | 0x10 | fcntl.F_SEAL_SEAL  # 0x10: against future writing


class _HostileEngine:
    """An engine's end of one connection, which says what it likes.

    Args:
        connected: its socket.
        steps: of the script.
    """

    def __init__(self, connected: socket.socket, steps: Steps) -> None:
        self.socket = connected
        self.steps = steps
        self.slab_fd = os.memfd_create("slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.slab_fd, _REPLIES_AT)
        self.reply_fd = os.memfd_create("replies", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.reply_fd, _REPLY_BLOCKS * BLOCK_NBYTES)
        os.pwrite(self.reply_fd, slot_header(77, 100), 0)
        fcntl.fcntl(self.reply_fd, fcntl.F_ADD_SEALS, _READ_ONLY)
        self.ring_fds = sealed_rings(_RING_NBYTES)
        self.incoming, self.outgoing = reversed(map_rings(self.ring_fds, _RING_NBYTES))
        self.reader = RecordReader(self.incoming, connected.fileno())
        self.writer = RecordWriter(self.outgoing, connected.fileno())
        self.extra_fds: list[int] = []
        self.asked: list[Any] = []  # by the other end, and not answered
        self.numbers: list[int] = []  # that it has used: ids, tokens, generations, offsets
        self.next_lease, self.lease_end = 2, 4  # the base lease has the blocks before

    def close(self) -> None:
        """Ends the connection. The memory must be mapped nowhere then, once its reader is gone as well."""
        for fd in (self.reply_fd, *self.ring_fds, *self.extra_fds):
            os.close(fd)
        self.socket.close()

    def check_unmapped(self) -> None:
        """Nobody can write to the slab any more."""
        try:
            fcntl.fcntl(self.slab_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise AssertionError("the slab is still mapped") from None
            raise
        finally:
            os.close(self.slab_fd)

    # -- attaching -------------------------------------------------------------------------------------------------------

    def answer(self, welcome: Welcome | WorkerWelcome, fds: list[int], *, changes: bool) -> None:
        """Says welcome; with ``changes`` as the script has it, and with other descriptors."""
        message = msgspec.msgpack.decode(encode_message(welcome))
        if changes:
            message = changed(message, self.steps, [])
            fds = self._exchanged(fds)
        body = msgspec.msgpack.encode(message)
        frame = len(body).to_bytes(4, "little") + body
        with contextlib.suppress(OSError):
            if changes and (said := self.steps.bytes()):
                frame = said if self.steps.byte() & 1 else len(said).to_bytes(4, "little") + said
            socket.send_fds(self.socket, [frame], fds)

    def _exchanged(self, fds: list[int]) -> list[int]:
        for _ in range(self.steps.byte() % 4):
            place, kind = self.steps.byte() % len(fds), self.steps.byte()
            other = self._other_descriptor(kind, fds[place])
            if other is None:
                del fds[place]
            elif kind & 64:
                fds.insert(place, other)
            else:
                fds[place] = other
            if not fds:
                break
        return fds

    def _other_descriptor(self, kind: int, fd: int) -> int | None:
        size = max(1, os.fstat(fd).st_size)
        makers: list[Callable[[], int]] = [
            lambda: sealed_memory("short", max(1, size - BLOCK_NBYTES)),
            lambda: sealed_memory("long", size + BLOCK_NBYTES),
            lambda: self._memory(size),
            lambda: os.open("/dev/zero", os.O_RDWR | os.O_CLOEXEC),
            lambda: os.open("/", os.O_RDONLY | os.O_CLOEXEC),
            lambda: os.open(f"/proc/self/fd/{self.slab_fd}", os.O_RDONLY | os.O_CLOEXEC),
            lambda: os.eventfd(0, os.EFD_CLOEXEC),
            lambda: os.dup(self.slab_fd),
            lambda: os.dup(self.reply_fd),
            lambda: os.dup(self.ring_fds[0]),
            lambda: os.dup(self.socket.fileno()),
            lambda: sealed_memory("sealed", size),
        ]
        chosen = kind % 64 % (len(makers) + 1)
        if chosen == len(makers):
            return None
        self.extra_fds.append(makers[chosen]())
        return self.extra_fds[-1]

    def _memory(self, nbytes: int) -> int:
        fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, nbytes)
        return fd

    # -- afterwards --------------------------------------------------------------------------------------------------------

    def hear(self) -> None:
        """Reads what the other end has said, if that can still be read."""
        with contextlib.suppress(RemoteProtocolError):
            while (record := self.reader.read()) is not None:
                self._note(record)
            self.reader.ring_bell()

    def _note(self, record: bytes) -> None:
        submit = read_record(record, _MAX_TENSORS, from_engine=False)
        if isinstance(submit, Submit):
            self.asked.append(submit)
            self.numbers += [submit.request_id, *(slot.generation for slot in submit.content.slots)]
            return
        message = decode_frontend_message(record)
        self.asked.append(message)
        self.numbers += [field for field in msgspec.structs.astuple(message) if type(field) is int]

    def say(self, record: bytes) -> None:
        """Publishes a record, if there is room for it, and rings."""
        with contextlib.suppress(RemoteProtocolError):
            if 0 < len(record) <= largest_record_nbytes(_RING_NBYTES) and self.writer.write(record):
                self.writer.ring_bell()

    def tell(self, message: EngineMessage | bytes) -> None:
        """The same of a message, some of whose numbers the script changes."""
        record = message if isinstance(message, bytes) else encode_message(message)
        said = changed(msgspec.msgpack.decode(record), self.steps, self.numbers)
        with contextlib.suppress(OverflowError):  # no number of msgpack
            self.say(msgspec.msgpack.encode(said))

    def answer_next(self) -> None:
        """Answers what was asked first, in one of the ways in which an engine can."""
        self.hear()
        kind = self.steps.byte()
        match self.asked.pop(0) if self.asked else None:
            case Submit(request_id=request_id, content=content):
                released = [slot.generation for slot in content.slots]
                self._end(kind, request_id, released)
            case LeaseRequest(token=token, nbytes=nbytes) if nbytes:
                blocks = -(-nbytes // BLOCK_NBYTES)
                self.tell(LeaseGrant(token, self.next_lease, self.lease_end * BLOCK_NBYTES, blocks * BLOCK_NBYTES))
                self.next_lease, self.lease_end = self.next_lease + 1, self.lease_end + blocks
            case Find(token=token):
                if kind & 1:
                    self.tell(self._found(token))
                else:
                    self.tell(NotKept(token, "absent" if kind & 2 else "large"))
            case Keep(token=token, generation=generation, offset=offset, nbytes=nbytes, is_copied=is_copied, payload=payload):
                match kind % 4:
                    case 0:
                        self.tell(Found(token, generation, offset, nbytes, is_copied, payload))
                    case 1:
                        self.tell(Release((generation,)))
                        self.tell(self._found(token))
                    case _:
                        self.tell(Release((generation,)))
                        self.tell(NotKept(token, ("full", "large", "pins", "ends", "absent")[kind // 4 % 5]))
            case Call(call_id=call_id):
                self.tell(CallResult(call_id, b"\xa1x", None if kind & 1 else ("ValueError\x1b", "text\n\x1b[31m")))
            case Abort(request_id=request_id):
                self.tell(Failed(request_id, "aborted", "", ""))

    def _found(self, token: int) -> Found:
        payload = msgspec.msgpack.encode({"x": tensor_extension(0, 0, 100, "uint8", (100,))})
        return Found(token, 1 << 44, 10 * BLOCK_NBYTES, 100, True, payload)

    def _end(self, kind: int, request_id: int, released: list[int]) -> None:
        pixels = tensor_extension(0, 0, 100, "uint8", (100,))
        match kind % 8:
            case 0:
                self.tell(reply_of("x", request_id=request_id))
                self.tell(done_of(released, request_id=request_id))
            case 1:
                self.tell(reply_of(pixels, SlotRef(kind >> 3 & 1, _REPLIES_AT, 100, 77), request_id=request_id))
                self.tell(done_of(released, request_id=request_id))
            case 2:
                self.tell(Release(tuple(released)))
                self.tell(Failed(request_id, "error", "ValueError\x1b", "text\n\x1b[31m"))
            case 3:
                self.tell(Failed(request_id, "timed_out", "", "\x1b"))
            case 4:
                self.tell(msgspec.msgpack.encode([104, request_id, released, bytes(100), pixels]))
            case 5:
                self.tell(reply_of(None, SlotRef(0, _REPLIES_AT, 100, 77), request_id=request_id, lies_at=(0, 100)))
            case 6:
                self.tell(msgspec.msgpack.encode([104, request_id, released, slot_extension(0, _REPLIES_AT, 100, 77), pixels]))
            case _:
                self.tell(reply_of(pixels, bytes(100), request_id=request_id))

    def act(self, choice: int) -> None:
        """One step of its own, of which it does several as no engine should."""
        steps = self.steps
        match choice % 12:
            case 0 | 1 | 2 | 3:
                self.answer_next()
            case 4:
                self.say(steps.bytes())
            case 5:
                offset, written = steps.byte() * BLOCK_NBYTES % _REPLIES_AT, steps.bytes()
                os.pwrite(self.slab_fd, written, offset)
            case 6:
                self._corrupt(self.outgoing if steps.byte() & 1 else self.incoming)
            case 7:
                with contextlib.suppress(OSError):
                    self.socket.send(steps.bytes() or b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            case 8:
                with contextlib.suppress(OSError):
                    socket.send_fds(self.socket, [b"\0"], [self.slab_fd] * (1 + steps.byte() % 9), socket.MSG_DONTWAIT)
            case 9:
                self.tell(self._unasked(steps.byte()))
            case 10:
                self.hear()
            case _:
                if steps.byte() & 7 == 7:
                    with contextlib.suppress(OSError):
                        self.socket.shutdown(socket.SHUT_RDWR)

    def _corrupt(self, memory: Any) -> None:
        at, value = self.steps.byte(), self.steps.bytes()[:8]
        place = (0, 64, 128, 8, 72, BLOCK_NBYTES)[at % 6] + (at >> 4) * 8
        memoryview(memory)[place : place + len(value)] = value
        with contextlib.suppress(OSError):
            self.socket.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _unasked(self, kind: int) -> EngineMessage:
        recent = self.numbers[-1] if self.numbers else 1
        messages: list[EngineMessage] = [
            LeaseGrant(0, 9, 4 * BLOCK_NBYTES, BLOCK_NBYTES),
            LeaseGrant(1, 9, _REPLIES_AT, BLOCK_NBYTES),
            LeaseRecall((1, 2, recent)),
            Release((recent, recent)),
            Refused("closing\x1b\n"),
            CallResult(recent, b"\xc1"),
            Failed(recent, "error", "E", "text"),
            self._found(recent),
            NotKept(recent, "pins"),
            RankTaken(0, 1, NAME),
            _welcome(),
            _worker_welcome(),
        ]
        return messages[kind % len(messages)]


def _welcome() -> Welcome:
    return Welcome(
        version=PROTOCOL_VERSION,
        epoch=5,
        client_id=1,
        slab_nbytes=_SLAB_NBYTES,
        block_nbytes=BLOCK_NBYTES,
        leasable_nbytes=_LEASABLE_BLOCKS * BLOCK_NBYTES,
        max_inflight=4,
        max_calls=2,
        max_leases=3,
        message_ring_nbytes=_RING_NBYTES,
        max_record_nbytes=largest_record_nbytes(_RING_NBYTES),
        inline_nbytes=_INLINE_NBYTES,
        max_payload_nbytes=1 << 16,
        max_tensors=_MAX_TENSORS,
        max_values=_MAX_VALUES,
        base_lease=LeaseGrant(0, 1, BLOCK_NBYTES, 3 * BLOCK_NBYTES),
        device_slab=None,
        kept_nbytes=4 * BLOCK_NBYTES,
        engine_name=NAME,
    )


def _worker_welcome() -> WorkerWelcome:
    return WorkerWelcome(
        version=PROTOCOL_VERSION,
        epoch=5,
        slab_nbytes=_SLAB_NBYTES,
        leased_nbytes=_REPLIES_AT,
        broadcast_nbytes=_BROADCAST_BLOCKS * BLOCK_NBYTES,
        message_ring_nbytes=_RING_NBYTES,
        inline_nbytes=_INLINE_NBYTES,
        max_payload_nbytes=1 << 16,
        max_tensors=_MAX_TENSORS,
        max_values=_MAX_VALUES,
        engine_name=NAME,
    )


async def _met(attempt: asyncio.Future[Any], steps: Steps) -> _HostileEngine | None:
    """The engine's end of the connection that somebody attempts; its hello was read."""
    listener, _ = listening()
    for _ in range(MOST_TURNS):
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            connected, _ = listener.accept()
            break
        if attempt.done():
            return None
    await turns()
    connected.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connected.recv(4096)
    return _HostileEngine(connected, steps)


async def _attempted(attempt: asyncio.Future[Any]) -> Any:
    """What somebody who attaches has in the end, if it is anything; who tries again meets nobody."""
    await turns(5)
    listener, _ = listening()
    for _ in range(MOST_TURNS):
        if attempt.done():
            break
        stage().now_s += 0.5
        await asyncio.sleep(0)
        with contextlib.suppress(BlockingIOError):
            listener.accept()[0].close()
    assert attempt.done(), "attaching hangs"
    with contextlib.suppress(BlockingIOError):
        while True:
            listener.accept()[0].close()
    check_error(attempt.exception())
    return None if attempt.exception() is not None else attempt.result()


# -- frontends -------------------------------------------------------------------------------------------------------------


class Callers:
    """Whoever uses a client: tasks that wait, and what they hold."""

    def __init__(self, client: Client, steps: Steps) -> None:
        self.client = client
        self.steps = steps
        self.tasks: list[asyncio.Future[Any]] = []
        self.slots: list[shmring.Slot] = []
        self.kept: list[Any] = []
        self.values: list[Any] = []

    def begin(self, call: Awaitable[Any]) -> None:
        """Somebody calls."""
        self.tasks.append(asyncio.ensure_future(call))

    async def request(self, payload: object) -> None:
        self.values.append(await self.client.request(payload))

    async def stream(self, payload: object) -> None:
        async for reply in self.client.stream(payload):
            self.values.append(reply)

    async def hold(self, nbytes: int) -> None:
        self.take(await self.client.slot(nbytes, drain=bool(nbytes & 1)).__aenter__())

    def take(self, slot: shmring.Slot) -> None:
        """Somebody has a slot, and writes to all of it."""
        self.slots.append(slot)
        slot.tensor((slot.nbytes,), torch.uint8).fill_(1)

    async def find(self, key: bytes) -> None:
        found = await self.client.find(key)
        if found is not None:
            self.kept.append(found)

    async def keep(self, key: bytes, payload: object) -> None:
        self.kept.append(await self.client.keep(key, payload))

    def act(self, choice: int) -> None:
        """One step; what can't be done raises what a caller is told of."""
        try:
            self._act(choice)
        except Exception as error:  # noqa: BLE001 - it is looked at
            check_error(error)

    def _act(self, choice: int) -> None:
        client, size = self.client, (100, 2000, 5000, 9000)[choice >> 4 & 3]
        key = _KEYS[choice >> 4 & 1]
        match choice % 16:
            case 0:
                self.begin(self.request("x"))
            case 1:
                self.begin(self.request({"x": torch.ones(size, dtype=torch.uint8)}))
            case 2:
                self.begin(self.stream([np.ones(size, np.uint8)]))
            case 3:
                self.begin(self.hold(size + (choice >> 6)))
            case 4:
                self.take(client.slot_nowait(size))
            case 5 if self.slots:
                self.slots.pop(0).close()
            case 6 if self.slots:
                slot = self.slots[-1]
                self.begin(self.request({"x": torch.frombuffer(slot._memory(), dtype=torch.uint8)}))
            case 7:
                self.begin(self.find(key))
            case 8:
                self.begin(self.keep(key, {"x": torch.ones(size, dtype=torch.uint8)}))
            case 9 if self.slots:
                self.begin(self.keep(key, {"x": torch.frombuffer(self.slots[-1]._memory(), dtype=torch.uint8)}))
            case 10 if self.kept:
                payload = self.kept[-1].payload
                self.values.append(payload)
                self.begin(self.request(payload))
            case 11 if self.kept:
                self.kept.pop(0).close()
            case 12:
                self.begin(client.call("method", 1))
            case 13 if self.tasks:
                self.tasks[(choice >> 4) % len(self.tasks)].cancel()
            case 14:
                self.read()
                self.values.clear()
            case 15:
                client.statistics()
                client.submit_nowait({"x": np.ones(size, np.uint8)})

    def read(self) -> None:
        """Reads every byte of what came."""
        for value in self.values:
            parts = value.values() if isinstance(value, dict) else [value]
            for part in parts:
                if isinstance(part, torch.Tensor | np.ndarray):
                    int(part.sum())

    def leave(self) -> None:
        """Nobody holds anything any more."""
        self.read()
        self.values.clear()
        for held in (*self.slots, *self.kept):
            held.close()
        self.slots.clear()
        self.kept.clear()

    def check(self) -> None:
        """The books are sound, as long as there is a session."""
        session = attachment_of(self.client).session
        if isinstance(session, Session) and session.error is None:
            session.host_slots.book.check()


async def _engine_scene(data: bytes, *, changes: bool) -> None:
    steps = Steps(data)
    config = ClientConfig(
        socket_dir=listening()[1], lease_nbytes=3 * BLOCK_NBYTES, connect_timeout_s=2.0, prefault=False,
        map_leased_only=changes and bool(steps.byte() & 1),
    )  # fmt: skip
    attempt = asyncio.ensure_future(open_client(Client, [NAME], config))
    engine = await _met(attempt, steps)
    assert engine is not None
    fds = [engine.slab_fd, engine.reply_fd, *engine.ring_fds]
    load_fd, load = create_load_page()
    engine.extra_fds.append(load_fd)
    engine.answer(_welcome(), [*fds, load_fd], changes=changes)
    del load
    client = await _attempted_or_closed(attempt, engine)
    if client is not None:
        await _session(client, engine, steps)
        client = None
    engine.reader = engine.writer = engine.incoming = engine.outgoing = None  # type: ignore[assignment]
    await turns()
    gc.collect()
    engine.check_unmapped()


async def _attempted_or_closed(attempt: asyncio.Future[Any], engine: _HostileEngine) -> Any:
    for _ in range(12):  # what is complete is taken at once
        await asyncio.sleep(0)
    if not attempt.done():  # what is cut off: the end comes
        engine.socket.close()
    attached = await _attempted(attempt)
    if attached is None:
        engine.close()
    return attached


async def _session(client: Client, engine: _HostileEngine, steps: Steps) -> None:
    callers = Callers(client, steps)
    while steps:
        choice, what = steps.byte(), steps.byte()
        match choice % 4:
            case 0 | 1:
                engine.act(what)
            case 2:
                callers.act(what)
            case _:
                stage().now_s += (0.01, 0.3, 2.0, 10.0)[what % 4]
        await turns()
        callers.check()
    engine.close()
    await over(callers.tasks)
    for task in callers.tasks:
        check_error(None if task.cancelled() else task.exception())
    callers.leave()
    await over([asyncio.ensure_future(client.close())])


def attached_engines(data: bytes) -> None:
    """An engine that a client is attached to lies as it likes."""
    play(_engine_scene(data, changes=False))


def attaching(data: bytes) -> None:
    """An engine says and passes what it likes to a client that attaches; who believes it, and may, goes on to use it."""
    play(_engine_scene(data, changes=True))


# -- workers ----------------------------------------------------------------------------------------------------------------


class _Reader:
    """Whoever uses a worker."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.messages: list[Message] = []
        self.tasks: list[asyncio.Future[Any]] = []

    def act(self, choice: int) -> None:
        """One step; what can't be done raises what a caller is told of."""
        try:
            self._act(choice)
        except Exception as error:  # noqa: BLE001 - it is looked at
            check_error(error)

    def _act(self, choice: int) -> None:
        match choice % 8:
            case 0 | 1 | 2:
                self.messages.append(self.worker.receive_nowait())
                self._read(self.messages[-1])
            case 3 if self.messages:
                self.messages.pop(0).leave()
            case 4 if self.messages:
                self.tasks.append(asyncio.ensure_future(self.messages[-1].reply({"x": torch.ones(100)})))
            case 5:
                self.tasks.append(asyncio.ensure_future(self._receive()))
            case 6 if self.messages:
                self.tasks.append(asyncio.ensure_future(self.messages[-1].reply(bytes(20_000))))
            case 7 if self.tasks:
                self.tasks[(choice >> 3) % len(self.tasks)].cancel()

    async def _receive(self) -> None:
        self.messages.append(await self.worker.receive())
        self._read(self.messages[-1])

    def _read(self, message: Message) -> None:
        for value in (message.payload, message.beside):
            parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
            for part in parts:
                if isinstance(part, torch.Tensor | np.ndarray):
                    int(part.sum())

    def leave(self) -> None:
        """Nobody holds a message any more."""
        for message in self.messages:
            message.leave()
        self.messages.clear()


def _broadcast(steps: Steps, sequence: int) -> bytes:
    """A message to workers: some inline, with a slot of a claim, or in the memory of broadcasts."""
    pixels = tensor_extension(0, 0, 100, "uint8", (100,))
    kind, wants = steps.byte(), steps.byte() & 3
    in_place = slot_extension(0, BLOCK_NBYTES, 100, 1 << 40)
    copied = slot_extension(0, _SLAB_NBYTES + BLOCK_NBYTES, 100, 0)
    bodies: list[list[Any]] = [
        [[], None, {"step": 1}],
        [[], bytes(100), {"x": pixels}],
        [[in_place], None, {"x": tensor_extension(1, 0, 100, "uint8", (100,))}],
        [[], copied, {"x": pixels}],
        [[in_place], copied, [tensor_extension(1, 0, 100, "uint8", (100,)), pixels]],
    ]
    return msgspec.msgpack.encode([_BROADCAST, sequence, sequence % 8, wants, *bodies[kind % len(bodies)]])


async def _joined(config: WorkerConfig) -> Worker:
    return Worker(await join_in_time(NAME, 0, "label", config), Any)


async def _worker_scene(data: bytes, *, changes: bool) -> None:
    steps = Steps(data)
    config = WorkerConfig(socket_dir=listening()[1], connect_timeout_s=2.0, prefault=False)
    attempt = asyncio.ensure_future(_joined(config))
    engine = await _met(attempt, steps)
    assert engine is not None
    broadcast_fd = os.memfd_create("broadcasts", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(broadcast_fd, _BROADCAST_BLOCKS * BLOCK_NBYTES)
    fcntl.fcntl(broadcast_fd, fcntl.F_ADD_SEALS, _READ_ONLY)
    page_fd = sealed_memory("page", WORKER_PAGE_NBYTES)
    page = Mapping(page_fd, WORKER_PAGE_NBYTES)
    readable_fd = os.open(f"/proc/self/fd/{engine.slab_fd}", os.O_RDONLY | os.O_CLOEXEC)
    engine.extra_fds += [broadcast_fd, page_fd, readable_fd]
    fds = [readable_fd, engine.reply_fd, broadcast_fd, *engine.ring_fds, page_fd]
    engine.answer(_worker_welcome(), fds, changes=changes)
    worker = await _attempted_or_closed(attempt, engine)
    if worker is not None:
        await _reading(_Reader(worker), engine, steps, page)
        worker = None
    engine.reader = engine.writer = engine.incoming = engine.outgoing = None  # type: ignore[assignment]
    await turns()
    gc.collect()
    engine.check_unmapped()


async def _reading(reader: _Reader, engine: _HostileEngine, steps: Steps, page: Mapping) -> None:
    for sequence in itertools.count(1):
        if not steps:
            break
        choice, what = steps.byte(), steps.byte()
        match choice % 4:
            case 0 | 1 if what % 4:
                engine.tell(_broadcast(steps, sequence))
            case 0:
                engine.act(4 + what // 4 % 8)
            case 1:
                at, written = steps.byte() * 15, steps.bytes()
                memoryview(page)[at : at + len(written)] = written
            case _:
                reader.act(what)
        await turns()
    engine.close()
    await turns(10)
    await over(reader.tasks)
    for task in reader.tasks:
        check_error(None if task.cancelled() else task.exception())
    reader.leave()
    await over([asyncio.ensure_future(reader.worker.close())])


def joined_engines(data: bytes) -> None:
    """An engine that a worker has joined sends it what it likes."""
    play(_worker_scene(data, changes=False))


def joining(data: bytes) -> None:
    """An engine says and passes what it likes to a worker that joins."""
    play(_worker_scene(data, changes=True))


# -- where the search begins ------------------------------------------------------------------------------------------------

#: What callers do, and how the engine answers if it keeps to the rules.
_HONEST = {
    "small": [2, 0, 0, 0, 0, 0, 0],
    "in a slot": [2, 1, 0, 0, 1, 0, 0, 2, 14],
    "streamed": [2, 2, 0, 0, 0, 0, 0, 2, 14, 2, 2, 0, 0, 7, 0],
    "from a slot": [2, 3, 2, 6, 0, 0, 4, 0, 2, 14, 2, 5],
    "in further leases": [2, 51, 2, 35, 2, 35, 0, 0, 0, 0, 0, 0, 0, 0, 0, 9, 2, 0, 2, 5, 2, 5, 3, 3, 2, 5],
    "kept": [2, 8, 0, 0, 0, 0, 2, 10, 0, 0, 6, 0, 2, 11, 2, 7, 0, 0, 1, 0, 2, 10, 2, 7, 2, 11],
    "kept in place": [2, 3, 2, 9, 0, 0, 0, 0, 2, 5, 2, 7, 2, 10, 0, 0, 5, 0, 0, 2, 11, 2, 11],
    "not kept": [2, 8, 0, 0, 2, 0, 0, 2, 7, 0, 0, 2, 0, 2, 8, 0, 0, 1, 0, 0, 2, 11],
    "called": [2, 12, 0, 0, 1, 0, 2, 12, 0, 0, 0, 0],
    "failed": [2, 1, 0, 0, 2, 0, 0, 2, 1, 0, 0, 3, 0],
    "aborted": [2, 1, 2, 13, 0, 0, 3, 0, 2, 15, 0, 10, 3, 1],
    "refused": [2, 0, 2, 7, 2, 3, 0, 9, 4, 0],
}
_READ = {
    "inline": [0, 1, 0, 0, 0, 2, 0, 2, 3, 0, 1, 1, 0, 0, 2, 5, 2, 3],
    "in a slot": [0, 1, 2, 0, 0, 2, 0, 2, 3, 0, 1, 4, 2, 0, 2, 0, 2, 3],
    "answered": [0, 1, 3, 1, 0, 2, 0, 2, 4, 2, 3, 0, 1, 0, 1, 0, 2, 0, 2, 6, 2, 3],
    "left": [0, 1, 0, 1, 0, 2, 0, 2, 3, 0, 1, 0, 0, 0, 0, 0],
}

#: Honest scripts, by target.
SEEDS: dict[str, list[bytes]] = {
    "attached-engines": [bytes(script) for script in _HONEST.values()],
    "attaching": [
        *(bytes([0, 0, 0, 0, *script]) for script in _HONEST.values()),
        *(bytes([1, 1, field, 40 + field % 8, 0, 0, 2, 3, 2, 0]) for field in range(17)),
        *(bytes([0, 0, 1, place, kind, 0, 2, 3]) for place in range(5) for kind in range(13)),
    ],
    "joined-engines": [bytes(script) for script in _READ.values()],
    "joining": [
        *(bytes([0, 0, 0, *script]) for script in _READ.values()),
        *(bytes([1, field, 40 + field % 8, 0, 0]) for field in range(9)),
        *(bytes([0, 1, place, kind, 0]) for place in range(6) for kind in range(13)),
    ],
}
