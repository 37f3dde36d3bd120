"""Payloads that came: what was packed is decoded, as views of where it lies, and a slot is left when nobody views it."""

from __future__ import annotations

import gc
import os
import socket
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from shmring.config import RingConfig
from shmring.core.compiled import (
    Content,
    Mapping,
    PayloadDecoder,
    Placement,
    RecordReader,
    RecordWriter,
    Regions,
    Submit,
    borrowed,
    decode_values,
    plan_copies,
    ring_nbytes,
)
from shmring.core.messages import SLOT_HEADER_NBYTES, SlotRef
from shmring.errors import RemoteProtocolError
from shmring.memory.tensors import make_decoder, make_packer
from tests.model.inside import decode_content, read_record, take_payload, write_submit
from tests.records import content_of, slot_extension, tensor_extension
from tests.tables import for_each

SLAB_NBYTES = 1 << 20
SLOT_OFFSET = 4096
CLIENT_ID, GENERATION = 3, 3 << 40 | 7
ENDS = socket.socketpair()


@pytest.fixture
def slab() -> Mapping:
    fd = os.memfd_create("slab")
    try:
        os.ftruncate(fd, SLAB_NBYTES)
        return Mapping(fd, SLAB_NBYTES)
    finally:
        os.close(fd)


@pytest.fixture
def regions() -> Iterator[Regions]:
    regions = Regions()
    yield regions
    regions.close()


def sent(payload: object, slab: Mapping, inline_nbytes: int = 0) -> Content:
    """Sends a payload through a ring, its tensors in the slab unless they may travel in the record."""
    memory = bytearray(ring_nbytes(1 << 18))
    packed = make_packer(64, 1 << 20).pack(payload, inline_nbytes, 1 << 16)
    slots: tuple[SlotRef, ...] = ()
    if packed.slot_nbytes:
        packed.copy_into(slab.address + SLOT_OFFSET + SLOT_HEADER_NBYTES)
        slots = (SlotRef(1, SLOT_OFFSET, packed.slot_nbytes, GENERATION),)
    assert write_submit(RecordWriter(memory, ENDS[0].fileno()), packed, 1, 1, "", b"", slots)
    message = read_record(RecordReader(memory, ENDS[1].fileno()).read() or b"", 64, from_engine=False)
    assert isinstance(message, Submit)
    content = message.content
    if content.payload_nbytes:
        start = SLOT_OFFSET + SLOT_HEADER_NBYTES + content.payload_offset
        take_payload(content, bytes(memoryview(slab)[start : start + content.payload_nbytes]), 64)
    return content


def decoded(content: Content, slab: Mapping, regions: Regions, payload_type: Any = Any) -> tuple[Any, list[bool]]:
    return decode_content(make_decoder(payload_type), content, CLIENT_ID, regions, slab)


TENSORS = [
    torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16), torch.tensor([True, False]),
    torch.ones(3, dtype=torch.uint64), torch.zeros(2, dtype=torch.complex64), torch.ones(4).to(torch.float8_e4m3fn),
    torch.zeros(0, 3), torch.tensor(7),
]  # fmt: skip


@for_each("inline_nbytes", [0, 8192])
@for_each("tensor", TENSORS, ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}")
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor, inline_nbytes: int, slab: Mapping, regions: Regions) -> None:
    payload, viewed = decoded(sent({"x": tensor}, slab, inline_nbytes), slab, regions)
    arrived = payload["x"]
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(arrived.view(torch.uint8) if tensor.nbytes and tensor.dim() else arrived,
                       tensor.view(torch.uint8) if tensor.nbytes and tensor.dim() else tensor)  # fmt: skip
    assert viewed == ([True] if tensor.nbytes and not inline_nbytes else [])


@for_each("inline_nbytes", [0, 8192])
@for_each(
    "array",
    [np.arange(6).reshape(2, 3), np.array(["ab", "c"]), np.zeros(3, "<M8[ns]"), np.ones((2, 2), ">f4"), np.zeros((0, 2))],
)
def test_an_array_arrives_as_it_was(array: NDArray[Any], inline_nbytes: int, slab: Mapping, regions: Regions) -> None:
    payload, _ = decoded(sent([array], slab, inline_nbytes), slab, regions)
    assert payload[0].dtype == array.dtype
    assert np.array_equal(payload[0], array)
    assert not payload[0].flags.writeable


def test_views_show_the_slot_and_the_last_of_them_gives_it_back(slab: Mapping, regions: Regions) -> None:
    content = sent({"x": torch.zeros(1000), "y": torch.zeros(10)}, slab)
    payload, viewed = decoded(content, slab, regions)
    assert viewed == [True]
    memoryview(slab).cast("f")[(SLOT_OFFSET + SLOT_HEADER_NBYTES) // 4] = 42.0
    assert payload["x"][0] == 42
    row = payload["x"][5:10]
    del payload
    gc.collect()
    assert regions.collect() == []
    del row
    assert regions.collect() == [(CLIENT_ID, GENERATION)]


def somewhere(content: Content, decoder: PayloadDecoder) -> tuple[Placement, torch.Tensor]:
    """Other memory for the tensors of a content: sevens."""
    placement = plan_copies(decoder, content, {})
    target = torch.full((placement.nbytes // 4,), 7.0)
    placement.target = borrowed(target.data_ptr(), placement.nbytes)
    return placement, target


def test_a_slot_that_nobody_looked_at_is_free_at_once(slab: Mapping, regions: Regions) -> None:
    content, decoder = sent([torch.zeros(1000)], slab), make_decoder()
    placement, _target = somewhere(content, decoder)
    payload, viewed = decode_content(decoder, content, CLIENT_ID, regions, slab, placement)
    assert payload[0].unique().tolist() == [7.0]
    assert viewed == [False]
    assert regions.collect() == []


def test_inline_bytes_are_a_copy_that_goes_with_its_views(slab: Mapping, regions: Regions) -> None:
    payload, viewed = decoded(sent([torch.ones(4), torch.ones(4)], slab, 8192), slab, regions)
    payload[0] += 1
    assert payload[1].sum() == 4
    assert viewed == []
    assert payload[0].data_ptr() % 64 == 0


def test_a_payload_in_a_slot_is_checked_when_it_is_taken_out(slab: Mapping, regions: Regions) -> None:
    content = sent({"t": "x" * 70000, "p": torch.ones(3)}, slab)
    assert decoded(content, slab, regions)[0]["p"].sum() == 3
    with pytest.raises(RemoteProtocolError, match="cut off"):
        take_payload(content, content.payload[:-1], 64)
    with pytest.raises(RemoteProtocolError, match="something follows"):
        take_payload(content, content.payload + b"\0", 64)


class Picture(msgspec.Struct):
    x: torch.Tensor
    y: np.ndarray  # type: ignore[type-arg]


def test_a_msgspec_type(slab: Mapping, regions: Regions) -> None:
    content = sent({"x": np.arange(3, dtype=np.int64), "y": torch.arange(3)}, slab)
    picture, _ = decoded(content, slab, regions, Picture)
    assert isinstance(picture.x, torch.Tensor)
    assert isinstance(picture.y, np.ndarray)
    with pytest.raises(msgspec.ValidationError):
        decoded(sent({"x": 1, "y": 2}, slab), slab, regions, Picture)


class Page(msgspec.Struct):
    """What runs code of its own while a payload is decoded."""

    number: int
    turn: ClassVar[Callable[[int], None]]

    def __post_init__(self) -> None:
        Page.turn(self.number)


class Album(msgspec.Struct):
    first: torch.Tensor
    page: Page
    last: torch.Tensor


def test_while_a_payload_is_decoded_its_decoder_may_decode_another_one(
    slab: Mapping, regions: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(Album)
    outer = sent({"first": torch.full((1000,), 7), "page": {"number": 1}, "last": torch.full((1000,), 8)}, slab)
    inner = sent({"first": torch.ones(3), "page": {"number": 0}, "last": torch.ones(2)}, slab, inline_nbytes=100)
    sums: list[int] = []

    def turn(number: int) -> None:
        if number:
            album, _ = decode_content(decoder, inner, CLIENT_ID, regions, slab)
            sums.append(int(album.first.sum() + album.last.sum()))

    monkeypatch.setattr(Page, "turn", staticmethod(turn), raising=False)
    album, viewed = decode_content(decoder, outer, CLIENT_ID, regions, slab)
    assert viewed == [True]
    assert (int(album.first.sum()), int(album.last.sum()), sums) == (7000, 8000, [5])


def test_what_python_can_not_hold_is_refused(slab: Mapping, regions: Regions) -> None:
    message = read_record(b"\x98\x02\x01\x01\xa0\xc4\x00\x90\xc0" + b"\xa1\xff", 64, from_engine=False)
    assert isinstance(message, Submit)
    with pytest.raises(RemoteProtocolError, match="not msgpack"):
        decoded(message.content, slab, regions)


def test_decoding_again_puts_tensors_somewhere_else(slab: Mapping, regions: Regions) -> None:
    content, decoder = sent([torch.ones(3), np.array(["ab"]), np.arange(2)], slab), make_decoder()
    placement, target = somewhere(content, decoder)
    payload, _ = decode_content(decoder, content, CLIENT_ID, regions, slab, placement)
    assert payload[0].tolist() == [7.0] * 3
    assert payload[0].data_ptr() == target.data_ptr()
    assert payload[1].tolist() == ["ab"]
    assert payload[1].flags.owndata, "a copy: its slot may go"
    assert payload[2].data_ptr() == target.data_ptr() + 128


# -- the collector of garbage ---------------------------------------------------------------------------------------------


@pytest.fixture
def collections() -> Iterator[list[int]]:
    """Of which generation each collection was that has begun."""
    begun: list[int] = []

    def note(phase: str, details: dict[str, int]) -> None:
        if phase == "start":
            begun.append(details["generation"])

    gc.callbacks.append(note)
    yield begun
    gc.callbacks.remove(note)
    gc.enable()


class _Listed(msgspec.Struct):
    values: list[list[int]]


@pytest.mark.parametrize("payload_type", [Any, _Listed])
def test_the_collector_is_paused_while_much_is_decoded(
    payload_type: Any, slab: Mapping, regions: Regions, collections: list[int]
) -> None:
    content, decoder = sent({"values": [[]] * 20_000}, slab), make_decoder(payload_type)
    collections.clear()
    _payload, _ = decode_content(decoder, content, CLIENT_ID, regions, slab)
    assert len(collections) <= 1, "one looks at what is new, when the collector goes on"
    assert gc.isenabled()
    gc.disable()
    decode_content(decoder, content, CLIENT_ID, regions, slab)
    assert not gc.isenabled(), "who has disabled it wants that"
    gc.enable()
    wrong = sent({"values": [[]] * 20_000 + [7]}, slab)
    if payload_type is _Listed:
        with pytest.raises(msgspec.ValidationError):
            decode_content(decoder, wrong, CLIENT_ID, regions, slab)
    assert gc.isenabled()


def test_arguments_are_decoded_without_the_collector(collections: list[int]) -> None:
    encoded = msgspec.msgpack.encode([[]] * 20_000)
    collections.clear()
    assert decode_values(encoded, 80_004) == [[]] * 20_000
    assert len(collections) <= 2, "one each of what is decoded, and of what it is compared with"
    with pytest.raises(RemoteProtocolError, match="max_values"):
        decode_values(encoded, 80_003)
    assert gc.isenabled()


# -- one tensor, named many times ----------------------------------------------------------------------------------------

MAX_TENSORS = RingConfig().max_tensors


def naming_one_tensor(count: int, dtype: str) -> tuple[Content, bytes]:
    """A content whose payload lies in its slot and names the tensor before it ``count`` times; and that payload."""
    payload = msgspec.msgpack.encode([tensor_extension(dtype=dtype)] * count)
    content = content_of(
        None, slot_extension(offset=SLOT_OFFSET, nbytes=12 + len(payload), generation=GENERATION), lies_at=(12, len(payload))
    )
    return content, payload


# Of torch, which has a number for it, and of numpy, which spells it.
@for_each("dtype", ["float32", "<f4"])
def test_a_tensor_that_is_named_too_often_is_refused_before_one_is_made(dtype: str) -> None:
    content, payload = naming_one_tensor(25 * MAX_TENSORS, dtype)
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match=rf"more tensors than max_tensors \({MAX_TENSORS}\)"):
            take_payload(content, payload, MAX_TENSORS)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert not content.payload, "nothing is left to decode"
    assert peak_nbytes < 64 << 10


@pytest.mark.parametrize("dtype", ["float32", "<f4"])
def test_a_tensor_that_is_named_as_often_as_may_be_is_viewed_and_never_copied(
    dtype: str, slab: Mapping, regions: Regions
) -> None:
    content, payload = naming_one_tensor(MAX_TENSORS, dtype)
    take_payload(content, payload, MAX_TENSORS)
    tracemalloc.start()
    try:
        tensors, viewed = decoded(content, slab, regions)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(tensors) == MAX_TENSORS
    assert viewed == [True]
    at = {tensor.data_ptr() if dtype == "float32" else tensor.ctypes.data for tensor in tensors}
    assert at == {slab.address + SLOT_OFFSET + SLOT_HEADER_NBYTES}
    assert peak_nbytes < 1024 * MAX_TENSORS  # some 150 bytes of Python's each; what torch has for each is not counted here
    del tensors
    gc.collect()
    assert regions.collect() == [(CLIENT_ID, GENERATION)]


# -- what is kept ---------------------------------------------------------------------------------------------------------


def test_a_key_is_kept_until_another_one_takes_its_place(slab: Mapping, regions: Regions) -> None:
    decoder = make_decoder(Any)

    def decode(*keys: str) -> list[str]:
        return [*decode_content(decoder, content_of(dict.fromkeys(keys)), CLIENT_ID, regions, slab)[0]]

    [key] = decode("a key")
    references = sys.getrefcount(key)
    assert decode("a key")[0] is key
    decode("a way")  # which begins, ends and is as long as that: it has the same place
    assert sys.getrefcount(key) == references - 1


def test_nothing_is_left_of_a_content_with_many_slots(
    slab: Mapping, regions: Regions, peak_nbytes: Callable[[Callable[[], Any]], int]
) -> None:
    content = content_of(None, slots=[slot_extension(offset=4096)] * 1_000)
    decoder = make_decoder(Any)

    def decode(times: int) -> None:
        for _ in range(times):
            decode_content(decoder, content, CLIENT_ID, regions, slab)

    decode(10)
    assert peak_nbytes(lambda: decode(2_000)) < 4 << 20, "the places of their regions take 8 KB"
