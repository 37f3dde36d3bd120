"""Payloads: what is sent arrives bit for bit, only what is viewed travels, and what can't travel is named by its path."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import threading
import weakref
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.msgpack import Ext
from numpy.typing import NDArray

from shmring.core import views
from shmring.core.messages import (
    TENSOR_ALIGNMENT,
    TENSOR_EXTENSION,
    TORCH_ITEM_NBYTES,
    Content,
    SlotRef,
    Submit,
    TensorRef,
    decode_frontend_message,
    encode_message,
)
from shmring.core.views import borrowed, copied
from shmring.errors import CapacityError, RemoteProtocolError
from shmring.memory.payload import Packed, Packer, PayloadDecoder, nbytes_for, torch_dtype_name

TORCH_NAMES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "bfloat16", "float32",
    "float64", "float8_e4m3fn", "float8_e5m2", "complex64",
]  # fmt: skip
NUMPY_NAMES = [
    "|b1", "|u1", "|i1", "<u2", ">u2", "<i4", ">i8", "<f2", ">f4", "<f8", "<c8", ">c16", "|S3", "<U4", ">U2",
    "<M8[ns]", ">M8[D]", "<m8[s]", "<M8[25us]",
]  # fmt: skip


def over_the_wire(packed: Packed, *, inline: bool) -> tuple[Content, NDArray[np.uint8]]:
    """Copies a payload into a slot (or the message) full of rubbish, and sends its message through the codec."""
    region = np.full(packed.copy_nbytes, 0xA5, np.uint8)
    if inline:
        content = packed.content_with(packed.inline())
    else:
        packed.copy_into(region, int(region.ctypes.data))
        content = packed.content_in((SlotRef(1, 4096, packed.copy_nbytes, 1),))
    message = decode_frontend_message(encode_message(Submit(1, 1, content)))
    assert isinstance(message, Submit)
    message.content.check(4096)
    return message.content, region


def region_of(memory: NDArray[np.uint8]) -> views.Region:
    """A region over an array that outlives its views."""
    return borrowed(memory.ctypes.data, memory.nbytes)


def round_trip(payload: object, payload_type: Any = Any, *, inline: bool = False) -> Any:
    content, region = over_the_wire(Packer(4096).pack(payload), inline=inline)
    memory = copied(region)
    return PayloadDecoder(payload_type).decode(content, lambda number: memory)


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
def test_any_payload_arrives_as_it_was_sent(payload: object, inline: bool) -> None:
    assert_same(payload, round_trip(payload, inline=inline))


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
@pytest.mark.parametrize("name", TORCH_NAMES)
def test_every_torch_dtype(name: str, shape: tuple[int, ...], inline: bool) -> None:
    assert_same(tensor := random_torch(name, shape, 1), round_trip(tensor, inline=inline))


@pytest.mark.parametrize("name", sorted(set(TORCH_ITEM_NBYTES) - set(TORCH_NAMES)))
def test_rarer_torch_dtypes_too(name: str) -> None:
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    assert_same(tensor := random_torch(name, (3, 2), 1), round_trip([tensor, tensor.T])[0])


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
@pytest.mark.parametrize("name", NUMPY_NAMES)
def test_every_numpy_dtype(name: str, shape: tuple[int, ...]) -> None:
    assert_same(array := random_numpy(name, shape, 1), round_trip(array))


@pytest.mark.parametrize(
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
def test_views_arrive_and_the_callers_tensor_stays_as_it_was(tensor: torch.Tensor) -> None:
    before = (bits(tensor), tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), tensor.requires_grad, tensor.is_conj())
    received = round_trip({"x": tensor})["x"]
    assert bits(received) == before[0]
    assert received.shape == tensor.shape
    assert not received.requires_grad
    assert before == (
        bits(tensor), tensor.stride(), tensor.storage_offset(), tensor.data_ptr(), tensor.requires_grad, tensor.is_conj()
    )  # fmt: skip


def test_numpy_scalars_arrive_as_numbers() -> None:
    assert round_trip([np.float32(1.5), np.int64(-3), np.bool_(True), np.uint8(200), np.str_("x")]) == [1.5, -3, True, 200, "x"]


def test_what_msgspec_encodes_travels() -> None:
    moment = datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC)
    assert round_trip({"t": (1, 2), "s": {3}, "d": moment, "e": Ext(5, b"x")}) == {
        "t": [1, 2], "s": [3], "d": moment, "e": Ext(5, b"x")
    }  # fmt: skip


def test_a_tensor_that_occurs_twice_arrives_twice() -> None:
    tensor = torch.arange(4)
    first, second = round_trip([tensor, tensor])
    assert_same(tensor, first)
    assert_same(tensor, second)


def test_received_arrays_are_read_only_unless_the_decoder_says_otherwise() -> None:
    content, region = over_the_wire(Packer(8).pack(np.arange(5)), inline=False)
    assert not PayloadDecoder().decode(content, lambda _: region_of(region)).flags.writeable
    assert PayloadDecoder(writable=True).decode(content, lambda _: region_of(region)).flags.writeable


# -- what travels -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [slice(0, 1), slice(777, 778)])
def test_only_the_viewed_region_travels(rows: slice) -> None:
    base = torch.zeros(100 << 10, 1024, dtype=torch.uint8)
    packed = Packer(8).pack({"view": base[rows], "array": base.numpy()[rows]})
    assert [part.nbytes for part in packed.parts] == [1024, 1024]
    assert packed.copy_nbytes == 2048
    assert len(packed.payload) < 100


def test_tensors_lie_on_cache_lines_of_their_own() -> None:
    packed = Packer(8).pack(
        [torch.zeros(3, dtype=torch.uint8), torch.zeros(0), torch.zeros(65, dtype=torch.uint8), torch.ones(1)]
    )
    assert [part.offset for part in packed.parts] == [0, 0, 64, 192]
    assert packed.copy_nbytes == 196
    assert packed.copied == 3, "an empty tensor is not copied"
    assert all(part.offset % TENSOR_ALIGNMENT == 0 for part in packed.parts)


def test_nbytes_for_is_what_a_payload_of_these_tensors_needs() -> None:
    shapes_and_dtypes = [((3,), torch.uint8), ((2, 5), torch.float64), ((), torch.bfloat16), ((7,), torch.complex64)]
    packed = Packer(8).pack([torch.zeros(shape, dtype=dtype) for shape, dtype in shapes_and_dtypes])
    assert nbytes_for(*shapes_and_dtypes) == packed.copy_nbytes
    assert nbytes_for() == 0


def test_nothing_is_written_beside_the_tensors() -> None:
    packed = Packer(8).pack([torch.ones(3, dtype=torch.uint8), torch.ones(2, 2, dtype=torch.float32).T])
    region = np.full(packed.copy_nbytes + 64, 0xA5, np.uint8)
    packed.copy_into(region[: packed.copy_nbytes], int(region.ctypes.data))
    assert set(region[3:64].tolist()) == {0xA5}
    assert set(region[packed.copy_nbytes :].tolist()) == {0xA5}


def test_tensors_in_a_slot_of_the_caller_are_described_in_place() -> None:
    slot = np.zeros(4096, np.uint8)
    inside = torch.from_numpy(slot[64:128]).view(torch.float32)

    def locate(address: int, nbytes: int) -> tuple[int, int] | None:
        offset = address - slot.ctypes.data
        return (1, offset) if offset >= 0 and offset + nbytes <= slot.nbytes else None

    packed = Packer(8).pack([inside, inside[1:], inside[::2], torch.ones(2)], locate)
    assert [(part.in_place, part.region, part.offset) for part in packed.parts] == [
        (True, 1, 64),
        (True, 1, 68),
        (False, 0, 0),  # strided: has to be gathered
        (False, 0, 64),
    ]
    assert (packed.in_place, packed.in_place_nbytes, packed.copied) == (2, 64 + 60, 2)
    slot_ref, own = SlotRef(1, 4096, 4096, 1), SlotRef(1, 8192, packed.copy_nbytes, 2)
    content = packed.content_in((slot_ref, own))
    assert [ref.region for ref in content.tensors] == [1, 1, 2, 2]


def test_a_conjugated_view_is_never_taken_as_it_lies() -> None:
    packed = Packer(8).pack(torch.tensor([1 + 2j]).conj(), lambda address, nbytes: (1, 0))
    assert not packed.parts[0].in_place


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
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize(
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
        Packer(8).pack(wrap(bad))
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
            Packer(8).pack(bad)


def test_a_payload_that_contains_itself_is_a_type_error() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="contains itself"):
        Packer(8).pack(loop)
    with pytest.raises(TypeError, match="nested too deeply"):
        Packer(8).pack(nested_list(100_000))


def test_a_field_that_is_left_out_is_not_the_culprit() -> None:
    class Partial(msgspec.Struct):
        first: int | msgspec.UnsetType = msgspec.UNSET
        mask: Any = None

    assert round_trip(Partial(mask=1)) == {"mask": 1}
    with pytest.raises(TypeError, match=r"^payload\.mask can't be sent"):
        Packer(8).pack(Partial(mask=Unknown()))


def test_a_failed_pack_keeps_nothing_of_the_payload_alive() -> None:
    packer = Packer(8)
    tensor = torch.ones(3)
    died = weakref.ref(tensor)
    with pytest.raises(TypeError):
        packer.pack([tensor, Unknown()])
    del tensor
    assert died() is None


def test_too_many_tensors_are_a_capacity_error() -> None:
    with pytest.raises(CapacityError) as caught:
        Packer(3).pack([torch.ones(1)] * 4)
    assert (caught.value.needed, caught.value.capacity) == (4, 3)
    assert Packer(3).pack([torch.ones(1)] * 3).copied == 3


def test_a_packer_forgets_a_failed_payload() -> None:
    packer = Packer(3)
    with pytest.raises(TypeError):
        packer.pack([torch.ones(1), torch.ones(1), Unknown()])
    assert len(packer.pack([torch.ones(1)]).parts) == 1


@pytest.mark.parametrize("inline", [False, True])
@pytest.mark.parametrize("name", ["", "x" * 256, "\U0001f600" * 256], ids=["no name", "ascii", "emoji"])
@pytest.mark.parametrize("tensors", [0, 1, 20])
def test_no_message_exceeds_a_record_whatever_travels_in_a_slot(tensors: int, name: str, inline: bool) -> None:
    limit = 16384
    bodies = messages = 0
    for text in range(8000, limit + 1, 3):
        packed = Packer(64).pack({"text": "x" * text, "tensors": [torch.zeros([1] * 20)] * tensors})
        packed.settle(limit, limit // 2 if inline else 0, 1 << 20)
        slots = (SlotRef(2**62, 2**62, packed.copy_nbytes, 2**64 - 1),)
        content = packed.content_in(slots) if packed.needs_slot else packed.content_with(packed.inline(), slots)
        assert len(encode_message(Submit(2**64 - 1, 2**62, content, name))) <= limit
        bodies += bool(packed.body)
        messages += not packed.body
    assert bodies
    assert messages


@pytest.mark.parametrize("tensors", [0, 3])
def test_a_payload_that_goes_to_a_slot_comes_back_with_its_tensors(tensors: int) -> None:
    payload = {"text": "x" * 5000, "tensors": [torch.full((7,), number) for number in range(tensors)]}
    packed = Packer(64).pack(payload)
    packed.settle(4096, 1024, 1 << 20)
    assert packed.needs_slot
    region = np.zeros(packed.copy_nbytes, np.uint8)
    packed.copy_into(region, region.ctypes.data)
    content = packed.content_in((SlotRef(1, 4096, packed.copy_nbytes, 1),))
    content.check_size(1024, 1 << 20)
    assert content.body is not None
    assert content.body.offset % 64 == 0
    data = region[content.body.offset :][: content.body.nbytes].tobytes()
    found = PayloadDecoder().decode(content.with_body(data, 64), lambda number: region_of(region))
    assert found["text"] == payload["text"]
    assert [tensor.tolist() for tensor in found["tensors"]] == [[number] * 7 for number in range(tensors)]


def test_a_payload_that_is_larger_than_agreed_upon_is_an_error_that_says_so() -> None:
    packed = Packer(64).pack("x" * 5000)
    with pytest.raises(CapacityError, match="max_payload_nbytes") as caught:
        packed.settle(65536, 1024, 5000)
    assert caught.value.needed > caught.value.capacity == 5000


def test_a_message_that_names_too_many_slots_is_an_error_that_says_so() -> None:
    packed = Packer(64).pack("x")
    with pytest.raises(CapacityError, match="names 100 slots") as caught:
        packed.settle(4096, 1024, 1 << 20, slots=100)
    assert caught.value.needed > caught.value.capacity == 4096


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


def test_decoding_into_a_struct() -> None:
    picture = Picture(
        pixels=torch.arange(6.0).reshape(2, 3),
        table=np.arange(4),
        regions=[Region((1, 2)), Region((3, 4), torch.ones(2, dtype=torch.bool))],
        extra={"a": torch.zeros(1)},
        weights=np.ones(2, np.float32),
    )
    received = round_trip(picture, Picture)
    assert isinstance(received, Picture)
    assert_same(picture.pixels, received.pixels)
    assert_same(picture.table, received.table)
    assert received.regions[0].mask is None
    assert_same(picture.regions[1].mask, received.regions[1].mask)
    assert_same(picture.extra, received.extra)
    assert_same(picture.weights, received.weights)


def test_a_struct_takes_arrays_for_tensors_and_tensors_for_arrays() -> None:
    received = round_trip({"pixels": np.arange(3, dtype=">i4"), "table": torch.arange(3), "regions": []}, Picture)
    assert isinstance(received.pixels, torch.Tensor)
    assert received.pixels.tolist() == [0, 1, 2]
    assert isinstance(received.table, np.ndarray)
    assert received.table.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
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
def test_a_payload_of_another_type_is_a_validation_error(payload: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        round_trip(payload, Picture)


# -- hostile payloads ---------------------------------------------------------------------------------------------------


def tensor_extension(index: int, length: int = 4) -> bytes:
    return msgspec.msgpack.encode(Ext(TENSOR_EXTENSION, index.to_bytes(length, "little")))


ONE_TENSOR = (TensorRef(1, 0, 8, "int64", (1,)),)
ONE_ARRAY = (TensorRef(1, 0, 8, "<i8", (1,)),)
HOSTILE = {
    "nothing": (b"", ONE_TENSOR),
    "rubbish": (b"\xc1\xff\x00", ONE_TENSOR),
    "a truncated map": (b"\x82\xa1a", ONE_TENSOR),
    "two objects": (b"\x01\x02", ONE_TENSOR),
    "a tensor that is not there": (tensor_extension(1), ONE_TENSOR),
    "a tensor number of three bytes": (tensor_extension(0, 3), ONE_TENSOR),
    "a tensor number of five bytes": (tensor_extension(0, 5), ONE_TENSOR),
    "a list of four thousand million": (b"\xdd\xff\xff\xff\xff", ONE_TENSOR),
    "a map as a key": (b"\x81\x80\x01", ONE_TENSOR),
    "an array as a key": (b"\x81" + tensor_extension(0) + b"\x01", ONE_ARRAY),
    "text that is no text": (b"\xa2\xff\xfe", ONE_TENSOR),
    "too deep": (b"\x91" * 100_000 + b"\xc0", ONE_TENSOR),
    "a dtype that is none": (tensor_extension(0), (TensorRef(1, 0, 8, "<M8[fortnights]", (1,)),)),
}


@pytest.mark.parametrize(("payload", "tensors"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_payload_is_refused_and_nothing_else(payload: bytes, tensors: tuple[TensorRef, ...]) -> None:
    decoder = PayloadDecoder()
    region = np.zeros(64, np.uint8)
    with pytest.raises(RemoteProtocolError):
        decoder.decode(Content(payload, tensors, b"", (SlotRef(1, 4096, 64, 1),)), lambda _: region_of(region))
    assert decoder.decode(Content(b"\x01"), lambda _: region_of(region)) == 1, "the decoder goes on"


@given(st.binary(max_size=200))
def test_no_bytes_make_decoding_raise_anything_else(payload: bytes) -> None:
    region = np.zeros(64, np.uint8)
    for payload_type in (Any, Picture, dict[str, torch.Tensor]):
        content = Content(payload, ONE_TENSOR, b"", (SlotRef(1, 4096, 64, 1),))
        with contextlib.suppress(RemoteProtocolError, msgspec.ValidationError):
            PayloadDecoder(payload_type).decode(content, lambda _: region_of(region))


def test_an_unknown_extension_arrives_as_one() -> None:
    assert PayloadDecoder().decode(Content(msgspec.msgpack.encode(Ext(9, b"abc"))), lambda _: copied(b"")) == Ext(9, b"abc")


def test_dtypes_are_named_as_the_wire_spells_them() -> None:
    assert torch_dtype_name(torch.bfloat16) == "bfloat16"
    with pytest.raises(TypeError, match="can't be sent"):
        torch_dtype_name(torch.quint8)
