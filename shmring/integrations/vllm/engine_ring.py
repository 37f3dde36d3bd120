"""The ring of an engine core: its API servers connect to it, and its workers join it. It is one ring, so that a tensor that an
API server has put into a slot can be sent to the workers from there.

vLLM makes the executor, with its queue to the workers, long before it begins to listen to API servers. The first user opens the
ring, and the last user closes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal

from shmring.config import RingConfig
from shmring.errors import SlabError
from shmring.integrations.vllm.settings import Settings

if TYPE_CHECKING:
    from shmring.integrations.vllm.engine import Receiver
    from shmring.threads import Ring

__all__ = ["NOT_SET", "EngineRing"]

NOT_SET = "SHMRING_VLLM_DEVICE_SLAB is not set"

_UNTAKEN_S = 60.0  # a tensor whose message has not come by then: its API server failed to send it, and to say so
_MAX_INFLIGHT = 4096  # what each API server may have here at once, kept tensors included (at most 1,024)
_WORKER_BACKLOG = 256  # the most; messages of which a worker keeps views count


class EngineRing:
    """See the head of this file. One for each process, whether it is an engine core or not.

    Args:
        settings: the plug-in's.

    Attributes:
        receiver: the half of the engine core that takes tensors of API servers; ``None``: there is none (yet).
        index: vLLM's number of this engine core; ``None``: this process is none, or it is not known yet.
        name: what its ring is called; empty: it is no engine core, or not known to be one yet.
        has_workers: whether workers are sent what lies here.
        no_device_slab: why the ring has no device slab; empty: it has one.
    """

    def __init__(self, settings: Settings) -> None:
        self.receiver: Receiver | None = None
        self.has_workers = False
        self.no_device_slab = "workers run the model, and not the engine core" if settings.device_slab_nbytes else NOT_SET
        self._settings = settings
        self.index: int | None = None
        self.name = ""
        self._ring: Ring | None = None
        self._users = 0
        self._reporting = ThreadPoolExecutor(1, "shmring report")
        self._pid = os.getpid()

    def expect(self, engine_index: int) -> None:
        """This process is an engine core, and API servers will connect."""
        self.index, self._pid = engine_index, os.getpid()
        self.name = self._settings.ring_name(engine_index)

    @property
    def is_expected(self) -> bool:
        """Whether this process is such an engine core, and not one that it has forked."""
        return self.index is not None and self._pid == os.getpid()

    def open(
        self, pin: Literal["auto", "on", "off"], served_by: Literal["thread", "both"] = "thread", gpu: int | str | None = None
    ) -> Ring:
        """Opens the ring if it is not open, for one more user.

        Args:
            pin, served_by: as ``RingConfig.pin``, and of :func:`shmring.threads.serve`, if it is not open.
            gpu: on which there is to be a device slab; or why there is to be none. If it is not open.

        Raises:
            LocalProtocolError: another engine has the name.
            ShmringError, OSError: there can't be a ring.
        """
        assert self.index is not None
        if self._ring is None:
            config = RingConfig(
                slab_nbytes=self._settings.slab_nbytes,
                max_inflight=_MAX_INFLIGHT,
                pin=pin,
                broadcast_nbytes=self._settings.broadcast_nbytes,
                worker_backlog=_WORKER_BACKLOG,
            )
            self._ring = self._serve(config, served_by, gpu)
        self._users += 1
        return self._ring

    def _serve(self, config: RingConfig, served_by: Literal["thread", "both"], gpu: int | str | None) -> Ring:
        from shmring import threads

        serve = functools.partial(
            threads.serve,
            self.name,
            calls={"report": self._answer_report},
            untaken_s=_UNTAKEN_S,
            served_by=served_by,
        )
        if isinstance(gpu, str):
            self.no_device_slab = gpu
        if isinstance(gpu, int):
            nbytes = self._settings.device_slab_nbytes
            try:
                ring = serve(dataclasses.replace(config, device_slab_nbytes=nbytes, device_slab_device=f"cuda:{gpu}"))
            except SlabError as error:
                self.no_device_slab = f"the engine core can have no device slab: {error}"
            else:
                self.no_device_slab = ""
                return ring
        return serve(config)

    def leave(self) -> None:
        """One user needs it no longer."""
        self._users -= 1
        if not self._users and self._ring is not None:
            ring, self._ring = self._ring, None
            ring.close()

    async def _answer_report(self) -> dict[str, Any]:
        assert self.receiver is not None, "API servers connect once it is there"
        # The report waits for this loop. The executor of a loop that callers run is the caller's own thread, which runs it.
        return await asyncio.get_running_loop().run_in_executor(self._reporting, self.receiver.report)
