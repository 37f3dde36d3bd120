"""Choosing a token from a model's logits.

Every request has its own source of random numbers, and takes exactly one number from it for each token. So a request with a
seed chooses the same tokens from the same logits again, whatever else is being answered beside it. The numbers are drawn on
the CPU also where the logits are elsewhere: a seed means the same on every device.
"""

from __future__ import annotations

import torch

from engine.protocol import SamplingParams

__all__ = ["Sampler"]

# Below it a division would overflow float32 for ordinary logits; what is asked for is greedy anyway.
_GREEDY_BELOW = 1e-4

# torch takes seeds of 64 bits; callers' seeds are any integers.
_SEED_MODULUS = 1 << 64


class Sampler:
    """Chooses the tokens of one request: greedily at temperature 0, otherwise by chance.

    Args:
        params: ``temperature``, ``top_p`` and ``seed`` of it; the rest is others' business.

    Raises:
        ValueError: one of them makes no sense.
    """

    def __init__(self, params: SamplingParams) -> None:
        if not 0 <= params.temperature < float("inf"):
            raise ValueError(f"temperature must be a number from 0, got {params.temperature}")
        if not 0 < params.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, got {params.top_p}")
        self._temperature = params.temperature
        self._top_p = params.top_p
        self._generator: torch.Generator | None = None
        if self._temperature >= _GREEDY_BELOW:
            self._generator = torch.Generator("cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed % _SEED_MODULUS)

    def choose(self, logits: torch.Tensor) -> int:
        """Chooses the next token.

        Args:
            logits: shape (vocabulary,), float32, on any device.

        Returns:
            Its number.

        Raises:
            RuntimeError: there is no choosing from these logits, since they hold NaN or infinity.
        """
        highest, index = logits.max(dim=0)
        if not torch.isfinite(highest):  # NaN and infinity win every maximum
            raise RuntimeError(
                "the model's logits hold NaN or infinity: its weights are damaged, or do not fit its dtype; try dtype float32"
            )
        if self._generator is None:
            return int(index)
        # In float64, because a cumulative sum over a vocabulary of 150 000 loses the tail in float32.
        shares = torch.softmax((logits - highest).double() / self._temperature, dim=0)
        tokens = None
        if self._top_p < 1:
            shares, tokens = self._keep_nucleus(shares)
        chosen = self._draw(shares)
        return chosen if tokens is None else int(tokens[chosen])

    def _keep_nucleus(self, shares: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the fewest tokens that have ``top_p`` of the probability together, and their shares of it.

        Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (ICLR 2020).
        """
        shares, tokens = shares.sort(descending=True, stable=True)
        before = shares.cumsum(0) - shares
        count = int((before < self._top_p).sum())
        return shares[:count], tokens[:count]

    def _draw(self, shares: torch.Tensor) -> int:
        """Returns an index, each as probable as its share; they need not add up to one."""
        assert self._generator is not None
        heights = shares.cumsum(0)
        point = torch.rand((), dtype=torch.float64, generator=self._generator).to(shares.device) * heights[-1]
        # To the right of equal heights, so that a share of nothing is never drawn.
        return int(torch.searchsorted(heights, point.unsqueeze(0), right=True).clamp(max=len(shares) - 1))
