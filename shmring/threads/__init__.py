"""All three sides of shmring for code without an event loop: blocking twins of the asyncio classes, for any thread.

``serve`` and ``connect`` run the event loop of the ring or client in a thread of its own; ``join``, the side of a worker, needs
none. The names, the arguments and the errors are those of :mod:`shmring`; calls that are awaited there block here, with a
``timeout`` in seconds. ``docs/api.md`` lists what differs.
"""

from shmring.client.starting import start_store_blocking as start_store
from shmring.threads.client import Client, EngineConnection, Keeping, Kept, Slot, Submission
from shmring.threads.connecting import connect
from shmring.threads.ring import Claim, Ring, serve
from shmring.threads.worker import Message, Worker, join

__all__ = [
    "Claim",
    "Client",
    "EngineConnection",
    "Keeping",
    "Kept",
    "Message",
    "Ring",
    "Slot",
    "Submission",
    "Worker",
    "connect",
    "join",
    "serve",
    "start_store",
]
