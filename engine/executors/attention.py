"""Keys and values that stay where they are, and the attention that reads them there.

A step of a model is one *flat* sequence of tokens: one token of each answer that is being written, and pieces of prompts, one
after the other, without padding. In all of a model but attention, a token has nothing to do with its neighbours, so it does not
matter whose they are. In attention, each token sees the tokens before it in its own context. :func:`attend` does this, in place
of the function that transformers would call; :class:`FlatStep` says which token belongs to which context.

Contexts lie on *shelves*. A shelf has room for some contexts of at most so many tokens: on a CPU, 128 of 128, 64 of 256, ...,
one of 16,384 or more. A context that outgrows its shelf moves to one of twice the length: it alone is copied, and rarely.

Single tokens of contexts that lie side by side on one shelf are computed by one call of torch, because calls cost more than
reading: a context is at least half as long as its shelf, unless it is a short one.

On a CPU, a shelf is memory that the kernel gives when it is first written to and takes back when a context leaves its row: room
for contexts that never come costs little. Long rows lie in huge pages, which are read faster. An accelerator reserves what it
is asked for; its shelves are smaller.

Invariants:

- a context's keys and values are written once, in its own row, and copied only when it moves;
- all that a call reads holds numbers: rows are cleared when they are left, since torch multiplies by nought what a mask hides,
  and nought times infinity is none;
- a token that is the only one of its shelf is computed by the same call whatever else is in the step, and without a mask.

Source: a sequence of all tokens without padding is how vLLM and transformers' continuous batching feed a model. They keep pages
(Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention", 2023), for which torch has no
kernel on a CPU: contexts would be gathered anew in each layer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["ATTENTION", "ContextCache", "FlatStep", "Row", "attend", "refuse_mask"]

ATTENTION = "shmring_flat"
"""The name by which models find :func:`attend`."""

_SHELF_TOKENS = 16384  # of a shelf on a CPU, unless one context is longer: 16 contexts of 1024 tokens are read by one call
_RESERVED = 8  # A shelf of an accelerator has fewer tokens by this: 57 MB for 2 billion parameters (28 layers, 2 heads of 128).
_SHORTEST = 128  # tokens
_HUGE_ROW_NBYTES = 256 << 10  # of keys, or values: one context in a huge page of 2 MB takes the room of 8 at most
_GAP_TOKENS = 256  # of rows between two contexts that a CPU reads for nothing, before it is cheaper to make another call

# What attention functions are given beside queries, keys and values, and what this one does not do.
_REFUSED = ("sliding_window", "softcap", "s_aux", "position_bias")

_CPU = torch.device("cpu")

_sdpa = torch.nn.functional.scaled_dot_product_attention


class _Shelf:
    """Memory of a few contexts: of each layer, keys and values of shape (rows, heads, capacity, head size)."""

    def __init__(self, capacity: int, rows: int) -> None:
        self.capacity = capacity
        self.rows = rows
        self.free = list(range(self.rows))[::-1]  # the last is taken: contexts lie side by side
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._mappings: list[tuple[mmap.mmap | None, torch.Tensor]] = []

    def layer(self, index: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the memory of a layer, whose tokens have keys and values like these, of shape (heads, tokens, head size)."""
        if index not in self.layers:
            made = self._make(keys), self._make(values)
            self._mappings += made
            self.layers[index] = made[0][1], made[1][1]
        return self.layers[index]

    def clear(self, index: int) -> None:
        """Nothing is left in a row. The kernel has its memory back; that of a part of a huge page, when memory is short."""
        for mapping, memory in self._mappings:
            row = memory[index]
            if mapping is None or row.nbytes % mmap.PAGESIZE:
                row.zero_()
            else:
                mapping.madvise(mmap.MADV_DONTNEED, index * row.nbytes, row.nbytes)

    def _make(self, like: torch.Tensor) -> tuple[mmap.mmap | None, torch.Tensor]:
        shape = (self.rows, like.shape[0], self.capacity, like.shape[2])
        if like.device.type != "cpu":
            return None, like.new_zeros(shape)
        nbytes = math.prod(shape) * like.itemsize
        try:  # a mapping is clear, and goes with the tensor
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no {nbytes} bytes for contexts: {error}") from None
        if nbytes // self.rows >= _HUGE_ROW_NBYTES:
            with contextlib.suppress(OSError):  # a kernel without them
                mapping.madvise(mmap.MADV_HUGEPAGE)
        return mapping, torch.frombuffer(mapping, dtype=like.dtype).view(shape)


@dataclasses.dataclass(slots=True, eq=False)
class Row:
    """Where a context lies.

    Attributes:
        shelf, index: which of its rows.
        length: tokens whose keys and values are there.
    """

    shelf: _Shelf
    index: int
    length: int = 0


class ContextCache:
    """The keys and values of all contexts.

    Args:
        device: of the model.

    Attributes:
        shelves: that have a context; memory goes back when the last one has left.
    """

    def __init__(self, device: torch.device = _CPU) -> None:
        self.shelves: list[_Shelf] = []
        self._shelf_tokens = _SHELF_TOKENS if device.type == "cpu" else _SHELF_TOKENS // _RESERVED

    def open(self, tokens: int) -> Row:
        """Returns a row for a context of so many tokens, more or less."""
        shelf = self._find(tokens)
        return Row(shelf, shelf.free.pop())

    @torch.inference_mode()
    def reserve(self, row: Row, tokens: int) -> None:
        """Makes room for a context to become so long. It may move."""
        if tokens <= row.shelf.capacity:
            return
        moved = self.copy(row, tokens)
        self.close(row)
        row.shelf, row.index = moved.shelf, moved.index

    @torch.inference_mode()
    def copy(self, row: Row, tokens: int) -> Row:
        """Returns a row for a context of so many tokens that begins as another does."""
        copied = self.open(tokens)
        try:
            for number, layer in row.shelf.layers.items():
                for old, new in zip(layer, copied.shelf.layer(number, *(memory[0] for memory in layer)), strict=True):
                    new[copied.index, :, : row.length] = old[row.index, :, : row.length]
        except BaseException:  # there was no memory; the context stays where it was
            self.close(copied)
            raise
        copied.length = row.length
        return copied

    @torch.inference_mode()
    def close(self, row: Row) -> None:
        """A context has ended; nothing of it is left."""
        shelf = row.shelf
        if len(shelf.free) + 1 == shelf.rows:
            self.shelves.remove(shelf)
            return
        shelf.clear(row.index)  # before anybody can have it
        shelf.free = sorted([*shelf.free, row.index], reverse=True)

    def _find(self, tokens: int) -> _Shelf:
        capacity = _SHORTEST
        while capacity < tokens:
            capacity *= 2
        for shelf in self.shelves:
            if shelf.capacity == capacity and shelf.free:
                return shelf
        self.shelves.append(_Shelf(capacity, max(1, self._shelf_tokens // capacity)))
        return self.shelves[-1]


class FlatStep:
    """Whose the tokens of a flat sequence are.

    Args:
        pieces: of each context in the step, in the sequence's order, its row and how many tokens follow those that are there.
            A row of None is a sequence that sees itself and leaves nothing. Single tokens of one shelf are computed together if
            they stand side by side, in the order of their rows.
        device: of the model.

    Attributes:
        parts: what is computed by a call each.
    """

    def __init__(self, pieces: Sequence[tuple[Row | None, int]], device: torch.device) -> None:
        self.parts: list[_Tokens | _Piece] = []
        column = 0
        together: list[Row] = []
        for row, count in [*pieces, (None, 0)]:
            if together and (row is None or count > 1 or _is_far(together[-1], row, device)):
                self.parts.append(_Tokens(together, column - len(together), device))
                together = []
            if count > 1 or (count and row is None):
                self.parts.append(_Piece(row, column, count, device))
            elif row is not None:
                together.append(row)
            column += count


def _is_far(row: Row, following: Row, device: torch.device) -> bool:
    """Whether two contexts are better read by a call each."""
    gap = following.index - row.index - 1
    if row.shelf is not following.shelf or gap < 0:
        return True
    return device.type == "cpu" and gap * row.shelf.capacity > _GAP_TOKENS


class _Tokens:
    """One token of each of some contexts on a shelf."""

    def __init__(self, rows: Sequence[Row], column: int, device: torch.device) -> None:
        self._shelf = rows[0].shelf
        self._columns = slice(column, column + len(rows))
        indices = [row.index for row in rows]
        lengths = [row.length + 1 for row in rows]
        self._indices = torch.tensor(indices, device=device)
        self._last = torch.tensor(lengths, device=device) - 1
        self._longest = max(lengths)
        first, end = min(indices), max(indices) + 1
        self._span = slice(first, end)  # rows between them, of contexts that are not in the step, are computed for nothing
        self._places = None if indices == list(range(first, end)) else self._indices - first
        self._mask = None
        if min(lengths) < self._longest or self._places is not None:
            spanned = torch.ones(end - first, dtype=torch.long, device=device)
            spanned[self._indices - first] = self._last + 1
            self._mask = (torch.arange(self._longest, device=device) < spanned.unsqueeze(1))[:, None, None, :]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, output: torch.Tensor
    ) -> None:
        """Writes what the tokens see.

        Args:
            layer: which. query, key, value: of the flat sequence, shape (heads, tokens, head size). scale: of the scores.
            output: of the flat sequence, shape (tokens, heads, head size).
        """
        query, key, value = (tensor[:, self._columns] for tensor in (query, key, value))
        keys, values = self._shelf.layer(layer, key, value)
        if self._mask is not None and self._mask.dtype == torch.bool:  # which torch would turn into numbers in each layer
            hidden = ~self._mask
            self._mask = torch.zeros_like(hidden, dtype=query.dtype).masked_fill_(hidden, -math.inf)
        keys[self._indices, :, self._last] = key.transpose(0, 1)
        values[self._indices, :, self._last] = value.transpose(0, 1)
        # The heads that share keys stand where a sequence's tokens would: nothing is repeated.
        grouped = query.transpose(0, 1).reshape(query.shape[1], key.shape[0], -1, query.shape[2])
        if self._places is not None:
            spanned = grouped.new_zeros((self._span.stop - self._span.start, *grouped.shape[1:]))
            spanned[self._places] = grouped
            grouped = spanned
        seen = _sdpa(
            grouped,
            keys[self._span, :, : self._longest],
            values[self._span, :, : self._longest],
            attn_mask=self._mask,
            scale=scale,
        )
        output[self._columns] = (seen if self._places is None else seen[self._places]).flatten(1, 2)


class _Piece:
    """Some tokens of one context, or a sequence of its own."""

    def __init__(self, row: Row | None, column: int, count: int, device: torch.device) -> None:
        self._row = row
        self._columns = slice(column, column + count)
        self._start = 0 if row is None else row.length
        self._end = self._start + count
        self._mask = None
        if self._start:
            places = torch.arange(self._end, device=device)
            self._mask = places <= places[self._start :].unsqueeze(1)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, output: torch.Tensor
    ) -> None:
        """Remembers the keys and values of these tokens, and puts what they see into their columns of the output."""
        query, key, value = (tensor[:, self._columns] for tensor in (query, key, value))
        if self._row is not None:
            keys, values = (memory[self._row.index] for memory in self._row.shelf.layer(layer, key, value))
            keys[:, self._start : self._end] = key
            values[:, self._start : self._end] = value
            if self._start:
                key, value = keys[:, : self._end], values[:, : self._end]
        # The heads that share keys are given the same memory. (torch's own `enable_gqa` takes a slow way on a CPU.)
        grouped = query.reshape(key.shape[0], -1, *query.shape[1:])
        key, value = (memory.unsqueeze(1).expand(-1, grouped.shape[1], -1, -1) for memory in (key, value))
        seen = _sdpa(grouped, key, value, attn_mask=self._mask, is_causal=self._mask is None, scale=scale)
        output[self._columns] = seen.flatten(0, 1).transpose(0, 1)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    flat: FlatStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function of a model in a flat step, as ``transformers.AttentionInterface`` calls it.

    Args:
        module: the layer. query, key, value: shape (1, heads, tokens, head size).
        attention_mask: ignored. scaling: of the scores. flat: the step. options: what only some architectures say.

    Raises:
        NotImplementedError: an architecture says something that changes what its tokens see.
    """
    refused = [name for name in _REFUSED if options.get(name) is not None]
    if flat is None or refused:
        raise NotImplementedError(f"its attention {f'has a {refused[0]}' if refused else 'is not told which step it is in'}")
    output = query.new_empty((1, query.shape[2], query.shape[1], value.shape[3]))
    for part in flat.parts:
        part.attend(module.layer_idx, query[0], key[0], value[0], scaling, output[0])
    return output, None


def refuse_mask(*_: object, **__: object) -> None:
    """The mask function of a model in flat steps: such a model makes no masks.

    Raises:
        NotImplementedError: it does.
    """
    raise NotImplementedError("it makes a mask of its own")
