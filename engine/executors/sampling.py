"""Choosing tokens from a model's logits: of all answers of a step, one after the other.

Every request has its own source of random numbers, and takes exactly one number from it for each token. So a request with a
seed chooses the same tokens from the same logits again, whatever else is being answered beside it. A seed means the same on
every device: the logits of a step are copied to the CPU all together, which is the only time that a step waits for a device
here, and the choice is made there.

A row of logits is half a megabyte with today's vocabularies of 150 000 tokens. What is done to it stays in a core's cache, so
rows are not put together, and a row's bits can't depend on others. The cost of a row is that of its passes, and these are
counted: a pass takes some 10 us, one with an exponential 50. Nothing is sorted whole, and what a caller says of single tokens
(penalties, biases) touches these tokens alone. Numbers are float32. Sums whose tail matters are float64.

Which tokens are left is decided as in transformers' logits processors, and in their order: top_k, top_p, min_p. A token as
likely as the last one that is left is left, too.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shmring.engine.executors.grammars import Grammar
from shmring.engine.executors.interface import ContextLengthError
from shmring.engine.protocol import SamplingParams

__all__ = ["GREEDY_BELOW", "Choice", "Sampler", "check_sampling", "choose_together", "find_likeliest", "longest_answer"]

_Row: TypeAlias = npt.NDArray[np.float32]
_Indices: TypeAlias = npt.NDArray[np.intp]

#: Below it, a division would overflow float32 for ordinary logits; such a temperature means greedy anyway.
GREEDY_BELOW = 1e-4

# Scores are kept within what float32 takes, with room for biases: a model may have logits of 1e38, and a penalty may be 1e-300.
_MAX_SCORE = 1e38

# torch takes seeds of 64 bits; callers' seeds are any integers.
_SEED_MODULUS = 1 << 64

# OpenAI's API takes so many biases, of -100 to 100.
_MAX_BIASES = 300
_MAX_BIAS = 100
_MAX_STOP_TOKENS = 128

#: What numbers of a request must be, unless they are left out.
_RULES: Sequence[tuple[str, Callable[[float], bool], str]] = (
    ("temperature", lambda value: 0 <= value < math.inf, "a number from 0"),
    ("top_p", lambda value: 0 < value <= 1, "more than 0 and at most 1"),
    ("top_k", lambda value: value >= -1, "at least 1, or 0 or -1 for all tokens"),
    ("min_p", lambda value: 0 <= value <= 1, "from 0 to 1"),
    ("presence_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ("frequency_penalty", lambda value: -2 <= value <= 2, "from -2 to 2"),
    ("logprobs", lambda value: 0 <= value <= 20, "from 0 to 20"),
    ("max_tokens", lambda value: value >= 1, "at least 1"),
    ("repetition_penalty", lambda value: 0 < value < math.inf, "more than 0"),
)

_LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM says the same

# To find the likeliest tokens, the greatest of each 16 is looked at first. That is not worth its pass for more than so many.
_STRIDE = 16
_MAX_LIKELIEST = 2048

# Shares of tokens that are put together: few take no longer than a pass; some, less than to put others in order with them; and
# most, less than to put them in order with zeros.
_FEW, _SOME, _MOST = 0.02, 0.3, 0.9

_SORTED = 1024  # weights that are sorted where a nucleus ends; more are halved before
_ROUNDING = 1e-5  # by which the sum of 150 000 probabilities in float32 may differ from 1
_BLOCK = 512  # shares that are added up before the one that is drawn is looked for among them


class Choice(NamedTuple):
    """A token that was chosen.

    Attributes:
        token: its number.
        seconds: that choosing it took.
        logprob: the logarithm of its probability, as the model has it; 0 if the request asks for none.
        likeliest: so many of the likeliest tokens as the request asks for, with theirs.
    """

    token: int
    seconds: float
    logprob: float = 0.0
    likeliest: Sequence[tuple[int, float]] = ()


def choose_together(rows: Sequence[tuple[Sampler, torch.Tensor, Grammar | None]]) -> list[Choice | Exception]:
    """Chooses the next token of each answer of a step.

    Args:
        rows: of each answer its sampler, logits of shape (vocabulary,), float32, on any device but all on the same, and what
            says which tokens may be next. The logits may be those of several answers.

    Returns:
        Of each answer what :meth:`Sampler.choose` has chosen, or the error with which this answer alone fails.
    """
    began = time.perf_counter()
    choices: list[Choice | Exception] = []
    try:
        logits = _on_the_cpu([row for _, row, _ in rows])
    except Exception as error:  # noqa: BLE001 - if it were raised, the rest of the step would be lost
        return [error] * len(rows)
    copying = (time.perf_counter() - began) / max(1, len(rows))
    for (sampler, _, grammar), row in zip(rows, logits, strict=True):
        began = time.perf_counter() - copying
        try:
            token = sampler.choose(row, grammar)
            described = () if sampler.logprobs is None else find_likeliest(row, token, sampler.logprobs)
            choices.append(Choice(token, time.perf_counter() - began, *described))
        except Exception as error:  # noqa: BLE001 - if it were raised, other answers would lose their token
            choices.append(error)
    return choices


def _on_the_cpu(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if all(row.device.type == "cpu" for row in rows):
        return rows
    return list(torch.stack(list(rows)).cpu())


class Sampler:
    """Chooses the tokens of one answer: greedily at temperature 0, otherwise by chance.

    Args:
        params: how; not its limits of length and its stop texts.
        prompt: the prompt's tokens, shape (tokens,): repeating them counts as a repetition, too.
        ends: tokens that end the answer, and are not chosen before it has ``min_tokens``.
        index: which of the request's answers it is: each has a seed of its own.

    Raises:
        ValueError: a parameter makes no sense.

    Attributes:
        logprobs: of how many of the likeliest tokens the request asks how likely they were; None: of none, nor of the one that
            was chosen.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: torch.Tensor | None = None,
        ends: Collection[int] = (),
        index: int = 0,
    ) -> None:
        check_sampling(params)
        self.logprobs = params.logprobs
        self._params = params
        self._generator: torch.Generator | None = None
        if params.temperature >= GREEDY_BELOW:
            self._generator = torch.Generator("cpu")
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed((params.seed + index) % _SEED_MODULUS)
        self._penalises = params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0
        self._prompt = prompt if params.repetition_penalty != 1 else None
        # By token: how often the answer has it, and whether penalties are for it; and the tokens that they are for.
        self._counts: npt.NDArray[np.int32] | None = None
        self._used: npt.NDArray[np.bool_] | None = None
        self._penalised = array("q")
        self._biased = np.fromiter(params.logit_bias.keys(), np.int64, len(params.logit_bias))
        self._biases = np.fromiter(params.logit_bias.values(), np.float64, len(params.logit_bias))
        self._ends = np.array(sorted(ends) if params.min_tokens else [], np.int64)
        self._chosen = 0

    def choose(self, logits: torch.Tensor, grammar: Grammar | None = None) -> int:
        """Chooses the next token.

        Args:
            logits: shape (vocabulary,), float32, on the CPU. They stay as they are.
            grammar: says which tokens may be next.

        Returns:
            Its number.

        Raises:
            ValueError: ``logit_bias`` names a token that the model does not have; or the grammar is too complex.
            RuntimeError: no token can be chosen from these logits, since they hold NaN or infinity, or forbid each that may be
                next.
        """
        row: _Row = logits.numpy()
        likeliest = int(row.argmax())
        best = float(row[likeliest])
        if not math.isfinite(best):  # NaN and infinity win every maximum
            raise RuntimeError(
                "the model's logits hold NaN or infinity: its weights are damaged, or do not fit its dtype; try dtype float32"
            )
        if self._generator is None:
            scores = self._score(row, 1.0, grammar)
            token = likeliest if scores is row else int(scores.argmax())
        else:
            # Of logits beyond 1e34, the greatest wins at any temperature.
            scale = min(1 / self._params.temperature, _MAX_SCORE / max(1.0, abs(best)))
            scores = self._score(row, scale, grammar)
            token = self._draw(scores)
        if scores is not row and min(row[token], scores[token]) == -math.inf:
            raise RuntimeError("no token can be chosen: the model has no probability for any that may be next")
        self._chosen += 1
        if self._counts is not None and self._used is not None:
            self._counts[token] += 1
            if not self._used[token]:
                self._used[token] = True
                self._penalised.append(token)
        return token

    # -- how likely tokens are -------------------------------------------------------------------------------------------------

    def _score(self, row: _Row, scale: float, grammar: Grammar | None) -> _Row:
        """Returns the logits, times the scale, after all that the request says of single tokens. They are not to be changed."""
        has_ends = self._chosen < self._params.min_tokens and len(self._ends)
        if scale == 1 and grammar is None and not (self._penalises or len(self._biased) or has_ends):
            return row
        with np.errstate(over="ignore"):  # what is less than float32 takes is minus infinity
            scores = row * np.float32(scale)
            if self._penalises:
                self._penalise(row, scale, scores)
            if len(self._biased):
                if (largest := self._biased.max()) >= len(row):
                    raise ValueError(f"logit_bias names token {largest}, and the model's vocabulary size is {len(row)}")
                scores[self._biased] += self._biases * scale
        if has_ends:
            scores[self._ends[self._ends < len(row)]] = -math.inf
        if grammar is not None:
            grammar.restrict(scores)
        return scores

    def _penalise(self, row: _Row, scale: float, scores: _Row) -> None:
        """Takes penalties from the scores of tokens that were used before.

        Source: the rules of OpenAI's API, and transformers' ``RepetitionPenaltyLogitsProcessor``.
        """
        if self._counts is None:
            self._counts = np.zeros(len(row), np.int32)
            self._used = np.zeros(len(row), np.bool_)
            if self._prompt is not None:
                prompt = self._prompt.numpy(force=True)
                self._used[prompt[prompt < len(row)]] = True  # the places of media may be beyond the vocabulary
                self._penalised.frombytes(np.flatnonzero(self._used).tobytes())
        if not self._penalised:
            return
        params = self._params
        tokens = np.frombuffer(self._penalised, np.int64)
        penalised = row[tokens].astype(np.float64)
        if params.repetition_penalty != 1:
            penalty = params.repetition_penalty
            further = np.minimum if penalty > 1 else np.maximum  # that of the two which is right for their sign
            penalised = further(penalised * penalty, penalised / penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._counts[tokens]
            penalised -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        scores[tokens] = np.clip(penalised * scale, -_MAX_SCORE, _MAX_SCORE)

    # -- choosing by chance ----------------------------------------------------------------------------------------------------

    def _draw(self, scores: _Row) -> int:
        """Returns a token, as probable as its score says among those that the request leaves; any if there are none."""
        weights, tokens = self._leave(scores)
        place = _pick(weights, float(torch.rand((), dtype=torch.float64, generator=self._generator)))
        return place if tokens is None else int(tokens[place])

    def _leave(self, scores: _Row) -> tuple[_Row, _Indices | None]:
        """Returns how probable tokens are among those that the request leaves: 0 for those that it does not.

        Returns:
            Weights, not all of them 0; and whose they are, None: of all tokens.
        """
        params = self._params
        tokens = _shortlist(scores, params.top_k)
        if tokens is not None:
            scores = scores[tokens]
        weights: _Row = torch.softmax(torch.from_numpy(scores), 0).numpy()
        if not len(weights) or math.isnan(weights[0]):  # all scores are minus infinity
            return np.ones(1, np.float32), None
        if params.top_k <= 0 and params.top_p == 1 and params.min_p == 0:
            return weights, tokens
        if weights.min() == 0 and np.count_nonzero(has_some := weights > 0) < _MOST * len(weights):
            weights, tokens = _narrow(weights, tokens, has_some)
        # Of those that are left so far: which weight they have at least, and all weights together. And where others are found.
        least, whole, ordered = 0.0, 1.0, weights
        if 0 < params.top_k < len(weights):
            ordered = _partition(weights, len(weights) - params.top_k)[-params.top_k :]
            least = float(ordered[0])
            equal = np.count_nonzero(weights >= least) - params.top_k if params.top_p < 1 else 0
            whole = float(ordered.sum()) + equal * least
        if params.min_p > 0:
            least = max(least, params.min_p * float(weights.max()))
        # Tokens below the mean of what top_p leaves out are left out together.
        bound = max(least, ((1 - params.top_p) * whole - _ROUNDING) / len(weights))
        few = _FEW if params.top_p == 1 else _SOME
        if np.count_nonzero(is_left := weights >= bound) < few * len(weights):
            weights, tokens = _narrow(weights, tokens, is_left)
            ordered = weights
        if params.top_p < 1:
            least = max(least, _end_of_nucleus(ordered, params.top_p * whole))
        return weights * (weights >= least), tokens


def _narrow(weights: _Row, tokens: _Indices | None, is_left: npt.NDArray[np.bool_]) -> tuple[_Row, _Indices]:
    """Returns weights that are left, and whose they are."""
    places = np.flatnonzero(is_left)
    return weights[places], places if tokens is None else tokens[places]


def _partition(weights: _Row, place: int) -> _Row:
    """Returns weights of which those from a place on are the greatest. numpy does that twice as fast with integers, in which
    numbers from 0 have the same order; but a hundred times slower if many of them are 0."""
    return np.partition(weights.view(np.int32), place).view(np.float32)


def _shortlist(numbers: _Row, count: int) -> _Indices | None:
    """Returns where the so many greatest numbers are, those equal to the last of them, and few others; but no minus infinity.

    None: anywhere, since they are too many, or not less than 1.
    """
    columns = len(numbers) // _STRIDE
    if not 0 < count <= min(columns, _MAX_LIKELIEST):
        return None
    greatest = numbers[: columns * _STRIDE].reshape(_STRIDE, columns).max(axis=0)
    least = max(np.partition(greatest, columns - count)[columns - count], np.finfo(np.float32).min)
    of_columns = np.arange(_STRIDE)[:, np.newaxis] * columns + np.flatnonzero(greatest >= least)
    places = np.concatenate([of_columns.ravel(), np.arange(columns * _STRIDE, len(numbers))])
    found: _Indices = places[numbers[places] >= least]
    return found


def _end_of_nucleus(weights: _Row, mass: float) -> float:
    """Returns the last of the fewest greatest weights that have a mass together; 0 if all of them have less."""
    while len(weights) > _SORTED:
        half = len(weights) // 2
        weights = _partition(weights, half)
        upper = float(weights[half:].sum())
        if upper >= mass:
            weights = weights[half:]
        else:
            mass -= upper
            weights = weights[:half]
    weights = np.sort(weights)[::-1]
    place = weights.cumsum(dtype=np.float64).searchsorted(mass)
    return float(weights[place]) if place < len(weights) else 0.0


def _pick(shares: _Row, point: float) -> int:
    """Returns an index, each as probable as its share.

    Args:
        shares: not all of them 0.
        point: from 0 to 1, by chance.
    """
    blocks = np.add.reduceat(shares, np.arange(0, len(shares), _BLOCK)).cumsum(dtype=np.float64)
    height = point * blocks[-1]
    block = _find(blocks, height)
    height -= blocks[block - 1] if block else 0.0
    start = block * _BLOCK
    return start + _find(shares[start : start + _BLOCK].cumsum(dtype=np.float64), height)


def _find(heights: npt.NDArray[np.float64], height: float) -> int:
    """Returns the first that is higher, so that a share of nothing is never picked; of rounding, the last that has a share."""
    return int(heights.searchsorted(min(height, np.nextafter(heights[-1], 0)), side="right"))


def find_likeliest(logits: torch.Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Returns the logarithm of a token's probability, and so many of the likeliest tokens with theirs.

    Args:
        logits: shape (vocabulary,), as the model made them, float32, on the CPU.
        token: that was chosen.
        count: of the others; those without any probability may be missing.
    """
    row: _Row = logits.numpy()
    tokens = _shortlist(row, count)
    if tokens is None:
        tokens = np.arange(len(row))
    tokens = tokens[np.argsort(-row[tokens], kind="stable")[:count]]
    best = int(row.argmax())
    whole = float(row[best]) - math.log(torch.softmax(logits, 0)[best])
    logprobs = np.maximum(row[[token, *tokens]].astype(np.float64) - whole, _LEAST_LOGPROB).tolist()
    return logprobs[0], list(zip(tokens.tolist(), logprobs[1:], strict=True))


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
    for name, is_right, rule in _RULES:
        if (value := getattr(params, name)) is not None and not is_right(value):
            raise ValueError(f"{name} must be {rule}, got {value}")
    if params.min_tokens < 0 or (params.max_tokens is not None and params.min_tokens > params.max_tokens):
        raise ValueError(f"min_tokens must be from 0 to max_tokens, got {params.min_tokens}")
    if params.min_tokens and params.structured_outputs is not None:
        raise ValueError("min_tokens can't be asked for together with a form of the answer, which says when it ends")
    if len(params.stop_token_ids) > _MAX_STOP_TOKENS:
        raise ValueError(f"stop_token_ids names {len(params.stop_token_ids)} tokens, at most {_MAX_STOP_TOKENS} are taken")
    if len(params.logit_bias) > _MAX_BIASES:
        raise ValueError(f"logit_bias names {len(params.logit_bias)} tokens, at most {_MAX_BIASES} are taken")
    for token, bias in params.logit_bias.items():
        if token < 0 or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValueError(f"logit_bias takes tokens from 0 and biases from -100 to 100, got {bias} for token {token}")
