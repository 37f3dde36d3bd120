"""``python -m bench steps``: what a step of the executor ``transformers`` costs, without a ring and without HTTP.

The model is a LLaVA with random weights, of 61 million parameters: what is measured is how requests share a step, and no answer
is read. Another checkout can be measured beside this one (``--beside``). Each measurement has a process of its own, of one
thread, so that CPU time does not depend on how many cores wait for each other; the two checkouts take turns.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table

from bench.command_line import DIRECTORY, SETTINGS, NotMeasured, console, measuring
from bench.machine import ROOT
from shmring.engine.executors.interface import ExecutorOptions, StepInput
from shmring.engine.executors.transformers import TransformersExecutor
from shmring.engine.protocol import (
    ChatMessage,
    EncodeRequest,
    GenerateRequest,
    MediumPart,
    Picture,
    SamplingParams,
    Text,
    TextPart,
)

#: Tokens of a prompt, and answers that are written at the same time.
CASES = ((32, 1), (32, 16), (512, 16), (3000, 4))

_TOKENS = 24  # of an answer; the last third of the steps is measured, when all prompts have been read
_STREAMS, _JOINING = 4, 12  # answers, and questions about a picture that come meanwhile
_CALLERS, _TEXTS, _CHARACTERS = 16, 4, 32  # who have texts embedded
_LIMIT_S = 900  # for a process to measure everything


def write_model(directory: Path) -> None:
    """Writes a LLaVA: CLIP of 12 layers for 336 pixels (576 tokens a picture), and 8 layers of Llama. A byte is a token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    transformers: Any = importlib.import_module("transformers")  # which takes seconds, and is typed in part
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(7)
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<end>", "<image>")])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")
    vision = transformers.CLIPVisionConfig(
        hidden_size=384, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=6, image_size=336, patch_size=14
    )
    text = transformers.LlamaConfig(
        vocab_size=32000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        eos_token_id=fast.eos_token_id,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=fast.convert_tokens_to_ids("<image>"),
        tie_word_embeddings=True,
    )
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
        ),
        tokenizer=fast,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template="{% for message in messages %}{% for part in message['content'] %}"
        "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}",
    )
    processor.save_pretrained(directory)
    transformers.LlavaForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(directory)


# -- in a process of its own -----------------------------------------------------------------------------------------------


def measure_steps(model: str, cases: Sequence[Sequence[int]] = CASES, answer_tokens: int = _TOKENS) -> dict[str, float]:
    """Measures everything once; returns numbers by what they are of."""
    torch.set_num_threads(1)
    executor = TransformersExecutor(ExecutorOptions(model=model, options={"max_num_seqs": 32}))
    _execute(executor, [_question("x" * 16, 4)])
    found: dict[str, float] = {}
    for prompt, streams in cases:
        steps = _execute(executor, [_question("x" * prompt, answer_tokens) for _ in range(streams)])
        measured = [cpu_s for _, cpu_s in steps[-max(6, answer_tokens // 3) :]]
        found[f"CPU ms a step, {prompt} x {streams}"] = 1000 * statistics.median(measured)
    joining = [_question("What is it?", 8, _picture(seed)) for seed in range(_JOINING)]
    steps = _execute(executor, [_question("x" * 32, 4 * answer_tokens) for _ in range(_STREAMS)], joining)
    found[f"longest step in ms, {_JOINING} pictures join {_STREAMS}"] = 1000 * max(wall_s for wall_s, _ in steps[1:])
    texts = [EncodeRequest([Text(chr(97 + caller) * _CHARACTERS)] * _TEXTS) for caller in range(_CALLERS)]
    steps = _execute(executor, texts)
    found[f"embeddings/s of CPU, {_CALLERS} callers"] = _CALLERS * _TEXTS / sum(cpu_s for _, cpu_s in steps)
    executor.close()
    return found


def _question(text: str, max_tokens: int, picture: Picture | None = None) -> GenerateRequest:
    parts = ([] if picture is None else [MediumPart(0)]) + [TextPart(text)]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest([ChatMessage("user", parts)], [] if picture is None else [picture], sampling)


def _picture(seed: int) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    return Picture(torch.randint(0, 256, (600, 800, 3), dtype=torch.uint8, generator=generator))


def _execute(executor: TransformersExecutor, requests: Sequence[Any], joining: Sequence[Any] = ()) -> list[tuple[float, float]]:
    """Executes steps until all requests are over, as the engine does; some join at the tenth. Returns wall and CPU time."""
    batch = [StepInput(number, request) for number, request in enumerate(requests)]
    steps: list[tuple[float, float]] = []
    while batch:
        if len(steps) == 10:
            batch += [StepInput(len(requests) + number, request) for number, request in enumerate(joining)]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = executor.execute(batch)
        steps.append((time.perf_counter() - wall, time.process_time() - cpu))
        following = []
        for part, output in zip(batch, outputs, strict=True):
            if isinstance(output, Exception):
                raise output
            if output.finished:
                executor.forget(part.request_id)
            else:
                following.append(StepInput(part.request_id, part.payload if output.keep_inputs else None))
        batch = following
    return steps


# -- the command -----------------------------------------------------------------------------------------------------------


@click.command("steps", context_settings=SETTINGS)
@click.option("--beside", default=None, type=DIRECTORY, help="Another checkout, which is measured in turn with this one.")
@click.option("--model", default=None, type=DIRECTORY, help="A directory that holds a LLaVA.  [default: one that is made up]")
@click.option("--repetitions", default=3, type=click.IntRange(min=1), help="Of each checkout.")
def steps_command(beside: Path | None, model: Path | None, repetitions: int) -> None:
    """CPU time of a step of the executor `transformers`, the longest step while pictures join, and embeddings."""
    checkouts = {"this": ROOT} | ({} if beside is None else {"beside": beside.resolve()})
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
    with tempfile.TemporaryDirectory() as scratch, measuring(repetitions * len(checkouts)) as progress:
        if model is None:
            model = Path(scratch) / "llava"
            write_model(model)
        for repetition in range(repetitions):
            for name, checkout in checkouts.items():
                progress(f"{name}, {repetition + 1} of {repetitions}")
                runs[name].append(_measure_in(checkout, model))
    table = Table("", *checkouts, *(["this / beside"] if beside else []), title="medians (minimum to maximum)")
    for what in runs["this"][0]:
        values = {name: [run[what] for run in found] for name, found in runs.items()}
        medians = [statistics.median(numbers) for numbers in values.values()]
        ratio = [f"{medians[0] / medians[1]:.3f}"] if beside else []
        table.add_row(what, *map(_spread, values.values()), *ratio)
    console().print(table)


def _spread(numbers: Sequence[float]) -> str:
    return f"{statistics.median(numbers):.1f} ({min(numbers):.1f} to {max(numbers):.1f})"


def _measure_in(checkout: Path, model: Path) -> dict[str, float]:
    """Measures a checkout, by the functions of this file."""
    command = [sys.executable, "-P", __file__, str(model.resolve())]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        raise NotMeasured(f"{checkout}: {done.stderr.strip().splitlines()[-1]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    json.dump(measure_steps(sys.argv[1]), sys.stdout)
