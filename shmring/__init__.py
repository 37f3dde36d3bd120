"""shmring: an asyncio shared-memory transport for the tensors of inference servers.

Engine side: :func:`serve`. Frontend side: :func:`connect`. See the README for an example of both.
"""

from shmring.claim import Claim
from shmring.client import RingClient, Submission, connect
from shmring.config import ClientConfig, RingConfig
from shmring.errors import (
    AbortedError,
    CapacityError,
    ClosedError,
    EngineDeadError,
    LocalProtocolError,
    PeerLostError,
    ProtocolError,
    RemoteError,
    RemoteProtocolError,
    ShmringError,
    SlabError,
    StaleDescriptorError,
    WouldBlock,
)
from shmring.memory.payload import nbytes_for
from shmring.ring import Ring, serve
from shmring.slot import Slot
from shmring.statistics import ClientStatistics, RingStatistics

__version__ = "0.1.0"

__all__ = [
    "serve",
    "connect",
    "Ring",
    "RingClient",
    "Claim",
    "Slot",
    "Submission",
    "nbytes_for",
    "RingConfig",
    "ClientConfig",
    "RingStatistics",
    "ClientStatistics",
    "ShmringError",
    "ClosedError",
    "PeerLostError",
    "EngineDeadError",
    "WouldBlock",
    "CapacityError",
    "StaleDescriptorError",
    "AbortedError",
    "RemoteError",
    "ProtocolError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "SlabError",
    "__version__",
]
