"""A frame has everything in it, each tensor once, and damage is noticed. Without vLLM-Omni."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shmring.integrations.omni.frames import pack, unpack
from shmring.integrations.omni.views import Views
from tests.tables import for_each


def refuse(value: Any) -> Any:
    raise TypeError(f"{type(value).__name__} can't be passed on")


def written(data: Any) -> torch.Tensor:
    frame = pack(data, refuse)
    memory = torch.full((frame.nbytes,), 0xAA, dtype=torch.uint8)
    frame.write_to(memory)
    return memory


def test_a_frame_that_waits_for_a_gpu_is_known() -> None:
    for data, waits in (
        ({"x": torch.ones(3), "y": np.ones(3)}, False),
        ({"x": torch.ones(3, device="meta")}, True),
        ({}, False),
    ):
        assert pack(data, refuse).is_on_gpu is waits


def passed_on(data: Any) -> Any:
    return unpack(written(data), lambda decoded: decoded)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint8, torch.complex64]


@for_each("dtype", DTYPES)
@for_each("shape", [(), (0, 3), (1,), (3, 5), (2, 3, 4)])
def test_tensors_of_all_kinds_come_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape)) * dtype.itemsize, dtype=torch.uint8).remainder(2).view(-1)
    tensor = tensor.view(dtype).reshape(shape) if tensor.numel() else torch.empty(shape, dtype=dtype)
    assert_same(passed_on({"x": tensor})["x"], tensor)


@for_each(
    "array",
    [
        np.arange(6).reshape(2, 3),
        np.array(7.5),
        np.array(["ab", "c"]),
        np.empty((0, 2), np.float16),
        np.array(["2026-01-01"], "M8[D]"),
        np.arange(12)[::-2],
    ],
)
def test_arrays_come_as_they_were_and_are_read_only(array: np.ndarray[Any, Any]) -> None:
    came = passed_on([array])[0]
    assert_same(came, array)
    assert not came.flags.writeable


def test_what_is_around_tensors_comes_at_any_depth() -> None:
    data = {
        "codes": {"audio": torch.ones(4, 8, dtype=torch.bfloat16), "ids": list(range(50_000))},
        "meta": {
            "finished": torch.tensor(True),
            "text": "ä" * 10_000,
            "nothing": None,
            "bytes": b"\0",
            7: [1.5, [torch.zeros(3)]],
        },
        "layers": [torch.full((5, 5), float(number)) for number in range(300)],
    }
    assert_same(passed_on(data), data)


def test_long_tensors_come_whole_and_leave_their_neighbours_alone() -> None:
    """They are copied another way than short ones."""
    data = {"x": torch.arange(70_001), "y": torch.ones(3), "z": np.arange(300_001, dtype=np.uint8), "w": torch.full((7,), 5.0)}
    assert_same(passed_on(data), data)


def test_what_is_not_contiguous_is_copied_once_and_as_it_looks() -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    data = {"turned": base.t(), "part": base[:, 1:3], "wide": base[0].expand(3, 6), "conj": torch.tensor([1 + 2j]).conj()}
    came = passed_on(data)
    for name, tensor in data.items():
        assert torch.equal(came[name], tensor)


def test_tensors_that_take_part_in_training_are_passed_on_without_that() -> None:
    assert not passed_on([torch.nn.Parameter(torch.ones(3))])[0].requires_grad


@for_each("data", [b"", b"123", bytearray(b"45"), memoryview(b"6" * 100_000)])
def test_bytes_alone_come_as_bytes(data: Any) -> None:
    assert_same(passed_on(data), bytes(data))


def test_structs_come_as_dicts() -> None:
    class Payload(msgspec.Struct):
        x: Any
        y: int | None = None

    assert_same(passed_on(Payload(torch.ones(2), 3)), {"x": torch.ones(2), "y": 3})


def test_tensors_are_views_that_begin_at_multiples_of_64_bytes() -> None:
    memory = written([torch.ones(3, dtype=torch.uint8), torch.ones(100)])
    came = unpack(memory, lambda decoded: decoded)
    begin, end = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    assert all(begin <= tensor.data_ptr() < end and (tensor.data_ptr() - begin) % 64 == 0 for tensor in came)


@for_each("value", [torch.ones(3).to_sparse(), object(), np.array([object()])])
def test_what_cant_be_sent_is_an_error(value: Any) -> None:
    with pytest.raises(TypeError, match="can't be passed"):
        pack({"x": [value]}, refuse)


def test_damage_is_noticed() -> None:
    memory = written({"x": torch.ones(1000)})
    for size in (0, 7, 8, 64, memory.nbytes - 64):
        with pytest.raises(ValueError):
            unpack(memory[:size].clone(), lambda decoded: decoded)
    for place in range(8):
        damaged = memory.clone()
        damaged[place] ^= 0x80
        with pytest.raises(ValueError):
            unpack(damaged, lambda decoded: decoded)


def test_lies_about_tensors_are_noticed() -> None:
    lies = [
        ("float32", (1100,), 0),
        ("float32", (10,), 1 << 40),
        ("float32", (-1,), 0),
        ("Tensor", (1,), 0),
        ("float32", (10,), -8),
    ]
    for lie in lies:
        head = msgspec.msgpack.encode([msgspec.msgpack.Ext(1, msgspec.msgpack.encode(lie))])
        frame = pack({"x": torch.ones(1000)}, refuse)
        lying = type(frame)(frame.nbytes, head, [])
        memory = torch.zeros(frame.nbytes, dtype=torch.uint8)
        lying.write_to(memory)
        with pytest.raises((ValueError, TypeError)):
            unpack(memory, lambda decoded: decoded)


# -- what is viewed, and what is copied ----------------------------------------------------------------------------------------


def test_large_frames_are_viewed_up_to_a_limit_and_the_rest_is_copied() -> None:
    views, store = Views(), torch.ones(4, 100_000, dtype=torch.uint8)
    first, second = views.hand_out(store[0], 200_000), views.hand_out(store[1], 200_000)
    assert (first.data_ptr(), second.data_ptr()) == (store[0].data_ptr(), store[1].data_ptr())
    third = views.hand_out(store[2], 200_000)
    assert third.data_ptr() != store[2].data_ptr()
    assert (views.nbytes, views.copied) == (200_000, 1)
    piece = first[10:20].view(torch.int16)
    del first
    gc.collect()
    assert views.nbytes == 200_000, "a piece of it lives"
    del piece
    assert views.nbytes == 100_000
    assert views.hand_out(store[3], 200_000).data_ptr() == store[3].data_ptr()


def test_small_frames_are_no_views() -> None:
    """They were copied when they came."""
    views, copy = Views(), torch.ones(1000, dtype=torch.uint8)
    assert views.hand_out(copy, 0) is copy
    assert (views.nbytes, views.copied) == (0, 0)


def test_tensors_of_a_frame_keep_its_memory() -> None:
    views = Views()
    came = unpack(views.hand_out(written({"x": torch.ones(50_000), "y": [np.ones(9)]}), 1 << 30), lambda decoded: decoded)
    x, y = came["x"], came["y"][0]
    del came
    assert (float(x.sum()), y.sum()) == (50_000.0, 9.0)
    del x
    assert views.nbytes > 0
    del y
    assert views.nbytes == 0
