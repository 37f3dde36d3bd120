"""Choosing a token from a model's logits.

Logits processors of transformers decide how likely each token is; the choice is made here. Every request has its own source of
random numbers, and takes exactly one number from it for each token. So a request with a seed chooses the same tokens from the
same logits again, whatever else is being answered beside it. The numbers are drawn on the CPU also where the logits are
elsewhere: a seed means the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from shmring.engine.executors.checkpoint import import_transformers
from shmring.engine.protocol import SamplingParams

__all__ = ["Sampler"]

_LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# Below it, a division would overflow float32 for ordinary logits; such a temperature means greedy anyway.
_GREEDY_BELOW = 1e-4

# torch takes seeds of 64 bits; callers' seeds are any integers.
_SEED_MODULUS = 1 << 64

# OpenAI's API takes so many biases, of -100 to 100.
_MAX_BIASES = 300
_MAX_BIAS = 100


class Sampler:
    """Chooses the tokens of one request: greedily at temperature 0, otherwise by chance.

    Args:
        params: how; not its limits of length and its stop texts.
        prompt: the prompt's tokens, shape (tokens,): repeating them counts as a repetition, too.

    Raises:
        ValueError: a parameter makes no sense.
    """

    def __init__(self, params: SamplingParams, prompt: torch.Tensor | None = None) -> None:
        _check(params)
        self._generator: torch.Generator | None = None
        if params.temperature >= _GREEDY_BELOW:
            self._generator = torch.Generator("cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed % _SEED_MODULUS)
        self._processors = _make_processors(params, by_chance=self._generator is not None)
        self._remembers = params.repetition_penalty != 1
        self._tokens: list[int] = [] if prompt is None or not self._remembers else prompt.tolist()

    def choose(self, logits: torch.Tensor) -> int:
        """Chooses the next token.

        Args:
            logits: shape (vocabulary,), float32, on any device.

        Returns:
            Its number.

        Raises:
            ValueError: ``logit_bias`` names a token that the model does not have.
            RuntimeError: no token can be chosen from these logits, since they hold NaN or infinity.
        """
        best, likeliest = logits.max(dim=0)
        if not torch.isfinite(best):  # NaN and infinity win every maximum
            raise RuntimeError(
                "the model's logits hold NaN or infinity: its weights are damaged, or do not fit its dtype; try dtype float32"
            )
        if self._generator is None and not self._processors:
            return int(likeliest)
        tokens = torch.tensor([self._tokens], dtype=torch.long, device=logits.device)
        # In float64, because a cumulative sum over a vocabulary of 150 000 loses the tail in float32.
        scores = logits.double().unsqueeze(0)
        for process in self._processors:
            scores = process(tokens, scores)
        token = int(scores.argmax()) if self._generator is None else self._draw(torch.softmax(scores[0], dim=0))
        if self._remembers:
            self._tokens.append(token)
        return token

    def _draw(self, shares: torch.Tensor) -> int:
        """Returns an index, each as probable as its share."""
        heights = shares.cumsum(0)
        point = torch.rand((), dtype=torch.float64, generator=self._generator).to(shares.device) * heights[-1]
        # To the right of equal heights, so that a share of nothing is never drawn.
        return int(torch.searchsorted(heights, point.unsqueeze(0), right=True).clamp(max=len(shares) - 1))


def _make_processors(params: SamplingParams, *, by_chance: bool) -> list[_LogitsProcessor]:
    transformers = import_transformers()
    processors: list[_LogitsProcessor] = []
    if params.repetition_penalty != 1:
        processors.append(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.logit_bias:
        biases = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        processors.append(transformers.SequenceBiasLogitsProcessor(biases))
    if by_chance:
        if params.temperature != 1:
            processors.append(transformers.TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            processors.append(transformers.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(transformers.TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            processors.append(transformers.MinPLogitsWarper(params.min_p))
    return processors


def _check(params: SamplingParams) -> None:
    if not 0 <= params.temperature < math.inf:
        raise ValueError(f"temperature must be a number from 0, got {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be more than 0 and at most 1, got {params.top_p}")
    if params.top_k < -1:
        raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {params.top_k}")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p must be from 0 to 1, got {params.min_p}")
    if not 0 < params.repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty must be more than 0, got {params.repetition_penalty}")
    if len(params.logit_bias) > _MAX_BIASES:
        raise ValueError(f"logit_bias names {len(params.logit_bias)} tokens, at most {_MAX_BIASES} are taken")
    for token, bias in params.logit_bias.items():
        if token < 0 or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValueError(f"logit_bias takes tokens from 0 and biases from -100 to 100, got {bias} for token {token}")
