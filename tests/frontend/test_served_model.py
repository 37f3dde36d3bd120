"""The served model: asked of the engine when it is needed, once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import shmring
from shmring.frontend.errors import ApiError
from shmring.frontend.openai.models import models_of
from shmring.frontend.served_model import ServedModel
from tests.waiting import eventually


async def test_the_engine_is_queried_once(open_core: Any) -> None:
    engine = await open_core()
    calls = 0
    call = engine.client.ring.call

    async def counting(*arguments: Any, **keywords: Any) -> Any:
        nonlocal calls
        calls += 1
        return await call(*arguments, **keywords)

    engine.client.ring.call = counting
    model = ServedModel(engine.client, ())
    descriptions = await asyncio.gather(*(model.check("shmring-synthetic", "generate") for _ in range(200)))
    assert calls == 1
    assert {description.model for description in descriptions} == {"shmring-synthetic"}


async def test_names_and_tasks_are_checked(open_engine: Any) -> None:
    engine = await open_engine()
    model = ServedModel(engine.client, ("a name", "another"))
    await model.check("a name", "encode")
    with pytest.raises(ApiError, match="'shmring-fingerprints' does not exist; this server has 'a name'") as unknown:
        await model.check("shmring-fingerprints", "encode")
    assert (unknown.value.status, unknown.value.param) == (404, "model")
    with pytest.raises(ApiError) as long:
        await model.check("x" * 100_000, "encode")
    assert len(str(long.value)) < 200
    with pytest.raises(ApiError, match="does not do chat completions") as task:
        await model.check("a name", "generate")
    assert (task.value.status, task.value.code) == (400, "unsupported_task")


async def test_the_list_says_what_is_made_up(open_core: Any) -> None:
    engine = await open_core()
    model = ServedModel(engine.client, ())
    [listed] = models_of(await model.served())
    assert (listed.id, "synthetic" in listed.owned_by) == ("shmring-synthetic", True)
    await engine.ring.close()
    await eventually(lambda: not engine.client.is_running)
    assert models_of(await model.served()) == [listed]
    with pytest.raises(shmring.EngineDeadError):
        await model.check("shmring-synthetic", "generate")
    with pytest.raises(shmring.EngineDeadError):
        await ServedModel(engine.client, ()).served()
