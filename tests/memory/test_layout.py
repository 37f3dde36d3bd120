"""Layouts: what is copied together, and that nothing loses its alignment, dtype or shape on the way."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shmring.core.compiled import Content
from shmring.core.messages import SlotRef
from shmring.gpu.layout import GAP_NBYTES, Layout
from tests.records import content_of, tensor_extension


def content(*tensors: tuple[int, int, str, tuple[int, ...]], inline: bytes = b"", slot_nbytes: int = 1 << 20) -> Content:
    """A content of tensors ``(region, offset, dtype, shape)`` in two slots of a slab."""
    payload = []
    for region, offset, dtype, shape in tensors:
        size = np.dtype(dtype if dtype != "bfloat16" else "int16").itemsize
        payload.append(tensor_extension(region, offset, int(np.prod(shape)) * size, dtype, shape))
    slots = (SlotRef(0, 4096, slot_nbytes, 1), SlotRef(0, 2 << 20, slot_nbytes, 2))
    return content_of(payload, inline, slots)


def spans(layout: Layout) -> list[tuple[int, int, int]]:
    return [(run.region, run.start, run.end) for run in layout.runs]


def test_adjacent_tensors_are_one_copy() -> None:
    layout = Layout(content((1, 0, "uint8", (1000,)), (1, 1024, "float32", (10,)), (1, 1088, "int64", (2,))))
    assert spans(layout) == [(1, 0, 1104)]
    assert layout.nbytes == 1152


def test_each_slot_is_a_copy_of_its_own_and_the_message_another() -> None:
    layout = Layout(content((2, 64, "uint8", (8,)), (1, 0, "uint8", (8,)), (0, 0, "uint8", (8,)), inline=b"12345678"))
    assert spans(layout) == [(0, 0, 8), (1, 0, 8), (2, 64, 72)]
    assert [run.target for run in layout.runs] == [0, 64, 128]


@pytest.mark.parametrize(("gap", "copies"), [(0, 1), (GAP_NBYTES, 1), (GAP_NBYTES + 64, 2)])
def test_large_gaps_are_left_out(gap: int, copies: int) -> None:
    layout = Layout(content((1, 0, "uint8", (64,)), (1, 64 + gap, "uint8", (64,))))
    assert len(layout.runs) == copies
    assert layout.nbytes == (128 + gap if copies == 1 else 128)


def test_tensors_that_overlap_or_repeat_are_copied_once() -> None:
    layout = Layout(content((1, 0, "uint8", (512,)), (1, 0, "uint8", (512,)), (1, 128, "uint8", (64,))))
    assert spans(layout) == [(1, 0, 512)]


def test_alignment_survives() -> None:
    layout = Layout(content((1, 72, "float64", (3,)), (1, 72 + 24 + GAP_NBYTES + 8, "float64", (3,))))
    target = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for ref in content((1, 72, "float64", (3,)), (1, 72 + 24 + GAP_NBYTES + 8, "float64", (3,))).tensors:
        placed = layout.place(ref, target)
        assert placed is not None
        assert (placed.data_ptr() - target.data_ptr()) % 64 == ref.offset % 64


def test_arrays_have_a_place_where_torch_has_their_dtype() -> None:
    layout = Layout(content((1, 0, "<f4", (2, 2)), (1, 64, "<U3", (2,)), (1, 128, ">f4", (2,)), (1, 192, "<M8[s]", (1,))))
    target = torch.zeros(max(1, layout.nbytes), dtype=torch.uint8)
    placed = [layout.place(ref, target) for ref in content((1, 0, "<f4", (2, 2)), (1, 64, "<U3", (2,))).tensors]
    assert placed[0] is not None
    assert (placed[0].dtype, tuple(placed[0].shape)) == (torch.float32, (2, 2))
    assert placed[1] is None
    assert spans(layout) == [(1, 0, 16)]


def test_tensors_of_nothing_have_a_place() -> None:
    layout = Layout(content((0, 0, "bfloat16", (3, 0, 2)), (1, 0, "float32", ())))
    target = torch.zeros(layout.nbytes, dtype=torch.uint8)
    nothing, scalar = (
        layout.place(ref, target) for ref in content((0, 0, "bfloat16", (3, 0, 2)), (1, 0, "float32", ())).tensors
    )
    assert nothing is not None
    assert (nothing.dtype, tuple(nothing.shape)) == (torch.bfloat16, (3, 0, 2))
    assert scalar is not None
    assert scalar.shape == ()
