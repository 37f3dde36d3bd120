"""The measured program. ``callgrind.py`` starts it, with the ``shmring`` of this checkout and with an earlier one.

Its arguments are the names of cases; without any, it measures all. For each case it prints a line of JSON.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import importlib
import json
import os
import sys
import threading
from types import FrameType
from typing import Any

import uvloop

import shmring

from . import meter
from .case import Case

_TRACED = 10  # one in so many


async def _count(case: Case) -> None:
    """Has callgrind write a dump for each part."""
    await case.act(max(case.messages * case.parts // 2, case.messages))
    gc.collect()
    gc.freeze()
    meter.start()
    for _ in range(case.parts):
        await case.act(case.messages)
        meter.write()
    meter.stop()


async def _bytecodes(case: Case) -> dict[str, float]:
    """Returns how many bytecodes a message takes in each Python function."""
    counts: collections.Counter[str] = collections.Counter()
    messages = max(1, case.messages * case.parts // _TRACED)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        if event == "opcode":
            counts[f"{'/'.join(frame.f_code.co_filename.split('/')[-2:])}: {frame.f_code.co_qualname}"] += 1
        return trace

    threading.settrace(trace)
    sys.settrace(trace)
    await case.act(messages)
    sys.settrace(None)
    threading.settrace(None)
    return {name: count / messages for name, count in counts.items()}


def _pidfd_open(pid: int, flags: int = 0) -> int:
    """In place of ``os.pidfd_open``, which older valgrinds do not know: of a child, or of this process, which lives."""
    ours, theirs = os.pipe()

    def watch() -> None:
        with contextlib.suppress(ChildProcessError):  # its end was seen already
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        os.close(theirs)

    if pid != os.getpid():
        threading.Thread(target=watch, daemon=True).start()
    return ours


async def _main(names: list[str]) -> None:
    """Measures the cases of these names, or all."""
    assert os.path.samefile(os.path.dirname(shmring.__file__), "shmring"), f"{shmring.__file__} is imported"
    meter.keep_clock()
    gc.disable()
    for group in ("transport_cases", "server_cases"):
        try:
            async with importlib.import_module(f".{group}", __package__).opened() as cases:
                for name in [name for name in names if name in cases] if names else cases:
                    await _measure(name, cases[name])
        except Exception as error:  # noqa: BLE001 - an earlier commit may lack what it imports
            _tell(group, failed=f"{type(error).__name__}: {error}")


async def _measure(name: str, case: Case) -> None:
    try:
        await _count(case)
        _tell(name, parts=case.parts, messages=case.messages, bytecodes=await _bytecodes(case))
    except Exception as error:  # noqa: BLE001 - or what it uses
        _tell(name, failed=f"{type(error).__name__}: {error}")


def _tell(case: str, **what: object) -> None:
    print(json.dumps({"case": case, **what}), flush=True)


os.pidfd_open = _pidfd_open
sys.setswitchinterval(1000)  # a thread goes on until it waits
uvloop.run(_main(sys.argv[1:]))
