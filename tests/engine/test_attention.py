"""What the tokens of a step see: their own contexts, of any length, whoever is beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shmring.engine.executors import attention
from shmring.engine.executors.attention import ContextCache, FlatStep, Row
from tests.tables import for_each

LENGTHS = (0, 1, 2, 3, 4, 5, 14, 15, 16, 17, 31, 32, 126, 127, 128, 129, 500, 1000, 3063)  # before this step
APART = {torch.float64: 1e-12, torch.float32: 3e-5, torch.bfloat16: 0.03, torch.float16: 0.004}  # of the greatest value


class Layer:
    layer_idx = 0


class Contexts:
    """Contexts with keys and values of made-up numbers, and a token of each."""

    def __init__(self, lengths: Sequence[int], heads: int, groups: int, size: int, dtype: torch.dtype, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.cache = ContextCache()
        self.rows: list[Row] = []
        self.old: list[tuple[torch.Tensor, ...]] = []
        for length in lengths:
            row = self.cache.open(length + 1)
            row.length = length
            self.rows.append(row)
            self.old.append(tuple(3 * torch.randn(groups, length, size, generator=generator).to(dtype) for _ in range(2)))
            for memory, numbers in zip(row.shelf.layer(0, *self.old[-1]), self.old[-1], strict=True):
                memory[row.index, :, :length] = numbers
        # As a model makes them: of a token all heads side by side, or the other way round.
        self.query, self.key = (
            torch.randn(1, len(lengths), count, size, generator=generator).to(dtype).transpose(1, 2)
            for count in (heads, groups)
        )
        self.value = torch.randn(1, groups, len(lengths), size, generator=generator).to(dtype)

    def attend(self, which: Sequence[int] | None = None) -> torch.Tensor:
        """Returns what tokens see, shape (tokens, heads, size)."""
        chosen = list(range(len(self.rows))) if which is None else list(which)
        tensors = (tensor[:, :, chosen] for tensor in (self.query, self.key, self.value))
        step = FlatStep([(self.rows[number], 1) for number in chosen], torch.device("cpu"))
        return attention.attend(Layer(), *tensors, None, scaling=0.3, flat=step)[0][0]

    def expected(self, number: int) -> torch.Tensor:
        """Returns what a token sees in float64, shape (heads, size)."""
        shared = self.query.shape[1] // self.key.shape[1]
        keys, values = (
            torch.cat([old, new[0, :, number : number + 1]], dim=1).double().repeat_interleave(shared, 0)
            for old, new in zip(self.old[number], (self.key, self.value), strict=True)
        )
        weights = torch.softmax(self.query[0, :, number : number + 1].double() @ keys.transpose(1, 2) * 0.3, dim=-1)
        return (weights @ values)[:, 0]


@for_each("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@for_each(("heads", "groups", "size"), [(8, 2, 64), (7, 1, 128), (8, 4, 16), (6, 1, 288), (8, 8, 48)])
def test_tokens_see_their_contexts(heads: int, groups: int, size: int, dtype: torch.dtype) -> None:
    contexts = Contexts(LENGTHS, heads, groups, size, dtype)
    assert len(contexts.cache.shelves) > 3, "of several lengths"
    seen = contexts.attend()
    for number, row in enumerate(contexts.rows):
        expected = contexts.expected(number)
        assert float((seen[number].double() - expected).abs().max()) <= APART[dtype] * float(expected.abs().max())
        for memory, new, old in zip(row.shelf.layers[0], (contexts.key, contexts.value), contexts.old[number], strict=True):
            assert torch.equal(memory[row.index, :, : row.length], old)
            assert torch.equal(memory[row.index, :, row.length], new[0, :, number])
            assert not memory[row.index, :, row.length + 1 :].any(), "nothing is written beside"


def test_a_step_of_pieces_and_single_tokens_is_that_of_each() -> None:
    contexts = Contexts((40, 7, 300), 8, 2, 64, torch.float32)
    single = contexts.attend()
    piece = Contexts((50,), 8, 2, 64, torch.float32, seed=2)
    more = [torch.randn(1, count, 5, 64, generator=torch.Generator().manual_seed(3)) for count in (8, 2, 2)]
    step = FlatStep([*((row, 1) for row in contexts.rows), (piece.rows[0], 5), (None, 1)], torch.device("cpu"))
    ours = (contexts.query, contexts.key, contexts.value)
    tensors = [torch.cat([one, five, five[:, :, :1]], dim=2) for one, five in zip(ours, more, strict=True)]
    seen, _ = attention.attend(Layer(), *tensors, None, scaling=0.3, flat=step)
    alone, _ = attention.attend(Layer(), *more, None, scaling=0.3, flat=FlatStep([(piece.rows[0], 5)], torch.device("cpu")))
    torch.testing.assert_close(seen[0, :3], single)
    torch.testing.assert_close(seen[:, 3:8], alone)
    shown = more[2].repeat_interleave(4, 1)[0, :, 0]
    torch.testing.assert_close(seen[0, 8], shown)  # a sequence of one token sees itself


@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_stays_in_its_context(number: float, dtype: torch.dtype) -> None:
    contexts = Contexts((300, 300, 300), 8, 2, 64, dtype)
    expected = contexts.attend()
    contexts.rows[1].shelf.layers[0][0][contexts.rows[1].index, 0, 200, :] = number
    seen = contexts.attend()
    torch.testing.assert_close(seen[[0, 2]], expected[[0, 2]])
    torch.testing.assert_close(seen[1, 4:], expected[1, 4:])  # heads with other keys
    assert not torch.isfinite(seen[1, :4]).all(), "heads with these keys"
