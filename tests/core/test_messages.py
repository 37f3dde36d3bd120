"""The wire: what is sent arrives, and nothing forged gets past decoding, nor past reading a record with descriptors."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
    ReplyRelease,
    SlotRef,
    TensorRef,
    Unpin,
    Welcome,
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
SLOT = SlotRef(1, 4096, 4096 - 64, (1 << 40) + 1)
TENSOR = tensor_extension(1, 128, 24, "float32", (2, 3))
GRANT = LeaseGrant(1, 2, 4096, 8192)
DEVICE = DeviceHandle("GPU-a", bytes(64), 1 << 21)

FRONTEND_MESSAGES: list[FrontendMessage] = [
    Hello(1, 4096, "api-0"),
    Abort(3),
    LeaseRequest(1, 4096, 8192, 1),
    LeaseReturn((1, 2)),
    ReplyRelease((5, 6)),
    Call(1, "health", b"\xc0"),
    Goodbye((1,), (5,), True, True, (6,), True),
    Find(1, bytes(32)),
    Keep(1, bytes(32), 1, 4096, 100, 2**40 + 1, True, b"\xc0"),
    Unpin((5, 5)),
]
ENGINE_MESSAGES: list[EngineMessage] = [
    GRANT,
    Welcome(
        1,
        7,
        1,
        1 << 30,
        4096,
        1 << 29,
        8,
        4,
        16,
        1 << 18,
        1 << 16,
        8192,
        1 << 24,
        32,
        1 << 19,
        GRANT,
        DeviceHandle("GPU-a", bytes(64), 1 << 21),
        1 << 28,
    ),
    Failed(3, "error", "ValueError", "no such model"),
    Release((1, 2)),
    LeaseRecall((1, 2)),
    CallResult(1, b"\xc0", ("KeyError", "'x'")),
    Refused("full"),
    Found(1, 2**40 + 1, 4096, 100, False, b"\xc0"),
    NotKept(1, "absent"),
    WorkerWelcome(1, 7, 1 << 30, 1 << 29, 1 << 28, 1 << 18, 8192, 1 << 24, 32, 1 << 19),
    RankTaken(3, 4711),
]
WORKER_MESSAGES: list[WorkerMessage] = [
    Join(1, 3, "rank-3"),
    AnswerFailed(3, "ValueError", "no such layer"),
    AnswerPart(b"abc", True),
]
EVERY_MESSAGE = [*FRONTEND_MESSAGES, *ENGINE_MESSAGES, *WORKER_MESSAGES]

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

unsigned = st.integers(0, BIGGEST)
ranks = st.integers(0, 2**31 - 1)
generations = st.integers(0, 2**64 - 1)
short_text = st.text(max_size=64)
many_ids = st.lists(unsigned, max_size=5).map(tuple)
many_generations = st.lists(generations, max_size=5).map(tuple)
keys = st.binary(min_size=32, max_size=32)
devices = st.builds(DeviceHandle, short_text, st.binary(min_size=64, max_size=64), unsigned)
grants = st.builds(LeaseGrant, unsigned, unsigned, unsigned, unsigned)
frontend_messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(Hello, st.integers(-(2**63), 2**63), unsigned, short_text),
    st.builds(Abort, unsigned),
    st.builds(LeaseRequest, unsigned, unsigned, unsigned, st.sampled_from([0, 1])),
    st.builds(LeaseReturn, many_ids),
    st.builds(ReplyRelease, many_generations),
    st.builds(Call, unsigned, short_text, st.binary(max_size=40)),
    st.builds(Goodbye, many_ids, many_generations, st.booleans(), st.booleans(), many_generations, st.booleans()),
    st.builds(Find, unsigned, keys),
    st.builds(
        Keep, unsigned, keys, unsigned, unsigned, unsigned, generations, st.booleans(), st.binary(min_size=1, max_size=40)
    ),
    st.builds(Unpin, many_generations),
)
engine_messages: st.SearchStrategy[Any] = st.one_of(
    grants,
    st.builds(
        Welcome,
        st.integers(0, 9),
        generations,
        *[unsigned] * 13,
        base_lease=st.none() | grants,
        device_slab=st.none() | devices,
    ),
    st.builds(Failed, unsigned, st.sampled_from(["error", "aborted", "timed_out", "invalid"]), short_text, st.text()),
    st.builds(Release, many_generations),
    st.builds(LeaseRecall, many_ids),
    st.builds(CallResult, unsigned, st.binary(max_size=40), st.none() | st.tuples(st.text(), st.text())),
    st.builds(Refused, st.text()),
    st.builds(Found, unsigned, generations, unsigned, unsigned, st.booleans(), st.binary(min_size=1, max_size=40)),
    st.builds(NotKept, unsigned, st.sampled_from(["absent", "large", "full", "pins"])),
    st.builds(WorkerWelcome, st.integers(0, 9), generations, *[unsigned] * 8),
    st.builds(RankTaken, ranks, st.integers(0, 2**31)),
)
worker_messages: st.SearchStrategy[Any] = st.one_of(
    st.builds(Join, st.integers(0, 9), ranks, short_text),
    st.builds(AnswerFailed, unsigned, short_text, st.text()),
    st.builds(AnswerPart, st.binary(max_size=40), st.booleans()),
)


def plain(message: Any) -> list[Any]:
    """A message as the lists and numbers that travel."""
    fields = msgspec.msgpack.decode(encode_message(message))
    assert isinstance(fields, list)
    return fields


def plain_record(record: bytes) -> list[Any]:
    fields = msgspec.msgpack.decode(record)
    assert isinstance(fields, list)
    return fields


def payload_index(fields: list[Any]) -> int:
    """Where a record has its payload, which may be anything, or nil if it lies in a slot."""
    return {2: 7, 103: 3, 104: 4}[fields[0]]


def without_payload(fields: list[Any]) -> list[int]:
    """The fields behind the tag that may not be anything."""
    free = payload_index(fields)
    return [index for index in range(1, len(fields)) if index != free or len(fields) > free + 1]


def by_type(message: Any) -> str:
    return type(message).__name__


# -- round trips ---------------------------------------------------------------------------------------------------------


@for_each("message", FRONTEND_MESSAGES, ids=by_type)
def test_what_a_frontend_sends_arrives(message: FrontendMessage) -> None:
    assert decode_frontend_message(encode_message(message)) == message


@for_each("message", ENGINE_MESSAGES, ids=by_type)
def test_what_an_engine_sends_arrives(message: EngineMessage) -> None:
    assert decode_engine_message(encode_message(message)) == message


@for_each("message", WORKER_MESSAGES, ids=by_type)
def test_what_a_worker_sends_arrives(message: WorkerMessage) -> None:
    assert decode_worker_message(encode_message(message)) == message


def test_a_connection_starts_as_a_frontends_or_a_workers_or_with_a_question() -> None:
    for first in (FRONTEND_MESSAGES[0], WORKER_MESSAGES[0], Inspect(1)):
        assert decode_first_message(encode_message(first)) == first


def test_the_examples_above_are_every_message_there_is() -> None:
    assert {type(message) for message in FRONTEND_MESSAGES} == set(FrontendMessage.__args__)
    assert {type(message) for message in ENGINE_MESSAGES} == set(EngineMessage.__args__)
    assert {type(message) for message in WORKER_MESSAGES} == set(WorkerMessage.__args__)


@given(frontend_messages)
def test_anything_a_frontend_can_send_arrives(message: FrontendMessage) -> None:
    assert decode_frontend_message(encode_message(message)) == message


@given(worker_messages)
def test_anything_a_worker_can_send_arrives(message: WorkerMessage) -> None:
    assert decode_worker_message(encode_message(message)) == message


@given(engine_messages)
def test_anything_an_engine_can_send_arrives(message: EngineMessage) -> None:
    assert decode_engine_message(encode_message(message)) == message


def test_defaults_may_be_left_out() -> None:
    assert decode_frontend_message(msgspec.msgpack.encode([1, 1, 4096])) == Hello(1, 4096, "")
    assert decode_frontend_message(msgspec.msgpack.encode([8])) == Goodbye()
    assert decode_frontend_message(msgspec.msgpack.encode([4, 1, 4096])) == LeaseRequest(1, 4096, 0, 0)


def test_the_tags_are_fixed() -> None:
    assert [plain(message)[0] for message in FRONTEND_MESSAGES] == [1, 3, 4, 5, 6, 7, 8, 12, 13, 14]
    assert sorted(plain(message)[0] for message in ENGINE_MESSAGES) == [101, 102, *range(105, 110), 112, 113, 121, 122]
    assert [plain(message)[0] for message in WORKER_MESSAGES] == [31, 33, 34]
    assert {msgspec.msgpack.decode(record)[0] for record in SUBMITS.values()} == {2}
    assert {msgspec.msgpack.decode(record)[0] for record in ENGINE_RECORDS.values()} == {103, 104}


@for_each("record", SUBMITS.values(), ids=SUBMITS.keys())
def test_a_submission_is_read_and_only_from_a_frontend(record: bytes) -> None:
    assert read_record(record, 8, from_engine=False) is not None
    assert read_record(record, 8, from_engine=True) is None
    refused(record)


@for_each("record", ENGINE_RECORDS.values(), ids=ENGINE_RECORDS.keys())
def test_replies_and_ends_are_read_and_only_from_an_engine(record: bytes) -> None:
    assert read_record(record, 8, from_engine=True) is not None
    assert read_record(record, 8, from_engine=False) is None
    refused(record)


# -- byte for byte ---------------------------------------------------------------------------------------------------------

KEY = bytes(range(32))
HANDLE = bytes(range(64))
LARGEST = 2**64 - 1
LARGEST_HEX = "cf ffffffffffffffff"

#: One of each that has no content, as it is written. All fields have their names here and different values, so that what is
#: renamed or swapped is noticed.
GOLDEN: list[tuple[FrontendMessage | EngineMessage | WorkerMessage, str]] = [
    (Hello(version=0x31, lease_nbytes=0x32, name="api"), "94 01 31 32 a3617069"),
    (Abort(request_id=0x31), "92 03 31"),
    (
        LeaseRequest(token=0x31, nbytes=0x32, preferred_nbytes=0x33, memory=DEVICE_MEMORY, waits=False),
        "96 04 31 32 33 01 c2",
    ),
    (LeaseReturn(lease_ids=(0x31, 0x32)), "92 05 92 31 32"),
    (ReplyRelease(generations=(LARGEST, 0x32)), f"92 06 92 {LARGEST_HEX} 32"),
    (Call(call_id=0x31, method="health", arguments=b"\xc0"), "94 07 31 a66865616c7468 c401c0"),
    (
        Goodbye(
            kept_lease_ids=(0x31,),
            kept_reply_generations=(0x32, LARGEST),
            maps_device_slab=True,
            more=False,
            pinned_generations=(0x33, 0x33),
        ),
        f"97 08 91 31 92 32 {LARGEST_HEX} c3 c2 92 33 33 c2",
    ),
    (Goodbye(kept_lease_ids=(0x31,), maps_device_slab=True, lingers=True), "97 08 91 31 90 c3 c2 90 c3"),
    (Find(token=0x31, key=KEY), f"93 0c 31 c420 {KEY.hex()}"),
    (
        Keep(token=0x31, key=KEY, lease_id=0x32, offset=0x33, nbytes=0x34, generation=LARGEST, is_copied=True, payload=b"\xc0"),
        f"99 0d 31 c420 {KEY.hex()} 32 33 34 {LARGEST_HEX} c3 c401c0",
    ),
    (Unpin(generations=(0x31, 0x31)), "92 0e 92 31 31"),
    (Inspect(version=0x31), "92 09 31"),
    (Join(version=0x31, rank=0x32, name="tp"), "94 1f 31 32 a27470"),
    (AnswerFailed(sequence=0x31, type_name="KeyError", message="'x'"), "94 21 31 a84b65794572726f72 a3277827"),
    (AnswerPart(data=b"abc", more=True), "93 22 c403616263 c3"),
    (LeaseGrant(token=0x31, lease_id=0x32, offset=0x33, nbytes=0x34), "95 65 31 32 33 34"),
    (
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
        ),
        f"dc0013 66 31 {LARGEST_HEX} 32 33 34 35 36 37 38 39 3a 3b 3c 3d 3f"
        f"95 65 41 42 43 44  93 a3475055 c440 {HANDLE.hex()} 45  3e",
    ),
    (
        Failed(request_id=0x31, kind="invalid", type_name="KeyError", message="'x'"),
        "95 69 31 a7696e76616c6964 a84b65794572726f72 a3277827",
    ),
    (Release(generations=(LARGEST, 0x32)), f"92 6a 92 {LARGEST_HEX} 32"),
    (LeaseRecall(lease_ids=(0x31, 0x32)), "92 6b 92 31 32"),
    (CallResult(call_id=0x31, result=b"\xc0", error=("KeyError", "'x'")), "94 6c 31 c401c0 92 a84b65794572726f72 a3277827"),
    (Refused(reason="full"), "92 6d a466756c6c"),
    (
        Found(token=0x31, generation=LARGEST, offset=0x32, nbytes=0x33, is_copied=True, payload=b"\xc0"),
        f"97 70 31 {LARGEST_HEX} 32 33 c3 c401c0",
    ),
    (NotKept(token=0x31, reason="pins"), "93 71 31 a470696e73"),
    (
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
        ),
        f"9b 79 31 {LARGEST_HEX} 32 33 34 35 36 37 38 39",
    ),
    (RankTaken(rank=0x31, pid=0x32), "93 7a 31 32"),
]


def golden_id(value: object) -> str:
    return "" if isinstance(value, str) else by_type(value)


@for_each(("message", "record_hex"), GOLDEN, ids=golden_id)
def test_a_message_is_these_bytes(message: Any, record_hex: str) -> None:
    record = bytes.fromhex(record_hex)
    assert encode_message(message).hex() == record.hex()
    decoders: Any = {
        FrontendMessage: decode_frontend_message,
        EngineMessage: decode_engine_message,
        Inspect: decode_first_message,
    }
    decode: Any = next((decoders[union] for union in decoders if isinstance(message, union)), decode_worker_message)
    assert decode(record) == message


def test_every_message_is_written_down() -> None:
    assert {type(message) for message, _ in GOLDEN} == set((FrontendMessage | EngineMessage | WorkerMessage | Inspect).__args__)


@for_each(("message", "record_hex"), GOLDEN, ids=golden_id)
def test_no_two_fields_of_what_is_written_down_are_equal(message: Any, record_hex: str) -> None:
    """Of a message that is there twice, in both: there are only two truth values."""
    same = [other for other, _ in GOLDEN if type(other) is type(message)]
    fields = [[getattr(other, name) for other in same] for name in message.__struct_fields__]
    assert all(fields.count(field) == 1 for field in fields), record_hex


def test_the_protocols_page_has_each_messages_tag_and_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text()
    tag_of = {name: int(tag) for tag, name in re.findall(r"^\| (\d+) \| (?:\w+ \| )?`(\w+)", page, re.MULTILINE)}
    tag_of |= {name: int(tag) for name, tag in re.findall(r"`(\w+)\{[^}]*\}` \((?:tag )?(\d+)\)", page)}
    fields_of = {name: tuple(re.split(r",\s+", fields)) for name, fields in re.findall(r"`(\w+)\{([^}.]*)\}", page)}
    for message, _ in GOLDEN:
        name = by_type(message)
        assert (tag_of[name], fields_of[name]) == (plain(message)[0], message.__struct_fields__), name
    assert fields_of["DeviceHandle"] == DeviceHandle.__struct_fields__


# -- forgeries of the message ----------------------------------------------------------------------------------------------


def refused(fields: Any) -> None:
    for decoder in (decode_frontend_message, decode_engine_message):
        with pytest.raises(RemoteProtocolError, match="not a message of protocol version"):
            decoder(fields if isinstance(fields, bytes) else msgspec.msgpack.encode(fields))


def refused_record(fields: Any, *, from_engine: bool) -> None:
    """Neither read as a record with a descriptor nor decoded as any other message."""
    record = fields if isinstance(fields, bytes) else msgspec.msgpack.encode(fields)
    try:
        assert read_record(record, 8, from_engine=from_engine) is None
    except RemoteProtocolError:
        return
    refused(record)


by_writer = pytest.mark.parametrize(
    ("record", "from_engine"),
    [(record, False) for record in SUBMITS.values()] + [(record, True) for record in ENGINE_RECORDS.values()],
    ids=[*SUBMITS, *ENGINE_RECORDS],
)


@for_each("message", FRONTEND_MESSAGES, ids=by_type)
def test_an_engine_does_not_say_what_a_frontend_says(message: FrontendMessage) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_engine_message(encode_message(message))


@for_each("message", ENGINE_MESSAGES, ids=by_type)
def test_a_frontend_does_not_say_what_an_engine_says(message: EngineMessage) -> None:
    with pytest.raises(RemoteProtocolError):
        decode_frontend_message(encode_message(message))


@pytest.mark.parametrize("tag", [0, -1, 9, 99, 100, 110, 2**63, "Abort", None, 3.0, [3]])
def test_an_unknown_tag_is_refused(tag: Any) -> None:
    refused([tag, 1])


@for_each("message", EVERY_MESSAGE, ids=by_type)
def test_an_extra_field_is_refused(message: Any) -> None:
    refused([*plain(message), 0])


@for_each("message", EVERY_MESSAGE, ids=by_type)
def test_a_missing_field_is_refused(message: Any) -> None:
    required = sum(field.required for field in msgspec.structs.fields(message))
    for length in range(1, 1 + required):
        refused(plain(message)[:length])


@for_each("forge", [lambda fields: [*fields, 0], lambda fields: fields[:-1]], ids=["extra", "missing"])
def test_an_extra_or_missing_field_of_a_part_is_refused(forge: Any) -> None:
    welcome = next(plain(message) for message in ENGINE_MESSAGES if isinstance(message, Welcome))
    *fields, lease, device, kept_nbytes = welcome
    assert decode_engine_message(msgspec.msgpack.encode([*fields, lease, device, kept_nbytes]))
    refused([*fields, forge(lease), device, kept_nbytes])
    refused([*fields, lease, forge(device), kept_nbytes])


@by_writer
def test_an_extra_or_missing_field_of_a_record_is_refused(record: bytes, from_engine: bool) -> None:
    fields = plain_record(record)
    refused_record([*fields, 0], from_engine=from_engine)
    for length in range(len(fields)):
        if length not in (payload_index(fields) + 1, 3 if fields[0] == 104 else None):  # which would be all of a record
            refused_record(fields[:length], from_engine=from_engine)


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\xc0", b"\x03", b"\x90", msgspec.msgpack.encode({"t": 3, "request_id": 1})])
def test_what_is_no_array_with_a_tag_is_refused(body: bytes) -> None:
    refused(body)


@for_each("message", EVERY_MESSAGE, ids=by_type)
def test_a_message_cut_short_or_with_bytes_behind_it_is_refused(message: Any) -> None:
    body = encode_message(message)
    for length in range(len(body)):
        refused(body[:length])
    refused(body + b"\0")


@by_writer
def test_a_record_cut_short_or_with_bytes_behind_it_is_refused(record: bytes, from_engine: bool) -> None:
    for length in range(len(record)):
        refused_record(record[:length], from_engine=from_engine)
    refused_record(record + b"\0", from_engine=from_engine)


@by_writer
def test_no_field_of_a_record_takes_a_value_of_a_foreign_type(record: bytes, from_engine: bool) -> None:
    fields = plain_record(record)
    for index in without_payload(fields):
        for wrong in (1.5, True, {}, {"a": 1}, [[[1]]], Ext(5, b"x"), "x", b"x", 5):
            if type(wrong) is not type(fields[index]):
                refused_record([*fields[:index], wrong, *fields[index + 1 :]], from_engine=from_engine)


@for_each("message", EVERY_MESSAGE, ids=by_type)
def test_no_field_takes_a_value_of_a_foreign_type(message: Any) -> None:
    fields = plain(message)
    for index in range(1, len(fields)):
        for wrong in (1.5, True, {}, {"a": 1}, [[[1]]], msgspec.msgpack.Ext(5, b"x")):
            if type(wrong) is not type(fields[index]):
                refused([*fields[:index], wrong, *fields[index + 1 :]])


@for_each("message", [Abort(3), LeaseRequest(1, 2, 3), GRANT, Call(1, "x", b""), Failed(1, "error", "x", "y")], ids=by_type)
@for_each("number", [-1, -(2**63), BIGGEST + 1, 2**64 - 1])
def test_a_negative_or_huge_number_is_refused(message: Any, number: int) -> None:
    fields = plain(message)
    for index in range(1, len(fields)):
        if isinstance(fields[index], int):
            refused([*fields[:index], number, *fields[index + 1 :]])


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


@pytest.mark.parametrize("number", [-1, -(2**63)])
def test_a_negative_number_in_a_record_is_refused(number: int) -> None:
    for record in (*SUBMITS.values(), *ENGINE_RECORDS.values()):
        fields = plain_record(record)
        for index in without_payload(fields):
            if isinstance(fields[index], int):
                refused_record([*fields[:index], number, *fields[index + 1 :]], from_engine=fields[0] > 100)
    refused_record([104, 1, [1, number]], from_engine=True)


def test_a_request_is_numbered_up_to_62_bits() -> None:
    assert read_record(submit_of(1, request_id=BIGGEST), 8, from_engine=False)
    refused_record(submit_of(1, request_id=BIGGEST + 1), from_engine=False)


def test_a_negative_generation_is_refused() -> None:
    refused([6, [1, -1]])
    refused([106, [-1]])


def test_a_name_that_is_too_long_is_refused() -> None:
    assert decode_frontend_message(msgspec.msgpack.encode([1, 1, 4096, "x" * 256])) == Hello(1, 4096, "x" * 256)
    refused([1, 1, 4096, "x" * 257])
    refused([7, 1, "x" * 257, b""])
    refused([105, 1, "error", "x" * 257, ""])
    assert read_record(submit_of(1, name="ä" * 256), 8, from_engine=False)
    refused_record(submit_of(1, name="ä" * 257), from_engine=False)


def test_text_that_is_not_utf8_is_refused() -> None:
    refused(b"\x94\x01\x01\x05\xa1\xff")  # Hello(1, 5, "\xff")
    refused(b"\x92\x6d\xa1\xff")  # Refused("\xff")
    sound = submit_of(1, name="x")
    refused_record(sound.replace(b"\xa1x", b"\xa1\xff"), from_engine=False)


def test_an_unknown_kind_of_failure_is_refused() -> None:
    refused([105, 1, "bored", "", ""])


@for_each("depth", [10, 1_000, 100_000])
@for_each("head", [b"", b"\x92\x05", b"\x92\x02", b"\x93\x67\x03", b"\x97\x01\x01\x05\xa0"])
def test_deep_nesting_is_refused(head: bytes, depth: int) -> None:
    refused(head + b"\x91" * depth + b"\xc0")
    refused(head + b"\x81\xc0" * depth + b"\xc0")


@pytest.mark.parametrize("depth", [1_000, 100_000])
@by_writer
def test_deep_nesting_in_a_record_is_refused(record: bytes, from_engine: bool, depth: int) -> None:
    fields = plain_record(record)
    for index in range(1, len(fields)):
        for nested in (b"\x91" * depth + b"\xc0", b"\x81\xc0" * depth + b"\xc0"):
            refused_record([*fields[:index], msgspec.Raw(nested), *fields[index + 1 :]], from_engine=from_engine)


@by_writer
def test_a_length_that_a_record_does_not_have_is_refused(record: bytes, from_engine: bool) -> None:
    fields = plain_record(record)
    for index in range(1, len(fields)):
        for head in (b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x53"):
            lying = msgspec.Raw(head + bytes(20))
            refused_record([*fields[:index], lying, *fields[index + 1 :]], from_engine=from_engine)


@for_each("head", [b"\xdd\xff\xff\xff\xff", b"\x92\x05\xdd\xff\xff\xff\xff", b"\x94\x07\x01\xa1x\xc6\xff\xff\xff\xff"])
def test_a_length_that_the_body_does_not_have_is_refused(head: bytes) -> None:
    refused(head + bytes(20))


def decodes_or_is_refused(body: bytes) -> None:
    for decoder in (decode_frontend_message, decode_engine_message):
        try:
            message = decoder(body)
        except RemoteProtocolError:
            continue
        assert decoder(encode_message(message)) == message
    for from_engine in (False, True):
        with contextlib.suppress(RemoteProtocolError):
            read_record(body, 8, from_engine=from_engine)


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(body: bytes) -> None:
    decodes_or_is_refused(body)


@given(
    st.one_of(frontend_messages, engine_messages),
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


@given(st.sampled_from([*range(1, 9), *range(101, 110)]), st.lists(anything, max_size=5))
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


@for_each("nbytes", [0, 63, 65])
def test_a_handle_of_memory_has_64_bytes(nbytes: int) -> None:
    refused([102, 1, 7, 1, 1 << 30, 4096, 1 << 29, 8, 4, 16, 4096, 32, None, ["GPU-a", bytes(nbytes), 1 << 21]])


def test_a_fence_has_64_bytes_at_most() -> None:
    assert read_record(submit_of(1, fence=bytes(64)), 8, from_engine=False)
    refused_record(submit_of(1, fence=bytes(65)), from_engine=False)


@for_each("memory", [2, -1, "0", None])
def test_there_are_two_memories(memory: object) -> None:
    refused([4, 1, 4096, 0, memory])


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


@for_each("tag", [5, 6, 8])
def test_a_list_of_ids_from_a_frontend_is_bounded(tag: int) -> None:
    assert decode_frontend_message(msgspec.msgpack.encode([tag, list(range(MAX_LISTED))]))
    with pytest.raises(RemoteProtocolError, match="length <= 1024"):
        decode_frontend_message(msgspec.msgpack.encode([tag, list(range(MAX_LISTED + 1))]))


@for_each("fields", [[106], [107]])
def test_a_list_of_ids_from_an_engine_is_bounded(fields: list[int]) -> None:
    assert decode_engine_message(msgspec.msgpack.encode([*fields, list(range(MAX_LISTED))]))
    with pytest.raises(RemoteProtocolError, match="length <= 1024"):
        decode_engine_message(msgspec.msgpack.encode([*fields, list(range(MAX_LISTED + 1))]))


def test_the_longest_list_fits_the_record_of_the_default_ring() -> None:
    assert len(encode_message(ReplyRelease(tuple(range(2**64 - MAX_LISTED, 2**64))))) < 1 << 14


def test_the_slots_that_come_back_with_an_end_are_bounded() -> None:
    assert read_record(done_of(range(MAX_LISTED)), 8, from_engine=True)
    refused_record(done_of(range(MAX_LISTED + 1)), from_engine=True)


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
