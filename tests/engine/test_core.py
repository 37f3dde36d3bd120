"""The engine core with real rings: steps off the loop, streams, isolation of failures, aborts, deadlines, pauses, the end."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import shmring
from shmring.engine import described_requests
from shmring.engine.client import EngineClient
from shmring.engine.core import EngineCore
from shmring.engine.described_requests import describe_ended
from shmring.engine.executors.interface import ExecutorDeadError, StepInput, StepOutput
from shmring.engine.protocol import (
    ChatMessage,
    EncodeReply,
    EncodeRequest,
    GenerateReply,
    GenerateRequest,
    InputSpec,
    MediumPart,
    ModelDescription,
    Picture,
    SamplingParams,
    Text,
)
from shmring.engine.request import EndedRequest
from shmring.engine.scheduler import SchedulerConfig
from shmring.service.logs import concerned
from tests.engine.counting import Counter
from tests.tables import for_each

Output = StepOutput | Exception
Request = EncodeRequest | GenerateRequest
Compute = Callable[[Sequence[StepInput]], Sequence[Output]]


class CallbackExecutor:
    """An executor that does what the test says."""

    def __init__(self, compute: Compute, pauses: bool = False) -> None:
        self.execute = compute
        self.pauses = pauses
        self.forgotten: list[int] = []
        self.closed = False
        self.cached = True

    def describe(self) -> ModelDescription:
        return ModelDescription("callback", "callback", ["encode", "generate"], InputSpec(), 8, pauses=self.pauses)

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)

    def close(self) -> None:
        self.closed = True

    def reset_mm_cache(self) -> None:
        self.cached = False

    def add(self, left: int, right: int = 0, *, times: int = 1) -> dict[str, int]:
        return {"sum": (left + right) * times}

    def refuse(self) -> None:
        raise ValueError("not today")

    def _secret(self) -> None:
        raise AssertionError("called from afar")


def mean(part: StepInput) -> StepOutput:
    assert isinstance(part.payload, EncodeRequest)
    means = [item.pixels.float().mean().reshape(1) for item in part.payload.inputs if isinstance(item, Picture)]
    return StepOutput(EncodeReply(torch.stack(means)))


def means(batch: Sequence[StepInput]) -> list[Output]:
    return [mean(part) for part in batch]


def value_of(part: StepInput) -> int:
    assert isinstance(part.payload, EncodeRequest)
    [picture] = part.payload.inputs
    assert isinstance(picture, Picture)
    return int(picture.pixels[0])


def request_of(value: int, pixels: int = 4096, **fields: Any) -> EncodeRequest:
    return EncodeRequest([Picture(torch.full((pixels,), value, dtype=torch.uint8))], **fields)


def question(max_tokens: int = 3, pixels: int = 4096, **fields: Any) -> GenerateRequest:
    media = [Picture(torch.ones(pixels, dtype=torch.uint8))]
    return GenerateRequest([ChatMessage("user", [MediumPart(0)])], media, SamplingParams(max_tokens=max_tokens), **fields)


class Counting(Counter):
    """Answers with the numbers from 1 to ``max_tokens``, one a step; encodes as :func:`mean`."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []

    def __call__(self, batch: Sequence[StepInput]) -> list[Output]:
        self.batches.append([part.request_id for part in batch])
        return [self.advance(part) for part in batch]

    def advance(self, part: StepInput) -> StepOutput:
        if isinstance(part.payload, EncodeRequest):
            return mean(part)
        return super().advance(part)


async def encode(client: EngineClient, request: EncodeRequest, **options: Any) -> torch.Tensor:
    [output] = [output async for output in client.encode(request, **options)]
    return output.embeddings


async def generate(client: EngineClient, request: GenerateRequest, **options: Any) -> str:
    return "".join([output.text async for output in client.generate(request, **options)])


async def until(condition: Callable[[], object]) -> None:
    """Waits for a condition that other tasks bring about."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


class Gate:
    """Steps wait at it, so that a test can act during one; ``seen`` are the values of the pictures in them."""

    def __init__(self, compute: Compute = means) -> None:
        self._compute = compute
        self._open = threading.Semaphore(0)
        self.seen: list[int] = []

    def __call__(self, batch: Sequence[StepInput]) -> Sequence[Output]:
        self.seen += [value_of(part) for part in batch if isinstance(part.payload, EncodeRequest)]
        assert self._open.acquire(timeout=10)
        return self._compute(batch)

    def let(self, steps: int = 1000) -> None:
        self._open.release(steps)


class Engine:
    """A core that runs, a client of it, and what the test has sent through them."""

    def __init__(self, core: EngineCore, client: EngineClient, gate: Gate | None) -> None:
        self.core, self.client, self.gate = core, client, gate
        self.scheduler, self.ring = core._scheduler, core.ring
        self.sent: list[asyncio.Task[Any]] = []

    async def send(self, *requests: int | Request, client: EngineClient | None = None, **fields: Any) -> asyncio.Task[Any]:
        """Sends requests, each when the one before it has come and a step runs; returns the last one's answer to come.

        Args:
            requests: a number is that of a picture to encode; then there may be ``fields`` of the request.
            client: another one.
            fields: of requests, and ``request_id``.
        """
        name = {"request_id": fields.pop("request_id")} if "request_id" in fields else {}
        for request in requests:
            request = request_of(request) if isinstance(request, int) else request
            request = msgspec.structs.replace(request, **fields)
            call: Any = encode if isinstance(request, EncodeRequest) else generate
            before = len(self.scheduler.all())
            self.sent.append(asyncio.create_task(call(client or self.client, request, **name)))
            await until(lambda before=before: len(self.scheduler.all()) == before + 1 and self.core._busy is not None)
        return self.sent[-1]

    async def finish(self) -> list[Any]:
        """Lets all steps pass; returns all answers: of pictures their means, of others their text, or what went wrong."""
        if self.gate is not None:
            self.gate.let()
        answers = await asyncio.gather(*self.sent, return_exceptions=True)
        return [answer.flatten().tolist() if isinstance(answer, torch.Tensor) else answer for answer in answers]

    async def program(self) -> Any:
        """What a snapshot says of the engine."""
        return (await self.client.inspect("core")).program


Serve = Callable[..., AbstractAsyncContextManager[Engine]]


@pytest.fixture
def engine(socket_dir: Path) -> Serve:
    """``engine(compute, **options)``: serves until the test ends, and looks that nothing is left then."""

    @asynccontextmanager
    async def serve(
        compute: Compute, *, pauses: bool = False, options: dict[str, Any] | None = None, **scheduler: int
    ) -> AsyncIterator[Engine]:
        core = await EngineCore.create(
            "core",
            CallbackExecutor(compute, pauses),
            scheduler_config=SchedulerConfig(**scheduler) if scheduler else None,
            slab_nbytes="16MiB",
            socket_dir=str(socket_dir),
            **(options or {}),
        )
        async with core:
            running = asyncio.create_task(core.run())
            async with await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB") as client:
                made = Engine(core, client, compute if isinstance(compute, Gate) else None)
                yield made
                await made.finish()
            await until(lambda: core.ring.statistics().clients == 0)
        await running
        statistics = core.ring.statistics()
        assert statistics.slots_in_use == 0
        assert statistics.free_nbytes == statistics.leasable_nbytes

    return serve


def executor_of(core: EngineCore) -> CallbackExecutor:
    executor = core._executor
    assert isinstance(executor, CallbackExecutor)
    return executor


# -- steps --------------------------------------------------------------------------------------------------------------


async def test_pictures_in_a_slot_are_encoded_without_a_copy(engine: Serve) -> None:
    async with engine(means) as it:
        async with it.client.ring.slot(4096) as slot:
            pixels = slot.tensor((4096,), torch.uint8)
            pixels.fill_(7)
            assert (await encode(it.client, EncodeRequest([Picture(pixels)]))).tolist() == [[7.0]]
            del pixels
        assert it.client.ring.statistics().copies == 0


async def test_the_loop_goes_on_while_a_step_runs(engine: Serve) -> None:
    async with engine(Gate()) as it:
        await it.send(1)
        await it.client.check_health()
        assert (await it.client.statistics())["running_requests"] == 1
        assert await it.finish() == [[1.0]]
        assert (it.core.metrics.steps, it.core.metrics.finished_requests) == (1, 1)


async def test_what_blocks_the_loop_is_seen_in_its_numbers_and_in_snapshots(engine: Serve) -> None:
    async with engine(means) as it:
        await it.client.check_health()
        time.sleep(0.3)  # this is the engine's loop, too
        async with asyncio.timeout(20):
            while (await it.client.statistics())["loop_lag_seconds"] <= 0.2:
                await asyncio.sleep(0)
        assert (await it.program())["loop_lag_s"] > 0.2


async def test_nobody_pays_for_time_in_which_the_engine_did_not_run(engine: Serve) -> None:
    async with engine(Gate()) as it:
        await it.send(1)
        await asyncio.sleep(0)
        time.sleep(0.5)  # this is the engine's loop, and its executor waits: the process does nothing
        await it.finish()
        await until(lambda: it.core.metrics.steps == 1 and it.core._stopped_s > 0.2)
        [caller] = it.scheduler.accounts.describe(time.monotonic())
        assert caller.minute_s == pytest.approx(it.core.metrics.step_seconds - it.core._stopped_s, abs=0.05)
        parts = {part["what"]: part["share"] for part in (await it.program())["spending"]["parts"]}
        assert parts["not getting to run"] > 0


async def test_requests_of_a_step_whose_forms_are_prepared_say_so_and_what_that_takes_counts_before_it_ends(
    engine: Serve,
) -> None:
    async with engine(Gate()) as it:
        executor: Any = it.core._executor
        executor.waits_for = lambda _: "its form is being prepared"
        executor.working_s = lambda: {"forms": {"alice": 6.0}, "preparing": {}}
        await it.send(1, owner="alice")
        program = await it.program()
        assert fields_of(program["requests"], "state why") == [("preparing", "its form is being prepared")]
        assert fields_of([program], "running preparing_requests seats_taken") == [(0, 1, 1)]
        assert program["callers"][0]["beside_s"] >= 6.0
        spending = program["spending"]
        assert "1 request waits for forms (schemas, patterns). " in spending["cause"]
        assert "has room" not in spending["cause"]
        assert spending["whose"].endswith("1 of those that wait for forms (schemas, patterns) are of alice.")
        assert "forms of answers (schemas, patterns), beside the steps" in [each["what"] for each in spending["parts"]]


async def test_requests_that_wait_for_seats_are_the_first_thing_that_is_said(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1) as it:
        await it.send(0, 1, 2)
        cause = (await it.program())["spending"]["cause"]
        assert cause.startswith("The seat is taken and 2 requests wait in line. ")
        await it.finish()
        assert "in line" not in (await it.program())["spending"]["cause"]


async def test_the_times_of_requests_are_counted_from_their_arrival(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1) as it:
        await it.send(0, 1)
        await asyncio.sleep(0.05)  # one waits, and the other one is in its step
        await it.finish()
        times = await it.client.times(engine="core")
        assert {name: sum(each.counts) for name, each in times.items()} == {"queue": 2, "prefill": 2, "decode": 0, "step": 2}
        assert times["queue"].total >= 0.05
        assert times["prefill"].total >= 0.05
        assert 0.05 <= times["step"].total <= (await it.client.statistics())["step_seconds"]  # the latter has more than steps


async def test_requests_that_wait_share_a_step(engine: Serve) -> None:
    sizes: list[int] = []
    async with engine(Gate(lambda batch: sizes.append(len(batch)) or means(batch)), max_num_seqs=3) as it:
        await it.send(*range(5))
        assert await it.finish() == [[float(value)] for value in range(5)]
        assert sizes == [1, 3, 1]


async def test_in_a_step_come_first_those_of_who_has_used_least_and_of_these_the_most_urgent(
    engine: Serve, socket_dir: Path
) -> None:
    async with (
        engine(gate := Gate(), max_num_seqs=8) as it,
        await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB") as second,
    ):
        await it.send(0, 1, 2)
        await it.send(3, 4, client=second)
        await it.send(5, priority=-1)
        await it.finish()
        assert gate.seen == [0, 3, 4, 5, 1, 2], "the first client's request was in a step before"


async def test_owners_of_one_frontend_take_turns_and_a_request_without_one_is_its_frontends(engine: Serve) -> None:
    async with engine(gate := Gate(), max_num_seqs=1) as it:
        for value, owner in enumerate(["", "a", "a", "b", ""]):
            await it.send(value, owner=owner)
        assert sorted(it.scheduler.accounts._accounts) == ["a", "b", "client 1"]
        await it.finish()
        assert gate.seen == [0, 1, 3, 2, 4], "the frontend itself has used most"


async def test_an_executor_is_told_whose_a_request_without_an_owner_is(engine: Serve, socket_dir: Path) -> None:
    owners: list[str] = []

    def compute(batch: Sequence[StepInput]) -> list[StepOutput]:
        owners.extend(part.payload.owner for part in batch if part.payload is not None)
        return [mean(part) for part in batch]

    async with (
        engine(compute) as it,
        await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB") as second,
    ):
        await encode(it.client, request_of(1))
        await encode(second, request_of(2))
        await encode(second, request_of(3, owner="a"))
    assert owners == ["client 1", "client 2", "a"]


async def test_what_requests_took_of_steps_is_charged_to_their_owners(engine: Serve) -> None:
    told = {"costly": 5.0, "cheap": 1.0, "silent": 0.0}

    def compute(batch: Sequence[StepInput]) -> list[StepOutput]:
        return [msgspec.structs.replace(mean(part), seconds=told[part.payload.owner]) for part in batch]

    async with engine(compute) as it:
        await asyncio.gather(*(encode(it.client, request_of(1, owner=owner)) for owner in told))
        used = {caller.owner: caller.seconds for caller in it.scheduler.accounts.describe(time.monotonic())}
        assert list(used)[:2] == ["costly", "cheap"]
        assert (round(used["costly"]), round(used["cheap"])) == (5, 1)
        assert 0.0 <= used.get("silent", 0.0) < 1.0


async def test_what_is_prepared_beside_steps_is_charged_and_told_apart(engine: Serve) -> None:
    def compute(batch: Sequence[StepInput]) -> list[StepOutput]:
        return [msgspec.structs.replace(mean(part), beside_s=7.0 * (part.payload.owner == "forms")) for part in batch]

    async with engine(compute) as it:
        await asyncio.gather(*(encode(it.client, request_of(1, owner=owner)) for owner in ("forms", "other")))
        program = await it.program()
        [forms] = [caller for caller in program["callers"] if caller["owner"] == "forms"]
        assert (round(forms["beside_s"]), forms["seconds"] < 1, round(forms["minute_s"])) == (7, True, 7)
        assert [round(each["seconds"]) for each in program["ended"] if each["owner"] == "forms"] == [7]
        assert sum(caller["seconds"] for caller in program["callers"]) <= it.core.metrics.step_seconds


async def test_tokens_of_a_prompt_are_told_before_there_is_a_reply(engine: Serve) -> None:
    def compute(batch: Sequence[StepInput]) -> list[StepOutput]:
        if it.core.metrics.steps < 2:
            return [StepOutput(finished=False, keep_inputs=True, prompt_tokens=8000)]
        return [mean(part) for part in batch]

    async with engine(Gate(compute)) as it:
        await it.send(1)
        assert fields_of((await it.program())["requests"], "prompt_tokens") == [(0,)]
        it.gate.let(1)
        await until(lambda: it.core.metrics.steps == 2)
        assert fields_of((await it.program())["requests"], "prompt_tokens") == [(8000,)]
        assert await it.finish() == [[1.0]]


async def test_a_full_line_refuses_at_once(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1, max_waiting=1) as it:
        await it.send(0, 1)
        with pytest.raises(shmring.RemoteError, match="OverloadedError"):
            await encode(it.client, request_of(2))
        assert it.ring.statistics().slots_claimed == 2
        assert await it.finish() == [[0.0], [1.0]]
        assert it.core.metrics.refused_requests == 1


async def test_whoever_fills_the_line_loses_the_last_place_to_another_owner(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1, max_waiting=3) as it:
        await it.send(0)
        last = await it.send(1, 2, 3, owner="a")
        other = asyncio.create_task(encode(it.client, request_of(4, owner="b")))
        with pytest.raises(shmring.RemoteError, match=r"OverloadedError: .*the line is full"):
            await last
        assert (await it.finish())[:3] == [[0.0], [1.0], [2.0]]
        assert (await other).tolist() == [[4.0]]
        assert it.core.metrics.refused_requests == 1
        assert it.ring.statistics().slots_claimed == 0


# -- snapshots ------------------------------------------------------------------------------------------------------------


def fields_of(requests: list[dict[str, Any]], names: str) -> list[tuple[Any, ...]]:
    return [tuple(request[name] for name in names.split()) for request in requests]


async def test_a_snapshot_tells_requests_that_run_from_those_that_others_have_paused(engine: Serve) -> None:
    async with engine(gate := Gate(Counting()), pauses=True, max_num_seqs=2) as it:
        for number, owner in enumerate("aab", 1):
            await it.send(question(9), owner=owner)
            gate.let(1)
            await until(lambda number=number: it.scheduler.running == number and it.core._busy is not None)
        program = await it.program()
        assert sorted(fields_of(program["requests"], "owner state why place")) == [
            ("a", "paused", "others have their turn", None),
            ("a", "running", "", None),
            ("b", "running", "before its first token", None),
        ]
        names = "running preparing_requests paused_requests waiting seats seats_taken"
        assert fields_of([program], names) == [(2, 0, 1, 0, 2, 2)]


async def test_a_snapshot_has_requests_of_each_owner_and_the_time_of_the_step_that_runs(
    engine: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(described_requests, "_MOST", 3)
    async with engine(gate := Gate(Counting()), max_num_seqs=3) as it:
        for number in range(7):
            await it.send(question(2, owner="a"), request_id=f"a-\x1b{number}")
        program = await it.program()
        assert (it.core.metrics.step_seconds, program["spending"]["steps"] > 0) == (0.0, True)
        gate.let(1)
        await until(lambda: it.core.metrics.steps == 2)
        await it.send(question(2, owner="b"), request_id="b-\x1b7")
        snapshot = await it.client.inspect("core")
        requests = snapshot.program["requests"]
        assert fields_of(requests, "name state place") == [
            ("a-\\x1b0", "running", None),
            ("a-\\x1b1", "running", None),
            ("b-\\x1b7", "waiting", 1),  # and not a third one of the other owner
        ]
        ring = {(each.client_id, each.number): each.name for each in snapshot.requests}
        assert all(ring[each["client_id"], each["number"]] == each["name"] for each in requests)


async def test_a_snapshot_says_of_requests_whose_they_are_what_they_took_and_where_they_wait(
    engine: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with engine(gate := Gate(Counting()), max_num_seqs=1) as it:
        for name, owner, tokens in (("first", "a", 3), ("second", "a", 1), ("third", "a", 1), ("other", "b", 1)):
            await it.send(question(tokens, owner=owner), request_id=name)
        gate.let(1)
        await until(lambda: it.core.metrics.generated_tokens == 1)
        program = await it.program()
        assert fields_of(program["requests"], "name owner state place why tokens") == [
            ("first", "a", "running", None, "", 1),
            ("other", "b", "waiting", 1, "all seats are taken", 0),
            ("second", "a", "waiting", 2, "all seats are taken", 0),
            ("third", "a", "waiting", 3, "all seats are taken", 0),
        ]
        assert program["requests"][0]["seconds"] > 0
        assert program["requests"][0]["prompt_tokens"] > 0
        assert {caller["owner"]: caller["requests"] for caller in program["callers"]} == {"a": 3, "b": 1}
        assert program["callers"][0]["seconds"] > 0
        numbers = await it.client.statistics()
        assert numbers["caller_seconds:a"] > 0 <= numbers["spent_seconds:late"]
        assert fields_of([program], "running paused_requests waiting seats seats_taken") == [(1, 0, 3, 1, 1)]
        monkeypatch.setattr(it.core._executor, "waits_for", "request {} waits for rain".format, raising=False)
        requests = (await it.program())["requests"]
        assert fields_of(requests[:2], "why") == [("request 1 waits for rain",), ("all seats are taken",)]


async def test_a_snapshot_tells_how_requests_have_ended_lately(engine: Serve) -> None:
    counting = Counting()

    def compute(batch: Sequence[StepInput]) -> list[Output]:
        secret = ValueError("what a caller has written")
        return [secret if isinstance(part.payload, EncodeRequest) else counting.advance(part) for part in batch]

    async with engine(Gate(compute), max_num_seqs=1) as it:
        await it.send(question(2, owner="a"), request_id="answered")
        left = await it.send(1, owner="b", request_id="left\x1b")
        left.cancel()
        await until(lambda: not it.scheduler.waiting)
        with pytest.raises(TimeoutError):
            await encode(it.client, request_of(1, owner="c", deadline=time.monotonic()), request_id="late")
        await it.send(1, owner="c", request_id="operator's")
        await it.client.abort_requests(["operator's"])
        await it.finish()
        with pytest.raises(shmring.RemoteError):
            await encode(it.client, request_of(1, owner="c"), request_id="wrong")
        ended = (await it.program())["ended"]
        assert fields_of(ended, "name owner end tokens") == [
            ("wrong", "c", "failed: ValueError", 0),
            ("answered", "a", "answered", 2),
            ("operator's", "c", "ended by an operator", 0),
            ("late", "c", "out of time", 0),
            ("left\\x1b", "b", "left by its caller", 0),
        ]
        answered = ended[1]
        assert 0 < answered["seconds"] <= answered["age_s"] + 0.001  # which is told in milliseconds
        assert answered["prompt_tokens"] > 0
        assert 0 <= answered["ago_s"] < 20


def test_of_many_that_have_ended_the_last_of_each_caller_are_told_of_and_so_many_are_kept() -> None:
    ended = deque[EndedRequest](maxlen=described_requests._MOST_ENDED * 2)
    for number in range(described_requests._MOST_ENDED * 3):
        ended.append(EndedRequest(float(number), "", 1.0, f"{number}", "quiet" if number == 40 else "busy", 1, 1, 0.5))
    told = describe_ended(ended, 100.0)
    assert [each["name"] for each in told] == [*(f"{number}" for number in range(95, 64, -1)), "40"]
    assert told[0]["ago_s"] == 5.0


# -- streams ------------------------------------------------------------------------------------------------------------


async def test_an_answer_streams_and_its_slot_is_released_after_its_first_step(engine: Serve) -> None:
    async with engine(gate := Gate(Counting())) as it:
        stream = it.client.generate(question(3))
        gate.let(1)
        first = await anext(stream)
        assert (first.text, first.token_ids, first.finish_reason) == ("1 ", [1], None)
        assert it.ring.statistics().slots_in_use == 0, "decoding reads no media"
        assert it.client.ring.statistics().slots_submitted == 0
        gate.let()
        rest = [output async for output in stream]
        assert [output.text for output in rest] == ["2 ", "3 "]
        assert (rest[-1].finish_reason, rest[-1].completion_tokens) == ("length", 3)
        assert it.core.metrics.generated_tokens == 3
        await until(lambda: executor_of(it.core).forgotten == [1])


async def test_tokens_of_a_text_are_not_generated_ones(engine: Serve) -> None:
    async with engine(Counting()) as it:
        await generate(it.client, GenerateRequest(prompt="a text", sampling=SamplingParams(max_tokens=3), tokenize=True))
        assert (it.core.metrics.generated_tokens, it.core.metrics.finished_requests) == (0, 1)
        assert not any([*it.core.times.prefill.counts, *it.core.times.decode.counts])


async def test_an_executor_may_keep_the_inputs_for_further_steps(engine: Serve) -> None:
    had_payload: list[bool] = []

    def compute(batch: Sequence[StepInput]) -> list[Output]:
        had_payload.append(batch[0].payload is not None)
        if len(had_payload) < 3:
            return [StepOutput(finished=False, keep_inputs=len(had_payload) < 2)]
        return [StepOutput(GenerateReply("done", [1], 1, 1, "stop"))]

    async with engine(compute) as it:
        assert await generate(it.client, question()) == "done"
        assert had_payload == [True, True, False]


async def test_streams_and_embeddings_share_steps(engine: Serve) -> None:
    counting = Counting()
    async with engine(Gate(counting)) as it:
        await it.send(question(5), question(9), question(2), 4)
        assert await it.finish() == ["1 2 3 4 5 ", "1 2 3 4 5 6 7 8 9 ", "1 2 ", [4.0]]
        assert max(map(len, counting.batches)) >= 3


# -- failures -----------------------------------------------------------------------------------------------------------


@for_each(("counts", "message"), [([3], "are 3, where 2 are"), ([1], "are 1, where 2 are"), ([1, 2, 9], "are 3, where 2 are")])
async def test_too_many_or_too_few_embeddings_fail_their_request(engine: Serve, counts: list[int], message: str) -> None:
    left = list(counts)

    def compute(batch: Sequence[StepInput]) -> list[Output]:
        reply = EncodeReply(torch.ones(left.pop(0), 4))
        return [StepOutput(reply, finished=not left, keep_inputs=bool(left)) for _ in batch]

    async with engine(compute) as it:
        with pytest.raises(shmring.RemoteError, match=f"the executor's embeddings {message} expected") as raised:
            _ = [output async for output in it.client.encode(EncodeRequest([Text("a"), Text("b")]))]
        assert raised.value.type_name == "RuntimeError"
        assert (it.core.metrics.failed_requests, it.core.metrics.finished_requests) == (1, 0)


async def test_lines_about_a_step_and_a_request_name_them(engine: Serve) -> None:
    named: list[tuple[str, str]] = []

    class Noting(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            named.append((str(concerned.get()), record.getMessage().splitlines()[0]))

    def fail(batch: Sequence[StepInput]) -> Sequence[Output]:
        if any(value_of(part) == 1 for part in batch):
            raise ArithmeticError
        return means(batch)

    handler = Noting()
    logging.getLogger("shmring.engine.core").addHandler(handler)
    try:
        async with engine(Gate(fail)) as it:
            for name, value in (("first", 5), ("request-0", 0), ("request-1", 1)):
                await it.send(value, request_id=name)
            await it.finish()
    finally:
        logging.getLogger("shmring.engine.core").removeHandler(handler)
    assert named == [
        ("request-0, request-1", "the executor failed a step of 2"),
        ("request-1", "the executor failed a step of 1"),
    ]


async def test_of_a_step_that_raises_only_the_requests_at_fault_fail(engine: Serve) -> None:
    """So does a request that the executor refuses."""

    def compute(batch: Sequence[StepInput]) -> Sequence[Output]:
        if any(value_of(part) == 13 for part in batch):
            raise RuntimeError("unlucky")
        return [ValueError("no picture") if value_of(part) == 14 else mean(part) for part in batch]

    async with engine(Gate(compute)) as it:
        await it.send(0, 1, 13, 2, 14, 13, 3)
        answers = [str(answer) if isinstance(answer, shmring.RemoteError) else answer for answer in await it.finish()]
        bad, refused = "RuntimeError: unlucky", "ValueError: no picture"
        assert answers == [[0.0], [1.0], bad, [2.0], refused, bad, [3.0]]
        assert (await encode(it.client, request_of(4))).tolist() == [[4.0]]
        assert it.core.metrics.failed_requests == 3


@pytest.mark.parametrize(
    "broken", ["raises", "answers too few", "answers too much for the reserve", "answers what can't travel"]
)
async def test_a_step_that_goes_wrong_fails_its_request_and_the_engine_goes_on(engine: Serve, broken: str) -> None:
    def compute(batch: Sequence[StepInput]) -> Sequence[Output]:
        if value_of(batch[0]) == 0:
            return means(batch)
        match broken:
            case "raises":
                raise RuntimeError("out of memory")
            case "answers too few":
                return []
            case "answers what can't travel":
                return [StepOutput(object())]  # type: ignore[arg-type]
        return [StepOutput(EncodeReply(torch.zeros(1, 1 << 20)))]

    async with engine(compute) as it:
        with pytest.raises(shmring.RemoteError):
            await encode(it.client, request_of(1))
        assert (await encode(it.client, request_of(0))).tolist() == [[0.0]]
        gc.collect()


async def test_an_executors_small_mistakes_fail_requests_and_not_the_engine(engine: Serve) -> None:
    answers: list[Any] = [None, [None], ["text"], [StepOutput(GenerateReply("x", None, 1, 1, "stop"))], iter(())]  # type: ignore[arg-type]

    def compute(batch: Sequence[StepInput]) -> Sequence[Output]:
        return answers.pop() if answers else means(batch)  # type: ignore[no-any-return]

    async with engine(compute) as it:
        executor_of(it.core).forget = lambda request_id: {}[request_id]  # type: ignore[method-assign]
        for _ in range(5):
            with pytest.raises(shmring.RemoteError, match=r"TypeError|RuntimeError"):
                await encode(it.client, request_of(1))
        assert (await encode(it.client, request_of(4))).tolist() == [[4.0]]
        await it.client.check_health()


async def test_an_executors_error_keeps_no_views(engine: Serve) -> None:
    died: list[weakref.ref[torch.Tensor]] = []

    def compute(batch: Sequence[StepInput]) -> list[Output]:
        pixels = batch[0].payload.inputs[0].pixels  # type: ignore[union-attr]
        died.append(weakref.ref(pixels))
        raise RuntimeError("its traceback's frames hold pixels")

    async with engine(compute) as it:
        gc.disable()
        try:
            with pytest.raises(shmring.RemoteError):
                await encode(it.client, request_of(1))
            await until(lambda: it.ring.statistics().slots_in_use == 0)
            assert died[0]() is None
        finally:
            gc.enable()


async def test_a_payload_of_another_type_is_refused_before_it_reaches_the_executor(engine: Serve) -> None:
    counting = Counting()
    async with engine(counting) as it:
        with pytest.raises(shmring.RemoteError, match="ValidationError"):
            await it.client.ring.request({"type": "encode", "inputs": 3})
        with pytest.raises(shmring.RemoteError, match=r"ValueError: messages\[0\] names medium 5"):
            await generate(it.client, GenerateRequest([ChatMessage("user", [MediumPart(5)])]))
        assert (counting.batches, it.core.metrics.refused_requests) == ([], 1)


@pytest.mark.parametrize("death", [ExecutorDeadError("the device is lost"), SystemExit("gone"), KeyboardInterrupt()])
async def test_an_executor_that_dies_ends_the_engine_and_all_requests_get_the_reason(
    socket_dir: Path, death: BaseException
) -> None:
    first_step = threading.Event()

    def compute(batch: Sequence[StepInput]) -> Sequence[Output]:
        assert first_step.wait(10)
        raise death

    core = await EngineCore.create("core", CallbackExecutor(compute), slab_nbytes="16MiB", socket_dir=str(socket_dir))
    client = await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB")
    it = Engine(core, client, None)

    async def run_until_dead() -> None:
        async with core:
            running = asyncio.create_task(core.run())
            await it.send(1, 2)
            first_step.set()
            await running

    with pytest.raises(ExecutorDeadError) as caught:
        await run_until_dead()
    assert (str(death) or type(death).__name__) in str(caught.value)
    for task in it.sent:
        with pytest.raises(shmring.ShmringError, match=r"has died|ExecutorDeadError"):
            await task
    await until(lambda: client.errored)
    assert "the engine has died" in str(client.dead_error)
    with pytest.raises(shmring.EngineDeadError, match="the engine has died"):
        await client.check_health()
    await client.close()


# -- aborts and deadlines -------------------------------------------------------------------------------------------------


async def test_a_request_aborted_in_its_step_keeps_its_slot_until_the_step_ends(engine: Serve) -> None:
    async with engine(gate := Gate()) as it:
        (await it.send(1)).cancel()
        await until(lambda: it.ring.statistics().aborted == 1)
        assert it.ring.statistics().slots_claimed == 1
        gate.let()
        await until(lambda: it.ring.statistics().slots_in_use == 0)


async def test_a_request_aborted_before_its_step_is_gone_at_once(engine: Serve) -> None:
    async with engine(gate := Gate(), max_num_seqs=1) as it:
        waiting = await it.send(1, 2)
        assert it.ring.statistics().slots_in_use == 2
        waiting.cancel()
        await until(lambda: it.ring.statistics().slots_in_use == 1)
        assert it.scheduler.waiting == 0
        await it.finish()
        assert gate.seen == [1]


async def test_a_stream_that_is_left_ends_at_the_next_step_and_is_forgotten(engine: Serve) -> None:
    async with engine(gate := Gate(Counting())) as it:
        stream = it.client.generate(question(1000))
        gate.let(2)
        assert (await anext(stream)).text == "1 "
        await stream.aclose()
        gate.let()
        await until(lambda: executor_of(it.core).forgotten == [1])
        assert it.scheduler.running == 0
        assert it.core.metrics.steps < 1000


async def test_abort_by_name_ends_the_request_for_its_caller(engine: Serve) -> None:
    async with engine(Gate()) as it:
        answer = await it.send(1, request_id="mine")
        await it.client.abort(["mine", "nobody's"])
        with pytest.raises(shmring.AbortedError):
            await answer


async def test_a_waiting_requests_deadline_ends_it_at_once(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1) as it:
        await it.send(1)
        with pytest.raises(TimeoutError, match="deadline has passed in the engine"):
            await encode(it.client, request_of(2, deadline=time.monotonic() + 0.02))
        assert it.ring.statistics().slots_in_use == 1
        assert await it.finish() == [[1.0]]
        assert it.core.metrics.timed_out_requests == 1


async def test_a_running_requests_deadline_ends_it_between_two_steps(engine: Serve) -> None:
    async with engine(gate := Gate(Counting())) as it:
        answer = await it.send(question(1000, deadline=time.monotonic() + 0.02))
        await until(lambda: it.core.metrics.timed_out_requests)
        assert it.ring.statistics().slots_claimed == 1, "a step is reading it"
        gate.let()
        with pytest.raises(TimeoutError, match="deadline has passed in the engine"):
            await answer
        await until(lambda: executor_of(it.core).forgotten == [1])


async def test_the_deadline_of_an_answer_that_waits_for_its_reader_ends_it_and_frees_its_place_in_line(engine: Serve) -> None:
    def compute(batch: Sequence[StepInput]) -> list[Output]:
        return [StepOutput(EncodeReply(torch.full((1, 10_000), float(value_of(part))))) for part in batch]

    async with engine(compute, options={"reply_nbytes": 65536}) as it:
        shell, client_id = it.ring._shell, it.client.ring.client_id
        blocking = shell._book.acquire_reply(client_id, 40_000)  # of a reserve that has no room for two
        assert blocking is not None
        with pytest.raises(TimeoutError, match="deadline has passed in the engine"):
            await encode(it.client, request_of(2, deadline=time.monotonic() + 0.05))
        waiting = asyncio.create_task(encode(it.client, request_of(3)))
        await until(lambda: it.ring.statistics().replies_waiting == 1)
        shell.carry_out(shell._book.discard_reply(client_id, blocking.generation))
        assert (await waiting)[0, 0] == 3
        assert it.ring.statistics().replies_waiting == 0
        await until(lambda: not it.core._flushing)


async def test_a_callers_timeout_is_the_engines_deadline(engine: Serve) -> None:
    async with engine(Gate(), max_num_seqs=1) as it:
        await it.send(1)
        waiting = asyncio.create_task(encode(it.client, request_of(2), timeout=5000))
        await until(lambda: it.scheduler.waiting == 1)
        [request] = it.scheduler.line()
        assert 4900 < request.deadline - time.monotonic() < 5000
        await it.finish()
        await waiting
        assert request.timer.cancelled()


# -- pausing ----------------------------------------------------------------------------------------------------------------


async def test_paused_it_lets_what_runs_finish_and_what_comes_wait(engine: Serve) -> None:
    async with engine(gate := Gate(Counting())) as it:
        running = await it.send(question(5))
        pausing = asyncio.create_task(it.client.pause_generation(wait_for_inflight_requests=True))
        await until(lambda: it.core._paused)
        waiting = await it.send(7)
        assert not pausing.done()
        gate.let()
        await pausing
        assert await running == "1 2 3 4 5 "
        assert await it.client.is_paused()
        await it.client.check_health()
        assert (waiting.done(), it.scheduler.waiting) == (False, 1)
        await it.client.resume_generation()
        assert (await waiting).tolist() == [[7.0]]
        assert not await it.client.is_paused()


class OneByOne:
    """Begins as many answers as there is room for, and ends one of each request in a step."""

    def __init__(self) -> None:
        self.room: dict[int, list[int | None]] = {}
        self.go_on = threading.Semaphore(0)

    def __call__(self, batch: Sequence[StepInput]) -> list[Output]:
        self.go_on.acquire()
        return [self.advance(part) for part in batch]

    def advance(self, part: StepInput) -> StepOutput:
        rooms = self.room.setdefault(part.request_id, [])
        rooms.append(part.answers)
        if part.answers is None or part.answers < len(rooms):
            rooms.pop()
            return StepOutput(None, finished=False)
        reply = GenerateReply("x", [1], 1, 1, "stop", index=len(rooms) - 1)
        return StepOutput(reply, finished=len(rooms) == 3)


@pytest.mark.parametrize("paused", [False, True])
async def test_the_answers_of_a_request_take_places_as_they_become_free(engine: Serve, paused: bool) -> None:
    executor = OneByOne()
    async with engine(executor, max_num_seqs=3) as it:
        await it.send(*[GenerateRequest([ChatMessage("user", [])], sampling=SamplingParams(n=3)) for _ in range(3)])
        executor.go_on.release()
        await until(lambda: it.core.metrics.steps == 2)
        if paused:
            pausing = asyncio.create_task(it.client.pause_generation(wait_for_inflight_requests=True))
            await until(lambda: it.core._paused)
        executor.go_on.release(100)
        if paused:
            await pausing
            await it.client.resume_generation()
        assert await it.finish() == ["xxx"] * 3
        assert executor.room[1] == [3, 3, 3], "alone, it had all places at once"
        first = [rooms[0] for number, rooms in executor.room.items() if number > 1]
        assert first == ([1, 3] if paused else [1, 1]), "they did not wait for three places"
        assert (it.scheduler.running, it.scheduler._num_seqs) == (0, 0)


async def test_paused_at_once_it_gives_up_what_runs(engine: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the executor forgets it before another method of its own is called."""
    monkeypatch.setattr(CallbackExecutor, "add", lambda self: list(self.forgotten))
    async with engine(gate := Gate(Counting())) as it:
        running = await it.send(question(100_000))
        gate.let(3)
        pausing = asyncio.create_task(it.client.pause_generation())
        await until(lambda: it.core._paused)
        gate.let()
        await pausing
        assert await it.client.collective_rpc("add") == [[1]]
        with pytest.raises(shmring.RemoteError, match="PausedError"):
            await running
        assert it.scheduler.running == 0
        await it.client.pause_generation()
        await it.client.resume_generation()
        assert await generate(it.client, question(2)) == "1 2 "


async def test_a_pause_that_is_taken_back_ends_for_its_caller(engine: Serve) -> None:
    async with engine(gate := Gate(Counting())) as it:
        running = await it.send(question(3))
        pausing = asyncio.create_task(it.client.pause_generation(wait_for_inflight_requests=True))
        await until(lambda: it.core._paused)
        await it.client.resume_generation()
        gate.let()
        await pausing
        assert await running == "1 2 3 "


# -- control ----------------------------------------------------------------------------------------------------------------


async def test_methods_of_the_executor_can_be_called(engine: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine(means) as it:
        assert await it.client.collective_rpc("add", args=(2, 3), kwargs={"times": 4}) == [{"sum": 20}]
        await it.client.reset_mm_cache()
        assert not executor_of(it.core).cached
        with pytest.raises(shmring.RemoteError, match="ValueError: not today"):
            await it.client.collective_rpc("refuse")
        for name in ("_secret", "execute", "close", "forget", "describe", "nothing", "forgotten", "__init__"):
            with pytest.raises(shmring.RemoteError, match="has no method"):
                await it.client.collective_rpc(name)
        monkeypatch.delattr(CallbackExecutor, "reset_mm_cache")
        await it.client.reset_mm_cache()  # there is nothing to reset


@for_each("death", [StopIteration(), SystemExit("no")])
async def test_what_a_called_method_raises_is_always_told(
    engine: Serve, monkeypatch: pytest.MonkeyPatch, death: BaseException
) -> None:
    def die(self: CallbackExecutor) -> None:
        raise death

    monkeypatch.setattr(CallbackExecutor, "refuse", die)
    async with engine(means) as it:
        with pytest.raises(shmring.RemoteError, match=type(death).__name__):
            await it.client.collective_rpc("refuse", timeout=10)
        await it.client.check_health()


async def test_a_call_waits_for_the_running_step(engine: Serve) -> None:
    async with engine(Gate()) as it:
        await it.send(1)
        with pytest.raises(TimeoutError):
            await it.client.collective_rpc("add", timeout=0.02, args=(1,))
        assert await it.finish() == [[1.0]]
        assert await it.client.collective_rpc("add", args=(1,)) == [{"sum": 1}]


async def test_a_call_that_takes_too_long_is_ill_health(engine: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    proceed = threading.Event()
    monkeypatch.setattr(CallbackExecutor, "refuse", lambda self: proceed.wait(10))
    async with engine(means, options={"step_timeout_s": 0.01}) as it:
        calling = asyncio.create_task(it.client.collective_rpc("refuse"))
        await until(lambda: it.core._busy is not None and time.monotonic() - it.core._busy[1] > 0.02)
        with pytest.raises(shmring.RemoteError, match="refuse has been running for"):
            await it.client.check_health()
        proceed.set()
        assert await calling == [True]
        await it.client.check_health()


async def test_a_step_that_takes_too_long_is_ill_health(engine: Serve) -> None:
    async with engine(Gate(), options={"step_timeout_s": 0.01}) as it:
        await it.send(1)
        await until(lambda: it.core._busy is not None and time.monotonic() - it.core._busy[1] > 0.02)
        with pytest.raises(shmring.RemoteError, match="a step has been running for"):
            await it.client.check_health()
        await it.finish()
        await it.client.check_health()


async def test_it_is_profiled_into_a_trace(engine: Serve, tmp_path: Path) -> None:
    def compute(batch: Sequence[StepInput]) -> Sequence[Output]:
        torch.ones(10).cumsum(0)
        return means(batch)

    async with engine(compute, options={"profiler_dir": str(tmp_path / "traces")}) as it:
        with pytest.raises(shmring.RemoteError, match="no profile is being recorded"):
            await it.client.stop_profile()
        await it.client.start_profile()
        with pytest.raises(shmring.RemoteError, match="stop it first"):
            await it.client.start_profile()
        await encode(it.client, request_of(1))
        trace = json.loads(Path(await it.client.stop_profile()).read_text())
        assert any("cumsum" in event.get("name", "") for event in trace["traceEvents"])


async def test_it_says_what_it_is_and_what_it_has_done(engine: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with engine(means) as it:
        client = it.client
        assert await client.describe() == ModelDescription("callback", "callback", ["encode", "generate"], InputSpec(), 8)
        assert await client.get_supported_tasks() == ("encode", "generate")
        await encode(client, request_of(1))
        statistics = await client.statistics()
        assert (statistics["steps"], statistics["ring_submitted"]) == (1, 1)
        caplog.set_level("INFO", logger="shmring.engine.core")
        await client.do_log_stats()
        assert "statistics: steps 1" in caplog.text
        with pytest.raises(shmring.RemoteError, match="--profiler-dir"):
            await client.start_profile()
        assert (client.is_running, client.errored, client.is_stopped) == (True, False, False)
    assert client.is_stopped


# -- the end ----------------------------------------------------------------------------------------------------------------


async def test_closing_waits_for_the_step_and_closes_the_executor(socket_dir: Path) -> None:
    proceed = threading.Event()
    ended = threading.Event()

    def compute(batch: Sequence[StepInput]) -> list[Output]:
        assert proceed.wait(10)
        mean(batch[0])  # reads the slab after the ring has closed
        ended.set()
        return means(batch)

    executor = CallbackExecutor(compute)
    core = await EngineCore.create("core", executor, slab_nbytes="16MiB", socket_dir=str(socket_dir))
    running = asyncio.create_task(core.run())
    client = await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB")
    answer = await Engine(core, client, None).send(1)
    closing = asyncio.create_task(core.close())
    with pytest.raises(shmring.EngineDeadError):
        await answer
    with pytest.raises(shmring.EngineDeadError):
        await client.check_health()
    assert not closing.done()
    proceed.set()
    await closing
    await running
    assert (ended.is_set(), executor.closed) == (True, True)
    await client.close()


async def test_cancelling_it_waits_for_the_step_and_fails_what_runs(socket_dir: Path) -> None:
    gate = Gate()
    core = await EngineCore.create("core", CallbackExecutor(gate), slab_nbytes="16MiB", socket_dir=str(socket_dir))
    async with core, await EngineClient.connect("core", socket_dir=str(socket_dir), inline_nbytes="1KiB") as client:
        running = asyncio.create_task(core.run())
        it = Engine(core, client, gate)
        await it.send(1, 2)
        running.cancel()
        await asyncio.sleep(0)
        assert not running.done()
        gate.let()
        with pytest.raises(asyncio.CancelledError):
            await running
        for task in it.sent:
            with pytest.raises(shmring.RemoteError, match="the engine is stopping"):
                await asyncio.wait_for(task, 10)
        with pytest.raises(shmring.RemoteError, match="the engine has ended"):
            await client.check_health()
