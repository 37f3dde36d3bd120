"""``python -m bench steps``: what a step of the executor ``transformers`` costs, without a ring and without HTTP.

The model is a LLaVA with random weights, of 61 million parameters: what is measured is how requests share a step, and no answer
is read. transformers' own continuous batching answers the same prompts at the same length. Another checkout can be measured
beside this one (``--beside``). Each measurement has a process of its own, of one thread, so that CPU time does not depend on
how many cores wait for each other.

A step of N answers is one in which each of N answers gets a token and no prompt is read. Prompts are read piece by piece, so
answers are long enough for the first to go on when the last one begins. How long a step's tokens are chosen is measured apart,
with a vocabulary of 151,936 tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import torch

from bench import columns
from bench.children import BenchError
from bench.columns import compare
from bench.command_line import DIRECTORY, benchmark
from bench.machine import ROOT
from bench.plan import Plan, Runs, Timing
from bench.repetitions import Measured
from bench.results import Table
from bench.step_program import CONTINUOUS
from bench.targets import Numbers, Target, ratios

_LIMIT_S = 900  # for a process to measure everything

#: Is run with the ``shmring`` of a peer.
PROGRAM = Path(__file__).with_name("step_program.py")

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


_COLUMNS = (columns.median("median", float, 1), columns.spread("least, most", float), columns.ratio("this is", _OURS, float))


def _numbers(measured: Measured) -> Measured:
    """Returns the same by what its numbers are of."""
    found = measured.get(_CASE, {})
    whats = dict.fromkeys(what for runs in found.values() for run in runs for what in run)
    return {
        what: {name: numbers for name, runs in found.items() if (numbers := [run[what] for run in runs if what in run])}
        for what in whats
    }


def _tables(measured: Measured) -> list[Table]:
    return [compare(_CASE, ("number", "of"), _numbers(measured), _COLUMNS)]


def _beside_continuous(measured: Measured) -> Numbers:
    """Of its time to ours."""
    numbers = _numbers(measured)
    return ratios(CONTINUOUS, _OURS, float, {what: what for what in numbers if what.startswith("all CPU s")})(numbers)


PLAN = Plan(
    mode="steps",
    cases={_CASE: [_OURS, CONTINUOUS]},
    timing=Timing(3),
    tables=_tables,
    targets=[
        Target(
            "tokens per CPU second, of transformers' continuous batching", "prompts and answers", 0.9, "x", _beside_continuous
        )
    ],
)


@benchmark(PLAN)
@click.option("--beside", default=None, type=DIRECTORY, help="Another checkout, which is measured in turn with this one.")
def steps_command(runs: Runs, beside: Path | None) -> None:
    """CPU time of a step of the executor `transformers`, the longest one while pictures join, embeddings, choosing tokens."""
    checkouts = dict.fromkeys(runs.cases[_CASE], ROOT)
    if beside is not None:
        if not (beside / "shmring").is_dir():  # the shmring that is installed would be measured
            raise click.UsageError(f"{beside} is no checkout of shmring")
        checkouts["beside"] = beside.resolve()
        runs.plan = dataclasses.replace(runs.plan, cases={_CASE: list(checkouts)})
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llava"
        write_model(model)
        runs.measure(lambda _, name: _measure(checkouts[name], name, model))


def _measure(checkout: Path, name: str, model: Path) -> dict[str, float]:
    executor = CONTINUOUS if name == CONTINUOUS else "transformers"
    command = [sys.executable, "-P", str(PROGRAM), str(model), executor]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise BenchError(f"{executor} of {checkout}: {said[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])  # some say something before
    return found
