"""Whether the processes that an engine core waits for still run: one that was stopped neither answers nor dies.

The kernel reports the death of a process at once, but reports a stopped process only when it is asked. vLLM's workers wait for
each other, so the worker that does not answer need not be the one that was stopped: all of them are checked.
"""

from __future__ import annotations

import time

from shmring.errors import PeerLostError
from shmring.transport.liveness import ProcessId

__all__ = ["PeerError", "Peers"]

_STOPPED_S = 0.9  # so long in two looks: a whole server that was stopped goes on within less
_FORGOTTEN_S = 3.0  # after which a look is no second one


class PeerError(RuntimeError):
    """A process at the other end of a queue has died or was stopped. vLLM's engine core ends with it, and says so."""


class Peers:
    """Processes by what they are called, such as ``worker 1``.

    Attributes:
        take_long: whether they were sent a large tensor and have not answered since, so that an answer takes longer than it
            pays to look for it.
    """

    def __init__(self) -> None:
        self.take_long = False
        self._processes: dict[str, ProcessId] = {}
        self._stopped_since_s: dict[str, float] = {}
        self._looked_s = 0.0

    def add(self, name: str, pid: int) -> None:
        """Looks at a process from now on: at this one, whoever gets its number later.

        Raises:
            PeerError: it has died.
        """
        try:
            self._processes[name] = ProcessId.of(pid)
        except PeerLostError as error:
            raise _death_of(name, pid) from error

    def look(self, now_s: float | None = None) -> None:
        """Looks at all. For who has waited for a second, and then every second.

        Raises:
            PeerError: one has died, or is stopped and was so when this was called before.
        """
        now_s = time.monotonic() if now_s is None else now_s
        before = self._stopped_since_s if now_s - self._looked_s < _FORGOTTEN_S else {}
        self._stopped_since_s, self._looked_s = {}, now_s
        for name, process in self._processes.items():
            try:
                state = process.state()
            except OSError:
                continue  # this process lacks something, such as descriptors
            if state in ("", "Z", "X"):
                raise _death_of(name, process.pid)
            if state == "T":
                since_s = self._stopped_since_s[name] = before.get(name, now_s)
                if now_s - since_s >= _STOPPED_S:
                    raise PeerError(
                        f"shmring: {name} (pid {process.pid}) was stopped (SIGSTOP), and the engine core does not wait for it"
                    )


def _death_of(name: str, pid: int) -> PeerError:
    return PeerError(f"shmring: {name} (pid {pid}) has died")
