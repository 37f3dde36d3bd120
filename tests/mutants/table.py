"""All faults, in the order of their numbers."""

from __future__ import annotations

from tests.mutants import books, ends, memory, payloads, rings

FAULTS = (*rings.FAULTS, *books.FAULTS, *ends.FAULTS, *payloads.FAULTS, *memory.FAULTS)
