"""Admission over ASGI: places, turns, and callers that hang up at every moment. How bodies are read: test_bodies.py."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from shmring.frontend.admission import Admission, admitted_of
from shmring.frontend.errors import ApiError
from shmring.frontend.settings import FrontendSettings


class Caller:
    """One request: what it sends, and what it gets."""

    def __init__(
        self, *chunks: bytes, headers: dict[bytes, bytes] | None = None, complete: bool = True, address: str = "192.0.2.1"
    ) -> None:
        all_headers = {b"content-type": b"application/json"} | (headers or {})
        self.scope: Any = {"type": "http", "path": "/", "headers": list(all_headers.items()), "client": (address, 1)}
        self.received: list[Any] = []
        self.receives = 0
        self._on_hang_up: Callable[[], None] | None = None
        self._messages: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        for index, chunk in enumerate(chunks):
            last = complete and index == len(chunks) - 1
            self._messages.put_nowait({"type": "http.request", "body": chunk, "more_body": not last})

    def hang_up(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})
        if self._on_hang_up is not None:
            self._on_hang_up()

    def watch_caller(self, on_hang_up: Callable[[], None] | None) -> None:
        self._on_hang_up = on_hang_up

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


Run = Callable[..., asyncio.Task[None]]


@pytest.fixture
def run() -> Run:
    """``run(admission, caller, handler)``: one request, as a task."""

    def start(admission: Admission, caller: Caller, handler: Handler) -> asyncio.Task[None]:
        return asyncio.create_task(admission.handle(caller.scope, caller.receive, caller.send, handler))

    return start


async def test_the_body_arrives_whole_and_the_answer_leaves(run: Run) -> None:
    caller, handler = Caller(b"one ", b"two ", b"three"), Handler()
    await run(Admission(FrontendSettings()), caller, handler)
    assert handler.bodies == [b"one two three"]
    assert [message["type"] for message in caller.received] == ["http.response.start", "http.response.body"]
    assert (handler.finished, handler.cancelled) == (1, 0)  # the end of its answer is not a hang-up


async def test_an_empty_body_is_a_body(run: Run) -> None:
    handler = Handler()
    await run(Admission(FrontendSettings()), Caller(b""), handler)
    assert handler.bodies == [b""]


async def test_hanging_up_during_the_upload_ends_it_before_the_handler(run: Run) -> None:
    caller, handler = Caller(b"half", complete=False), Handler()
    task = run(Admission(FrontendSettings()), caller, handler)
    caller.hang_up()
    await task
    assert (handler.bodies, caller.received) == ([], [])


async def test_hanging_up_cancels_the_handler(run: Run, eventually: Any) -> None:
    caller, handler = Caller(b"body"), Handler(proceed=False)
    task = run(Admission(FrontendSettings()), caller, handler)
    await eventually(lambda: handler.running == 1)
    caller.hang_up()
    await task
    assert (handler.cancelled, handler.running, caller.received) == (1, 0, [])


async def test_hanging_up_ends_what_waits_for_a_place(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=1)), Handler(proceed=False)
    first = run(admission, Caller(b"first"), handler)
    await eventually(lambda: handler.running == 1)
    caller = Caller(b"second")
    second = run(admission, caller, handler)
    await eventually(lambda: caller.receives == 1)
    caller.hang_up()
    await second  # the first one still has the place
    handler.proceed.set()
    await asyncio.gather(first, run(admission, Caller(b"third"), handler))
    assert handler.bodies == [b"first", b"third"]


async def test_what_a_handler_makes_of_the_cancellation_is_not_told_to_who_hung_up(run: Run, eventually: Any) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        handler.running += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("of its clean-up") from None

    admission, handler, caller = Admission(FrontendSettings()), Handler(), Caller(b"body")
    task = run(admission, caller, fail)  # type: ignore[arg-type]
    await eventually(lambda: handler.running == 1)
    caller.hang_up()
    await task


@pytest.mark.parametrize("moment", ["its body comes", "it waits for a place", "its handler prepares it"])
async def test_an_operator_ends_it_while(run: Run, eventually: Any, moment: str) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=2)), Handler(proceed=False)
    others = [Caller(b"other") for _ in range(2 if moment == "it waits for a place" else 1)]
    tasks = [run(admission, caller, handler) for caller in others]
    await eventually(lambda: handler.running == len(others))
    caller = Caller(b"body", complete=moment != "its body comes")
    caller.scope["state"] = {"request_id": "named"}
    task = run(admission, caller, handler)
    await eventually(lambda: caller.receives == 2 - (moment != "its body comes"))
    if moment == "its handler prepares it":
        await eventually(lambda: handler.running == 2)
    assert (admission.abort(["another's", "named"]), admission.abort(["named"])) == (1, 0)
    error = await refusal(task)
    assert (error.status, error.code, error.headers) == (500, "aborted", {"x-should-retry": "false"})
    assert handler.cancelled == (moment == "its handler prepares it")
    assert admission.abort(["named"]) == 0
    handler.proceed.set()
    await asyncio.gather(*tasks)
    again = Caller(b"again")
    again.scope["state"] = {"request_id": "named"}
    await run(admission, again, handler)  # the place is free, and the name is no reason
    assert handler.finished == len(others) + 1


async def test_what_is_ready_for_the_engine_is_ended_there(run: Run, eventually: Any) -> None:
    admission, handler, caller = Admission(FrontendSettings()), Handler(proceed=False), Caller(b"body")
    caller.scope["state"] = {"request_id": "named"}

    async def send_to_engine(scope: Any, receive: Any, send: Any) -> None:
        admitted_of(scope).release_turn()
        await handler(scope, receive, send)

    task = run(admission, caller, send_to_engine)  # type: ignore[arg-type]
    await eventually(lambda: handler.running == 1)
    assert admission.abort(["named"]) == 0
    handler.proceed.set()
    await task
    assert handler.finished == 1


async def test_the_server_s_end_passes_what_an_operator_has_ended(run: Run, eventually: Any) -> None:
    """Or a server that shuts down would wait for its answer."""
    admission, handler, caller = Admission(FrontendSettings()), Handler(proceed=False), Caller(b"body")
    caller.scope["state"] = {"request_id": "named"}
    task = run(admission, caller, handler)
    await eventually(lambda: handler.running == 1)
    assert admission.abort(["named"]) == 1
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_the_server_s_own_cancellation_ends_the_handler_too(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=1)), Handler(proceed=False)
    task = run(admission, Caller(b"body"), handler)
    await eventually(lambda: handler.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (handler.cancelled, handler.running) == (1, 0)
    handler.proceed.set()
    await run(admission, Caller(b"next"), handler)  # its turn is free
    assert handler.finished == 1


async def test_a_handler_s_error_comes_through_and_frees_its_turn(run: Run) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("what went wrong")

    admission = Admission(FrontendSettings(max_concurrent_requests=1))
    for _ in range(2):
        with pytest.raises(KeyError, match="what went wrong"):
            await run(admission, Caller(b"body"), fail)  # type: ignore[arg-type]


async def test_the_long_texts_of_a_body_go_with_its_request(run: Run) -> None:
    async def fail(scope: Any, receive: Any, send: Any) -> None:
        assert admitted_of(scope).long_texts
        raise KeyError("a text where no medium belongs")

    begin = b'{"messages": [{"role": "user", "content": "'
    caller = Caller(begin, *[b"A" * (1 << 20)] * 4, b'"}]}', headers={b"content-length": b"%d" % (len(begin) + (4 << 20) + 4)})
    with pytest.raises(KeyError):
        await run(Admission(FrontendSettings()), caller, fail)  # type: ignore[arg-type]
    assert not admitted_of(caller.scope).long_texts, "a connection keeps the scope of its last request"


async def test_who_hung_up_while_waiting_is_gone_when_its_turn_comes(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=1)), Handler(proceed=False)
    first = run(admission, Caller(b"first"), handler)
    await eventually(lambda: handler.running == 1)
    caller = Caller(complete=False)
    caller.hang_up()
    second = run(admission, caller, handler)
    handler.proceed.set()
    await asyncio.gather(first, second)
    assert handler.bodies == [b"first"]


async def refusal(task: Awaitable[None]) -> ApiError:
    with pytest.raises(ApiError) as raised:
        await task
    return raised.value


async def test_a_turn_that_does_not_come_is_a_503(run: Run, eventually: Any) -> None:
    admission = Admission(FrontendSettings(max_concurrent_requests=1, queue_timeout_s=0.01))
    handler = Handler(proceed=False)
    first = run(admission, Caller(b"first"), handler)
    await eventually(lambda: handler.running == 1)
    error = await refusal(run(admission, Caller(b"second"), handler))
    assert (error.status, error.code, error.retry_after_s is None) == (503, "overloaded", False)
    handler.proceed.set()
    await first


async def test_whoever_has_waited_in_vain_waits_no_longer(run: Run, eventually: Any) -> None:
    settings = FrontendSettings(max_concurrent_requests=1, max_queued_requests=1, queue_timeout_s=0.01)
    admission, handler = Admission(settings), Handler(proceed=False)
    first = run(admission, Caller(b"first"), handler)
    await eventually(lambda: handler.running == 1)
    for _ in range(3):
        error = await refusal(run(admission, Caller(b"next"), handler))
        assert "turn did not come" in str(error)
    handler.proceed.set()
    await first


async def test_a_turn_and_the_memory_of_a_body_are_given_back_once() -> None:
    admission = Admission(FrontendSettings(max_concurrent_media=1))
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


async def test_callers_share_the_places_and_not_their_requests(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=2)), Handler(proceed=False)
    many = [run(admission, Caller(b"many"), handler) for _ in range(10)]
    await eventually(lambda: handler.running == 2)
    few = [run(admission, Caller(b"few", address="192.0.2.2"), handler) for _ in range(2)]
    await asyncio.sleep(0.01)
    handler.proceed.set()
    await asyncio.gather(*many, *few)
    assert handler.bodies.index(b"few") == 2, "though eight others came before"
    assert handler.bodies[:5].count(b"few") == 2


async def test_whoever_fills_the_line_keeps_no_other_caller_out(run: Run, eventually: Any) -> None:
    admission = Admission(FrontendSettings(max_concurrent_requests=1, max_queued_requests=3))
    handler = Handler(proceed=False)
    many = [run(admission, Caller(b"many"), handler) for _ in range(4)]
    await eventually(lambda: handler.running == 1)
    few = run(admission, Caller(b"few", address="192.0.2.2"), handler)
    error = await refusal(many.pop())
    assert (error.status, error.code) == (503, "overloaded")
    assert "yours" in str(error)
    assert (await refusal(run(admission, Caller(b"more"), handler))).code == "overloaded"
    handler.proceed.set()
    await asyncio.gather(few, *many)
    assert sorted(handler.bodies) == [b"few", b"many", b"many", b"many"]
    places = admission._places
    assert (places._free, places._count, places._waiting, dict(places._taken), places._last_turn) == (1, 0, {}, {}, {})


async def test_too_many_that_wait_are_a_503_at_once(run: Run, eventually: Any) -> None:
    admission = Admission(FrontendSettings(max_concurrent_requests=1, max_queued_requests=1))
    handler = Handler(proceed=False)
    tasks = [run(admission, Caller(b"body"), handler) for _ in range(3)]
    error = await refusal(tasks.pop())
    assert (error.status, error.code) == (503, "overloaded")
    handler.proceed.set()
    await asyncio.gather(*tasks)


async def test_a_body_that_does_not_arrive_is_a_408_and_frees_its_turn(run: Run) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=1, body_timeout_s=0.01)), Handler()
    error = await refusal(run(admission, Caller(b"half", complete=False), handler))
    assert (error.status, error.code) == (408, "body_timeout")
    await run(admission, Caller(b"whole"), handler)
    assert handler.bodies == [b"whole"]


async def test_a_body_announced_too_large_is_refused_unread(run: Run) -> None:
    caller = Caller(b"x" * 11, headers={b"content-length": b"11"})
    error = await refusal(run(Admission(FrontendSettings(max_body_nbytes=10)), caller, Handler()))
    assert (error.status, error.code, caller.receives) == (413, "body_too_large", 0)


async def test_a_body_that_grows_too_large_is_refused_while_it_comes(run: Run) -> None:
    caller = Caller(*[b"x" * 4] * 10)
    error = await refusal(run(Admission(FrontendSettings(max_body_nbytes=10)), caller, Handler()))
    assert (error.status, caller.receives) == (413, 3 + 3), "the rest is dropped, as much as a whole body may have"


async def test_a_body_of_too_many_values_is_refused_before_it_is_decoded(run: Run) -> None:
    caller = Caller(b"[", *[b"[]," * 10_000] * 5, b"0]")
    admission, handler = Admission(FrontendSettings()), Handler()
    error = await refusal(run(admission, caller, handler))
    assert (error.status, error.code, caller.receives) == (413, "too_many_values", 7)
    assert handler.bodies == []


async def test_requests_in_flight_are_bounded(run: Run, eventually: Any) -> None:
    settings = FrontendSettings(max_concurrent_requests=2, max_queued_requests=1)
    admission, handler = Admission(settings), Handler(proceed=False)
    tasks = [run(admission, Caller(b"tiny"), handler) for _ in range(3)]
    await eventually(lambda: handler.running == 2)
    error = await refusal(run(admission, Caller(b"tiny"), handler))
    assert (error.status, error.code, error.headers) == (503, "overloaded", {"retry-after": "1"})
    handler.proceed.set()
    await asyncio.gather(*tasks)
    assert (handler.finished, handler.most_running) == (3, 2)


async def test_a_turn_that_is_given_back_early_is_the_next_one_s(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_media=1)), Handler(proceed=False)

    async def give_back(scope: Any, receive: Any, send: Any) -> None:
        admitted = admitted_of(scope)
        for _ in range(2):  # twice is once
            await admitted.take_turn()
        for _ in range(2):
            admitted.release_turn()
        await handler(scope, receive, send)

    tasks = [run(admission, Caller(b"body"), give_back) for _ in range(3)]  # type: ignore[arg-type]
    await eventually(lambda: handler.running == 3)
    handler.proceed.set()
    await asyncio.gather(*tasks)


async def test_a_turn_that_was_not_given_back_is_at_the_end_of_its_request(run: Run) -> None:
    admission = Admission(FrontendSettings(max_concurrent_media=1))
    had_turn = []

    async def take(scope: Any, receive: Any, send: Any) -> None:
        await admitted_of(scope).take_turn()
        had_turn.append(admitted_of(scope).has_turn)

    for _ in range(2):
        await run(admission, Caller(b"body"), take)  # type: ignore[arg-type]
    assert had_turn == [True, True]


async def test_bodies_that_come_slowly_take_no_place_and_no_turn(run: Run, eventually: Any) -> None:
    admission, handler = Admission(FrontendSettings(max_concurrent_requests=1, max_concurrent_media=1)), Handler()
    slow = [Caller(b"slow", headers={b"content-length": b"1000000"}, complete=False) for _ in range(40)]
    tasks = [run(admission, caller, handler) for caller in slow]
    await eventually(lambda: all(caller.receives == 2 for caller in slow))
    await asyncio.wait_for(run(admission, Caller(b"body"), handler), 1)
    assert handler.bodies == [b"body"]
    for caller in slow:
        caller.hang_up()
    await asyncio.gather(*tasks)


async def test_the_deadline_begins_with_the_end_of_the_body(run: Run) -> None:
    admission = Admission(FrontendSettings(request_timeout_s=5))
    deadlines = []

    async def note(scope: Any, receive: Any, send: Any) -> None:
        deadlines.append(admitted_of(scope).deadline)

    await run(admission, Caller(b"body"), note)  # type: ignore[arg-type]
    assert deadlines[0] == pytest.approx(asyncio.get_running_loop().time() + 5, abs=1)
