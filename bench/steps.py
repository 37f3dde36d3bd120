"""``python -m bench steps``: what a step of the executor ``transformers`` costs, without a ring and without HTTP.

The model is a LLaVA with random weights, of 61 million parameters: what is measured is how requests share a step, and no answer
is read. Another checkout can be measured beside this one (``--beside``), and the executor ``vllm`` (``--vllm``). Each
measurement has a process of its own, of one thread, so that CPU time does not depend on how many cores wait for each other.

A step of N answers is one in which each of N answers gets a token and no prompt is read. Prompts are read piece by piece, so
answers are long enough for the first to go on when the last one begins.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from bench import columns
from bench.children import BenchError
from bench.columns import compare
from bench.command_line import DIRECTORY, benchmark, measuring, missing_program
from bench.machine import ROOT
from bench.modes import Timing
from bench.repetitions import Repetitions
from bench.results import Coverage, Findings
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import Executor, ExecutorOptions, StepInput
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

_TOKENS = 128  # of an answer: when the last prompt has been read, piece by piece, the first answer goes on for some time
_MEASURED = 24  # steps; the first in which each of the answers gets a token and no prompt is read
_STREAMS, _JOINING = 4, 12  # answers, and questions about a picture that come meanwhile
_CALLERS, _TEXTS, _CHARACTERS = 16, 4, 32  # who have texts embedded
_LIMIT_S = 900  # for a process to measure everything

_OURS = "this"
_CASE = "steps of the executor"


def write_model(directory: Path) -> None:
    """Writes a LLaVA: CLIP of 12 layers for 336 pixels (576 tokens a picture), and 8 layers of Llama."""
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    text = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    text |= {"num_attention_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    torch.manual_seed(7)
    tiny_models: Any = importlib.import_module("tests.engine.tiny_models")  # which takes seconds
    tiny_models.write_llava(directory, side=336, vision=vision, text=text, dtype=torch.bfloat16)


# -- in a process of its own -----------------------------------------------------------------------------------------------


class _Step(NamedTuple):
    """What a step cost, and of how many requests it was."""

    wall_s: float
    cpu_s: float
    requests: int


def measure_steps(
    model: str, cases: Sequence[Sequence[int]] = CASES, answer_tokens: int = _TOKENS, name: str = "transformers"
) -> dict[str, float]:
    """Measures everything once; returns numbers by what they are of. Of the executor ``vllm``, answers to texts alone."""
    torch.set_num_threads(1)
    options: dict[str, Any] = {"max_num_seqs": 32}
    if name == "vllm":  # which does not read weights of this name, and whose answers nobody reads
        options |= {"load_format": "dummy", "enforce_eager": True, "max_model_len": 8192, "gpu_memory_utilization": 0.1}
    executor = create_executor(name, ExecutorOptions(model=model, options=options))
    _execute(executor, [_question("x" * 16, 4)])
    gc.collect()
    gc.freeze()  # as the engine does when it has started: looking through all that was imported stops a step for 0.1 s and more
    found: dict[str, float] = {}
    for prompt, streams in cases:
        found |= _measure_case(executor, prompt, streams, answer_tokens)
    if name == "vllm":
        return found
    joining = [_question("What is it?", 8, _picture(seed)) for seed in range(_JOINING)]
    steps = _execute(executor, [_question("x" * 32, 4 * answer_tokens) for _ in range(_STREAMS)], joining)
    found[f"longest step in ms, {_JOINING} pictures join {_STREAMS}"] = 1000 * max(step.wall_s for step in steps[1:])
    texts = [EncodeRequest([Text(chr(97 + caller) * _CHARACTERS)] * _TEXTS) for caller in range(_CALLERS)]
    steps = _execute(executor, texts)
    found[f"embeddings/s of CPU, {_CALLERS} callers"] = _CALLERS * _TEXTS / sum(step.cpu_s for step in steps)
    executor.close()
    return found


def _measure_case(executor: Executor, prompt: int, streams: int, answer_tokens: int) -> dict[str, float]:
    """Measures steps of which each of the answers gets a token, and all CPU time from the first prompt to the last answer."""
    steps = _execute(executor, [_question("x" * prompt, answer_tokens) for _ in range(streams)])
    # An answer gets a token a step: so many steps before the last one, the last prompt had been read.
    full = [step.cpu_s for step in steps[len(steps) - answer_tokens + 1 :] if step.requests == streams]
    if not full:
        raise RuntimeError(f"{prompt} x {streams}: the first answer has ended before the last one began")
    case = f"{prompt} x {streams}"
    return {
        f"CPU ms a step, {case}": 1000 * statistics.median(full[:_MEASURED]),
        f"all CPU s, {case} + {answer_tokens}": sum(step.cpu_s for step in steps),
    }


def _question(text: str, max_tokens: int, picture: Picture | None = None) -> GenerateRequest:
    parts = ([] if picture is None else [MediumPart(0)]) + [TextPart(text)]
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest([ChatMessage("user", parts)], [] if picture is None else [picture], sampling)


def _picture(seed: int) -> Picture:
    generator = torch.Generator().manual_seed(seed)
    return Picture(torch.randint(0, 256, (600, 800, 3), dtype=torch.uint8, generator=generator))


def _execute(executor: Executor, requests: Sequence[Any], joining: Sequence[Any] = ()) -> list[_Step]:
    """Executes steps until all requests are over, as the engine does; some join at the tenth."""
    batch = [StepInput(number, request) for number, request in enumerate(requests)]
    steps: list[_Step] = []
    while batch:
        if len(steps) == 10:
            batch += [StepInput(len(requests) + number, request) for number, request in enumerate(joining)]
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = executor.execute(batch)
        steps.append(_Step(time.perf_counter() - wall, time.process_time() - cpu, len(batch)))
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


class _Peer(NamedTuple):
    """What is measured: a checkout, in an environment."""

    checkout: Path
    python: str = sys.executable
    executor: str = "transformers"


# -- the command -----------------------------------------------------------------------------------------------------------


@benchmark("steps", repetitions="Of each checkout.", seconds=False)
@click.option("--beside", default=None, type=DIRECTORY, help="Another checkout, which is measured in turn with this one.")
@click.option("--model", default=None, type=DIRECTORY, help="A directory that holds a LLaVA.  [default: one that is made up]")
@click.option(
    "--vllm", default=None, type=DIRECTORY, help="Which has vLLM, whose executor is measured, too; see `make test-vllm`."
)
def steps_command(timing: Timing, beside: Path | None, model: Path | None, vllm: Path | None) -> Findings:
    """CPU time of a step of the executor `transformers`, the longest step while pictures join, and embeddings."""
    peers = {_OURS: _Peer(ROOT)}
    if beside is not None:
        if not (beside / "shmring").is_dir():  # the shmring that is installed would be measured
            raise click.UsageError(f"{beside} is no checkout of shmring")
        peers["beside"] = _Peer(beside.resolve())
    if vllm is not None:
        if (missing := missing_program(vllm, "vllm", "vLLM")) is not None:
            raise click.UsageError(missing)
        peers["vllm"] = _Peer(ROOT, str(vllm.absolute() / "bin" / "python"), "vllm")
    runs = Repetitions[str, dict[str, float]]({_CASE: list(peers)}, timing.repetitions)
    with tempfile.TemporaryDirectory() as scratch, measuring(runs.steps) as progress:
        if model is None:
            model = Path(scratch) / "llava"
            write_model(model)
        runs.measure([_CASE], lambda _, name: _measure(peers[name], model), progress)
    return report(runs.measured.get(_CASE, {}), runs.coverage())


def report(runs: Mapping[str, Sequence[Mapping[str, float]]], coverage: Coverage) -> Findings:
    """Returns what a run has found: a row for each number of each peer."""
    numbers = dict.fromkeys(what for of_peer in runs.values() for run in of_peer for what in run)
    measured = {
        what: {name: found for name, of_peer in runs.items() if (found := [run[what] for run in of_peer if what in run])}
        for what in numbers
    }
    shown = (columns.median("median", float, 1), columns.spread("least, most", float), columns.ratio("this is", _OURS, float))
    return Findings(mode="steps", tables=[compare(_CASE, ("number", "of"), measured, shown)], coverage=coverage)


def _measure(peer: _Peer, model: Path) -> dict[str, float]:
    """Measures a peer, by the functions of this file."""
    command = [peer.python, "-P", __file__, str(model.resolve()), peer.executor]
    environment = os.environ | {"PYTHONPATH": str(peer.checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=peer.checkout, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise BenchError(f"{peer.executor} of {peer.checkout}: {said[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])  # vLLM says something before
    return found


if __name__ == "__main__":
    json.dump(measure_steps(sys.argv[1], name=sys.argv[2]), sys.stdout)
