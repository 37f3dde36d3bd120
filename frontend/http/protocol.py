"""uvicorn's HTTP protocol, with the bounds that uvicorn leaves to a proxy.

Without these bounds, one connection without a key can take all memory of a process. It can send a header, URL, chunk extension
or trailer that does not end. It can also send requests one after another and never read the answers. And a thousand connections
that send nothing, or read nothing, keep a thousand descriptors and answers for ever.

When a connection ends, uvicorn tells only the last request; and while requests are queued behind the one that is being
answered, uvicorn does not read, so it does not see the end. Here reading goes on, because the number of queued requests is
bounded, and all requests learn of the end. So no work is done for a caller that is gone.

The protocol also refuses requests that RFC 9112 tells servers to refuse but the parser accepts, because a proxy in front may
read them differently: a request of HTTP/1.1 without a ``Host`` or with two, and transfer codings other than ``chunked``.
Upgrades (WebSocket, h2c) are ignored (RFC 9110, 7.8): the request is answered as if its head had no ``Upgrade``. The parser
takes the body of such a request for another protocol. So a new parser is given the head once more, without that header.

Of requests that are sent ahead, a bounded number is read. The last of these is answered with ``connection: close``, and later
ones are dropped, as HTTP allows.

A caller may close its half of the connection when its request is complete, and wait for the answer. A caller that has gone
looks the same at first. So such a caller is sent ``100 Continue`` now and then, which HTTP clients skip: if the socket on the
other side is closed, its kernel answers such bytes with a reset. The first is sent before the request is handled: on the same
machine the reset is there at once, and no work is done for a caller that has gone. Only HTTP/1.1 has this. With HTTP/1.0
(proxies speak it, and close at once) and with TLS, the end of one half is the end of both: asyncio and uvloop answer a
``close_notify`` with their own at once, whatever ``eof_received`` returns.

The bytes that the parser gets are counted from the last progress: a complete head, a part of a body, or the end of a message.
The bytes of a head and of trailers are also counted as they were parsed, and so are headers and chunks: each costs a
microsecond, however short it is. How much is parsed in a turn of the loop is bounded as well
(:mod:`shmring.frontend.http.parsing_turns`).

After a refusal, what the caller still sends is read and dropped for a while. If the connection ended at once, the caller would
see a reset, and not the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import os
import re
import secrets
import select
import urllib.parse
from collections.abc import Callable
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shmring.core.loggers import logger_of
from shmring.frontend.errors import ApiError, ErrorCode
from shmring.frontend.http.cross_origin import HeadersFor
from shmring.frontend.http.cycle import Cycle
from shmring.frontend.http.parsing_turns import SLICE_NBYTES, Flow, ParsingTurns, has_few_lines

__all__ = ["BoundedHttpProtocol"]

logger = logger_of("frontend.http")

_MAX_OVERHEAD_NBYTES = 64 << 10  # of a head, a chunk's extension or a trailer; a head takes 1 to 8 KB, with large cookies 16
_MAX_FIELDS = 256  # of a head and its trailers; browsers and proxies send ten to sixty
# Programs write a body piece by piece, and some of these are short: what json.JSONEncoder.iterencode yields, for example.
_FREE_CHUNKS = 1024
_LEAST_CHUNK_NBYTES = 64  # of the others, on average: with less, parsing takes longer than sending
_READ_NBYTES = 256 << 10  # what uvloop reads at a time; progress may lie at the front of it
_MAX_PIPELINED = 16  # requests behind the one that is being answered; clients that do this at all send a few
_HEAD_TIMEOUT_S = 30.0  # for a head to arrive, on a slow mobile network too
_STALL_TIMEOUT_S = 30.0  # without reading a byte of an answer that is larger than the kernel's buffer
_HOST = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=%:\[\]-]*")  # RFC 3986: what a host and a port are made of; it may be empty
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.01, 5.0  # between two checks of a caller that has closed one half; doubled
_FIELD_NBYTES = 4  # of a header beside its name and its value: a colon, a space, the end of the line
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_EARLY_S = 0.001  # a loop's timer may go off too early by this much
_IDLE_GRACE_S = 1.0  # for a caller that sends a request on an open connection just when the server is told to end
_DROPPED_NBYTES = 8 << 20  # read after a refusal: most callers send all of a body before they read
_DROPPING_S = 0.01  # between two reads of it, of up to 256 KiB
_LINGER_S = 5.0  # for the caller to read the last of an answer after the connection was given up


class _RefusedHead(ApiError):
    """A request that is refused because of its head."""


def _too_large() -> _RefusedHead:
    return _RefusedHead(ErrorCode.HEAD_TOO_LARGE, f"a request's head takes more than {_MAX_OVERHEAD_NBYTES} bytes")


def _too_many_fields() -> _RefusedHead:
    return _RefusedHead(ErrorCode.HEAD_TOO_LARGE, f"a request's head has more than {_MAX_FIELDS} headers")


def _chunks_too_small() -> _RefusedHead:
    message = (
        f"beyond {_FREE_CHUNKS} chunks, the chunks of a body must have {_LEAST_CHUNK_NBYTES} bytes or more on average; "
        "send larger chunks, or a Content-Length"
    )
    return _RefusedHead(ErrorCode.CHUNKS_TOO_SMALL, message)


def _check_head(version: str, headers: list[tuple[bytes, bytes]]) -> int:
    """Makes the checks that the parser leaves to servers (RFC 9112, 3.2 and 6.1).

    Returns:
        The length of the body as far as the head says it; 0: it does not.

    Raises:
        _RefusedHead: where the request ends, or whom it is for, could be read in two ways.
    """
    hosts, codings, length = [], [], b"0"
    for name, value in headers:
        if name == b"host":
            hosts.append(value)
        elif name == b"transfer-encoding":
            codings += [coding.strip().lower() for coding in value.split(b",")]
        elif name == b"content-length":
            length = value
    if len(hosts) > 1 or (not hosts and version != "1.0"):
        raise _RefusedHead(ErrorCode.INVALID_HOST, f"a request must have one Host header, this one has {len(hosts)}")
    if hosts and not _HOST.fullmatch(hosts[0]):
        raise _RefusedHead(ErrorCode.INVALID_HOST, "the Host header is not a host")
    if any(coding != b"chunked" for coding in codings):
        raise _RefusedHead(ErrorCode.UNKNOWN_TRANSFER_CODING, "the only Transfer-Encoding that is accepted is chunked")
    if len(codings) > 1 or (codings and version == "1.0"):
        raise _RefusedHead(ErrorCode.INVALID_TRANSFER_CODING, "chunked must be the only Transfer-Encoding, once, of HTTP/1.1")
    return int(length)  # the parser has refused others than numbers


class _TooManyAhead(Exception):
    """No further request is taken from this connection."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One connection; see the head of this file.

    Args:
        headers_for: returns the CORS headers of a refusal.
        is_ending: returns whether the server was told to end.
        turns: of the connections that have sent much; one for all connections of a loop.
        arguments, keywords: uvicorn's.
    """

    cycle: Cycle

    def __init__(
        self,
        *arguments: Any,
        headers_for: HeadersFor = lambda _: [],
        is_ending: Callable[[], bool] = lambda: False,
        turns: ParsingTurns | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._headers_for = headers_for
        self._is_ending = is_ending
        self._turns = ParsingTurns() if turns is None else turns
        self._overhead_nbytes = 0
        self._head_nbytes = 0
        self._chunks = 0
        self._body_nbytes = 0
        self._announced_nbytes = 0  # of the body; 0: it is not said
        self._price = 0  # parts of requests that began
        self._unparsed: memoryview | None = None  # what waits for its turn
        self._is_full = False  # nothing more is taken
        self._is_refused = False  # the last answer was sent
        self._half_closed = False
        self._lost = False
        self._in_head = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._stall_timer: asyncio.TimerHandle | None = None
        self._answered_at = 0.0  # the last request
        self._running: Cycle | None = None  # uvicorn's `cycle` is the newest, which may be queued

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as its base has it
        """Begins to wait for the first head."""
        super().connection_made(transport)
        self._flow = self.flow = Flow(transport)
        self._socket = transport.get_extra_info("socket")
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._polled = select.poll()
        self._polled.register(self._socket.fileno(), select.POLLRDHUP)  # POLLHUP and POLLERR are always told
        self._await_head()
        if self._is_ending():
            self.shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells all requests that the connection ended, and drops unanswered ones, which only the collector would find."""
        self._lost = True
        self._unparsed = None
        self._unset_keepalive_if_required()
        self._head_came()
        self.resume_writing()
        running, self._running = self._running, None
        super().connection_lost(exc)
        self.pipeline.clear()
        if running is not None and not running.response_complete:
            running.hang_up()

    def data_received(self, data: bytes) -> None:
        """Parses what came, or has it parsed in its turn if it may take long."""
        if self.transport.is_closing():
            return
        if self._is_full:
            self._overhead_nbytes += len(data)
            if self._is_refused:
                self._flow.pause_reading()  # it is worth little of the loop's time
                if self._overhead_nbytes <= _DROPPED_NBYTES:
                    self.loop.call_later(_DROPPING_S, self._read_on)
            return
        if self._unparsed is None and (len(data) <= self._left_nbytes or has_few_lines(data)):
            self._parse(data)
            return
        if self._unparsed is None:
            self._flow.fall_behind()
            self._turns.join(self)
            self._unparsed = memoryview(data)
        else:  # TLS may have had more in hand than it was asked for
            self._unparsed = memoryview(bytes(self._unparsed) + data)

    @property
    def _left_nbytes(self) -> int:
        """How much of the body is still to come, as far as its head has said that. The parser takes this in one piece."""
        return self._announced_nbytes - self._body_nbytes

    @property
    def is_behind(self) -> bool:
        """Whether there are bytes that wait to be parsed."""
        return self._unparsed is not None

    def parse_slice(self) -> int:
        """Parses some of the bytes that wait."""
        if self._unparsed is None or self.transport.is_closing():
            self._unparsed = None
            return 0
        before = self._price
        nbytes = max(SLICE_NBYTES, self._left_nbytes)
        piece, rest = self._unparsed[:nbytes], self._unparsed[nbytes:]
        self._unparsed = rest or None
        self._parse(piece)
        if self._unparsed is None and not self._lost:
            self._flow.catch_up()
        return 1 + self._price - before

    def _parse(self, data: bytes | memoryview) -> None:
        """Feeds the parser, unless the peer has sent too much without progress."""
        self._overhead_nbytes += len(data)
        if self._is_ending():
            self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__  # a refusal of ours, or a URL that can't be taken apart
            if isinstance(cause, _TooManyAhead):
                self._take_no_more()
                self.pipeline[0][0].keep_alive = False  # the newest; it ends the connection
                return
            refusal = _RefusedHead(ErrorCode.INVALID_HTTP, f"the request can't be read: {cause!r}")
            self._refuse(cause if isinstance(cause, _RefusedHead) else refusal)
        except httptools.HttpParserError as error:
            self._refuse(_RefusedHead(ErrorCode.INVALID_HTTP, f"this is not HTTP: {error}"))
        if self.transport.is_closing() or self._is_full:
            return
        if self._overhead_nbytes > _MAX_OVERHEAD_NBYTES + _READ_NBYTES:
            self._refuse(_too_large())
        elif self._head_timer is None and (self._in_head or self.cycle is None or self.cycle.response_complete):
            self._await_head()
        elif self._may_wait and self._poll() & select.POLLRDHUP:  # asyncio says so in the next turn, when the body is decoded
            self._end_if_gone()

    def _feed(self, data: bytes | memoryview) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                [parsed_nbytes] = upgrade.args
                logger.info("%s asked for an upgrade, which this server has none of", self._peer)
                data = self._head_without_upgrade() + bytes(data[parsed_nbytes:])
                self.parser = httptools.HttpRequestParser(self)  # the other one may take the connection for ended
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def _take_no_more(self) -> None:
        """Drops whatever the caller still sends."""
        self._is_full = True
        self._overhead_nbytes = 0
        self._unparsed = None

    def on_message_begin(self) -> None:
        """A request begins."""
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _TooManyAhead
        super().on_message_begin()
        self._head_nbytes = self._chunks = self._body_nbytes = self._announced_nbytes = 0
        self._price += 1
        self._in_head = True  # most heads come whole, and need no timer
        self._head_came()

    def on_url(self, url: bytes) -> None:
        """A part of its URL."""
        self._head_nbytes += len(url)
        if self._head_nbytes > _MAX_OVERHEAD_NBYTES:
            raise _too_large()
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """One of its headers, or of its trailers."""
        self._price += 1
        self._head_nbytes += len(name) + len(value) + _FIELD_NBYTES
        if self._head_nbytes > _MAX_OVERHEAD_NBYTES:
            raise _too_large()
        if len(self.headers) >= _MAX_FIELDS:
            raise _too_many_fields()
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Its head is complete."""
        if self.parser.get_method() == b"CONNECT":
            raise _RefusedHead(ErrorCode.INVALID_HTTP, "CONNECT is for proxies, and this is none")
        if self.parser.should_upgrade():
            return  # this head comes once more
        self._overhead_nbytes = 0
        self._in_head = False
        self._head_came()
        self._announced_nbytes = _check_head(self.parser.get_http_version(), self.headers)
        self._begin(httptools.parse_url(self.url))

    def _begin(self, url: Any) -> None:
        """Begins to answer the request, or has it wait for those before it. (uvicorn's own would make a cycle of uvicorn's.)"""
        version, path, scope = self.parser.get_http_version(), url.path.decode("ascii"), self.scope
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        scope["path"] = self.root_path + (urllib.parse.unquote(path) if "%" in path else path)
        scope["raw_path"], scope["query_string"] = self.root_path.encode("ascii") + url.path, url.query or b""
        previous = self.cycle
        self.cycle = Cycle(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=self.access_log,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive() and not self._is_ending(),
            on_response=self.on_response_complete,
        )
        if previous is None or previous.response_complete:
            self._running = self.cycle
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.pipeline.appendleft((self.cycle, self.app))
            self.flow.resume_reading()

    def on_chunk_header(self) -> None:
        """A chunk of its body begins."""
        self._price += 1
        self._chunks += 1
        if self._chunks > _FREE_CHUNKS + self._body_nbytes // _LEAST_CHUNK_NBYTES:
            raise _chunks_too_small()

    def on_body(self, body: bytes) -> None:
        """A part of its body came."""
        self._overhead_nbytes = 0
        self._body_nbytes += len(body)
        so_far: Any = self.cycle.body
        if not so_far:
            self.cycle.body = b""  # type: ignore[assignment]  # it becomes this part itself, where a bytearray would copy it
        elif type(so_far) is bytes:
            self.cycle.body = bytearray(so_far)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """All of it came."""
        if self.parser.should_upgrade():
            return
        self._overhead_nbytes = 0
        super().on_message_complete()
        self.cycle.watch.has_all = not self.cycle.more_body
        if self._running is self.cycle:
            self.flow.resume_reading()  # a large last part had it paused, and nobody else would see the caller hang up

    def on_response_complete(self) -> None:
        """A request was answered; the next one's turn has come."""
        self._running = None
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                cycle, application = self.pipeline.pop()
                assert isinstance(cycle, Cycle), "all of them are"
                self._running = cycle
                self._start_asgi_task(cycle, application)
            else:
                self._answered_at = self.loop.time()
                if self.timeout_keep_alive_task is None:
                    self._look_whether_idle(self.timeout_keep_alive)
        if self._half_closed and self._running is None:
            self._end()

    def eof_received(self) -> bool:  # type: ignore[override]  # as its base has it
        """The peer sends nothing more. Returns whether it may still wait for answers."""
        if not self._may_wait:
            return False
        if not self._half_closed:
            self._half_closed = True
            if not self.cycle.response_started:
                self.cycle.keep_alive = False
            self._look_for_the_peer(_FIRST_LOOK_S)
        return True

    @property
    def _may_wait(self) -> bool:
        """Whether the peer, if it closes its half of the connection now, may still wait for an answer, and can be asked."""
        waits = self._running is not None and not self.cycle.more_body and self.cycle.scope["http_version"] == "1.1"
        return waits and not self._is_tls

    def _look_for_the_peer(self, next_s: float) -> None:
        """Ends a half-closed connection once its other half is closed as well."""
        if not self._end_if_gone():
            self.loop.call_later(next_s, self._look_for_the_peer, min(2 * next_s, _LONGEST_LOOK_S))

    def _end_if_gone(self) -> bool:
        """Asks whether the peer of a half-closed connection is there. Returns whether it has gone."""
        running = self._running
        if self._lost or self.transport.is_closing() or running is None:
            return True
        if not running.response_started and not self.transport.get_write_buffer_size():
            with contextlib.suppress(OSError):
                os.write(self._socket.fileno(), _CONTINUE)  # at once: a peer on the same machine has answered by the turn's end
        if not self._poll() & (select.POLLHUP | select.POLLERR):
            return False
        running.hang_up()  # for a handler that has a turn before the end of the connection is reported
        self._abort()
        return True

    def _poll(self) -> int:
        """Returns the events that are true of the connection, of those that say that the peer has ended it or a half of it."""
        events = self._polled.poll(0)
        return events[0][1] if events else 0

    def shutdown(self) -> None:
        """Ends the connection when its caller knows that it ends, or has not used it for a moment.

        The head of an answer says so (``Connection: close``). If that was sent already, or there is no request, the caller may
        be sending the next one just now.
        """
        self.timeout_keep_alive = min(self.timeout_keep_alive, _IDLE_GRACE_S)  # type: ignore[assignment]  # for call_later
        self._unset_keepalive_if_required()  # also of an earlier answer, or the one that is under way would set no other
        if self.cycle is None or self.cycle.response_complete:
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        elif not self.cycle.response_started:
            self.cycle.keep_alive = False

    def end_after_answer(self) -> None:
        """Ends the connection: at once, if it has no request."""
        super().shutdown()
        self._linger()

    def _look_whether_idle(self, in_s: float) -> None:
        """Ends the connection if nothing comes for a while after an answer. (A timer for each answer costs 3 microseconds.)"""
        self.timeout_keep_alive_task = self.loop.call_later(in_s, self._end_if_idle)

    def _end_if_idle(self) -> None:
        self.timeout_keep_alive_task = None
        if self._running is not None or self._head_timer is not None:
            return  # the next answer has it looked at again
        left_s = self._answered_at + self.timeout_keep_alive - self.loop.time()
        if left_s > _EARLY_S:
            self._look_whether_idle(left_s)
        else:
            self.timeout_keep_alive_handler()

    def timeout_keep_alive_handler(self) -> None:
        """Nothing came for a while after an answer."""
        super().timeout_keep_alive_handler()
        self._linger()

    def pause_writing(self) -> None:
        """The peer takes an answer more slowly than it is made."""
        super().pause_writing()
        self._watch_for_a_stall(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        """It has taken it."""
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
        super().resume_writing()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(_HEAD_TIMEOUT_S, self._end)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _watch_for_a_stall(self, nbytes: int) -> None:
        self._stall_timer = self.loop.call_later(_STALL_TIMEOUT_S, self._check_for_a_stall, nbytes)

    def _check_for_a_stall(self, before_nbytes: int) -> None:
        """Ends a connection that has read nothing since the last look. Goes on watching a slow one."""
        nbytes = self.transport.get_write_buffer_size()
        if nbytes >= before_nbytes:
            self._abort()
        else:
            self._watch_for_a_stall(nbytes)

    @property
    def _peer(self) -> str:
        """Who is at the other end, for logs."""
        return "an unknown peer" if self.client is None else self.client[0]

    def _refuse(self, refusal: _RefusedHead) -> None:
        """Sends the error in OpenAI's envelope, and ends the connection."""
        running = self._running
        if running is None or running.response_complete:
            self._send_last(refusal)
        elif running is self.cycle and running.more_body and not running.response_started:  # its own body is bad
            running.hang_up()
            self._send_last(refusal)
        else:  # it would stand before, or within, the answer to an earlier request
            self._end()
        logger.warning("a bad request of %s was refused: %s", self._peer, refusal)

    def _send_last(self, refusal: _RefusedHead) -> None:
        """Sends it, ends our half of the connection, and drops what the caller still sends until it has seen that."""
        self._send_refusal(refusal)
        if not self.transport.can_write_eof():  # TLS
            self._end()
            return
        self._is_refused = True
        self._head_came()
        self._take_no_more()
        self.pipeline.clear()
        self.transport.write_eof()
        self._flow.catch_up()
        self._flow.resume_reading()
        self.loop.call_later(_LINGER_S, self._abort)

    def _read_on(self) -> None:
        if not self._lost:
            self._flow.resume_reading()

    def _send_refusal(self, refusal: _RefusedHead) -> None:
        body = msgspec.json.encode(refusal.envelope())
        lines = (
            f"HTTP/1.1 {refusal.status} {http.HTTPStatus(refusal.status).phrase}",
            "content-type: application/json",
            f"content-length: {len(body)}",
            f"x-request-id: {secrets.token_hex(16)}",
            "connection: close",
        )
        fields = [b"%s: %s" % field for field in self._headers_for(self.headers or ())]  # of those that had come
        self.transport.write(b"\r\n".join((*(line.encode("ascii") for line in lines), *fields, b"", body)))

    def _end(self) -> None:
        self._head_came()
        self.pipeline.clear()
        self.transport.close()
        self._linger()

    def _linger(self) -> None:
        """Ends a closed connection for good: uvloop waits for ever if the peer does not read."""
        if self.transport.is_closing():
            self.loop.call_later(_LINGER_S, self._abort)

    def _abort(self) -> None:
        if not self._lost:  # asyncio's transport reports its end once more
            self.transport.abort()
