"""Objects taken apart for the way to another process, and put together again: whole, copied or viewed, and in pieces."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shmring.integrations.vllm.parcels import LARGE_NBYTES, Parcel, Pieces, is_first_piece, pack, unpack
from tests.tables import for_each


@dataclasses.dataclass
class Step:
    """In place of what vLLM's scheduler decides."""

    name: str
    tensors: list[Any]


def of_all_kinds() -> Step:
    pixels = torch.arange(LARGE_NBYTES, dtype=torch.int32).to(torch.bfloat16)
    tensors = [
        *(torch.ones(3), torch.zeros(0, 4), torch.tensor(5.0), torch.rand(4, 4).t(), torch.rand(3, dtype=torch.complex64)),
        *(pixels, np.arange(LARGE_NBYTES), np.ones((2, 3)), torch.rand(3, requires_grad=True), torch.rand(2).conj()),
        *(
            {"again": pixels},
            torch.ones(LARGE_NBYTES + 3, dtype=torch.uint8),
            torch.zeros(LARGE_NBYTES // 8, dtype=torch.int64),
        ),
    ]
    return Step("prefill", tensors)


def through_memory(parcel: Parcel, *, views: bool) -> Any:
    return unpack(parcel.message(views=views))


def in_pieces(nbytes: int) -> Callable[[Parcel], Any]:
    def way(parcel: Parcel) -> Any:
        first, *rest = parcel.pieces(nbytes)
        assert is_first_piece(first)
        pieces = Pieces(first)
        assert [pieces.add(bytes(piece)) for piece in rest] == [False] * (len(rest) - 1) + [True]
        return pieces.unpack()

    return way


WAYS = {
    "copied": lambda parcel: through_memory(parcel, views=False),
    "viewed": lambda parcel: through_memory(parcel, views=True),
    "in pieces": in_pieces(1000),
    "in large pieces": in_pieces(3 << 20),
}


@for_each("way", WAYS)
def test_what_comes_is_what_was_sent(way: str) -> None:
    sent = of_all_kinds()
    came = WAYS[way](pack(sent))
    assert came.name == sent.name
    for before, after in zip(sent.tensors, came.tensors, strict=True):
        if isinstance(before, torch.Tensor):
            assert (after.dtype, after.shape, after.requires_grad) == (before.dtype, before.shape, before.requires_grad)
            assert torch.equal(after, before)
        elif isinstance(before, np.ndarray):
            assert np.array_equal(after, before)
    assert came.tensors[10]["again"] is came.tensors[5], "a tensor that was in it twice is"


@for_each("way", [way for way in WAYS if way != "viewed"])
def test_copies_may_be_written_to(way: str) -> None:
    sent = [torch.zeros(4), torch.zeros(LARGE_NBYTES), np.zeros(4), np.zeros(LARGE_NBYTES)]
    came = WAYS[way](pack(sent))
    for before, after in zip(sent, came, strict=True):
        after[0] = 1
        assert before[0] == 0


def test_of_large_tensors_there_are_views() -> None:
    small, large, array = torch.ones(8), torch.ones(LARGE_NBYTES), np.ones(LARGE_NBYTES)
    came = through_memory(pack([small, large, array]), views=True)
    assert came[1].data_ptr() == large.data_ptr()
    assert came[0].data_ptr() != small.data_ptr()
    came[2][0] = 2  # of arrays there are none: torch would write to memory that numpy knows not to
    assert array[0] == 1


def test_no_tensor_goes_through_pickle() -> None:
    tensor = torch.full((64,), 0x5A, dtype=torch.uint8)
    parcel = pack({"small": tensor, "large": torch.zeros(LARGE_NBYTES)})
    assert bytes(tensor.numpy()) not in parcel.head
    assert len(parcel.head) < 400


def test_what_has_no_tensors_is_what_pickle_makes_of_it() -> None:
    thing = ("execute_model", (Step("decode", []),), {}, 0)
    message = pack(thing).message(views=False)
    assert isinstance(message, bytes)
    assert pickle.loads(message) == thing  # noqa: S301 - of this test
    assert not pack(thing).needs_memory


def test_a_long_head_is_sent_as_an_array() -> None:
    numbers = list(range(100_000))
    parcel = pack(numbers)
    assert parcel.needs_memory
    assert isinstance(parcel.message(views=False), np.ndarray)
    assert unpack(parcel.message(views=False)) == numbers
