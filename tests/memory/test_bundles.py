"""Bundles: payloads of every kind come out as they went in, pickled or not, and nothing contiguous is copied."""

from __future__ import annotations

import pickle
import warnings
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import shmring
from shmring.core.compiled import MAX_VALUES
from shmring.core.messages import TENSOR_EXTENSION
from shmring.memory.bundles import Bundle, bundle
from shmring.memory.views import TORCH_DTYPES
from tests.tables import for_each


def bundled(payload: object, max_tensors: int = 256, max_values: int = MAX_VALUES) -> Bundle:
    return bundle(payload, max_tensors=max_tensors, max_payload_nbytes=1 << 20, max_values=max_values)


def carried(made: Bundle) -> Bundle:
    """As Ray does it: the memory apart, and read-only."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(made, protocol=5, buffer_callback=buffers.append)
    again: Bundle = pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])  # noqa: S301 - our own
    return again


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@for_each("name", sorted(TORCH_DTYPES))
@for_each("shape", [(), (3,), (2, 0), (2, 3, 4)])
def test_every_dtype_of_torch(name: str, shape: tuple[int, ...]) -> None:
    dtype = TORCH_DTYPES[name]
    tensor = torch.arange(1, 1 + 16 * int(np.prod(shape, dtype=int)), dtype=torch.uint8)
    tensor = (
        (tensor % 2 if name == "bool" else tensor)[: int(np.prod(shape, dtype=int)) * dtype.itemsize].view(dtype).view(shape)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*not writable")
        for made in (bundled([1, tensor]), carried(bundled([1, tensor]))):
            _, again = made.open()
            assert (again.dtype, again.shape, bits(again)) == (dtype, shape, bits(tensor))


@for_each("dtype", ["<f4", ">i2", "<c16", "?", "<U5", "<M8[s]", "u1", "<f2"])
@for_each("shape", [(), (2, 3)])
def test_every_dtype_of_numpy(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.zeros(shape, dtype)
    array[...] = np.array(7).astype(dtype)
    for made in (bundled({"a": array}), carried(bundled({"a": array}))):
        again = made.open()["a"]
        assert again.dtype == array.dtype
        assert np.array_equal(again, array)
        assert not again.flags.writeable


def test_only_what_is_not_contiguous_is_copied() -> None:
    tensor, array = torch.arange(12.0).view(3, 4), np.arange(12).reshape(3, 4)
    made = bundled([tensor, array, tensor.T, array.T, tensor.to(torch.complex64).conj(), torch.ones(2, requires_grad=True)])
    views: list[Any] = made.open()
    assert views[0].data_ptr() == tensor.data_ptr()
    assert views[1].ctypes.data == array.ctypes.data
    assert torch.equal(views[2], tensor.T)
    assert np.array_equal(views[3], array.T)
    assert torch.equal(views[4], tensor.to(torch.complex64).conj())
    assert torch.equal(views[5], torch.ones(2))
    assert made.nbytes == 2 * tensor.nbytes + 2 * array.nbytes + 96 + 8


def test_the_memory_lives_as_long_as_its_views() -> None:
    views = carried(bundled([torch.arange(1000.0), np.arange(1000)])).open()
    del views[1]
    assert torch.equal(views[0], torch.arange(1000.0))


def test_what_can_not_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"payload\.a\[1\]"):
        bundled({"a": [1, object()]})
    with pytest.raises(shmring.CapacityError, match="max_tensors"):
        bundled([torch.ones(1)] * 3, max_tensors=2)
    with pytest.raises(shmring.CapacityError, match="max_values"):
        bundled([[]] * 30_000, max_values=65_536)
    with pytest.raises(shmring.CapacityError, match="max_payload_nbytes"):
        bundled("x" * (2 << 20))


class Named(msgspec.Struct):
    tensor: torch.Tensor
    array: np.ndarray[Any, Any]


def test_types_are_decoded_into() -> None:
    made = carried(bundled(Named(torch.ones(2), np.ones(3))))
    again = made.open(Named)
    assert torch.equal(again.tensor, torch.ones(2))
    assert np.array_equal(again.array, np.ones(3))
    with pytest.raises(msgspec.ValidationError):
        made.open(int)
    moved = made.open(move=lambda tensor: tensor + 1)
    assert torch.equal(moved["tensor"], torch.full((2,), 2.0))
    assert torch.equal(moved["array"], torch.full((3,), 2.0, dtype=torch.float64))


def extension(**changed: int) -> bytes:
    """A payload: one uint8 tensor of 4 items, with some of its numbers changed."""
    numbers = {"region": 0, "offset": 0, "nbytes": 4, "extent": 4} | changed
    code = next(name for name in [bundled(torch.zeros(4, dtype=torch.uint8)).payload])
    data = bytearray(msgspec.msgpack.decode(code, ext_hook=lambda code, data: bytes(data)))
    data[0:2] = numbers["region"].to_bytes(2, "little")
    data[4:12] = numbers["offset"].to_bytes(8, "little")
    data[12:20] = numbers["nbytes"].to_bytes(8, "little")
    data[20:28] = numbers["extent"].to_bytes(8, "little")
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(TENSOR_EXTENSION, bytes(data)))


@pytest.mark.parametrize(
    "changed",
    [{"offset": 1}, {"offset": (1 << 64) - 1}, {"nbytes": 5}, {"extent": 5}, {"nbytes": 8, "extent": 8}, {"extent": 1 << 63}],
)
def test_wrong_tensors_are_refused(changed: dict[str, int]) -> None:
    assert torch.equal(Bundle(extension(), (0,), b"\1\2\3\4").open(), torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    with pytest.raises(shmring.RemoteProtocolError):
        Bundle(extension(**changed), (0,), b"\1\2\3\4").open()


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"\x91", b"\xd4\x7f\x00", msgspec.msgpack.encode(msgspec.msgpack.Ext(TENSOR_EXTENSION, b"short"))],
)
def test_wrong_payloads_are_refused(payload: bytes) -> None:
    if payload == b"\xd4\x7f\x00":
        assert Bundle(payload, ()).open() == msgspec.msgpack.Ext(0x7F, b"\x00")
        return
    with pytest.raises(shmring.RemoteProtocolError):
        Bundle(payload, (0,), b"1234").open()


def test_older_protocols_of_pickle_copy() -> None:
    made = bundled(np.arange(5))
    for protocol in range(2, 5):
        again = pickle.loads(pickle.dumps(made, protocol))  # noqa: S301 - our own
        assert np.array_equal(again.open(), np.arange(5))
