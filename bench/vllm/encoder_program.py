"""``python -m bench.vllm.encoder_program ENGINE``: an engine of vLLM that says what its connector for encoder outputs costs.

ENGINE is JSON: the arguments of :class:`bench.vllm.encoder_engine.EncoderEngine`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from bench.programs import orders
from bench.vllm.encoder_engine import EncoderEngine, Order, Seen

_AGAIN = 1000  # look-ups of what was found just now
_BUFFERS = 4  # so that memory that is copied is in no cache
_BY_REQUEST = ("request_ms", "save_ms", "save_wall_ms", "load_ms", "look_ms", "again_us", "copy_ms")


class Meter:
    """What calls cost, of this process and all its threads; those of one request count together."""

    def __init__(self) -> None:
        self.cpu_ms = self.wall_ms = 0.0

    def put_around(self, owner: Any, name: str) -> None:
        """Measures the calls of a method."""
        method: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(method)
        def measured(*arguments: Any, **named: Any) -> Any:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.cpu_ms += (time.process_time() - cpu_s) * 1e3
                self.wall_ms += (time.perf_counter() - wall_s) * 1e3

        setattr(owner, name, measured)

    def take(self) -> tuple[float, float]:
        """Returns CPU and time since the last call of this, in milliseconds."""
        taken, self.cpu_ms, self.wall_ms = (self.cpu_ms, self.wall_ms), 0.0, 0.0
        return taken


class Watched:
    """An engine whose connector is measured.

    Args:
        engine: which.
    """

    def __init__(self, engine: EncoderEngine) -> None:
        self._engine = engine
        self._save, self._load, self._look = Meter(), Meter(), Meter()
        self._buffers: list[torch.Tensor] = []
        self._cached: dict[str, torch.Tensor] = {}
        self._has = None
        if engine.worker is None:
            return
        self._has = engine.scheduler.has_cache_item
        self._save.put_around(engine.worker, "save_caches")
        self._load.put_around(engine.worker, "start_load_caches")
        for name in ("ensure_cache_available", "has_cache_item"):
            self._look.put_around(engine.scheduler, name)
        note = engine.worker.start_load_caches

        def noted(encoder_cache: dict[str, torch.Tensor], *arguments: Any, **named: Any) -> Any:
            self._cached = encoder_cache
            return note(encoder_cache, *arguments, **named)

        engine.worker.start_load_caches = noted
        save = engine.worker.save_caches

        def saved(encoder_cache: dict[str, torch.Tensor], mm_hash: str, **named: Any) -> Any:
            self._cached = encoder_cache
            return save(encoder_cache=encoder_cache, mm_hash=mm_hash, **named)

        engine.worker.save_caches = saved

    def ask(self, order: Order) -> Seen:
        """Asks about each picture."""
        found: dict[str, list[float]] = {name: [] for name in _BY_REQUEST}
        digest, encoded = hashlib.sha256(), 0
        for number in order.pictures:
            answered = self._engine.ask([[number]])
            digest.update(json.dumps(answered.answers).encode())
            encoded += answered.encoded
            save_ms, wait_ms = self._save.take()
            of_request = {
                "request_ms": [answered.cpu_ms],
                "save_ms": [save_ms],
                "save_wall_ms": [wait_ms],
                "load_ms": [self._load.take()[0]],
                "look_ms": [self._look.take()[0]],
                "again_us": self._looked_up_again(),
                "copy_ms": self._copied(),
            }
            for name, numbers in of_request.items():
                found[name] += numbers
        nbytes = max((tensor.nbytes for tensor in self._cached.values()), default=0)
        return Seen(**found, nbytes=nbytes, encoded=encoded, digest=digest.hexdigest()[:12])

    def _looked_up_again(self) -> list[float]:
        """Microseconds of looking up what this process knows already."""
        if self._has is None or not self._cached:
            return []
        identifier = list(self._cached)[-1]
        self._has(identifier)
        began_s = time.perf_counter()
        for _ in range(_AGAIN):
            self._has(identifier)
        return [(time.perf_counter() - began_s) / _AGAIN * 1e6]

    def _copied(self) -> list[float]:
        """Milliseconds of one memcpy of the last output."""
        if not self._cached:
            return []
        source = list(self._cached.values())[-1]
        while len(self._buffers) < _BUFFERS:
            self._buffers.append(torch.zeros_like(source, memory_format=torch.contiguous_format))
        target = self._buffers.pop(0)
        self._buffers.append(target)
        began_s = time.perf_counter()
        target.copy_(source)
        return [(time.perf_counter() - began_s) * 1e3]


def main() -> None:
    engine = EncoderEngine(**json.loads(sys.argv[1]))
    watched = Watched(engine)
    for order, answer in orders(Order):
        try:
            answer(watched.ask(order))
        except Exception as error:  # noqa: BLE001 # it has its place among the results
            answer(error)
    engine.close()


if __name__ == "__main__":
    main()
