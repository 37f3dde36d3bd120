"""What engine and frontends of a run have in common: how they start, hear the driver, and never outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import uvloop

from tests.chaos import control

__all__ = ["Channel", "run_child"]

_PR_SET_PDEATHSIG = 1


class Channel:
    """The child's end of the pipe to the driver.

    Args:
        pipe: questions come in, answers go out.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._questions: asyncio.Queue[control.Question] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the driver has gone: nobody is left who would read what a further step finds
        self._questions.put_nowait(control.decode_question(message))

    async def question(self) -> control.Question:
        """Waits for what the driver says next."""
        return await self._questions.get()

    def answer(self, answer: control.Answer) -> None:
        """Answers it."""
        self._pipe.send_bytes(msgspec.msgpack.encode(answer))


def run_child(program: Any, assignment: Any, pipe: Connection) -> None:
    """The whole life of a child: ``await program(assignment, Channel(pipe))``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver ends us
    # With the process that forked us, and it ends with the driver; a stopped process would not notice otherwise.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    gc.freeze()
    # Every fault of the plan is a warning somewhere; what must not be is in the journal.
    logging.getLogger("shmring").setLevel(logging.CRITICAL)

    async def live() -> None:
        await program(assignment, Channel(pipe))

    with contextlib.suppress(BrokenPipeError):  # the driver has gone
        uvloop.run(live())
