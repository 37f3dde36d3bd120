"""The compiled core: one extension, from parts by subject.

Each part is a file beside this one, and says what it is about at its head. They are included here one after the other. A part
uses only names from the parts before it, which ``tests/house/test_layers.py`` checks. So the parts read like modules, but are
compiled as one: a call from one part to another is a call in C, and no type has to be declared twice.

Names are one space for all parts. A name that begins with an underscore is used by its own part alone.

A type stub is made from the parts when the core is built (``core_interface.py``). Parameters and results have types as in
Python. If the type of an attribute in C says too little, a comment that begins with ``type:`` says more.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # needed only by types
    import asyncio
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Iterable, Iterator, Sequence
    from types import TracebackType
    from typing import Any, Self, TypeVar

    import torch
    from typing_extensions import Buffer

    # Objects that callers await return objects of the shells, which are above the core.
    from shmring.client.slot import Slot
    from shmring.client.submission import Submission
    from shmring.core.effects import ClientEffect, EngineEffect
    from shmring.core.geometry import ClientBookLimits, EngineBookLimits, Geometry
    from shmring.core.messages import Keep, LeaseRequest, Memory
    from shmring.core.shells import BroadcastShell, ClientShell, EngineShell, WorkerShell
    from shmring.memory.bundles import Bundle
    from shmring.ring.claim import Claim
    from shmring.ring.frontend import Frontend

    _Result = TypeVar("_Result", covariant=True)

# Functions that are not ours.
include "system_calls.pyx"
include "atomics.pyx"
include "python_api.pyx"
include "integers.pyx"
include "dlpack.pyx"
include "cuda_driver.pyx"

# Memory, and views of it.
include "forks.pyx"
include "mapping.pyx"
include "views.pyx"
include "gpu.pyx"

# Tables.
include "sorted_keys.pyx"
include "blocks.pyx"
include "numbered.pyx"
include "transitions.pyx"

# Messages.
include "message_ring.pyx"
include "load.pyx"
include "looking.pyx"
include "polling.pyx"
include "msgpack.pyx"
include "for_engine.pyx"
include "wire.pyx"
include "slot_header.pyx"
include "placement.pyx"
include "received.pyx"
include "copies.pyx"

# The books.
include "records.pyx"
include "kept_book.pyx"
include "lending.pyx"
include "engine_book.pyx"
include "client_book.pyx"
include "fan_out_book.pyx"

# The sides, and the calls that are awaited.
include "held_slots.pyx"
include "payload.pyx"
include "kept_content.pyx"
include "awaiting.pyx"
include "engine_end.pyx"
include "engine_calls.pyx"
include "client_end.pyx"
include "client_calls.pyx"
include "fan_out_end.pyx"
include "worker_end.pyx"
