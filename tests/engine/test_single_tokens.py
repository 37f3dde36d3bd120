"""Attention of single tokens: what it computes, that nobody disturbs it, what it refuses, and when torch does it instead."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from shmring.engine.executors import _attention, attention, single_tokens
from shmring.engine.executors.attention import ContextCache, FlatStep, Row
from shmring.engine.executors.single_tokens import SingleTokens, can_attend
from tests.tables import for_each

here = pytest.mark.skipif(not _attention.SUPPORTED, reason="this processor has no AVX-512")

LENGTHS = (0, 1, 2, 3, 4, 5, 14, 15, 16, 17, 31, 32, 126, 127, 128, 129, 500, 1000, 3063)  # before this step
BELOW = 2**-7  # of the greatest value: how far bfloat16 may be from the truth


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


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each call of our own attention had."""
    counts: list[int] = []
    attend = SingleTokens.attend

    def note(self: SingleTokens, *arguments: Any) -> None:
        counts.append(self._count)
        attend(self, *arguments)

    monkeypatch.setattr(SingleTokens, "attend", note)
    return counts


# -- what it computes -------------------------------------------------------------------------------------------------------


@here
@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each(("heads", "groups", "size"), [(8, 2, 64), (7, 1, 128), (8, 4, 32), (6, 1, 256), (12, 2, 96)])
def test_tokens_see_their_contexts(heads: int, groups: int, size: int, dtype: torch.dtype, computed: list[int]) -> None:
    contexts = Contexts(LENGTHS, heads, groups, size, dtype)
    assert len(contexts.cache.shelves) > 3, "of several lengths"
    computed.clear()
    seen = contexts.attend()
    assert computed == [len(LENGTHS)], "by one call"
    for number, row in enumerate(contexts.rows):
        expected = contexts.expected(number)
        apart = 3e-5 if dtype == torch.float32 else BELOW * float(expected.abs().max())
        assert float((seen[number].double() - expected).abs().max()) <= apart
        for memory, new, old in zip(row.shelf.layers[0], (contexts.key, contexts.value), contexts.old[number], strict=True):
            assert torch.equal(memory[row.index, :, : row.length], old)
            assert torch.equal(memory[row.index, :, row.length], new[0, :, number])
            assert not memory[row.index, :, row.length + 1 :].any(), "nothing is written beside"


@here
def test_a_token_has_the_same_bits_whatever_is_beside_it_and_however_many_threads_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contexts = Contexts(LENGTHS, 8, 2, 64, torch.bfloat16)
    alone = torch.cat([contexts.attend([number]) for number in range(len(LENGTHS))])
    assert torch.equal(contexts.attend(), alone)
    assert torch.equal(contexts.attend([5, 9, 2]), alone[[5, 9, 2]])
    submitted: list[object] = []
    helpers = single_tokens._helpers()

    class Counted:
        def submit(self, *arguments: Any) -> concurrent.futures.Future[Any]:
            submitted.append(arguments[1:])
            return helpers.submit(*arguments)

    monkeypatch.setattr(single_tokens, "_helpers", Counted)
    monkeypatch.setattr(single_tokens, "_SHARED_NBYTES", 1)
    for threads in (2, 3, 64):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        submitted.clear()
        assert torch.equal(contexts.attend(), alone)
        assert len(submitted) == min(threads, 2 * len(LENGTHS)) - 1


@here
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
    assert torch.equal(seen[0, :3], single)
    torch.testing.assert_close(seen[:, 3:8], alone)
    shown = more[2].repeat_interleave(4, 1)[0, :, 0]
    torch.testing.assert_close(seen[0, 8], shown)  # a sequence of one token sees itself


@here
@for_each("dtype", [torch.float32, torch.bfloat16])
@for_each("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_a_number_stays_in_its_context(number: float, dtype: torch.dtype) -> None:
    contexts = Contexts((300, 300, 300), 8, 2, 64, dtype)
    expected = contexts.attend()
    contexts.rows[1].shelf.layers[0][0][contexts.rows[1].index, 0, 200, :] = number
    seen = contexts.attend()
    assert torch.equal(seen[[0, 2]], expected[[0, 2]])
    assert torch.equal(seen[1, 4:], expected[1, 4:]), "heads with other keys"
    assert not torch.isfinite(seen[1, :4]).all(), "heads with these keys"


@here
def test_a_value_that_is_not_a_number_is_seen() -> None:
    contexts = Contexts((3, 200), 8, 2, 64, torch.float32)
    contexts.rows[1].shelf.layers[0][1][contexts.rows[1].index, 1, 7, 5] = math.nan
    seen = contexts.attend()
    assert [tuple(place) for place in torch.isnan(seen).nonzero().tolist()] == [(1, head, 5) for head in range(4, 8)]


@here
@for_each("size", [1e-30, 1e4, 1e15])
def test_scores_may_be_far_apart(size: float) -> None:
    contexts = Contexts((2, 130, 600), 8, 2, 64, torch.float32)
    contexts.query = contexts.query * size
    for number, seen in enumerate(contexts.attend()):
        assert torch.isfinite(seen).all()
        if size < 1e15:  # where rounding decides which is the greatest
            torch.testing.assert_close(seen.double(), contexts.expected(number), atol=1e-2, rtol=1e-2)


# -- when torch does it -----------------------------------------------------------------------------------------------------


@for_each(
    ("heads", "groups", "size", "dtype"),
    [
        (8, 2, 64, torch.float16),
        (8, 2, 64, torch.float64),
        (8, 2, 48, torch.float32),
        (8, 2, 16, torch.bfloat16),
        (8, 2, 288, torch.bfloat16),
        (8, 8, 64, torch.bfloat16),
    ],
)
def test_torch_computes_what_is_not_computed_here(
    heads: int, groups: int, size: int, dtype: torch.dtype, computed: list[int]
) -> None:
    contexts = Contexts((0, 5, 130), heads, groups, size, dtype)
    seen = contexts.attend()
    for number in range(3):
        torch.testing.assert_close(seen[number].double(), contexts.expected(number), atol=0.05, rtol=0.05)
    assert computed == []


def test_torch_computes_everything_on_other_processors(monkeypatch: pytest.MonkeyPatch, computed: list[int]) -> None:
    contexts = Contexts((0, 5, 130), 8, 2, 64, torch.float32)
    assert can_attend(contexts.query[0], contexts.key[0], contexts.value[0]) is _attention.SUPPORTED
    monkeypatch.setattr(_attention, "SUPPORTED", False)
    seen = contexts.attend()
    for number in range(3):
        torch.testing.assert_close(seen[number].double(), contexts.expected(number), atol=1e-4, rtol=1e-4)
    assert computed == []


def test_tokens_on_an_accelerator_and_values_of_another_size_are_not_computed_here() -> None:
    query, key = torch.empty(8, 3, 64), torch.empty(2, 3, 64)
    assert can_attend(query, key, key) is _attention.SUPPORTED
    assert not can_attend(*(tensor.to("meta") for tensor in (query, key, key)))
    assert not can_attend(query, key, torch.empty(2, 3, 32))
    assert not can_attend(query, key, key.bfloat16())


# -- what is refused --------------------------------------------------------------------------------------------------------


def attend_raw(**changed: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Calls the compiled function with 3 tokens of 8 heads, on a shelf of 4 rows of 128 tokens, but for what is changed."""
    memory, output = torch.zeros(2, 4, 2, 128, 64), torch.zeros(3, 8, 64)
    query, key, value = torch.ones(8, 3, 64), torch.ones(2, 3, 64), torch.ones(2, 3, 64)
    arguments = {
        "places": array("q", [0, 0, 0, 1, 1, 0, 2, 128, 2, 0, 3, 5]),
        "shelves": array("q", [memory[0].data_ptr(), memory[1].data_ptr(), 4, 128]),
        **{
            name: single_tokens._vectors(tensor)
            for name, tensor in (("query", query), ("key", key), ("value", value), ("output", output.transpose(0, 1)))
        },
        "shape": (3, 8, 2, 64),
        "is_bfloat16": False,
        "scale": 1.0,
        "first": 0,
        "end": 6,
    } | changed
    try:
        _attention.attend(*arguments.values())
    except BaseException:
        assert not memory.any()
        assert not output.any()
        raise
    return memory, output


@here
def test_what_is_refused_below_is_taken_as_it_is() -> None:
    _, output = attend_raw()
    assert output.any(dim=2).all()
    memory, output = attend_raw(first=6, end=6)
    assert not output.any()
    assert not memory.any()


_MAX = 2**63 - 1


@here
@for_each(
    "changed",
    [
        *({"places": array("q", [column, 0, 0, 1] * 3)} for column in (-1, 3, _MAX)),
        *({"places": array("q", [0, shelf, 0, 1] * 3)} for shelf in (-1, 1, _MAX, -_MAX)),
        *({"places": array("q", [0, 0, index, 1] * 3)} for index in (-1, 4, _MAX)),
        *({"places": array("q", [0, 0, 0, length] * 3)} for length in (0, -1, 129, _MAX)),
        {"places": array("q", [0, 0, 0, 1])},
        {"places": array("q")},
        {"shelves": array("q")},
        {"shelves": array("q", [0, 0, 4])},
        *({"shape": (3, 8, 2, size)} for size in (0, -32, 16, 33, 288, _MAX)),
        *({"shape": (3, heads, groups, 64)} for heads, groups in ((8, 0), (8, -2), (8, 3), (1, 2), (0, 2), (_MAX, 2))),
        {"shape": (0, 8, 2, 64)},
        *({"first": first, "end": end} for first, end in ((-1, 3), (0, 7), (4, 3), (0, _MAX), (-_MAX, 6))),
    ],
)
def test_what_is_not_there_is_neither_read_nor_written(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^(keys|heads|there|a context)"):
        attend_raw(**changed)


@for_each("changed", [{"places": 5}, {"query": (0, 1)}, {"shape": (3, 8, 2)}, {"scale": "1"}, {"end": 2**80}])
def test_arguments_of_another_kind_are_refused(changed: dict[str, Any]) -> None:
    with pytest.raises((TypeError, OverflowError)):
        attend_raw(**changed)


@pytest.fixture
def new_helpers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No helping thread has been started yet; from now on, each call is shared by four."""
    single_tokens._helpers.cache_clear()
    monkeypatch.setattr(single_tokens, "_SHARED_NBYTES", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    yield
    single_tokens._helpers().shutdown()
    single_tokens._helpers.cache_clear()


@here
@pytest.mark.usefixtures("new_helpers")
def test_where_no_thread_can_be_started_the_caller_computes_all_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts = Contexts((2000,) * 6, 8, 2, 64, torch.bfloat16)
    expected = torch.cat([contexts.attend([number]) for number in range(6)])
    single_tokens._helpers.cache_clear()

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        assert torch.equal(contexts.attend(), expected)
    (keys, values) = contexts.rows[0].shelf.layers[0]
    keys.zero_(), values.zero_()
    others = Contexts((500,) * 6, 8, 2, 64, torch.bfloat16)
    assert torch.equal(others.attend(), torch.cat([others.attend([number]) for number in range(6)]))
    single_tokens._helpers().submit(lambda: None).result()  # they have come to the end of what was queued
    assert not keys.any()
    assert not values.any()


@here
@pytest.mark.usefixtures("new_helpers")
@pytest.mark.parametrize("part", [0, 3])
def test_an_error_is_raised_when_no_thread_computes_any_more(part: int) -> None:
    running, ended = threading.Semaphore(0), []

    def compute(first: int, end: int) -> None:
        running.release()
        if first == part:
            assert all(running.acquire(timeout=60) for _ in range(4)), "all have begun"
            raise ValueError("a part")
        time.sleep(0.05)
        ended.append(first)

    with pytest.raises(ValueError, match="a part"):
        single_tokens._share(compute, [(number, number + 1) for number in range(4)])
    assert sorted(ended) == [number for number in range(4) if number != part]


@here
@for_each("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_are_infinitely_far_are_not_seen(dtype: torch.dtype) -> None:
    contexts = Contexts((700,), 8, 2, 64, dtype)
    contexts.query = contexts.query.abs()
    row, (keys, values) = contexts.rows[0], contexts.rows[0].shelf.layers[0]
    keys[row.index, :, :300] = -math.inf
    seen = contexts.attend()
    values[row.index, :, :300] = 7
    assert torch.isfinite(seen).all()
    assert torch.equal(contexts.attend(), seen)


@here
def test_keys_of_another_layer_of_this_name_are_refused() -> None:
    contexts = Contexts((5, 6), 8, 2, 64, torch.bfloat16)
    contexts.query, contexts.key, contexts.value = (
        tensor.repeat(1, 1, 1, 2) for tensor in (contexts.query, contexts.key, contexts.value)
    )
    with pytest.raises(ValueError, match="layer 0 has keys of"):
        contexts.attend()


# -- in a model -------------------------------------------------------------------------------------------------------------


@here
@torch.inference_mode()
def test_logits_of_a_step_are_those_of_each_context_alone(computed: list[int]) -> None:
    transformers = pytest.importorskip("transformers")
    from shmring.engine.executors.generation import LanguageModel

    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=96,
        head_dim=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        network = transformers.LlamaForCausalLM(config).eval()
        prompts = [torch.randint(0, 60, (length,)) for length in (1, 2, 17, 125, 300)]
    model = LanguageModel(network)
    assert model.check() is None
    contexts = [model.open(model.prepare({"input_ids": prompt.unsqueeze(0)})) for prompt in prompts]
    model.advance([(context, context.unread) for context in contexts])
    computed.clear()
    tokens = [7, 11, 13, 17, 19, 23, 29]  # contexts of 125 tokens move to another shelf
    for token in tokens:
        for context in contexts:
            context.token = token
        logits = model.advance([(context, 1) for context in contexts])
    assert computed == [5] * 3 * len(tokens), "by one call a layer"
    network.set_attn_implementation("eager")
    for prompt, found in zip(prompts, logits, strict=True):
        alone = network(torch.cat([prompt, torch.tensor(tokens)]).unsqueeze(0)).logits[0, -1]
        assert float(alone.std()) > 0.2
        assert found is not None
        assert float((found - alone).abs().max()) <= 1e-5
