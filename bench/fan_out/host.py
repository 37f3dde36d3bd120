"""A process that imports what its subjects need, once, and forks an engine for each cell that it reads from stdin.

``python -m bench.fan_out.host own`` or ``foreign``. Cells and their results are lines of JSON; whatever else is printed goes
to stderr. It ends with stdin; the processes of a cell are in its session, so that whoever started it can end them all.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import IO

import msgspec
import torch
import uvloop

from bench.fan_out.measuring import Stamps, Way, measure
from bench.fan_out.plan import Cell, Run

__all__ = ["Outcome"]

_SHARED_MEMORY = Path("/dev/shm")


class Outcome(msgspec.Struct, frozen=True):
    """What became of a cell.

    Attributes:
        run: what was measured; None: it failed.
        error: why.
    """

    run: Run | None = None
    error: str = ""


def _play(ways: dict[str, type[Way]], cell: Cell, directory: str) -> Outcome:
    """In the engine's process."""
    way = ways[cell.subject](cell, directory, Stamps(cell.workers))
    try:
        return Outcome(measure(way, uvloop.run))
    except Exception as error:  # noqa: BLE001 # it has its place among the results
        traceback.print_exc()
        return Outcome(error=f"{type(error).__name__}: {error}")
    finally:
        way.close()


def _fork(ways: dict[str, type[Way]], cell: Cell, directory: str, results: IO[bytes]) -> None:
    pid = os.fork()
    if pid:
        _, status = os.waitpid(pid, 0)
        if status:
            results.write(msgspec.json.encode(Outcome(error=f"the engine ended with {status}")) + b"\n")
            results.flush()
        return
    code = 1
    try:
        results.write(msgspec.json.encode(_play(ways, cell, directory)) + b"\n")
        results.flush()
        code = 0
    except BaseException:  # noqa: BLE001 # the host says that it has failed, and this says why
        traceback.print_exc()
    finally:
        os._exit(code)


def _main(kind: str) -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    ways: dict[str, type[Way]] = importlib.import_module(f"bench.fan_out.{'ways' if kind == 'own' else 'foreign'}").WAYS
    for module in ("zmq", "iceoryx2", "vllm.distributed.device_communicators.shm_broadcast"):
        try:
            importlib.import_module(module)  # or each engine would, and each worker
        except ImportError:
            continue
    gc.collect()
    gc.freeze()
    results.write(b"ready\n")
    results.flush()
    for line in sys.stdin.buffer:
        with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
            _fork(ways, msgspec.json.decode(line, type=Cell), directory, results)
        for path in _SHARED_MEMORY.glob(f"{Path(directory).name}*"):  # iceoryx2 leaves some behind, by intent
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    _main(sys.argv[1])
