"""The ring's counters as metrics, and the engine's numbers beside them."""

from __future__ import annotations

from typing import Any

import torch

from shmring.frontend.metrics import FrontendMetrics


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
    text = await metrics.render({"test": {"steps": 3}})
    assert b"shmring_engine_up 1.0" in text
    assert b"shmring_engine_steps 3.0" in text


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
    text = (await metrics.render({"a": {"steps": 3, "waiting_requests": 1}, "b": None})).decode()
    for line in (
        'shmring_frontend_copies_total{engine="a"} 1.0',
        'shmring_frontend_copies_total{engine="b"} 3.0',
        'shmring_engine_up{engine="a"} 1.0',
        'shmring_engine_up{engine="b"} 0.0',
        'shmring_engine_steps{engine="a"} 3.0',
    ):
        assert line in text.splitlines()
    assert 'shmring_engine_steps{engine="b"}' not in text
    assert 'shmring_frontend_slots_in_use{engine="a"} ' in text
