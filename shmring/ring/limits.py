"""Limits of each client or worker of an engine that no user could choose better: constants, each with its arithmetic.

Limits that depend on the machine, on requests or on callers are options (:class:`~shmring.config.RingConfig`).
"""

from __future__ import annotations

__all__ = [
    "COPY_OFFLOAD_NBYTES",
    "HANDSHAKE_S",
    "MAX_CALLS",
    "MAX_INSPECTIONS",
    "MAX_KEPT",
    "MAX_LEASES",
    "MAX_PINS",
    "MAX_WORKERS",
]

#: How long a new connection may take to say hello: its process sends that at once, and another one may keep it from the core.
HANDSHAKE_S = 5.0

#: Connections at a time that are told what the engine does: each has a snapshot of some hundred KiB until it has read it.
MAX_INSPECTIONS = 8

#: Control calls (health, statistics) that a client may have in flight. A frontend has a few; each is a task here, and its
#: arguments take up to 64 KiB: 4 MiB together.
MAX_CALLS = 64

#: Leases of one client in each memory. They bound the books: with 256 clients, a quarter of a million. A client that needs more
#: memory asks for larger ones, and has some tens.
MAX_LEASES = 1024

#: Contents that are kept. Each has up to 4 KiB of private memory beside its part of the slab: 64 MiB at most. So many are
#: small: of 1 GiB that keeps half, they have 32 KiB each.
MAX_KEPT = 16384

#: Pins of kept content that a client may have: four for each of the 1,024 requests that it may have in flight.
MAX_PINS = 4096

#: Workers at a time, those that have gone but may still be reading included: as many as a mask of the core has bits. Each costs
#: two descriptors and two message rings.
MAX_WORKERS = 64

#: Copies larger than this run on a thread, which frees the interpreter lock. Up to it, waking a thread costs more than the
#: copy, which takes 0.1 ms at 10 GB/s. A frontend's is larger, and an option: nobody's accelerator waits for its loop.
COPY_OFFLOAD_NBYTES = 1 << 20
