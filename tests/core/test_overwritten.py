"""A record that somebody overwrites in its ring, after it was taken, is what it was.

Its place is given back before it is looked at, and the ring is memory of both ends. So whatever a record says is read from a
private copy: what was checked is what is used. The tests overwrite the ring while a submission is being checked: with an array
whose dtype has no number, the check calls a function that they replace.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shmring.core import compiled
from shmring.core.compiled import (
    BaseClaim,
    BaseFrontend,
    EngineBook,
    EngineEnd,
    HeldSlots,
    Home,
    LinkReader,
    Mapping,
    RecordHandler,
    RecordWriter,
    Regions,
    ring_nbytes,
)
from shmring.core.geometry import EngineBookLimits, Geometry
from shmring.memory.tensors import make_decoder, make_packer
from tests.model.inside import deliver, say_awake, write_submit

CAPACITY = 1 << 17
RECORDS = 4096


class Shell:
    """Of an end to which nothing else happens."""

    home = Home("a ring", "serve your own")

    def carry_out(self, effects: object) -> None:
        """None has an effect."""


class Ends:
    """An engine's end, a frontend's writer, and the ring between them."""

    def __init__(self) -> None:
        book = EngineBook(Geometry(leasable_blocks=4, reply_blocks=1), EngineBookLimits(2, 4, 1, 4))
        fd = os.memfd_create("slab")
        os.ftruncate(fd, book.geometry.slab_nbytes)
        self.regions = Regions()
        self.end = EngineEnd(
            Shell(),
            book,
            self.regions,
            Mapping(fd, book.geometry.slab_nbytes),
            make_decoder(),
            BaseClaim,
            epoch=1,
            max_tensors=4,
            max_values=1024,
            inline_nbytes=1 << 14,
            max_payload_nbytes=1 << 16,
            debug=False,
        )
        os.close(fd)
        book.connect(1, 0)
        self.memory = bytearray(ring_nbytes(CAPACITY))
        self.writer, self.reader = RecordWriter(self.memory, -1), LinkReader(self.memory, -1)
        self.frontend = BaseFrontend(self.end, 1)
        self.frontend.attach(RecordWriter(bytearray(ring_nbytes(CAPACITY)), -1), self.reader)

    def overwrite(self) -> None:
        self.memory[RECORDS:] = b"\xff" * CAPACITY


def in_a_turn(ends: Ends) -> Any:
    assert deliver(ends.reader, ends.frontend) == 1
    return ends.end.claim_next()


def between_turns(ends: Ends) -> Any:
    """An engine that asks for a request looks into the rings itself."""
    say_awake(ends.reader)
    return ends.end.claim_now()


# Each has a dtype of its own: what is known of one is remembered, and the function is not called again.
@pytest.mark.parametrize(("take", "dtype"), [(in_a_turn, "<U977"), (between_turns, "<U978")])
def test_a_submission_that_is_overwritten_while_it_is_checked_is_what_it_was(
    take: Callable[[Ends], Any], dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, payload = Ends(), {"words": np.array(["rare"], dtype), "after": "text behind it"}
    packed = make_packer(4, 1 << 16).pack(payload, 1 << 14, 1 << 15, HeldSlots())
    assert write_submit(ends.writer, packed, 1, 1, "a name", b"", ())
    item_nbytes, checked = compiled.item_nbytes, []

    def overwrite_and_answer(spelling: str) -> int | None:
        ends.overwrite()
        checked.append(spelling)
        return item_nbytes(spelling)

    monkeypatch.setattr(compiled, "item_nbytes", overwrite_and_answer)
    claim = take(ends)
    assert checked == [dtype]
    assert claim.name == "a name"
    assert claim.payload["after"] == "text behind it"
    assert claim.payload["words"].tolist() == ["rare"]
    ends.end.finish(claim)
    ends.regions.close()


class Keeper(RecordHandler):
    """Keeps what comes, and overwrites the ring before it looks at it."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.kept: list[bytes] = []

    def handle_message(self, record: bytes, /) -> None:
        self.memory[RECORDS:] = b"\xff" * CAPACITY
        self.kept.append(record[:])


@pytest.mark.parametrize("in_c", [True, False], ids=["a taker in C", "any callable"])
def test_a_record_that_is_overwritten_while_it_is_handled_is_what_it_was(in_c: bool) -> None:
    memory = bytearray(ring_nbytes(CAPACITY))
    keeper, writer, reader = Keeper(memory), RecordWriter(memory, -1), LinkReader(memory, -1)
    take: Any = keeper if in_c else keeper.handle_record
    for number in range(3):
        record = bytes([number]) * 1000
        assert writer.write(record)
        assert deliver(reader, take) == 1
        assert keeper.kept.pop() == record
