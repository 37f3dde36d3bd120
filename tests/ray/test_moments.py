"""What happens at one moment of a client's life, with actors of this process: no cluster gets there in time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import shmring
from shmring.engine.protocol import EncodeRequest, Text
from shmring.errors import EngineDeadError, LocalProtocolError
from shmring.memory.bundles import Bundle, bundle

ray = pytest.importorskip("ray")

from shmring.integrations.ray import connect, connection, connections, far_client  # noqa: E402 - after the skip
from shmring.integrations.ray.directory import Where  # noqa: E402
from shmring.integrations.ray.engine import UnknownClientError  # noqa: E402
from shmring.transport.liveness import ProcessId  # noqa: E402

WHERE = Where("another node", "ring", "/tmp", ProcessId(1, 1), 8, 16, 1 << 20, 100, 1 << 30)
IDLE = (0, 0, False)


class Method:
    """A method of an actor: called, it runs as a task."""

    def __init__(self, function: Callable[..., Any], *, streams: bool = False) -> None:
        self._function = function
        self._streams = streams

    def options(self, **_: object) -> Method:
        return Method(self._function, streams=True)

    def remote(self, *arguments: object) -> Any:
        called = self._function(*arguments)
        return called if self._streams else asyncio.ensure_future(called)


class Actor:
    """An engine's."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        for name in ("hold", "enter", "leave", "load", "abort", "request", "stream"):
            setattr(self, name, Method(getattr(self, f"on_{name}")))

    async def on_hold(self) -> None:
        await asyncio.Event().wait()

    async def on_enter(self, *_: object) -> Any:
        self.ran.append("enter")
        return IDLE, b"a token"

    async def on_leave(self, *_: object) -> None:
        self.ran.append("leave")

    async def on_load(self) -> Any:
        return IDLE

    async def on_abort(self, *_: object) -> None:
        self.ran.append("abort")

    async def on_request(self, *_: object) -> Any:
        self.ran.append("request")
        return [_packed("done")], None, IDLE

    async def on_stream(self, *_: object) -> AsyncIterator[Awaitable[Any]]:
        self.ran.append("stream")
        return
        yield


def _packed(reply: object) -> Bundle:
    return bundle(reply, max_tensors=16, max_payload_nbytes=1 << 20, max_values=100)


class Cluster:
    """Which actors there are, and whether this process is in it."""

    def __init__(self) -> None:
        self.actors: dict[str, Actor] = {}
        self.joined = 1

    def check(self) -> None:
        if not self.joined:
            raise LocalProtocolError("not in a cluster")

    async def look_up(self, name: str, timeout_s: float | None) -> tuple[Any, Where]:
        self.check()
        await asyncio.sleep(0)
        if name in self.actors:
            return self.actors[name], WHERE
        await asyncio.sleep(1000 if timeout_s is None else timeout_s)
        raise EngineDeadError("none", engine=name)

    async def names(self, _: object) -> list[str]:
        return list(self.actors)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(connection, "look_up", cluster.look_up)
    monkeypatch.setattr(connection, "node_id", lambda: "this node")
    monkeypatch.setattr(connections, "check_in_cluster", cluster.check)
    monkeypatch.setattr(connections, "names_like", cluster.names)
    monkeypatch.setattr(far_client, "membership", lambda: cluster.joined)
    monkeypatch.setattr(ray, "cancel", lambda call: None)
    return cluster


@pytest.mark.parametrize("how", ["cancelled", "aborted", "too late"])
async def test_a_request_that_ends_as_an_engine_comes_back_is_not_sent(cluster: Cluster, how: str) -> None:
    cluster.actors["a"] = Actor()
    async with connect(["a", "b"], in_flight_nbytes=1 << 20) as client:
        of_a = client.engines["a"]
        way = of_a.now()
        assert way is not None
        cluster.actors.clear()
        of_a.lose(way, EngineDeadError("it has died", engine="a"))
        request = asyncio.create_task(client.request("text", request_id="mine", timeout=1000))
        while not client._deadlines._heap:
            await asyncio.sleep(0)
        assert of_a._attaching is not None
        of_a._attaching.cancel()
        await asyncio.sleep(0)
        cluster.actors["a"] = actor = Actor()
        of_a.attach()
        await client._connections._some_attached.wait()
        expected: type[BaseException]
        if how == "cancelled":
            expected = asyncio.CancelledError
            request.cancel()
        elif how == "aborted":
            expected = shmring.AbortedError
            assert client.abort("mine") == 1
        else:
            expected = TimeoutError
            client._deadlines._heap[0][2].expire()
        with pytest.raises(expected):
            await request
        assert "request" not in actor.ran


async def test_engines_that_were_given_by_name_are_found_in_the_next_cluster(cluster: Cluster) -> None:
    cluster.actors |= {"a": Actor(), "b": Actor()}
    async with connect(["a", "b"], in_flight_nbytes=1 << 20, connect_timeout_s=60) as client:
        assert await client.request("text") == "done"
        cluster.joined = 0
        with pytest.raises((LocalProtocolError, EngineDeadError)):
            await client.request("text")
        with pytest.raises(LocalProtocolError):
            await client.request("text")
        cluster.joined = 2
        assert await client.request("text") == "done"


async def test_what_has_replied_is_not_sent_again_because_the_engine_does_not_know_another_request(cluster: Cluster) -> None:
    class Restarted(Actor):
        async def on_request(self, *_: object) -> Any:
            self.ran.append("request")
            if self.ran.count("request") == 1:
                return [], UnknownClientError("it has started again", engine="a"), IDLE
            return [_packed("done")], None, IDLE

        async def on_stream(self, *_: object) -> AsyncIterator[Awaitable[Any]]:
            async def outcome() -> Any:
                return [_packed("first")], None, IDLE

            self.ran.append("stream")
            yield outcome()
            await asyncio.sleep(1000)  # Ray has not said yet that this life of it has ended

    cluster.actors["a"] = actor = Restarted()
    async with connect("a", in_flight_nbytes=1 << 20) as client:
        stream = client.stream("text")
        assert await anext(stream) == "first"
        following = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        assert await client.request("text") == "done"
        with pytest.raises(EngineDeadError):
            await following
        assert actor.ran.count("stream") == 1


async def test_an_engine_that_lets_nobody_enter_is_given_up_and_told(cluster: Cluster) -> None:
    class Busy(Actor):
        async def on_enter(self, *_: object) -> Any:
            await asyncio.sleep(1000)

    cluster.actors["a"] = actor = Busy()
    with pytest.raises(EngineDeadError, match="does not answer"):
        async with connect("a", in_flight_nbytes=1 << 20, connect_timeout_s=0.05):
            pass
    await asyncio.sleep(0)
    assert actor.ran == ["leave"]


async def test_a_request_that_is_given_up_is_in_flight_until_the_engine_has_aborted_it(cluster: Cluster) -> None:
    go_on = asyncio.Event()

    class Slow(Actor):
        async def on_request(self, *_: object) -> Any:
            await asyncio.sleep(1000)

        async def on_abort(self, *_: object) -> None:
            await go_on.wait()

    cluster.actors["a"] = Slow()
    async with connect("a", in_flight_nbytes=1 << 20) as client:
        request = asyncio.create_task(client.request("text", request_id="mine"))
        while not client.statistics().in_flight:
            await asyncio.sleep(0)
        assert client.abort("mine") == 1
        with pytest.raises(shmring.AbortedError):
            await request
        assert client.statistics().in_flight == 1
        go_on.set()
        while client.statistics().in_flight:
            await asyncio.sleep(0)


async def test_a_deadline_says_so_though_a_pattern_s_engine_was_forgotten(cluster: Cluster) -> None:
    cluster.actors["a-1"] = Actor()
    async with connect("a-*", in_flight_nbytes=1 << 20) as client:
        assert "looked up" in client._connections.why_not_sent("a-2")


async def test_a_deadline_of_numpy_s_goes_to_another_node(cluster: Cluster) -> None:
    cluster.actors["a"] = Actor()
    async with connect("a", in_flight_nbytes=1 << 20) as client:
        late = np.float64(time.monotonic() + 600)
        assert await client.request(EncodeRequest([Text("a")], deadline=late), reply_type=Any) == "done"
