"""Packed weights: what they compute, that they are still there to be looked at, and when a model keeps plain ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.executors import packing
from shmring.engine.executors.interface import ExecutorOptions, StepInput
from shmring.engine.executors.packing import PackedLinear, can_pack, pack
from shmring.engine.protocol import ChatMessage, GenerateRequest, SamplingParams, TextPart
from tests.tables import for_each

transformers = pytest.importorskip("transformers")

from shmring.engine.executors import generation  # noqa: E402 - after the skip
from shmring.engine.executors.generation import LanguageModel  # noqa: E402
from shmring.engine.executors.transformers import TransformersExecutor  # noqa: E402
from tests.engine.tiny_models import DECODER  # noqa: E402

packs = pytest.mark.skipif(not can_pack(torch.bfloat16), reason="torch packs no weights of bfloat16 for this processor")


def make_llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER | settings)).eval().to(dtype)


def layers_of(model: torch.nn.Module, kind: type) -> list[str]:
    return [name for name, layer in model.named_modules() if type(layer) is kind]


def logits_of(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.arange(1, 9).unsqueeze(0)).logits
    return logits


# -- a layer ----------------------------------------------------------------------------------------------------------------


@packs
@torch.inference_mode()
@for_each("rows", [0, 1, 3, 16, 130])
@for_each(("outputs", "inputs"), [(64, 32), (33, 70), (1, 5), (512, 96)])
@for_each("bias", [False, True])
def test_a_packed_layer_computes_what_a_plain_one_does(bias: bool, outputs: int, inputs: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    layer = torch.nn.Linear(inputs, outputs, bias=bias).bfloat16()
    weight = layer.weight.clone()
    wide = torch.randn(1, rows, 2 * inputs, generator=generator).bfloat16()
    given = [wide[..., :inputs].contiguous(), wide[..., :inputs], wide[..., ::2], wide[0, :, inputs:], wide[:, :0, :inputs]]
    plain = [layer(values) for values in given]
    pack(torch.nn.Sequential(layer))
    assert type(layer) is PackedLinear
    for values, expected in zip(given, plain, strict=True):
        found = layer(values)
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        exact = values.double() @ weight.double().T + (layer.bias.double() if bias else 0)
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=2**-8)
    assert not layer.was_read
    assert torch.equal(layer.weight, weight)
    layer.unpack()
    assert type(layer) is torch.nn.Linear
    assert isinstance(layer.weight, torch.nn.Parameter)
    assert torch.equal(layer.weight, weight)
    for values, expected in zip(given, plain, strict=True):
        assert torch.equal(layer(values), expected)


@packs
def test_a_tied_weight_stays_with_its_embedding() -> None:
    model = make_llama(tie_word_embeddings=True)
    embedding = model.get_input_embeddings().weight
    pack(model)
    assert type(model.lm_head) is PackedLinear
    assert model.lm_head.weight is embedding
    assert list(model.lm_head.parameters()) == []
    model.lm_head.unpack()
    assert model.lm_head.weight is embedding


@packs
def test_a_packed_weight_takes_the_place_of_the_plain_one() -> None:
    layer = torch.nn.Linear(8, 8).bfloat16()
    pack(torch.nn.Sequential(layer))
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


# -- a model ----------------------------------------------------------------------------------------------------------------


@packs
@for_each("settings", [{}, {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}])
def test_all_layers_of_a_model_are_packed_whether_it_takes_flat_steps_or_not(settings: dict[str, Any]) -> None:
    model = make_llama(**settings)
    expected = logits_of(make_llama(**settings))
    language_model = LanguageModel(model)
    language_model.check()
    assert language_model.flat is not bool(settings)
    assert len(layers_of(model, PackedLinear)) == 2 * 7 + 1
    assert layers_of(model, torch.nn.Linear) == []
    context = language_model.open(language_model.prepare({"input_ids": torch.arange(1, 9).unsqueeze(0)}))
    (logits,) = language_model.advance([(context, 8)])
    assert logits is not None
    torch.testing.assert_close(logits, expected[0, -1].float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))


@packs
def test_a_weight_that_the_architecture_looks_at_stays_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, states: torch.Tensor) -> torch.Tensor:
        scaled = states.to(self.up_proj.weight.dtype)
        return self.down_proj(torch.nn.functional.linear(scaled, self.up_proj.weight) * self.gate_proj(scaled))  # type: ignore[no-any-return]

    monkeypatch.setattr(type(make_llama().model.layers[0].mlp), "forward", forward)
    model = make_llama()
    expected = logits_of(model)
    assert LanguageModel(model).check() is None
    assert layers_of(model, torch.nn.Linear) == [f"model.layers.{layer}.mlp.up_proj" for layer in range(2)]
    assert len(layers_of(model, PackedLinear)) == 2 * 6 + 1
    assert expected.std() > 1, "it computes something"


@packs
@for_each("fault", ["differs", "raises", "no memory"])
def test_weights_are_as_before_if_packed_ones_do_not_do(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_llama(tie_word_embeddings=True)
    weights = {name: weight.clone() for name, weight in model.named_parameters()}
    expected = logits_of(model)
    forward, of = PackedLinear.forward, PackedLinear.of
    packed: list[torch.nn.Linear] = []

    def differ(self: PackedLinear, values: torch.Tensor) -> torch.Tensor:
        return forward(self, values) * 1.5

    def fail(*_: Any) -> Any:
        raise RuntimeError("could not create a primitive")

    def run_out(layer: torch.nn.Linear, **options: Any) -> None:
        if len(packed) == 3:
            raise MemoryError("no room")
        packed.append(layer)
        of(layer, **options)

    if fault == "no memory":
        monkeypatch.setattr(PackedLinear, "of", run_out)
    else:
        monkeypatch.setattr(PackedLinear, "forward", {"differs": differ, "raises": fail}[fault])
    with caplog.at_level(logging.INFO, generation.logger.name):
        assert LanguageModel(model).check() is None
    assert "its weights are not packed" in caplog.text
    assert layers_of(model, PackedLinear) == []
    found = dict(model.named_parameters())
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
    assert model.lm_head.weight is model.get_input_embeddings().weight
    monkeypatch.undo()
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits_of(model), expected)


def test_weights_of_another_dtype_are_plain() -> None:
    model = make_llama(torch.float32)
    assert LanguageModel(model).check() is None
    assert layers_of(model, PackedLinear) == []


def test_weights_are_plain_where_torch_packs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for without in ("_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"):

        class Operators:
            pass

        operators: Any = Operators()
        for name in {"_is_mkldnn_bf16_supported", "_reorder_linear_weight", "_linear_pointwise"} - {without}:
            setattr(operators, name, lambda *_: True)
        monkeypatch.setattr(torch.ops, "mkldnn", operators)
        assert not packing.can_pack(torch.bfloat16)
    monkeypatch.undo()
    monkeypatch.setattr(generation, "can_pack", lambda _: False)
    model = make_llama()
    assert LanguageModel(model).check() is None
    assert layers_of(model, PackedLinear) == []


@packs
def test_an_executor_answers_with_packed_weights(tiny_model: Callable[..., Path]) -> None:
    def answer(executor: TransformersExecutor) -> list[int]:
        request = GenerateRequest([ChatMessage("user", [TextPart("Hi")])], [], SamplingParams(temperature=0, max_tokens=5))
        tokens: list[int] = []
        batch = [StepInput(1, request)]
        while batch:
            (output,) = executor.execute(batch)
            assert not isinstance(output, Exception), output
            tokens += output.reply.token_ids if output.reply else []  # type: ignore[union-attr] # of a request to generate
            batch = [] if output.finished else [StepInput(1, None)]
        return tokens

    options = ExecutorOptions(model=str(tiny_model("llava")), options={"dtype": "bfloat16"})
    executor = TransformersExecutor(options)
    packed = layers_of(executor._checkpoint.model, PackedLinear)
    assert any("vision" in name for name in packed), "pictures are looked at with packed weights, too"
    assert "lm_head" in packed
    found = answer(executor)
    for layer in list(executor._checkpoint.model.modules()):
        if isinstance(layer, PackedLinear):
            layer.unpack()
    assert found == answer(executor) != []
    executor.close()
