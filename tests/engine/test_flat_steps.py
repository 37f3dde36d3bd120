"""Flat steps: the logits of transformers itself, in pieces, beside others, after moves; and which models take no such steps."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.executors.interface import ExecutorOptions, StepInput
from shmring.engine.protocol import GenerateRequest
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors import attention, generation, passes  # noqa: E402 - after the skip
from shmring.engine.executors.attention import ContextCache  # noqa: E402
from shmring.engine.executors.generation import LanguageModel  # noqa: E402
from shmring.engine.executors.sampling import Sampler  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402
from tests.engine.asking import Reference, ask, noise  # noqa: E402
from tests.engine.tiny_models import DECODER  # noqa: E402

# How far logits may be apart; their standard deviation is 4. These models have wide weights, which enlarge what float32 rounds.
_APART = {torch.float64: 1e-5, torch.float32: 4e-4}


def question(text: str, pictures: int = 0, **sampling: Any) -> GenerateRequest:
    """A request whose answer varies: a model that repeats one token would prove little."""
    params = {"max_tokens": 12, "ignore_eos": True, "repetition_penalty": 5.0} | sampling
    return ask(*[noise(40 + 9 * number, 60, number) for number in range(pictures)], text, **params)


def logits_of(
    executor: TransformersExecutor, arrivals: dict[int, dict[int, GenerateRequest]], monkeypatch: pytest.MonkeyPatch
) -> dict[int, tuple[torch.Tensor, list[int]]]:
    """Executes steps until all requests are finished, each of which comes at a step; returns its logits and its tokens."""
    answers: dict[Any, list[torch.Tensor]] = {}
    choose = Sampler.choose

    def note(self: Sampler, logits: torch.Tensor, grammar: None) -> int:
        answers.setdefault(self, []).append(logits.clone())
        return choose(self, logits, grammar)

    found: dict[int, Any] = {}
    tokens: dict[int, list[int]] = {}
    batch: list[StepInput] = []
    step = 0
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "choose", note)
        while batch or any(later >= step for later in arrivals):
            batch += [StepInput(number, request) for number, request in arrivals.get(step, {}).items()]
            outputs: Any = executor.execute(batch)
            found |= {number: running[0].sampler for number, running in executor._answers.items() if running}
            for part, output in zip(batch, outputs, strict=True):
                assert not isinstance(output, Exception), output
                tokens.setdefault(part.request_id, []).extend(output.reply.token_ids if output.reply else [])
            batch = [StepInput(part.request_id, None) for part, out in zip(batch, outputs, strict=True) if not out.finished]
            step += 1
    return {number: (torch.stack(answers[found[number]]), tokens[number]) for number in tokens}


def expected_logits(executor: TransformersExecutor, model: Any, request: GenerateRequest, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of an answer by one ordinary forward of the model over all of it."""
    inputs = executor._prompts.build(request)
    prompt = inputs["input_ids"].shape[1]
    answer = torch.tensor([tokens[:-1]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], answer], dim=1)
    inputs.pop("attention_mask", None)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(answer)], dim=1)
    inputs = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    with torch.inference_mode():
        logits: torch.Tensor = model(**inputs).logits[0, prompt - 1 :].float()
    return logits


@for_each("dtype", _APART)
@for_each("architecture", ["llama", "llava", "idefics3", "qwen2_vl"])
def test_logits_are_those_of_a_request_alone(
    architecture: str, dtype: torch.dtype, tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts come in many pieces; contexts share shelves, move to longer ones, and leave rows that others take.
    monkeypatch.setattr(passes, "_PIECE_TOKENS", 7)
    monkeypatch.setattr(passes, "_IDLE_TOKENS", 20)
    monkeypatch.setattr(attention, "_SHORTEST", 16)
    monkeypatch.setattr(attention, "_SHELF_TOKENS", 128)
    path = tiny_model(architecture)
    executor = TransformersExecutor(ExecutorOptions(model=str(path)))
    is_seeing = architecture != "llama"
    model = Reference(path).model.to(dtype)
    executor._checkpoint.model.to(dtype)
    requests = {
        1: question("Hi", max_tokens=30),
        2: question("What is it?", is_seeing),
        3: question("word " * 30),
        4: question("Compare these two.", 2 * is_seeing, seed=5),
        5: question("x", max_tokens=3),
        6: question("Go on", is_seeing, max_tokens=25),
        7: question("Hello there", max_tokens=20),
    }
    arrivals = {0: {number: requests[number] for number in (1, 2, 3)}, 4: {4: requests[4], 5: requests[5]}}
    arrivals |= {9: {6: requests[6]}, 25: {7: requests[7]}}
    for number, (logits, tokens) in logits_of(executor, arrivals, monkeypatch).items():
        expected = expected_logits(executor, model, requests[number], tokens)
        assert len({*tokens}) > len(tokens) / 2, "the answer varies"
        assert expected.std() > 1
        assert float((logits - expected).abs().max()) <= _APART[dtype]
    assert executor._model.contexts.shelves == []
    executor.close()


# -- shelves ----------------------------------------------------------------------------------------------------------------


def test_a_context_that_grows_moves_alone() -> None:
    cache = ContextCache()
    rows = [cache.open(100) for _ in range(3)]
    (shelf,) = cache.shelves
    one = torch.ones(2, 1, 4)  # heads, tokens, head size
    keys, values = shelf.layer(0, one, one)
    for number, row in enumerate(rows):
        row.length = 100
        keys[row.index, :, :100] = number + 1
        values[row.index, :, :100] = -number - 1
    cache.reserve(rows[1], 128)
    assert rows[1].shelf is shelf
    cache.reserve(rows[1], 129)
    assert rows[1].shelf.capacity == 256
    moved, _ = rows[1].shelf.layer(0, one, one)
    assert (moved[rows[1].index, :, :100] == 2).all()
    assert not moved[rows[1].index, :, 100:].any()
    assert shelf.layer(0, one, one)[0] is keys
    assert not keys[1].any(), "its old row is clear"
    assert (keys[2, :, :100] == 3).all()
    assert cache.open(5).index == 1, "and is taken again"


def test_a_move_without_memory_leaves_the_context_where_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ContextCache()
    row = cache.open(100)
    shelf = row.shelf
    one = torch.ones(2, 1, 4)
    shelf.layer(0, one, one)[0].fill_(7)

    def fail(*_: object) -> Any:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(attention._Shelf, "_make", fail)
        with pytest.raises(torch.OutOfMemoryError):
            cache.reserve(row, 200)
    assert (row.shelf, row.index, cache.shelves) == (shelf, 0, [shelf])
    assert (shelf.layer(0, one, one)[0] == 7).all()


def test_what_is_not_a_number_in_a_context_stays_in_it() -> None:
    cache = ContextCache()
    damaged = cache.open(10)
    kept = cache.open(10)
    one = torch.ones(2, 1, 4)
    for memory in damaged.shelf.layer(0, one, one):
        memory[damaged.index, :, :10] = float("nan")
    cache.close(damaged)
    assert all(torch.isfinite(memory).all() for memory in kept.shelf.layer(0, one, one))


def test_contexts_far_apart_on_a_shelf_are_computed_as_alone() -> None:
    cache = ContextCache()
    rows = [cache.open(100 + 20 * number) for number in range(9)]  # 128 tokens have room for two of them, 256 for the others
    for number in (3, 6, 7):  # a gap that is read, and one that is not
        cache.close(rows[number])
    kept = [row for number, row in enumerate(rows) if number not in (3, 6, 7)]
    generator = torch.Generator().manual_seed(1)
    heads, shared, size = 4, 2, 8
    keys, values = (torch.randn(len(kept), shared, 60, size, generator=generator) for _ in range(2))
    for number, row in enumerate(kept):
        row.length = 50 + number
        for memory, numbers in zip(row.shelf.layer(0, keys[0], values[0]), (keys, values), strict=True):
            memory[row.index, :, : row.length] = numbers[number, :, : row.length]
    query = torch.randn(1, heads, len(kept), size, generator=generator)
    key, value = (torch.randn(1, shared, len(kept), size, generator=generator) for _ in range(2))
    step = attention.FlatStep([(row, 1) for row in kept], torch.device("cpu"))
    assert [part._columns for part in step.parts] == [slice(0, 2), slice(2, 5), slice(5, 6)]

    class Layer:
        layer_idx = 0

    seen, _ = attention.attend(Layer(), query, key, value, None, flat=step)
    for number, row in enumerate(kept):
        now = [
            torch.cat([old[number, :, : row.length], new[0, :, number : number + 1]], dim=1)
            for old, new in ((keys, key), (values, value))
        ]
        wide = [tensor.repeat_interleave(heads // shared, 0) for tensor in now]
        expected = torch.nn.functional.scaled_dot_product_attention(query[0, :, number : number + 1], *wide)
        assert torch.allclose(seen[0, number], expected[:, 0], atol=1e-5)


def _resident_pages(memory: torch.Tensor) -> int:
    """How many pages the kernel has given for contiguous memory on a CPU."""
    assert memory.is_contiguous()
    pages = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), pages) == 0
    return sum(page & 1 for page in pages)


def test_memory_of_a_context_goes_back_when_it_ends_though_others_stay_on_its_shelf() -> None:
    cache = ContextCache()
    rows = [cache.open(100) for _ in range(3)]
    one = torch.ones(4, 1, 64)
    for memory in rows[0].shelf.layer(0, one, one):
        assert _resident_pages(memory) == 0, "room for contexts that never come costs nothing"
        memory[:3] = 1
    cache.close(rows[1])
    for memory in rows[0].shelf.layer(0, one, one):
        of_rows = memory[0].nbytes // mmap.PAGESIZE
        assert [_resident_pages(memory[index]) for index in range(4)] == [of_rows, 0, of_rows, 0]
        assert [bool(memory[index].any()) for index in range(4)] == [True, False, True, False]
    assert cache.open(100).index == 1


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@for_each(("tokens", "is_huge"), [(512, False), (1024, True)])  # of 256 bytes
def test_long_rows_ask_for_huge_pages(tokens: int, is_huge: bool) -> None:
    row = ContextCache().open(tokens)
    one = torch.ones(1, 1, 64)
    for memory in row.shelf.layer(0, one, one):
        flags: list[str] = []
        for line in Path("/proc/self/smaps").read_text().splitlines():
            first, _, rest = line.partition(" ")
            if "-" in first:
                begin, end = (int(bound, 16) for bound in first.split("-"))
            elif first == "VmFlags:" and begin <= memory.data_ptr() < end:
                flags = rest.split()
        assert flags
        assert ("hg" in flags) is is_huge


def test_rows_that_share_a_page_are_cleared_apart() -> None:
    cache = ContextCache()
    rows = [cache.open(100) for _ in range(3)]
    one = torch.ones(1, 1, 3)  # 1,536 bytes a row
    for memory in rows[0].shelf.layer(0, one, one):
        memory[:3] = 1
    cache.close(rows[0])
    for memory in rows[1].shelf.layer(0, one, one):
        assert [int(memory[index].sum()) for index in range(4)] == [0, 384, 384, 0]


def test_room_that_the_kernel_does_not_give_is_a_lack_of_memory() -> None:
    row = ContextCache().open(1 << 44)
    one = torch.ones(2, 1, 64)
    with pytest.raises(MemoryError, match="bytes for contexts"):
        row.shelf.layer(0, one, one)


# -- who takes no flat steps ------------------------------------------------------------------------------------------------

_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_SECTIONS = {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True, "rope_theta": 1e4}


def _qwen(
    factory: Any, config: Any, tokens: list[int], grid: list[int], text: dict[str, Any], vision: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]]]:
    """A model with a picture of so many patches for example, which are the tokens 50."""
    ids = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    vision = {"hidden_size": 32, "num_heads": 2, "patch_size": 14} | vision
    made = factory(config(text_config=DECODER | text, vision_config=vision, **ids))
    example = {
        "input_ids": torch.tensor([tokens]),
        "pixel_values": torch.randn(grid[1] * grid[2], 3 * 2 * 14 * 14),
        "image_grid_thw": torch.tensor([grid]),
        "mm_token_type_ids": (torch.tensor([tokens]) == 50).int(),
    }
    return made, [example]


def _deep_stack() -> tuple[Any, list[dict[str, Any]]]:
    vision = {"depth": 2, "intermediate_size": 48, "out_hidden_size": 32, "deepstack_visual_indexes": [0, 1]}
    vision["num_position_embeddings"] = 16
    model = transformers.Qwen3VLForConditionalGeneration, transformers.Qwen3VLConfig
    return _qwen(*model, [3, 52, 50, 53, 4, 5], [1, 2, 2], {"head_dim": 8, "rope_parameters": _SECTIONS}, vision)


def _three_dimensions() -> tuple[Any, list[dict[str, Any]]]:
    text = {"rope_parameters": {name: value for name, value in _SECTIONS.items() if name != "mrope_interleaved"}}
    model = transformers.Qwen2VLForConditionalGeneration, transformers.Qwen2VLConfig
    return _qwen(*model, [3, 52, *[50] * 6, 53, 4, 5], [1, 4, 6], text, {"depth": 1, "embed_dim": 32, "mlp_ratio": 2})


_SIGLIP: dict[str, Any] = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 14,
    "patch_size": 14,
}


def _with_a_picture(factory: Any, config: Any) -> tuple[Any, list[dict[str, Any]]]:
    tokens = torch.tensor([[50, 3, 4, 5]])
    example = {"input_ids": tokens, "pixel_values": torch.randn(1, 3, 14, 14), "token_type_ids": (tokens == 50).int()}
    return factory(config), [example]


def _prefix_seen_whole() -> tuple[Any, list[dict[str, Any]]]:
    text = DECODER | {"model_type": "gemma", "head_dim": 8}
    config = transformers.PaliGemmaConfig(text_config=text, vision_config=_SIGLIP, image_token_id=50, projection_dim=32)
    return _with_a_picture(transformers.PaliGemmaForConditionalGeneration, config)


def _pictures_seen_whole() -> tuple[Any, list[dict[str, Any]]]:
    text = DECODER | {"head_dim": 8, "layer_types": ["full_attention"] * 2}
    config = transformers.Gemma3Config(text_config=text, vision_config=_SIGLIP, image_token_index=50, mm_tokens_per_image=1)
    return _with_a_picture(transformers.Gemma3ForConditionalGeneration, config)


@for_each(
    ("make", "reason"),
    [
        (lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)), None),
        (lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**DECODER)), None),
        (lambda: transformers.GraniteForCausalLM(transformers.GraniteConfig(**DECODER, logits_scaling=3.0)), None),
        (
            lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**DECODER, sliding_window=8)),
            "not all of its layers keep all keys and values",
        ),
        (
            lambda: transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**DECODER, layer_types=["conv", "full_attention"])),
            "not all of its layers keep all keys and values",
        ),
        (
            lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER, rope_parameters=_DYNAMIC)),
            "its positions depend on the longest context",
        ),
        (_three_dimensions, None),
        (_deep_stack, "its decoder is given"),
        (_prefix_seen_whole, "it counts positions in a way of its own"),
        (_pictures_seen_whole, "it makes a mask of its own"),
    ],
)
def test_flat_steps_are_taken_where_they_are_right(make: Callable[[], Any], reason: str | None) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        made = make()
    network, examples = made if isinstance(made, tuple) else (made, [])
    network = network.eval()
    before = network.get_decoder().config._attn_implementation
    model = LanguageModel(network)
    found = model.check(lambda: examples)
    assert (found is None) == (reason is None) == model.flat, found
    assert (reason or "") in (found or "")
    assert model.contexts.shelves == []
    if reason is not None:  # and is read as it always was
        assert network.get_decoder().config._attn_implementation == before
        context = model.open(model.prepare({"input_ids": torch.tensor([[3, 4, 5]])}))
        (logits,) = model.advance([(context, 3)])
        with torch.inference_mode():
            assert logits is not None
            torch.testing.assert_close(logits, network(input_ids=torch.tensor([[3, 4, 5]])).logits[0, -1])


def test_a_model_that_can_not_be_tried_takes_none() -> None:
    def refuse() -> Any:
        raise ValueError("a picture alone is no question")

    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).eval()
    model = LanguageModel(network)
    assert model.check(refuse) == "it can't be tried: ValueError: a picture alone is no question"
    assert not model.flat


def test_a_model_that_computes_something_else_in_flat_steps_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def shifted(*arguments: Any, **options: Any) -> Any:
        output, weights = attention.attend(*arguments, **options)
        return output * 1.5, weights

    monkeypatch.setattr(generation, "attend", shifted)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LanguageModel(transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).eval())
    assert model.check() == "it computes something else in flat steps"
    assert not model.flat
