"""Choosing a token from a model's logits.

Logits processors of transformers decide how likely each token is; the choice is made here. Every request has its own source of
random numbers, and takes exactly one number from it for each token. So a request with a seed chooses the same tokens from the
same logits again, whatever else is being answered beside it. The numbers are drawn on the CPU also where the logits are
elsewhere: a seed means the same on every device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection

import torch

from shmring.engine.executors.checkpoint import import_transformers
from shmring.engine.executors.grammars import Grammar
from shmring.engine.executors.interface import ContextLengthError
from shmring.engine.protocol import SamplingParams

__all__ = ["GREEDY_BELOW", "Sampler", "check_sampling", "find_likeliest", "longest_answer"]

# The first argument is for the tokens before, at which none of those that are used looks.
_LogitsProcessor = Callable[[None, torch.Tensor], torch.Tensor]

#: Below it, a division would overflow float32 for ordinary logits; such a temperature means greedy anyway.
GREEDY_BELOW = 1e-4

# torch takes seeds of 64 bits; callers' seeds are any integers.
_SEED_MODULUS = 1 << 64

# OpenAI's API takes so many biases, of -100 to 100.
_MAX_BIASES = 300
_MAX_BIAS = 100
_MAX_PENALTY = 2
_MAX_LOGPROBS = 20
_MAX_STOP_TOKENS = 128

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM says the same


class Sampler:
    """Chooses the tokens of one answer: greedily at temperature 0, otherwise by chance.

    Args:
        params: how; not its limits of length and its stop texts.
        prompt: the prompt's tokens, shape (tokens,): repeating them counts as a repetition, too.
        ends: tokens that end the answer, and are not chosen before it has ``min_tokens``.
        index: which of the request's answers it is: each has a seed of its own.

    Raises:
        ValueError: a parameter makes no sense.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: torch.Tensor | None = None,
        ends: Collection[int] = (),
        index: int = 0,
    ) -> None:
        check_sampling(params)
        self._params = params
        self._generator: torch.Generator | None = None
        if params.temperature >= GREEDY_BELOW:
            self._generator = torch.Generator("cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed((params.seed + index) % _SEED_MODULUS)
        self._biases, self._warpers = _make_processors(params, by_chance=self._generator is not None)
        self._penalises = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._prompt = prompt if self._penalises and params.repetition_penalty != 1 else None
        self._ends = sorted(ends) if params.min_tokens else []
        self._chosen = 0
        # By token: whether the prompt has it, and how often the answer does.
        self._in_prompt: torch.Tensor | None = None
        self._counts: torch.Tensor | None = None

    def choose(self, logits: torch.Tensor, grammar: Grammar | None = None) -> int:
        """Chooses the next token.

        Args:
            logits: shape (vocabulary,), float32, on any device.
            grammar: says which tokens may be next.

        Returns:
            Its number.

        Raises:
            ValueError: ``logit_bias`` names a token that the model does not have; or the grammar is too complex.
            RuntimeError: no token can be chosen from these logits, since they hold NaN or infinity.
        """
        best, likeliest = _greatest(logits)
        if not math.isfinite(best):  # NaN and infinity win every maximum
            raise RuntimeError(
                "the model's logits hold NaN or infinity: its weights are damaged, or do not fit its dtype; try dtype float32"
            )
        waits = self._chosen < self._params.min_tokens
        is_plain = not (self._penalises or self._biases or self._warpers or grammar or (waits and self._ends))
        if self._generator is None and is_plain:
            token = likeliest
        else:
            # In float64, because a cumulative sum over a vocabulary of 150 000 loses the tail in float32.
            scores = self._penalise(logits.double()).unsqueeze(0)
            for process in self._biases:
                scores = process(None, scores)
            if waits and self._ends:
                scores[0, [end for end in self._ends if end < len(logits)]] = -math.inf
            if grammar is not None:
                scores = grammar.restrict(scores[0]).unsqueeze(0)
            for process in self._warpers:
                scores = process(None, scores)
            token = int(scores.argmax()) if self._generator is None else self._draw(torch.softmax(scores[0], dim=0))
        self._chosen += 1
        if self._counts is not None:
            self._counts[token] += 1
        return token

    def _penalise(self, scores: torch.Tensor) -> torch.Tensor:
        """Takes penalties from the scores of tokens that were used before; the scores are its own to change.

        Source: the rules of OpenAI's API, and transformers' ``RepetitionPenaltyLogitsProcessor``.
        """
        if not self._penalises:
            return scores
        if self._counts is None:
            self._counts = torch.zeros_like(scores)
            self._in_prompt = torch.zeros_like(scores, dtype=torch.bool)
            if self._prompt is not None:
                tokens = self._prompt.to(scores.device)
                self._in_prompt[tokens[tokens < len(scores)]] = True  # the places of media may be beyond the vocabulary
        assert self._in_prompt is not None, "made with the counts"
        params = self._params
        if params.repetition_penalty != 1:
            penalised = torch.where(scores < 0, scores * params.repetition_penalty, scores / params.repetition_penalty)
            scores = torch.where(self._in_prompt | (self._counts > 0), penalised, scores)
        return scores - params.frequency_penalty * self._counts - params.presence_penalty * (self._counts > 0)

    def _draw(self, shares: torch.Tensor) -> int:
        """Returns an index, each as probable as its share."""
        heights = shares.cumsum(0)
        point = torch.rand((), dtype=torch.float64, generator=self._generator).to(shares.device) * heights[-1]
        # To the right of equal heights, so that a share of nothing is never drawn.
        return int(torch.searchsorted(heights, point.unsqueeze(0), right=True).clamp(max=len(shares) - 1))


def _greatest(logits: torch.Tensor) -> tuple[float, int]:
    """Returns the greatest of the logits and its index; the first, if there are several."""
    if logits.device.type == "cpu":  # numpy takes a tenth of torch's time there
        numbers = logits.numpy()
        index = int(numbers.argmax())
        return float(numbers[index]), index
    best, likeliest = logits.max(dim=0)
    return float(best), int(likeliest)


def find_likeliest(logits: torch.Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Returns the logarithm of a token's probability, and so many of the likeliest tokens with theirs.

    Args:
        logits: shape (vocabulary,), as the model made them.
        token: that was chosen.
        count: of the others.
    """
    logprobs = torch.log_softmax(logits.double(), dim=0).clamp(min=_LEAST_LOGPROB)
    values, tokens = logprobs.topk(min(count, len(logprobs)))
    return float(logprobs[token]), list(zip(tokens.tolist(), values.tolist(), strict=True))


def _make_processors(params: SamplingParams, *, by_chance: bool) -> tuple[list[_LogitsProcessor], list[_LogitsProcessor]]:
    """Returns what changes how likely tokens are, and what leaves some of them out."""
    transformers = import_transformers()
    biases: list[_LogitsProcessor] = []
    warpers: list[_LogitsProcessor] = []
    if params.logit_bias:
        sequences = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
        biases.append(transformers.SequenceBiasLogitsProcessor(sequences))
    if by_chance:
        if params.temperature != 1:
            warpers.append(transformers.TemperatureLogitsWarper(params.temperature))
        if params.top_k > 0:
            warpers.append(transformers.TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            warpers.append(transformers.TopPLogitsWarper(params.top_p))
        if params.min_p > 0:
            warpers.append(transformers.MinPLogitsWarper(params.min_p))
    return biases, warpers


def longest_answer(params: SamplingParams, prompt_tokens: int, max_model_len: int) -> int:
    """Returns how many tokens an answer may have. Without ``max_tokens``, it may be as long as the limit of logprobs lets it.

    Raises:
        ContextLengthError: prompt and answer do not fit the model together.
        ValueError: they have too many logprobs.
    """
    room = ContextLengthError.check(prompt_tokens, params.max_tokens, max_model_len)
    described = params.max_described_tokens()
    return room if described is None else min(room, described)


def check_sampling(params: SamplingParams) -> None:
    """Raises ValueError if a parameter makes no sense."""
    if not 0 <= params.temperature < math.inf:
        raise ValueError(f"temperature must be a number from 0, got {params.temperature}")
    if not 0 < params.top_p <= 1:
        raise ValueError(f"top_p must be more than 0 and at most 1, got {params.top_p}")
    if params.top_k < -1:
        raise ValueError(f"top_k must be at least 1, or 0 or -1 for all tokens, got {params.top_k}")
    if not 0 <= params.min_p <= 1:
        raise ValueError(f"min_p must be from 0 to 1, got {params.min_p}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -_MAX_PENALTY <= getattr(params, name) <= _MAX_PENALTY:
            raise ValueError(f"{name} must be from -2 to 2, got {getattr(params, name)}")
    if params.logprobs is not None and not 0 <= params.logprobs <= _MAX_LOGPROBS:
        raise ValueError(f"logprobs must be from 0 to {_MAX_LOGPROBS}, got {params.logprobs}")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        raise ValueError(f"min_tokens must be from 0 to max_tokens, got {params.min_tokens}")
    if params.min_tokens and params.structured_outputs is not None:
        raise ValueError("min_tokens can't be asked for together with a form of the answer, which says when it ends")
    if not 0 < params.repetition_penalty < math.inf:
        raise ValueError(f"repetition_penalty must be more than 0, got {params.repetition_penalty}")
    if len(params.stop_token_ids) > _MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids names {len(params.stop_token_ids)} tokens, at most {_MAX_STOP_TOKENS} are taken")
    if len(params.logit_bias) > _MAX_BIASES:
        raise ValueError(f"logit_bias names {len(params.logit_bias)} tokens, at most {_MAX_BIASES} are taken")
    for token, bias in params.logit_bias.items():
        if token < 0 or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValueError(f"logit_bias takes tokens from 0 and biases from -100 to 100, got {bias} for token {token}")
