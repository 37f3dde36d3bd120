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
TIES = torch.tensor([2.0, 0.0, 0.0, 0.0, 0.0, -1.0])  # the first has 0.65 of all probability, and 0.88 of that of two tokens
NOTHING = torch.full((50,), -math.inf).index_fill(0, torch.tensor([3, 30]), 0.0)
HUGE = torch.tensor([-3e38, 3e38, 0.0, 1.0])


def draw(count: int, logits: torch.Tensor = LOGITS, prompt: list[int] | None = None, **params: Any) -> list[int]:
    sampler = Sampler(SamplingParams(**params), None if prompt is None else torch.tensor(prompt), ends={0, 4, 99})
    return [sampler.choose(logits) for _ in range(count)]


@for_each(
    ("logits", "params", "expected"),
    [
        (LOGITS, {}, [0, 0, 0]),
        (torch.zeros(7), {}, [0, 0]),  # equally likely
        (NOTHING, {}, [3]),
        (LOGITS, {"logit_bias": {3: 100.0}}, [3, 3]),
        (LOGITS, {"logit_bias": {0: -100.0}}, [4, 4]),
        (LOGITS, {"min_tokens": 3}, [1, 1, 1, 0]),  # no end
        (LOGITS, {"repetition_penalty": 3.0}, [0, 4, 1]),  # 2 / 3 and 1.5 / 3 are less than 1
        (LOGITS, {"repetition_penalty": 3.0, "prompt": [0, 4, 5, 900]}, [1]),  # of which the head does not have two
        (LOGITS, {"frequency_penalty": 2, "logit_bias": {0: 1.0}, "prompt": [0, 0]}, [0, 4, 0, 1, 2]),
        (LOGITS, {"presence_penalty": -2, "prompt": [1]}, [0, 0, 0, 0]),
        (HUGE, {"repetition_penalty": 1e-300, "prompt": [0, 1]}, [1]),  # the scores of 0 and 1 are infinite, or 0
        (HUGE, {"repetition_penalty": 1e300, "prompt": [0, 1]}, [3]),
    ],
)
def test_the_likeliest_token_is_chosen_without_temperature(logits: torch.Tensor, params: Any, expected: list[int]) -> None:
    assert draw(len(expected), logits, temperature=0, **params) == expected
    assert draw(len(expected), logits, temperature=1e-6, seed=1, **params) == expected


@for_each(
    ("logits", "params", "expected"),
    [
        (LOGITS, {"temperature": 2.0, "top_k": 2}, {0, 4}),
        (LOGITS, {"temperature": 2.0, "top_k": -1}, {0, 1, 2, 3, 4}),
        (LOGITS, {"min_p": 0.5}, {0, 4}),  # exp(1.5 - 2) = 0.61 of the likeliest, exp(1 - 2) = 0.37
        (TIES, {"top_k": 2}, {0, 1, 2, 3, 4}),  # tokens as likely as the last one that is left are left, and count
        (TIES, {"top_k": 2, "top_p": 0.7}, {0, 1, 2, 3, 4}),
        (TIES, {"top_k": 2, "top_p": 0.6}, {0}),
        (LOGITS, {"logit_bias": {3: 100.0}}, {3}),
        (LOGITS, {"logit_bias": {0: -100.0}}, {1, 2, 3, 4}),
        (NOTHING, {}, {3, 30}),
        (torch.tensor([0.0, 3e38, -3e38]), {"temperature": 1e-3}, {1}),
        (HUGE, {"repetition_penalty": 1e-300, "prompt": [0, 1]}, {1}),
        (HUGE, {"repetition_penalty": 1e300, "prompt": [0, 1]}, {1, 2, 3}),
        (HUGE, {"repetition_penalty": 1e300, "prompt": [0, 1], "temperature": 1e-3}, {1, 2, 3}),
    ],
)
def test_only_what_is_left_is_chosen_by_chance(logits: torch.Tensor, params: Any, expected: set[int]) -> None:
    assert set(draw(500, logits, **({"temperature": 1.0} | params), seed=1)) == expected


@for_each("seed", [11, 0, -1, -(2**63), 2**64 - 1, 2**80])
def test_a_seed_repeats_and_each_answer_has_one_of_its_own(seed: int) -> None:
    def drawn(seed: int | None, index: int = 0) -> list[int]:
        sampler = Sampler(SamplingParams(temperature=1.5, top_p=0.95, seed=seed), index=index)
        return [sampler.choose(LOGITS) for _ in range(60)]

    assert drawn(seed) == drawn(seed) != drawn(seed + 1) == drawn(seed, 1)
    assert drawn(None) != drawn(None)


def test_requests_do_not_take_numbers_from_each_other_or_from_torch() -> None:
    alone = draw(30, temperature=1.0, seed=4)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    sampler, other = (Sampler(SamplingParams(temperature=1.0, seed=seed)) for seed in (4, 5))
    beside = [(other.choose(LOGITS), sampler.choose(LOGITS))[1] for _ in range(30)]
    assert beside == alone
    assert torch.equal(torch.get_rng_state(), state)


@for_each(
    "bad", [LOGITS.index_fill(0, torch.tensor([2]), value) for value in (math.nan, math.inf)] + [torch.full((4,), -math.inf)]
)
@for_each("temperature", [0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: torch.Tensor, temperature: float) -> None:
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        draw(1, bad, temperature=temperature)


@for_each(
    "params",
    [
        *({"temperature": value} for value in (-0.1, math.nan, math.inf)),
        *({"top_p": value} for value in (0, -1, 1.01, math.nan)),
        {"top_k": -2},
        *({"min_p": value} for value in (1.1, math.nan)),
        {"presence_penalty": 2.1},
        *({"frequency_penalty": value} for value in (-2.1, math.nan)),
        *({"min_tokens": -1}, {"min_tokens": 5, "max_tokens": 4}, {"logprobs": 21}, {"logprobs": -1}),
        {"stop_token_ids": list(range(129))},
        *({"repetition_penalty": value} for value in (0, math.nan)),
        *({"logit_bias": bias} for bias in ({1: 101.0}, {1: math.nan}, {-1: 1.0}, dict.fromkeys(range(301), 1.0))),
    ],
    ids=str,
)
def test_parameters_that_make_no_sense_are_refused(params: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(params))} .*[0-9]"):
        Sampler(SamplingParams(**params))


def test_a_token_is_penalised_once_however_often_it_is_used() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, repetition_penalty=1.1), torch.tensor([0, 1, 1, 0]))
    for _ in range(100):
        sampler.choose(LOGITS)
    assert len(sampler._penalised) <= len(LOGITS)


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


# -- as transformers does it, and as a sort does ---------------------------------------------------------------------------

# Some of the ways to find what is left are for large vocabularies alone; and numbers may be equal.
VOCABULARIES = st.sampled_from([5, 40, 700, 20_000])
SPREADS = st.sampled_from([0.1, 1.0, 4.0, 30.0])
SEEDS = st.integers(0, 2**32)
TOP_K = st.sampled_from([-1, 0, 1, 3, 50, 1100, 5000, 15_000, 10**9])
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
