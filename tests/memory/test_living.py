"""What debug mode says of views that outlive their claim or slot: which they are, where that was left, who holds them."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from typing import Any

import numpy as np
import pytest
import torch

import shmring
from shmring import Client
from tests.garbage import uncollected
from tests.waiting import eventually


class Cache:
    """Something of a user's that keeps what it was given."""

    def __init__(self) -> None:
        self.last: Any = None
        self.all: dict[str, Any] = {}


class Narrow:
    """The same without a dict."""

    __slots__ = ("last",)


KEPT_GLOBALLY: Any = None


async def log_of(serve: Any, connect: Any, caplog: pytest.LogCaptureFixture, handler: Any, payload: object) -> str:
    """Returns what is logged of a request whose handler keeps a view."""
    ring, client = await serve(debug=True), await connect()
    with caplog.at_level(logging.WARNING, "shmring.ring"):
        running = asyncio.ensure_future(ring.run(handler))
        submission = await client.submit(payload)
        await submission.wait()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return "\n".join(record.getMessage() for record in caplog.records)


PAYLOAD = {"images": [{"pixels": torch.ones(5000)}, {"pixels": torch.zeros(7000)}], "array": np.ones(9000)}


async def test_the_path_the_handler_and_the_attribute_are_named(serve: Any, connect: Any, caplog: Any) -> None:
    cache = Cache()

    async def handler(claim: shmring.Claim) -> None:
        cache.last = claim.payload["images"][1]["pixels"]

    text = await log_of(serve, connect, caplog, handler, PAYLOAD)
    assert (
        "payload.images[1].pixels: tensor float32[7000], held by attribute 'last' of a tests.memory.test_living.Cache" in text
    )
    assert f"handler() ({__file__}:{handler.__code__.co_firstlineno}) had ended" in text
    assert "images[0]" not in text
    assert "payload.array" not in text


async def test_a_slice_an_array_and_containers_are_found(serve: Any, connect: Any, caplog: Any) -> None:
    cache, narrow = Cache(), Narrow()

    async def handler(claim: shmring.Claim) -> None:
        global KEPT_GLOBALLY
        cache.all["mine"] = [claim.payload["images"][0]["pixels"][100:200]]
        KEPT_GLOBALLY = claim.payload["array"]
        narrow.last = claim.payload["images"][1]["pixels"]

    global KEPT_GLOBALLY
    text = await log_of(serve, connect, caplog, handler, PAYLOAD)
    KEPT_GLOBALLY = None
    assert (
        "payload.images[0].pixels: tensor float32[100], held by a list of 1 in key 'mine' of a dict in attribute 'all'" in text
    )
    assert "payload.images[0].pixels: tensor float32[5000], held by what was made of it\n" in text
    assert "payload.array: array float64[9000], held by the global variable 'KEPT_GLOBALLY' of module" in text
    assert "held by attribute 'last' of a tests.memory.test_living.Narrow" in text


async def test_a_task_that_goes_on_is_named_by_its_variable(serve: Any, connect: Any, caplog: Any) -> None:
    released = asyncio.Event()
    tasks = []

    async def use(pixels: torch.Tensor) -> None:
        await released.wait()

    async def handler(claim: shmring.Claim) -> None:
        tasks.append(asyncio.ensure_future(use(claim.payload["images"][0]["pixels"])))
        await asyncio.sleep(0)

    text = await log_of(serve, connect, caplog, handler, PAYLOAD)
    assert f"held by the variable 'pixels' at {__file__}:" in text
    assert "use" in text.split("held by the variable 'pixels' at ")[1].splitlines()[0]
    released.set()
    await asyncio.gather(*tasks)


@pytest.mark.client(debug=True)
async def test_a_slot_that_is_left_with_views_says_where_and_who_has_them(client: Client, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "shmring.client"), uncollected():
        async with client.slot(40_000, drain=True) as slot:
            kept = slot.tensor((10_000,), torch.float32)[5:]
        del kept
        await eventually(lambda: client.statistics().slots_in_use == 0)
    [record] = caplog.records
    assert f"a slot of 40000 bytes was left with living views; it was left at {__file__}:" in record.getMessage()
    assert "slot: tensor float32[9995], held by the variable 'kept' at " in record.getMessage()


async def test_looking_keeps_nothing_alive(serve: Any, connect: Any, caplog: Any) -> None:
    cache = Cache()

    async def handler(claim: shmring.Claim) -> None:
        cache.last = claim.payload["images"][1]["pixels"]

    ring, client = await serve(debug=True), await connect()
    running = asyncio.ensure_future(ring.run(handler))
    submission = await client.submit(PAYLOAD)
    await submission.wait()
    assert ring.statistics().slots_draining == 1
    cache.last = None
    await eventually(lambda: ring.statistics().slots_draining == 0)
    running.cancel()
    assert not [thing for thing in gc.get_objects() if type(thing) is list and any(inner is thing for inner in thing)]


async def test_what_the_search_makes_itself_hides_nothing(serve: Any, connect: Any, caplog: Any) -> None:
    """An object's dict is made where it is asked for, and may lie where a list of the search was."""
    caches = [Cache() for _ in range(40)]

    async def handler(claim: shmring.Claim) -> None:
        for cache, tensor in zip(caches, claim.payload, strict=True):
            cache.all["mine"] = [tensor]

    text = await log_of(serve, connect, caplog, handler, [torch.full((2000,), number) for number in range(len(caches))])
    assert text.count("held by a list of 1 in key 'mine' of a dict in attribute 'all' of a") == len(caches)
