"""Answers as streams of events (``text/event-stream``), in OpenAI's form: ``data: {...}``, and ``data: [DONE]`` at the end.

The head is sent with the first event. So a failure before the first event is an ordinary answer with an error's status. A
later failure is a last event with the envelope of errors, ``data: {"error": {...}}``, without a ``[DONE]`` after it, because
the stream did not end normally. The official ``openai`` client raises ``APIError`` for it. Events of ``/v1/responses`` have
names, no ``[DONE]`` follows them, and the event of a failure is called ``error``. So it is with events of ``/v1/messages``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shmring.frontend.errors import ApiError
from shmring.frontend.http.responses import error_content

__all__ = ["CONTENT_TYPE", "DONE", "EventStream", "event", "event_of_error"]

#: Of streams.
CONTENT_TYPE = "text/event-stream; charset=utf-8"

#: The last event of a stream that ended as it should.
DONE = b"data: [DONE]\n\n"

# Neither caches nor proxies (nginx buffers answers by default) may keep events back.
_HEADERS = {"content-type": CONTENT_TYPE, "cache-control": "no-cache", "x-accel-buffering": "no"}

_LAST_WORDS_TIMEOUT_S = 1.0  # for a caller that may not be reading, to be told why nothing more comes


def event(content: object, name: str = "") -> bytes:
    """Returns the event of something that msgspec can encode. (JSON has no line breaks, so one line is enough.)"""
    head = f"event: {name}\ndata: " if name else "data: "
    return head.encode() + msgspec.json.encode(content) + b"\n\n"


def event_of_error(error: ApiError, scope: Scope) -> bytes:
    """Returns the last event of an answer that fails, in the form that the caller of a request expects.

    It has a name, if errors in this form have a type.
    """
    content = error_content(error, scope)
    return event(content, str(content.__struct_config__.tag or ""))


class EventStream(Response):
    """An answer that is sent as it is made.

    ``receive`` is not used: the admission of the request notices when the caller hangs up.

    Args:
        events: as :func:`event` makes them.
        close: is always called at the end, even if the first event was never asked for.
        deadline: when the last of them must have been sent, as a time of the loop's clock.
        report: turns a failure of the events into the error that the caller gets.
        headers: further ones.
        failed: makes the last event, of an error that occurs on the way; None: :func:`event_of_error` does.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        deadline: float,
        report: Callable[[Exception], ApiError],
        headers: Mapping[str, str],
        failed: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._close = close
        self._deadline = deadline
        self._report = report
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the head, the events, and an error if one occurs."""
        try:
            try:
                async with asyncio.timeout_at(self._deadline), aclosing(self._events):
                    await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                    async for encoded_event in self._events:
                        await _send_body(send, encoded_event, more_body=True)
            finally:
                await self._close()
            await _send_body(send, b"", more_body=False)
        except Exception as error:  # noqa: BLE001 - its owner is the caller, who is told in the only way that is left
            api_error = self._report(error)
            last = event_of_error(api_error, scope) if self._failed is None else self._failed(api_error)
            await _break_off(last, send)


async def _break_off(last: bytes, send: Send) -> None:
    """A caller that reads nothing can't be told; the server then closes its connection."""
    try:
        async with asyncio.timeout(_LAST_WORDS_TIMEOUT_S):
            await _send_body(send, last, more_body=False)
    except TimeoutError:
        return


async def _send_body(send: Send, body: bytes, *, more_body: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more_body})
