"""What requests and replies of a simulation carry: a number, and an array in each slot, in which that number stands.

So whoever reads an array knows whether it is what was sent, or what somebody else has written since. Where something happens in
the midst of calls, there is a value behind the first array whose encoding runs a caller's code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import SLOT_HEADER_NBYTES
from shmring.memory.tensors import make_decoder, make_packer
from tests.simulation.scenario import Scenario, require

MAX_TENSORS = 16
MAX_VALUES = 1 << 12
INLINE_NBYTES = 64  # less than a slot has, so that all arrays are in slots
MAX_PAYLOAD_NBYTES = 1 << 12

PACKER = make_packer(MAX_TENSORS, MAX_PAYLOAD_NBYTES, MAX_VALUES)
DECODER = make_decoder()


def content_nbytes(blocks: int) -> int:
    """Returns what a slot of so many blocks can hold behind its header."""
    return blocks * BLOCK_NBYTES - SLOT_HEADER_NBYTES


def offload_nbytes(scenario: Scenario) -> int:
    """Returns up to which size copies are made in the loop: none, or all."""
    return INLINE_NBYTES if scenario.copies_wait else 1 << 30


@dataclasses.dataclass(init=False, eq=False)
class Code:
    """A value with a computed field, which is computed when it is encoded."""

    value: int

    def __init__(self, run: Callable[[], object]) -> None:
        self.run = run


def _computed(code: Code) -> int:
    code.run()
    return 0


Code.value = property(_computed)  # type: ignore[assignment]


def payload_of(arrays: Sequence[np.ndarray[Any, Any]], number: int, code: Code | None = None) -> list[Any]:
    """Returns a payload, its number written into each array."""
    for array in arrays:
        array[0] = array[-1] = number % 251
    return [number, *arrays] if code is None else [number, *arrays[:1], code, *arrays[1:]]


def arrays_of(payload: list[Any]) -> list[Any]:
    """Returns the arrays of a payload, and the kept content in it."""
    return [member for member in payload[1:] if not isinstance(member, Code | dict)]


def require_intact(payload: list[Any], number: int) -> None:
    """Raises unless a payload is as it was sent."""
    require(payload[0] == number, "another payload came than was sent")
    for array in arrays_of(payload):
        if isinstance(array, list):  # kept content, which has a number of its own
            require_intact(array, array[0])
        else:
            require(array[0] == array[-1] == number % 251, "an array was overwritten before it was read")
