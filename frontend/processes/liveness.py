"""``/health`` at a port of its own (``--health-port``): whether only a restart of the whole server would help.

The supervisor answers. It hears from each process, replaces those that die or hang, and has nothing to do with requests: so it
answers in time however much callers ask of the frontends, whose loops would be late. A service manager that took a busy
frontend for a dead server would end all requests.

It speaks as much HTTP as probes need: one request for each connection, which has some seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Literal, TypeAlias

import msgspec

from shmring.service.supervision import FrontendState

__all__ = ["EngineLife", "Life", "answering"]

#: What the supervisor knows of an engine. ``stuck``: a step takes longer than ``--step-timeout``.
EngineLife: TypeAlias = Literal["starting", "running", "stuck", "unresponsive", "restarting"]

_MAX_HEAD_NBYTES = 8 << 10
_MAX_CONNECTIONS = 64  # a probe comes every few seconds; some may come by way of a balancer
_LIMIT_S = 5.0  # for a connection


class Life(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: 200 if `alive`, else 503.

    `engines` and `frontends` are their states as the supervisor knows them. `alive` is false while no engine carries requests
    out (none is ready, or steps of all take longer than `--step-timeout`) or no frontend has got ready. A process that is
    `unresponsive` is busy or hangs. If it hangs, the supervisor ends it: no reason to restart the others.
    """

    alive: bool
    engines: dict[str, EngineLife]
    frontends: list[FrontendState]
    log_lines_dropped: int

    @classmethod
    def of(cls, engines: Mapping[str, EngineLife], frontends: list[FrontendState], log_lines_dropped: int) -> Life:
        """Judges by the states of the processes."""
        works = any(state in ("running", "unresponsive") for state in engines.values())
        serves = any(frontend.state in ("serving", "unresponsive") for frontend in frontends)
        return cls(alive=works and serves, engines=dict(engines), frontends=frontends, log_lines_dropped=log_lines_dropped)


@contextlib.asynccontextmanager
async def answering(listening: socket.socket, life: Callable[[], Life]) -> AsyncIterator[None]:
    """Answers probes as long as the block runs, and closes the socket then.

    Args:
        listening: where probes come.
        life: returns what to answer.
    """
    connections = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        # Whoever it is may send no request, or no whole one.
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            if connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_LIMIT_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(_answer_to(head, life))
                    await writer.drain()
        connections -= 1
        writer.close()

    server = await asyncio.start_server(answer, sock=listening, limit=_MAX_HEAD_NBYTES)
    try:
        yield
    finally:
        server.close()


def _answer_to(head: bytes, life: Callable[[], Life]) -> bytes:
    method, _, rest = head.partition(b" ")
    path = rest.partition(b" ")[0].partition(b"?")[0]
    content = b"{}"
    if path != b"/health":
        status = http.HTTPStatus.NOT_FOUND
    elif method not in (b"GET", b"HEAD"):
        status = http.HTTPStatus.METHOD_NOT_ALLOWED
    else:
        now = life()
        content = msgspec.json.encode(now)
        status = http.HTTPStatus.OK if now.alive else http.HTTPStatus.SERVICE_UNAVAILABLE
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}",
        "content-type: application/json",
        f"content-length: {len(content)}",
        "connection: close",
        "\r\n",
    )
    return "\r\n".join(lines).encode("ascii") + (b"" if method == b"HEAD" else content)
