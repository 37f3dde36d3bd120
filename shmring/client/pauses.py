"""How long a client waits between two attempts to attach to an engine."""

from __future__ import annotations

__all__ = ["FIRST_S", "LONGEST_S"]

#: The first one. Each is twice as long as the one before.
FIRST_S = 0.02

#: The longest. To ask once a second costs nothing, and an engine takes as long to start with a slab of 4 GiB.
LONGEST_S = 1.0
