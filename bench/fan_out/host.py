"""A process that imports what its subjects need, once, and forks an engine for each cell that it is sent.

It is a :class:`bench.programs.Program`, whose orders are cells.
"""

from __future__ import annotations

import importlib
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvloop

from bench.children import settle
from bench.fan_out.measuring import Cell, Run, Stamps, end_after, measure
from bench.fan_out.ways import WAYS
from bench.programs import orders
from shmring.memory.slab import SHM_DIRECTORY


class Outcome(msgspec.Struct, frozen=True):
    """What became of a cell.

    Attributes:
        run: what was measured; None: it failed.
        error: why.
    """

    run: Run | None = None
    error: str = ""


def _play(cell: Cell, directory: str) -> Outcome:
    """In the engine's process."""
    way = WAYS[cell.subject](cell, directory, Stamps(cell.workers))
    try:
        return Outcome(measure(way, uvloop.run))
    except Exception as error:  # noqa: BLE001 # it has its place among the results
        traceback.print_exc()
        return Outcome(error=f"{type(error).__name__}: {error}")
    finally:
        way.close()


def _fork(cell: Cell, directory: str, answer: Callable[[object], None]) -> None:
    pid = os.fork()
    if not pid:
        end_after(lambda: answer(_play(cell, directory)))
    _, status = os.waitpid(pid, 0)
    if status:
        answer(Outcome(error=f"the engine ended with {status}"))


def _main() -> None:
    for module in ("zmq", "iceoryx2", "vllm.distributed.device_communicators.shm_broadcast"):
        try:
            importlib.import_module(module)  # or each engine would, and each worker
        except ImportError:
            continue
    settle()
    for cell, answer in orders(Cell):
        with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
            _fork(cell, directory, answer)
        for path in SHM_DIRECTORY.glob(f"{Path(directory).name}*"):  # iceoryx2 leaves some behind, by intent
            path.unlink(missing_ok=True)


if __name__ == "__main__":
    _main()
