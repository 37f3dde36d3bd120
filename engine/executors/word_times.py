"""When each word of a window was said: where a Whisper model looks in the recording while it writes.

Some heads of the decoder's attention to the recording follow the speech; the model's configuration names them
(``alignment_heads``). Their weights say for each token how much it has to do with each moment. A path through these weights, on
which tokens and moments only go forward, has the moment at which each token begins (dynamic time warping).

The keys of the recording are in the cache anyway. The queries of tokens are noted while these are read, so nothing is computed
twice.

Source: OpenAI's Whisper, ``timing.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Alignment", "first_moments"]

#: Of the tokens of a window that were read, by layer: tensors of shape (tokens, width).
Queries: TypeAlias = dict[int, list[torch.Tensor]]

_MEDIAN_WIDTH = 7  # of moments, over which weights are smoothed


class Alignment:
    """The heads of a model that follow the speech.

    Args:
        model: of transformers.
        heads: layer and head of each.
    """

    def __init__(self, model: Any, heads: Sequence[Sequence[int]]) -> None:
        self._heads = [(int(layer), int(head)) for layer, head in heads]
        self._attentions = {layer: model.model.decoder.layers[layer].encoder_attn for layer, _ in self._heads}
        self._noted: dict[int, torch.Tensor] = {}
        for layer, attention in self._attentions.items():
            attention.q_proj.register_forward_hook(functools.partial(self._note, layer))

    def _note(self, layer: int, _: Any, __: Any, queries: torch.Tensor) -> None:
        self._noted[layer] = queries[0]

    def keep(self, queries: Queries) -> None:
        """Adds the queries of the tokens that the model has just read."""
        for layer, noted in self._noted.items():
            queries.setdefault(layer, []).append(noted)

    def moments(self, queries: Queries, cache: Any, first: int, num_moments: int) -> NDArray[np.int64]:
        """Returns when tokens begin: those that were chosen after each token that was read.

        Args:
            queries: of all tokens of the window that were read.
            cache: of the window.
            first: the number of the first token after which one is wanted.
            num_moments: of the encoder's output, in which there is something of the recording.
        """
        joined = {layer: torch.cat(parts)[first:] for layer, parts in queries.items()}
        weights = [self._weights(layer, head, joined, cache, num_moments) for layer, head in self._heads]
        return first_moments(torch.stack(weights))

    def _weights(
        self, layer: int, head: int, queries: Mapping[int, torch.Tensor], cache: Any, num_moments: int
    ) -> torch.Tensor:
        attention = self._attentions[layer]
        width = attention.head_dim
        asked: torch.Tensor = queries[layer][:, head * width : (head + 1) * width].float() * attention.scaling
        keys: torch.Tensor = cache.cross_attention_cache.layers[layer].keys[0, head, :num_moments].float()
        return (asked @ keys.T).softmax(-1)


def first_moments(weights: torch.Tensor) -> NDArray[np.int64]:
    """Returns the moment at which each token begins.

    Args:
        weights: of shape (heads, tokens, moments).
    """
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, correction=0)
    weights = (weights - mean) / deviation.where(deviation > 0, 1.0)
    around = _MEDIAN_WIDTH // 2
    if weights.shape[-1] > around:
        padded = torch.nn.functional.pad(weights, (around, around), mode="reflect")
        weights = padded.unfold(-1, _MEDIAN_WIDTH, 1).median(-1).values
    return _warped(-weights.mean(0).double().cpu().numpy())


def _warped(costs: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the first column of each row on the cheapest path from the first cell to the last one."""
    rows, columns = costs.shape
    width = columns + 1
    padded = np.zeros((rows + 1, width))
    padded[1:, 1:] = costs
    totals = np.full((rows + 1, width), np.inf)
    totals[0, 0] = 0.0
    cost, total = padded.ravel(), totals.ravel()
    for diagonal in range(2, rows + columns + 1):  # whose cells depend on the two before it, and not on each other
        top, bottom = max(1, diagonal - columns), min(rows, diagonal - 1)
        first, last = top * width + diagonal - top, bottom * width + diagonal - bottom
        cells, above, left, before = (slice(first - back, last - back + 1, columns) for back in (0, width, 1, width + 1))
        total[cells] = cost[cells] + np.minimum(np.minimum(total[above], total[left]), total[before])
    moments = np.zeros(rows, np.int64)
    row, column = rows, columns
    while row > 0:
        moments[row - 1] = column - 1
        steps = totals[row - 1, column - 1], totals[row - 1, column], totals[row, column - 1]
        step = int(np.argmin(steps))
        row -= step != 2
        column -= step != 1
    return moments
