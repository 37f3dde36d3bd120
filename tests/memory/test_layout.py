"""How a request's tensors are copied: what goes together, and that nothing loses its alignment, dtype or shape on the way."""

from __future__ import annotations

from typing import Any

import torch

from shmring.core.compiled import Content, Gpu, GpuMemory, Placement, Regions, plan_copies
from shmring.core.messages import SlotRef
from shmring.memory.tensors import make_decoder
from tests.model.inside import open_content, spans_of
from tests.records import content_of, in_slots, tensor_extension
from tests.tables import for_each

GAP_NBYTES = 64 << 10
DECODER = make_decoder()


def plan(content: Content) -> Placement:
    return plan_copies(DECODER, content, {})


def placed(content: Content, cuda: Any) -> tuple[list[Any], int]:
    """The tensors of a content in memory of a GPU, and where that begins."""
    placement = plan(content)
    memory = torch.zeros(max(1, placement.nbytes), dtype=torch.uint8)
    gpu: Gpu = cuda.gpu(0)
    region = GpuMemory(gpu, memory.data_ptr(), memory.nbytes).lend(Regions(), 0, memory.nbytes, (0, 0))
    placement.target = region
    made = DECODER.decode_again(open_content(content, 1, Regions(), None), placement)
    return [(tensor, memory) for tensor in made], memory.data_ptr()


def spans(content: Content) -> list[tuple[int, int, int]]:
    return [(region, start, end) for region, start, end, _ in spans_of(plan(content))]


def test_adjacent_tensors_are_one_copy() -> None:
    near = in_slots((1, 0, "uint8", (1000,)), (1, 1024, "float32", (10,)), (1, 1088, "int64", (2,)))
    assert spans(near) == [(1, 0, 1104)]
    assert plan(near).nbytes == 1152


def test_each_slot_is_a_copy_of_its_own_and_the_message_another() -> None:
    apart = in_slots((2, 64, "uint8", (8,)), (1, 0, "uint8", (8,)), (0, 0, "uint8", (8,)), inline=b"12345678")
    assert spans_of(plan(apart)) == [(0, 0, 8, 0), (1, 0, 8, 64), (2, 64, 72, 128)]


def test_many_copies_are_in_order() -> None:
    step = 64 + GAP_NBYTES + 64
    many = in_slots(*((1 + number % 2, number // 2 * step, "uint8", (64,)) for number in reversed(range(14))))
    assert spans(many) == [(slot, place * step, place * step + 64) for slot in (1, 2) for place in range(7)]
    assert [target for *_, target in spans_of(plan(many))] == [64 * number for number in range(14)]


@for_each(("gap", "copies"), [(0, 1), (GAP_NBYTES, 1), (GAP_NBYTES + 64, 2)])
def test_large_gaps_are_left_out(gap: int, copies: int) -> None:
    far = plan(in_slots((1, 0, "uint8", (64,)), (1, 64 + gap, "uint8", (64,))))
    assert len(spans_of(far)) == copies
    assert far.nbytes == (128 + gap if copies == 1 else 128)


def test_tensors_that_overlap_or_repeat_are_copied_once() -> None:
    assert spans(in_slots((1, 0, "uint8", (512,)), (1, 0, "uint8", (512,)), (1, 128, "uint8", (64,)))) == [(1, 0, 512)]


def test_alignment_survives(cuda: Any) -> None:
    offsets = (72, 72 + 24 + GAP_NBYTES + 8)
    made, start = placed(in_slots(*((1, offset, "float64", (3,)) for offset in offsets)), cuda)
    assert [(tensor.data_ptr() - start) % 64 for tensor, _ in made] == [offset % 64 for offset in offsets]


def test_arrays_have_a_place_where_torch_has_their_dtype(cuda: Any) -> None:
    arrays = in_slots((1, 0, "<f4", (2, 2)), (1, 64, "<U3", (2,)), (1, 128, ">f4", (2,)), (1, 192, "<M8[s]", (1,)))
    assert spans(arrays) == [(1, 0, 16)]
    [(tensor, _)], _ = placed(in_slots((1, 0, "<f4", (2, 2))), cuda)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.float32, (2, 2))


@for_each("dtype", ["bool", "bfloat16", "complex64", "float8_e4m3fn", "float8_e8m0fnu", "int16"])
def test_every_dtype_of_torch_has_a_place(cuda: Any, dtype: str) -> None:
    wanted: torch.dtype = getattr(torch, dtype)
    slots = (SlotRef(0, 4096, 1 << 20, 1),)
    [(tensor, _)], _ = placed(content_of([tensor_extension(1, 64, 3 * wanted.itemsize, dtype, (3, 1))], b"", slots), cuda)
    assert (tensor.dtype, tuple(tensor.shape)) == (wanted, (3, 1))


def test_tensors_of_nothing_have_a_place(cuda: Any) -> None:
    empty = in_slots((0, 0, "bfloat16", (3, 0, 2)), (1, 0, "float32", ()), (1, 64, "<i2", (0,)))
    (nothing, scalar, array), _ = placed(empty, cuda)
    assert (nothing[0].dtype, tuple(nothing[0].shape)) == (torch.bfloat16, (3, 0, 2))
    assert scalar[0].shape == ()
    assert (array[0].dtype, tuple(array[0].shape)) == (torch.int16, (0,))
