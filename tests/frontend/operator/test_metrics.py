"""The ring's counters as metrics, and the engine's numbers beside them."""

from __future__ import annotations

from typing import Any

import prometheus_client
import torch

from shmring.frontend.operator.metrics import EngineNumbers, FrontendMetrics
from shmring.service.distributions import TIMES_S, Distribution


async def test_the_ring_s_counters_are_taken_over_once(serve: Any, connect: Any) -> None:
    async def reply(claim: Any) -> None:
        await claim.reply(1)

    await serve(reply)
    client = await connect()
    metrics = FrontendMetrics(["test"])
    for copies in (1, 2):
        await client.request({"data": torch.zeros(5000)})
        for _ in range(2):
            metrics.take_over("test", client.statistics())
        assert metrics.registry.get_sample_value("shmring_frontend_copies_total") == copies
        assert metrics.registry.get_sample_value("shmring_frontend_copied_bytes_total") == copies * 20000


async def test_an_engine_that_is_absent_is_down() -> None:
    metrics = FrontendMetrics(["test"])
    assert b"shmring_engine_up 0.0" in await metrics.render({"test": None})
    text = await metrics.render({"test": EngineNumbers({"steps": 3}, {"queue": Distribution([1, 2, *[0] * 16, 1], 700.5)})})
    assert b"shmring_engine_up 1.0" in text
    assert b"shmring_engine_steps_total 3.0" in text
    for line in (
        b'shmring_request_queue_time_seconds_bucket{le="0.001"} 1.0',
        b'shmring_request_queue_time_seconds_bucket{le="600.0"} 3.0',
        b'shmring_request_queue_time_seconds_bucket{le="+Inf"} 4.0',
        b"shmring_request_queue_time_seconds_sum 700.5",
    ):
        assert line in text.splitlines()


async def test_seconds_of_steps_are_told_by_part_and_of_callers_by_key() -> None:
    counts = {"spent_seconds:choosing": 2.0, "spent_seconds:alone": 1.5, "caller_seconds:alice": 3.0, "caller_seconds:::1": 9.0}
    for names, engine in ((["test"], ""), (["test", "other"], 'engine="test",')):
        metrics = FrontendMetrics(names, ["alice"])
        lines = (await metrics.render({"test": EngineNumbers(counts, {})} | dict.fromkeys(names[1:]))).decode().splitlines()
        assert [line for line in lines if "_seconds_total{" in line] == [
            f'shmring_engine_spent_seconds_total{{{engine}part="choosing"}} 2.0',
            f'shmring_engine_spent_seconds_total{{{engine}part="alone"}} 1.5',
            f'shmring_engine_caller_seconds_total{{{engine}key="alice"}} 3.0',
        ], "and of no address"


async def test_what_is_of_several_engines_has_their_names(serve: Any, connect: Any) -> None:
    async def reply(claim: Any) -> None:
        await claim.reply(1)

    metrics = FrontendMetrics(["a", "b"])
    for name, count in (("a", 1), ("b", 3)):
        await serve(reply, name=name)
        client = await connect(name)
        for _ in range(count):
            await client.request({"data": torch.zeros(5000)})
        metrics.take_over(name, client.statistics())
    text = (await metrics.render({"a": EngineNumbers({"steps": 3, "waiting_requests": 1}, {}), "b": None})).decode()
    for line in (
        'shmring_frontend_copies_total{engine="a"} 1.0',
        'shmring_frontend_copies_total{engine="b"} 3.0',
        'shmring_engine_up{engine="a"} 1.0',
        'shmring_engine_up{engine="b"} 0.0',
        'shmring_engine_steps_total{engine="a"} 3.0',
    ):
        assert line in text.splitlines()
    assert 'shmring_engine_steps_total{engine="b"}' not in text
    assert 'shmring_frontend_slots_in_use{engine="a"} ' in text


def test_times_are_counted_as_a_histogram_counts_them() -> None:
    """The same values, given to ``prometheus_client`` one by one, have the same samples. A bound counts what is equal to it."""
    values = (0.0, 0.001, 0.0011, 0.25, 0.25, 3.0, 600.0, 1e9)
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("shmring_slot_wait_seconds", "", buckets=TIMES_S, registry=registry)
    metrics = FrontendMetrics(["test"])
    for value in values:
        theirs.observe(value)
        metrics.answers.first_token.add(value)
        metrics.take_over_own()
        metrics.take_over_own()
    for suffix, bounds in (("bucket", [*map(str, TIMES_S), "+Inf"]), ("count", [None]), ("sum", [None])):
        for bound in bounds:
            labels = {} if bound is None else {"le": bound}
            expected = registry.get_sample_value(f"shmring_slot_wait_seconds_{suffix}", labels)
            assert metrics.registry.get_sample_value(f"shmring_time_to_first_token_seconds_{suffix}", labels) == expected


def test_what_has_labels_is_counted_by_them() -> None:
    metrics = FrontendMetrics(["test"])
    for count in (1, 2):
        metrics.http.failures["/v1/embeddings", "slab_full"] += 1
        metrics.http.failures["/v1/embeddings", "overloaded"] = 1
        metrics.take_over_own()
        for reason, failures in (("slab_full", count), ("overloaded", 1)):
            labels = {"route": "/v1/embeddings", "reason": reason}
            assert metrics.registry.get_sample_value("shmring_request_failure_total", labels) == failures
