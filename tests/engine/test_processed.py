"""Pictures that frontends have processed: the same inputs, to the bit, as of their pixels; and which processors that may be."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from shmring.engine.executors.interface import ExecutorOptions, StepInput
from shmring.engine.picture_processor import PictureProcessor
from shmring.engine.protocol import (
    EncodeRequest,
    Feature,
    Features,
    GenerateRequest,
    Picture,
    ProcessorSpec,
)
from tests.engine.conftest import skip_without_torchvision
from tests.stepping import answer
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors.checkpoint import Checkpoint  # noqa: E402 - after the skip
from shmring.engine.executors.prompts import PromptBuilder  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402
from tests.engine.asking import ask, noise  # noqa: E402


def processed(spec: ProcessorSpec | None, picture: Picture) -> Features:
    """As a frontend sends it."""
    assert spec is not None
    processor = PictureProcessor(spec)
    memory = bytearray(10_000_000)
    layout = processor.process_into(picture.pixels.numpy(), memory)  # type: ignore[arg-type] # a buffer, as those are
    assert layout
    features = Features(torch.frombuffer(memory, dtype=torch.uint8), layout)
    last = list(features.tensors().values())[-1]
    end = last.data_ptr() - features.content.data_ptr() + last.nbytes
    return msgspec.structs.replace(features, content=features.content[:end])


def question(media: Sequence[Picture | Features], **sampling: Any) -> GenerateRequest:
    parts = [part for medium in media for part in (medium, "and")]
    return ask(*parts, "What is it?", max_tokens=8, ignore_eos=True, **sampling)


def are_equal(left: dict[str, Any], right: dict[str, Any], dtype: torch.dtype) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(value.to(dtype), right[name].to(dtype)) if value.is_floating_point() else torch.equal(value, right[name])
        for name, value in left.items()
    )


@pytest.fixture(scope="module")
def qwen2_vl(tiny_model: Callable[..., Path]) -> Callable[..., PromptBuilder]:
    """``qwen2_vl(**mm_processor_kwargs)``: with the processor of Qwen2-VL, but for clips, for which it needs torchvision."""

    class Processor(transformers.Qwen2VLProcessor):  # type: ignore[misc,name-defined] # which has no types
        def check_argument_for_proper_class(self, *_: object) -> None:
            """Takes none for clips."""

    path = tiny_model("llava")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokens = {name: f"<|{name}|>" for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens.values())})
    template = (
        "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    )
    template += "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"

    def make(**mm_processor_kwargs: Any) -> PromptBuilder:
        size = {"shortest_edge": 56 * 56, "longest_edge": 280 * 280}
        image_processor = transformers.Qwen2VLImageProcessorPil(size=size)
        processor = Processor(image_processor, tokenizer, None, chat_template=template)
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=64, intermediate_size=8, num_hidden_layers=1)
        )
        checkpoint = Checkpoint("qwen", model.to(torch.bfloat16), tokenizer, processor, frozenset(), 100_000)
        return PromptBuilder(checkpoint, mm_processor_kwargs)

    return make


def processor_of(prompts: PromptBuilder) -> ProcessorSpec | None:
    prompts.offer_processor()
    return prompts.input.picture and prompts.input.picture.processor


SIZES = [(40, 60), (1, 1), (3, 300), (64, 64), (700, 900)]


def test_inputs_of_qwen2_vl_are_those_of_pixels(qwen2_vl: Callable[..., PromptBuilder]) -> None:
    prompts = qwen2_vl()
    spec = processor_of(prompts)
    pictures = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    features = [processed(spec, picture) for picture in pictures]
    expected = prompts.build(question(pictures))
    assert expected["image_grid_thw"].shape == (len(SIZES), 3)
    assert are_equal(expected, prompts.build(question(features)), torch.bfloat16)
    mixed = [*pictures[:2], *features[2:4], pictures[4]]
    assert are_equal(expected, prompts.build(question(mixed)), torch.bfloat16), "some frontends can process, and some can't"
    assert are_equal(prompts.build_single(pictures[0]), prompts.build_single(features[0]), torch.bfloat16)


@for_each("dtype", ["float32", "bfloat16"])
@for_each("architecture", ["llava", "gemma3"])
def test_answers_and_embeddings_are_those_of_pixels(architecture: str, dtype: str, tiny_model: Callable[..., Path]) -> None:
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model(architecture)), options={"dtype": dtype}))
    spec = executor.describe().input.picture
    assert spec is not None
    pictures = [noise(*size, seed) for seed, size in enumerate(SIZES)]
    features = [processed(spec.processor, picture) for picture in pictures]
    for left, right in zip(pictures, features, strict=True):
        one, other = (executor._prompts.build(question([part])) for part in (left, right))
        assert are_equal(one, other, getattr(torch, dtype))
    assert answer(executor, question(features[:2], seed=5)) == answer(executor, question(pictures[:2], seed=5))
    embedded = [executor.execute([StepInput(1, EncodeRequest([part]))])[0] for part in (pictures[0], features[0])]
    left, right = (output.reply.embeddings for output in embedded)  # type: ignore[union-attr]
    assert torch.equal(left, right)
    executor.close()


def test_with_torchvision_as_well(tiny_model: Callable[..., Path]) -> None:
    skip_without_torchvision()
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("qwen2_vl"))))
    picture = executor.describe().input.picture
    assert picture is not None
    if picture.processor is not None:
        parts = (noise(40, 60), processed(picture.processor, noise(40, 60)))
        one, other = (executor._prompts.build(question([part])) for part in parts)
        assert are_equal(one, other, torch.float32)


def test_a_processor_that_pads_pictures_to_each_other_stays_in_the_engine(
    tiny_model: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "shmring.engine.executors.prompts"):
        executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model("idefics3"))))
    assert "pictures are processed in the engine: it makes no tensor of" in caplog.text
    picture = executor.describe().input.picture
    assert picture is not None
    assert picture.processor is None
    assert answer(executor, question([noise(40, 60)]))


@for_each(
    ("arguments", "says_so"),
    [
        ({}, True),
        ({"max_pixels": 28 * 28 * 8}, True),
        # of which transformers' own count of patches knows nothing
        ({"images_kwargs": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 8}}}, False),
    ],
)
def test_arguments_of_the_processor_reach_frontends(
    arguments: dict[str, Any], says_so: bool, qwen2_vl: Callable[..., PromptBuilder]
) -> None:
    prompts = qwen2_vl(**arguments)
    spec = processor_of(prompts)
    assert (spec is not None) == says_so
    if spec is not None:
        picture = noise(400, 500)
        one, other = (prompts.build(question([part])) for part in (picture, processed(spec, picture)))
        assert are_equal(one, other, torch.bfloat16)
        assert (int(one["image_grid_thw"].prod()) <= 32) == bool(arguments)


@for_each(
    "change",
    [
        lambda features: msgspec.structs.replace(features, content=features.content[:-1]),
        lambda features: msgspec.structs.replace(features, content=features.content[:0]),
        lambda features: msgspec.structs.replace(features, content=features.content.view(torch.int16)),
        lambda features: msgspec.structs.replace(features, content=features.content.reshape(2, -1)),
        lambda features: msgspec.structs.replace(features, layout=[]),
        lambda features: msgspec.structs.replace(features, layout=features.layout * 2),
        lambda features: msgspec.structs.replace(features, layout=[features.layout[0], Feature("x", "int64", (1, 3))]),
        lambda features: msgspec.structs.replace(
            features, layout=[Feature("pixel_values", "bfloat16", (-1, 1176)), features.layout[1]]
        ),
        lambda features: msgspec.structs.replace(
            features, layout=[Feature("pixel_values", "float64", (1, 1176)), features.layout[1]]
        ),
        lambda features: msgspec.structs.replace(
            features, layout=[Feature("pixel_values", "bfloat16", ()), features.layout[1]]
        ),
        lambda features: msgspec.structs.replace(
            features, layout=[Feature("pixel_values", "bfloat16", (1 << 62, 1176)), features.layout[1]]
        ),
    ],
)
def test_features_that_no_processor_makes_are_refused(
    change: Callable[[Features], Features], qwen2_vl: Callable[..., PromptBuilder]
) -> None:
    prompts = qwen2_vl()
    features = processed(processor_of(prompts), noise(40, 60))
    with pytest.raises(ValueError, match="not those that the model's image processor makes"):
        prompts.build(question([change(features)]))
    with pytest.raises(ValueError, match="not those that the model's image processor makes"):
        prompts.build_single(change(features))
    assert prompts.build(question([features]))["pixel_values"].shape[1] == 1176


@for_each("counts", [(1, 1 << 40, 1), (1 << 31, 1 << 31, 1 << 31), (-1, 4, -4), (1 << 62, 1, 1)])
def test_features_with_more_patches_than_they_have_are_refused(
    counts: tuple[int, ...], qwen2_vl: Callable[..., PromptBuilder]
) -> None:
    """Their tokens would fill the memory."""
    prompts = qwen2_vl()
    features = processed(processor_of(prompts), noise(40, 60))
    features.tensors()["image_grid_thw"][:] = torch.tensor(counts)
    with pytest.raises(ValueError, match="not those that the model's image processor makes"):
        prompts.build(question([features]))


@for_each("architecture", ["llava", "gemma3"])  # which share steps, and which do not
def test_features_are_let_go_after_the_first_step(architecture: str, tiny_model: Callable[..., Path]) -> None:
    executor = TransformersExecutor(ExecutorOptions(model=str(tiny_model(architecture))))
    picture = executor.describe().input.picture
    assert picture is not None
    features = processed(picture.processor, noise(40, 60))
    view = weakref.ref(features.content)
    (output,) = executor.execute([StepInput(1, question([features]))])
    del features
    gc.collect()
    assert view() is None
    while not isinstance(output, Exception) and not output.finished:
        (output,) = executor.execute([StepInput(1, None)])
    assert not isinstance(output, Exception)
    executor.close()


def test_where_no_processor_was_named_features_are_refused(qwen2_vl: Callable[..., PromptBuilder]) -> None:
    prompts = qwen2_vl()
    features = processed(processor_of(prompts), noise(40, 60))
    with pytest.raises(ValueError, match="not those that the model's image processor makes"):
        qwen2_vl().build(question([features]))


def test_bits_are_rounded_as_torch_rounds_them() -> None:
    from shmring.engine.picture_processor import _cast

    floats = np.concatenate(
        [np.arange(0, 1 << 32, 65_521, dtype=np.uint64).astype(np.uint32).view(np.float32), np.float32([0, -0.0, 1 / 255])]
    )
    floats = floats[np.isfinite(floats)]
    dtype, bits = _cast(floats, "bfloat16")
    assert dtype == "bfloat16"
    assert torch.equal(torch.from_numpy(bits).view(torch.bfloat16), torch.from_numpy(floats).to(torch.bfloat16))
