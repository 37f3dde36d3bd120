"""A program, whose orders are cells: see :mod:`bench.fan_out`."""

from __future__ import annotations

import contextlib
import importlib
import tempfile
from collections.abc import Callable
from multiprocessing.context import ForkProcess

from bench.children import BenchError, settle
from bench.fan_out.measuring import Cell, Run, Stamps, measure
from bench.fan_out.ways import WAYS
from bench.programs import orders


def _play(cell: Cell, directory: str, answer: Callable[[object], None]) -> None:
    """In the engine's process."""
    way = WAYS[cell.subject](cell, directory, Stamps(cell.workers))
    found: Run | Exception
    try:
        found = measure(way)
    except Exception as error:  # noqa: BLE001 # it has its place among the results
        found = error
    finally:
        way.close()
    answer(found)


def _main() -> None:
    with contextlib.suppress(ImportError):  # or each engine would, and each worker
        importlib.import_module("vllm.distributed.device_communicators.shm_broadcast")
    settle()
    for cell, answer in orders(Cell):
        with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
            engine = ForkProcess(target=_play, args=(cell, directory, answer))
            engine.start()
            engine.join()
            if engine.exitcode:
                answer(BenchError(f"the engine ended with {engine.exitcode}"))


if __name__ == "__main__":
    _main()
