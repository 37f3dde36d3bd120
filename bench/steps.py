"""``python -m bench steps``: what a step of the executor ``transformers`` costs, without a ring and without HTTP.

The model is a LLaVA with random weights, of 61 million parameters: what is measured is how requests share a step, and no answer
is read. transformers' own continuous batching answers the same prompts at the same length. Another checkout can be measured
beside this one (``--beside``), and the executor ``vllm`` (``--vllm``). Each measurement has a process of its own, of one
thread, so that CPU time does not depend on how many cores wait for each other.

A step of N answers is one in which each of N answers gets a token and no prompt is read. Prompts are read piece by piece, so
answers are long enough for the first to go on when the last one begins. How long a step's tokens are chosen is measured apart,
with a vocabulary of 151,936 tokens.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch

from bench import columns
from bench.children import BenchError
from bench.columns import compare
from bench.command_line import DIRECTORY, benchmark, missing_program
from bench.machine import ROOT
from bench.repetitions import Repetitions, Timing
from bench.results import Findings
from bench.step_program import CONTINUOUS
from bench.targets import Target, ratios

_LIMIT_S = 900  # for a process to measure everything

#: Is run with the ``shmring`` of a peer.
PROGRAM = Path(__file__).with_name("step_program.py")

_OURS = "this"
_TARGET = "tokens per CPU second, of transformers' continuous batching"
_CASE = "steps of the executor"


def write_model(directory: Path) -> None:
    """Writes a LLaVA: CLIP of 12 layers for 336 pixels (576 tokens a picture), and 8 layers of Llama."""
    vision = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    text = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
    text |= {"num_attention_heads": 8, "max_position_embeddings": 8192, "tie_word_embeddings": True}
    torch.manual_seed(7)
    tiny_models: Any = importlib.import_module("tests.engine.tiny_models")  # which takes seconds
    tiny_models.write_llava(directory, side=336, vision=vision, text=text, dtype=torch.bfloat16)


class _Peer(NamedTuple):
    """A checkout, in an environment."""

    checkout: Path
    python: str = sys.executable
    executor: str = "transformers"


@benchmark("steps", Timing(3))
@click.option("--beside", default=None, type=DIRECTORY, help="Another checkout, which is measured in turn with this one.")
@click.option(
    "--vllm", default=None, type=DIRECTORY, help="Which has vLLM, whose executor is measured, too; see `make test-vllm`."
)
def steps_command(timing: Timing, beside: Path | None, vllm: Path | None) -> Findings:
    """CPU time of a step of the executor `transformers`, the longest one while pictures join, embeddings, choosing tokens."""
    peers = {_OURS: _Peer(ROOT), CONTINUOUS: _Peer(ROOT, executor=CONTINUOUS)}
    if beside is not None:
        if not (beside / "shmring").is_dir():  # the shmring that is installed would be measured
            raise click.UsageError(f"{beside} is no checkout of shmring")
        peers["beside"] = _Peer(beside.resolve())
    if vllm is not None:
        if (missing := missing_program(vllm, "vllm", "vLLM")) is not None:
            raise click.UsageError(missing)
        peers["vllm"] = _Peer(ROOT, str(vllm.absolute() / "bin" / "python"), "vllm")
    runs = Repetitions[str, dict[str, float]]({_CASE: list(peers)}, timing.repetitions)
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "llava"
        write_model(model)
        runs.measure([_CASE], lambda _, name: _measure(peers[name], model))
    found = runs.measured.get(_CASE, {})
    numbers = dict.fromkeys(what for of_peer in found.values() for run in of_peer for what in run)
    measured = {
        what: {name: of_runs for name, of_peer in found.items() if (of_runs := [run[what] for run in of_peer if what in run])}
        for what in numbers
    }
    shown = (columns.median("median", float, 1), columns.spread("least, most", float), columns.ratio("this is", _OURS, float))
    whole = {what: what for what in measured if what.startswith("all CPU s")}
    target = Target(_TARGET, "prompts and answers", 0.9, "x", ratios(CONTINUOUS, _OURS, float, whole))  # of its time to ours
    tables = [compare(_CASE, ("number", "of"), measured, shown)]
    return Findings(mode="steps", tables=tables, targets=[target.judge(measured)], coverage=runs.coverage())


def _measure(peer: _Peer, model: Path) -> dict[str, float]:
    command = [peer.python, "-P", str(PROGRAM), str(model), peer.executor]
    environment = os.environ | {"PYTHONPATH": str(peer.checkout), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=peer.checkout, capture_output=True, text=True, timeout=_LIMIT_S)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise BenchError(f"{peer.executor} of {peer.checkout}: {said[-1]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])  # vLLM says something before
    return found
