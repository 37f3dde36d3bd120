"""The HTTP server of a frontend process: uvicorn, with a start and a shutdown of our own.

When it is told to end, ``/ready`` says so, and answers say that their connection ends. After a delay, in which a load balancer
can notice, it stops listening. Requests may go on for a while. Then those that still run are cancelled, and have a moment to
tell their callers (503, or a last event of a stream). When it is told a second time, it no longer waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from shmring.core.loggers import logger_of
from shmring.frontend.app import Application
from shmring.frontend.http.parsing_turns import ParsingTurns
from shmring.frontend.http.protocol import BoundedHttpProtocol
from shmring.frontend.settings import TlsSettings
from shmring.service.supervision import DRAIN_SIGNAL, Stop, stop_signals

__all__ = ["Server"]

logger = logger_of("shmring.frontend")

_CANCELLED_GRACE_S = 0.5  # for answers to cancelled requests; the supervisor kills the process seconds later
_POLL_S = 0.01


def _options_of(tls: TlsSettings) -> dict[str, Any]:
    """Returns uvicorn's options for TLS."""
    return {
        "ssl_certfile": tls.certfile,
        "ssl_keyfile": tls.keyfile,
        "ssl_ca_certs": tls.ca_certs,
        "ssl_cert_reqs": tls.cert_reqs,
    }


class Server(uvicorn.Server):
    """uvicorn's server, but it says when it is ready, ends by returning, and lets cancelled requests answer.

    uvicorn's own signal handling raises the signal once more after the shutdown, which would end the process before the
    engine's client has said goodbye. Its own shutdown takes whole seconds only, and goes on at once after it has cancelled
    requests, so that their answers could not be sent.

    Args:
        app: what answers.
        host, port: where to listen, unless :meth:`serve` is given sockets.
        tls: certificates and keys; None: no TLS.
        root_path: what a proxy in front strips from paths.
        timeout_keep_alive_s: how long a connection stays open between two requests.
        log_level: of uvicorn.
        shutdown_delay_s: how long it goes on listening after :meth:`stop`.
        shutdown_timeout_s: how long requests may go on after that.
        on_started: called once requests are accepted.
    """

    def __init__(
        self,
        app: Application,
        *,
        host: str,
        port: int,
        log_level: str,
        shutdown_timeout_s: float,
        on_started: Callable[[], None],
        shutdown_delay_s: float = 0.0,
        tls: TlsSettings | None = None,
        root_path: str = "",
        timeout_keep_alive_s: float = 5.0,
    ) -> None:
        self._signals = Stop()
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=functools.partial(  # type: ignore[arg-type]  # it is called
                    BoundedHttpProtocol,
                    headers_for=app.headers_for,
                    is_ending=self._signals.told.is_set,
                    turns=ParsingTurns(),
                ),
                ws="none",
                lifespan="on",
                log_config=None,
                log_level="warning" if log_level == "info" else log_level,
                access_log=False,
                server_header=False,
                root_path=root_path,
                timeout_keep_alive=timeout_keep_alive_s,  # type: ignore[arg-type]  # it goes to the loop's call_later
                **({} if tls is None else _options_of(tls)),
            )
        )
        self._app = app
        self._on_started = on_started
        self._shutdown_delay_s = shutdown_delay_s
        self._shutdown_timeout_s = shutdown_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends the server on SIGTERM, SIGINT, SIGHUP and SIGUSR2, and leaves it at that."""
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys(stop_signals(), self.stop) | {DRAIN_SIGNAL: self.drain}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {DRAIN_SIGNAL})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number in handlers:
                loop.remove_signal_handler(number)

    def stop(self) -> None:
        """Ends the server after the requests in flight. A second call no longer waits for them."""
        if self._signals.tell():
            self._app.begin_shutdown()
            asyncio.get_running_loop().call_later(self._shutdown_delay_s, self._end)
        elif self._signals.hurry.is_set():
            self.force_exit = True
            self._end()

    def drain(self) -> None:
        """Ends this frontend after the requests in flight; others go on with its port, and ``/ready`` is about them."""
        self._signals.drain()
        self._app.end_watching()
        self._end()

    def _end(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts listening, and says so."""
        await super().startup(sockets)
        self._on_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops listening, waits for requests as long as they may take, cancels the others, and ends the application."""
        for server in self.servers:
            server.close()
        for listening in sockets or ():
            listening.close()
        for connection in self._connections():
            connection.shutdown()
        await self._wait_until_idle(self._shutdown_timeout_s)
        aborted = list(self.server_state.tasks)
        for task in aborted:
            task.cancel()
        for connection in self._connections():
            connection.end_after_answer()
        if aborted:
            logger.warning("requests aborted, since the server ends: %d", len(aborted))
        self.force_exit = False
        await self._wait_until_idle(_CANCELLED_GRACE_S)
        await self.lifespan.shutdown()

    def _connections(self) -> list[BoundedHttpProtocol]:
        return [each for each in self.server_state.connections if isinstance(each, BoundedHttpProtocol)]

    async def _wait_until_idle(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        state = self.server_state
        # uvicorn has no event for either.
        while (state.tasks or state.connections) and loop.time() < deadline and not self.force_exit:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
