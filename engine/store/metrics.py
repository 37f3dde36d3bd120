"""``GET /metrics`` and ``/health`` of a store, beside its ring, in one loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

import shmring
from shmring.engine.counted import EngineNumbers
from shmring.engine.exposition import EngineCollector
from shmring.engine.metrics import ring_numbers

__all__ = ["serve_metrics"]

_MOST_CONNECTIONS = 64  # a few scrapers have one each; any more would take descriptors from the store's clients
_CONNECTION_S = 5.0  # for a request and its answer, after which the connection ends
_CLOSE_S = 1  # for an answer that is being sent


class _Connection(H11Protocol):
    """One of a bounded number, for a bounded time: uvicorn bounds neither before there is a request."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvicorn's is this
        """Takes a connection, or ends it as there are too many."""
        super().connection_made(transport)
        self._end = self.loop.call_later(_CONNECTION_S, transport.abort)
        if len(self.connections) > _MOST_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        self._end.cancel()
        super().connection_lost(exc)


class _Server(uvicorn.Server):
    """Leaves signals to the store."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Captures none."""
        yield


@contextlib.asynccontextmanager
async def serve_metrics(ring: shmring.Ring, host: str, port: int) -> AsyncIterator[int]:
    """Serves a ring's numbers for as long as the block runs, which gets the port.

    Args:
        ring: whose numbers.
        host, port: where to listen; port 0: at any.

    Raises:
        OSError: nobody can listen there.
    """

    async def show(_: Request) -> Response:
        registry = CollectorRegistry()
        registry.register(EngineCollector({ring.name: EngineNumbers(ring_numbers(ring.statistics()), {})}, ()))
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(_: Request) -> Response:
        return PlainTextResponse("ok\n")

    app = Starlette(routes=[Route("/metrics", show), Route("/health", health)])
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise OSError(error.errno, f"can't listen on {host} port {port}: {error.strerror}") from None
    config = uvicorn.Config(
        app,
        http=_Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        headers=[("connection", "close")],
        timeout_graceful_shutdown=_CLOSE_S,
    )
    server = _Server(config)
    with listening:
        serving = asyncio.ensure_future(server.serve([listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            await serving
