"""What went which way, counted: for the log's summary, and for the server's own ``/metrics``.

A tensor that is large enough for the slab goes one of three ways: *copied* to the slab, *kept* there since it was sent
before (no copy), or *inline*, in the server's message, for a reason that is counted. One that is on a GPU goes to the *device*
slab, or inline.
"""

from __future__ import annotations

import collections
import functools
from typing import Any, Literal

from shmring.core.loggers import Logger
from shmring.errors import CapacityError, ClosedError, PeerLostError

__all__ = ["Reason", "Traffic", "engine_gauges", "reason_of"]

#: Why a tensor goes inline. ``connecting``: its engine's ring was not reached yet; ``engine``: there is none, or it
#: has gone; ``space``: the slab was full for as long as a request may wait; ``size``: it can never fit; ``kind``: shmring
#: can't carry it; ``twice``: it is in the request twice; ``gpu``: it is on a GPU, and there is no device slab for it there;
#: ``error``: anything else, which the log has.
Reason = Literal["connecting", "engine", "space", "size", "kind", "twice", "gpu", "error"]


def reason_of(error: Exception, logger: Logger) -> Reason:
    """Why a tensor that shmring did not take goes inline."""
    if isinstance(error, TypeError):
        return "kind"
    if isinstance(error, CapacityError):
        return "size"
    if isinstance(error, TimeoutError):
        return "space"
    if isinstance(error, PeerLostError | ClosedError):
        return "engine"
    logger.error("shmring: a tensor goes inline, and this should not be: %r", error, exc_info=error)
    return "error"


class Traffic:
    """Counts of one process, by way and reason.

    Args:
        public: whether the server's ``/metrics`` shows them.
    """

    def __init__(self, *, public: bool) -> None:
        self.tensors: collections.Counter[tuple[str, str]] = collections.Counter()
        self.nbytes: collections.Counter[tuple[str, str]] = collections.Counter()
        self._metrics = _tensor_counters() if public else None

    def count(self, way: Literal["copied", "kept", "device", "inline"], nbytes: int, reason: Reason | Literal[""] = "") -> None:
        """Counts a tensor."""
        self.tensors[way, reason] += 1
        self.nbytes[way, reason] += nbytes
        if self._metrics is not None:
            tensors, total = self._metrics
            tensors.labels(way, reason).inc()
            total.labels(way, reason).inc(nbytes)

    def summary(self) -> str:
        """Says it in a line."""
        parts = [
            f"{count} {way}{f' ({reason})' if reason else ''}, {self.nbytes[way, reason] / 1e6:.1f} MB"
            for (way, reason), count in sorted(self.tensors.items())
        ]
        return "; ".join(parts) or "none"


@functools.cache  # a registry takes a name once
def _tensor_counters() -> tuple[Any, Any]:
    from prometheus_client import Counter

    labels = ("way", "reason")
    return (
        Counter("shmring_tensors", "Large tensors sent: copied to the slab, kept there, to the device slab, or inline", labels),
        Counter("shmring_tensor_bytes", "Bytes of large tensors sent", labels),
    )


@functools.cache
def engine_gauges() -> dict[str, Any]:
    """The gauges of an engine core's end, by the names that its ``report`` has; each has the label ``engine``.

    The processes of several API servers each ask their engine cores, so the latest answer counts. (Their names do not begin
    with ``vllm``: vLLM unregisters all metrics with such a name, whosever they are.)
    """
    from prometheus_client import Gauge

    texts = {
        "slots_in_use": "Slots of the slab that hold tensors, kept ones included",
        "free_bytes": "Bytes of the slab that are not lent to a process that sends",
        "quarantined_bytes": "Bytes of processes that have gone, still read by the engine",
        "kept_tensors": "Tensors that stay in the slab to be sent again without a copy",
        "kept_bytes": "Their bytes",
        "waits": "Times that the engine had to wait for a tensor that a request named",
        "wait_seconds": "Seconds it has waited so",
        "workers": "Worker processes that are sent their steps through shared memory",
        "workers_in_place_bytes": "Bytes of tensors that workers were sent from where an API server had put them",
        "workers_copied_bytes": "Bytes that were copied for workers, once for all of them",
        "lost": "Tensors that a request named and that were not there; these requests failed",
    }
    return {name: Gauge(f"shmring_{name}", text, ("engine",), multiprocess_mode="mostrecent") for name, text in texts.items()}
