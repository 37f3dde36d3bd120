"""Two nodes: what a near client and a far one get is the same."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring.integrations.ray import EngineActor
from tests.ray.actors import Caller, double, handler
from tests.ray.conftest import Nodes
from tests.waiting import until

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=["shared memory", "connection", "object store"])
def way(request: pytest.FixtureRequest) -> str:
    """How the caller reaches the engine."""
    return str(request.param)


@pytest.fixture(scope="module")
def engine(nodes: Nodes, way: str) -> Iterator[Any]:
    """Runs on node 1."""

    async def running() -> int:
        import gc

        rings = [each for each in gc.get_objects() if type(each) is shmring.Ring]
        return sum(ring.statistics().running for ring in rings)

    engine = EngineActor.options(**nodes.on(1)).remote(
        "vision", handler, slab_nbytes="32MiB", max_inflight=8, calls={"double": double, "running": running},
        **({"listen": None} if way == "object store" else {}),
    )  # fmt: skip
    yield engine
    ray.kill(engine)


@pytest.fixture(scope="module")
def caller(nodes: Nodes, engine: Any, way: str) -> Iterator[Any]:
    is_near = way == "shared memory"
    before = statistics(engine).clients
    caller = ray.remote(Caller).options(**nodes.on(1 if is_near else 0), max_concurrency=1000).remote()
    assert ray.get(caller.connect.remote("vision", description=way)) is is_near
    assert ray.get(caller.way.remote()) == (way, way == "object store")
    yield caller
    ray.get(caller.close.remote())
    until(lambda: statistics(engine).clients == before)
    ray.kill(caller)


def statistics(engine: Any) -> shmring.RingStatistics:
    found: shmring.RingStatistics = ray.get(engine.statistics.remote())
    return found


def is_idle(engine: Any) -> bool:
    now = statistics(engine)
    return not now.running and not now.waiting and not now.slots_claimed and not now.slots_draining


@pytest.mark.parametrize("n", [0, 10, 100_000, 2_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_arrive(caller: Any, n: int, dtype: torch.dtype) -> None:
    reply = ray.get(caller.request.remote({"do": "sum", "x": torch.ones(n, dtype=torch.float32).to(dtype)}))
    assert (reply["sum"], reply["dtype"]) == (n, str(dtype))
    assert reply["client"] > 0


def test_payloads_come_back_as_they_went(caller: Any) -> None:
    payload = {
        "do": "echo",
        "tensor": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "long": torch.arange(300_000.0),
        "array": np.arange(6, dtype=">i2").reshape(3, 2),
        "strided": torch.arange(6.0).view(2, 3).T,
        "others": [None, True, -1, 1.5, "text", b"bytes", {"nested": []}],
    }
    reply = ray.get(caller.request.remote(payload))
    for name in ("tensor", "long", "strided"):
        assert reply[name].dtype == payload[name].dtype
        assert torch.equal(reply[name], payload[name])
    assert reply["array"].dtype == payload["array"].dtype
    assert np.array_equal(reply["array"], payload["array"])
    assert reply["others"] == payload["others"]


def test_a_large_reply(caller: Any, engine: Any) -> None:
    reply = ray.get(caller.request.remote({"do": "large", "n": 1_000_000}))
    assert reply.dtype is torch.bfloat16
    assert torch.equal(reply, torch.ones(1_000_000, dtype=torch.bfloat16))


@pytest.mark.parametrize("n", [0, 1, 500])
def test_streams(caller: Any, n: int) -> None:
    part = torch.ones(3)
    replies = ray.get(caller.stream.remote({"do": "count", "n": n, "part": part}))
    assert [reply["number"] for reply in replies] == list(range(n))
    assert all(torch.equal(reply["part"], part) for reply in replies)


def test_a_stream_that_is_left_early_is_aborted(caller: Any, engine: Any) -> None:
    before = statistics(engine).aborted
    replies = ray.get(caller.stream.remote({"do": "count", "n": 50_000_000}, most=3))
    assert [reply["number"] for reply in replies] == [0, 1, 2]
    until(lambda: is_idle(engine))
    assert statistics(engine).aborted == before + 1


def test_errors_of_the_handler(caller: Any, engine: Any) -> None:
    error = ray.get(caller.request.remote({"do": "fail"}))
    assert type(error) is shmring.RemoteError
    assert (error.type_name, error.message) == ("ValueError", "too dark")
    error = ray.get(caller.request.remote({"do": "time_out"}))
    assert type(error) is TimeoutError
    assert str(error) == "the engine has waited"
    error = ray.get(caller.request.remote({"do": "nothing"}))
    assert type(error) is shmring.RemoteError
    assert error.type_name == "NoReply"
    error = ray.get(caller.request.remote({"do": "count", "n": 2}))
    assert type(error) is shmring.LocalProtocolError
    assert "stream()" in str(error)
    *first, error = ray.get(caller.stream.remote({"do": "count then fail"}))
    assert first in ([0], [])  # a near client drops a reply that it has not read when the error comes
    assert type(error) is shmring.RemoteError
    assert (error.type_name, error.message) == ("ValueError", "after one reply")
    until(lambda: is_idle(engine))


def test_errors_of_payloads(caller: Any, engine: Any) -> None:
    error = ray.get(caller.request.remote({"do": "echo", "set": [1, {"x": 1j}]}))
    assert type(error) is TypeError
    assert "payload.set[1].x" in str(error)
    error = ray.get(caller.request.remote({"do": "echo", "many": [torch.ones(1)] * 4097}))
    assert type(error) is shmring.CapacityError
    assert (error.needed, error.capacity) == (4097, 4096)
    error = ray.get(caller.request.remote({"do": "echo"}, reply_type=int))
    assert type(error) is shmring.RemoteError
    assert error.type_name == "UnexpectedReply"
    assert statistics(engine).protocol_errors == 0


def test_timeouts(caller: Any, engine: Any) -> None:
    error = ray.get(caller.request.remote({"do": "sleep", "s": 600}, timeout=0.5))
    assert type(error) is TimeoutError
    assert "0.5 s it was given" in str(error)
    until(lambda: is_idle(engine))
    [error] = ray.get(caller.stream.remote({"do": "sleep", "s": 600}, timeout=0.5))
    assert type(error) is TimeoutError
    until(lambda: is_idle(engine))
    for wrong in (float("nan"), "1"):
        assert isinstance(ray.get(caller.request.remote({"do": "echo"}, timeout=wrong)), TypeError | ValueError | TimeoutError)
    assert ray.get(caller.request.remote({"do": "echo"}, timeout=600)) == {"do": "echo"}


def test_cancelling_aborts(caller: Any, engine: Any) -> None:
    before = statistics(engine).aborted
    error = ray.get(caller.cancelled.remote({"do": "sleep", "s": 600}))
    assert type(error).__name__ == "CancelledError"
    until(lambda: is_idle(engine))
    assert statistics(engine).aborted == before + 1


def test_aborting_by_name(caller: Any, engine: Any) -> None:
    count, error, again = ray.get(caller.aborted.remote({"do": "sleep", "s": 600}))
    assert (count, again) == (1, 0)
    assert type(error) is shmring.AbortedError
    assert error.request_id == "mine"
    until(lambda: is_idle(engine))


def test_what_is_aborted_soon_after_it_was_sent_is_in_nobodys_way(caller: Any, engine: Any) -> None:
    assert ray.get(caller.aborted_soon.remote()) == ["slept"] * 80
    until(lambda: is_idle(engine))


def test_more_than_may_be_in_flight_wait(caller: Any, engine: Any) -> None:
    results = ray.get(caller.requests.remote({"do": "sum", "x": torch.ones(50_000)}, 40))
    assert {result["sum"] for result, _ in results} == {50_000.0}


def test_calls(caller: Any) -> None:
    assert ray.get(caller.call.remote("double", 21)) == 42
    error = ray.get(caller.call.remote("halve", 21))
    assert type(error) is shmring.RemoteError
    assert error.type_name == "LookupError"


def test_submissions(caller: Any, engine: Any) -> None:
    before = ray.get(caller.statistics.remote())
    named, *results = ray.get(caller.submitted.remote())
    assert named == ("counting", "vision")
    assert results[:6] == [0, 1, 2, True, True, "slept"]
    nothing, several, failed, aborted = results[6:]
    assert (type(nothing), nothing.type_name) == (shmring.RemoteError, "NoReply")
    assert type(several) is shmring.LocalProtocolError
    assert (type(failed), failed.message) == (shmring.RemoteError, "too dark")
    assert type(aborted) is shmring.AbortedError
    until(lambda: is_idle(engine))
    until(lambda: ray.get(caller.statistics.remote()).in_flight == 0)
    after = ray.get(caller.statistics.remote())
    assert after.submitted - before.submitted == 9
    assert after.aborted - before.aborted >= 2
    assert after.failed - before.failed == 1


def test_names_and_keys_of_requests_are_checked(caller: Any) -> None:
    for wrong, kind in (({"key": 5}, TypeError), ({"engine": "other"}, ValueError), ({"request_id": "x" * 10_000}, ValueError)):
        assert type(ray.get(caller.request.remote({"do": "echo"}, **wrong))) is kind
    for wrong, kind in (
        ({"retry": -1}, ValueError),
        ({"retry": True}, TypeError),
        ({"retry": 1, "engine": "vision"}, ValueError),
    ):
        assert type(ray.get(caller.request.remote({"do": "echo"}, **wrong))) is kind
    assert ray.get(caller.request.remote({"do": "echo"}, key="a", engine="vision")) == {"do": "echo"}


def test_slots(caller: Any) -> None:
    reply, error = ray.get(caller.slot.remote(4096))
    assert torch.equal(reply["tensor"], torch.full((4,), 2.0))
    assert reply["array"].tolist() == [3, 3]
    assert error.capacity == 4096 < error.needed


def test_near_content_is_kept_and_far_content_is_not(caller: Any) -> None:
    kept, found = ray.get(caller.kept.remote())
    assert (kept, found) == ("kept", "found") or (type(kept) is shmring.LocalProtocolError and found is None)


def test_far_requests_stand_in_the_rings_books(nodes: Nodes, engine: Any) -> None:
    caller = ray.remote(Caller).options(**nodes.on(0), max_concurrency=1000).remote()
    ray.get(caller.connect.remote("vision"))
    before = statistics(engine)
    hanging = caller.requests.remote({"do": "sleep", "s": 2}, 12)
    until(lambda: statistics(engine).running == 8)  # max_inflight
    ray.get(hanging)
    after = statistics(engine)
    assert (after.submitted - before.submitted, after.finished - before.finished) == (12, 12)
    ray.get(caller.close.remote())
    ray.kill(caller)


def test_bytes_in_flight_are_bounded(nodes: Nodes, engine: Any, way: str) -> None:
    if way != "object store":
        return  # the engine bounds them
    caller = ray.remote(Caller).options(**nodes.on(0), max_concurrency=1000).remote()
    ray.get(caller.connect.remote("vision", in_flight_nbytes="3MiB"))
    most, left = ray.get(caller.most_in_flight.remote({"do": "sum", "x": torch.ones(1 << 18)}, 20))
    assert 2 << 20 < most <= 3 << 20
    assert left == 0
    most, left = ray.get(caller.most_in_flight.remote({"do": "sum", "x": torch.ones(1 << 20)}, 3))  # larger: one at a time
    assert 4 << 20 < most < 5 << 20
    assert left == 0
    ray.get(caller.close.remote())
    ray.kill(caller)


def test_engines_that_are_not_there(nodes: Nodes) -> None:
    caller = ray.remote(Caller).options(**nodes.on(0)).remote()
    with pytest.raises(ray.exceptions.RayTaskError, match="no engine 'nobody' has answered") as caught:
        ray.get(caller.connect.remote("nobody", connect_timeout_s=0.5))
    assert type(caught.value.cause) is shmring.EngineDeadError
    assert caught.value.cause.engine == "nobody"
    ray.kill(caller)


def test_arguments_of_engines_are_checked(engine: Any) -> None:
    with pytest.raises(ValueError, match="already"):
        EngineActor.remote("vision", handler)
    for wrong in ("", "a/b", "x" * 60):
        with pytest.raises(ValueError, match="name"):
            EngineActor.remote(wrong, handler)
    for arguments in ({}, {"handler": handler, "executor": "synthetic"}):
        with pytest.raises(TypeError, match="executor"):
            EngineActor.remote("other", **arguments)
    for option in ("name", "namespace", "max_task_retries"):
        with pytest.raises(ValueError, match=option):
            EngineActor.options(**{option: "x"})


def test_arguments_of_clients_are_checked(nodes: Nodes, engine: Any) -> None:
    import asyncio

    from shmring.integrations.ray import connect

    async def try_it(*arguments: Any, **options: Any) -> None:
        async with connect(*arguments, **options):
            pytest.fail("it has connected")

    for wrong, kind in (
        ({"name": "a/b"}, ValueError),
        ({"name": []}, ValueError),
        ({"name": ["a", "a"]}, ValueError),
        ({"name": 5}, TypeError),
        ({"name": [5]}, TypeError),
        ({"name": "vision", "route": "nearest"}, TypeError),
        ({"name": ["vision"], "route": "farthest"}, ValueError),
        ({"name": ["vision"], "near_bound": -1}, ValueError),
        ({"name": "vision", "reconnect": True}, TypeError),
        ({"name": "vision", "lease_nbytes": "many"}, ValueError),
        ({"name": "vision", "in_flight_nbytes": -1}, ValueError),
        ({"name": "vision", "description": "x" * 10_000}, ValueError),
        ({"name": "nobody-*", "connect_timeout_s": 0.5}, shmring.EngineDeadError),
        ({"name": ["nobody", "no-one"], "connect_timeout_s": 0.5}, shmring.EngineDeadError),
    ):
        with pytest.raises(kind):
            asyncio.run(try_it(**wrong))


def test_a_driver_is_a_client_too(nodes: Nodes, engine: Any) -> None:
    import asyncio

    from shmring.integrations.ray import connect

    async def ask() -> Any:
        async with connect("vision") as client:
            assert not client.is_near
            with pytest.raises(shmring.LocalProtocolError):
                _ = client.near
            return await client.request({"do": "sum", "x": torch.ones(10)})

    assert asyncio.run(ask())["sum"] == 10


def test_an_actor_hosts_an_executor(nodes: Nodes) -> None:
    from shmring.engine.protocol import EncodeReply, EncodeRequest, Text

    engine = EngineActor.options(**nodes.on(1)).remote("encoder", executor="synthetic", slab_nbytes="16MiB")
    replies = []
    for number in (1, 0):
        caller = ray.remote(Caller).options(**nodes.on(number)).remote()
        assert ray.get(caller.connect.remote("encoder")) is (number == 1)
        replies.append(ray.get(caller.request.remote(EncodeRequest([Text("a"), Text("b")]), reply_type=EncodeReply)))
        assert ray.get(caller.call.remote("describe"))
        late = EncodeRequest([Text("a")], deadline=time.monotonic() - 1)
        assert type(ray.get(caller.request.remote(late, reply_type=EncodeReply))) is TimeoutError
        in_time = EncodeRequest([Text("a")], deadline=time.monotonic() + 600)
        assert ray.get(caller.request.remote(in_time, reply_type=EncodeReply)).embeddings.shape[0] == 1
    near, far = replies
    assert torch.equal(near.embeddings, far.embeddings)
    ray.kill(engine)
