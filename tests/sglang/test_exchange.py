"""The plug-in's ends with a real ring between them, and in place of SGLang a few lines: its class, and its way to call it."""

from __future__ import annotations

import asyncio
import gc
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shmring.integrations.sglang.ends import Ends
from shmring.integrations.sglang.pointer import replacement
from shmring.integrations.sglang.scheduler import Owner, Sharer
from shmring.integrations.sglang.settings import Settings
from shmring.integrations.sglang.tokenizer import Sender

MB = 1 << 20


class Theirs:
    """As SGLang's ``ShmPointerMMData``, which makes a segment; here, that is a fault."""

    def __init__(self, tensor: torch.Tensor, precomputed_hash: int | None = None) -> None:
        raise AssertionError("a segment would be made")

    def __getstate__(self) -> dict[str, Any]:
        return {"shm_name": self.shm_name, "shape": self.shape, "dtype": self.dtype, "precomputed_hash": self.precomputed_hash}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.shm_name = state["shm_name"]

    def materialize(self) -> Any:
        return f"the segment {self.shm_name}"

    def close_and_unlink(self) -> None:
        pass

    def __del__(self) -> None:
        assert self._shm_handle is None  # type: ignore[attr-defined]


class Process:
    """A process of SGLang: it has a class of pointers."""

    def __init__(self, settings: Settings) -> None:
        self.ends = Ends(settings)
        self.pointer = replacement(Theirs, self.ends)

    def decode(self, message: bytes) -> Any:
        pointer = self.pointer.__new__(self.pointer)
        pointer.__setstate__(state_in(message))
        return pointer


def encode(pointer: Any) -> bytes:
    return encoded(pointer.__getstate__())


def encoded(state: dict[str, Any]) -> bytes:
    """As SGLang's encoders, which know of torch what is in such a state."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def state_in(message: bytes) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(io.BytesIO(message))
    return state


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(params=[False, True], ids=["in place", "copied"])
def settings(request: pytest.FixtureRequest) -> Settings:
    return Settings(slab_nbytes=64 * MB, name="test", copies=request.param)


def sender_of(settings: Settings, schedulers: int = 1, *, chooses: bool = True) -> Sender:
    return Sender(settings, schedulers=schedulers, tokenizers=1, chooses=chooses, public=False)


@pytest.fixture
async def tokenizer(settings: Settings, scheduler: Process) -> AsyncIterator[Process]:
    process = Process(settings)
    process.ends.sender = sender = sender_of(settings)
    sender.connect()
    await until(lambda: sender.is_connected(0))
    yield process
    await sender.close()


@pytest.fixture
def scheduler(settings: Settings) -> Iterator[Process]:
    process = Process(settings)
    process.ends.owner = owner = Owner(settings, 0, 0)
    yield process
    owner.close()


def picture(nbytes: int = 8 * MB) -> torch.Tensor:
    return torch.randint(0, 255, (nbytes // 4, 4), dtype=torch.uint8)


def in_use(scheduler: Process) -> int:
    assert scheduler.ends.owner is not None
    slots: int = scheduler.ends.owner.report()["slots_in_use"]
    return slots


@pytest.mark.parametrize("nbytes", [64, 100_000, 8 * MB])
async def test_a_tensor_comes_as_it_was(tokenizer: Process, scheduler: Process, nbytes: int) -> None:
    sent = picture(nbytes)
    pointer = scheduler.decode(encode(tokenizer.pointer(sent, precomputed_hash=7)))
    assert (pointer.precomputed_hash, pointer.shape, pointer.dtype) == (7, sent.shape, sent.dtype)
    assert torch.equal(pointer.tensor, sent)
    tensor = pointer.materialize()
    assert torch.equal(tensor, sent)
    tensor.add_(1)  # SGLang promises that its receiver may write to it
    assert torch.equal(tensor, sent + 1)
    del tensor, pointer
    await until(lambda: in_use(scheduler) == 0)


async def test_what_is_not_contiguous_comes(tokenizer: Process, scheduler: Process) -> None:
    sent = picture(MB).t()
    assert torch.equal(scheduler.decode(encode(tokenizer.pointer(sent))).materialize(), sent)


async def test_a_controller_only_carries_a_pointer(tokenizer: Process, scheduler: Process, settings: Settings) -> None:
    sent = picture()
    carried = Process(settings).decode(encode(tokenizer.pointer(sent)))
    assert torch.equal(scheduler.decode(encode(carried)).materialize(), sent)


async def test_what_is_not_sent_is_given_up(tokenizer: Process, scheduler: Process) -> None:
    pointer = tokenizer.pointer(picture())
    await until(lambda: in_use(scheduler) == 1)
    del pointer
    await until(lambda: in_use(scheduler) == 0)


async def test_what_is_discarded_gives_its_slot_back(tokenizer: Process, scheduler: Process) -> None:
    pointer = scheduler.decode(encode(tokenizer.pointer(picture())))
    pointer.close_and_unlink()
    pointer.close_and_unlink()
    await until(lambda: in_use(scheduler) == 0)


async def test_what_is_not_there_fails_when_it_is_materialized(tokenizer: Process, scheduler: Process) -> None:
    message = encode(tokenizer.pointer(picture()))
    assert scheduler.decode(message).materialize() is not None
    pointer = scheduler.decode(message)
    with pytest.raises(RuntimeError, match=r"a tensor is not in the slab: LocalProtocolError: .*taken"):
        pointer.materialize()
    state = {**state_in(encode(tokenizer.pointer(picture()))), "shape": torch.Size([1])}
    with pytest.raises(RuntimeError, match=r"TypeError: what is there is torch.uint8 of \[2097152, 4\]"):
        scheduler.decode(encoded(state)).materialize()
    await until(lambda: in_use(scheduler) == 0)


async def test_a_request_that_came_to_the_wrong_scheduler_gets_no_tensor_of_another(
    tokenizer: Process, scheduler: Process
) -> None:
    state = state_in(encode(tokenizer.pointer(picture())))
    state["shmring"][0] += 1
    with pytest.raises(RuntimeError, match="it is in the slab of another scheduler than 0, to which its request came"):
        scheduler.decode(encoded(state)).materialize()


async def test_pointers_of_sglangs_own_class_are_read_as_those(scheduler: Process) -> None:
    """Its tokenizer in Rust makes them."""
    state = {"shm_name": "theirs", "shape": torch.Size([1]), "dtype": torch.uint8, "precomputed_hash": None}
    assert scheduler.decode(encoded(state)).materialize() == "the segment theirs"


def reasons(sender: Sender) -> dict[str, int]:
    return {reason: count for (way, reason), count in sender._traffic.tensors.items() if way == "inline"}


async def test_what_has_no_space_is_an_os_error_and_makes_no_segment(tokenizer: Process, scheduler: Process) -> None:
    assert tokenizer.ends.sender is not None
    pointers = []
    with pytest.raises(OSError, match="shmring does not carry it: space"):  # noqa: PT012 # it is the last one that does
        while True:
            pointers.append(tokenizer.pointer(picture()))
    assert len(pointers) >= 6
    with pytest.raises(OSError, match="size"):
        tokenizer.pointer(picture(65 * MB))
    assert reasons(tokenizer.ends.sender) == {"space": 1, "size": 1}
    for pointer in pointers:
        assert scheduler.decode(encode(pointer)).materialize() is not None
    await until(lambda: in_use(scheduler) == 0)
    assert tokenizer.pointer(picture()) is not None


async def test_where_no_ring_is_reached_tensors_go_inline(settings: Settings) -> None:
    process = Process(settings)
    with pytest.raises(OSError, match="does not know its way"):
        process.pointer(picture())
    process.ends.sender = sender = sender_of(settings)
    sender.connect()
    with pytest.raises(OSError, match="connecting"):
        process.pointer(picture())
    gc.collect()
    await sender.close()


async def test_when_its_scheduler_has_gone_tensors_go_inline(tokenizer: Process, scheduler: Process) -> None:
    assert scheduler.ends.owner is not None
    assert tokenizer.ends.sender is not None
    scheduler.ends.owner.close()
    await until(lambda: not tokenizer.ends.sender.is_connected(0))
    with pytest.raises(OSError, match="engine"):
        tokenizer.pointer(picture())


# -- ranks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ranks(settings: Settings) -> Iterator[list[Process]]:
    """Two ranks; the second one has joined."""
    first, second = Process(settings), Process(settings)
    first.ends.owner = owner = Owner(settings, 0, 1)
    second.ends.sharer = sharer = Sharer(settings, 0, 1)
    sharer.wait_joined()
    yield [first, second]
    sharer.close()
    owner.close()


@pytest.fixture
async def sharing(settings: Settings, ranks: list[Process]) -> AsyncIterator[Process]:
    process = Process(settings)
    process.ends.sender = sender = sender_of(settings)
    sender.connect()
    await until(lambda: sender.is_connected(0))
    yield process
    await sender.close()


@pytest.mark.parametrize("nbytes", [64, 8 * MB])
async def test_a_tensor_is_shared_with_other_ranks(sharing: Process, ranks: list[Process], nbytes: int) -> None:
    first, second = ranks
    for number in range(3):
        sent = picture(nbytes)
        pointer = first.decode(encode(sharing.pointer(sent)))
        message = encode(pointer)
        assert len(message) < 2000
        assert encode(pointer) == message  # it is shared once
        assert torch.equal(pointer.materialize(), sent)
        assert torch.equal(second.decode(message).materialize(), sent)
        assert first.ends.owner.report()["shared"] == number + 1
    await until(lambda: in_use(first) == 0)


async def test_a_broadcast_that_failed_is_passed_over(sharing: Process, ranks: list[Process]) -> None:
    first, second = ranks
    lost, sent = picture(), picture()
    encode(first.decode(encode(sharing.pointer(lost))))
    assert torch.equal(second.decode(encode(first.decode(encode(sharing.pointer(sent))))).materialize(), sent)
    await until(lambda: in_use(first) == 0)


async def test_a_rank_that_has_not_joined_gets_tensors_in_the_message(sharing: Process, ranks: list[Process]) -> None:
    first, second = ranks
    second.ends.sharer.close()
    await until(lambda: first.ends.owner.report()["ranks"] == 0)
    sent = picture()
    pointer = first.decode(encode(sharing.pointer(sent)))
    assert torch.equal(second.decode(encode(pointer)).materialize(), sent)
    assert first.ends.owner.report()["shared"] == 0


# -- several schedulers -----------------------------------------------------------------------------------------------------


def request(routed_dp_rank: int | None = None, mm_inputs: object = "a picture") -> Any:
    return SimpleNamespace(routed_dp_rank=routed_dp_rank, mm_inputs=mm_inputs)


@pytest.fixture
def schedulers(settings: Settings) -> Iterator[list[Process]]:
    processes = [Process(settings), Process(settings)]
    for place, process in enumerate(processes):
        process.ends.owner = Owner(settings, place, 0)
    yield processes
    for process in processes:
        process.ends.owner.close()


@pytest.mark.parametrize("chooses", [True, False])
async def test_requests_with_tensors_are_sent_to_schedulers_in_turn(
    settings: Settings, schedulers: list[Process], chooses: bool
) -> None:
    process = Process(settings)
    process.ends.sender = sender = sender_of(settings, 2, chooses=chooses)
    sender.connect()
    await until(lambda: sender.is_connected(0) and sender.is_connected(1))

    def where(a_request: Any) -> int | None:
        sender.direct(a_request)
        sent = picture()
        try:
            message = encode(process.pointer(sent))
        except OSError:
            return None
        assert torch.equal(schedulers[a_request.routed_dp_rank].decode(message).materialize(), sent)
        place: int = a_request.routed_dp_rank
        return place

    assert [where(request()) for _ in range(4)] == ([0, 1, 0, 1] if chooses else [None] * 4)
    assert [where(request(routed_dp_rank=1)) for _ in range(2)] == [1, 1]
    without = request(mm_inputs=None)
    sender.direct(without)
    assert without.routed_dp_rank is None
    schedulers[0].ends.owner.close()
    await until(lambda: not sender.is_connected(0))
    assert where(request()) == (1 if chooses else None)
    await sender.close()
