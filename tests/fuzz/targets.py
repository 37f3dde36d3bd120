"""What is fuzzed: each target takes any bytes, and raises if something else happens than what is promised of such bytes.

``test_targets.py`` runs all of them under hypothesis, ``run.py`` (``make fuzz``) one of them under atheris, which searches for
bytes that reach new code. What goes wrong with one input goes wrong with it again: nothing here is random.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from shmring.core.compiled import (
    WORKER_PAGE_NBYTES,
    BaseClaim,
    BaseFrontend,
    BaseMessage,
    Content,
    EngineBook,
    EngineEnd,
    FanOutBook,
    FanOutEnd,
    HeldSlots,
    Home,
    JoinedWorker,
    LinkReader,
    Mapping,
    Packed,
    RecordReader,
    RecordWriter,
    Regions,
    Submit,
    WorkerEnd,
    WorkerRecord,
    check_kept,
    check_payload,
    largest_record_nbytes,
    ring_nbytes,
)
from shmring.core.effects import EngineEffect, RequestAborted
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    SLOT_MAGIC,
    Abort,
    AnswerFailed,
    AnswerPart,
    Find,
    Goodbye,
    Hello,
    Join,
    Keep,
    LeaseRequest,
    LeaseReturn,
    Release,
    ReplyRead,
    ReplyRelease,
    SlotRef,
    StopWaiting,
    Unpin,
    Withdraw,
    decode_engine_message,
    decode_frontend_message,
    decode_worker_message,
    encode_message,
)
from shmring.core.states import RequestEvent
from shmring.errors import RemoteProtocolError, ShmringError, StaleDescriptorError
from shmring.frontend.errors import ApiError
from shmring.frontend.http.body_scan import LONG_NBYTES, BodyScan
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.image import probe
from shmring.frontend.media.mp4 import check_tables
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.riff import wav_sizes
from shmring.frontend.media.signatures import demuxer_of
from shmring.frontend.media.urls import parse_redirect, parse_url
from shmring.frontend.openai.chat import CHAT_PARSER
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER
from shmring.memory.tensors import make_decoder, make_packer
from tests.fuzz import hostile_engine, hostile_peer, hostile_worker
from tests.model.inside import Done, Reply, decode_content, read_record, take_payload, write_done, write_reply, write_submit
from tests.model.pairs import PairedEngineBook

_MAX_TENSORS = 16
_MAX_VALUES = 1 << 12
_MAX_PAYLOAD_NBYTES = 1 << 16
_INLINE_NBYTES = 1 << 10
_SLAB_NBYTES = 1 << 20


def _mapped(nbytes: int) -> Mapping:
    fd = os.memfd_create("slab")
    try:
        os.ftruncate(fd, nbytes)
        return Mapping(fd, nbytes)
    finally:
        os.close(fd)


_RING_NBYTES = 64
_RECORDS_AT = 4096


def message_rings(data: bytes) -> None:
    """Whatever lies in a message ring, and whatever its count says, is read as records of the ring or refused."""
    memory = bytearray(ring_nbytes(_RING_NBYTES))
    tail, records = data[:8].ljust(8, b"\0"), data[8 : 8 + _RING_NBYTES]
    memory[:8] = tail
    memory[_RECORDS_AT : _RECORDS_AT + len(records)] = records
    reader = RecordReader(memory, -1)
    taken = 0
    with contextlib.suppress(RemoteProtocolError):
        while (record := reader.read()) is not None:
            assert len(record) <= largest_record_nbytes(_RING_NBYTES)
            taken += 4 + len(record)
            assert taken <= int.from_bytes(tail, "little") <= _RING_NBYTES


def messages(data: bytes) -> None:
    """Bytes are a message that says the same when it is sent on, or are refused."""
    for decode in (decode_frontend_message, decode_engine_message, decode_worker_message):
        with contextlib.suppress(RemoteProtocolError):
            message = decode(data)
            assert decode(encode_message(message)) == message


def records(data: bytes) -> None:
    """Bytes are a submission, a reply or an end whose tensors all lie in its regions, or another message, or are refused."""
    for from_engine in (False, True):
        with contextlib.suppress(RemoteProtocolError):
            message = read_record(data, _MAX_TENSORS, _MAX_VALUES, from_engine=from_engine)
            content = message.content if isinstance(message, Submit | Reply | Done) else None
            if content is not None:
                _check_content(content, data)


def _check_content(content: Content, record: bytes) -> None:
    if content.payload_nbytes:
        assert content.is_copied_to_slot
        assert not content.payload
        assert content.payload_offset + content.payload_nbytes <= content.slots[-1].nbytes
        with contextlib.suppress(RemoteProtocolError):
            take_payload(
                content, record[-content.payload_nbytes :], _MAX_TENSORS, _MAX_VALUES
            )  # any bytes: what lies in a slot is anybody's
    else:
        # What msgspec takes for the record's last member is the payload.
        assert bytes(msgspec.msgpack.decode(record, type=list[msgspec.Raw])[-1]) == content.payload
    if content.payload:
        assert check_payload(content.payload, _MAX_TENSORS) == content.tensor_count == len(content.tensors)
        assert 8 * content.tensor_count <= content.value_count <= _MAX_VALUES
    for tensor in content.tensors:
        region_nbytes = content.slots[tensor.region - 1].nbytes if tensor.region else len(content.inline)
        assert not tensor.nbytes or tensor.offset + tensor.nbytes <= region_nbytes


class _Item(msgspec.Struct):
    pixels: torch.Tensor
    mask: np.ndarray[Any, Any] | None = None
    text: str = ""


class _Typed(msgspec.Struct):
    items: list[_Item]
    numbers: dict[str, float] = {}


_DECODERS = [make_decoder(), make_decoder(_Typed), make_decoder(writable=True)]
_SLAB = _mapped(_SLAB_NBYTES)


def payloads(data: bytes) -> None:
    """A content that was read decodes into views that lie in its regions, or is refused.

    A length and a submission; what follows is its payload if that lies in a slot.
    """
    length = int.from_bytes(data[:2], "little")
    record, in_slot = data[2 : 2 + length], data[2 + length :]
    try:
        submit = read_record(record, _MAX_TENSORS, from_engine=False)
        if not isinstance(submit, Submit):
            return
        content = submit.content
        if content.payload_nbytes:
            take_payload(content, in_slot, _MAX_TENSORS)
    except RemoteProtocolError:
        return
    if any(slot.offset + SLOT_HEADER_NBYTES + slot.nbytes > _SLAB_NBYTES for slot in content.slots):
        return  # the book refuses what is not in the slab
    regions = Regions()
    for decoder in _DECODERS:
        with contextlib.suppress(RemoteProtocolError, msgspec.ValidationError):
            value, viewed = decode_content(decoder, content, 1, regions, _SLAB)
            _check_views(value, content)
            assert len(viewed) == len(content.slots)
    value = None
    regions.close()


def _check_views(value: object, content: Content) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, _Typed):
        value = [part for item in value.items for part in (item.pixels, item.mask)]
    if isinstance(value, list | tuple | set):
        for child in value:
            _check_views(child, content)
    elif isinstance(value, torch.Tensor | np.ndarray) and value.nbytes:
        start = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        starts = [(_SLAB.address + slot.offset + SLOT_HEADER_NBYTES, slot.nbytes) for slot in content.slots]
        in_region = any(first <= start and start + value.nbytes <= first + nbytes for first, nbytes in starts)
        assert in_region or value.nbytes <= len(content.inline)


_LOOP = asyncio.new_event_loop()  # that makes futures, and never runs
atexit.register(_LOOP.close)
_HOME = Home("what is fuzzed", "make another", _LOOP)
_GEOMETRY = Geometry(leasable_blocks=12, reply_blocks=2)
_LIMITS = EngineBookLimits(
    max_lease_blocks=8, quota_blocks=10, max_leases=3, max_inflight=4, kept_blocks=4, max_kept=3, max_pins=3, max_waits=2
)


class _NoLink:
    """Nobody reads: what is sent goes nowhere."""

    can_write = True
    polls_busily = False

    def queue(self, record: bytes) -> None:
        """Drops what finds the ring full."""


class _Frontend(BaseFrontend):
    def __init__(self, engine: _Engine, client_id: int) -> None:
        super().__init__(engine.end, client_id)
        self.engine = engine
        self.link = _NoLink()
        self.attach(RecordWriter(bytearray(ring_nbytes(1 << 10)), -1))

    def handle_message(self, record: bytes) -> None:
        self.engine.message_received(self.client_id, record)


class _Claim(BaseClaim):
    def __del__(self) -> None:
        """Whole states are dropped here: nothing is to come back."""


class _Engine:
    """The shell of an engine's end: what :class:`~shmring.ring.shell.Shell` does for it, without connections."""

    home = _HOME

    def __init__(self, book: EngineBook | None = None) -> None:
        self.book = EngineBook(_GEOMETRY, _LIMITS) if book is None else book
        self.slab = _mapped(_GEOMETRY.slab_nbytes)
        self.regions = Regions()
        self.end = EngineEnd(
            self,
            self.book,
            self.regions,
            self.slab,
            _DECODERS[0],
            _Claim,
            epoch=1,
            max_tensors=_MAX_TENSORS,
            max_values=_MAX_VALUES,
            inline_nbytes=_INLINE_NBYTES,
            max_payload_nbytes=_MAX_PAYLOAD_NBYTES,
            debug=False,
        )
        self.frontends: dict[int, _Frontend] = {}
        self.claims: list[_Claim] = []  # in somebody's hands
        self.failures: list[tuple[Exception, bool]] = []  # to take a request up; whether its frontend is guilty

    def connect(self, client_id: int) -> None:
        """A frontend comes."""
        self.book.connect(client_id, 2 * BLOCK_NBYTES)
        self.frontends[client_id] = _Frontend(self, client_id)

    def write(self, offset: int, data: bytes) -> None:
        """Somebody writes into the slab."""
        with memoryview(self.slab) as memory:
            memory[offset : offset + len(data)] = data[: len(memory) - offset]

    def message_received(self, client_id: int, record: bytes) -> None:
        """A frontend has sent what is no submission."""
        match decode_frontend_message(record):
            case Abort(request_id):
                self.carry_out(self.book.abort(client_id, request_id))
            case LeaseRequest() as request:
                self.carry_out(self.book.request_lease(client_id, msgspec.structs.replace(request, memory=0)))
            case LeaseReturn(lease_ids):
                self.carry_out(self.book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                self.carry_out(self.book.release_replies(client_id, generations))
            case ReplyRead(request_ids):
                self.carry_out(self.book.replies_read(client_id, request_ids))
            case Find(token, key, waits, for_one):
                self.carry_out(self.book.find(client_id, token, key, waits, for_one))
            case Withdraw(names):
                self.carry_out(self.book.withdraw(client_id, names))
            case StopWaiting(tokens):
                self.carry_out(self.book.stop_waiting(client_id, tokens))
            case Keep() as content:
                check_kept(content, _MAX_TENSORS, _MAX_VALUES)
                self.carry_out(self.book.keep(client_id, content))
            case Unpin(generations):
                self.carry_out(self.book.unpin(client_id, generations))
            case Goodbye(kept_lease_ids, kept_reply_generations, pinned_generations=pinned):
                self.carry_out(self.book.goodbye(client_id, kept_lease_ids, kept_reply_generations, pinned))
                self.frontends[client_id].detach()

    def work(self, client_id: int) -> None:
        """The engine takes the next request up, or finishes one of this client that it has taken up."""
        claim = self.end.claim_next()
        if claim is not None:
            self.claims.append(claim)
            return
        for claim in self.claims:
            if claim.client_id == client_id:
                self.claims.remove(claim)
                self.finish(claim)
                return

    def finish(self, claim: _Claim) -> None:
        """The engine finishes a request that it has taken up."""
        self.end.finish(claim)
        self.collect()

    def release(self, claim: _Claim) -> None:
        """The engine leaves a request that it could not take up."""
        self.end.release(claim)

    def collect(self) -> None:
        """Views have died."""
        for key in self.regions.collect():
            self.carry_out(self.book.last_view_gone(*key))

    # -- for the end -------------------------------------------------------------------------------------------------

    def carry_out(self, effects: Sequence[EngineEffect]) -> None:
        """Of what the book decides, only the ends of requests matter here."""
        for effect in effects:
            if not isinstance(effect, RequestAborted):
                continue
            key = (effect.client_id, effect.request_id)
            if not effect.was_running:
                self.end.forget_waiting(*key)
            elif (claim := self.end.forget_claim(*key)) is not None:
                self.end.mark_ended(claim, aborted=True)

    def claim_failed(self, claim: _Claim, error: Exception, *, breaks_rules: bool) -> None:
        """A request can't be taken up."""
        assert isinstance(error, RemoteProtocolError | StaleDescriptorError | msgspec.ValidationError)
        self.failures.append((error, breaks_rules))
        self.release(claim)
        if breaks_rules:
            self.frontends[claim.client_id].detach()
            self.carry_out(self.book.disconnect(claim.client_id))
        else:
            self.book.end(claim.client_id, claim.request_id, RequestEvent.ERROR)

    def let_others_run(self) -> None:
        """There is no loop, whose next turn begins at once."""
        self.end.begin_turn()

    def send_release(self, frontend: _Frontend, generations: Sequence[int]) -> None:
        """Nobody listens."""

    def call_soon(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """There are none."""
        assert not callbacks

    def check_fence(self, submit: Submit) -> None:
        """There is no device slab."""
        raise RemoteProtocolError("a fence came, and there is no device memory")


def books(data: bytes) -> None:
    """Two frontends say what they like to an engine, and write what they like: its book stays sound and does what its model
    does, and all comes home when they are dead.

    A byte chooses who speaks or writes, or what the engine does meanwhile; a length and a record follow, or the number of a
    block and what is written there.
    """
    engine = _Engine(PairedEngineBook(_GEOMETRY, _LIMITS))  # what the end does to it, its model does as well
    book = engine.book
    for client in (1, 2):
        engine.connect(client)
    place = 0
    while place + 2 <= len(data):
        choice, length = data[place], data[place + 1]
        body, place = data[place + 2 : place + 2 + length], place + 2 + length
        client = 1 + choice % 2
        if not (client in book.clients and book.clients[client].connected):
            continue
        if choice & 4:
            if body:
                engine.write(body[0] % (_GEOMETRY.slab_nbytes // BLOCK_NBYTES) * BLOCK_NBYTES, body[1:])
        elif choice & 2:
            engine.work(client)
        else:
            with contextlib.suppress(RemoteProtocolError):
                engine.frontends[client].handle_record(body)
    for client in (1, 2):
        engine.frontends[client].detach()
        engine.carry_out(book.died(client))
    while engine.claims:
        engine.finish(engine.claims.pop())
    assert not engine.end.waiting_count
    assert not engine.end.running_count
    assert not book.clients
    engine.carry_out(book.drop_untaken([delivery.generation for delivery in book.untaken()]))
    kept = book.kept.blocks * BLOCK_NBYTES
    assert book.kept.unpinned_blocks == book.kept.blocks
    assert book.host.free_nbytes + kept == _GEOMETRY.leasable_blocks * BLOCK_NBYTES


def slot_headers(data: bytes) -> None:
    """A request whose slot's header says otherwise than its descriptor is stale, which convicts nobody."""
    data = data.ljust(32, b"\0")
    header = data[:24]
    generation = (1 << GENERATION_BITS) + 1 + int.from_bytes(data[24:28], "little")
    nbytes = 1 + int.from_bytes(data[28:30], "little") % (2 * BLOCK_NBYTES - SLOT_HEADER_NBYTES)
    engine = _Engine()
    engine.connect(1)
    slot = SlotRef(1, BLOCK_NBYTES, nbytes, generation)
    engine.write(slot.offset, header)
    engine.frontends[1].handle_record(_submit(np.ones(nbytes, np.uint8), slot))
    claim = engine.end.claim_next()
    if header == _header(slot):
        assert claim.payload.nbytes == nbytes
        engine.end.finish(claim)
    else:
        assert claim is None
        [(error, breaks_rules)] = engine.failures
        assert isinstance(error, StaleDescriptorError)
        assert not breaks_rules
    engine.collect()
    engine.book.check()
    assert not engine.book.clients[1].requests


_WORKERS = 2
_WORKER_RING_NBYTES = 1 << 13
_PAYLOADS = ({"step": 1}, {"text": "x" * 90}, {"pixels": np.ones(600, np.uint8)}, [np.ones((5, 900), np.uint8)])


class _Worker(JoinedWorker):
    """One that has joined: its records come as if its link had taken them from its ring, which stays empty."""

    def __init__(self, end: FanOutEnd, record: WorkerRecord) -> None:
        super().__init__(end)
        self.attach(record, LinkReader(bytearray(ring_nbytes(_WORKER_RING_NBYTES)), -1))

    def handle_message(self, record: bytes) -> None:
        match decode_worker_message(record):
            case AnswerFailed(sequence, type_name, message):
                self.end.handle_failure(self.record, sequence, type_name, message)


class _FanOut:
    """The shell of an engine's end towards its workers: what :class:`~shmring.ring.workers.Workers` does for it, without
    connections."""

    home = _HOME

    def __init__(self, engine: _Engine) -> None:
        self.book = FanOutBook(3, _WORKERS)
        self.memory = _mapped(4 * BLOCK_NBYTES)
        self.end = FanOutEnd(
            self,
            engine.end,
            self.book,
            make_packer(_MAX_TENSORS, _MAX_PAYLOAD_NBYTES),
            _DECODERS[0],
            engine.slab,
            inline_nbytes=64,
            record_nbytes=largest_record_nbytes(_WORKER_RING_NBYTES),
            at_once_nbytes=1 << 20,
            max_tensors=_MAX_TENSORS,
            max_values=_MAX_VALUES,
        )
        self.end.reserve(self.memory)
        self.pages: list[bytearray] = []
        self.rings: list[bytearray] = []  # to each
        self.records: list[WorkerRecord] = []
        self.workers: list[_Worker] = []
        self.gatherings: list[tuple[Any, asyncio.Future[None]]] = []
        for rank in range(_WORKERS):
            self.join(rank)

    def join(self, rank: int) -> None:
        """A worker joins in the place of one that is dead."""
        page, ring = bytearray(WORKER_PAGE_NBYTES), bytearray(ring_nbytes(_WORKER_RING_NBYTES))
        for of_each, new in ((self.pages, page), (self.rings, ring)):
            of_each[rank : rank + 1] = [new]
        record = self.book.join(rank, page, RecordWriter(ring, -1))
        self.records[rank : rank + 1] = [record]
        self.workers[rank : rank + 1] = [_Worker(self.end, record)]

    def send(self, payload: object, to: tuple[int, ...] | None) -> None:
        """The engine sends something to workers, if nothing has to be waited for."""
        with contextlib.suppress(ShmringError):
            self.end.send_now(payload, to)

    def gather(self, payload: object, to: tuple[int, ...] | None) -> None:
        """The same, and waits for their replies."""
        gathering = self.end.gather(payload, to, None)
        with contextlib.suppress(ShmringError, StopIteration):
            self.gatherings.append((gathering, gathering.send(None)))

    def end_gatherings(self) -> None:
        """Whoever has what it waits for, or will never get it, goes on; the others give up."""
        for gathering, future in self.gatherings:
            with contextlib.suppress(ShmringError, StopIteration, msgspec.ValidationError, asyncio.CancelledError):
                if future.done():
                    gathering.send(None)
                else:
                    gathering.throw(asyncio.CancelledError())
        self.gatherings.clear()

    # -- for the end -------------------------------------------------------------------------------------------------

    def worker_violated(self, record: WorkerRecord, error: RemoteProtocolError) -> None:
        """What a worker says of its ring can't be true."""
        self.book.part(record)
        self.end.lost(record, "broke the protocol")

    async def gather_in_turn(self, gathering: Any, parcel: Any, timeout: float | None) -> None:
        """Nobody waits for room here."""
        self.end.discard(parcel)
        raise RemoteProtocolError("there is no room")

    def published(self, record: WorkerRecord) -> None:
        """Nobody stays awake."""

    def slots_are_kept(self) -> None:
        """Somebody looks anyway."""


def workers(data: bytes) -> None:
    """Two workers write what they like into their pages, their rings, and what they send: the book stays sound, and all that
    they had comes back when both are dead.

    A byte chooses who does what; a length and a body follow. The engine shares a claim meanwhile.
    """
    engine = _Engine()
    engine.connect(1)
    slot = SlotRef(1, BLOCK_NBYTES, 100, (1 << GENERATION_BITS) + 1)
    engine.write(slot.offset, _header(slot))
    engine.frontends[1].handle_record(_submit(_PIXELS, slot))
    claim = engine.end.claim_next()
    fan_out = _FanOut(engine)
    book = fan_out.book
    place = 0
    while place + 2 <= len(data):
        choice, length = data[place], data[place + 1]
        body, place = data[place + 2 : place + 2 + length], place + 2 + length
        rank, to = choice % 2, (None, (0,), (1,), (0, 1))[choice >> 4 & 3]
        record = fan_out.records[rank]
        match choice >> 1 & 7:
            case 0 if record.is_member:
                with contextlib.suppress(RemoteProtocolError):
                    fan_out.workers[rank].handle_record(body)
            case 1 if len(body) > 2:
                at = int.from_bytes(body[:2], "little") % WORKER_PAGE_NBYTES
                page, written = fan_out.pages[rank], body[2:][: WORKER_PAGE_NBYTES - at]
                page[at : at + len(written)] = written
            case 2 if body:
                ring = fan_out.rings[rank]
                at = body[0] * 64 % _RECORDS_AT
                assert len(ring) > _RECORDS_AT + 256
                ring[at : at + len(body) - 1] = body[1:]
            case 3:
                fan_out.send(_PAYLOADS[length % len(_PAYLOADS)], to)
            case 4:
                fan_out.send({"shared": claim.payload}, to)
            case 5:
                fan_out.gather(_PAYLOADS[length % len(_PAYLOADS)], to)
            case 6:
                book.sweep()
                if book.ranks:
                    book.want(book.ranks)
                book.want_memory()
                book.want_slots()
            case 7 if choice & 64:
                book.died(record)
                fan_out.end.lost(record, "has died")
                if rank not in book.ranks and len(book.workers()) < _WORKERS:
                    fan_out.join(rank)
            case 7:
                book.part(record)
                fan_out.end.lost(record, "has left")
        book.check()
    fan_out.end_gatherings()
    assert not fan_out.end.gathers
    for record in book.workers():
        book.died(record)
    book.check()
    assert not book.outstanding
    assert book.free_blocks == 4
    engine.end.finish(claim)
    claim = None
    engine.collect()
    engine.book.check()
    assert not engine.book.clients[1].slots


class _Sharing:
    """An engine with two frontends and two workers, and beside it who holds which slot by right.

    A slot is held by its claim until that is finished, and by each message that shows it until all who got that have left it
    or are dead. It is in the book exactly for so long.
    """

    def __init__(self) -> None:
        self.engine = _Engine()
        self.fan_out = _FanOut(self.engine)
        self.readers = [RecordReader(ring, -1) for ring in self.fan_out.rings]
        self.generations = {1: 0, 2: 0}
        self.claims: dict[tuple[int, int], _Claim] = {}  # by client and block of its lease
        self.messages: dict[int, tuple[int, set[int], set[tuple[int, int]]]] = {}  # by number: stamp, who reads it, slots
        for client in self.generations:
            self.engine.connect(client)

    def submit(self, client: int, block: int) -> None:
        """A frontend sends what lies in a slot, unless somebody holds that, and the engine takes it up."""
        if (client, block) in self.held() or not self.engine.book.clients[client].connected:
            return
        self.generations[client] += 1
        generation = (client << GENERATION_BITS) + self.generations[client]
        slot = SlotRef(client, (1 + 2 * (client - 1) + block) * BLOCK_NBYTES, 100, generation)
        self.engine.write(slot.offset, _header(slot))
        self.engine.frontends[client].handle_record(_submit(_PIXELS, slot, request_id=self.generations[client]))
        claim = self.engine.end.claim_next()
        assert claim is not None
        self.claims[client, block] = claim

    def share(self, chosen: int, to: tuple[int, ...] | None) -> None:
        """The engine shares a claim, or all of them in one message."""
        places = list(self.claims) if chosen % 4 == 3 else list(self.claims)[chosen % 4 : chosen % 4 + 1]
        members = set(self.fan_out.book.ranks if to is None else to)
        sequence = self.fan_out.book.next_sequence
        with contextlib.suppress(ShmringError):
            self.fan_out.end.send_now([self.claims[place].payload for place in places], to)
        if self.fan_out.book.next_sequence == sequence:
            return
        records = [self.readers[rank].read() for rank in sorted(members)]
        assert all(record == records[0] for record in records), "workers got different messages"
        assert records[0] is not None
        _, number, stamp, _, slots, *_ = msgspec.msgpack.decode(records[0])
        assert number == sequence
        blocks = {int.from_bytes(slot.data[8:16], "little") // BLOCK_NBYTES - 1 for slot in slots}
        shown = {divmod(block, 2) for block in blocks}  # what was aborted may be copied
        self.messages[sequence] = stamp, members, {(1 + lease, block) for lease, block in shown}
        assert self.messages[sequence][2] >= {place for place in places if not self.claims[place].ended}

    def leave(self, rank: int, chosen: int) -> None:
        """A worker leaves a message that it has."""
        has = [(number, stamp) for number, (stamp, readers, _) in self.messages.items() if rank in readers]
        if has:
            number, stamp = has[chosen % len(has)]
            self.fan_out.pages[rank][2048 + 8 * stamp : 2056 + 8 * stamp] = number.to_bytes(8, "little")

    def end_worker(self, rank: int, *, is_dead: bool) -> None:
        """A worker has parted, or is dead; then another one comes in its place."""
        record = self.fan_out.records[rank]
        if not is_dead:
            self.fan_out.book.part(record)
            return
        self.fan_out.book.died(record)
        for _, readers, _ in self.messages.values():
            readers.discard(rank)
        self.fan_out.join(rank)
        self.readers[rank] = RecordReader(self.fan_out.rings[rank], -1)

    def end_frontend(self, client: int, *, is_dead: bool) -> None:
        """A frontend's connection has ended, or it is dead."""
        book = self.engine.book
        self.engine.frontends[client].detach()
        if is_dead:
            self.engine.carry_out(book.died(client))
        elif book.clients[client].connected:
            self.engine.carry_out(book.disconnect(client))

    def finish(self, chosen: int) -> None:
        """The engine finishes a request."""
        if self.claims:
            self.engine.end.finish(self.claims.pop(list(self.claims)[chosen % len(self.claims)]))

    def look(self) -> None:
        """The engine looks at the pages. Who has said that it left a message has; nobody else holds less than before."""
        self.fan_out.book.sweep()
        for number, (stamp, readers, _) in list(self.messages.items()):
            for rank in tuple(readers):
                page = self.fan_out.pages[rank]
                if int.from_bytes(page[2048 + 8 * stamp : 2056 + 8 * stamp], "little") == number:
                    readers.remove(rank)
            if not readers:
                del self.messages[number]
        self.engine.collect()

    def held(self) -> set[tuple[int, int]]:
        """Slots that somebody holds."""
        return set(self.claims).union(*(slots for _, _, slots in self.messages.values()))

    def check(self) -> None:
        """The books have what is held, and nothing else."""
        self.fan_out.book.check()
        self.engine.book.check()
        assert self.fan_out.book.outstanding == len(self.messages)
        booked = set()
        for client_id, client in self.engine.book.clients.items():
            booked |= {(client_id, slot.start - 1 - 2 * (client_id - 1)) for slot in client.slots.values()}
        assert booked == self.held(), "a slot is kept for nobody, or was freed while somebody reads it"


def shared_claims(data: bytes) -> None:
    """Slots of claims that are shared are free when the engine and the last worker have left them or have died, and not before;
    whoever dies at whatever step, and whatever workers write into their pages.

    Two bytes choose what happens, and to whom.
    """
    world = _Sharing()
    for place in range(0, len(data) - 1, 2):
        choice, detail = data[place], data[place + 1]
        rank, client = choice >> 3 & 1, 1 + (choice >> 3 & 1)
        match choice & 7:
            case 0 | 1 if client in world.engine.book.clients:
                world.submit(client, detail % 2)
            case 2:
                world.share(detail, (None, (0,), (1,), (0, 1))[choice >> 4 & 3])
            case 3 | 4:
                world.leave(rank, detail)
            case 5:
                world.finish(detail)
            case 6 if detail < 128:
                world.end_worker(rank, is_dead=bool(detail & 1))
            case 6 if client in world.engine.book.clients:
                world.end_frontend(client, is_dead=bool(detail & 1))
            case 7:
                page = world.fan_out.pages[rank]
                page[2048 + 8 * (detail % 8)] = choice >> 4
        world.look()
        world.check()
    for rank in range(_WORKERS):
        world.end_worker(rank, is_dead=True)
    while world.claims:
        world.finish(0)
    world.look()
    world.check()
    assert not world.messages


class _WorkersShell:
    """Whose messages they are."""

    home = _HOME

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """Its engine would be told."""


_PAIR_DECODER = make_decoder(tuple[Any, Any])  # of a claim's payload, and what goes beside it
_BELL, _ENGINES_BELL = socket.socketpair()
atexit.register(_BELL.close)
atexit.register(_ENGINES_BELL.close)


def worker_records(data: bytes) -> None:
    """What an engine sends to a worker is a message whose tensors lie in its memory, a record of another kind, or refused."""
    page = _mapped(WORKER_PAGE_NBYTES)
    memory = bytearray(ring_nbytes(1 << 13))
    end = WorkerEnd(
        _WorkersShell(),
        RecordReader(memory, -1),
        RecordWriter(bytearray(ring_nbytes(1 << 10)), -1),
        _BELL.fileno(),
        _SLAB,
        page,
        _DECODERS[0],
        _PAIR_DECODER,
        _PACKER,
        BaseMessage,
        max_tensors=_MAX_TENSORS,
        max_values=_MAX_VALUES,
        max_payload_nbytes=_MAX_PAYLOAD_NBYTES,
    )
    if not RecordWriter(memory, -1).write(data[: largest_record_nbytes(1 << 13)]):
        return
    with contextlib.suppress(RemoteProtocolError, msgspec.ValidationError, TypeError):
        message = end.receive(-1, 0.0, -1.0)
        if isinstance(message, BaseMessage):
            for value in (message.payload, message.beside):
                _check_lies_in(value, _SLAB.address, _SLAB_NBYTES, len(data))
            value = None
            message.leave()
    end.close()
    with memoryview(page) as said:
        assert sum(map(bool, said.cast("Q")[256:])) <= 1
        assert not any(said[:1024])
        assert not any(said[1032:2048])  # between them stands from which message on it takes none


def _check_lies_in(value: object, start: int, nbytes: int, inline_nbytes: int) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for child in value:
            _check_lies_in(child, start, nbytes, inline_nbytes)
    elif isinstance(value, torch.Tensor | np.ndarray) and value.nbytes:
        at = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        assert start <= at <= start + nbytes - value.nbytes or value.nbytes <= inline_nbytes


def bodies(data: bytes) -> None:
    """A body is left as it came, in whatever pieces, whether its strings are looked through or its values counted first."""
    nbytes, body = 1 + (data[0] if data else 0), data[1:]
    for is_counted_first in (False, True):
        scan, left = BodyScan(0 if is_counted_first else LONG_NBYTES + 1), bytearray()
        for start in range(0, len(body), nbytes):
            left += scan.add(body[start : start + nbytes])
        assert left + scan.finish() == body
        assert not scan.long_texts


def requests(data: bytes) -> None:
    """A body over HTTP is a request, or a 400 with a message."""
    for parser in (CHAT_PARSER, EMBEDDING_PARSER):
        refused: ApiError | None = None
        try:
            parser.parse(data)
        except ApiError as error:
            refused = error
        assert refused is None or (refused.status == 400 and 0 < len(str(refused)) < 1000)


def addresses(data: bytes) -> None:
    """A URL is understood in one way or refused, and says the same when it is written down and read again."""
    text, _, location = data.partition(b"\n")
    try:
        url = parse_url(text.decode("utf-8", "replace"))
    except MediaError:
        return
    assert url.scheme in ("http", "https")
    assert url.host
    assert 0 < url.port < 65536
    assert parse_url(f"{url.scheme}://{url.authority}{url.target}") == url
    with contextlib.suppress(MediaError):
        redirected = parse_redirect(url, location)
        assert redirected.scheme in ("http", "https")


_PICTURE_LIMITS = MediaLimits()


def media_headers(data: bytes) -> None:
    """What is looked at before a decoder is: accepted, or a message; never more memory than the file has bytes."""
    for look in (
        lambda file: wav_sizes(memoryview(file), len(file)),
        demuxer_of,
        check_tables,
        lambda file: probe(file, _PICTURE_LIMITS),
    ):
        with contextlib.suppress(MediaError):
            look(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__.replace("_", "-"): target
    for target in (
        *(message_rings, messages, records, payloads, books, slot_headers, workers, worker_records, shared_claims),
        *(hostile_engine.attaching, hostile_engine.attached_engines, hostile_engine.joining, hostile_engine.joined_engines),
        *(hostile_worker.joined_workers, hostile_peer.frames, bodies, requests, addresses, media_headers),
    )
}


# -- where the search begins --------------------------------------------------------------------------------------------


_PACKER = make_packer(_MAX_TENSORS, _MAX_PAYLOAD_NBYTES)
_SLOT = SlotRef(1, BLOCK_NBYTES, 100, (1 << GENERATION_BITS) + 1)
_PIXELS = np.arange(100, dtype=np.uint8).reshape(10, 10)


class _Held:
    """The record of a slot that a caller holds."""

    def is_submittable(self) -> bool:
        return True


def _read(write: Callable[[RecordWriter], bool]) -> bytes:
    """Returns what is written to a ring."""
    memory = bytearray(ring_nbytes(1 << 17))
    assert write(RecordWriter(memory, -1))
    record = RecordReader(memory, -1).read()
    assert record is not None
    return record


def _submit(
    payload: object, slot: SlotRef | None = None, *, in_place: np.ndarray[Any, Any] | None = None, request_id: int = 1
) -> bytes:
    """A submission whose tensors lie in the slot, copied there or written in place; without one they are in the record."""
    held = HeldSlots()
    if in_place is not None:
        record: Any = _Held()
        held.hold(record, in_place.ctypes.data, in_place.nbytes)
    packed = _PACKER.pack(payload, 0 if slot else _INLINE_NBYTES, 1 << 15, held)
    return _read(lambda writer: write_submit(writer, packed, 1, request_id, "", b"", () if slot is None else (slot,)))


def _header(slot: SlotRef) -> bytes:
    return SLOT_MAGIC + slot.generation.to_bytes(8, "little") + slot.nbytes.to_bytes(8, "little")


_KEY = bytes(range(32))
_KEPT_GENERATION = (1 << GENERATION_BITS) + 2
_KEPT_MESSAGES = (
    Find(1, _KEY),
    Keep(2, _KEY, 1, 2 * BLOCK_NBYTES, 100, _KEPT_GENERATION, False, b"\xc0"),
    Find(3, _KEY, waits=True),
    Find(5, bytes(32), waits=True),
    StopWaiting((5,)),
    Keep(4, _KEY, 1, BLOCK_NBYTES, 100, _KEPT_GENERATION + 1, False, b"\xc0"),
    Unpin((_KEPT_GENERATION, _KEPT_GENERATION)),
    Find(6, _KEY, waits=True, for_one=True),
    Keep(7, _KEY, 1, 2 * BLOCK_NBYTES, 100, _KEPT_GENERATION + 2, False, b"\xc0", for_one=True),
    Withdraw((_KEY,)),
)


def _seeds_of_messages() -> list[bytes]:
    sent: list[Any] = [
        Hello(1, BLOCK_NBYTES, "fuzz"),
        Abort(1),
        LeaseRequest(1, 2 * BLOCK_NBYTES, 4 * BLOCK_NBYTES),
        LeaseReturn((1,)),
        ReplyRelease((1,)),
        ReplyRead((1,)),
        Goodbye((1,)),
        Release((1,)),
        *_KEPT_MESSAGES,
        Goodbye((), (), False, False, ((1 << GENERATION_BITS) + 2,)),
        Join(1, 0, "fuzz"),
        AnswerFailed(1, "ValueError", "text"),
        AnswerPart(b"part", False),
    ]
    return [encode_message(message) for message in sent]


def _seeds_of_records() -> list[bytes]:
    packed = _PACKER.pack({"x": _PIXELS, "y": torch.ones(2)}, 0, 1 << 15)
    slot = _slot_for(packed)
    return [
        *(seed[2 : 2 + int.from_bytes(seed[:2], "little")] for seed in _seeds_of_payloads()),
        _read(lambda writer: write_reply(writer, packed, 1, slot)),
        _read(lambda writer: write_done(writer, 1, (1, 2, 3))),
        _read(lambda writer: write_done(writer, 1, (1,), packed, slot)),
    ]


def _seeds_of_books() -> list[bytes]:
    """An honest session of each of the two, as the target reads it."""
    found = []
    for client in (1, 2):
        slot = SlotRef(client, (1 + 2 * (client - 1)) * BLOCK_NBYTES, 100, (client << GENERATION_BITS) + 1)
        header = bytes([slot.offset // BLOCK_NBYTES]) + _header(slot)
        others = ((0, message) for message in _seeds_of_messages()[1:6])
        steps = [(4, header), (0, _submit(_PIXELS, slot)), (2, b""), (2, b""), *others]
        found.append(b"".join(bytes([choice + client - 1, len(body)]) + body for choice, body in steps))
    kept = [encode_message(message) for message in _KEPT_MESSAGES]
    again = SlotRef(0, 2 * BLOCK_NBYTES, 100, _KEPT_GENERATION)  # sent where it lies, and worked on
    header = bytes([again.offset // BLOCK_NBYTES]) + _header(again)
    steps = [(4, header), *((0, record) for record in kept[:4]), (0, _submit(_PIXELS, again)), (0, kept[4]), (2, b""), (2, b"")]
    found.append(b"".join(bytes([choice, len(body)]) + body for choice, body in steps))
    return found


def _seeds_of_workers() -> list[bytes]:
    """An honest session of both: messages to each, acknowledgements, replies, ends."""
    reply, failure = msgspec.msgpack.encode([32, 3, None, 1]), encode_message(AnswerFailed(3, "E", "text"))
    stamp_of = {number: (2048 + 8 * number).to_bytes(2, "little") for number in range(4)}  # stamps are given out in order
    left = [(2, stamp_of[number] + (number + 1).to_bytes(8, "little")) for number in range(4)]
    steps = [
        *((6, b"x" * kind) for kind in range(2)),
        (10, b""),  # a gather
        (8, b""),  # a claim that is shared
        (0, reply),
        (1, failure),
        *((choice + rank, body) for choice, body in left for rank in range(2)),
        (12, b""),
        (14, b""),
        (15 + 64, b""),
        (6 + 48, b"xx"),
        (4, b"\0" + (1 << 40).to_bytes(8, "little")),
        *((6, b"x") for _ in range(3)),
    ]
    return [b"".join(bytes([choice, len(body)]) + body for choice, body in steps[start:]) for start in (0, 2, 8)]


def _seeds_of_worker_records() -> list[bytes]:
    """What the engine's end writes."""
    fan_out, records = _FanOut(_Engine()), []
    for payload in _PAYLOADS:
        reader = RecordReader(fan_out.rings[0], -1)
        fan_out.book.part(fan_out.records[1])
        fan_out.send(payload, None)
        record = reader.read()
        assert record is not None
        records.append(record)
        fan_out.book.died(fan_out.records[0])
        fan_out.join(0)
    return records


def _seeds_of_payloads() -> list[bytes]:
    pixels = torch.from_numpy(_PIXELS)
    large = _PACKER.pack(["a" * 40, pixels], 0, 1 << 15)
    small = {"items": [{"pixels": torch.ones(2), "mask": np.ones(2, "<f4"), "text": "a"}], "numbers": {"x": 1.5}}
    long = _PACKER.pack(["a" * (1 << 15), pixels], 0, 1 << 15)  # its payload needs a slot as well
    seeds = [
        (_submit(small), b""),
        (_read(lambda writer: write_submit(writer, large, 1, 1, "", b"", (_slot_for(large),))), b""),
        (_submit([_PIXELS, pixels], _SLOT, in_place=_PIXELS), b""),
        (_read(lambda writer: write_submit(writer, long, 1, 1, "", b"", (_slot_for(long),))), long.payload),
    ]
    return [len(record).to_bytes(2, "little") + record + in_slot for record, in_slot in seeds]


def _slot_for(packed: Packed) -> SlotRef:
    return SlotRef(1, BLOCK_NBYTES, packed.slot_nbytes, _SLOT.generation)


#: Honest inputs, by target.
SEEDS: dict[str, list[bytes]] = {
    "message-rings": [(24).to_bytes(8, "little") + bytes([3, 0, 0, 0, 97, 98, 99, 0, 4]) + bytes(15)],
    "messages": _seeds_of_messages(),
    "records": _seeds_of_records(),
    "payloads": _seeds_of_payloads(),
    "books": _seeds_of_books(),
    "workers": _seeds_of_workers(),
    "worker-records": _seeds_of_worker_records(),
    "shared-claims": [
        bytes([0, 0, 8, 1, 2, 0, 2, 3, 5, 0, 3, 0, 11, 0, 3, 1, 11, 1, 5, 0, 0, 0]),
        bytes([0, 0, 0, 1, 18, 3, 34, 0, 6, 1, 14, 0, 5, 0, 5, 0, 14, 1, 0, 0, 2, 0, 6, 255]),
        bytes([0, 0, 2, 0, 6, 254, 5, 0, 3, 0, 11, 0, 8, 0, 2, 0, 6, 129, 14, 129, 6, 1, 14, 1]),
    ],
    "slot-headers": [
        bytes(32),
        bytes(range(32)),
        _header(_SLOT) + (0).to_bytes(4, "little") + (99).to_bytes(2, "little"),
    ],
    "bodies": [
        b'\3{"model":"m\\"","input":["a,[{\\\\",1,{}]}',
        b'\xff["\\"\\"\\"\\\\',
    ],
    "requests": [
        b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"x"}]}]}',
        b'{"model":"m","input":["a"]}',
    ],
    "addresses": [
        b"https://user@example.org:8443/a%20b?c=d#e\n../f",
        b"http://[::ffff:10.0.0.1]/\n//b/c",
        b"http://xn--bcher-kva.de",
    ],
    "media-headers": [
        b"RIFF\x24\0\0\0WAVEfmt \x10\0\0\0\1\0\1\0\x80>\0\0\0}\0\0\2\0\x10\0data\0\0\0\0",
        b"\0\0\0\x10ftypisom\0\0\0\0\0\0\0\x24moov\0\0\0\x1ctrakstsz\0\0\0\0\0\0\0\1\0\0\0\2",
        b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\0\0\0\1\0\0\0\1\x08\2\0\0\0\x90wS\xde",
        b"GIF89a\1\0\1\0\x80\0\0\0\0\0\xff\xff\xff,\0\0\0\0\1\0\1\0\0\2\2D\1\0;",
    ],
    **hostile_engine.SEEDS,
    **hostile_worker.SEEDS,
    **hostile_peer.SEEDS,
}
