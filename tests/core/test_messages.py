"""The wire: what is sent arrives, and nothing forged gets past decoding, nor past reading a record with descriptors."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, inspect
from msgspec.msgpack import Ext

from shmring.core import messages
from shmring.core.compiled import Content
from shmring.core.messages import (
    DEVICE_MEMORY,
    MAX_LISTED,
    TENSOR_ALIGNMENT,
    TORCH_ITEM_NBYTES,
    Abort,
    AnswerFailed,
    AnswerPart,
    Call,
    CallResult,
    DeviceHandle,
    EngineMessage,
    Failed,
    Find,
    Found,
    FrontendMessage,
    Goodbye,
    Hello,
    Inspect,
    Join,
    Keep,
    LeaseGrant,
    LeaseRecall,
    LeaseRequest,
    LeaseReturn,
    NotKept,
    RankTaken,
    Refused,
    Release,
    ReplyRead,
    ReplyRelease,
    SlotRef,
    StopWaiting,
    TensorRef,
    Unpin,
    Welcome,
    Withdraw,
    WorkerMessage,
    WorkerWelcome,
    align,
    decode_engine_message,
    decode_first_message,
    decode_frontend_message,
    decode_worker_message,
    encode_message,
    item_nbytes,
)
from shmring.errors import RemoteProtocolError
from tests.model.inside import read_record, take_payload
from tests.records import content_of, done_of, reply_of, slot_extension, submit_of, tensor_extension
from tests.tables import for_each

BIGGEST = 2**62
LARGEST, LARGEST_HEX = 2**64 - 1, "cf ffffffffffffffff"
KEY, HANDLE = bytes(range(32)), bytes(range(64))
SLOT = SlotRef(1, 4096, 4096 - 64, (1 << 40) + 1)
TENSOR = tensor_extension(1, 128, 24, "float32", (2, 3))

#: One of each message that has no content, and its record. All fields have their names here and different values, so that what
#: is renamed or swapped is noticed.
GOLDEN: dict[Any, str] = {
    Hello(version=0x31, lease_nbytes=0x32, name="api"): "94 01 31 32 a3617069",
    Abort(request_id=0x31): "92 03 31",
    LeaseRequest(token=0x31, nbytes=0x32, preferred_nbytes=0x33, memory=DEVICE_MEMORY, waits=False): "96 04 31 32 33 01 c2",
    LeaseReturn(lease_ids=(0x31, 0x32)): "92 05 92 31 32",
    ReplyRelease(generations=(LARGEST, 0x32)): f"92 06 92 {LARGEST_HEX} 32",
    ReplyRead(request_ids=(0x31, 0x31)): "92 0f 92 31 31",
    Call(call_id=0x31, method="health", arguments=b"\xc0"): "94 07 31 a66865616c7468 c401c0",
    Goodbye(
        kept_lease_ids=(0x31,),
        kept_reply_generations=(0x32, LARGEST),
        maps_device_slab=True,
        more=False,
        pinned_generations=(0x33, 0x33),
    ): f"97 08 91 31 92 32 {LARGEST_HEX} c3 c2 92 33 33 c2",
    Goodbye(kept_lease_ids=(0x31,), maps_device_slab=True, lingers=True): "97 08 91 31 90 c3 c2 90 c3",
    Find(token=0x31, key=KEY, waits=True): f"95 0c 31 c420 {KEY.hex()} c3 c2",
    StopWaiting(tokens=(0x31, 0x32)): "92 10 92 31 32",
    Keep(
        token=0x31, key=KEY, lease_id=0x32, offset=0x33, nbytes=0x34, generation=LARGEST, is_copied=True, payload=b"\xc0"
    ): f"9a 0d 31 c420 {KEY.hex()} 32 33 34 {LARGEST_HEX} c3 c401c0 c2",
    Withdraw(names=(KEY, KEY)): f"92 11 92 c420 {KEY.hex()} c420 {KEY.hex()}",
    Unpin(generations=(0x31, 0x31)): "92 0e 92 31 31",
    Inspect(version=0x31): "92 09 31",
    Join(version=0x31, rank=0x32, name="tp"): "94 1f 31 32 a27470",
    AnswerFailed(sequence=0x31, type_name="KeyError", message="'x'"): "94 21 31 a84b65794572726f72 a3277827",
    AnswerPart(data=b"abc", more=True): "93 22 c403616263 c3",
    LeaseGrant(token=0x31, lease_id=0x32, offset=0x33, nbytes=0x34): "95 65 31 32 33 34",
    Welcome(
        version=0x31,
        epoch=LARGEST,
        client_id=0x32,
        slab_nbytes=0x33,
        block_nbytes=0x34,
        leasable_nbytes=0x35,
        max_inflight=0x36,
        max_calls=0x37,
        max_leases=0x38,
        message_ring_nbytes=0x39,
        max_record_nbytes=0x3A,
        inline_nbytes=0x3B,
        max_payload_nbytes=0x3C,
        max_tensors=0x3D,
        max_values=0x3F,
        base_lease=LeaseGrant(token=0x41, lease_id=0x42, offset=0x43, nbytes=0x44),
        device_slab=DeviceHandle(uuid="GPU", memory=HANDLE, nbytes=0x45),
        kept_nbytes=0x3E,
        client_pinned_nbytes=0x40,
        engine_name="vis",
    ): (
        f"dc0015 66 31 {LARGEST_HEX} 32 33 34 35 36 37 38 39 3a 3b 3c 3d 3f"
        f"95 65 41 42 43 44  93 a3475055 c440 {HANDLE.hex()} 45  3e 40 a3766973"
    ),
    Failed(request_id=0x31, kind="invalid", type_name="KeyError", message="'x'"): (
        "95 69 31 a7696e76616c6964 a84b65794572726f72 a3277827"
    ),
    Release(generations=(LARGEST, 0x32)): f"92 6a 92 {LARGEST_HEX} 32",
    LeaseRecall(lease_ids=(0x31, 0x32)): "92 6b 92 31 32",
    CallResult(call_id=0x31, result=b"\xc0", error=("KeyError", "'x'")): "94 6c 31 c401c0 92 a84b65794572726f72 a3277827",
    Refused(reason="full"): "92 6d a466756c6c",
    Found(token=0x31, generation=LARGEST, offset=0x32, nbytes=0x33, is_copied=True, payload=b"\xc0"): (
        f"97 70 31 {LARGEST_HEX} 32 33 c3 c401c0"
    ),
    NotKept(token=0x31, reason="pins"): "93 71 31 a470696e73",
    WorkerWelcome(
        version=0x31,
        epoch=LARGEST,
        slab_nbytes=0x32,
        leased_nbytes=0x33,
        broadcast_nbytes=0x34,
        message_ring_nbytes=0x35,
        inline_nbytes=0x36,
        max_payload_nbytes=0x37,
        max_tensors=0x38,
        max_values=0x39,
        engine_name="vis",
    ): f"9c 79 31 {LARGEST_HEX} 32 33 34 35 36 37 38 39 a3766973",
    RankTaken(rank=0x31, pid=0x32, engine_name="vis"): "94 7a 31 32 a3766973",
}

#: Who reads what: the types that each decoder takes.
READS: dict[Callable[[bytes], Any], set[type]] = {
    decode_frontend_message: {*FrontendMessage.__args__},
    decode_worker_message: {*WorkerMessage.__args__},
    decode_engine_message: {*EngineMessage.__args__},
    decode_first_message: {*FrontendMessage.__args__, Join, Inspect},
}
TYPES = sorted({kind for kinds in READS.values() for kind in kinds}, key=lambda kind: kind.__name__)

#: What is read by ``core/wire.pyx``, by who writes it: records of which each byte counts.
SUBMITS = {
    "inline": submit_of({"x": tensor_extension()}, name="request", fence=bytes(64)),
    "in slots": submit_of([TENSOR, tensor_extension(0, 64)], slot_extension(nbytes=200), (SLOT,)),
    "in a slot": submit_of(None, slot_extension(), lies_at=(64, 16)),
}
ENGINE_RECORDS = {
    "reply": reply_of([tensor_extension()], b"\0" * 12),
    "reply in a slot": reply_of(None, slot_extension(), lies_at=(64, 16)),
    "done": done_of([1, 2**40]),
    "done with a reply": msgspec.msgpack.encode([104, 1, [1], b"\0" * 12, tensor_extension()]),
}

each_message = for_each("message", GOLDEN, ids=lambda message: type(message).__name__)
by_writer = pytest.mark.parametrize(
    ("record", "from_engine"),
    [(record, False) for record in SUBMITS.values()] + [(record, True) for record in ENGINE_RECORDS.values()],
    ids=[*SUBMITS, *ENGINE_RECORDS],
)


def any_of(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Values of a message's field, as its type bounds them."""
    match kind:
        case inspect.IntType(ge=least, le=most, lt=below):
            return st.integers(-(2**63) if least is None else least, most or (below or 2**64) - 1)
        case inspect.StrType(max_length=most):
            return st.text(max_size=min(64, most or 64))
        case inspect.BytesType(min_length=least, max_length=most):
            return st.binary(min_size=least or 0, max_size=min(64, most or 64))
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.VarTupleType(item_type=item):
            return st.lists(any_of(item), max_size=5).map(tuple)
        case inspect.TupleType(item_types=items):
            return st.tuples(*map(any_of, items))
        case inspect.UnionType(types=kinds):
            return st.one_of(*map(any_of, kinds))
        case inspect.StructType(cls=made, fields=fields):
            return st.builds(made, **{field.name: any_of(field.type) for field in fields})
    raise NotImplementedError(kind)


any_message = st.sampled_from(TYPES).flatmap(lambda kind: any_of(inspect.type_info(kind)))


def plain(message: Any) -> list[Any]:
    """A message, or a record, as the lists and numbers that travel."""
    fields = msgspec.msgpack.decode(message if isinstance(message, bytes) else encode_message(message))
    assert isinstance(fields, list)
    return fields


def tag_of(kind: type) -> object:
    return inspect.type_info(kind).tag  # of a message


def changed(fields: list[Any], index: int, value: Any) -> list[Any]:
    return [*fields[:index], value, *fields[index + 1 :]]


def free_fields(record: list[Any]) -> list[int]:
    """The fields of a record behind its tag that may not be anything: all but its payload, unless that lies in a slot."""
    payload = {2: 7, 103: 3, 104: 4}[record[0]]
    return [index for index in range(1, len(record)) if index != payload or len(record) > payload + 1]


def refused(fields: Any) -> None:
    """No side takes it for a message."""
    record = fields if isinstance(fields, bytes) else msgspec.msgpack.encode(fields)
    for decode in READS:
        with pytest.raises(RemoteProtocolError, match="not a message of protocol version"):
            decode(record)


def refused_record(fields: Any, *, from_engine: bool) -> None:
    """Neither read as a record with a descriptor nor decoded as any other message."""
    record = fields if isinstance(fields, bytes) else msgspec.msgpack.encode(fields)
    try:
        assert read_record(record, 8, from_engine=from_engine) is None
    except RemoteProtocolError:
        return
    refused(record)


# -- what arrives ------------------------------------------------------------------------------------------------------------


@each_message
def test_a_message_is_these_bytes_and_read_by_whom_it_is_for_alone(message: Any) -> None:
    record = bytes.fromhex(GOLDEN[message])
    assert encode_message(message).hex() == record.hex()
    for decode, kinds in READS.items():
        if type(message) in kinds:
            assert decode(record) == message
        else:
            with pytest.raises(RemoteProtocolError, match="not a message of protocol version"):
                decode(record)


def test_every_message_is_written_down() -> None:
    assert {type(message) for message in GOLDEN} == set(TYPES)


@each_message
def test_no_two_fields_of_what_is_written_down_are_equal(message: Any) -> None:
    """Of a message that is there twice, in both: there are only two truth values."""
    same = [other for other in GOLDEN if type(other) is type(message)]
    fields = [[getattr(other, name) for other in same] for name in message.__struct_fields__]
    assert all(fields.count(field) == 1 for field in fields)


@given(any_message)
def test_anything_that_can_be_sent_arrives(message: Any) -> None:
    assert all(decode(encode_message(message)) == message for decode, kinds in READS.items() if type(message) in kinds)


def test_defaults_may_be_left_out() -> None:
    assert decode_frontend_message(msgspec.msgpack.encode([1, 1, 4096])) == Hello(1, 4096, "")
    assert decode_frontend_message(msgspec.msgpack.encode([8])) == Goodbye()
    assert decode_frontend_message(msgspec.msgpack.encode([4, 1, 4096])) == LeaseRequest(1, 4096, 0, 0)


@by_writer
def test_a_record_is_read_and_only_from_its_writer(record: bytes, from_engine: bool) -> None:
    assert read_record(record, 8, from_engine=from_engine) is not None
    assert read_record(record, 8, from_engine=not from_engine) is None
    refused(record)


def test_the_protocols_page_has_each_messages_tag_and_the_fields_that_it_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    listed = re.findall(r"^\| .*", page.partition("\n## Messages\n")[2].partition("\n## ")[0], re.MULTILINE)
    tag_of = {name: int(tag) for row in listed for tag, name in re.findall(r"(\d+) `(\w+)`", row)}
    assert {type(message).__name__: plain(message)[0] for message in GOLDEN}.items() <= tag_of.items()
    fields_of = {name: tuple(re.split(r",\s+", fields)) for name, fields in re.findall(r"`(\w+)\{([^}.]*)\}", page)}
    named = {type(message).__name__: message.__struct_fields__ for message in GOLDEN} | {
        "DeviceHandle": DeviceHandle.__struct_fields__
    }
    assert {"Hello", "Welcome", "Join", "WorkerWelcome", "DeviceHandle"} <= fields_of.keys()
    assert {name: fields for name, fields in fields_of.items() if name in named and named[name] != fields} == {}


# -- forgeries ---------------------------------------------------------------------------------------------------------------

NESTED = [nest * depth + b"\xc0" for nest in (b"\x91", b"\x81\xc0") for depth in (10, 1_000, 100_000)]
LYING = [
    head + bytes(20)
    for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x53")
]
FOREIGN = (1.5, True, {}, {"a": 1}, [[[1]]], Ext(5, b"x"), "x", b"x", 5)

NO_MESSAGES = {
    **{f"tag {tag!r}": [tag, 1] for tag in (0, -1, 10, 99, 100, 110, 2**63, "Abort", None, 3.0, [3])},
    **{repr(body): body for body in (b"", b"\xc1", b"\xc0", b"\x03", b"\x90", b"\x82\xa1t\x03\xaarequest_id\x01")},
    "a name that is not UTF-8": b"\x94\x01\x01\x05\xa1\xff",
    "a reason that is not UTF-8": b"\x92\x6d\xa1\xff",
}


@for_each("fields", NO_MESSAGES.values(), ids=NO_MESSAGES)
def test_what_is_no_message_is_refused(fields: Any) -> None:
    refused(fields)


def welcome_with(handle: list[Any]) -> list[Any]:
    fields = plain(next(message for message in GOLDEN if isinstance(message, Welcome)))
    return changed(fields, len(fields) - 4, handle)


#: The most that is taken, or its like, and beside it what is refused: so that it is refused for nothing else.
BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "the name of a client": ([1, 1, 4096, "x" * 256], [1, 1, 4096, "x" * 257]),
    "the name of a method": ([7, 1, "x" * 256, b""], [7, 1, "x" * 257, b""]),
    "the name of an error": ([105, 1, "error", "x" * 256, ""], [105, 1, "error", "x" * 257, ""]),
    "the name of a worker": ([31, 1, 0, "x" * 256], [31, 1, 0, "x" * 257]),
    "the name of a worker's error": ([33, 1, "x" * 256, ""], [33, 1, "x" * 257, ""]),
    "the name of an engine": ([122, 0, 1, "x" * 256], [122, 0, 1, "x" * 257]),
    "the rank of a worker": ([31, 1, 2**31 - 1, ""], [31, 1, 2**31, ""]),
    "a kind of failure": ([105, 1, "error", "", ""], [105, 1, "bored", "", ""]),
    "why content is not kept": ([113, 1, "full"], [113, 1, "bored"]),
    "a generation": ([6, [1, 2**64 - 1]], [6, [1, -1]]),
    "a generation of a slot": ([106, [0]], [106, [-1]]),
    **{f"memory {memory!r}": ([4, 1, 4096, 0, 1], [4, 1, 4096, 0, memory]) for memory in (2, -1, "0", None)},
    **{f"a key of {nbytes} bytes": ([12, 1, KEY], [12, 1, bytes(nbytes)]) for nbytes in (0, 31, 33)},
    **{
        f"a handle of {nbytes} bytes": (welcome_with(["GPU", HANDLE, 1]), welcome_with(["GPU", bytes(nbytes), 1]))
        for nbytes in (0, 63, 65)
    },
    **{
        f"ids in a list of tag {tag}": ([tag, list(range(MAX_LISTED))], [tag, list(range(MAX_LISTED + 1))])
        for tag in (5, 6, 8, 14, 106, 107)
    },
}


@for_each(("taken", "too_much"), BOUNDS.values(), ids=BOUNDS)
def test_a_message_has_limits(taken: list[Any], too_much: list[Any]) -> None:
    decode = next(decode for decode, kinds in READS.items() if taken[0] in {tag_of(kind) for kind in kinds})
    assert decode(msgspec.msgpack.encode(taken))
    refused(too_much)


def test_the_longest_list_fits_the_record_of_the_default_ring() -> None:
    assert len(encode_message(ReplyRelease(tuple(range(2**64 - MAX_LISTED, 2**64))))) < 1 << 14


def forged(message: Any) -> Iterator[Any]:
    """What a message must not be: fields too many or too few, or of another type; numbers that are too large; other lengths."""
    fields, record = plain(message), encode_message(message)
    required = sum(field.required for field in msgspec.structs.fields(message))
    yield from ([*fields, 0], record + b"\0", *(fields[:length] for length in range(1, 1 + required)))
    yield from (record[:length] for length in range(len(record)))
    for index in range(1, len(fields)):
        yield from (changed(fields, index, Raw(lying)) for lying in LYING)
        yield from (changed(fields, index, Raw(nested)) for nested in NESTED)
        yield from (changed(fields, index, wrong) for wrong in FOREIGN[:6] if type(wrong) is not type(fields[index]))
        if type(fields[index]) is int and message.__struct_fields__[index - 1] not in {"version", "pid"}:  # which may be any
            too_large = () if fields[index] == LARGEST else (BIGGEST + 1, LARGEST)
            yield from (changed(fields, index, number) for number in (-1, -(2**63), *too_large))
    if isinstance(message, Welcome):
        for index in (-5, -4):
            yield from ([*fields[:index], part, *fields[index + 1 :]] for part in ([*fields[index], 0], fields[index][:-1]))


@each_message
def test_a_forged_message_is_refused(message: Any) -> None:
    for fields in forged(message):
        refused(fields)


@for_each("head", [b"", b"\x92\x05", b"\x92\x02", b"\x93\x67\x03", b"\x97\x01\x01\x05\xa0", b"\x94\x07\x01\xa1x"])
def test_deep_nesting_and_lengths_that_are_not_there_are_refused(head: bytes) -> None:
    for rest in (*NESTED, *LYING):
        refused(head + rest)


def forged_records(record: bytes) -> Iterator[Any]:
    fields = plain(record)
    payload = {2: 7, 103: 3, 104: 4}[fields[0]]
    yield from ([*fields, 0], record + b"\0", *(record[:length] for length in range(len(record))))
    # Not what would be all of a record.
    yield from (fields[:n] for n in range(len(fields)) if n not in (payload + 1, 3 if fields[0] == 104 else None))
    for index in range(1, len(fields)):
        yield from (changed(fields, index, Raw(raw)) for raw in (*LYING, *NESTED[1:3], *NESTED[4:]))
    for index in free_fields(fields):
        yield from (changed(fields, index, wrong) for wrong in FOREIGN if type(wrong) is not type(fields[index]))
        if isinstance(fields[index], int):
            yield from (changed(fields, index, number) for number in (-1, -(2**63)))


@by_writer
def test_a_forged_record_is_refused(record: bytes, from_engine: bool) -> None:
    for fields in forged_records(record):
        refused_record(fields, from_engine=from_engine)


@for_each("field", ["lease_id", "offset", "nbytes"])
def test_a_huge_number_in_a_slot_is_refused(field: str) -> None:
    for index in (0, 1):
        for number in (BIGGEST, BIGGEST + 1, 2**64 - 1):
            slot = slot_extension(**{field: number})
            record = submit_of(1, slot if index else None, () if index else (slot,))
            if number == BIGGEST:
                assert read_record(record, 8, from_engine=False)
            else:
                refused_record(record, from_engine=False)
    refused_record(reply_of(1, slot_extension(**{field: BIGGEST + 1})), from_engine=True)


LIMITS = {
    "request ids of 62 bits": (submit_of(1, request_id=BIGGEST), submit_of(1, request_id=BIGGEST + 1)),
    "names of 256 characters": (submit_of(1, name="ä" * 256), submit_of(1, name="ä" * 257)),
    "names that are UTF-8": (submit_of(1, name="x"), submit_of(1, name="x").replace(b"\xa1x", b"\xa1\xff")),
    "fences of 64 bytes": (submit_of(1, fence=bytes(64)), submit_of(1, fence=bytes(65))),
    "lists of released slots": (done_of(range(MAX_LISTED)), done_of(range(MAX_LISTED + 1))),
    "generations": (done_of([1]), msgspec.msgpack.encode([104, 1, [1, -1]])),
}


@for_each(("taken", "too_much"), LIMITS.values(), ids=LIMITS)
def test_a_record_has_limits(taken: bytes, too_much: bytes) -> None:
    from_engine = taken[1] > 100
    assert read_record(taken, 8, from_engine=from_engine)
    refused_record(too_much, from_engine=from_engine)


def decodes_or_is_refused(body: bytes) -> None:
    for decode in READS:
        with contextlib.suppress(RemoteProtocolError):
            message = decode(body)
            assert decode(encode_message(message)) == message
    for from_engine in (False, True):
        with contextlib.suppress(RemoteProtocolError):
            read_record(body, 8, from_engine=from_engine)


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(body: bytes) -> None:
    decodes_or_is_refused(body)


@given(
    any_message,
    st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=4),
    st.binary(max_size=4),
)
def test_a_message_with_bytes_changed_is_decoded_or_refused(message: Any, changes: list[tuple[int, int]], tail: bytes) -> None:
    body = bytearray(encode_message(message))
    for position, byte in changes:
        body[position % len(body)] = byte
    decodes_or_is_refused(bytes(body) + tail)


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=5) | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.sampled_from([plain(message)[0] for message in GOLDEN]), st.lists(anything, max_size=5))
def test_random_fields_behind_a_good_tag_are_decoded_or_refused(tag: int, fields: list[Any]) -> None:
    decodes_or_is_refused(msgspec.msgpack.encode([tag, *fields]))


# -- forgeries of a content ------------------------------------------------------------------------------------------------


def content_with(*tensors: Ext, inline: bytes | None = None, slots: tuple[SlotRef, ...] = (SLOT,)) -> Content:
    return content_of(list(tensors), inline, slots)


def test_sound_tensors_are_accepted_in_each_region() -> None:
    last = SLOT.nbytes - 24
    content_with(
        TENSOR, tensor_extension(1, last, 24, "float32", (6,)), tensor_extension(0, 0, 4, "uint8", (4,)), inline=bytes(4)
    )
    content_with(tensor_extension(2, 0, 128, "|u1", (128,)), slots=(SLOT, SlotRef(1, 8192, 128, 9)))
    copied = content_of([tensor_extension(0, 0, 128, "|u1", (128,)), TENSOR], SlotRef(1, 8192, 128, 9), (SLOT,))
    assert [tensor.region for tensor in copied.tensors] == [2, 1], "the slot of what was copied is the last one"


def test_an_empty_or_scalar_tensor_is_accepted() -> None:
    content_with(
        tensor_extension(1, 0, 0, "float32", (0, 7)),
        tensor_extension(1, 0, 4, "float32", ()),
        tensor_extension(0, 0, 0, "int8", (0,)),
    )
    content_with(tensor_extension(1, 1 << 40, 0, "float32", (0,)))  # it has no bytes that could be outside


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (tensor_extension(1, 0, 4, "float33", (1,)), "unknown dtype 'float33'"),
        (tensor_extension(1, 0, 4, "O", (1,)), "unknown dtype"),
        (tensor_extension(1, 0, 4, 0, (1,), b"\xff<f4"), "unknown dtype"),
        (tensor_extension(1, 0, 4, "float32", (2,)), "does not have 4 bytes"),
        (tensor_extension(1, 0, 8, "float32", (1,)), "does not have 8 bytes"),
        (tensor_extension(1, 0, 4, "float64", (1,)), "does not have 4 bytes"),
        (tensor_extension(1, 0, 0, "float32", (1,)), "does not have 0 bytes"),
        (tensor_extension(1, 0, 4, "float32", (0, 1)), "does not have 4 bytes"),
        (tensor_extension(1, 0, 0, "float32", ()), "does not have 0 bytes"),
        (tensor_extension(1, SLOT.nbytes, 4, "float32", (1,)), "exceeds its region"),
        (tensor_extension(1, SLOT.nbytes - 20, 24, "float32", (6,)), "exceeds its region"),
        (tensor_extension(1, SLOT.nbytes - 3, 4, "uint8", (4,)), "exceeds its region"),
        (tensor_extension(1, 1 << 61, 4, "float32", (1,)), "exceeds its region"),
        (tensor_extension(1, 2**64 - 4, 4, "float32", (1,)), "exceeds its region"),
        (tensor_extension(0, 0, 4, "float32", (1,)), "exceeds its region of 0 bytes"),
        (tensor_extension(2, 0, 4, "float32", (1,)), "region 2 of 1"),
        (tensor_extension(65535, 0, 4, "float32", (1,)), "region 65535 of 1"),
        (tensor_extension(1, 0, 1, "uint8", (1,) * 65), "not as long as it says"),
        (tensor_extension(1, 0, 0, "uint8", (0, 2**31, 2**31)), "larger than any memory"),
        (tensor_extension(1, 0, 2**62, "uint8", (2**31, 2**31)), "larger than any memory"),
        (tensor_extension(1, 0, 0, "float32", (0, *(2**62,) * 63)), "larger than any memory"),
        (tensor_extension(1, 0, 0, "|S0", (2**62,) * 3), "unknown dtype"),
    ],
)
def test_an_unsound_tensor_is_refused(tensor: Ext, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        content_with(tensor)
    payload = msgspec.msgpack.encode(tensor)
    content = content_of(None, slot_extension(), (SLOT,), lies_at=(0, 16))
    if reason != "exceeds its region of 0 bytes":  # there is one, then
        with pytest.raises(RemoteProtocolError, match=reason):
            take_payload(content, payload, 8)


@for_each(("dtype", "offset"), [("float32", 2), ("bfloat16", 1), ("int64", 4), ("complex128", 8)])
def test_a_tensor_that_is_not_aligned_to_its_items_is_refused(dtype: str, offset: int) -> None:
    size = TORCH_ITEM_NBYTES[dtype]
    content_with(tensor_extension(1, 2 * size, size, dtype, (1,)))
    with pytest.raises(RemoteProtocolError, match="not aligned"):
        content_with(tensor_extension(1, offset, size, dtype, (1,)))


def test_as_many_dimensions_as_numpy_takes_are_accepted() -> None:
    content_with(tensor_extension(1, 0, 1, "uint8", (1,) * 64))
    assert np.zeros((1,) * 64).ndim == 64


def test_too_many_tensors_or_slots_are_refused() -> None:
    content_of([TENSOR, TENSOR], None, (SLOT,), max_tensors=2)
    with pytest.raises(RemoteProtocolError, match=r"more tensors than max_tensors \(2\)"):
        content_of([TENSOR, TENSOR, TENSOR], None, (SLOT,), max_tensors=2)
    with pytest.raises(RemoteProtocolError, match=r"tensors in 3 slots exceed max_tensors \(2\)"):
        content_of([], None, (SLOT, SLOT, SLOT), max_tensors=2)


def test_each_tensor_may_be_in_a_slot_of_its_own_beside_the_one_of_what_was_copied() -> None:
    """The payload may lie there, however few tensors there may be."""
    tensors = [TENSOR, tensor_extension(2, 0, 4, "float32", (1,))]
    content = content_of(tensors, None, (SLOT, SLOT), max_tensors=2)
    assert [tensor.region for tensor in content.tensors] == [1, 2]
    assert len(content_of(None, SLOT, (SLOT, SLOT), lies_at=(0, 100), max_tensors=2).slots) == 3


def test_one_unsound_tensor_among_sound_ones_is_refused() -> None:
    with pytest.raises(RemoteProtocolError, match="region 9"):
        content_with(TENSOR, tensor_extension(9, 0, 4, "float32", (1,)), TENSOR)


some_dtypes = st.sampled_from([*TORCH_ITEM_NBYTES, "|b1", "<i2", ">u4", "<f8", "<c8", "<M8[ns]", "|S3", "<U2", "|O", "|S0"])


@given(some_dtypes, st.lists(st.integers(0, 4), max_size=3).map(tuple), st.integers(0, 300), st.integers(-1, 1))
def test_what_is_accepted_can_be_viewed(dtype: str, shape: tuple[int, ...], offset: int, error: int) -> None:
    nbytes = max(0, int(np.prod(shape)) * (item_nbytes(dtype) or 1) + error)
    inline = np.zeros(320, np.uint8)
    try:
        content = content_of(tensor_extension(0, offset, nbytes, dtype, shape), inline.tobytes())
    except RemoteProtocolError:
        return
    assert content.tensors == (TensorRef(0, offset, nbytes, dtype, shape),)
    data = inline[offset : offset + nbytes] if nbytes else inline[:0]
    assert data.nbytes == nbytes
    if dtype in TORCH_ITEM_NBYTES:
        assert torch.from_numpy(data).view(getattr(torch, dtype)).reshape(shape).shape == shape
    else:
        assert data.view(dtype).reshape(shape).shape == shape


# -- sizes -----------------------------------------------------------------------------------------------------------------


@for_each("name", TORCH_ITEM_NBYTES)
def test_a_torch_name_has_torchs_item_size(name: str) -> None:
    assert item_nbytes(name) == getattr(torch, name).itemsize


@for_each(
    "dtype",
    [np.dtype(code) for code in "?bBhHiIlLqQefdgFDG"]
    + [np.dtype(code).newbyteorder(">") for code in "hHiIqQefdFD"]
    + [
        np.dtype(f"{kind}8[{unit}]")
        for kind in "mM"
        for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
    ]
    + [np.dtype(text) for text in ("S1", "S300", "U1", "U77", ">U5", "<M8[25us]", "m8[999s]")],
    ids=lambda dtype: dtype.str,
)
def test_a_numpy_dtype_has_numpys_item_size(dtype: np.dtype[Any]) -> None:
    assert item_nbytes(dtype.str) == dtype.itemsize


@for_each(
    "dtype",
    [
        *["", "O", "|O", "|V8", "float", "torch.float32", "float32 ", "f4", "=f4", "|f4", "<f3", "<i1", "<i16", "<b1", "<f4\n"],
        *["<S4", "|S", "|S0", "|S01", "|S-1", "|S99999999", "|S\u0663", "<U0", "<U\u0663"],
        *["<m8", "<M8", "<M8[]", "<M8[0s]", "<M8[zz]", "<M8[9999999s]"],
    ],
)
def test_any_other_text_is_no_dtype(dtype: str) -> None:
    assert item_nbytes(dtype) is None


@given(st.from_regex(r"[<>|=]?[a-zA-Z?]\d{0,8}(\[\d{0,7}[a-zA-Z]{0,2}\])?", fullmatch=True))
def test_what_is_taken_for_a_numpy_dtype_is_one(text: str) -> None:
    size = item_nbytes(text)
    if size is not None:
        assert np.dtype(text).itemsize == size > 0


def test_align_rounds_up_to_the_next_cache_line() -> None:
    assert [align(nbytes) for nbytes in (0, 1, 63, 64, 65)] == [0, 64, 64, 64, 128]
    assert TENSOR_ALIGNMENT == 64


def test_everything_public_is_there() -> None:
    assert all(hasattr(messages, name) for name in messages.__all__)


# -- bounds --------------------------------------------------------------------------------------------------------------


BODY = (None, SLOT)  # a payload that lies in a slot


@for_each("lies_at", [(64, 100), (0, SLOT.nbytes), (SLOT.nbytes - 1, 1)])
def test_a_payload_may_lie_anywhere_in_its_slot(lies_at: tuple[int, int]) -> None:
    content = content_of(*BODY, lies_at=lies_at)
    assert (content.payload_offset, content.payload_nbytes) == lies_at
    assert (content.payload, content.tensors, content.slots) == (b"", (), (SLOT,))


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (submit_of(1, SLOT, lies_at=(64, 100)), "described in another way"),  # with another one in the record
        (submit_of(tensor_extension(), SLOT, lies_at=(64, 100)), "described in another way"),
        (submit_of(None, b"x", lies_at=(64, 100)), "exceeds the slot"),  # there is none
        (submit_of(None, None, (SLOT,), lies_at=(64, 100)), "exceeds the slot"),
        (submit_of(*BODY, lies_at=(64, 0)), "exceeds the slot"),
        (submit_of(*BODY, lies_at=(SLOT.nbytes - 99, 100)), "exceeds the slot"),
        (submit_of(*BODY, lies_at=(2**62, 100)), "exceeds the slot"),
        (submit_of(*BODY, lies_at=(2**64 - 50, 100)), "exceeds the slot"),
        (submit_of(*BODY, lies_at=(100, 2**64 - 50)), "exceeds the slot"),
        (reply_of(None, b"x", lies_at=(0, 1)), "exceeds the slot"),
        (reply_of(None, SLOT, lies_at=(SLOT.nbytes - 99, 100)), "exceeds the slot"),
    ],
)
def test_a_payload_that_does_not_lie_in_its_slot_is_refused(record: bytes, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        read_record(record, 8, from_engine=record[1] == 103)


def test_a_payload_in_a_slot_becomes_the_one_that_it_stands_for() -> None:
    content = content_of(*BODY, (SLOT,), lies_at=(64, 100))
    payload = msgspec.msgpack.encode([TENSOR])
    four_too_many = msgspec.msgpack.encode([TENSOR] * 5)
    for data in (b"", b"\xc1", payload[:-1], payload + b"\0", four_too_many, msgspec.msgpack.encode([tensor_extension(3)])):
        with pytest.raises(RemoteProtocolError):
            take_payload(content, data, 4)
    take_payload(content, payload, 4)
    assert (content.payload, content.tensors) == (payload, (TensorRef(1, 128, 24, "float32", (2, 3)),))
