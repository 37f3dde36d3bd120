"""What engine and frontends of a run have in common: how they start, hear the driver, time their loop, and never outlive it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
import uvloop

from shmring.processes.child import end_with_parent

_TICK_S = 0.005  # as fine as the stalls that are looked for

Program = Callable[[Any, "Channel"], Awaitable[None]]


class Channel:
    """The child's end of the pipe to the driver.

    Args:
        pipe: questions come in, answers go out, as msgpack.
        questions: decodes them.
    """

    def __init__(self, pipe: Connection, questions: msgspec.msgpack.Decoder[Any]) -> None:
        self._pipe = pipe
        self._decoder = questions
        self._questions: asyncio.Queue[Any] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        loop.add_reader(pipe.fileno(), self._readable)

    def _readable(self) -> None:
        try:
            message = self._pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)  # the driver has gone: nobody is left who would read what a further step finds
        self._questions.put_nowait(self._decoder.decode(message))

    async def question(self) -> Any:
        """Waits for what the driver says next."""
        return await self._questions.get()

    def answer(self, answer: msgspec.Struct) -> None:
        """Answers it."""
        self._pipe.send_bytes(msgspec.msgpack.encode(answer))


class LagMeter:
    """Measures by how much the loop is late: the longest since it was last asked."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._longest_s = 0.0
        self._arm()

    def _arm(self) -> None:
        due = self._loop.time() + _TICK_S
        self._loop.call_at(due, self._tick, due)

    def _tick(self, due: float) -> None:
        self._longest_s = max(self._longest_s, self._loop.time() - due)
        self._arm()

    def take(self) -> float:
        """Returns the longest lag in seconds, and begins anew."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s


def run_child(program: Program, assignment: Any, pipe: Connection, question_type: Any) -> None:
    """The whole life of a child: ``await program(assignment, Channel(pipe, questions))``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the driver ends us
    # With the process that forked us, and it ends with the driver; a stopped process would not notice otherwise.
    end_with_parent()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # what was imported is no garbage, and a walk through it would be taken for a stall

    async def live() -> None:
        await program(assignment, Channel(pipe, msgspec.msgpack.Decoder(question_type)))

    with contextlib.suppress(BrokenPipeError):  # the driver has gone
        uvloop.run(live())
