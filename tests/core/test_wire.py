"""Records: byte for byte as the protocol's page has them; and what anybody may have written is at worst refused."""

from __future__ import annotations

import ctypes
import math
import socket
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.msgpack import Ext

from shmring.core.compiled import (
    DTYPES,
    MAX_DEPTH,
    ClientBook,
    Content,
    HeldSlots,
    Packed,
    RecordReader,
    RecordWriter,
    Submit,
    check_count,
    check_payload,
    ring_nbytes,
)
from shmring.core.geometry import ClientBookLimits
from shmring.core.messages import LeaseGrant, SlotRef, TensorRef
from shmring.errors import CapacityError, RemoteProtocolError
from shmring.memory.tensors import make_packer
from tests.model.inside import Done, Reply, read_record, take_payload, write_done, write_reply, write_submit
from tests.records import content_of, slot_extension, submit_of, tensor_extension
from tests.tables import for_each

EPOCH = 0x1122334455667788
INLINE_NBYTES = 8192
LARGEST_NBYTES = 65536
MAX_TENSORS = 4096
LARGEST_PAYLOAD_NBYTES = 16 << 20

ENDS = socket.socketpair()


@pytest.fixture
def ring() -> tuple[RecordWriter, RecordReader]:
    memory = bytearray(ring_nbytes(1 << 18))
    return RecordWriter(memory, ENDS[0].fileno()), RecordReader(memory, ENDS[1].fileno())


def pack(payload: object, held: HeldSlots | None = None) -> Packed:
    return make_packer(MAX_TENSORS, LARGEST_PAYLOAD_NBYTES).pack(payload, INLINE_NBYTES, LARGEST_NBYTES, held)


def held_slot(address: int, nbytes: int) -> HeldSlots:
    """A slot that a caller holds, in a book of its own."""
    book = ClientBook(ClientBookLimits(1, 1 << 30, 4, 1 << 20, 1.0))
    book.granted(LeaseGrant(0, 1, 4096, 1 << 20), 0.0)
    slot = book.acquire(nbytes, held=True)
    assert slot is not None
    held = HeldSlots()
    held.hold(slot, address, nbytes)
    return held


def submit_record(packed: Packed, slots: tuple[SlotRef, ...] = (), name: str = "", fence: bytes = b"") -> bytes:
    memory = bytearray(ring_nbytes(1 << 18))
    assert write_submit(RecordWriter(memory, ENDS[0].fileno()), packed, EPOCH, 7, name, fence, slots)
    record = RecordReader(memory, ENDS[1].fileno()).read()
    assert record is not None
    return record


def read_submit(record: bytes) -> Submit:
    message = read_record(record, MAX_TENSORS, from_engine=False)
    assert isinstance(message, Submit)
    return message


# -- as it is written -------------------------------------------------------------------------------------------------

TENSOR = torch.tensor([1.0, 2.0, 3.0])
PAYLOAD = {"x": TENSOR}
#: {"x": a tensor in region 0 at 0, of 12 bytes, float32, (3,)}
PAYLOAD_HEX = "81a178c71c53" + "0000" + "0c01" + "0000000000000000" + "0c00000000000000" + "0300000000000000"
HEADER_HEX = "98" + "02" + "cf1122334455667788" + "07"


def test_a_submission_whose_tensors_travel_inline() -> None:
    record = submit_record(pack(PAYLOAD), name="cat")
    assert record.hex() == HEADER_HEX + "a3636174" + "c400" + "90" + "c40c" + "0000803f0000004000004040" + PAYLOAD_HEX


def test_a_submission_whose_tensors_are_copied_to_a_slot() -> None:
    packed = pack({"x": torch.zeros(5000)})
    assert packed.slot_nbytes == 20000
    record = submit_record(packed, (SlotRef(3, 8192, 20000, 1 << 40 | 9),))
    slot = "c72052" + "0300000000000000" + "0020000000000000" + "204e000000000000" + "0900000000010000"
    tensor = "81a178c71c53" + "0000" + "0c01" + "0000000000000000" + "204e000000000000" + "8813000000000000"
    assert record.hex() == HEADER_HEX + "a0" + "c400" + "90" + slot + tensor


def test_a_submission_in_place_beside_what_is_copied() -> None:
    packed = pack([TENSOR, torch.ones(2, dtype=torch.uint8)], held_slot(TENSOR.data_ptr() - 64, 128))
    record = submit_record(packed, (SlotRef(3, 8192, 128, 5),))
    slot = "c72052" + "0300000000000000" + "0020000000000000" + "8000000000000000" + "0500000000000000"
    in_place = "c71c53" + "0100" + "0c01" + "4000000000000000" + "0c00000000000000" + "0300000000000000"
    inline = "c71c53" + "0000" + "0201" + "0000000000000000" + "0200000000000000" + "0200000000000000"
    assert record.hex() == HEADER_HEX + "a0" + "c400" + "91" + slot + "c4020101" + "92" + in_place + inline


def test_a_submission_in_device_memory() -> None:
    packed = pack(TENSOR, held_slot(TENSOR.data_ptr(), 64))
    record = submit_record(packed, (SlotRef(3, 8192, 64, 5),), fence=b"\xee" * 64)
    slot = "c72052" + "0300000000000000" + "0020000000000000" + "4000000000000000" + "0500000000000000"
    in_place = "c71c53" + "0100" + "0c01" + "0000000000000000" + "0c00000000000000" + "0300000000000000"
    assert record.hex() == HEADER_HEX + "a0" + "c440" + "ee" * 64 + "91" + slot + "c0" + in_place


def test_a_payload_too_long_for_a_record_lies_in_the_slot() -> None:
    packed = pack({"t": "x" * 70000, "p": torch.ones(3)})
    assert packed.is_payload_in_slot
    assert packed.payload_offset == 64  # behind the tensor, on a cache line
    assert packed.slot_nbytes == 64 + len(packed.payload)
    slot_bytes = bytearray(packed.slot_nbytes)
    packed.copy_into(ctypes.addressof(ctypes.c_char.from_buffer(slot_bytes)))
    record = submit_record(packed, (SlotRef(1, 4096, packed.slot_nbytes, 5),))
    assert record.hex().endswith("c0" + "40" + "ce" + len(packed.payload).to_bytes(4, "big").hex())
    content = read_submit(record).content
    assert (content.payload, content.tensors) == (b"", ())
    assert (content.payload_offset, content.payload_nbytes) == (64, len(packed.payload))
    take_payload(content, bytes(slot_bytes[64:]), MAX_TENSORS)
    assert content.tensors == (TensorRef(1, 0, 12, "float32", (3,)),)


def test_replies_and_ends(ring: tuple[RecordWriter, RecordReader]) -> None:
    writer, reader = ring
    write_reply(writer, pack(PAYLOAD), 7, None)
    assert (reader.read() or b"").hex() == "94" + "67" + "07" + "c40c" + "0000803f0000004000004040" + PAYLOAD_HEX
    write_done(writer, 7, (1, 1 << 40))
    assert (reader.read() or b"").hex() == "93" + "68" + "07" + "92" + "01" + "cf0000010000000000"
    write_done(writer, 7, (1,), pack(PAYLOAD))
    record = reader.read() or b""
    assert record.hex() == "95" + "68" + "07" + "91" + "01" + "c40c" + "0000803f0000004000004040" + PAYLOAD_HEX
    done = read_record(record, MAX_TENSORS, from_engine=True)
    assert isinstance(done, Done)
    assert done.released == (1,)
    assert done.content is not None
    assert done.content.tensors == (TensorRef(0, 0, 12, "float32", (3,)),)


LONG_RECORDS: dict[str, Callable[[RecordWriter], object]] = {
    "submission": lambda writer: write_submit(
        writer,
        pack([TENSOR, torch.zeros(10)], held_slot(TENSOR.data_ptr(), 64)),
        2**64 - 1,
        2**62,
        "é" * 256,
        b"\xee" * 64,
        (SlotRef(1, 4096, 64, 5),),
    ),
    "reply": lambda writer: write_reply(writer, pack(torch.zeros(10)), 2**62, None),
    "end": lambda writer: write_done(writer, 2**62, [2**63] * 64, pack(PAYLOAD)),
}


@pytest.mark.parametrize("write", LONG_RECORDS.values(), ids=LONG_RECORDS)
def test_no_record_reaches_beyond_the_end_of_its_ring(write: Callable[[RecordWriter], object]) -> None:
    """Room is reserved before it is known how long the record will be."""
    records = set()
    for left_nbytes in range(8, 2048, 8):
        memory = bytearray(ring_nbytes(1 << 14) + 2048)
        ring = memoryview(memory)[:-2048]
        writer, reader = RecordWriter(ring, ENDS[0].fileno()), RecordReader(ring, ENDS[1].fileno())
        for nbytes in (4092, 4092, 4092, 4092 - left_nbytes):
            writer.write(bytes(nbytes))
            reader.read()
        write(writer)
        records.add(reader.read())
        assert not any(memory[-2048:])
    assert len(records) == 1


def test_a_full_ring_takes_no_record_and_is_as_it_was(ring: tuple[RecordWriter, RecordReader]) -> None:
    writer, reader = ring
    packed = pack({"x": "y" * 60000})
    records = 0
    while write_submit(writer, packed, EPOCH, records + 1, "", b"", ()):
        records += 1
    assert records == 4
    assert [read_submit(reader.read() or b"").request_id for _ in range(4)] == [1, 2, 3, 4]
    assert reader.read() is None


names = st.text(max_size=256)
slot_refs = st.builds(
    SlotRef, *[st.integers(0, 2**62)] * 2, st.integers(1 << 20, 2**62), st.integers(0, 2**64 - 1)
)  # large enough for any tensor below
tensors = st.builds(
    lambda shape, dtype: torch.zeros(shape, dtype=dtype),
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn]),
)
arrays = st.sampled_from([np.zeros((2, 3), "<f4"), np.array(["ab", "c"]), np.zeros(3, "<M8[ns]"), np.zeros((0, 2), ">i2")])
payloads = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
    | tensors | arrays,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)  # fmt: skip


@given(payloads, names, slot_refs)
def test_what_was_written_is_what_is_read(payload: object, name: str, slot: SlotRef) -> None:
    packed = pack(payload)
    slots = (slot,) if packed.slot_nbytes else ()
    record = submit_record(packed, slots, name)
    message = read_submit(record)
    assert (message.epoch, message.request_id, message.for_engine.request_id) == (EPOCH, 7, name)
    content = message.content
    assert (content.fence, content.slots, content.payload) == (b"", slots, packed.payload)
    assert len(content.inline) == (0 if slots else packed.region_nbytes)
    assert content.tensor_count == len(packed.parts) == len(content.tensors)
    plain = msgspec.msgpack.decode(record)  # any reader of msgpack can show it
    assert plain[:5] == [2, EPOCH, 7, name, b""]
    assert msgspec.msgpack.encode(plain[-1]) == msgspec.msgpack.encode(msgspec.msgpack.decode(packed.payload))


# -- what anybody may have written ------------------------------------------------------------------------------------


def refused(record: bytes, match: str, *, from_engine: bool = False, max_tensors: int = MAX_TENSORS) -> None:
    with pytest.raises(RemoteProtocolError, match=match):
        read_record(record, max_tensors, from_engine=from_engine)


def test_the_examples_below_are_refused_for_their_one_fault() -> None:
    assert read_submit(submit_of(tensor_extension())).content.tensors == (TensorRef(0, 0, 12, "float32", (3,)),)
    in_slot = read_submit(submit_of(tensor_extension(region=1, offset=64), None, (slot_extension(),)))
    assert in_slot.content.tensors == (TensorRef(1, 64, 12, "float32", (3,)),)


@pytest.mark.parametrize(
    ("extension", "reason"),
    [
        (tensor_extension(region=1), "in region 1 of 0"),
        (tensor_extension(dtype=len(DTYPES)), "unknown dtype"),
        (tensor_extension(dtype=255), "unknown dtype"),
        (tensor_extension(dtype=0, spelling=b"|O"), "unknown dtype '|O'"),
        (tensor_extension(dtype=0, spelling=b"float32"), "unknown dtype"),
        (tensor_extension(dtype=0), "not as long as it says"),
        (tensor_extension(spelling=b"<f4"), "not as long as it says"),
        (tensor_extension(dtype=0, spelling=b"<" * 65), "not as long as it says"),
        (tensor_extension(shape=(1,) * 65), "not as long as it says"),
        (tensor_extension(nbytes=16), "does not have 16 bytes"),
        (tensor_extension(shape=(4,)), "does not have 12 bytes"),
        (tensor_extension(shape=(2**63, 2), nbytes=0), "larger than any memory"),
        (tensor_extension(shape=(0, 2**61), nbytes=0), "larger than any memory"),
        (tensor_extension(shape=(2**32, 2**32)), "larger than any memory"),
        (tensor_extension(offset=2, nbytes=8, shape=(2,)), "not aligned"),
        (tensor_extension(offset=4), "exceeds its region of 12 bytes"),
        (tensor_extension(offset=2**64 - 4), "exceeds its region of 12 bytes"),
        (Ext(83, b""), "not as long as it says"),
        (Ext(83, tensor_extension().data[:-1]), "not as long as it says"),
    ],
)
def test_a_tensor_that_is_not_what_it_says(extension: Ext, reason: str) -> None:
    refused(submit_of({"x": extension}), reason)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (msgspec.msgpack.encode([2]), "too few or too many fields"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], None, 1, 2]), "too few or too many fields"),
        (msgspec.msgpack.encode([2, -1, 7, "", b"", [], None, 1]), "no number"),
        (msgspec.msgpack.encode([2, EPOCH, {}, "", b"", [], None, 1]), "no number"),
        (msgspec.msgpack.encode([2, EPOCH, 2**63, "", b"", [], None, 1]), "no number"),
        (msgspec.msgpack.encode([2, EPOCH, 7, 5, b"", [], None, 1]), "its name"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "x" * 257, b"", [], None, 1]), "its name"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "x" * 1025, b"", [], None, 1]), "its name"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"x" * 65, [], None, 1]), "fence"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", None, None, 1]), "slots"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [1], None, 1]), "a slot is described"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [Ext(82, b"\0" * 31)], None, 1]), "a slot is described"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [slot_extension(nbytes=2**63)], None, 1]), "larger than any memory"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], 1, 1]), "copied bytes"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], None, None, 0, 0]), "exceeds the slot"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], None, None, 0, 10]), "exceeds the slot"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], slot_extension(), None, 71, 10]), "exceeds the slot"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], slot_extension(), None, 2**64 - 1, 10]), "exceeds the slot"),
        (msgspec.msgpack.encode([2, EPOCH, 7, "", b"", [], slot_extension(), 1, 0, 10]), "a payload is described"),
        (submit_of(1) + b"\0", "something follows"),
        (submit_of(1)[:-1] + b"\xc1", "not msgpack"),
        (b"\x98\x02\xcf" + b"\0" * 8 + b"\x07\xa1\xff\xc4\x00\x90\xc0\x01", "utf-8"),
    ],
)
def test_a_submission_that_is_not_what_it_says(record: bytes, reason: str) -> None:
    refused(record, reason)


def test_more_tensors_or_slots_than_agreed() -> None:
    refused(submit_of([tensor_extension()] * 5), "max_tensors", max_tensors=4)
    refused(submit_of(1, None, (slot_extension(),) * 5), "max_tensors", max_tensors=4)
    assert len(read_submit(submit_of([tensor_extension()] * 5)).content.tensors) == 5


@for_each(
    ("payload", "count"),
    [
        (None, 1),
        (True, 1),
        (7, 1),
        (-7, 1),
        (2**63, 1),
        (1.5, 1),
        ("", 4),
        ("sixteen letters.", 4),
        ("a" * 1000, 4),
        ("\xe4" * 8, 4),  # 16 bytes
        ("\xe4" * 12, 4 + 3),
        ("a" * 1000 + "\xe4", 4 + 125),
        ("\xe4" + "a" * 1000, 4 + 125),
        (b"", 4),
        (b"\xff" * 1000, 4),
        ([], 4),
        ({}, 4),
        ([[], {}, 0], 4 + 4 + 4 + 1),
        ({"a": 1, "b": [2, 3]}, 4 + 2 * 4 + 1 + 4 + 2),
        ({1: 2}, 4 + 2),
        (dict.fromkeys(range(127), "x"), 4 + 127 * 5),
        (dict.fromkeys(range(128), "x"), 4 + 128 * (5 + 1)),
        (dict.fromkeys(range(1280), "x"), 4 + 1280 * (5 + 10)),
        ([dict.fromkeys(range(128), "x"), 1, {"a": 1}, 2], 4 + 4 + 128 * 6 + 1 + 9 + 1),
        (Ext(5, b"x"), 8),
        ([tensor_extension()] * 3, 4 + 3 * 8),
    ],
)
def test_what_values_count(payload: object, count: int) -> None:
    encoded = msgspec.msgpack.encode(payload)
    submit = submit_of(msgspec.Raw(encoded))
    assert read_submit(submit).content.value_count == count
    assert read_record(submit, MAX_TENSORS, count, from_engine=False)
    for record, from_engine in ((submit, False), (msgspec.msgpack.encode([103, 7, bytes(12), msgspec.Raw(encoded)]), True)):
        with pytest.raises(RemoteProtocolError, match=rf"count more than max_values \({count - 1}\)"):
            read_record(record, MAX_TENSORS, count - 1, from_engine=from_engine)
    check_count("it", encoded, count)
    with pytest.raises(CapacityError, match="max_values") as caught:
        check_count("it", encoded, count - 1)
    assert (caught.value.needed, caught.value.capacity) == (count, count - 1)


@pytest.mark.parametrize("container", [b"\x91", b"\xdc\x00\x01", b"\xdd\x00\x00\x00\x01", b"\x81\xc0", b"\xde\x00\x01\xc0"])
def test_nesting_has_an_end(container: bytes) -> None:
    assert check_payload(container * (MAX_DEPTH - 1) + b"\xc0", 1) == 0
    with pytest.raises(RemoteProtocolError, match="nested more than"):
        check_payload(container * MAX_DEPTH + b"\xc0", 1)


@for_each("head", ["dd7fffffff", "dfffffffff", "dcffff", "9f", "8f", "c6ffffffff", "dbffffffff", "c9ffffffff53"])
def test_a_length_beyond_the_bytes(head: str) -> None:
    with pytest.raises(RemoteProtocolError, match="cut off"):
        check_payload(bytes.fromhex(head), 1)


def test_a_reply_has_no_slots_of_its_reader() -> None:
    record = msgspec.msgpack.encode([103, 7, None, [tensor_extension(region=1)]])
    refused(record, "in region 1 of 0", from_engine=True)


@for_each(
    "record", [[103], [103, 7, None], [104], [104, 7], [104, 7, 1], [104, 7, [-1]], [104, 7, [], None], [103, "x", None, 1]]
)
def test_an_engines_record_that_is_not_what_it_says(record: list[object]) -> None:
    with pytest.raises(RemoteProtocolError):
        read_record(msgspec.msgpack.encode(record), MAX_TENSORS, from_engine=True)


def test_other_messages_are_not_read_here() -> None:
    for record in ([3, 7], [101, 1, 1, 1, 1], [], [None], "x", 5):
        assert read_record(msgspec.msgpack.encode(record), 1, from_engine=False) is None
        assert read_record(msgspec.msgpack.encode(record), 1, from_engine=True) is None
    assert read_record(b"", 1, from_engine=True) is None


@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_do_more_than_be_refused(record: bytes, from_engine: bool) -> None:
    for start in (b"", b"\x98\x02", b"\x94\x67", b"\x95\x68"):
        try:
            read_record(start + record, 8, from_engine=from_engine)
        except RemoteProtocolError:
            continue


GOLDEN = [
    submit_of({"x": tensor_extension(), "y": [1, "text", {"z": tensor_extension(dtype=0, spelling=b"<f4")}]}),
    submit_of([tensor_extension(region=1), tensor_extension(offset=64)], slot_extension(), (slot_extension(generation=5),)),
    msgspec.msgpack.encode([2, EPOCH, 7, "name", b"f" * 64, [], slot_extension(), None, 70, 10]),
    msgspec.msgpack.encode([104, 7, [1, 2**40, 3], b"\0" * 12, tensor_extension()]),
]


@given(st.sampled_from(GOLDEN), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), min_size=1, max_size=6))
def test_changed_records_hold_what_they_say_or_are_refused(golden: bytes, changes: list[tuple[int, int]]) -> None:
    record = bytearray(golden)
    for position, value in changes:
        record[position % len(record)] = value
    for from_engine in (False, True):
        try:
            message = read_record(bytes(record), 8, from_engine=from_engine)
        except RemoteProtocolError:
            continue
        content: Content | None = message.content if isinstance(message, Submit | Reply | Done) else None
        if content is None:
            continue
        for tensor in content.tensors:
            region = content.slots[tensor.region - 1].nbytes if tensor.region else len(content.inline)
            assert not tensor.nbytes or tensor.offset + tensor.nbytes <= region
            assert 0 in tensor.shape or math.prod(tensor.shape) <= tensor.nbytes


# -- what is not written ----------------------------------------------------------------------------------------------


def test_a_payload_larger_than_any_may_be() -> None:
    with pytest.raises(CapacityError, match="send bulk data"):
        pack(b"\0" * LARGEST_PAYLOAD_NBYTES)


def test_an_extension_of_the_callers_is_not_taken_for_a_tensor() -> None:
    assert read_submit(submit_record(pack(Ext(84, b"mine")))).content.tensor_count == 0
    with pytest.raises(TypeError, match="stand for tensors"):
        pack([Ext(83, tensor_extension().data)])


def test_a_payload_nested_deeper_than_the_peer_reads() -> None:
    payload: object = 1
    for _ in range(MAX_DEPTH):
        payload = [payload]
    with pytest.raises(TypeError, match="nested more than"):
        pack(payload)


def test_what_lay_in_the_ring_before_is_not_sent_between_tensors(ring: tuple[RecordWriter, RecordReader]) -> None:
    writer, reader = ring
    for _ in range(6):
        write_submit(writer, pack("s" * 60000), EPOCH, 1, "", b"", ())
        reader.read()
    write_submit(writer, pack([torch.ones(1, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)]), EPOCH, 1, "", b"", ())
    assert read_submit(reader.read() or b"").content.inline == b"\1" + b"\0" * 63 + b"\1"


def test_what_is_not_contiguous_is_gathered() -> None:
    matrix = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    content = read_submit(submit_record(pack([matrix.T, matrix.numpy().T, torch._neg_view(matrix)]))).content
    expected = matrix.T.contiguous().numpy().tobytes()
    assert content.inline[:24] == content.inline[64:88] == expected
    assert content.inline[128:152] == (-matrix).numpy().tobytes()


# -- at the bounds ------------------------------------------------------------------------------------------------------


@for_each("number", [0, 127, 128, 0x1FE, 0x1FEDC, 2**32 - 1, 2**32, 0x1122334455667788])
def test_a_number_of_any_size_is_read_as_it_was_written(number: int) -> None:
    made_by_msgspec = read_submit(submit_of(1, epoch=number, request_id=number))
    assert (made_by_msgspec.epoch, made_by_msgspec.request_id) == (number, number)
    memory = bytearray(ring_nbytes(1 << 12))
    writer, reader = RecordWriter(memory, ENDS[0].fileno()), RecordReader(memory, ENDS[1].fileno())
    packed = pack(PAYLOAD)
    assert write_submit(writer, packed, number, number, "", b"", ())
    submit = read_submit(reader.read() or b"")
    assert (submit.epoch, submit.request_id) == (number, number)
    assert write_reply(writer, packed, number, None)
    reply = read_record(reader.read() or b"", MAX_TENSORS, from_engine=True)
    assert isinstance(reply, Reply)
    assert reply.request_id == number
    write_done(writer, number, (number, number), packed)
    done = read_record(reader.read() or b"", MAX_TENSORS, from_engine=True)
    assert isinstance(done, Done)
    assert (done.request_id, done.released) == (number, (number, number))


@for_each("length", [0, 1, 31, 32, 33, 256])
def test_a_name_may_have_any_length(length: int) -> None:
    assert read_submit(submit_record(pack(PAYLOAD), name="x" * length)).for_engine.request_id == "x" * length


@for_each("length", [1, 31, 32, 64])
def test_a_fence_may_have_any_length(length: int) -> None:
    packed = pack(TENSOR, held_slot(TENSOR.data_ptr(), 64))
    record = submit_record(packed, (SlotRef(3, 8192, 64, 5),), fence=b"\xee" * length)
    assert read_submit(record).content.fence == b"\xee" * length


@for_each("count", [0, 1, 2, 3, 4])
def test_contents_do_not_lie_in_each_other(count: int) -> None:
    """Few slots are in the content itself, more are beside it."""

    def refs(number: int) -> tuple[SlotRef, ...]:
        return tuple(SlotRef(1, 4096 * place, 64, number) for place in range(1, count + 2))

    contents = []
    for number in range(1_000):
        *slots, copied = [slot_extension(*msgspec.structs.astuple(ref)) for ref in refs(number)]
        contents.append(content_of(None, copied, slots))
    for number, content in enumerate(contents):
        assert content.slots == refs(number)
