"""Attention of single tokens, by code of our own (``_attention.c``): one call for the contexts of a step, wherever they lie.

It reads the keys and values of a context once for all heads that share them, in order. torch takes twice as long, and a mask
where contexts differ in length. On a processor without AVX-512, on an accelerator, for other dtypes, and where each head has
keys of its own (torch is as fast there), torch computes single tokens as well: see :mod:`.attention`.

Invariants:

- each token is computed as if it were the only one, with the same bits;
- when a call is over, no thread computes anything of it, also if one could not be started.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from shmring.engine.executors import _attention

if TYPE_CHECKING:
    from shmring.engine.executors.attention import Row

__all__ = ["SingleTokens", "can_attend"]

# What _attention.c computes: dtypes, and keys of multiples of 32 numbers, up to so many.
_DTYPES = (torch.bfloat16, torch.float32)
_MULTIPLE, _MOST = 32, 256

_SHARED_NBYTES = 1 << 20  # of keys and values, for each thread that reads them: 0.1 ms; handing them over takes a fifth of that


def can_attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether tokens like these, of shape (heads, tokens, head size), are computed here."""
    size = query.shape[2]
    return (
        _attention.SUPPORTED
        and query.device.type == "cpu"
        and query.dtype in _DTYPES
        and query.dtype == key.dtype == value.dtype
        and size == value.shape[2]
        and size % _MULTIPLE == 0
        and size <= _MOST
        and query.shape[0] >= 2 * key.shape[0]
    )


class SingleTokens:
    """One token of each of some contexts.

    Args:
        tokens: the contexts, and where their tokens stand in the flat sequence.
    """

    def __init__(self, tokens: Sequence[tuple[Row, int]]) -> None:
        self._count = len(tokens)
        self._shelves = list(dict.fromkeys(row.shelf for row, _ in tokens))
        numbers = {shelf: number for number, shelf in enumerate(self._shelves)}
        places = [(column, numbers[row.shelf], row.index, row.length + 1) for row, column in tokens]
        self._places = array("q", [number for place in places for number in place])
        self._lengths = sum(row.length + 1 for row, _ in tokens)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, output: torch.Tensor
    ) -> None:
        """Writes what the tokens see.

        Args:
            layer: which. query, key, value: of the flat sequence, shape (heads, tokens, head size). scale: of the scores.
            output: of the flat sequence, shape (tokens, heads, head size).
        """
        heads, tokens, size = query.shape
        groups = key.shape[0]
        query, key, value = (tensor if tensor.stride(2) == 1 else tensor.contiguous() for tensor in (query, key, value))
        shelves = array("q")
        for shelf in self._shelves:
            keys, values = shelf.layer(layer, key, value)
            for memory in (keys, values):  # C sees addresses only
                shape = (shelf.rows, groups, shelf.capacity, size)
                if (memory.dtype, memory.shape) != (query.dtype, shape) or not memory.is_contiguous():
                    raise ValueError(f"layer {layer} has keys of {memory.dtype} and shape {tuple(memory.shape)} already")
            shelves.extend((keys.data_ptr(), values.data_ptr(), shelf.rows, shelf.capacity))
        compute: Callable[[int, int], None] = functools.partial(
            _attention.attend,
            self._places,
            shelves,
            _vectors(query),
            _vectors(key),
            _vectors(value),
            _vectors(output.transpose(0, 1)),
            (tokens, heads, groups, size),
            query.dtype == torch.bfloat16,
            size**-0.5 if scale is None else scale,
        )
        pieces = self._count * groups
        nbytes = 2 * self._lengths * groups * size * query.itemsize
        threads = min(torch.get_num_threads(), pieces, 1 + nbytes // _SHARED_NBYTES)
        bounds = [pieces * number // threads for number in range(threads + 1)]
        _share(compute, list(itertools.pairwise(bounds)))


def _share(compute: Callable[[int, int], None], parts: Sequence[tuple[int, int]]) -> None:
    """Computes parts: the first one here, the others in helping threads, and here again what none of these has begun."""
    helping = [(concurrent.futures.Future[None](), part) for part in parts[1:]]
    try:
        with contextlib.suppress(RuntimeError):  # no thread can be started
            for future, part in helping:
                _helpers().submit(_help, future, compute, part)
        compute(*parts[0])
        for future, part in helping:
            if future.cancel():
                compute(*part)
    finally:
        begun = [future for future, _ in helping if not future.cancel()]
        if begun:
            concurrent.futures.wait(begun)
    for future in begun:
        future.result()


def _help(future: concurrent.futures.Future[None], compute: Callable[[int, int], None], part: tuple[int, int]) -> None:
    """In a helping thread: computes a part, unless it was cancelled. It may be one of a call that has long been over."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        compute(*part)
    except BaseException as error:  # noqa: BLE001 - whoever waits for it raises it
        future.set_exception(error)
    else:
        future.set_result(None)


def _vectors(tensor: torch.Tensor) -> tuple[int, int, int]:
    return tensor.data_ptr(), tensor.stride(0), tensor.stride(1)


@functools.cache
def _helpers() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(thread_name_prefix="shmring-attention")
