"""The frontend on Ray Serve: ``serve run shmring.frontend.ray:app model=...``; see docs/clusters.md.

Theory of operation: a replica is a frontend and its engine, two actors in one placement group on one node, with the engine's
slab between them. The frontend's application is mounted as it stands; Ray Serve has the place of ``shmring serve``: it starts
replicas, sends them requests, replaces them, and waits for their requests before it ends them.

A replica and its engine are one unit. If the engine's process has ended, the replica's ends as well, at once: it could answer
only 503, and that so quickly that it would get most of the requests. Ray Serve then starts another replica. If the replica's
process has ended, the engine sees that and ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from ray import serve
from ray.exceptions import RayError

from shmring.core.loggers import logger_of
from shmring.frontend.commands.ray_options import settings_of_arguments
from shmring.service.supervision import seldom_look_for_garbage
from shmring.service.tracing import start_tracing, stop_tracing
from shmring.transport.liveness import ProcessId

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

    from shmring.frontend.app import Application

__all__ = ["app"]

logger = logger_of("shmring.frontend.ray")

_CONNECT_TIMEOUT_S = 60.0  # the engine's ring is there
_HEALTH_TIMEOUT_S = 5.0  # for an answer of the engine's loop, which no step blocks
_FAILING_S = 0.2  # in which requests that have lost their engine are answered
_ENDING_S = 10.0  # beside the time for running requests: the engine may be in a step


def app(arguments: Mapping[str, Any]) -> Any:
    """Builds the application: ``serve run shmring.frontend.ray:app NAME=VALUE ...``, or ``args`` in a configuration.

    Args:
        arguments: see :mod:`shmring.frontend.commands.ray_options`.

    Raises:
        ValueError: they make no sense.
    """
    settings = settings_of_arguments(arguments, here=False)
    deployed = settings.deployment
    engine_bundle = {"CPU": deployed.num_cpus} | ({"GPU": deployed.num_gpus} if deployed.num_gpus else {})
    return (
        cast(Any, _Replica)
        .options(
            num_replicas=deployed.num_replicas,
            **({"autoscaling_config": deployed.autoscaling_config} if deployed.autoscaling_config else {}),
            max_ongoing_requests=deployed.max_ongoing_requests,
            max_queued_requests=settings.http.max_queued_requests,
            placement_group_bundles=[{"CPU": 1}, engine_bundle],
            graceful_shutdown_timeout_s=settings.engine.shutdown_timeout_s + _ENDING_S,
        )
        .bind(dict(arguments))
    )


@serve.deployment(
    name="shmring",
    ray_actor_options={"num_cpus": 1},
    placement_group_bundles=[{"CPU": 1}, {"CPU": 1}],
    placement_group_strategy="STRICT_PACK",
    health_check_period_s=2,
    health_check_timeout_s=15,
    max_constructor_retry_count=3,  # the GPU may be taken for a moment; wrong options are no better the next time
    logging_config={"enable_access_log": False},
)
@serve.ingress()
class _Replica:
    """A replica: the frontend's half of it."""

    async def __init__(self, arguments: dict[str, Any]) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        import torch

        from shmring import ClientConfig
        from shmring.engine.client import EngineClient
        from shmring.frontend.commands.variables import unknown_variables
        from shmring.frontend.processes.malloc import make_malloc_return_memory
        from shmring.integrations.ray.replica_engine import start_engine
        from shmring.service.logs import configure_logging

        settings = settings_of_arguments(arguments)
        self._http = settings.http
        configure_logging(settings.engine.log_level, "frontend", settings.engine.log_format)
        if names := unknown_variables(os.environ):
            logger.warning("variables that no option has: %s", names)
        make_malloc_return_memory()
        torch.set_num_threads(1)
        start_tracing(settings.engine.otlp_traces_endpoint, "frontend")
        name = f"{settings.engine.name}-{serve.get_replica_context().replica_id.unique_id}"
        self._engine, where = await start_engine(name, settings.engine)
        self._end_with_engine(where.process)
        config = ClientConfig(socket_dir=where.socket_dir, connect_timeout_s=_CONNECT_TIMEOUT_S)
        self._client = await EngineClient.connect(where.ring, config, description="frontend")
        seldom_look_for_garbage()

    def _end_with_engine(self, engine: ProcessId) -> None:
        loop = asyncio.get_running_loop()
        self._pidfd = engine.open()

        def ended() -> None:
            loop.remove_reader(self._pidfd)
            loop.call_later(_FAILING_S, os._exit, 1)
            logger.critical("the engine of this replica has ended, and the replica ends with it: pid %d", engine.pid)

        loop.add_reader(self._pidfd, ended)

    def __serve_build_asgi_app__(self) -> Any:
        """Returns the application. Ray Serve calls this after the constructor."""
        from shmring.frontend.app import create_app

        return _Mounted(create_app(self._client, self._http, cancels_for_callers=True), self._close)

    async def check_health(self) -> None:
        """Asks the engine; Ray Serve replaces a replica for which this fails three times."""
        await self._client.check_health(_HEALTH_TIMEOUT_S)

    async def _close(self) -> None:
        """Ends the engine in good order. There are no requests any more."""
        asyncio.get_running_loop().remove_reader(self._pidfd)
        await self._client.close()
        with contextlib.suppress(RayError):  # it has ended already
            await self._engine.close.remote()
        await asyncio.to_thread(stop_tracing)


class _Mounted:
    """The frontend's application in a replica. Its lifespan ends with that of the replica.

    Args:
        app: the application.
        close: called when it has ended.
    """

    def __init__(self, app: Application, close: Callable[[], Awaitable[None]]) -> None:
        self._app = app
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or runs the lifespan."""

        async def sending(message: Message) -> None:
            if message["type"] == "lifespan.shutdown.complete":
                await self._close()
            elif message["type"] == "http.response.start":  # Ray Serve has named the request, and says so itself
                message["headers"] = [header for header in message["headers"] if header[0] != b"x-request-id"]
            await send(message)

        await self._app(scope, receive, sending)
