"""``/status``: a page that shows what the engines are doing, and the stream of snapshots that it draws.

The page, its script and its style are files beside this one, and hold no facts. The facts come by ``/status/snapshots``, which
needs a key like ``/v1``, or an operator's: one line of JSON each second, as long as the caller reads. However many watch, each
engine is asked once a second, and not at all while nobody does. Operators see the requests of all callers, and other callers
their own. Nothing may be loaded from elsewhere, and no page may frame this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

import shmring
from shmring.engine.client import EngineClient
from shmring.frontend.callers.caller import caller_of
from shmring.frontend.errors import ErrorCode, unavailable
from shmring.frontend.operator.observation import ObservedRoute
from shmring.snapshot import RingSnapshot

__all__ = ["Feed", "status_routes"]

#: By engine; or why there is none.
_Snapshots: TypeAlias = dict[str, RingSnapshot | dict[str, Any]]

_EACH_S = 1.0
_MAX_VIEWERS = 32  # of one frontend; a page that was closed is noticed at once
_FILES = Path(__file__).with_name("status_page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"cache-control": "no-cache", "x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}


class Feed:
    """Asks the engines for snapshots while anybody watches.

    Args:
        engine: whose.
    """

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._viewers: set[asyncio.Queue[_Snapshots | None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._is_closed = False
        self._pids: dict[str, int] = {}  # of engines, as they said last
        self._silent_since: dict[str, float] = {}  # of engines that do not answer: when they were first asked in vain

    def close(self) -> None:
        """Ends all streams. A second call does nothing."""
        self._is_closed = True
        if self._asking is not None:
            self._asking.cancel()

    def check_room(self) -> None:
        """Raises ApiError if too many watch, or the server is shutting down."""
        if self._is_closed:
            raise unavailable("the server is shutting down", ErrorCode.SHUTTING_DOWN)
        if len(self._viewers) >= _MAX_VIEWERS:
            raise unavailable(f"{_MAX_VIEWERS} callers watch this process already", ErrorCode.OVERLOADED)

    @contextlib.contextmanager
    def watched(self) -> Iterator[asyncio.Queue[_Snapshots | None]]:
        """Yields a queue of snapshots by engine; None is the end. A slow viewer misses some, so nothing piles up."""
        viewer: asyncio.Queue[_Snapshots | None] = asyncio.Queue(1)
        self._viewers.add(viewer)
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask(), context=contextvars.Context())  # for no one request
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    async def _ask(self) -> None:
        try:
            while self._viewers:
                snapshots = dict(zip(self._engine.engines, await self._snapshots(), strict=True))
                for viewer in self._viewers:
                    _put(viewer, snapshots)
                await asyncio.sleep(_EACH_S)
        finally:  # also after an error that nobody foresaw: a stream that ends is begun again, and one that is silent is not
            for viewer in self._viewers:
                _put(viewer, None)

    async def _snapshots(self) -> list[Any]:
        return await asyncio.gather(*map(self._snapshot_of, self._engine.engines))

    async def _snapshot_of(self, name: str) -> Any:
        asked_s = time.monotonic()
        try:
            snapshot = await self._engine.inspect(name)
        except (shmring.ShmringError, TimeoutError, OSError, msgspec.ValidationError) as error:
            silent_s = time.monotonic() - self._silent_since.setdefault(name, asked_s)
            text = str(error) or "its process is stopped, stuck or starved"
            return {"error": text, "silent_s": round(silent_s, 1), "pid": self._pids.get(name)}
        self._silent_since.pop(name, None)
        if isinstance(snapshot, RingSnapshot):
            self._pids[name] = snapshot.pid
        return snapshot


def _put(viewer: asyncio.Queue[_Snapshots | None], snapshots: _Snapshots | None) -> None:
    """The last ones take the place of those that were not read."""
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(snapshots)


def _seen_by(caller: str, snapshot: RingSnapshot | dict[str, Any]) -> RingSnapshot | dict[str, Any]:
    """Returns what a caller sees of a snapshot: of requests, its own; and no texts of errors, which may name others'."""
    if not isinstance(snapshot, RingSnapshot):
        return snapshot
    program = dict(snapshot.program)
    program["requests"] = [request for request in program.get("requests", ()) if request["owner"] == caller]
    program["ended"] = [request for request in program.get("ended", ()) if request["owner"] == caller]
    program["callers"] = [each for each in program.get("callers", ()) if each["owner"] == caller]
    program["line"] = {owner: count for owner, count in program.get("line", {}).items() if owner == caller}
    program["seen_by"] = caller
    if "spending" in program:
        program["spending"] = program["spending"] | {"whose": ""}
    own = {(request["client_id"], request["number"]) for request in program["requests"]}
    requests = [request for request in snapshot.requests if (request.client_id, request.number) in own]
    names = {(request.client_id, request.name) for request in requests}
    return msgspec.structs.replace(
        snapshot,
        program=program,
        requests=requests,
        draining=[slot for slot in snapshot.draining if (slot.client_id, slot.request) in names],
        errors=[],
    )


class _SnapshotStream(Response):
    """Lines of a feed, until the caller has gone or the feed ends."""

    def __init__(self, feed: Feed, caller: str | None) -> None:
        super().__init__(headers=_HEADERS | {"content-type": "application/x-ndjson", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._feed = feed
        self._caller = caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b""})
            return
        async for line in self._lines(receive):
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _lines(self, receive: Receive) -> AsyncIterator[bytes]:
        leaving = asyncio.ensure_future(_hang_up(receive))
        reading: asyncio.Future[_Snapshots | None] | None = None
        try:
            with self._feed.watched() as lines:
                while True:
                    reading = asyncio.ensure_future(lines.get())
                    await asyncio.wait((leaving, reading), return_when=asyncio.FIRST_COMPLETED)
                    if leaving.done() or (snapshots := reading.result()) is None:
                        return
                    if self._caller is not None:
                        snapshots = {name: _seen_by(self._caller, snapshot) for name, snapshot in snapshots.items()}
                    yield msgspec.json.encode(snapshots) + b"\n"
        finally:
            leaving.cancel()
            if reading is not None:
                reading.cancel()


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def status_routes(feed: Feed, keys: Sequence[Middleware]) -> list[ObservedRoute]:
    """Returns the routes of the page, its files, and its snapshots.

    Args:
        feed: of snapshots.
        keys: tell callers and operators by their keys. Without any, everybody is taken for an operator.
    """

    def file_route(path: str, name: str) -> ObservedRoute:
        content = (_FILES / name).read_bytes()
        headers = _HEADERS | {"content-type": f"{_TYPES[Path(name).suffix]}; charset=utf-8", "content-security-policy": _POLICY}

        async def answer(_: Request) -> Response:
            return Response(content, headers=headers)

        return ObservedRoute(path, answer)

    async def snapshots(http_request: Request) -> Response:
        feed.check_room()
        sees_all = not keys or http_request.scope["state"].get("is_admin", False)
        return _SnapshotStream(feed, None if sees_all else caller_of(http_request.scope))

    return [
        file_route("/status", "status.html"),
        file_route("/status/status.css", "status.css"),
        file_route("/status/status.js", "status.js"),
        ObservedRoute("/status/snapshots", snapshots, middleware=keys),
    ]
