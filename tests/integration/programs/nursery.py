"""Starts other programs in milliseconds: ``nursery.py``, told by lines of JSON on stdin, answers with pids on stdout.

It has imported torch and shmring once, and forks for each program, which then runs as if started by itself: its own
arguments, environment and output file. Nobody waits for the dead, so that a pid means the same process for as long as the
nursery lives; with its stdin closed it ends, and all that it started is killed with it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import traceback
from typing import Any

import torch
import uvloop

import shmring
from shmring.processes.child import end_with_parent

# Naming both ends imports what is behind them: without that each child would, which takes longer than all else it does.
IMPORTED = (shmring.Ring, shmring.Client, uvloop)


def become(order: dict[str, Any]) -> int:
    """The child's life; returns its exit status."""
    end_with_parent()
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.close(nothing)
    os.environ.update(order["environment"])
    sys.argv = [order["program"], *order["arguments"]]
    try:
        runpy.run_path(order["program"], run_name="__main__")
    except SystemExit as error:
        return int(error.code or 0)
    except BaseException:  # noqa: BLE001 - as an interpreter does with what nobody caught
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def main() -> None:
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # else each child's first collection walks through all of torch, and copies the pages that it marks
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os._exit(become(order))
        print(pid, flush=True)


if __name__ == "__main__":
    main()
