"""shmring: an asyncio shared-memory transport for the tensors of inference servers.

Engine side: :func:`serve`. Frontend side: :func:`connect`. Worker side: :func:`join`. See the README for an example.
:mod:`shmring.threads` has all of them for code without an event loop.

Each name is imported when it is first used. Importing torch takes seconds, so a program that only needs the configuration or
the errors starts at once. And if this is installed beside vLLM, each of its processes imports this file.
"""

# Type checkers take typing's name for true. Nothing is imported here: an installed command imports this file before it has seen
# to it that nothing comes from the working directory (shmring/service/import_path.py).
TYPE_CHECKING = False

if TYPE_CHECKING:
    from shmring import threads
    from shmring.client.client import Client
    from shmring.client.connecting import connect
    from shmring.client.connection import EngineConnection
    from shmring.client.inspecting import inspect
    from shmring.client.kept import Keeping, Kept
    from shmring.client.routing import EngineLoad
    from shmring.client.slot import Slot
    from shmring.client.starting import start_store
    from shmring.client.submission import Submission
    from shmring.config import ClientConfig, RingConfig, WorkerConfig
    from shmring.errors import (
        AbortedError,
        CapacityError,
        ClosedError,
        EngineDeadError,
        LocalProtocolError,
        PeerLostError,
        ProtocolError,
        RankTakenError,
        RemoteError,
        RemoteProtocolError,
        ShmringError,
        SlabError,
        StaleDescriptorError,
        WorkerFailedError,
        WorkerLostError,
        WorkersBehindError,
        WouldBlock,
    )
    from shmring.gateway.serving import serve
    from shmring.memory.tensors import nbytes_for
    from shmring.ring.claim import Claim
    from shmring.ring.ring import Ring
    from shmring.snapshot import RingSnapshot
    from shmring.statistics import ClientStatistics, RingStatistics, WorkerStatistics
    from shmring.worker.worker import Message, Worker, join

__version__ = "0.2.0"

__all__ = [
    "serve",
    "connect",
    "join",
    "inspect",
    "start_store",
    "Ring",
    "Client",
    "EngineConnection",
    "Claim",
    "Keeping",
    "Kept",
    "Slot",
    "Submission",
    "Worker",
    "Message",
    "nbytes_for",
    "threads",
    "RingConfig",
    "ClientConfig",
    "WorkerConfig",
    "RingSnapshot",
    "RingStatistics",
    "ClientStatistics",
    "EngineLoad",
    "WorkerStatistics",
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
    "WorkerLostError",
    "WorkerFailedError",
    "WorkersBehindError",
    "RankTakenError",
    "__version__",
]

_ERRORS = [name for name in __all__ if name.endswith("Error") or name == "WouldBlock"]
_MODULES = {
    "Claim": "shmring.ring.claim",
    "ClientConfig": "shmring.config",
    "ClientStatistics": "shmring.statistics",
    "Keeping": "shmring.client.kept",
    "Kept": "shmring.client.kept",
    "Ring": "shmring.ring.ring",
    "EngineConnection": "shmring.client.connection",
    "EngineLoad": "shmring.client.routing",
    "Client": "shmring.client.client",
    "RingConfig": "shmring.config",
    "RingSnapshot": "shmring.snapshot",
    "RingStatistics": "shmring.statistics",
    "Slot": "shmring.client.slot",
    "Submission": "shmring.client.submission",
    "Message": "shmring.worker.worker",
    "Worker": "shmring.worker.worker",
    "WorkerConfig": "shmring.config",
    "WorkerStatistics": "shmring.statistics",
    "connect": "shmring.client.connecting",
    "inspect": "shmring.client.inspecting",
    "join": "shmring.worker.worker",
    "nbytes_for": "shmring.memory.tensors",
    "serve": "shmring.gateway.serving",
    "start_store": "shmring.client.starting",
    **dict.fromkeys(_ERRORS, "shmring.errors"),
}

if not TYPE_CHECKING:  # type checkers would take it to say that this module has every name

    def __getattr__(name: str) -> object:
        """Imports a name on its first use."""
        import importlib

        if name == "threads":
            return importlib.import_module("shmring.threads")
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_MODULES[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
