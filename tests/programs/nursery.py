"""Starts other programs in milliseconds: ``nursery.py``, told by lines of JSON on stdin, answers with pids on stdout.

It has imported torch and shmring once, and forks for each program, which then runs as if started by itself: its own
arguments, environment and output files. A program's text runs in a new module ``__main__``, and then the interpreter ends as it
always does; the process of a program's file ends at once. Nobody waits for the dead, until somebody asks how one has ended: so
a pid means the same process until then. With its stdin closed the nursery ends, and all that it started is killed with it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
import types
from typing import Any

import torch
import uvloop

import shmring
from shmring.processes.child import end_with_parent

# Naming both ends imports what is behind them: without that each child would, which takes longer than all else it does.
IMPORTED = (shmring.Ring, shmring.Client, uvloop)


def next_child() -> dict[str, Any]:
    """Returns only in the children: what each was ordered to be."""
    for line in sys.stdin:
        order: dict[str, Any] = json.loads(line)
        if "ended" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["ended"], 0)[1])
        elif (answer := os.fork()) == 0:
            return order
        print(answer, flush=True)
    os._exit(0)


def settle_in(order: dict[str, Any]) -> None:
    """Gives a child what is its own."""
    end_with_parent()
    for fd, path in (0, os.devnull), (1, order["output"]), (2, order["errors"]):
        own = os.open(path, os.O_RDONLY if fd == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(own, fd)
        os.close(own)
    os.environ.update(order["environment"])
    sys.argv = [order.get("program", "-c"), *order["arguments"]]


def run_file(path: str) -> int:
    """Runs a program; returns its exit status."""
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001 - as an interpreter does with what nobody caught
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else each child's first collection walks through all of torch, and copies the pages that it marks
    print("ready", flush=True)
    child = next_child()
    settle_in(child)
    if "program" in child:
        os._exit(run_file(child["program"]))
    # Of its own: what was frozen, as this module, is not looked through when the interpreter ends.
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(child["text"], "<string>", "exec"), vars(sys.modules["__main__"]))
