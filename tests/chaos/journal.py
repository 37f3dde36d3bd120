"""What each process writes down while it lives, so that what it did can be told after it was killed.

A record is a line of JSON, appended with one ``write``: what was written before a SIGKILL is in the file, whole. Times are
``time.monotonic_ns``, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tests.fleet import cargo
from tests.fleet.cargo import CorruptedError, Order


class _Line(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A record."""


class Began(_Line, frozen=True, tag="began"):
    """A frontend sends a request."""

    number: int
    kind: str
    at_ns: int


class Ended(_Line, frozen=True, tag="ended"):
    """A request of a frontend has ended, for its caller: "answered", "aborted", or the failure's type.

    ``since_ns`` is when its caller began to wait for what has told it so. A caller that does something else before, or reads
    other replies, hears of a failure when it looks.
    """

    number: int
    outcome: str
    at_ns: int
    since_ns: int = 0


class Aborted(_Line, frozen=True, tag="aborted"):
    """A frontend has aborted a request that has slots with the engine.

    This and the records below carry for how long the processes had waited for a core until then (:mod:`.cores`).
    """

    number: int
    at_ns: int
    waited_ns: int = 0
    engine_waited_ns: int = 0


class Reusable(_Line, frozen=True, tag="reusable"):
    """The slots of an aborted request are the frontend's again."""

    number: int
    at_ns: int
    waited_ns: int = 0
    engine_waited_ns: int = 0


class Held(_Line, frozen=True, tag="held"):
    """An engine, or a worker of it, has stopped reading a request: its handler has ended, or its last view has died."""

    sender: int
    number: int
    until_ns: int
    engine: int
    engine_waited_ns: int = 0


class Gone(_Line, frozen=True, tag="gone"):
    """The engine has nothing of a process any more; ``nbytes`` came back in all.

    ``heard_ns`` is when the kernel's word of its death came, and ``heard_waited_ns`` how long the engine had waited for a core
    then; 0 if the process had left before.
    """

    pid: int
    nbytes: int
    at_ns: int
    engine_waited_ns: int = 0
    heard_ns: int = 0
    heard_waited_ns: int = 0


class Wrong(_Line, frozen=True, tag="wrong"):
    """Something that must not be: "corrupted", or "violation" of an invariant."""

    what: str
    text: str
    at_ns: int


Record = Began | Ended | Aborted | Reusable | Held | Gone | Wrong

_decoder: msgspec.json.Decoder[Record] = msgspec.json.Decoder(Record)


class Journal:
    """The file of one process.

    Args:
        path: created.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._encoder = msgspec.json.Encoder()

    def write(self, record: Record) -> None:
        """Appends a record; when this returns, the kernel has it."""
        os.write(self._fd, self._encoder.encode(record) + b"\n")

    def wrong(self, what: str, text: str) -> None:
        """Writes down what must not be."""
        self.write(Wrong(what, text, time.monotonic_ns()))

    def check(self, order: Order, when: str) -> None:
        """Looks at the content of a request, and writes down if it is not what was sent."""
        try:
            cargo.check(order.tensor, order.number, order.checksum, f"{when}, sent by process {order.sender}")
        except CorruptedError as error:
            self.wrong("corrupted", str(error))

    def ended(self, task: asyncio.Task[Any]) -> None:
        """For ``add_done_callback``: a task that fails is wrong."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.wrong("violation", f"a worker has failed: {type(error).__name__}: {error}")


def read(path: Path) -> Iterator[Record]:
    """Yields the records of a file; a last line that its writer's death has cut is left out."""
    for line in path.read_bytes().split(b"\n")[:-1]:
        yield _decoder.decode(line)
