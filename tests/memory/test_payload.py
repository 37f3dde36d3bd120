"""Payloads: what is sent arrives bit for bit, only what is viewed travels, and what can't travel is named by its path."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from shmring.core.compiled import (
    ClientBook,
    Content,
    HeldSlots,
    Mapping,
    Packed,
    PayloadDecoder,
    RecordReader,
    RecordWriter,
    Regions,
    Submit,
    ring_nbytes,
)
from shmring.core.geometry import ClientBookLimits
from shmring.core.messages import SLOT_HEADER_NBYTES, TENSOR_ALIGNMENT, TORCH_ITEM_NBYTES, LeaseGrant, SlotRef
from shmring.errors import CapacityError, RemoteProtocolError
from shmring.memory.tensors import make_decoder, make_packer, nbytes_for, torch_dtype_name
from tests.model.inside import decode_content, read_record, take_payload, write_submit
from tests.records import content_of, slot_extension, tensor_extension
from tests.tables import for_each

LARGEST_RECORD_NBYTES = 1 << 16
LARGEST_PAYLOAD_NBYTES = 1 << 24
MAX_TENSORS = 4096
SLOT_OFFSET = 4096
CONTENT_OFFSET = SLOT_OFFSET + SLOT_HEADER_NBYTES

TORCH_NAMES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip
NUMPY_NAMES = [
    "|b1", "|u1", "|i1", "<u2", ">u2", "<i4", ">i8", "<f2", ">f4", "<f8", "<c8", ">c16", "|S3", "<U4", ">U2",
    "<M8[ns]", ">M8[D]", "<m8[s]", "<M8[25us]",
]  # fmt: skip


class Ends:
    """A message ring for submissions, and the regions of what came."""

    def __init__(self) -> None:
        self._sockets = socket.socketpair()
        memory = bytearray(ring_nbytes(1 << 18))
        self._writer = RecordWriter(memory, self._sockets[0].fileno())
        self._reader = RecordReader(memory, self._sockets[1].fileno())
        self.regions = Regions()

    def record_of(
        self, packed: Packed, slots: tuple[SlotRef, ...], epoch: int = 1, request_id: int = 1, name: str = ""
    ) -> bytes:
        assert write_submit(self._writer, packed, epoch, request_id, name, b"", slots)
        record = self._reader.read()
        assert record is not None
        return record

    def close(self) -> None:
        self.regions.close()
        for end in self._sockets:
            end.close()


@pytest.fixture(scope="module")
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def pack(payload: object, max_tensors: int = 8, *, inline: bool = False, held: HeldSlots | None = None) -> Packed:
    """Packs a payload whose tensors are copied to a slot, or to the record."""
    inline_nbytes = LARGEST_RECORD_NBYTES if inline else 0
    return make_packer(max_tensors, LARGEST_PAYLOAD_NBYTES).pack(payload, inline_nbytes, LARGEST_RECORD_NBYTES, held)


def hold(held: HeldSlots, address: int, nbytes: int) -> HeldSlots:
    """Has a caller hold a slot, in a book of its own."""
    book = ClientBook(ClientBookLimits(1, 1 << 30, 4, 1 << 20, 1.0))
    book.granted(LeaseGrant(0, 1, 4096, 1 << 20), 0.0)
    slot = book.acquire(nbytes, held=True)
    assert slot is not None
    held.hold(slot, address, nbytes)
    return held


def slab_of(nbytes: int) -> Mapping:
    """Memory full of rubbish, in which a slot of so many bytes has room."""
    fd = os.memfd_create("slab")
    try:
        os.ftruncate(fd, CONTENT_OFFSET + nbytes)
        slab = Mapping(fd, CONTENT_OFFSET + nbytes)
    finally:
        os.close(fd)
    memoryview(slab).cast("B")[:] = b"\xa5" * (CONTENT_OFFSET + nbytes)
    return slab


def over_the_wire(ends: Ends, packed: Packed) -> tuple[Content, Mapping]:
    """Copies a payload into a slot full of rubbish, or into its record, and sends that."""
    slab = slab_of(packed.slot_nbytes)
    slots: tuple[SlotRef, ...] = ()
    if packed.slot_nbytes:
        packed.copy_into(slab.address + CONTENT_OFFSET)
        slots = (SlotRef(1, SLOT_OFFSET, packed.slot_nbytes, 1),)
    message = read_record(ends.record_of(packed, slots), MAX_TENSORS, from_engine=False)
    assert isinstance(message, Submit)
    content = message.content
    if content.payload_nbytes:
        start = CONTENT_OFFSET + content.payload_offset
        take_payload(content, bytes(memoryview(slab)[start : start + content.payload_nbytes]), MAX_TENSORS)
    return content, slab


def decoded(ends: Ends, content: Content, slab: Mapping, decoder: PayloadDecoder | None = None) -> Any:
    payload, _ = decode_content(decoder or make_decoder(), content, 1, ends.regions, slab)
    return payload


def round_trip(ends: Ends, payload: object, payload_type: Any = Any, *, inline: bool = False) -> Any:
    packed = pack(payload, MAX_TENSORS, inline=inline)
    if inline:
        assert not packed.slot_nbytes
    content, slab = over_the_wire(ends, packed)
    return decoded(ends, content, slab, make_decoder(payload_type))


def bits(value: torch.Tensor | NDArray[Any]) -> bytes:
    """The content of a tensor in C order, so that NaNs compare, and -0.0 is not 0.0."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).tobytes()
    plain = torch.empty(value.shape, dtype=value.dtype)
    plain.copy_(value.detach())
    return bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""


def assert_same(sent: Any, received: Any) -> None:
    if isinstance(sent, torch.Tensor | np.ndarray):
        kind = torch.Tensor if isinstance(sent, torch.Tensor) else np.ndarray
        assert isinstance(received, kind)
        assert received.dtype == sent.dtype
        if isinstance(sent, np.ndarray):
            assert received.dtype.str == sent.dtype.str, "the byte order is part of the dtype"
        assert tuple(received.shape) == tuple(sent.shape)
        assert bits(received) == bits(sent)
    elif isinstance(sent, dict):
        assert received.keys() == sent.keys()
        for key, value in sent.items():
            assert_same(value, received[key])
    elif isinstance(sent, list | tuple):
        assert len(received) == len(sent)
        for value, arrived in zip(sent, received, strict=True):
            assert_same(value, arrived)
    elif isinstance(sent, msgspec.Struct):
        assert_same(msgspec.structs.asdict(sent), received)
    else:
        assert type(received) is type(sent)
        assert received == sent


def random_torch(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    dtype = getattr(torch, name)
    count = int(np.prod(shape, dtype=int)) * dtype.itemsize
    if not count:
        return torch.empty(shape, dtype=dtype)
    data = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype is torch.bool:
        data &= 1
    return torch.from_numpy(data).view(dtype).reshape(shape)


def random_numpy(name: str, shape: tuple[int, ...], seed: int) -> NDArray[Any]:
    dtype = np.dtype(name)
    rng = np.random.default_rng(seed)
    if dtype.kind in "US":
        words = rng.choice(np.array(["", "a", "äß", "漢", "z" * 4] if dtype.kind == "U" else [b"", b"a", b"bcd"]), shape)
        return np.asarray(words).astype(dtype).reshape(shape)
    data = rng.integers(0, 256, int(np.prod(shape, dtype=int)) * dtype.itemsize, np.uint8)
    if dtype.kind == "b":
        data &= 1
    return data.view(dtype).reshape(shape)


shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
seeds = st.integers(0, 2**32 - 1)


@st.composite
def torch_tensors(draw: st.DrawFn) -> torch.Tensor:
    tensor = random_torch(draw(st.sampled_from(TORCH_NAMES)), draw(shapes), draw(seeds))
    for change in draw(st.lists(st.sampled_from(["transpose", "stride", "expand", "narrow", "conj", "grad"]), max_size=3)):
        if change == "transpose" and tensor.dim() >= 2:
            tensor = tensor.transpose(0, -1)
        elif change == "stride" and tensor.dim():
            tensor = tensor[..., ::2]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(3, *tensor.shape)
        elif change == "narrow" and tensor.dim() and tensor.shape[0]:
            tensor = tensor[1:]
        elif change == "conj" and tensor.is_complex():
            tensor = tensor.conj()
        elif change == "grad" and tensor.dtype.is_floating_point and tensor.is_leaf:
            tensor = tensor.detach().requires_grad_()
    return tensor


@st.composite
def numpy_arrays(draw: st.DrawFn) -> NDArray[Any]:
    array = random_numpy(draw(st.sampled_from(NUMPY_NAMES)), draw(shapes), draw(seeds))
    for change in draw(st.lists(st.sampled_from(["transpose", "reverse", "broadcast", "fortran"]), max_size=3)):
        if change == "transpose":
            array = array.T
        elif change == "reverse" and array.ndim:
            array = array[::-1]
        elif change == "broadcast":
            array = np.broadcast_to(array, (2, *array.shape))
        elif change == "fortran":
            array = np.asfortranarray(array)
    if draw(st.booleans()):
        array = array.view()
        array.flags.writeable = False
    return array


class Item(msgspec.Struct):
    mask: Any
    label: str = ""


plain_values = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary()
)
payloads = st.recursive(
    plain_values | torch_tensors() | numpy_arrays(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=5), inner, max_size=4)
        | st.builds(Item, mask=inner, label=st.text(max_size=3))
    ),
    max_leaves=8,
)
patient = settings(suppress_health_check=[HealthCheck.too_slow])


# -- round trips --------------------------------------------------------------------------------------------------------


@patient
@given(payload=payloads, inline=st.booleans())
def test_any_payload_arrives_as_it_was_sent(ends: Ends, payload: object, inline: bool) -> None:
    assert_same(payload, round_trip(ends, payload, inline=inline))


@for_each("inline", [False, True])
@for_each("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
@for_each("name", TORCH_NAMES)
def test_every_torch_dtype(ends: Ends, name: str, shape: tuple[int, ...], inline: bool) -> None:
    assert_same(tensor := random_torch(name, shape, 1), round_trip(ends, tensor, inline=inline))


@for_each("name", sorted(set(TORCH_ITEM_NBYTES) - set(TORCH_NAMES)))
def test_rarer_torch_dtypes_too(ends: Ends, name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    assert_same(tensor := random_torch(name, (3, 2), 1), round_trip(ends, [tensor, tensor.T])[0])


@for_each("inline", [False, True])
@for_each("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
@for_each("name", NUMPY_NAMES)
def test_every_numpy_dtype(ends: Ends, name: str, shape: tuple[int, ...], inline: bool) -> None:
    assert_same(array := random_numpy(name, shape, 1), round_trip(ends, array, inline=inline))


@for_each(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).reshape(4, 6)[::2, 1::3],
        torch.arange(3.0).expand(5, 3),
        torch.arange(10)[3:7],
        torch.tensor([1 + 2j, 3 - 4j]).conj(),
        torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        torch.tensor([1 + 2j]).conj().imag,  # negated by a flag, and contiguous
        torch.tensor([[1 + 2j, 3 - 4j]]).conj().mT,
        torch.ones(3, requires_grad=True),
        torch.ones(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.arange(4.0)),
        torch.arange(8.0).reshape(2, 4).to(torch.bfloat16).T,
        torch.arange(8.0).reshape(2, 4).to(torch.float8_e5m2)[:, ::3],
        torch.tensor(7),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}-{tensor.stride()}",
)
@for_each("inline", [False, True])
def test_views_arrive_and_the_callers_tensor_stays_as_it_was(ends: Ends, tensor: torch.Tensor, inline: bool) -> None:
    before = (bits(tensor), tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), tensor.requires_grad, tensor.is_conj())
    received = round_trip(ends, {"x": tensor}, inline=inline)["x"]
    assert bits(received) == before[0]
    assert received.shape == tensor.shape
    assert not received.requires_grad
    assert before == (
        bits(tensor), tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), tensor.requires_grad, tensor.is_conj()
    )  # fmt: skip


def test_numpy_scalars_arrive_as_numbers(ends: Ends) -> None:
    assert round_trip(ends, [np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(200), np.str_("x")]) == [
        1.5,
        -3,
        True,
        200,
        "x",
    ]


def test_what_msgspec_encodes_travels(ends: Ends) -> None:
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert round_trip(ends, {"t": (1, 2), "s": {3}, "d": moment, "e": Ext(5, b"x")}) == {
        "t": [1, 2], "s": [3], "d": moment, "e": Ext(5, b"x")
    }  # fmt: skip


def test_a_tensor_that_occurs_twice_arrives_twice(ends: Ends) -> None:
    tensor = torch.arange(4)
    first, second = round_trip(ends, [tensor, tensor])
    assert_same(tensor, first)
    assert_same(tensor, second)


@pytest.mark.parametrize("inline", [False, True])
def test_received_arrays_are_read_only_unless_the_decoder_says_otherwise(ends: Ends, inline: bool) -> None:
    content, slab = over_the_wire(ends, pack(np.arange(5), inline=inline))
    assert not decoded(ends, content, slab, make_decoder()).flags.writeable
    assert decoded(ends, content, slab, make_decoder(writable=True)).flags.writeable


# -- what travels -------------------------------------------------------------------------------------------------------


@for_each("rows", [slice(0, 1), slice(777, 778)])
def test_only_the_viewed_region_travels(rows: slice) -> None:
    base = torch.zeros(100 << 10, 1024, dtype=torch.uint8)
    packed = pack({"view": base[rows], "array": base.numpy()[rows]})
    assert [part.nbytes for part in packed.parts] == [1024, 1024]
    assert packed.slot_nbytes == 2048
    assert len(packed.payload) < 100


def test_tensors_lie_on_cache_lines_of_their_own() -> None:
    packed = pack([torch.zeros(3, dtype=torch.uint8), torch.zeros(0), torch.zeros(65, dtype=torch.uint8), torch.ones(1)])
    assert [part.offset for part in packed.parts] == [0, 0, 64, 192]
    assert packed.slot_nbytes == packed.region_nbytes == 196
    assert packed.copied == 3, "an empty tensor is not copied"
    assert all(part.offset % TENSOR_ALIGNMENT == 0 for part in packed.parts)


def test_nbytes_for_is_what_a_payload_of_these_tensors_needs() -> None:
    shapes_and_dtypes = [((3,), torch.uint8), ((2, 5), torch.float64), ((), torch.bfloat16), ((7,), torch.complex64)]
    packed = pack([torch.zeros(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes])
    assert nbytes_for(*shapes_and_dtypes) == packed.slot_nbytes
    assert nbytes_for() == 0


def test_nothing_is_written_beside_the_tensors() -> None:
    packed = pack([torch.ones(3, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.float32).T])
    region = np.full(packed.slot_nbytes + 64, 0xA5, np.uint8)
    packed.copy_into(int(region.ctypes.data))
    assert set(region[:3].tolist()) == {1}
    assert set(region[3:64].tolist()) == {0xA5}
    assert set(region[packed.slot_nbytes :].tolist()) == {0xA5}


def test_tensors_in_a_slot_of_the_caller_are_described_in_place(ends: Ends) -> None:
    slot = np.zeros(4096, np.uint8)
    inside = torch.from_numpy(slot[64:128]).view(torch.float32)
    held = hold(HeldSlots(), slot.ctypes.data, slot.nbytes)
    packed = pack([inside, inside[1:], inside[::2], torch.ones(2)], held=held)
    assert [(part.is_in_place, part.region, part.offset) for part in packed.parts] == [
        (True, 1, 64),
        (True, 1, 68),
        (False, 0, 0),  # strided: has to be gathered
        (False, 0, 64),
    ]
    assert (packed.in_place, packed.in_place_nbytes, packed.copied) == (2, 64 + 60, 2)
    assert len(packed.slots) == 1
    slot_ref, own = SlotRef(1, 4096, 4096, 1), SlotRef(1, 8192, packed.slot_nbytes, 2)
    message = read_record(ends.record_of(packed, (slot_ref, own)), MAX_TENSORS, from_engine=False)
    assert isinstance(message, Submit)
    assert [ref.region for ref in message.content.tensors] == [1, 1, 2, 2]


@for_each("view", [torch.conj, torch._neg_view, lambda tensor: tensor.conj().imag])
def test_a_view_that_is_changed_by_a_flag_is_never_taken_as_it_lies(view: Any) -> None:
    tensor = torch.tensor([1 + 2j])
    held = hold(HeldSlots(), tensor.data_ptr(), tensor.nbytes)
    assert pack(tensor, held=held).parts[0].is_in_place
    assert not pack(view(tensor), held=held).parts[0].is_in_place


# -- what can't travel --------------------------------------------------------------------------------------------------


class Unknown:
    pass


@dataclasses.dataclass
class Record:
    mask: Any


def a_function() -> None:
    pass


def nested_list(depth: int) -> list[Any]:
    outer: list[Any] = []
    for _ in range(depth):
        outer = [outer]
    return outer


BAD = {
    "object array": np.array([object()]),
    "object array of numbers": np.array([1, None]),
    "structured array": np.zeros(2, dtype=[("a", "i4")]),
    "void array": np.zeros(2, dtype="V4"),
    "timeless array": np.array(["NaT"], dtype="M8"),
    "masked array": np.ma.masked_array([1, 2], mask=[True, False]),
    "function": a_function,
    "lambda": lambda: None,
    "class": Unknown,
    "instance": Unknown(),
    "module": np,
    "complex": 1j,
    "long double": np.longdouble(1),
    "sparse": torch.eye(2).to_sparse(),
    "compressed sparse": torch.eye(2).to_sparse_csr(),
    "meta": torch.empty(2, device="meta"),
    "quantized": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
    "nested tensor": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "65 dimensions": torch.zeros([1] * 65),
    "an empty tensor larger than any memory": torch.empty(0, 2**61),
    "too large an int": 2**64,
    "lone surrogate": "\ud800",
    "generator": (item for item in ()),
    "thread lock": threading.Lock(),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@for_each("bad", BAD.values(), ids=BAD.keys())
@for_each(
    ("wrap", "path"),
    [
        (lambda bad: bad, "payload"),
        (lambda bad: {"a": 1, "mask": bad}, "payload.mask"),
        (lambda bad: {"items": [1, "x", torch.ones(2), Item(bad)]}, "payload.items[3].mask"),
        (lambda bad: [{"a b": (0, Record(bad))}], "payload[0]['a b'][1].mask"),
        (lambda bad: {7: bad}, "payload[7]"),
    ],
    ids=["itself", "in a dict", "in a Struct", "in a dataclass", "under a number"],
)
def test_what_cannot_travel_is_a_type_error_that_names_its_path(bad: object, wrap: Any, path: str) -> None:
    with pytest.raises(TypeError) as caught:
        pack(wrap(bad))
    assert str(caught.value).startswith(f"{path} can't be sent: ")


def test_the_reason_says_what_to_do() -> None:
    for bad, reason in [
        (BAD["masked array"], "send data and mask as two arrays"),
        (BAD["sparse"], "make it dense first"),
        (BAD["meta"], "no content"),
        (BAD["function"], "the function a_function is neither a tensor"),
        (BAD["instance"], "Unknown is neither a tensor"),
    ]:
        with pytest.raises(TypeError, match=reason):
            pack(bad)


def test_a_payload_that_contains_itself_is_a_type_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        pack(loop)
    with pytest.raises(TypeError, match="nested too deeply"):
        pack(nested_list(100_000))


def test_a_field_that_is_left_out_is_not_the_culprit(ends: Ends) -> None:
    class Partial(msgspec.Struct):
        first: int | msgspec.UnsetType = msgspec.UNSET
        mask: Any = None

    assert round_trip(ends, Partial(mask=1)) == {"mask": 1}
    with pytest.raises(TypeError, match=r"^payload\.mask can't be sent"):
        pack(Partial(mask=Unknown()))


def test_a_packer_forgets_a_failed_payload() -> None:
    packer = make_packer(3, LARGEST_PAYLOAD_NBYTES)
    tensor = torch.ones(3)
    died = weakref.ref(tensor)
    with pytest.raises(TypeError):
        packer.pack([tensor, torch.ones(1), Unknown()], 0, LARGEST_RECORD_NBYTES)
    del tensor
    assert died() is None
    assert len(packer.pack([torch.ones(1)], 0, LARGEST_RECORD_NBYTES).parts) == 1


def test_too_many_tensors_are_a_capacity_error() -> None:
    with pytest.raises(CapacityError) as caught:
        pack([torch.ones(1)] * 4, 3)
    assert (caught.value.needed, caught.value.capacity) == (4, 3)
    assert pack([torch.ones(1)] * 3, 3).copied == 3


@for_each("inline", [False, True])
@for_each("name", ["", "x" * 256, "\U0001f600" * 256], ids=["no name", "ascii", "emoji"])
@for_each("tensors", [0, 1, 20])
def test_no_message_exceeds_a_record_whatever_travels_in_a_slot(ends: Ends, tensors: int, name: str, inline: bool) -> None:
    limit = 16384
    in_slot = in_record = 0
    packer = make_packer(64, 1 << 20)
    for text in range(8000, limit + 1, 3):
        payload = {"text": "x" * text, "tensors": [torch.zeros([1] * 20)] * tensors}
        packed = packer.pack(payload, limit // 2 if inline else 0, limit)
        slots = (SlotRef(2**62, 2**62, packed.slot_nbytes, 2**64 - 1),) if packed.slot_nbytes else ()
        assert len(ends.record_of(packed, slots, 2**64 - 1, 2**62, name)) <= limit
        in_slot += packed.is_payload_in_slot
        in_record += not packed.is_payload_in_slot
    assert in_slot
    assert in_record


@pytest.mark.parametrize("tensors", [0, 3])
def test_a_payload_that_goes_to_a_slot_comes_back_with_its_tensors(ends: Ends, tensors: int) -> None:
    payload = {"text": "x" * 5000, "tensors": [torch.full((7,), number) for number in range(tensors)]}
    packed = make_packer(64, 1 << 20).pack(payload, 1024, 4096)
    assert packed.is_payload_in_slot
    content, slab = over_the_wire(ends, packed)
    assert content.payload_nbytes == len(packed.payload)
    assert content.payload_offset % TENSOR_ALIGNMENT == 0
    found = decoded(ends, content, slab)
    assert found["text"] == payload["text"]
    assert [tensor.tolist() for tensor in found["tensors"]] == [[number] * 7 for number in range(tensors)]


def test_a_payload_that_is_larger_than_agreed_upon_is_an_error_that_says_so() -> None:
    with pytest.raises(CapacityError, match="max_payload_nbytes") as caught:
        make_packer(64, 5000).pack("x" * 5000, 1024, 65536)
    assert caught.value.needed > caught.value.capacity == 5000
    make_packer(64, 5003).pack("x" * 5000, 1024, 65536)


@dataclasses.dataclass
class Foreign:
    values: list[int]


@for_each(
    ("fits", "more"),
    [
        ([0] * 1020, [0] * 1021),
        ([[]] * 255, [[]] * 256),
        ("\xe4" * 4083, "\xe4" * 4084),
        (Foreign([0] * 1008), Foreign([0] * 1013)),
        (dict.fromkeys(range(160), "x"), dict.fromkeys(range(256), "x")),
    ],
)
def test_a_payload_that_counts_more_than_agreed_upon_is_an_error_that_says_so(fits: object, more: object) -> None:
    packer = make_packer(64, LARGEST_PAYLOAD_NBYTES, 1024)
    packer.pack(fits, 1024, LARGEST_RECORD_NBYTES)
    with pytest.raises(CapacityError, match="max_values is 1024") as caught:
        packer.pack(more, 1024, LARGEST_RECORD_NBYTES)
    assert caught.value.needed > caught.value.capacity == 1024


def test_a_message_that_names_too_many_slots_is_an_error_that_says_so() -> None:
    memory = np.zeros((100, 64), np.uint8)
    held = HeldSlots()
    for slot in memory:
        hold(held, slot.ctypes.data, slot.nbytes)
    packer = make_packer(128, 1 << 20)
    with pytest.raises(CapacityError, match="in 100 slots do not fit one message") as caught:
        packer.pack(list(torch.from_numpy(memory)), 1024, 4096, held)
    assert caught.value.needed > caught.value.capacity == 4096
    assert packer.pack(list(torch.from_numpy(memory)), 1024, 8192, held).in_place == 100


def test_any_number_of_tensors_in_one_slot_of_the_caller_fits_one_message() -> None:
    """It names one slot, and a payload that is too long lies in another one."""
    slot = torch.zeros(1000, dtype=torch.uint8)
    held = hold(HeldSlots(), slot.data_ptr(), slot.nbytes)
    packed = make_packer(1000, 1 << 20).pack(list(slot), 1024, 4096, held)
    assert (packed.in_place, len(packed.slots)) == (1000, 1)
    assert packed.is_payload_in_slot


# -- typed decoding -----------------------------------------------------------------------------------------------------


class Region(msgspec.Struct):
    box: tuple[int, int]
    mask: torch.Tensor | None = None


class Picture(msgspec.Struct, forbid_unknown_fields=True):
    pixels: torch.Tensor
    table: np.ndarray
    regions: list[Region]
    extra: dict[str, torch.Tensor] = {}
    weights: NDArray[np.float32] | None = None


def test_decoding_into_a_struct(ends: Ends) -> None:
    picture = Picture(
        pixels=torch.arange(6.0).reshape(2, 3),
        table=np.arange(4),
        regions=[Region((1, 2)), Region((3, 4), torch.ones(2, dtype=torch.bool))],
        extra={"a": torch.zeros(1)},
        weights=np.ones(2, np.float32),
    )
    received = round_trip(ends, picture, Picture)
    assert isinstance(received, Picture)
    assert_same(picture.pixels, received.pixels)
    assert_same(picture.table, received.table)
    assert received.regions[0].mask is None
    assert_same(picture.regions[1].mask, received.regions[1].mask)
    assert_same(picture.extra, received.extra)
    assert_same(picture.weights, received.weights)


def test_a_struct_takes_arrays_for_tensors_and_tensors_for_arrays(ends: Ends) -> None:
    received = round_trip(ends, {"pixels": np.arange(3, dtype=">i4"), "table": torch.arange(3), "regions": []}, Picture)
    assert isinstance(received.pixels, torch.Tensor)
    assert received.pixels.tolist() == [0, 1, 2]
    assert isinstance(received.table, np.ndarray)
    assert received.table.tolist() == [0, 1, 2]


@for_each(
    "payload",
    [
        {"pixels": 3, "table": np.ones(1), "regions": []},
        {"pixels": [1.0], "table": np.ones(1), "regions": []},
        {"pixels": np.array(["a"]), "table": np.ones(1), "regions": []},
        {"pixels": torch.ones(1), "table": torch.ones(1, dtype=torch.bfloat16), "regions": []},
        {"pixels": torch.ones(1), "table": np.ones(1), "regions": [{"box": torch.ones(2)}]},
        {"pixels": torch.ones(1), "table": np.ones(1), "regions": [], "unknown": 1},
        {"table": np.ones(1), "regions": []},
        torch.ones(1),
        None,
    ],
    ids=str,
)
def test_a_payload_of_another_type_is_a_validation_error(ends: Ends, payload: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        round_trip(ends, payload, Picture)


# -- hostile payloads ---------------------------------------------------------------------------------------------------


SLOTS = (slot_extension(nbytes=64),)
TENSOR = msgspec.msgpack.encode(tensor_extension(1, 0, 8, "int64", (1,)))
ARRAY = msgspec.msgpack.encode(tensor_extension(1, 0, 8, "<i8", (1,)))
HOSTILE = {
    "nothing": b"",
    "rubbish": b"\xc1\xff\x00",
    "a truncated map": b"\x82\xa1a",
    "two objects": b"\x01\x02",
    "a tensor in a slot that is not there": msgspec.msgpack.encode(tensor_extension(3, 0, 8, "int64", (1,))),
    "a tensor cut short": msgspec.msgpack.encode(Ext(83, TENSOR[-28:-1])),
    "a tensor and a byte": msgspec.msgpack.encode(Ext(83, TENSOR[-28:] + b"\0")),
    "a tensor of no bytes": msgspec.msgpack.encode(Ext(83, b"")),
    "a list of four thousand million": b"\xdd\xff\xff\xff\xff",
    "a map as a key": b"\x81\x80\x01",
    "an array as a key": b"\x81" + ARRAY + b"\x01",
    "text that is no text": b"\xa2\xff\xfe",
    "too deep": b"\x91" * 100_000 + b"\xc0",
    "a dtype that is none": msgspec.msgpack.encode(tensor_extension(1, 0, 8, "<M8[fortnights]", (1,))),
    "a tensor in a list that is cut off": b"\x92" + TENSOR,
}


@pytest.fixture
def slab() -> Mapping:
    return slab_of(64)


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_payload_is_refused_and_nothing_else(ends: Ends, slab: Mapping, payload: bytes) -> None:
    decoder = make_decoder()
    with pytest.raises(RemoteProtocolError):
        decoded(ends, content_of(msgspec.Raw(payload), None, SLOTS), slab, decoder)
    assert decoded(ends, content_of(1), slab, decoder) == 1, "the decoder goes on"
    assert decoded(ends, content_of(msgspec.Raw(TENSOR), None, SLOTS), slab, decoder).shape == (1,)


@pytest.mark.parametrize("payload", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_payload_in_a_slot_is_refused_and_nothing_else(ends: Ends, slab: Mapping, payload: bytes) -> None:
    decoder = make_decoder()
    with pytest.raises(RemoteProtocolError):
        decoded(ends, taken_from_slot(payload), slab, decoder)
    assert decoded(ends, taken_from_slot(TENSOR), slab, decoder).shape == (1,), "the decoder goes on"


def taken_from_slot(payload: bytes) -> Content:
    """A content whose payload lay in a slot, where anybody may have written it."""
    content = content_of(None, SLOTS[0], SLOTS, lies_at=(0, 64))
    take_payload(content, payload, MAX_TENSORS)
    return content


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_make_decoding_raise_anything_else(ends: Ends, payload: bytes, in_slot: bool) -> None:
    slab = slab_of(64)
    for payload_type in (Any, Picture, dict[str, torch.Tensor]):
        with contextlib.suppress(RemoteProtocolError, msgspec.ValidationError):
            content = taken_from_slot(payload) if in_slot else content_of(msgspec.Raw(payload), None, SLOTS)
            decoded(ends, content, slab, make_decoder(payload_type))


def test_an_unknown_extension_arrives_as_one(ends: Ends, slab: Mapping) -> None:
    assert decoded(ends, content_of(Ext(9, b"abc")), slab) == Ext(9, b"abc")


def test_dtypes_are_named_as_the_wire_spells_them() -> None:
    assert torch_dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(TypeError, match="can't be sent"):
        torch_dtype_name(torch.quint8)


# -- at the bounds ------------------------------------------------------------------------------------------------------


@for_each("bits", range(64))
def test_a_number_is_encoded_as_msgspec_does(bits: int) -> None:
    for number in (2**bits - 1, 2**bits, -(2**bits) + 1, -(2**bits), -(2**bits) - 1):
        if number >= -(2**63):
            assert pack(number).payload == msgspec.msgpack.encode(number)


@for_each("count", [0, 15, 16, 31, 32, 255, 256, 2**16 - 1, 2**16])
def test_what_has_a_length_is_encoded_as_msgspec_does(count: int) -> None:
    for value in ("x" * count, b"x" * count, [None] * count, {str(number): None for number in range(count)}):
        assert pack(value).payload == msgspec.msgpack.encode(value)


def test_a_slot_that_was_left_is_found_no_more_however_many_are_held() -> None:
    memory = np.zeros((12, 4096), np.uint8)
    tensors = list(torch.from_numpy(memory))
    held = HeldSlots()
    for slot in memory:
        hold(held, slot.ctypes.data, slot.nbytes)
    assert pack(tensors, 12, held=held).in_place == 12
    for slot in memory[:2]:
        held.leave(slot.ctypes.data)
    assert len(held) == len(list(held)) == 10
    assert pack(tensors, 12, held=held).in_place == 10


@dataclasses.dataclass
class Computed:
    """What its field is runs code of the caller's, while it is packed."""

    value: Any = dataclasses.field(init=False)


def computed(compute: Callable[[], Any]) -> Any:
    kind = dataclasses.make_dataclass("Kind", ["value"], bases=(Computed,), init=False)
    kind.value = property(lambda self: compute())
    return kind()


def test_while_a_payload_is_packed_another_one_may_be() -> None:
    packer = make_packer(8, LARGEST_PAYLOAD_NBYTES)
    inner: list[Packed] = []

    def pack_another() -> torch.Tensor:
        inner.append(packer.pack([torch.zeros(3)] * 2, 0, LARGEST_RECORD_NBYTES, None))
        return torch.ones(5)

    packed = packer.pack([torch.zeros(7), computed(pack_another), torch.zeros(9)], 0, LARGEST_RECORD_NBYTES, None)
    assert [part.nbytes for part in packed.parts] == [28, 20, 36]
    assert [part.nbytes for part in inner[0].parts] == [12, 12]


def test_what_changes_while_it_is_packed_is_refused() -> None:
    payload: dict[str, Any] = {"a": computed(lambda: payload.pop("b", None)), "b": 1}
    with pytest.raises(TypeError, match="a dict changed while it was encoded"):
        pack(payload)
