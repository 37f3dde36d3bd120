"""shmring: an asyncio shared-memory transport for the tensors of inference servers.

Engine side: :func:`serve`. Frontend side: :func:`connect`. See the README for an example of both.

What needs torch, which takes seconds to import, is imported when it is first used: a command line that only wants the
configuration or the errors answers at once.
"""

import importlib
from typing import TYPE_CHECKING

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
from shmring.statistics import ClientStatistics, RingStatistics

if TYPE_CHECKING:
    from shmring.client.client import RingClient, connect
    from shmring.client.slot import Slot
    from shmring.client.submission import Submission
    from shmring.memory.tensors import nbytes_for
    from shmring.ring.claim import Claim
    from shmring.ring.ring import Ring, serve

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

_NEEDS_TORCH = {
    "Claim": "shmring.ring.claim",
    "RingClient": "shmring.client.client",
    "Submission": "shmring.client.submission",
    "connect": "shmring.client.client",
    "nbytes_for": "shmring.memory.tensors",
    "Ring": "shmring.ring.ring",
    "serve": "shmring.ring.ring",
    "Slot": "shmring.client.slot",
}

if not TYPE_CHECKING:  # type checkers would take it to say that this module has every name

    def __getattr__(name: str) -> object:
        """Imports what needs torch, on its first use."""
        if name not in _NEEDS_TORCH:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_NEEDS_TORCH[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
