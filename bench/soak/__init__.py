"""``bench soak``: an engine and its frontends under load for as long as one likes, and whether anything grows meanwhile.

See :mod:`bench.soak.plan` for what they do, :mod:`bench.soak.driver` for how it is watched, and :mod:`bench.soak.verdict` for
what must not grow and why the limits are what they are.
"""

from __future__ import annotations

from bench.soak.command import soak_command

__all__ = ["soak_command"]
