"""Engine cores and frontends that are stopped in the midst of replies: nobody else waits for them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.executors.interface import StepInput, StepOutput
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    Picture,
    SamplingParams,
    TextPart,
)
from shmring.engine.scheduler import SchedulerConfig
from tests.engine.counting import Counter
from tests.nursery import Forked, Nursery
from tests.segments import own_name
from tests.waiting import eventually

NAME = own_name("core")
NAMES = [f"{NAME}-0", f"{NAME}-1"]
ENDLESS = 100_000  # pieces of text, of 10 ms each
LIMIT_S = 60.0  # which only a hang reaches
COUNT = 24  # more than the core computes at once
#: Pieces of text of a request, in messages of which the ring holds a few hundred; and floats of an embedding: five of them
#: fill the reserve for replies.
SIZES = {"generate": 100, "encode": 50_000}
RING: dict[str, Any] = {"slab_nbytes": "8MiB", "reply_nbytes": "1MiB", "message_ring_nbytes": "16KiB", "inline_nbytes": 1024}


class Executor:
    """Counts, one number a step; an embedding has the value of its picture."""

    def __init__(self) -> None:
        self._counter = Counter()

    def execute(self, batch: Sequence[StepInput]) -> list[StepOutput | Exception]:
        return [self._advance(part) for part in batch]

    def _advance(self, part: StepInput) -> StepOutput:
        if isinstance(part.payload, EncodeRequest):
            [picture] = part.payload.inputs
            assert isinstance(picture, Picture)
            return StepOutput(EncodeReply(picture.pixels[:1].float().repeat(SIZES["encode"])[None]))
        return self._counter.advance(part)

    def describe(self) -> ModelDescription:
        return ModelDescription("counting", "counting", ["encode", "generate"], InputSpec(), SIZES["encode"])

    def forget(self, request_id: int) -> None:
        self._counter.sent.pop(request_id, None)

    def close(self) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass


async def generate(client: EngineClient, size: int) -> str:
    request = GenerateRequest([ChatMessage("user", [TextPart("Count")])], [], SamplingParams(max_tokens=size))
    return "".join([output.text async for output in client.generate(request)])


async def encode(client: EngineClient) -> torch.Tensor:
    request = EncodeRequest([Picture(torch.full((16,), 3, dtype=torch.uint8))])
    [output] = [output async for output in client.encode(request)]
    return output.embeddings


@pytest.mark.parametrize("kind", SIZES)
async def test_a_core_serves_the_others_while_a_frontend_that_it_answers_is_stopped(
    launch: Callable[..., Any], socket_dir: Path, kind: str
) -> None:
    core = await EngineCore.create(
        NAME, Executor(), scheduler_config=SchedulerConfig(max_num_seqs=4), socket_dir=str(socket_dir), **RING
    )
    async with core:
        running = asyncio.create_task(core.run())
        silent = launch("silent_caller", kind, NAME, str(socket_dir), str(COUNT), str(SIZES[kind]))
        assert await silent.said() == ["sent"]
        await silent.stopped()
        async with await EngineClient.connect(NAME, socket_dir=str(socket_dir)) as client:
            for _ in range(10):
                assert len(await asyncio.wait_for(generate(client, 20), LIMIT_S)) > 0
                assert (await asyncio.wait_for(encode(client), LIMIT_S)).unique().tolist() == [3.0]
            await eventually(lambda: core._scheduler.waiting == core._scheduler.running == 0)
            assert core.ring.statistics().running > 0, "replies to who is stopped have found no room"
            assert len(await asyncio.wait_for(generate(client, 20), LIMIT_S)) > 0
        silent.signal(signal.SIGCONT)
        assert await silent.said() == ["read"]
        await silent.died()
        await eventually(lambda: not core.ring.statistics().clients)
        assert core.ring.statistics().slots_in_use == 0
    await running


@pytest.fixture
async def cores(nursery: Nursery, socket_dir: Path) -> AsyncIterator[list[Forked]]:
    """Two engine processes of a server, whose names are those of the server with a number."""
    program = "import runpy; runpy.run_module('shmring.engine', run_name='__main__', alter_sys=True)"
    options = ("--executor=synthetic", '--executor-options={"step_s": 0.01}', "--slab-nbytes=16MiB")
    cores = [
        nursery.start_text(socket_dir / f"{name}.log", program, f"--name={name}", f"--socket-dir={socket_dir}", *options)
        for name in NAMES
    ]
    yield cores
    for core in cores:
        core.signal(signal.SIGKILL)
        await core.died()
        core.process.close()


async def test_callers_of_a_stopped_core_wait_alone(cores: list[Forked], socket_dir: Path) -> None:
    """Its requests go on with it. One that is given up is given up at once."""
    lengths = [0] * 3

    async def stream(number: int) -> None:
        request = GenerateRequest([ChatMessage("user", [TextPart("Count")])], [], SamplingParams(max_tokens=ENDLESS))
        async for output in stopped.generate(request):
            lengths[number] += len(output.token_ids)

    def connect(names: str | list[str]) -> Any:
        return EngineClient.connect(names, socket_dir=str(socket_dir), connect_timeout_s=LIMIT_S)

    async with await connect(NAMES[0]) as stopped, await connect(NAMES[1]) as other, await connect(NAMES) as both:
        await eventually(lambda: len(both.ring.loads()) == 2)
        streams = [asyncio.create_task(stream(number)) for number in range(3)]
        await eventually(lambda: all(lengths))
        cores[0].signal(signal.SIGSTOP)
        await cores[0].stopped()
        unaware = [asyncio.create_task(generate(both, 5)) for _ in range(8)]  # some go to the stopped one
        await eventually(lambda: not both.ring.loads()[NAMES[0]].responds)
        for client in (both, other):
            for _ in range(10):
                assert await asyncio.wait_for(generate(client, 5), LIMIT_S)
        assert await both.states(timeout=0.5) == {NAMES[0]: "unresponsive", NAMES[1]: "running"}
        streams[0].cancel()
        await asyncio.wait(streams[:1], timeout=LIMIT_S)
        assert streams[0].cancelled(), "whoever gives up waits for nobody"
        before = list(lengths)
        cores[0].signal(signal.SIGCONT)
        assert all(await asyncio.wait_for(asyncio.gather(*unaware), LIMIT_S))
        await eventually(lambda: lengths[1] > before[1] and lengths[2] > before[2])
        assert lengths[0] == before[0]
        for task in streams:
            task.cancel()
        await asyncio.wait(streams)
