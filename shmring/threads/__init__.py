"""Both ends of shmring for code without an event loop: blocking twins of what asyncio programs use, safe from any thread.

``serve`` and ``connect`` run the ring's or the client's own event loop in a thread of its own. The names, the arguments and the
errors are those of :mod:`shmring`; what is awaited there blocks here, with a ``timeout`` in seconds. See ``docs/threads.md``.
"""

from shmring.threads.client import Client, Kept, Slot, Submission
from shmring.threads.connecting import connect
from shmring.threads.ring import Claim, Ring, serve
from shmring.threads.routing_client import RoutingClient

__all__ = ["Claim", "Client", "Kept", "Ring", "RoutingClient", "Slot", "Submission", "connect", "serve"]
