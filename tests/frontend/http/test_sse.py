"""Streams of events: their head, their end, and whatever may go wrong in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest

import shmring
from shmring.frontend.errors import api_error_of
from shmring.frontend.http.sse import DONE, EventStream, event
from tests.tables import for_each

Report = Any


class Stream:
    """Events, and whether they were closed."""

    def __init__(self, *steps: bytes | Exception | None) -> None:
        self.steps = steps
        self.closed = 0

    async def events(self) -> AsyncGenerator[bytes, None]:
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            if step is None:
                await asyncio.Event().wait()
            else:
                yield step

    async def close(self) -> None:
        self.closed += 1


class Caller:
    """Who is sent to; it takes so many messages and then no more."""

    def __init__(self, takes: int = 100) -> None:
        self.messages: list[Any] = []
        self.takes = takes

    async def send(self, message: Any) -> None:
        if len(self.messages) == self.takes:
            await asyncio.Event().wait()
        self.messages.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.messages)


async def send(stream: Stream, caller: Caller, deadline_s: float = 10.0) -> None:
    deadline = asyncio.get_running_loop().time() + deadline_s
    response = EventStream(stream.events(), stream.close, deadline, api_error_of, {"x-own": "1"})

    async def receive() -> Any:
        raise AssertionError("somebody else listens")

    await response({"type": "http", "state": {}}, receive, caller.send)


def test_an_event_is_one_line() -> None:
    assert event({"text": "a\n\nb"}) == b'data: {"text":"a\\n\\nb"}\n\n'


async def test_events_are_sent_one_by_one() -> None:
    stream, caller = Stream(event(1), event(2), DONE), Caller()
    await send(stream, caller)
    start, *bodies = caller.messages
    assert dict(start["headers"]) == {
        b"content-type": b"text/event-stream; charset=utf-8",
        b"cache-control": b"no-cache",
        b"x-accel-buffering": b"no",
        b"x-own": b"1",
    }
    assert [body["body"] for body in bodies] == [event(1), event(2), DONE, b""]
    assert [body["more_body"] for body in bodies] == [True, True, True, False]
    assert stream.closed == 1


async def test_a_failure_is_the_last_event() -> None:
    stream, caller = Stream(event(1), shmring.EngineDeadError("gone")), Caller()
    await send(stream, caller)
    last = caller.messages[-1]
    assert json.loads(last["body"].removeprefix(b"data: "))["error"]["code"] == "engine_unavailable"
    assert not last["more_body"]
    assert DONE not in caller.body
    assert stream.closed == 1


async def test_a_stream_that_takes_too_long_says_so() -> None:
    stream, caller = Stream(event(1), None), Caller()
    await send(stream, caller, deadline_s=0.02)
    assert b"request_timeout" in caller.messages[-1]["body"]
    assert stream.closed == 1


async def test_a_caller_that_reads_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.frontend.http.sse._LAST_WORDS_TIMEOUT_S", 0.02)
    stream, caller = Stream(*[event(1)] * 10), Caller(takes=3)
    await send(stream, caller, deadline_s=0.02)
    assert len(caller.messages) == 3
    assert stream.closed == 1


@for_each("taken", [0, 1, 2])
async def test_cancelling_closes_it_whenever_that_is(taken: int) -> None:
    stream, caller = Stream(event(1), event(2)), Caller(takes=taken)
    task = asyncio.create_task(send(stream, caller))
    for _ in range(20):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert stream.closed == 1
    assert len(caller.messages) == taken
