"""What the engine's book asks its caller to do after an event, in order.

The ledger decides and returns these; the ring carries them out. Nothing in here does anything.
"""

from __future__ import annotations

import dataclasses

from shmring.core.messages import LeaseGrant

__all__ = [
    "ClientGone",
    "Effect",
    "Granted",
    "Recalled",
    "Reclaimed",
    "Released",
    "ReplyGranted",
    "ReplySlot",
    "RequestAborted",
]


@dataclasses.dataclass(frozen=True, slots=True)
class ReplySlot:
    """A slot of the reply reserve; ``start`` and ``blocks`` in blocks of the slab."""

    generation: int
    start: int
    blocks: int


@dataclasses.dataclass(frozen=True, slots=True)
class Granted:
    """Send this grant to the client."""

    client_id: int
    grant: LeaseGrant


@dataclasses.dataclass(frozen=True, slots=True)
class Recalled:
    """Ask the client to return these leases."""

    client_id: int
    lease_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Released:
    """Tell the client that these slots are its own again."""

    client_id: int
    generations: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestAborted:
    """The request has ended as aborted. Had it been claimed, its slots stay claimed until its step ends."""

    client_id: int
    request_id: int
    was_running: bool


@dataclasses.dataclass(frozen=True, slots=True)
class ReplyGranted:
    """The waiter that queued with this ticket has its reply slot."""

    ticket: int
    slot: ReplySlot


@dataclasses.dataclass(frozen=True, slots=True)
class Reclaimed:
    """Memory of a client that has gone is free again (log it, count it)."""

    client_id: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class ClientGone:
    """Nothing of this client is left in the book; stop watching its process."""

    client_id: int


Effect = Granted | Recalled | Released | RequestAborted | ReplyGranted | Reclaimed | ClientGone
