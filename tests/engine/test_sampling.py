"""Tokens are chosen greedily or by chance, as often as their probability says, and the same again for the same seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shmring.engine.executors.sampling import Sampler, find_likeliest
from shmring.engine.protocol import SamplingParams
from tests.tables import for_each

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5])


def draw(count: int, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params))
    return [sampler.choose(logits) for _ in range(count)]


@for_each("temperature", [0, 1e-6])
def test_without_temperature_the_likeliest_token_is_chosen(temperature: float) -> None:
    assert draw(5, temperature=temperature, seed=1) == [0] * 5


def test_equal_logits_are_no_problem_for_the_greedy() -> None:
    assert draw(2, torch.zeros(7), temperature=0) == [0, 0]


@for_each("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_their_probability_says(temperature: float) -> None:
    count = 4000
    drawn = draw(count, temperature=temperature, seed=3)
    for token, share in enumerate(torch.softmax(LOGITS / temperature, 0).tolist()):
        deviation = math.sqrt(count * share * (1 - share))
        assert abs(drawn.count(token) - count * share) < 5 * deviation


@for_each("top_p", [0.01, 0.3, 0.5, 0.75, 0.9, 0.999, 1.0])
def test_top_p_leaves_the_tokens_that_transformers_leaves(top_p: float) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 2
    warped = transformers.TopPLogitsWarper(top_p)(None, logits.unsqueeze(0))[0] if top_p < 1 else logits
    left = set(torch.isfinite(warped).nonzero().flatten().tolist())
    drawn = draw(3000, logits, temperature=1.0, top_p=top_p, seed=1)
    assert set(drawn) <= left
    probable = {token for token in left if torch.softmax(warped, 0)[token] > 0.005}
    assert probable <= set(drawn)


def test_top_k_and_min_p_leave_the_likeliest() -> None:
    assert set(draw(500, temperature=2.0, top_k=2, seed=1)) == {0, 4}
    assert set(draw(500, temperature=2.0, top_k=-1, seed=1)) == {0, 1, 2, 3, 4}
    assert set(draw(500, min_p=0.5, seed=1)) == {0, 4}  # exp(1.5 - 2) = 0.61 of the likeliest, exp(1 - 2) = 0.37


@for_each("temperature", [0, 1.0])
def test_a_bias_excludes_or_forces_a_token(temperature: float) -> None:
    assert set(draw(50, temperature=temperature, logit_bias={3: 100.0}, seed=1)) == {3}
    assert 0 not in draw(200, temperature=temperature, logit_bias={0: -100.0}, seed=1)


def test_a_penalty_lowers_what_the_prompt_or_the_answer_has() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=3.0)
    sampler = Sampler(params)
    assert [sampler.choose(LOGITS) for _ in range(3)] == [0, 4, 1]  # 2 / 3 and 1.5 / 3 are less than 1
    assert Sampler(params, torch.tensor([0, 4])).choose(LOGITS) == 1


def test_a_token_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="vocabulary size is 5"):
        draw(1, logit_bias={5: 1.0})


def test_a_seed_repeats_and_another_differs() -> None:
    params = {"temperature": 1.5, "top_p": 0.95}
    first = draw(60, seed=11, **params)
    assert draw(60, seed=11, **params) == first
    assert draw(60, seed=12, **params) != first


def test_without_a_seed_answers_differ() -> None:
    assert draw(60, temperature=1.5) != draw(60, temperature=1.5)


@for_each("seed", [0, -1, -(2**63), 2**64 - 1, 2**80])
def test_any_integer_is_a_seed(seed: int) -> None:
    assert draw(9, temperature=1.0, seed=seed) == draw(9, temperature=1.0, seed=seed)


def test_requests_do_not_take_numbers_from_each_other_or_from_torch() -> None:
    alone = draw(30, temperature=1.0, seed=4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    sampler, other = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (4, 5))
    beside = []
    for _ in range(30):
        other.choose(LOGITS)
        beside.append(sampler.choose(LOGITS))
    assert beside == alone
    assert torch.equal(torch.get_rng_state(), state)


def test_what_has_no_probability_is_never_chosen() -> None:
    logits = torch.full((50,), -math.inf)
    logits[[3, 30]] = 0.0
    assert set(draw(200, logits, temperature=1.0, seed=1)) == {3, 30}
    assert draw(1, logits, temperature=0) == [3]


def test_huge_logits_at_a_low_temperature_do_not_overflow() -> None:
    assert draw(3, torch.tensor([3e38, 0.0, -3e38]), temperature=1e-3, seed=1) == [0, 0, 0]


@for_each("bad", [math.nan, math.inf])
@for_each("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    logits = LOGITS.clone()
    logits[2] = bad
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        draw(1, logits, temperature=temperature)
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        draw(1, torch.full((4,), -math.inf), temperature=temperature)


@for_each("params", [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}])
def test_a_temperature_that_makes_no_sense_is_refused(params: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        Sampler(SamplingParams(**params))


@for_each(
    "params",
    [
        {"top_k": -2},
        {"min_p": 1.1},
        {"min_p": math.nan},
        {"presence_penalty": 2.1},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": math.nan},
        {"min_tokens": -1},
        {"min_tokens": 5, "max_tokens": 4},
        {"logprobs": 21},
        {"logprobs": -1},
        {"stop_token_ids": list(range(129))},
        {"repetition_penalty": 0},
        {"repetition_penalty": math.nan},
        {"logit_bias": {1: 101.0}},
        {"logit_bias": {1: math.nan}},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
    ],
    ids=str,
)
def test_other_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(params))} .*[0-9]"):
        Sampler(SamplingParams(**params))


@for_each("top_p", [0, -1, 1.01, math.nan])
def test_a_top_p_that_makes_no_sense_is_refused(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p must be"):
        Sampler(SamplingParams(top_p=top_p))


# -- penalties, ends and probabilities ------------------------------------------------------------------------------------


class Seen:
    """In the place of a grammar: keeps the scores that it is given, which are those after all that changes them."""

    def __init__(self) -> None:
        self.scores: list[torch.Tensor] = []

    def restrict(self, scores: torch.Tensor) -> torch.Tensor:
        self.scores.append(scores.clone())
        return scores


def scores_of(prompt: list[int], chosen: list[int], logits: torch.Tensor, **params: Any) -> torch.Tensor:
    """The scores of the next token, after others were chosen."""
    sampler = Sampler(SamplingParams(temperature=0, **params), torch.tensor(prompt))
    for token in chosen:
        assert sampler.choose(torch.full_like(logits, -1e6).index_fill(0, torch.tensor([token]), 1e6)) == token
    seen = Seen()
    sampler.choose(logits, seen)  # type: ignore[arg-type]
    return seen.scores[0]


@for_each("penalty", [0.5, 1.3, 2.0])
def test_the_penalty_of_repetitions_is_that_of_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(40, generator=torch.Generator().manual_seed(5)) * 3
    prompt, chosen = [1, 2, 2, 3], [3, 7, 7, 9]
    process = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    expected = process(torch.tensor([prompt + chosen]), logits.double().unsqueeze(0))[0]
    torch.testing.assert_close(scores_of(prompt, chosen, logits, repetition_penalty=penalty), expected, rtol=0, atol=1e-12)


def test_presence_and_frequency_count_what_the_answer_has_and_not_the_prompt() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6))
    scores = scores_of([1, 2, 2], [3, 7, 7, 7], logits, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.double()
    expected[3] -= 0.5 + 0.25
    expected[7] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)


def test_a_penalty_keeps_an_answer_from_repeating_itself() -> None:
    assert draw(5, temperature=0, frequency_penalty=2, logit_bias={0: 1.0}) == [0, 4, 0, 1, 2]
    assert draw(4, temperature=0, presence_penalty=-2) == [0] * 4


def test_no_end_is_chosen_before_min_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    params = SamplingParams(temperature=0, min_tokens=3)
    sampler = Sampler(params, ends={0, 4, 99})  # the vocabulary has five
    process = transformers.MinNewTokensLengthLogitsProcessor(0, 3, eos_token_id=[0, 4])
    for chosen in range(6):
        expected = process(torch.zeros((1, chosen), dtype=torch.long), LOGITS.unsqueeze(0))[0]
        assert sampler.choose(LOGITS) == int(expected.argmax())


def test_a_token_of_a_prompt_that_the_head_does_not_have_is_no_problem() -> None:
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), torch.tensor([0, 5, 900]))
    assert sampler.choose(LOGITS) == 4


def test_how_likely_tokens_were() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(7))
    logits[9] = -math.inf
    expected = torch.log_softmax(logits.double(), 0)
    logprob, likeliest = find_likeliest(logits, 13, 5)
    assert logprob == pytest.approx(float(expected[13]))
    assert [token for token, _ in likeliest] == expected.argsort(descending=True)[:5].tolist()
    assert [value for _, value in likeliest] == sorted((value for _, value in likeliest), reverse=True)
    assert find_likeliest(logits, 9, 0) == (-9999.0, [])  # JSON has no infinity
    assert len(find_likeliest(logits[:3], 0, 20)[1]) == 3


def test_each_answer_of_a_request_has_a_seed_of_its_own() -> None:
    def drawn(seed: int, index: int) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, seed=seed), index=index)
        return [sampler.choose(LOGITS) for _ in range(40)]

    assert drawn(7, 0) != drawn(7, 1)
    assert drawn(7, 1) == drawn(8, 0)
