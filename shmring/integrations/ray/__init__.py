"""Engines and clients in a Ray cluster: the same API past one machine. ``pip install shmring[ray]``; see docs/clusters.md.

Theory of operation: an engine is a Ray actor that hosts a ring (``engine.py``); Ray finds it by its name (``directory.py``). A
client on the engine's node is a client of that ring, through shared memory. From another node, requests are calls of the actor
(``far_client.py``): their tensors travel in Ray's object store, are viewed there in place, and stand in the ring's line as
requests without slots (:meth:`shmring.Ring.injector`). A connection to an engine is one or the other, and looks the engine up
again when it has died (``connection.py``). :class:`Client` has connections to one engine or to several, and chooses one of
them for each request (``connections.py``). An engine tells its node's metrics what it counts (``metrics.py``).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shmring.integrations.ray.client import Client, connect
    from shmring.integrations.ray.cluster import EngineReport, statistics
    from shmring.integrations.ray.engine import EngineActor

__all__ = ["Client", "EngineActor", "EngineReport", "connect", "statistics"]

_MODULES = {
    "Client": "client",
    "EngineActor": "engine",
    "EngineReport": "cluster",
    "connect": "client",
    "statistics": "cluster",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports a name on its first use, and Ray with it."""
        import importlib

        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
