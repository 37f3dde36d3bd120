"""What is fuzzed: each target takes any bytes, and raises if something else happens than what is promised of such bytes.

``test_targets.py`` runs all of them under hypothesis, ``run.py`` (``make fuzz``) one of them under atheris, which searches for
bytes that reach new code. What goes wrong with one input goes wrong with it again: nothing here is random.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from frontend.errors import ApiError
from frontend.media.errors import MediaError
from frontend.media.image import probe
from frontend.media.mp4 import check_tables
from frontend.media.options import PictureLimits
from frontend.media.riff import check_wav
from frontend.media.urls import parse_redirect, parse_url
from frontend.openai.chat import CHAT_PARSER
from frontend.openai.embeddings import EMBEDDING_PARSER
from shmring.core.effects import EngineEffect, RequestAborted
from shmring.core.engine_book import EngineBook
from shmring.core.engine_end import ClaimEnd, EngineEnd, FrontendEnd
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.held_slots import HeldSlots
from shmring.core.mapping import Mapping
from shmring.core.message_ring import RecordReader, RecordWriter, largest_record_nbytes, ring_nbytes
from shmring.core.messages import (
    SLOT_HEADER_NBYTES,
    SLOT_MAGIC,
    Abort,
    Goodbye,
    Hello,
    LeaseRequest,
    LeaseReturn,
    Release,
    ReplyRelease,
    SlotRef,
    decode_engine_message,
    decode_frontend_message,
    encode_message,
)
from shmring.core.payload import Packed, write_done, write_reply, write_submit
from shmring.core.received import decode_content
from shmring.core.states import RequestEvent
from shmring.core.views import Regions
from shmring.core.wire import Content, Done, Reply, Submit, check_payload, read_record
from shmring.errors import RemoteProtocolError, StaleDescriptorError
from shmring.memory.tensors import make_decoder, make_packer

__all__ = ["SEEDS", "TARGETS"]

_MAX_TENSORS = 16
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
    for decode in (decode_frontend_message, decode_engine_message):
        with contextlib.suppress(RemoteProtocolError):
            message = decode(data)
            assert decode(encode_message(message)) == message


def records(data: bytes) -> None:
    """Bytes are a submission, a reply or an end whose tensors all lie in its regions, or another message, or are refused."""
    for from_engine in (False, True):
        with contextlib.suppress(RemoteProtocolError):
            message = read_record(data, _MAX_TENSORS, from_engine=from_engine)
            content = message.content if isinstance(message, Submit | Reply | Done) else None
            if content is not None:
                _check_content(content, data)


def _check_content(content: Content, record: bytes) -> None:
    if content.payload_nbytes:
        assert content.is_copied_to_slot
        assert not content.payload
        assert content.payload_offset + content.payload_nbytes <= content.slots[-1].nbytes
        with contextlib.suppress(RemoteProtocolError):
            content.take_payload(record[-content.payload_nbytes :], _MAX_TENSORS)  # any bytes: what lies in a slot is anybody's
    else:
        # What msgspec takes for the record's last member is the payload.
        assert bytes(msgspec.msgpack.decode(record, type=list[msgspec.Raw])[-1]) == content.payload
    if content.payload:
        assert check_payload(content.payload, _MAX_TENSORS) == content.tensor_count == len(content.tensors)
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
            content.take_payload(in_slot, _MAX_TENSORS)
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


_GEOMETRY = Geometry(leasable_blocks=12, reply_blocks=2)
_LIMITS = EngineBookLimits(max_lease_blocks=8, quota_blocks=10, max_leases=3, max_inflight=4)


class _NoLink:
    """Nobody reads: what is sent goes nowhere."""

    can_write = True
    polls_busily = False

    def queue(self, record: bytes) -> None:
        """Drops what finds the ring full."""


class _Frontend(FrontendEnd):
    def __init__(self, engine: _Engine, client_id: int) -> None:
        super().__init__(engine.end, client_id)
        self.engine = engine
        self.link = _NoLink()
        self.attach(RecordWriter(bytearray(ring_nbytes(256)), -1))

    def take_message(self, record: bytes) -> None:
        self.engine.message_received(self.client_id, record)


class _Claim(ClaimEnd):
    def __del__(self) -> None:
        """Whole states are dropped here: nothing is to come back."""


class _Engine:
    """The shell of an engine's end: what :class:`~shmring.ring.ring.Ring` does for it, without connections."""

    def __init__(self) -> None:
        self.book = EngineBook(_GEOMETRY, _LIMITS)
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
            case LeaseRequest(token, nbytes, preferred_nbytes, _, waits):
                self.carry_out(self.book.request_lease(client_id, token, nbytes, preferred_nbytes, 0, waits))
            case LeaseReturn(lease_ids):
                self.carry_out(self.book.return_leases(client_id, lease_ids))
            case ReplyRelease(generations):
                self.carry_out(self.book.release_replies(client_id, generations))
            case Goodbye(kept_lease_ids, kept_reply_generations):
                self.carry_out(self.book.goodbye(client_id, kept_lease_ids, kept_reply_generations))
                self.frontends[client_id].detach()

    def work(self, client_id: int) -> None:
        """The engine takes the next request up, or finishes one of this client that it has taken up."""
        claim = self.end.take_next()
        if claim is not None:
            self.claims.append(claim)
            return
        for claim in self.claims:
            if claim.client_id == client_id:
                self.claims.remove(claim)
                claim.finish()
                self.collect()
                return

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
                claim.mark_ended(aborted=True)

    def take_up_failed(self, claim: _Claim, error: Exception, *, breaks_rules: bool) -> None:
        """A request can't be taken up."""
        assert isinstance(error, RemoteProtocolError | StaleDescriptorError | msgspec.ValidationError)
        self.failures.append((error, breaks_rules))
        self.carry_out(claim.release_slots())
        if breaks_rules:
            self.frontends[claim.client_id].detach()
            self.carry_out(self.book.disconnect(claim.client_id))
        else:
            self.book.end(claim.client_id, claim.request_id, RequestEvent.ERROR)

    def request_arrived(self) -> None:
        """Nobody waits for one."""

    def send_release(self, frontend: _Frontend, generations: Sequence[int]) -> None:
        """Nobody listens."""

    def call_soon(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """There are none."""
        assert not callbacks

    def check_fence(self, submit: Submit) -> None:
        """There is no device slab."""
        raise RemoteProtocolError("a fence came, and there is no device memory")


def books(data: bytes) -> None:
    """Two frontends say what they like to an engine, and write what they like: its book stays sound, and all comes home
    when they are dead.

    A byte chooses who speaks or writes, or what the engine does meanwhile; a length and a record follow, or the number of a
    block and what is written there.
    """
    engine = _Engine()
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
                engine.frontends[client].take_record(body)
        book.check()
    for client in (1, 2):
        engine.frontends[client].detach()
        engine.carry_out(book.died(client))
        book.check()
    while engine.claims:
        engine.claims.pop().finish()
        engine.collect()
        book.check()
    assert not engine.end.waiting_count
    assert not engine.end.running_count
    assert not book.clients
    assert book.host.free_nbytes == _GEOMETRY.leasable_blocks * BLOCK_NBYTES


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
    engine.frontends[1].take_record(_submit(np.ones(nbytes, np.uint8), slot))
    claim = engine.end.take_next()
    if header == _header(slot):
        assert claim.payload.nbytes == nbytes
        claim.finish()
    else:
        assert claim is None
        [(error, breaks_rules)] = engine.failures
        assert isinstance(error, StaleDescriptorError)
        assert not breaks_rules
    engine.collect()
    engine.book.check()
    assert not engine.book.clients[1].requests


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


_PICTURE_LIMITS = PictureLimits()


def media_headers(data: bytes) -> None:
    """What is looked at before a decoder is: accepted, or a message; never more memory than the file has bytes."""
    for look in (check_wav, check_tables, lambda file: probe(file, _PICTURE_LIMITS)):
        with contextlib.suppress(MediaError):
            look(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__.replace("_", "-"): target
    for target in (message_rings, messages, records, payloads, books, slot_headers, requests, addresses, media_headers)
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


def _submit(payload: object, slot: SlotRef | None = None, *, in_place: np.ndarray[Any, Any] | None = None) -> bytes:
    """A submission whose tensors lie in the slot, copied there or written in place; without one they are in the record."""
    held = HeldSlots()
    if in_place is not None:
        record: Any = _Held()
        held.hold(record, in_place.ctypes.data, in_place.nbytes)
    packed = _PACKER.pack(payload, 0 if slot else _INLINE_NBYTES, 1 << 15, held)
    return _read(lambda writer: write_submit(writer, packed, 1, 1, "", b"", () if slot is None else (slot,)))


def _header(slot: SlotRef) -> bytes:
    return SLOT_MAGIC + slot.generation.to_bytes(8, "little") + slot.nbytes.to_bytes(8, "little")


def _seeds_of_messages() -> list[bytes]:
    sent: list[Any] = [
        Hello(1, BLOCK_NBYTES, "fuzz"),
        Abort(1),
        LeaseRequest(1, 2 * BLOCK_NBYTES, 4 * BLOCK_NBYTES),
        LeaseReturn((1,)),
        ReplyRelease((1,)),
        Goodbye((1,)),
        Release((1,)),
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
    return found


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
    "slot-headers": [
        bytes(32),
        bytes(range(32)),
        _header(_SLOT) + (0).to_bytes(4, "little") + (99).to_bytes(2, "little"),
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
}
