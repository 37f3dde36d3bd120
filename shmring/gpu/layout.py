"""Where the tensors of a request come to lie on a device: as they lie in their slots, large gaps left out.

A copy costs a few microseconds to queue, whatever its size, so tensors that are near each other go together, gaps included,
and most requests are one copy per slot. Source and target agree modulo a cache line, so what was aligned stays so.
"""

from __future__ import annotations

import dataclasses
import functools
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import torch

from shmring.core.compiled import Content
from shmring.core.messages import TENSOR_ALIGNMENT, TensorRef, align
from shmring.memory.views import TORCH_DTYPES, Place

__all__ = ["GAP_NBYTES", "NOTHING_GIVEN", "Given", "Layout", "Run"]

#: Bytes between two tensors that are copied along rather than left out: queueing one more copy takes a few microseconds,
#: in which PCIe 4 carries about as much.
GAP_NBYTES = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """Bytes ``[start, end)`` of a region that go to ``target`` in one piece."""

    region: int
    start: int
    end: int
    target: int


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """The tensors of a content that are in device memory already, so that nobody has to copy them.

    Attributes:
        regions: where they are, by number.
        place: makes them; None for any other.
        nowhere: makes no bytes on that device, for tensors without content.
    """

    regions: frozenset[int]
    place: Place
    nowhere: Callable[[], torch.Tensor]


#: Where no tensor is there already.
NOTHING_GIVEN: Given = Given(frozenset(), lambda ref: None, lambda: torch.empty(0))


class Layout:
    """Where a content's tensors come to lie on the device.

    Arrays whose dtype torch does not have (text, times, foreign byte order) have no place there.

    Args:
        content: as it was checked.
        without: regions that are left out.

    Attributes:
        runs: what to copy, by region and address.
        nbytes: what all of it takes.
    """

    def __init__(self, content: Content, without: frozenset[int] = frozenset()) -> None:
        self.runs: list[Run] = []
        self.nbytes = 0
        self._runs_of: dict[int, tuple[list[int], list[Run]]] = {}
        spans: dict[int, list[tuple[int, int]]] = {}
        for ref in content.tensors:
            if ref.nbytes and ref.region not in without and _torch_dtype(ref.dtype) is not None:
                spans.setdefault(ref.region, []).append((ref.offset, ref.offset + ref.nbytes))
        for region in sorted(spans):
            self._add(region, sorted(spans[region]))

    def _add(self, region: int, spans: list[tuple[int, int]]) -> None:
        start, end = spans[0]
        for next_start, next_end in [*spans[1:], (None, None)]:
            if next_start is not None and next_end is not None and next_start - end <= GAP_NBYTES:
                end = max(end, next_end)
                continue
            run = Run(region, start - start % TENSOR_ALIGNMENT, end, self.nbytes)
            self.runs.append(run)
            starts, runs = self._runs_of.setdefault(region, ([], []))
            starts.append(run.start)
            runs.append(run)
            self.nbytes = align(run.target + run.end - run.start)
            if next_start is not None and next_end is not None:
                start, end = next_start, next_end

    def place(self, ref: TensorRef, target: torch.Tensor) -> torch.Tensor | None:
        """Returns the tensor that a descriptor describes as a view of ``target``; None if it has no place there.

        Args:
            ref: one of the content's descriptors.
            target: ``uint8``, at least ``nbytes``.
        """
        dtype = _torch_dtype(ref.dtype)
        if dtype is None:
            return None
        if not ref.nbytes:
            return target[:0].view(dtype).reshape(ref.shape)
        starts, runs = self._runs_of[ref.region]
        run = runs[bisect_right(starts, ref.offset) - 1]
        at = run.target + ref.offset - run.start
        return target[at : at + ref.nbytes].view(dtype).view(ref.shape)


@functools.lru_cache(maxsize=256)  # dtypes as the wire spells them come from peers
def _torch_dtype(name: str) -> torch.dtype | None:
    """Returns torch's dtype for one of the wire, numpy's spelling included; None if torch has none."""
    if name in TORCH_DTYPES:
        return TORCH_DTYPES[name]
    try:
        dtype = np.dtype(name)
    except TypeError:
        return None
    return TORCH_DTYPES.get(dtype.name) if dtype.isnative else None
