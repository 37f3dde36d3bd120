"""All ends of shmring for code without an event loop: blocking twins of what asyncio programs use, safe from any thread.

``serve`` and ``connect`` run the ring's or the client's own event loop in a thread of its own; ``join``, a worker's end, needs
none. The names, the arguments and the errors are those of :mod:`shmring`; what is awaited there blocks here, with a ``timeout``
in seconds. ``docs/threads.md`` lists what differs.
"""

from shmring.threads.client import Client, EngineConnection, Kept, Slot, Submission
from shmring.threads.connecting import connect
from shmring.threads.ring import Claim, Ring, serve
from shmring.threads.worker import Message, Worker, join

__all__ = [
    "Claim",
    "Client",
    "EngineConnection",
    "Kept",
    "Message",
    "Ring",
    "Slot",
    "Submission",
    "Worker",
    "connect",
    "join",
    "serve",
]
