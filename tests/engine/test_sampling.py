"""Tokens are chosen greedily or by chance, as often as their probability says, and the same again for the same seed."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from shmring.engine.executors import sampling
from shmring.engine.executors.sampling import Choice, Sampler, choose_together, find_likeliest
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


def test_tokens_as_likely_as_the_last_one_that_is_left_are_left_and_count() -> None:
    logits = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, -1.0])
    assert set(draw(300, logits, top_k=2, seed=1)) == {0, 1, 2, 3, 4}
    # The first has 0.65 of their probability, and 0.88 of that of two tokens.
    assert set(draw(300, logits, top_k=2, top_p=0.7, seed=1)) == {0, 1, 2, 3, 4}
    assert set(draw(300, logits, top_k=2, top_p=0.6, seed=1)) == {0}


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
    assert draw(3, torch.tensor([0.0, 3e38, -3e38]), temperature=1e-3, seed=1) == [1, 1, 1]


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

    def restrict(self, scores: Any) -> None:
        self.scores.append(torch.from_numpy(scores.copy()))


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
    expected = process(torch.tensor([prompt + chosen]), logits.unsqueeze(0))[0]
    torch.testing.assert_close(scores_of(prompt, chosen, logits, repetition_penalty=penalty), expected, rtol=0, atol=1e-6)


def test_presence_and_frequency_count_what_the_answer_has_and_not_the_prompt() -> None:
    logits = torch.randn(40, generator=torch.Generator().manual_seed(6))
    scores = scores_of([1, 2, 2], [3, 7, 7, 7], logits, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    expected[3] -= 0.5 + 0.25
    expected[7] -= 0.5 + 3 * 0.25
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-6)


def test_a_token_is_penalised_once_however_often_it_is_used() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, repetition_penalty=1.1), torch.tensor([0, 1, 1, 0]))
    for _ in range(100):
        sampler.choose(LOGITS)
    assert len(sampler._penalised) <= len(LOGITS)


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


# -- as transformers does it, and as a sort does ---------------------------------------------------------------------------

# Some of the ways to find what is left are for large vocabularies alone; and numbers may be equal.
VOCABULARIES = st.sampled_from([5, 40, 700, 20_000])
SPREADS = st.sampled_from([0.1, 1.0, 4.0, 30.0])
SEEDS = st.integers(0, 2**32)
TOP_K = st.sampled_from([0, 1, 3, 50, 1100, 5000, 15_000, 10**9])
SHARES = st.one_of(st.floats(0, 1), st.floats(0.9, 1), st.sampled_from([1e-9, 0.5, 1 - 1e-7, 1.0]))


def logits_of(vocabulary: int, spread: float, seed: int) -> torch.Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


@given(VOCABULARIES, SPREADS, SEEDS, st.data())
def test_every_knob_means_what_it_means_to_transformers(vocabulary: int, spread: float, seed: int, data: st.DataObject) -> None:
    """With the same random number, the same token is chosen; but by rounding, a limit may be a little to either side."""
    transformers = pytest.importorskip("transformers")
    logits = logits_of(vocabulary, spread, seed)
    tokens = st.integers(0, vocabulary - 1)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0])),
        top_k=data.draw(TOP_K),
        top_p=max(1e-9, data.draw(SHARES)),
        min_p=data.draw(st.sampled_from([0.0, 0.001, 0.1, 1.0])),
        presence_penalty=data.draw(st.sampled_from([0.0, 1.5, -0.5])),
        frequency_penalty=data.draw(st.sampled_from([0.0, 0.25, -2.0])),
        repetition_penalty=data.draw(st.sampled_from([1.0, 1.3, 0.8])),
        logit_bias=data.draw(st.dictionaries(tokens, st.floats(-20, 20), max_size=9)),
        min_tokens=data.draw(st.sampled_from([0, 6])),
        seed=seed,
    )
    prompt, ends = data.draw(st.lists(tokens, min_size=1, max_size=9)), sorted(data.draw(st.sets(tokens, max_size=2)))
    sampler = Sampler(params, torch.tensor(prompt), ends)
    generator = torch.Generator().manual_seed(seed)
    answer: list[int] = []
    for _ in range(8):
        written, scores = torch.tensor([prompt + answer]), logits.double().unsqueeze(0)
        if params.repetition_penalty != 1:
            scores = transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(written, scores)
        for token, count in Counter(answer).items():
            scores[0, token] -= params.presence_penalty + count * params.frequency_penalty
        if params.logit_bias:
            biases = [[[token], float(bias)] for token, bias in params.logit_bias.items()]
            scores = transformers.SequenceBiasLogitsProcessor(biases)(written, scores)
        if params.min_tokens and ends:
            scores = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), params.min_tokens, ends)(written, scores)
        answer.append(sampler.choose(logits))
        if params.temperature == 0:
            assert float(scores.max() - scores[0, answer[-1]]) < 1e-5
            continue
        scores = transformers.TemperatureLogitsWarper(params.temperature)(written, scores)
        point = float(torch.rand((), dtype=torch.float64, generator=generator))
        assert answer[-1] in {
            drawn_by_transformers(scores, params, margin, point + at) for margin in (-2e-5, 0, 2e-5) for at in (-2e-5, 0, 2e-5)
        }


def drawn_by_transformers(scores: torch.Tensor, params: SamplingParams, margin: float, point: float) -> int:
    """Returns what a point picks among the tokens that transformers leaves, where limits are further by a margin."""
    transformers = pytest.importorskip("transformers")
    if params.top_k > 0:
        # Weights of less than float32 takes are equal to each other, and none is ever chosen.
        scores = transformers.TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p + margin < 1:
        scores = transformers.TopPLogitsWarper(max(0.0, params.top_p + margin))(None, scores)
    if params.min_p > 0:
        scores = transformers.MinPLogitsWarper(min(1.0, params.min_p * (1 + margin)))(None, scores)
    heights = torch.softmax(scores[0], 0).cumsum(0)
    height = heights[-1] * min(max(point, 0.0), 1 - 1e-9)
    return int(torch.searchsorted(heights, height, right=True))


@given(VOCABULARIES, SPREADS, SEEDS, TOP_K, SHARES, st.sampled_from([0.0, 1e-6, 0.03]), st.booleans())
@example(20_000, 1.0, 1, 5000, 0.9, 0.0, True)
@example(20_000, 1.0, 2, 15_000, 0.5, 0.0, True)
@example(20_000, 1.0, 3, 5000, 0.9, 0.0, False)
@example(20_000, 0.1, 4, 0, 0.9, 0.0, False)
@example(20_000, 0.1, 5, 0, 0.05, 0.0, False)
@example(20_000, 4.0, 6, 50, 0.8, 0.0, True)
@example(20_000, 1.0, 7, 1100, 1.0, 0.0, True)
@example(20_000, 30.0, 8, 5000, 1.0, 0.0, False)
@example(20_000, 1.0, 9, 3, 1.0, 0.0, False)
def test_what_is_left_is_what_an_exact_sort_leaves(
    vocabulary: int, spread: float, seed: int, top_k: int, top_p: float, min_p: float, rounded: bool
) -> None:
    """Tokens as likely as the last one that is left are left, too. Only rounding decides about a token at the very limit."""
    logits = logits_of(vocabulary, spread, seed)
    scores = ((logits * 4).round() / 4 if rounded else logits).numpy()
    top_p = max(1e-9, top_p)
    weights, tokens = Sampler(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))._leave(scores)
    places = np.flatnonzero(weights)
    left = set((places if tokens is None else tokens[places]).tolist())
    ordered = np.sort(scores.astype(np.float64))[::-1]
    if 0 < top_k < vocabulary:
        ordered = ordered[ordered >= ordered[top_k - 1]]
    shares = np.exp(ordered - ordered[0])
    limits = []
    for rounding, nothing in ((-1e-5, 1e-43), (1e-5, 1e-47)):
        before = np.concatenate([[0], np.cumsum(shares)[:-1] / math.fsum(shares)])  # how probable the likelier ones are
        nucleus = ordered[before < top_p + rounding] if top_p < 1 else ordered
        limits.append(max(nucleus.min(initial=ordered[0]), ordered[0] + math.log(max(min_p * (1 - rounding), nothing))))
    assert set(np.flatnonzero(scores >= limits[0])) <= left
    assert left <= set(np.flatnonzero(scores >= limits[1] - 1e-6))
    if tokens is not None:
        assert (np.diff(tokens) > 0).all()
    expected = np.exp(scores - ordered[0])[sorted(left)]
    np.testing.assert_allclose(weights[places] / weights.sum(dtype=float), expected / expected.sum(dtype=float), 1e-4, 1e-38)


@given(st.integers(1, 3000), SEEDS, st.sampled_from([0.0, 0.5, 0.99]), st.lists(st.floats(0, 1, exclude_max=True)))
@example(2000, 1, 0.9, [0.0, 1 - 2**-53, 0.5])
def test_a_point_picks_the_share_in_which_it_lies(count: int, seed: int, nothing: float, points: list[float]) -> None:
    numbers = np.random.default_rng(seed)
    shares = (numbers.random(count) * (numbers.random(count) >= nothing)).astype(np.float32)
    shares[count // 2] = 1.0
    heights = np.cumsum(shares, dtype=float)
    for point in points:
        place = sampling._pick(shares, point)
        assert shares[place] > 0
        assert heights[place] >= point * heights[-1] * (1 - 1e-6)
        assert heights[place] - shares[place] <= point * heights[-1] * (1 + 1e-6)


# -- answers of a step -----------------------------------------------------------------------------------------------------


@for_each("vocabulary", [50, 20_000])
@for_each("count", [1, 2, 3, 5, 8, 16])
def test_an_answer_with_a_seed_does_not_depend_on_what_is_chosen_beside_it(vocabulary: int, count: int) -> None:
    params = [
        SamplingParams(seed=3, temperature=0.9, top_p=0.95, repetition_penalty=1.2, logprobs=5, logit_bias={7: 2.0}),
        SamplingParams(seed=4, temperature=2.0),
        SamplingParams(temperature=0, logprobs=20, frequency_penalty=0.5),
        SamplingParams(seed=5, top_k=30, min_p=0.1),
        SamplingParams(seed=6, top_k=12_000, top_p=0.99999),
    ]
    rows = [(params[number % 5], logits_of(vocabulary, 2.0 + number, number)) for number in range(count)]
    prompt = torch.tensor([1, 2, 7])
    alone = []
    for of_one, logits in rows:
        sampler = Sampler(of_one, prompt)
        alone.append([told(choose_together([(sampler, logits.clone(), None)])[0]) for _ in range(6)])
    # Beside each other, and as views of one matrix, as a step makes them.
    matrix = torch.stack([logits for _, logits in rows])
    samplers = [Sampler(of_one, prompt) for of_one, _ in rows]
    together = [
        choose_together([(sampler, row, None) for sampler, row in zip(samplers, matrix, strict=True)]) for _ in range(6)
    ]
    assert [[told(choice) for choice in of_one] for of_one in zip(*together, strict=True)] == alone
    assert torch.equal(matrix, torch.stack([logits for _, logits in rows])), "the logits stay as they are"


def told(choice: Choice | Exception) -> tuple[int, float, list[tuple[int, float]]]:
    assert isinstance(choice, Choice), choice
    assert choice.seconds > 0
    return choice.token, choice.logprob, list(choice.likeliest)


def test_an_answer_that_can_not_go_on_fails_alone() -> None:
    bad = LOGITS.clone()
    bad[1] = math.nan
    forbidden = torch.full((5,), -math.inf)
    forbidden[2] = 0.0
    rows = [
        (SamplingParams(seed=1), LOGITS),
        (SamplingParams(seed=1), bad),
        (SamplingParams(seed=1, logit_bias={5: 1.0}), LOGITS),
        (SamplingParams(seed=1, min_tokens=1), forbidden),
        (SamplingParams(temperature=0, min_tokens=1), forbidden),
        (SamplingParams(temperature=0), LOGITS),
    ]
    first, *errors, last = choose_together([(Sampler(params, ends={2}), logits, None) for params, logits in rows])
    assert told(first)[0] == Sampler(SamplingParams(seed=1)).choose(LOGITS)
    assert told(last) == (0, 0.0, [])
    texts = [("NaN or infinity", RuntimeError), ("vocabulary size is 5", ValueError), *[("no probability", RuntimeError)] * 2]
    for error, (text, kind) in zip(errors, texts, strict=True):
        assert isinstance(error, kind)
        assert text in str(error)


@for_each("vocabulary", [40, 20_000])
@for_each("params", [{}, {"top_k": 20}, {"top_k": 1100}, {"top_k": 15_000}, {"top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_where_few_tokens_may_be_next_one_of_them_is_chosen(vocabulary: int, params: dict[str, Any]) -> None:
    class Allowed:
        def restrict(self, scores: Any) -> None:
            scores[np.setdiff1d(np.arange(vocabulary), tokens)] = -math.inf

    logits = logits_of(vocabulary, 4.0, 1)
    for tokens in ([3], [1, 37], [0, 5, 39]):
        sampler = Sampler(SamplingParams(seed=2, temperature=4.0, **params))
        assert {sampler.choose(logits, Allowed()) for _ in range(9)} <= set(tokens)  # type: ignore[arg-type]
    tokens = []
    with pytest.raises(RuntimeError, match="no token can be chosen"):
        sampler.choose(logits, Allowed())  # type: ignore[arg-type]


@for_each("temperature", [0, 1e-3, 1.0])
def test_penalties_and_logits_beyond_float32_are_no_problem(temperature: float) -> None:
    """Scores of the prompt's tokens 0 and 1 come to minus and plus infinity, or to 0."""
    logits = torch.tensor([-3e38, 3e38, 0.0, 1.0])
    for penalty, likeliest in ((1e-300, {1}), (1e300, {3} if temperature == 0 else {1, 2, 3})):
        params = SamplingParams(temperature=temperature, repetition_penalty=penalty, seed=1)
        assert Sampler(params, torch.tensor([0, 1])).choose(logits) in likeliest


def test_tokens_without_probability_are_left_out_before_others_are_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy takes a hundred times as long to divide numbers of which many are equal to the least."""
    partition = sampling._partition
    divided = 0

    def divide(weights: Any, place: int) -> Any:
        nonlocal divided
        divided += 1
        assert np.count_nonzero(weights) > 0.9 * len(weights)
        return partition(weights, place)

    monkeypatch.setattr(sampling, "_partition", divide)
    logits = logits_of(40_000, 1.0, 5)
    logits[::2] = -math.inf
    for params in (SamplingParams(top_k=15_000), SamplingParams(top_p=1 - 1e-9), SamplingParams(top_p=0.99, top_k=12_000)):
        assert Sampler(params).choose(logits) % 2 == 1
    assert divided >= 3
