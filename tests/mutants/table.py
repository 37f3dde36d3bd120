"""All faults, by subject and file."""

from __future__ import annotations

from tests.mutants import (
    books,
    ends,
    memory,
    payloads,
    python_clients,
    python_links,
    python_plugins,
    python_rings,
    python_server,
    python_silence,
    python_threads,
    rings,
)

FAULTS = (
    *rings.FAULTS,
    *books.FAULTS,
    *ends.FAULTS,
    *payloads.FAULTS,
    *memory.FAULTS,
    *python_links.FAULTS,
    *python_clients.FAULTS,
    *python_plugins.FAULTS,
    *python_rings.FAULTS,
    *python_server.FAULTS,
    *python_threads.FAULTS,
    *python_silence.FAULTS,
)
