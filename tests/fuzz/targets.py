"""What is fuzzed: each target takes any bytes, and raises if something else happens than what is promised of such bytes.

``test_targets.py`` runs all of them under hypothesis, ``run.py`` (``make fuzz``) one of them under atheris, which searches for
bytes that reach new code. What goes wrong with one input goes wrong with it again: nothing here is random.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
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
from shmring.core.engine_book import EngineBook
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS, EngineBookLimits, Geometry
from shmring.core.message_ring import RecordReader, largest_record_nbytes, ring_nbytes
from shmring.core.messages import (
    TENSOR_EXTENSION,
    Abort,
    Content,
    FrontendMessage,
    Goodbye,
    Hello,
    LeaseRequest,
    LeaseReturn,
    Release,
    Reply,
    ReplyRelease,
    SlotRef,
    Submit,
    TensorRef,
    decode_engine_message,
    decode_frontend_message,
    encode_message,
)
from shmring.core.states import RequestEvent
from shmring.core.views import Region, borrowed
from shmring.errors import RemoteProtocolError, StaleDescriptorError
from shmring.memory.payload import PayloadDecoder

__all__ = ["SEEDS", "TARGETS"]

_MAX_TENSORS = 16


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
            if isinstance(message, Submit | Reply):
                with contextlib.suppress(RemoteProtocolError):
                    message.content.check_size(1 << 10, 1 << 20)
                    message.content.check(_MAX_TENSORS)


class _Item(msgspec.Struct):
    pixels: torch.Tensor
    mask: np.ndarray[Any, Any] | None = None
    text: str = ""


class _Typed(msgspec.Struct):
    items: list[_Item]
    numbers: dict[str, float] = {}


_DECODERS = [PayloadDecoder(), PayloadDecoder(_Typed), PayloadDecoder(writable=True)]


def payloads(data: bytes) -> None:
    """A content that passes its check decodes into views that lie in its regions, or is refused."""
    try:
        content = msgspec.msgpack.decode(data, type=Content)
        content.check(_MAX_TENSORS)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, RemoteProtocolError):
        return
    if sum(slot.nbytes for slot in content.slots) > 1 << 20:
        return  # the book refuses what is larger than the slab
    regions = [np.arange(slot.nbytes, dtype=np.uint64).astype(np.uint8) for slot in content.slots]
    for decoder in _DECODERS:
        with contextlib.suppress(RemoteProtocolError, msgspec.ValidationError):
            _check_views(decoder.decode(content, lambda number: _region_of(regions[number - 1])), content, regions)


def _region_of(memory: np.ndarray[Any, Any]) -> Region:
    return borrowed(memory.ctypes.data, memory.nbytes)


def _check_views(value: object, content: Content, regions: list[np.ndarray[Any, Any]]) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, _Typed):
        value = [part for item in value.items for part in (item.pixels, item.mask)]
    if isinstance(value, list | tuple | set):
        for child in value:
            _check_views(child, content, regions)
    elif isinstance(value, torch.Tensor | np.ndarray) and value.nbytes:
        start = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        in_region = any(
            region.ctypes.data <= start and start + value.nbytes <= region.ctypes.data + region.nbytes for region in regions
        )
        assert in_region or value.nbytes <= len(content.inline)


_GEOMETRY = Geometry(leasable_blocks=12, reply_blocks=2)
_LIMITS = EngineBookLimits(max_lease_blocks=8, quota_blocks=10, max_leases=3, max_inflight=4)


def books(data: bytes) -> None:
    """Two frontends say what they like to the engine's book: it stays sound, and all comes home when they are dead.

    A byte chooses who speaks, or what the engine does meanwhile; a length and a message follow.
    """
    book = EngineBook(_GEOMETRY, _LIMITS)
    for client in (1, 2):
        book.connect(client, 2 * BLOCK_NBYTES)
    claimed: list[tuple[int, int, tuple[int, ...]]] = []
    place = 0
    while place + 2 <= len(data):
        choice, length = data[place], data[place + 1]
        body, place = data[place + 2 : place + 2 + length], place + 2 + length
        client = 1 + choice % 2
        if not (client in book.clients and book.clients[client].connected):
            continue
        if choice & 2:
            _work(book, client, claimed)
        else:
            with contextlib.suppress(RemoteProtocolError):
                _hear(book, client, decode_frontend_message(body))
        book.check()
    for client in (1, 2):
        book.died(client)
        book.check()
    for client, _, generations in claimed:
        if generations:
            book.release_slots(client, generations, ())
        book.check()
    assert not book.clients
    assert book.host.free_nbytes == _GEOMETRY.leasable_blocks * BLOCK_NBYTES


def _hear(book: EngineBook, client: int, message: FrontendMessage) -> None:
    match message:
        case Submit():
            book.submit(client, message.request_id, message.content.slots)
        case Abort():
            book.abort(client, message.request_id)
        case LeaseRequest():
            book.request_lease(client, message.token, message.nbytes, message.preferred_nbytes, 0, message.waits)
        case LeaseReturn():
            book.return_leases(client, message.lease_ids)
        case ReplyRelease():
            book.release_replies(client, message.generations)
        case Goodbye():
            book.goodbye(client, message.kept_lease_ids, message.kept_reply_generations)


def _work(book: EngineBook, client: int, claimed: list[tuple[int, int, tuple[int, ...]]]) -> None:
    """The engine claims the client's first request, or finishes one that it has claimed."""
    running = {request_id for owner, request_id, _ in claimed if owner == client}
    for request_id, request in book.clients[client].requests.items():
        if request_id not in running:
            book.claim(client, request_id)
            claimed.append((client, request_id, request.generations))
            return
    for index, (owner, request_id, generations) in enumerate(claimed):
        if owner == client:
            del claimed[index]
            if request_id in book.clients[client].requests:
                book.end(client, request_id, RequestEvent.FINISH)
            book.release_slots(client, generations, ())
            return


def slot_headers(data: bytes) -> None:
    """A slot whose header says otherwise than its descriptor is stale, and nothing else."""
    book = EngineBook(_GEOMETRY, _LIMITS)
    numbers = [int.from_bytes(data[place : place + 8], "little") for place in (0, 8, 16, 24)]
    slot = SlotRef(1, 0, numbers[2] >> 2, numbers[3])
    try:
        book.verify(numbers[0], numbers[1], slot)
    except StaleDescriptorError:
        assert (numbers[0], numbers[1]) != (slot.generation, slot.nbytes)
    else:
        assert (numbers[0], numbers[1]) == (slot.generation, slot.nbytes)


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
    for target in (message_rings, messages, payloads, books, slot_headers, requests, addresses, media_headers)
}


# -- where the search begins --------------------------------------------------------------------------------------------


def _seeds_of_messages() -> list[bytes]:
    slot = SlotRef(1, BLOCK_NBYTES, 100, (1 << GENERATION_BITS) + 1)
    content = Content(b"\x80", (TensorRef(1, 0, 100, "uint8", (10, 10)),), b"", (slot,))
    sent: list[Any] = [
        Hello(1, BLOCK_NBYTES, "fuzz"),
        Submit(1, 1, content),
        Abort(1),
        LeaseRequest(1, 2 * BLOCK_NBYTES, 4 * BLOCK_NBYTES),
        LeaseReturn((1,)),
        ReplyRelease((1,)),
        Goodbye((1,)),
        Reply(1, content),
        Release((1,)),
    ]
    return [encode_message(message) for message in sent]


def _seeds_of_books() -> list[bytes]:
    """An honest session of each of the two, as the target reads it."""
    found = []
    for client in (1, 2):
        slot = SlotRef(client, (1 + 2 * (client - 1)) * BLOCK_NBYTES, 100, (client << GENERATION_BITS) + 1)
        submit = encode_message(Submit(1, 1, Content(b"\x80", (), b"", (slot,))))
        steps = [(0, submit), (2, b""), (2, b""), *((0, message) for message in _seeds_of_messages()[2:7])]
        found.append(b"".join(bytes([choice + client - 1, len(body)]) + body for choice, body in steps))
    return found


def _seeds_of_payloads() -> list[bytes]:
    tensor = msgspec.msgpack.Ext(TENSOR_EXTENSION, bytes(4))
    typed = msgspec.msgpack.encode({"items": [{"pixels": tensor, "text": "a"}], "numbers": {"x": 1.5}})
    inline = Content(typed, (TensorRef(0, 0, 8, "float32", (2,)),), bytes(8))
    slot = Content(msgspec.msgpack.encode([tensor]), (TensorRef(1, 0, 8, "<f4", (2,)),), b"", (SlotRef(1, 4096, 8, 1),))
    return [msgspec.msgpack.encode(content) for content in (inline, slot)]


#: Honest inputs, by target.
SEEDS: dict[str, list[bytes]] = {
    "message-rings": [(24).to_bytes(8, "little") + bytes([3, 0, 0, 0, 97, 98, 99, 0, 4]) + bytes(15)],
    "messages": _seeds_of_messages(),
    "payloads": _seeds_of_payloads(),
    "books": _seeds_of_books(),
    "slot-headers": [bytes(32), bytes(range(32))],
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
