"""Checks of an engine's ``Welcome``, before anything is mapped or made of it.

An engine is trusted no more than a frontend. Its numbers size the books and the mappings of this process, so each must be one
that an engine can have. The descriptors beside them are checked where they are mapped.
"""

from __future__ import annotations

from shmring.core.compiled import largest_record_nbytes
from shmring.core.geometry import BLOCK_NBYTES, GENERATION_BITS
from shmring.core.messages import PROTOCOL_VERSION, Welcome, WorkerWelcome
from shmring.core.printable import printable
from shmring.errors import RemoteProtocolError

__all__ = ["check_engine_name", "check_welcome", "check_worker_welcome"]

_MOST_NBYTES = (2**32 - 1) * BLOCK_NBYTES  # of both slabs: a book numbers blocks with 32 bits
_MOST_CLIENTS = 2 ** (64 - GENERATION_BITS)  # what a generation, of 64 bits, has left for a client's number
_MOST = 2**32 - 1  # of anything that is counted


def check_engine_name(said: str, meant: str) -> None:
    """Raises RemoteProtocolError unless the engine that was reached is the one that was meant.

    A path proves nothing: whoever may write to the directory can rename a socket, link it, or mount another one over it.

    Args:
        said: the name that the engine gives itself.
        meant: the name that this process was told to reach.
    """
    if said != meant:
        raise RemoteProtocolError(
            f"the engine '{printable(said)}' listens where '{meant}' was looked for: its socket was renamed, linked or mounted "
            "there; remove that file (an engine that lives makes its own again within a second)"
        )


def check_welcome(welcome: Welcome) -> None:
    """Raises RemoteProtocolError unless an engine can say this to a frontend."""
    device_nbytes = 0 if welcome.device_slab is None else welcome.device_slab.nbytes
    reply_nbytes = welcome.slab_nbytes - welcome.block_nbytes - welcome.leasable_nbytes
    _require(welcome.version == PROTOCOL_VERSION, f"its protocol version is {welcome.version}, not {PROTOCOL_VERSION}")
    _require(welcome.block_nbytes == BLOCK_NBYTES, f"its blocks have {welcome.block_nbytes} bytes, not {BLOCK_NBYTES}")
    _require_blocks("a slab", welcome.slab_nbytes, BLOCK_NBYTES)
    _require_blocks("what is leased out", welcome.leasable_nbytes, BLOCK_NBYTES)
    _require_blocks("what replies lie in", reply_nbytes, BLOCK_NBYTES)
    _require_blocks("a device slab", device_nbytes, 0)
    _require(welcome.slab_nbytes + device_nbytes <= _MOST_NBYTES, "it has more memory than blocks have numbers")
    _require(1 <= welcome.client_id < _MOST_CLIENTS, f"client {welcome.client_id} can't be numbered")
    for field in ("max_inflight", "max_calls", "max_leases", "max_tensors", "max_values"):
        _require_count(welcome, field)
    record_nbytes = largest_record_nbytes(welcome.message_ring_nbytes)
    _require(
        welcome.max_record_nbytes == record_nbytes and welcome.inline_nbytes <= record_nbytes // 2,
        "the limits of messages do not fit the size of its message rings",
    )


def check_worker_welcome(welcome: WorkerWelcome) -> None:
    """Raises RemoteProtocolError unless an engine can say this to a worker."""
    _require(welcome.version == PROTOCOL_VERSION, f"its protocol version is {welcome.version}, not {PROTOCOL_VERSION}")
    _require_blocks("what is leased out", welcome.leased_nbytes, BLOCK_NBYTES)
    _require_blocks("what replies lie in", welcome.slab_nbytes - welcome.leased_nbytes, BLOCK_NBYTES)
    _require_blocks("what is broadcast", welcome.broadcast_nbytes, BLOCK_NBYTES)
    _require(welcome.slab_nbytes + welcome.broadcast_nbytes <= _MOST_NBYTES, "it has more memory than blocks have numbers")
    for field in ("max_tensors", "max_values"):
        _require_count(welcome, field)


def _require(condition: bool, what: str) -> None:
    if not condition:
        raise RemoteProtocolError(f"the engine says what can't be: {what}")


def _require_count(welcome: Welcome | WorkerWelcome, field: str) -> None:
    number = getattr(welcome, field)
    _require(1 <= number <= _MOST, f"{field} is {number}")


def _require_blocks(what: str, nbytes: int, least: int) -> None:
    _require(nbytes >= least and not nbytes % BLOCK_NBYTES, f"{what} has {nbytes} bytes")
