"""Admission over ASGI: places, turns, and callers that hang up at every moment. How bodies are read: test_bodies.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shmring.frontend.callers.admission import Admission, admitted_of
from shmring.frontend.errors import ApiError
from shmring.frontend.http.watch import EXTENSION, Watch
from shmring.frontend.settings import FrontendSettings
from tests.waiting import eventually


class Caller:
    """One request: what it sends, and what it gets."""

    def __init__(
        self,
        *chunks: bytes,
        headers: dict[bytes, bytes] | None = None,
        complete: bool = True,
        address: str = "192.0.2.1",
        name: str = "",
    ) -> None:
        all_headers = {b"content-type": b"application/json"} | (headers or {})
        self.scope: Any = {"type": "http", "path": "/", "headers": list(all_headers.items()), "client": (address, 1)}
        if name:
            self.scope["state"] = {"request_id": name}
        self.received: list[Any] = []
        self.receives = 0
        self._watch = Watch()
        self.scope["extensions"] = {EXTENSION: {"watch": self._watch}}
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, chunk in enumerate(chunks):
            last = complete and index == len(chunks) - 1
            self._messages.put_nowait({"type": "http.request", "body": chunk, "more_body": not last})

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        self._watch.hang_up()

    async def receive(self) -> Any:
        self.receives += 1
        return await self._messages.get()

    async def send(self, message: Any) -> None:
        self.received.append(message)


class Handler:
    """The application behind: it notes what happens to it."""

    def __init__(self, proceed: bool = True) -> None:
        self.bodies: list[bytes] = []
        self.running = self.most_running = self.cancelled = self.finished = 0
        self.proceed = asyncio.Event()
        if proceed:
            self.proceed.set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        assert message["more_body"] is False
        self.bodies.append(bytes(message["body"]))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.proceed.wait()
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"done"})
            for _ in range(10):  # as handlers have things to do after their answer
                await asyncio.sleep(0)
            self.finished += 1
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def admission_of(**settings: Any) -> Admission:
    return Admission(FrontendSettings(**settings))


def run(admission: Admission, caller: Caller | bytes, handler: Any) -> asyncio.Task[None]:
    """One request, as a task."""
    caller = Caller(caller) if isinstance(caller, bytes) else caller
    return asyncio.create_task(admission.handle(caller.scope, caller.receive, caller.send, handler))


Begin = Callable[..., Awaitable[tuple[Admission, Handler, asyncio.Task[None]]]]


@pytest.fixture
def begin() -> Begin:
    """``await begin(caller, **settings)``: an admission, a handler that waits, and a request that the handler has."""

    async def begin_one(caller: Caller | bytes = b"first", **settings: Any) -> tuple[Admission, Handler, asyncio.Task[None]]:
        admission, handler = admission_of(**settings), Handler(proceed=False)
        task = run(admission, caller, handler)
        await eventually(lambda: handler.running == 1)
        return admission, handler, task

    return begin_one


async def refusal(task: Awaitable[None]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await task
    return raised.value


async def test_the_body_arrives_whole_and_the_answer_leaves() -> None:
    for chunks in ([b"one ", b"two ", b"three"], [b""]):  # an empty body is a body
        caller, handler, admission = Caller(*chunks), Handler(), admission_of()
        await run(admission, caller, handler)
        assert not admission._requests, "it is over"
        assert handler.bodies == [b"".join(chunks)]
        assert [message["type"] for message in caller.received] == ["http.response.start", "http.response.body"]
        assert (handler.finished, handler.cancelled) == (1, 0)  # the end of its answer is not a hang-up


async def test_hanging_up_during_the_upload_ends_it_before_the_handler() -> None:
    caller, handler = Caller(b"half", complete=False), Handler()
    task = run(admission_of(), caller, handler)
    caller.hang_up()
    await task
    assert (handler.bodies, caller.received) == ([], [])


async def test_hanging_up_cancels_the_handler(begin: Begin) -> None:
    caller = Caller(b"body")
    _, handler, task = await begin(caller)
    caller.hang_up()
    await task
    assert (handler.cancelled, handler.running, caller.received) == (1, 0, [])


async def test_hanging_up_ends_what_waits_for_a_place(begin: Begin) -> None:
    admission, handler, first = await begin(max_concurrent_requests=1)
    caller = Caller(b"second")
    second = run(admission, caller, handler)
    await eventually(lambda: caller.receives == 1)
    caller.hang_up()
    await second  # the first one still has the place
    handler.proceed.set()
    await asyncio.gather(first, run(admission, b"third", handler))
    assert handler.bodies == [b"first", b"third"]


async def test_what_a_handler_makes_of_the_cancellation_is_not_told_to_who_hung_up() -> None:
    running = asyncio.Event()

    async def fail(scope: Any, receive: Any, send: Any) -> None:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("of its clean-up") from None

    caller = Caller(b"body")
    task = run(admission_of(), caller, fail)
    await running.wait()
    caller.hang_up()
    await task


@pytest.mark.parametrize("moment", ["its body comes", "it waits for a place", "its handler prepares it"])
async def test_an_operator_ends_it_while(begin: Begin, moment: str) -> None:
    admission, handler, first = await begin(max_concurrent_requests=1 if moment == "it waits for a place" else 2)
    is_complete, is_running = moment != "its body comes", moment == "its handler prepares it"
    caller = Caller(b"body", complete=is_complete, name="named")
    task = run(admission, caller, handler)
    await eventually(lambda: (caller.receives, handler.running) == (2 - is_complete, 1 + is_running))
    assert (admission.abort(["another's", "named"]), admission.abort(["named"])) == (1, 0)
    error = await refusal(task)
    assert (error.status, error.code, error.headers) == (500, "aborted", {"x-should-retry": "false"})
    assert handler.cancelled == is_running
    assert admission.abort(["named"]) == 0
    handler.proceed.set()
    await first
    await run(admission, Caller(b"again", name="named"), handler)  # the place is free, and the name is no reason
    assert handler.finished == 2


async def test_what_is_ready_for_the_engine_is_ended_there() -> None:
    admission, handler = admission_of(), Handler(proceed=False)

    async def send_to_engine(scope: Any, receive: Any, send: Any) -> None:
        admitted_of(scope).release_turn()
        await handler(scope, receive, send)

    task = run(admission, Caller(b"body", name="named"), send_to_engine)
    await eventually(lambda: handler.running == 1)
    assert admission.abort(["named"]) == 0
    handler.proceed.set()
    await task
    assert handler.finished == 1


async def test_the_server_s_end_passes_what_an_operator_has_ended(begin: Begin) -> None:
    """Or a server that shuts down would wait for its answer."""
    admission, _, task = await begin(Caller(b"body", name="named"))
    assert admission.abort(["named"]) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_it_is_known_whether_other_callers_have_requests(begin: Begin) -> None:
    admission, handler, task = await begin()
    assert [admission.has_others(who) for who in ("192.0.2.1", "192.0.2.2")] == [False, True]
    handler.proceed.set()
    await task
    assert not admission.has_others("192.0.2.2")


async def test_the_server_s_own_cancellation_ends_the_handler_too(begin: Begin) -> None:
    admission, handler, task = await begin(max_concurrent_requests=1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (handler.cancelled, handler.running) == (1, 0)
    handler.proceed.set()
    await run(admission, b"next", handler)  # its turn is free
    assert handler.finished == 1


async def test_a_handler_s_error_comes_through_and_frees_its_turn() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("what went wrong")

    admission = admission_of(max_concurrent_requests=1)
    for _ in range(2):
        with pytest.raises(KeyError, match="what went wrong"):
            await run(admission, b"body", fail)


async def test_the_long_texts_of_a_body_go_with_its_request() -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        assert admitted_of(scope).long_texts
        raise KeyError("a text where no medium belongs")

    begin = b'{"messages": [{"role": "user", "content": "'
    caller = Caller(begin, *[b"A" * (1 << 20)] * 4, b'"}]}', headers={b"content-length": b"%d" % (len(begin) + (4 << 20) + 4)})
    with pytest.raises(KeyError):
        await run(admission_of(), caller, fail)
    assert not admitted_of(caller.scope).long_texts, "a connection keeps the scope of its last request"


async def test_who_hung_up_while_waiting_is_gone_when_its_turn_comes(begin: Begin) -> None:
    admission, handler, first = await begin(max_concurrent_requests=1)
    caller = Caller(complete=False)
    caller.hang_up()
    second = run(admission, caller, handler)
    handler.proceed.set()
    await asyncio.gather(first, second)
    assert handler.bodies == [b"first"]


async def test_whoever_has_waited_in_vain_waits_no_longer(begin: Begin) -> None:
    admission, handler, first = await begin(max_concurrent_requests=1, max_queued_requests=1, queue_timeout_s=0.01)
    for _ in range(3):
        error = await refusal(run(admission, b"next", handler))
        assert (error.status, error.code, error.retry_after_s is None) == (503, "overloaded", False)
        assert "turn did not come" in str(error)
    handler.proceed.set()
    await first


async def test_a_turn_and_the_memory_of_a_body_are_given_back_once() -> None:
    admission = admission_of(max_concurrent_media=1)
    first, second, third = (admission.new_request() for _ in range(3))
    await first.body_share.grow(1000)
    await first.take_turn()
    await first.take_turn()
    first.release_turn()
    first.release_turn()
    assert (first.body_share.nbytes, admission._bodies.memory.nbytes) == (0, 0)
    await second.take_turn()
    waiting = asyncio.create_task(third.take_turn())
    await asyncio.sleep(0)
    assert not waiting.done()
    second.release_turn()
    await waiting
    third.release_turn()


async def test_callers_share_the_places_and_not_their_requests() -> None:
    admission, handler = admission_of(max_concurrent_requests=2), Handler(proceed=False)
    many = [run(admission, b"many", handler) for _ in range(10)]
    await eventually(lambda: handler.running == 2)
    few = [run(admission, Caller(b"few", address="192.0.2.2"), handler) for _ in range(2)]
    await asyncio.sleep(0.01)
    handler.proceed.set()
    await asyncio.gather(*many, *few)
    assert handler.bodies.index(b"few") == 2, "though eight others came before"
    assert handler.bodies[:5].count(b"few") == 2


async def test_whoever_fills_the_line_keeps_no_other_caller_out(begin: Begin) -> None:
    admission, handler, first = await begin(b"many", max_concurrent_requests=1, max_queued_requests=3)
    many = [run(admission, b"many", handler) for _ in range(3)]
    few = run(admission, Caller(b"few", address="192.0.2.2"), handler)
    error = await refusal(many.pop())
    assert (error.status, error.code) == (503, "overloaded")
    assert "yours" in str(error)
    assert (await refusal(run(admission, b"more", handler))).code == "overloaded"
    handler.proceed.set()
    await asyncio.gather(few, first, *many)
    assert sorted(handler.bodies) == [b"few", b"many", b"many", b"many"]
    places = admission._places
    assert (places._free, places._count, places._waiting, dict(places._taken), places._last_turn) == (1, 0, {}, {}, {})


async def test_too_many_that_wait_are_a_503_at_once(begin: Begin) -> None:
    admission, handler, first = await begin(max_concurrent_requests=2, max_queued_requests=1)
    tasks = [run(admission, b"tiny", handler) for _ in range(2)]
    await eventually(lambda: handler.running == 2)
    caller = Caller(b"tiny")
    error = await refusal(run(admission, caller, handler))
    assert (error.status, error.code, error.headers) == (503, "overloaded", {"retry-after": "1"})
    assert caller.receives == 0, "its body is not read"
    handler.proceed.set()
    await asyncio.gather(first, *tasks)
    assert (handler.finished, handler.most_running) == (3, 2)


async def test_a_body_that_does_not_arrive_is_a_408_and_frees_its_turn() -> None:
    admission, handler = admission_of(max_concurrent_requests=1, body_timeout_s=0.01), Handler()
    error = await refusal(run(admission, Caller(b"half", complete=False), handler))
    assert (error.status, error.code) == (408, "body_timeout")
    await run(admission, b"whole", handler)
    assert handler.bodies == [b"whole"]


async def test_a_body_that_is_too_large_is_refused_unread_or_while_it_comes() -> None:
    for caller, receives in (
        (Caller(b"x" * 11, headers={b"content-length": b"11"}), 0),
        (Caller(*[b"x" * 4] * 10), 3 + 3),  # the rest is dropped, as much as a whole body may have
    ):
        handler = Handler()
        error = await refusal(run(admission_of(max_body_nbytes=10), caller, handler))
        assert (error.status, error.code, caller.receives, handler.bodies) == (413, "body_too_large", receives, [])


async def test_a_body_of_too_many_values_is_refused_before_it_is_decoded() -> None:
    caller, handler = Caller(b"[", *[b"[]," * 10_000] * 5, b"0]"), Handler()
    error = await refusal(run(admission_of(), caller, handler))
    assert (error.status, error.code, caller.receives, handler.bodies) == (413, "too_many_values", 7, [])


async def test_a_turn_that_is_given_back_early_is_the_next_one_s() -> None:
    admission, handler = admission_of(max_concurrent_media=1), Handler(proceed=False)

    async def give_back(scope: Any, receive: Any, send: Any) -> None:
        admitted = admitted_of(scope)
        for _ in range(2):  # twice is once
            await admitted.take_turn()
        for _ in range(2):
            admitted.release_turn()
        await handler(scope, receive, send)

    tasks = [run(admission, b"body", give_back) for _ in range(3)]
    await eventually(lambda: handler.running == 3)
    handler.proceed.set()
    await asyncio.gather(*tasks)


async def test_a_turn_that_was_not_given_back_is_at_the_end_of_its_request() -> None:
    admission = admission_of(max_concurrent_media=1)
    had_turn = []

    async def take(scope: Any, receive: Any, send: Any) -> None:
        await admitted_of(scope).take_turn()
        had_turn.append(admitted_of(scope).has_turn)

    for _ in range(2):
        await run(admission, b"body", take)
    assert had_turn == [True, True]


async def test_bodies_that_come_slowly_take_no_place_and_no_turn() -> None:
    admission, handler = admission_of(max_concurrent_requests=1, max_concurrent_media=1), Handler()
    slow = [Caller(b"slow", headers={b"content-length": b"1000000"}, complete=False) for _ in range(40)]
    tasks = [run(admission, caller, handler) for caller in slow]
    await eventually(lambda: all(caller.receives == 2 for caller in slow))
    await asyncio.wait_for(run(admission, b"body", handler), 1)
    assert handler.bodies == [b"body"]
    for caller in slow:
        caller.hang_up()
    await asyncio.gather(*tasks)


async def test_the_deadline_begins_with_the_end_of_the_body() -> None:
    admission = admission_of(request_timeout_s=5)
    deadlines = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        deadlines.append(admitted_of(scope).deadline)

    await run(admission, b"body", note)
    assert deadlines[0] == pytest.approx(asyncio.get_running_loop().time() + 5, abs=1)
