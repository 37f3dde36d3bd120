"""One client of several engines: where requests go, what slots decide, and what happens when engines come and go."""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.core.compiled import LOAD_PAGE_NBYTES, LoadPage
from tests.sessions import attachment_of, session_of
from tests.tables import for_each
from tests.waiting import cancel, eventually, settled, turns

pytestmark = pytest.mark.both_loops

NAMES = ["vision-0", "vision-1"]


class Engines:
    """Rings that answer with their name, and hold requests for as long as they are told to."""

    def __init__(self, serve: Any) -> None:
        self._serve = serve
        self.rings: dict[str, shmring.Ring] = {}
        self.after_large: Callable[[str], None] = lambda name: None  # called when a large reply is in the ring of this engine
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def start(self, *names: str, **options: Any) -> None:
        for name in names:
            self.rings[name] = await self._serve(lambda claim, name=name: self._answer(claim, name), name=name, **options)

    async def _answer(self, claim: shmring.Claim, name: str) -> None:
        payload = claim.payload
        for _ in range(payload.get("first", 0)):
            await claim.reply(name)
        if payload.get("large"):
            await (claim.done if payload["is_all"] else claim.reply)(torch.arange(500))
            self.after_large(name)
            await self.go_on.wait()
            return
        await self.go_on.wait()
        total = float(payload["x"].float().sum()) if "x" in payload else 0.0
        del payload
        await claim.reply([name, total])

    async def stop(self, name: str) -> None:
        await self.rings.pop(name).close()


@pytest.fixture
async def engines(serve: Any, request: pytest.FixtureRequest) -> AsyncIterator[Engines]:
    """Of those names, or of those that the test is marked with."""
    engines = Engines(serve)
    mark = request.node.get_closest_marker("engines")
    await engines.start(*(NAMES if mark is None else mark.args))
    yield engines
    engines.go_on.set()


@pytest.fixture
def silent(socket_dir: Path) -> Iterator[socket.socket]:
    """In the place of the first engine, who does not answer."""
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(socket_dir / "vision-0.sock"))
        silent.listen()
        yield silent


Connect = Callable[..., Awaitable[shmring.Client]]


@pytest.fixture
async def connect_to(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Connect]:
    monkeypatch.setattr("shmring.client.pauses.FIRST_S", 0.001)
    monkeypatch.setattr("shmring.client.pauses.LONGEST_S", 0.01)
    clients: list[shmring.Client] = []

    async def open_client(names: list[str] | None = None, **options: Any) -> shmring.Client:
        settings: dict[str, Any] = {
            "lease_nbytes": "64KiB",
            "inline_nbytes": "1KiB",
            "socket_dir": str(socket_dir),
        }
        client = await shmring.connect(NAMES if names is None else names, **(settings | options))
        clients.append(client)
        return client

    yield open_client
    for client in clients:
        await client.close()


@pytest.fixture
async def client(engines: Engines, connect_to: Connect) -> shmring.Client:
    return await connect_to()


def tensor(nbytes: int = 8192) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)


# -- engines that drain ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", ["least_loaded", "round_robin"])
async def test_an_engine_that_drains_gets_what_is_bound_to_it_and_nothing_else(
    engines: Engines, connect_to: Connect, route: Any
) -> None:
    client = await connect_to(route=route)
    owned = [key for key in map(str, range(30)) if client.choose(key=key) == "vision-0"]
    async with client.slot(8192, engine="vision-0") as slot:
        view = slot.tensor((8192,), torch.uint8).fill_(2)
        engines.go_on.clear()
        first = asyncio.create_task(client.request({}, engine="vision-0"))
        await eventually(lambda: engines.rings["vision-0"].statistics().running)
        draining = asyncio.create_task(engines.rings["vision-0"].drain(claiming=True))
        await asyncio.sleep(0)
        assert list(client.loads()) == ["vision-1"]
        sent = [client.request({}) for _ in range(4)] + [client.request({}, key=key) for key in owned]
        bound = asyncio.create_task(client.request({"x": view}))
        await eventually(lambda: engines.rings["vision-0"].statistics().running >= 2)
        engines.go_on.set()
        assert {name for name, _ in await asyncio.gather(*sent)} == {"vision-1"}
        assert (await first)[0] == "vision-0"
        assert await bound == ["vision-0", 16384.0]
        assert await draining
    assert client.submit_nowait({}).engine == "vision-1"


async def test_where_all_engines_drain_they_are_used(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    held = [asyncio.create_task(client.request({}, engine=name)) for name in NAMES]
    await eventually(lambda: all(ring.statistics().running for ring in engines.rings.values()))
    draining = [asyncio.create_task(ring.drain(claiming=True)) for ring in engines.rings.values()]
    await asyncio.sleep(0)
    more = [asyncio.create_task(client.request({})) for _ in range(4)]
    await eventually(lambda: sum(ring.statistics().running for ring in engines.rings.values()) >= 6)
    engines.go_on.set()
    assert {name for name, _ in await asyncio.gather(*held, *more)} == set(NAMES)
    assert await asyncio.gather(*draining) == [True, True]


async def test_a_request_that_comes_when_its_engine_has_drained_goes_to_another(
    client: shmring.Client, engines: Engines
) -> None:
    assert await engines.rings["vision-0"].drain(claiming=True)
    async with client.slot(8192, engine="vision-0") as slot:
        bound = asyncio.create_task(client.request({"x": slot.tensor((8192,), torch.uint8).fill_(1)}, retry=1))
        await eventually(lambda: engines.rings["vision-0"].statistics().waiting)
        await engines.stop("vision-0")
        assert await bound == ["vision-1", 8192.0]


# -- where requests go ------------------------------------------------------------------------------------------------------


async def test_a_burst_is_spread_over_the_engines(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    requests = [asyncio.create_task(client.request({"x": tensor()})) for _ in range(10)]
    await eventually(lambda: sum(load.in_flight for load in client.loads().values()) >= 10)
    assert {name: load.in_flight for name, load in client.loads().items()} == {"vision-0": 5, "vision-1": 5}
    engines.go_on.set()
    answers = await asyncio.gather(*requests)
    assert Counter(name for name, _ in answers) == {"vision-0": 5, "vision-1": 5}
    assert {total for _, total in answers} == {8192.0}


async def test_what_other_clients_have_in_flight_counts(client: shmring.Client, engines: Engines, connect_to: Connect) -> None:
    other = await connect_to()
    engines.go_on.clear()
    submissions = [await other.submit({}, engine="vision-0") for _ in range(6)]
    await eventually(lambda: client.loads()["vision-0"].in_flight == 6)
    sent = [await client.submit({}) for _ in range(6)]
    assert {submission.engine for submission in sent} == {"vision-1"}
    engines.go_on.set()
    for submission in submissions + sent:
        assert (await submission.result())[0] == submission.engine
    await eventually(lambda: {load.in_flight for load in client.loads().values()} == {0})


async def test_requests_take_turns_where_that_is_the_route(engines: Engines, connect_to: Connect) -> None:
    client = await connect_to(route="round_robin")
    answers = [(await client.request({}))[0] for _ in range(6)]
    assert set(answers[::2]) | set(answers[1::2]) == set(NAMES)
    assert len(set(answers[::2])) == len(set(answers[1::2])) == 1


@pytest.mark.one_loop
async def test_all_requests_of_a_key_go_to_one_engine(client: shmring.Client, connect_to: Connect) -> None:
    other = await connect_to(NAMES[::-1], route="round_robin")
    for number in range(10):
        owners = {(await each.request({}, key=f"session-{number}"))[0] for each in (client, other) for _ in range(3)}
        async with client.slot(100, key=f"session-{number}") as slot:
            assert {slot.engine} == owners
    async with client.slot(100) as slot:
        for payload in ({}, {"x": slot.tensor((10,), torch.uint8)}):
            with pytest.raises(TypeError, match="str or bytes"):
                await client.request(payload, key=7)


async def test_a_request_goes_to_the_engine_that_is_named(client: shmring.Client) -> None:
    for name in NAMES:
        assert await client.request({}, engine=name) == [name, 0.0]
        assert [reply async for reply in client.stream({}, engine=name)] == [[name, 0.0]]
        submission = client.submit_nowait({}, engine=name)
        assert submission.engine == name
        assert await submission.result() == [name, 0.0]
    with pytest.raises(ValueError, match="'vision-0', 'vision-1'"):
        await client.request({}, engine="vision-2")
    with pytest.raises(ValueError, match="leaves no other engine"):
        await client.request({}, engine="vision-0", retry=1)
    with pytest.raises(ValueError, match="retry must be at least 0, not -1"):
        await client.request({}, retry=-1)


@pytest.mark.one_loop
async def test_calls_and_statistics_are_of_one_engine(serve: Any, connect_to: Connect) -> None:
    async def who(name: str) -> str:
        return name

    await serve(name="a", calls={"who": lambda: who("a")})
    await serve(name="b", calls={"who": lambda: who("b")})
    client = await connect_to(["a", "b"])
    assert [await client.call("who", engine=name) for name in client.names] == ["a", "b"]
    assert set(client.engines) == {"a", "b"}
    assert client.engines["a"].client_id == 1
    for ask in (lambda: client.client_id, lambda: client.epoch):
        with pytest.raises(ValueError, match=r"several engines have .*'a', 'b'"):
            ask()
    with pytest.raises(ValueError, match=r"several engines have methods to call: name one of 'a', 'b', with engine="):
        await client.call("who")
    with pytest.raises(ValueError, match="no engine 'c'"):
        await client.call("who", engine="c")


async def test_aborting_by_name_finds_the_request_wherever_it_is(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    requests = [asyncio.create_task(client.request({}, request_id=f"r{number % 2}")) for number in range(4)]
    await eventually(lambda: client.statistics().in_flight == 4)
    assert client.abort("r1") == 2
    assert client.abort("other") == 0
    for number, request in enumerate(requests):
        if number % 2:
            with pytest.raises(shmring.AbortedError):
                await request
    engines.go_on.set()
    assert len(await asyncio.gather(*requests[::2])) == 2


async def test_cancelling_a_request_aborts_it(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    requests = [asyncio.create_task(client.request({"x": tensor()})) for _ in range(4)]
    await eventually(lambda: client.statistics().in_flight == 4)
    assert await cancel(*requests)
    with pytest.raises(TimeoutError, match=r"at 'vision-[01]': the engine's reply"):
        await client.request({}, timeout=0.01)
    await client.close()
    for ring in engines.rings.values():
        await settled(ring)


# -- slots ------------------------------------------------------------------------------------------------------------------


async def test_a_request_goes_to_the_engine_of_its_slot_whatever_else_is_said(client: shmring.Client) -> None:
    for name in NAMES:
        async with client.slot(8192, engine=name) as slot:
            view = slot.tensor((8192,), torch.uint8).fill_(2)
            for options in ({}, {"key": "any"}, {"key": "other"}, {"engine": name}, {"retry": 1}):
                assert await client.request({"x": view}, **options) == [name, 16384.0]
            submission = client.submit_nowait({"x": view})
            assert submission.engine == name
            await submission.result()
    statistics = client.statistics()
    assert (statistics.in_place, statistics.copies) == (12, 0)
    assert (statistics.connected, statistics.client_id, statistics.epoch) == (True, 0, 0)
    assert statistics.finished == sum(engine.statistics().finished for engine in client.engines.values()) == 12


async def test_a_slot_and_its_request_can_not_be_at_two_engines(client: shmring.Client) -> None:
    async with client.slot(8192, engine="vision-0") as first, client.slot(8192, engine="vision-1") as second:
        one, other = first.tensor((8192,), torch.uint8).fill_(1), second.tensor((8192,), torch.uint8).fill_(1)
        for ask in (client.request, client.submit):
            with pytest.raises(shmring.LocalProtocolError, match="lie in a slot of engine 'vision-0'"):
                await ask({"x": one}, engine="vision-1")
            with pytest.raises(shmring.LocalProtocolError, match="slots of two engines, 'vision-0' and 'vision-1'"):
                await ask({"x": one, "y": other})
        with pytest.raises(shmring.LocalProtocolError):
            client.submit_nowait({"x": [one, {"y": other}]})
        assert await client.request({"x": one, "y": other.clone()}) == ["vision-0", 8192.0]
        assert await client.request({"x": other}) == ["vision-1", 8192.0]


async def test_slots_that_are_held_count_as_load(client: shmring.Client) -> None:
    slots = [await client.slot(100) for _ in range(6)]
    assert Counter(slot.engine for slot in slots) == {"vision-0": 3, "vision-1": 3}
    for slot in slots:
        slot.close()
    assert {load.in_flight for load in client.loads().values()} == {0}


async def test_what_does_not_wait_goes_where_there_is_space(client: shmring.Client) -> None:
    slots = [client.slot_nowait(16 << 10, ask=False) for _ in range(6)]
    with pytest.raises(shmring.WouldBlock):
        client.slot_nowait(16 << 10, ask=False)
    found = Counter(slot.engine for slot in slots)
    assert found["vision-0"] == found["vision-1"] > 0
    for slot in slots:
        if slot.engine == "vision-1":
            slot.close()
    for _ in range(2):
        submission = client.submit_nowait({"x": tensor(16 << 10)}, ask=False)
        assert submission.engine == "vision-1"
        await submission.result()
    with pytest.raises(shmring.WouldBlock):
        client.submit_nowait({"x": tensor(16 << 10)}, engine="vision-0", ask=False)
    for slot in slots:
        slot.close()


@pytest.mark.one_loop
async def test_a_check_of_the_capacity_takes_nobodys_turn(engines: Engines, connect_to: Connect) -> None:
    client = await connect_to(route="round_robin")
    owners = []
    for _ in range(4):
        client.check_capacity(100)
        owners.append((await client.request({}))[0])
    assert owners[0] != owners[1]
    assert owners[:2] == owners[2:]


@pytest.mark.one_loop
async def test_what_can_never_fit_is_an_error(client: shmring.Client) -> None:
    client.check_capacity(1000)
    with pytest.raises(shmring.CapacityError):
        client.check_capacity(1 << 30)
    with pytest.raises(shmring.CapacityError):
        await client.slot(1 << 30)
    with pytest.raises(ValueError, match="negative"):
        client.slot(-1)


# -- engines that come and go -----------------------------------------------------------------------------------------------


async def test_requests_of_an_engine_that_dies_fail_and_name_it(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    requests = {name: asyncio.create_task(client.request({}, engine=name)) for name in NAMES}
    await eventually(lambda: {each.statistics().in_flight for each in client.engines.values()} == {1})
    await engines.stop("vision-0")
    with pytest.raises(shmring.EngineDeadError, match="'vision-0'", check=lambda error: error.engine == "vision-0"):
        await requests["vision-0"]
    engines.go_on.set()
    assert await requests["vision-1"] == ["vision-1", 0.0]
    assert client.connected
    assert {(await client.request({}, key=f"s{number}"))[0] for number in range(8)} == {"vision-1"}
    assert list(client.loads()) == ["vision-1"]


async def test_an_engine_that_is_back_is_used_again_and_has_its_keys_back(client: shmring.Client, engines: Engines) -> None:
    keys = [f"session-{number}" for number in range(20)]
    before = {key: (await client.request({}, key=key))[0] for key in keys}
    await engines.stop("vision-0")
    await eventually(lambda: not client.engines["vision-0"].connected)
    assert {(await client.request({}, key=key))[0] for key in keys} == {"vision-1"}
    await engines.start("vision-0")
    await client.wait_connected(5, engine="vision-0")
    assert {key: (await client.request({}, key=key))[0] for key in keys} == before
    assert client.engines["vision-0"].statistics().reconnections == 1
    assert client.engines["vision-1"].statistics().reconnections == 0


async def test_requests_that_may_be_sent_again_are_answered_elsewhere(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    slot = await client.slot(8192, engine="vision-0")
    view = slot.tensor((8192,), torch.uint8).fill_(3)
    requests = [
        asyncio.create_task(client.request({"x": view}, retry=1)),
        asyncio.create_task(client.request({"x": tensor()}, retry=2)),
        asyncio.create_task(anext(client.stream({"x": tensor()}, retry=1))),
        asyncio.create_task(client.request({"x": tensor()}, key="any", retry=1)),
    ]
    await eventually(lambda: client.statistics().in_flight == 4)
    lost = client.engines["vision-0"].statistics().in_flight
    assert lost >= 1
    await engines.stop("vision-0")
    await eventually(lambda: client.engines["vision-1"].statistics().in_flight == 4)
    engines.go_on.set()
    answers = await asyncio.gather(*requests)
    assert answers == [["vision-1", 3 * 8192.0]] + [["vision-1", 8192.0]] * 3
    assert client.resent == lost
    assert await client.request({"x": view}) == ["vision-1", 3 * 8192.0], "its engine has gone, its bytes have not"
    slot.close()


async def test_what_has_been_answered_in_part_is_not_sent_again(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    stream = client.stream({"first": 1}, key="a", retry=3)
    owner = await anext(stream)
    request = asyncio.create_task(client.request({"first": 1}, key="a", retry=3))
    await eventually(lambda: client.engines[owner].statistics().replies == 2)
    await turns(3)  # in which the request takes its reply: one that went unread has not come
    await engines.stop(owner)
    for waiting in (anext(stream), request):
        with pytest.raises(shmring.EngineDeadError, match=owner):
            await waiting
    assert client.resent == 0


@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize(
    "ask",
    [
        lambda client, payload: client.request(payload, retry=1),
        lambda client, payload: anext(client.stream(payload, retry=1)),
    ],
)
async def test_a_request_is_sent_again_when_its_reply_had_come_and_went_with_the_engine_unread(
    client: shmring.Client, engines: Engines, ask: Callable[..., Awaitable[Any]], is_all: bool
) -> None:
    """A reply in a slot lies in the engine's memory; so it does when the end of the request has come with it."""
    lost = []

    def lose(name: str) -> None:
        if lost:
            engines.go_on.set()
            return
        session = session_of(client, name)
        [submission] = session.end.pending.values()
        session.link.poll()
        lost.append((submission.has_replied, submission.ended))
        session._lose(shmring.EngineDeadError("gone"))

    engines.after_large = lose
    engines.go_on.clear()
    assert torch.equal(await ask(client, {"large": True, "is_all": is_all}), torch.arange(500))
    assert lost == [(True, is_all)]
    assert client.resent == 1


async def test_a_request_that_learns_that_its_engine_has_gone_goes_to_another_one(
    client: shmring.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for space may read the last words of an engine."""
    submit_now = client._submit_now
    lost = []

    def lose_first(end: Any, *arguments: Any) -> Any:
        if lost:
            return submit_now(end, *arguments)
        [name] = [name for name in NAMES if session_of(client, name).end is end]
        lost.append(name)
        session_of(client, name)._lose(shmring.EngineDeadError("gone"))
        return None

    monkeypatch.setattr(client, "_submit_now", lose_first)
    monkeypatch.setattr(attachment_of(client, "vision-0"), "keep_attaching", lambda: None)
    monkeypatch.setattr(attachment_of(client, "vision-1"), "keep_attaching", lambda: None)
    [other] = set(NAMES) - {(await client.request({}, timeout=10))[0]}
    assert lost == [other]


async def test_a_search_for_kept_content_waits_for_no_engine_that_dies_meanwhile(
    client: shmring.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def find_nothing(key: bytes, payload_type: object) -> None:
        for name in NAMES:
            session = attachment_of(client, name).session
            if session is not None and session.kept.find is not find_nothing:
                session._lose(shmring.EngineDeadError("gone"))

    for name in NAMES:
        monkeypatch.setattr(attachment_of(client, name), "keep_attaching", lambda: None)
    [first, _] = sorted(NAMES, key=lambda name: client.loads()[name].in_flight)
    monkeypatch.setattr(session_of(client, first).kept, "find", find_nothing)
    assert await client.find(b"k" * 32, timeout=10) is None


async def test_a_retry_that_no_engine_can_come_for_says_why_the_engine_has_died(engines: Engines, connect: Any) -> None:
    client = await connect("vision-0")
    engines.go_on.clear()
    request = asyncio.create_task(client.request({}, retry=2))
    await eventually(lambda: client.statistics().in_flight == 1)
    await engines.stop("vision-0")
    with pytest.raises(shmring.EngineDeadError, match="the engine is closing"):
        await request
    assert client.resent == 0


@pytest.mark.parametrize("ask", [lambda client: client.request({}, retry=1), lambda client: anext(client.stream({}, retry=1))])
async def test_retries_are_as_many_as_were_allowed(
    client: shmring.Client, engines: Engines, ask: Callable[[shmring.Client], Awaitable[object]]
) -> None:
    engines.go_on.clear()
    request = asyncio.ensure_future(ask(client))
    for left in (1, 0):
        await eventually(lambda: client.statistics().in_flight)
        [owner] = [name for name, each in client.engines.items() if each.statistics().in_flight]
        await engines.stop(owner)
        if left:
            await eventually(lambda: client.resent == 1)
    with pytest.raises(shmring.EngineDeadError):
        await request


async def test_a_connection_that_has_ended_and_has_not_said_so_gets_nothing(client: shmring.Client) -> None:
    session = session_of(client, "vision-0")
    session.link.abort()
    assert client.engines["vision-0"].connected
    assert list(client.loads()) == ["vision-1"]
    assert {client.submit_nowait({}, key=f"s{number}").engine for number in range(8)} == {"vision-1"}
    assert client.submit_nowait({}).engine == "vision-1"
    await client.wait_connected(5, engine="vision-0")


async def test_a_slot_that_is_waited_for_at_an_engine_that_dies_comes_from_another_one(
    client: shmring.Client, engines: Engines
) -> None:
    held = [await client.slot(400 << 10, engine=name) for name in NAMES for _ in range(2)]
    slots = [asyncio.ensure_future(_acquired(client, 400 << 10)) for _ in range(2)]
    await eventually(lambda: {each.statistics().waiting for each in client.engines.values()} == {1})
    named = asyncio.ensure_future(_acquired(client, 400 << 10, engine="vision-0"))
    await eventually(lambda: client.engines["vision-0"].statistics().waiting == 2)
    await engines.stop("vision-0")
    with pytest.raises(shmring.EngineDeadError, match="vision-0"):
        await named
    await eventually(lambda: client.engines["vision-1"].statistics().waiting == 2)
    for slot in held:
        slot.close()
    for slot in await asyncio.gather(*slots):
        assert slot.engine == "vision-1"
        slot.close()


async def _acquired(client: shmring.Client, nbytes: int, **options: Any) -> shmring.Slot:
    return await client.slot(nbytes, **options)


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("call", ["request", "stream", "slot", "slots", "find", "keep", "call", "wait_connected"])
async def test_who_waits_for_an_engine_that_is_named_and_gone_is_told_that_it_is_not_attached(
    call: str, client: shmring.Client, engines: Engines
) -> None:
    await engines.stop("vision-0")
    await eventually(lambda: not client.engines["vision-0"].connected)
    where: dict[str, Any] = {"engine": "vision-0", "timeout": 0.02}
    waits: dict[str, Callable[[], Awaitable[Any]]] = {
        "request": lambda: client.request({}, **where),
        "stream": lambda: anext(client.stream({}, **where)),
        "slot": lambda: _acquired(client, 100, **where),
        "slots": lambda: client.slots([100], **where),
        "find": lambda: client.find(b"k" * 32, **where),
        "keep": lambda: client.keep(b"k" * 32, tensor(), **where),
        "call": lambda: client.call("method", **where),
        "wait_connected": lambda: client.wait_connected(**where),
    }
    with pytest.raises(TimeoutError, match=r"s it was given: (an )?engine 'vision-0' to be attached") as caught:
        await waits[call]()
    assert "at 'vision-1'" not in str(caught.value)


async def test_who_waits_at_an_engine_that_is_named_is_told_of_that_alone(client: shmring.Client, engines: Engines) -> None:
    async with client.slot(800_000, engine="vision-0"):
        with pytest.raises(TimeoutError, match="given: at 'vision-0': space: ") as caught:
            await client.slot(800_000, engine="vision-0", timeout=0.02)
        assert "vision-1" not in str(caught.value)


async def test_while_no_engine_is_there_requests_wait_for_one(client: shmring.Client, engines: Engines) -> None:
    for name in NAMES:
        await engines.stop(name)
    await eventually(lambda: not client.connected)
    assert isinstance(client.lost_error, shmring.EngineDeadError)
    with pytest.raises(TimeoutError, match="one of the engines 'vision-0', 'vision-1' to be attached"):
        await client.request({}, timeout=0.02)
    with pytest.raises(TimeoutError, match="to be attached"):
        await client.slot(100, timeout=0.02)
    for attempt in (lambda: client.submit_nowait({}), lambda: client.slot_nowait(1), lambda: client.check_capacity(1)):
        with pytest.raises(shmring.WouldBlock, match="none of the engines"):
            attempt()
    waiting = [asyncio.create_task(client.request({}, request_id=f"r{number}")) for number in range(3)]
    waiting.append(asyncio.create_task(client.request({}, key="a")))
    waiting.append(asyncio.create_task(client.wait_connected()))
    await asyncio.wait(waiting, timeout=0.01)
    assert client.abort("r2") == 1
    with pytest.raises(shmring.AbortedError, match="before it was sent"):
        await waiting[2]
    waiting[1].cancel()
    await engines.start("vision-1")
    assert await waiting[0] == await waiting[3] == ["vision-1", 0.0]
    await waiting[4]
    assert waiting[1].cancelled()


async def test_who_waits_for_any_engine_hears_that_the_client_closes(client: shmring.Client, engines: Engines) -> None:
    for name in NAMES:
        await engines.stop(name)
    await eventually(lambda: not client.connected)
    waiting = asyncio.create_task(client.request({}, timeout=20))
    await turns()
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await waiting


async def test_kept_content_is_looked_for_at_the_least_loaded_engine_first(client: shmring.Client, engines: Engines) -> None:
    engines.go_on.clear()
    busy = asyncio.create_task(client.request({}, engine="vision-0"))
    await eventually(lambda: engines.rings["vision-0"].statistics().running)
    assert [attachment.name for attachment in client._engines.searched(None)] == ["vision-1", "vision-0"]
    assert [attachment.name for attachment in client._engines.searched("vision-0")] == ["vision-0"]
    engines.go_on.set()
    await busy


async def test_what_was_seen_of_an_engine_is_void_in_its_next_life(client: shmring.Client, engines: Engines) -> None:
    client.loads()
    before = dict(client._engines._estimates)
    await engines.stop("vision-0")
    await eventually(lambda: not client.engines["vision-0"].connected)
    await engines.start("vision-0")
    await client.wait_connected(20, engine="vision-0")
    client.loads()
    assert [client._engines._estimates[name] is before[name] for name in NAMES] == [False, True]


async def test_who_does_not_reconnect_is_told_when_all_have_gone(engines: Engines, connect_to: Connect) -> None:
    client = await connect_to(reconnect=False)
    await engines.stop("vision-0")
    await eventually(lambda: not client.engines["vision-0"].connected)
    assert await client.request({}) == ["vision-1", 0.0]
    with pytest.raises(shmring.EngineDeadError, match="'vision-0' has gone"):
        await client.request({}, engine="vision-0")
    await engines.stop("vision-1")
    await eventually(lambda: not client.connected)
    for attempt in (client.request({}), client.submit({}), client.wait_connected(), client.wait_prefaulted()):
        with pytest.raises(shmring.EngineDeadError, match="all of the engines"):
            await attempt
    for attempt_now in (lambda: client.submit_nowait({}), lambda: client.slot_nowait(1)):
        with pytest.raises(shmring.EngineDeadError, match="all of the engines"):
            attempt_now()


@pytest.mark.engines("vision-1")
async def test_one_engine_that_answers_is_enough_and_others_are_found_later(engines: Engines, connect_to: Connect) -> None:
    client = await connect_to(["vision-0", "vision-1", "vision-2"])
    assert list(client.loads()) == ["vision-1"]
    assert await client.request({}) == ["vision-1", 0.0]
    await engines.start("vision-0")
    await client.wait_connected(5, engine="vision-0")
    assert await client.request({}, engine="vision-0") == ["vision-0", 0.0]
    assert client.engines["vision-0"].statistics().reconnections == 0


@pytest.mark.engines
async def test_without_any_engine_connecting_fails_in_time_and_waits_until_then(engines: Engines, connect_to: Connect) -> None:
    with pytest.raises(shmring.EngineDeadError, match="none of the engines 'vision-0', 'vision-1' answered within") as caught:
        await connect_to(connect_timeout_s=0.05)
    assert caught.value.engine is None
    with pytest.raises(shmring.EngineDeadError, check=lambda error: error.engine == "vision-1"):
        await connect_to(["vision-1"], connect_timeout_s=0.05)
    connecting = asyncio.create_task(connect_to(connect_timeout_s=30))
    await asyncio.wait([connecting], timeout=0.05)
    await engines.start("vision-1")
    assert await (await connecting).request({}) == ["vision-1", 0.0]


@pytest.mark.engines
async def test_who_does_not_reconnect_waits_for_engines_that_are_starting(engines: Engines, connect_to: Connect) -> None:
    connecting = asyncio.create_task(connect_to(reconnect=False, connect_timeout_s=30))
    await asyncio.wait([connecting], timeout=0.02)
    await engines.start("vision-1")
    client = await connecting
    assert await client.request({}) == ["vision-1", 0.0]
    await engines.start("vision-0")
    await client.wait_connected(5, engine="vision-0")
    assert await client.request({}, engine="vision-0") == ["vision-0", 0.0]


@pytest.mark.engines
async def test_an_engine_that_refuses_is_no_error_while_another_one_does_not(
    engines: Engines, connect_to: Connect, connect: Any
) -> None:
    await engines.start("vision-0", max_clients=1)
    await connect("vision-0")
    with pytest.raises(shmring.RemoteProtocolError, match="max_clients"):
        await connect_to(["vision-0"])
    await engines.start("vision-1")
    assert await (await connect_to()).request({}) == ["vision-1", 0.0]


@pytest.mark.engines("vision-1")
@pytest.mark.usefixtures("engines", "silent")
async def test_an_engine_that_does_not_answer_holds_nobody_up(connect_to: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.client.engines._OTHERS_S", 0.01)
    client = await connect_to(connect_timeout_s=30)
    assert await client.request({}) == ["vision-1", 0.0]
    await client.close()


@pytest.mark.engines
async def test_an_engine_that_starts_is_found_while_another_one_does_not_answer(
    engines: Engines, connect_to: Connect, silent: socket.socket
) -> None:
    connecting = asyncio.ensure_future(connect_to(connect_timeout_s=90))
    connection, _ = await asyncio.to_thread(silent.accept)  # by then, both have been tried
    with connection:
        await engines.start("vision-1")
        async with asyncio.timeout(60):
            client = await connecting
        assert await client.request({}) == ["vision-1", 0.0]
        await client.close()


@pytest.mark.engines("vision-1")
@pytest.mark.usefixtures("silent")
async def test_an_engine_that_dies_while_others_are_still_tried_is_attached_to_once(
    engines: Engines, connect_to: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.client.engines._OTHERS_S", 0.2)
    connecting = asyncio.ensure_future(connect_to(connect_timeout_s=30))
    await eventually(lambda: engines.rings["vision-1"].statistics().clients == 1)
    await engines.stop("vision-1")
    await asyncio.wait([connecting], timeout=0.4)  # by then nobody is tried any more, and both are looked for
    await engines.start("vision-1")
    client = await connecting
    await client.request({}, timeout=10)
    for _ in range(20):
        await asyncio.sleep(0.005)  # another attempt would have attached by now
    assert engines.rings["vision-1"].statistics().clients == 1
    await client.close()
    await eventually(lambda: engines.rings["vision-1"].statistics().clients == 0)


async def test_a_client_that_is_closed_does_nothing_more(engines: Engines, connect_to: Connect) -> None:
    client = await connect_to()
    engines.go_on.clear()
    request = asyncio.create_task(client.request({}))
    await asyncio.wait([request], timeout=0.01)
    await client.close()
    with pytest.raises(shmring.ClosedError):
        await request
    await client.close()
    assert client.closed
    engines.go_on.set()
    for attempt in (client.request({}), client.submit({}), client.call("x", engine="vision-0"), client.wait_connected()):
        with pytest.raises(shmring.ClosedError):
            await attempt
    for attempt_now in (lambda: client.submit_nowait({}), lambda: client.slot_nowait(1)):
        with pytest.raises(shmring.ClosedError):
            attempt_now()
    for ring in engines.rings.values():
        await settled(ring)


@pytest.mark.one_loop
@for_each(
    ("names", "options", "error"),
    [
        ([], {}, "1 to 256 engines"),
        (["a", "a"], {}, "named twice"),
        (["a", "../b"], {}, "can't name an engine"),
        (["a"], {"route": "fastest"}, "'least_loaded', 'round_robin'"),
    ],
)
async def test_what_makes_no_sense_is_refused(
    names: list[str], options: dict[str, Any], error: str, connect_to: Connect
) -> None:
    with pytest.raises(ValueError, match=error):
        await connect_to(names, **options)


def test_a_route_is_for_several_engines(socket_dir: Path) -> None:
    with pytest.raises(TypeError, match="several engines"):
        shmring.connect("vision-0", route="round_robin", socket_dir=str(socket_dir))


# -- the load that an engine publishes --------------------------------------------------------------------------------------


async def test_whatever_an_engine_publishes_decides_nothing_but_who_gets_a_request(client: shmring.Client) -> None:
    for byte in (0xFF, 0x7F, 0x00):
        for name in NAMES:
            fd = os.memfd_create("load")
            os.write(fd, bytes([byte]) * LOAD_PAGE_NBYTES)
            session_of(client, name).load = LoadPage(fd, writable=False)
            os.close(fd)
        answers = await asyncio.gather(*(client.request({"x": tensor()}, timeout=20) for _ in range(20)))
        assert {total for _, total in answers} == {8192.0}
        for name in NAMES:
            async with client.slot(8192, engine=name, timeout=20) as slot:
                view = slot.tensor((8192,), torch.uint8).fill_(2)
                assert await client.request({"x": view}, timeout=20) == [name, 16384.0]
            assert (await client.request({}, engine=name, timeout=20))[0] == name
        statistics = client.statistics()
        assert (statistics.in_flight, statistics.waiting, statistics.slots_submitted) == (0, 0, 0)


async def test_an_engine_publishes_what_it_has(client: shmring.Client, serve: Any, connect_to: Connect) -> None:
    ring: shmring.Ring = await serve(name="slow")
    watcher, sender = await connect_to(["slow"]), await connect_to(["slow"])

    def published() -> tuple[int, int]:
        load = watcher.loads()["slow"]
        return load.in_flight, load.waiting

    requests = [asyncio.create_task(sender.request({})) for _ in range(5)]
    await eventually(lambda: published() == (5, 5))
    claims = [await ring.claim() for _ in range(3)]
    assert published() == (5, 2)
    claims[0].done()
    assert published() == (4, 2)
    claims[1].fail(ValueError("no"))
    assert published() == (3, 2)
    requests[4].cancel()
    await eventually(lambda: published() == (2, 1))
    requests[2].cancel()
    await eventually(lambda: published() == (1, 1))
    await sender.close()
    await eventually(lambda: published() == (0, 0))
    claims[2].release()
    await asyncio.gather(*requests, return_exceptions=True)
