"""``bench vllm-encoders``: what an encoder has made goes to another engine of vLLM, by files, by shmring, or not at all.

What is compared is CPU. Digests say whether the ways compute the same.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from bench import columns
from bench.columns import Column
from bench.machine import ROOT
from bench.plan import Plan, Timing
from bench.programs import Program
from bench.targets import Target, medians, ratios
from bench.vllm.encoder_engine import CONNECTOR, Order, Seen
from shmring.engine.store.process import Ready
from shmring.processes.process import Process

_OURS, _FILES, _WITHOUT = "shmring", "ECExampleConnector", "without"
WAYS = (_OURS, _FILES, _WITHOUT)

CASE = "a picture of 2,025 tokens, 16.6 MB"
_SIDE, _WIDTH, _PATCHES = 720, 4096, 45
_PICTURES = 4
_SLAB, _KEPT = "512MiB", "384MiB"
_ORDER_LIMIT_S = 600.0  # a hundred times what one takes
_START_LIMIT_S = 60.0  # of a store, which imports torch

_OPTIONS = {
    "max_model_len": 3072,
    "max_num_batched_tokens": 4096,
    "max_num_seqs": 2,
    "limit_mm_per_prompt": {"image": 1},
}


class EncodersRun(msgspec.Struct, frozen=True):
    """One repetition of a way: pictures that an encoder has seen, and another engine after it.

    Attributes:
        save_ms, look_ms, load_ms: CPU for a picture.
        save_wall_ms: how long the encoder's model waits.
        copies: that time, in memcpys of the output in the same process.
        again_us: of looking up what was found.
        request_ms: CPU of the second engine for a request.
        encoded: pictures that it has encoded.
        left_nbytes: in files, after the run.
        digest: of its answers.
    """

    save_ms: float | None
    save_wall_ms: float | None
    copies: float | None
    look_ms: float | None
    load_ms: float | None
    again_us: float | None
    request_ms: float
    encoded: int
    left_nbytes: int
    digest: str


# -- what is measured --------------------------------------------------------------------------------------------------------


class Pair:
    """An encoder and the engine that uses its outputs; or an engine alone.

    Args:
        engine, encoder: their programs.
        files: where outputs are left.
    """

    def __init__(self, engine: Program, encoder: Program | None, files: Path) -> None:
        self._engine, self._encoder, self._files = engine, encoder, files
        self._numbers = itertools.count()

    def warm_up(self) -> None:
        """Has each compute a few."""
        self.measure()

    def measure(self) -> EncodersRun:
        """Asks both about new pictures."""
        order = Order([next(self._numbers) for _ in range(_PICTURES)])
        saved = None if self._encoder is None else self._encoder.order(order, Seen)
        seen = self._engine.order(order, Seen)
        left = sum(path.stat().st_size for path in self._files.rglob("*") if path.is_file())
        if saved is None:
            return EncodersRun(*(None,) * 6, statistics.median(seen.request_ms), seen.encoded, left, seen.digest)
        median = statistics.median
        return EncodersRun(
            save_ms=median(saved.save_ms),
            save_wall_ms=median(saved.save_wall_ms),
            copies=median(saved.save_wall_ms) / median(saved.copy_ms),
            look_ms=median(seen.look_ms),
            load_ms=median(seen.load_ms),
            again_us=median(seen.again_us),
            request_ms=median(seen.request_ms),
            encoded=seen.encoded,
            left_nbytes=left,
            digest=seen.digest,
        )


@contextlib.contextmanager
def made_model(installation: Path) -> Iterator[Path]:
    """Makes the model of all engines."""
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        sizes = map(str, (_SIDE, _WIDTH, _PATCHES))
        making = [str(installation / "bin" / "python"), "-m", "tests.vllm.tiny_model", directory, *sizes]
        subprocess.run(making, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        yield Path(directory)


@contextlib.contextmanager
def pair(way: str, installation: Path, model: Path) -> Iterator[Pair]:
    """Starts a way's engines."""
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory, contextlib.ExitStack() as stack:
        files = Path(directory) / "files"
        python = str(installation / "bin" / "python")
        transfer: dict[str, Any] | None = None
        if way == _OURS:
            stack.enter_context(_store(directory))
            transfer = CONNECTOR | {"ec_connector_extra_config": {"store": "encoders", "socket_dir": directory}}
        elif way == _FILES:
            files.mkdir()
            transfer = {"ec_connector": _FILES, "ec_connector_extra_config": {"shared_storage_path": str(files)}}

        def start(role: str) -> Program:
            given = None if transfer is None else transfer | {"ec_role": role}
            said = json.dumps({"model": str(model), "transfer": given, "options": _OPTIONS})
            inherited = {name: value for name, value in os.environ.items() if "SHMRING_VLLM" not in name}
            command = [python, "-m", "bench.vllm.encoder_program", said]
            program = stack.enter_context(Program(command, inherited, _ORDER_LIMIT_S))
            program.start()
            return program

        encoder = None if transfer is None else start("ec_producer")
        yield Pair(start("ec_consumer"), encoder, files)


@contextlib.contextmanager
def _store(directory: str) -> Iterator[None]:
    """A store in a process of its own; it is there."""
    options = [f"--slab={_SLAB}", f"--kept-nbytes={_KEPT}", f"--socket-dir={directory}", "--log-level=warning"]
    command = [sys.executable, "-m", "shmring.engine.store", "encoders", *options]
    with Process.start(command, ready_flag="--ready-fd=", cwd=ROOT) as process:
        process.wait_until_ready(Ready, _START_LIMIT_S)
        yield


# -- what came of it ---------------------------------------------------------------------------------------------------------

_COLUMNS = (
    columns.median("save ms", "save_ms", 2),
    columns.ratio("shmring is", _OURS, "save_ms"),
    columns.median("the model waits ms", "save_wall_ms", 2),
    columns.median("memcpys", "copies", 2),
    columns.median("look-up ms", "look_ms", 2),
    columns.median("again us", "again_us", 2),
    columns.median("load ms", "load_ms", 2),
    columns.median("request ms", "request_ms"),
    columns.spread("spread", "request_ms"),
    columns.median("encoded", "encoded"),
    Column("MB in files", lambda row: f"{row.runs[-1].left_nbytes / 1e6:.0f}"),
    Column("digest", lambda row: hashlib.sha256(" ".join(run.digest for run in row.runs).encode()).hexdigest()[:8]),
)


def _ours(what: str, number: str, limit: float, unit: str) -> Target:
    numbers = medians(_OURS, number, {_OURS: CASE})
    return Target(f"vLLM, encoder outputs, {what}", CASE, limit, unit, numbers, at_least=False)


def _beside(what: str, number: str, limit: float) -> Target:
    numbers = ratios(_OURS, _FILES, number, {_FILES: CASE})
    return Target(f"vLLM, encoder outputs, {what} of {_FILES}", CASE, limit, "x", numbers, at_least=False)


TARGETS = (
    _ours("saving: the model waits for memcpys of the output", "copies", 1.2, "x"),
    _ours("a look-up of what is pinned", "again_us", 5, "us"),
    _ours("pictures that were encoded twice", "encoded", 0, "pictures"),
    _beside("saving: CPU", "save_ms", 0.5),
    _beside("loading: CPU", "load_ms", 1),
)

TITLES: Mapping[str, str] = {_WITHOUT: "without a connector"}

PLAN = Plan(
    mode="vllm-encoders",
    cases={CASE: WAYS},
    timing=Timing(7),
    tables=columns.shown_as("From an encoder to another engine, one request at a time", ("picture", "way"), _COLUMNS, TITLES),
    titles=TITLES,
    targets=TARGETS,
    notes=[
        "Real vLLM on the CPU with a model that computes nearly nothing: each engine is one process. An encoder sees "
        f"{_PICTURES} new pictures, and then another engine is asked about them. All engines run at the same time. ms: of CPU, "
        "of all threads of the process, for a picture; save in the encoder, the others in the engine behind it. memcpys: the "
        "time for which the encoder's model waits, in copies of the output by torch in the same process. again: looking up "
        "once more what was found. encoded: pictures that the second engine has encoded. digest: of its answers and logprobs."
    ],
)
