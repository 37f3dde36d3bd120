"""Effects: what the books ask their callers to do after an event, in order.

The books decide and return these; the ring, and a session, carry them out. This file has only the records.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from shmring.core.messages import Found, LeaseGrant, LeaseRequest, LeaseReturn, NotKept

if TYPE_CHECKING:
    from shmring.core.compiled import ClientSlotRecord

__all__ = [
    "Acquired",
    "Answered",
    "ClientEffect",
    "ClientGone",
    "EngineEffect",
    "Granted",
    "Recalled",
    "Reclaimed",
    "Released",
    "ReplyGranted",
    "ReplySlot",
    "RequestAborted",
    "Send",
]


class ReplySlot(msgspec.Struct, frozen=True, gc=False):
    """A slot of the reply reserve; ``start`` and ``blocks`` in blocks of the slab.

    ``is_copied_out``: its client copies the reply out of it when it comes. ``request_id``: the request that it answers.
    """

    generation: int
    start: int
    blocks: int
    is_copied_out: bool = False
    request_id: int = -1


# -- of the engine's book ------------------------------------------------------------------------------------------------------


class Granted(msgspec.Struct, frozen=True, gc=False):
    """Send this grant to the client."""

    client_id: int
    grant: LeaseGrant


class Recalled(msgspec.Struct, frozen=True, gc=False):
    """Ask the client to return these leases."""

    client_id: int
    lease_ids: tuple[int, ...]


class Released(msgspec.Struct, frozen=True, gc=False):
    """Tell the client that these slots are its own again."""

    client_id: int
    generations: tuple[int, ...]


class RequestAborted(msgspec.Struct, frozen=True, gc=False):
    """The request has ended as aborted. If it was claimed, its slots stay claimed until its step ends."""

    client_id: int
    request_id: int
    was_running: bool


class Answered(msgspec.Struct, frozen=True, gc=False):
    """Send the client this answer to what it asked of kept content."""

    client_id: int
    answer: Found | NotKept


class ReplyGranted(msgspec.Struct, frozen=True, gc=False):
    """The waiter that queued with this ticket, whatever that is, has its reply slot."""

    ticket: Any
    slot: ReplySlot


class Reclaimed(msgspec.Struct, frozen=True, gc=False):
    """Memory of a client that has gone is free again (log it, count it)."""

    client_id: int
    nbytes: int


class ClientGone(msgspec.Struct, frozen=True, gc=False):
    """Nothing of this client is left in the book; stop watching its process."""

    client_id: int


EngineEffect = Granted | Recalled | Released | RequestAborted | Answered | ReplyGranted | Reclaimed | ClientGone


# -- of a frontend's book ------------------------------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True, gc=False):
    """Send this message to the engine."""

    message: LeaseRequest | LeaseReturn


class Acquired(msgspec.Struct, frozen=True, gc=False):
    """The waiter that queued with this ticket, whatever that is, has its slot."""

    ticket: Any
    slot: ClientSlotRecord


ClientEffect = Send | Acquired
