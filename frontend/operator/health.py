"""The answers of ``/health`` and ``/ready``, and the class that collects the facts for them.

``/health`` says whether the engine works. ``/ready`` says whether a request would be answered now. A paused engine is healthy
but not ready. The same holds for a process in which media have been waiting for a decoder for seconds: a load balancer should
send its traffic elsewhere, but a restart would only lose work, because the work of each medium is bounded. To report a further
fact about this process or its neighbours, add a field to :class:`Health` and fill it in :meth:`HealthReporter.check_health`. A
process that is not healthy answers 503 with the envelope of errors instead.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

import shmring
from shmring.engine.client import EngineClient, EngineState
from shmring.frontend.errors import ErrorCode, unavailable
from shmring.frontend.media.decoder_pool import DecoderStatistics
from shmring.service.supervision import FrontendState

__all__ = ["Health", "HealthReporter"]

_MAX_WAITING_S = 5.0  # for a decoder. Photographs take a quarter of a second; the next request would wait as long


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to `GET /health` and `GET /ready` of a process that is well.

    `engine` says whether requests are carried out. If the server has several engines, one that is well is enough, and `engines`
    says how each of them is.

    `pid` is the process that answers. It is one of `frontends`: each connection reaches any one of them.

    `frontends` are the states of all frontends of the server as the supervisor sees them, this one included; empty without a
    supervisor. A frontend that is `unresponsive` or `restarting` does not make the others unhealthy: the supervisor replaces
    it, and a restart of the server would end the requests of the others.
    """

    engine: Literal["running", "paused"]
    engines: dict[str, EngineState] | UnsetType = UNSET
    shutting_down: bool
    pid: int
    frontends: list[FrontendState]
    decoders: DecoderStatistics


class HealthReporter:
    """Collects the facts.

    Args:
        engine: is asked each time.
        frontends: returns the states of all frontends, as the supervisor sent them last.
        decoders: says how busy this process' decoders are.

    Attributes:
        shutting_down: whether this process was told to end. It still answers requests.
    """

    def __init__(
        self,
        engine: EngineClient,
        frontends: Callable[[], Sequence[FrontendState]],
        decoders: Callable[[], DecoderStatistics],
    ) -> None:
        self._engine = engine
        self._frontends = frontends
        self._decoders = decoders
        self.shutting_down = False

    async def check_ready(self) -> Health:
        """Returns the facts if a request would be answered now.

        Raises:
            ApiError: 503, the request would not be answered.
        """
        if self.shutting_down or self._engine.is_stopped:
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        health = await self.check_health()
        if health.engine == "paused":
            raise unavailable("the engine is paused; requests wait", ErrorCode.PAUSED)
        if health.decoders.waiting_s > _MAX_WAITING_S:
            message = f"no decoder is free: media have been waiting for one for {health.decoders.waiting_s:.0f} s"
            raise unavailable(message, ErrorCode.DECODERS_BUSY)
        return health

    async def check_health(self) -> Health:
        """Returns the facts if the engine works.

        Raises:
            ApiError: 503, the engine does not answer, or says that it is not well.
            shmring.ShmringError: there is no engine.
        """
        engines: dict[str, EngineState] | UnsetType = UNSET
        if len(self._engine.engines) > 1:
            engines = await self._engine.states()
            paused = "running" not in engines.values()
            if paused and "paused" not in engines.values():
                states = ", ".join(f"{name} is {state}" for name, state in engines.items())
                raise unavailable(f"no engine is well: {states}", ErrorCode.ENGINE_UNAVAILABLE)
        else:
            with _engine_failures_as_api_errors():
                await self._engine.check_health()
                paused = await self._engine.is_paused()
        return Health(
            engine="paused" if paused else "running",
            engines=engines,
            shutting_down=self.shutting_down,
            pid=os.getpid(),
            frontends=list(self._frontends()),
            decoders=self._decoders(),
        )


@contextlib.contextmanager
def _engine_failures_as_api_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError:
        raise unavailable("the engine does not answer", ErrorCode.ENGINE_UNAVAILABLE) from None
    except shmring.RemoteError as error:
        raise unavailable(error.message, ErrorCode.ENGINE_UNHEALTHY) from None
