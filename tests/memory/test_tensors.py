"""What may cross: tensors that are their own data and have all of it. Anything else is named by its path, at every end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

import shmring
from shmring import Client, Ring
from shmring.core.compiled import Packed
from shmring.memory.tensors import make_packer
from tests.tables import for_each
from tests.waiting import eventually

NBYTES = 80_000  # of a tensor that travels in a slot


class Tagged(torch.Tensor):
    """A subclass as people write them: one tensor, and something beside it."""


def freed(tensor: torch.Tensor, nbytes: int = 0) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(3)


def sharded() -> torch.Tensor:
    """A DTensor, without the processes that it would take."""
    import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
    from torch.distributed.tensor import DeviceMesh, DTensor, Replicate

    torch.distributed.init_process_group("fake", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        return DTensor.from_local(torch.ones(3), DeviceMesh("cpu", [0]), [Replicate()], run_check=False)
    finally:
        torch.distributed.destroy_process_group()


def within(transform: Callable[..., Any], *arguments: Any) -> torch.Tensor:
    """What a function sees inside a transformation."""
    seen: list[torch.Tensor] = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        with pytest.raises(TypeError, match=r"^payload\.mask can't be sent: "):
            pack({"mask": tensor})
        return tensor.sum()

    transform(look)(*arguments)
    return seen[0]


def pack(payload: object) -> Packed:
    return make_packer(8, 1 << 20).pack(payload, 8192, 1 << 16)


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two tensors": (lambda: TwoTensor(torch.ones(3), torch.zeros(3)), "send the tensors that it is made of"),
    "masked": (
        lambda: torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True])),
        "send the tensors that it is made of",
    ),
    "fake": (fake, r"FakeTensor may be more"),
    "sharded": (sharded, r"DTensor may be more"),
    "functional": (lambda: torch._to_functional_tensor(torch.ones(3)), "no memory of its own"),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "send the tensors that it is made of",
    ),
    "uninitialised": (torch.nn.parameter.UninitializedParameter, "UninitializedParameter may be more"),
    "a subclass": (lambda: torch.ones(3).as_subclass(Tagged), r"tensor\.as_subclass\(torch\.Tensor\)"),
    "a parameter of a subclass": (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Tagged)), r"as_subclass"),
    "freed": (lambda: freed(torch.ones(5000)), "its storage of 0 bytes is smaller"),
    "a freed parameter": (lambda: freed(torch.nn.Parameter(torch.ones(5000))), "its storage of 0 bytes is smaller"),
    "half freed": (lambda: freed(torch.ones(5000), 10_000), "its storage of 10000 bytes is smaller"),
    "freed but for less than an item": (lambda: freed(torch.ones(5000), 19_999), "its storage of 19999 bytes is smaller"),
    "freed where it begins late": (lambda: freed(torch.ones(10)[6:], 36), r"shape \(4,\) needs, 40"),
    "freed under its strides": (lambda: freed(torch.ones(10, 10)[:, 3:5], 376), r"shape \(10, 2\) needs, 380"),
    "freed with a shape of many dimensions": (lambda: freed(torch.ones([1] * 20 + [8])), "its storage of 0 bytes"),
    "freed and of a rare dtype": (lambda: freed(torch.ones(8, dtype=torch.float8_e8m0fnu)), "its storage of 0 bytes"),
    "larger than its bytes can be counted": (lambda: torch.ones(1).expand(2**62 + 1), "larger than any memory"),
}


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@for_each("kind", REFUSED)
def test_what_is_not_its_own_data_or_has_not_all_of_it_is_refused_with_its_path(kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(TypeError, match=rf"^payload\.images\[1\]\.mask can't be sent: .*{reason}"):
        pack({"images": [torch.ones(2), {"mask": make()}]})


@for_each(
    ("transform", "arguments"),
    [
        (torch.vmap, (torch.ones(3, 2),)),
        (torch.func.grad, (torch.ones(3),)),
        (torch.func.functionalize, (torch.ones(3),)),
        (lambda look: lambda x: torch.func.jvp(look, (x,), (x,)), (torch.ones(3),)),
    ],
    ids=["vmap", "grad", "functionalize", "jvp"],
)
def test_what_stands_for_a_tensor_inside_a_transformation_is_refused(transform: Any, arguments: tuple[Any, ...]) -> None:
    assert type(within(transform, *arguments)) is torch.Tensor


@for_each(
    "tensor",
    [
        torch.nn.Parameter(torch.arange(3.0)),
        torch.nn.Buffer(torch.arange(3.0)),
        torch.arange(5.0)[1:4],
        torch.arange(3.0).expand(2, 3),
        freed(torch.arange(9.0)[:3], 12),
        freed(torch.ones(0, 3)),
        torch.arange(3.0).requires_grad_() * 2,
        torch.ones(3).as_subclass(Tagged).as_subclass(torch.Tensor),
    ],
    ids=["parameter", "buffer", "slice", "expanded", "freed behind it", "empty", "of a graph", "made plain"],
)
def test_what_is_its_own_data_and_has_all_of_it_is_sent(tensor: torch.Tensor) -> None:
    packed = pack({"x": tensor})
    assert packed.copied_nbytes == tensor.nbytes


def test_where_torch_says_nothing_in_c_python_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmring.memory.tensors._tensor_memory", lambda: None)
    assert pack([torch.ones(3), torch.nn.Parameter(torch.ones(2, 3).T)]).copied_nbytes == 36
    for make, reason in (REFUSED["freed"], REFUSED["freed under its strides"], REFUSED["two tensors"]):
        with pytest.raises(TypeError, match=reason):
            pack(make())


@for_each("tensor", [torch.ones(50), torch.ones(50, 50).T], ids=["contiguous", "strided"])
def test_a_tensor_that_is_freed_after_it_was_packed_is_not_copied(tensor: torch.Tensor) -> None:
    packed = make_packer(8, 1 << 20).pack(tensor, 0, 1 << 16)
    target = torch.zeros(tensor.nbytes, dtype=torch.uint8)
    freed(tensor, 8)
    with pytest.raises(TypeError, match=r"was freed or replaced while it waited|its storage of 8 bytes is smaller"):
        packed.copy_into(target.data_ptr())
    assert not target.any()


def test_a_tensor_whose_memory_was_replaced_after_it_was_packed_is_not_copied() -> None:
    tensor = torch.ones(50)
    packed = make_packer(8, 1 << 20).pack(tensor, 0, 1 << 16)
    tensor.data = torch.zeros(50)
    target = torch.zeros(200, dtype=torch.uint8)
    with pytest.raises(TypeError, match="was freed or replaced"):
        packed.copy_into(target.data_ptr())


# -- at every end ------------------------------------------------------------------------------------------------------------

PATH = r"^payload\.images\[0\]\.mask can't be sent: its storage of 16 bytes is smaller"


def half(inline: bool) -> dict[str, Any]:
    """A payload with a tensor whose memory was freed but for a little."""
    return {"images": [{"mask": freed(torch.ones(64 if inline else NBYTES // 4), 16)}]}


async def done(call: Callable[[object], Any], payload: object) -> None:
    """Awaits a call, unless it is one without waiting."""
    result = call(payload)
    if hasattr(result, "__await__"):
        await result


@pytest.mark.parametrize("inline", [True, False])
async def test_a_client_sends_nothing_of_a_freed_tensor(ring: Ring, client: Client, inline: bool) -> None:
    for call in (client.submit, client.submit_nowait, client.request):
        with pytest.raises(TypeError, match=PATH):
            await done(call, half(inline))
    with pytest.raises(TypeError, match=PATH):
        async for _ in client.stream(half(inline)):
            pass
    assert client.statistics().in_flight == client.statistics().slots_in_use == ring.statistics().waiting == 0


@pytest.mark.parametrize("inline", [True, False])
async def test_an_engine_sends_nothing_of_a_freed_tensor(ring: Ring, client: Client, inline: bool) -> None:
    submission = await client.submit("x")
    with await ring.claim() as claim:
        for call in (claim.reply, claim.reply_nowait, claim.done):
            with pytest.raises(TypeError, match=PATH):
                await done(call, half(inline))
        await claim.done("it goes on")
    assert await submission.result() == "it goes on"
    assert ring.statistics().reply_free_nbytes == ring.statistics().reply_nbytes


@pytest.mark.ring(broadcast_nbytes="1MiB")
async def test_neither_engine_nor_worker_send_anything_of_a_freed_tensor(ring: Ring, socket_dir: Path) -> None:
    async with shmring.join("test", 0, socket_dir=str(socket_dir)) as worker:
        for inline in (True, False):
            for call in (ring.broadcast, ring.gather):
                with pytest.raises(TypeError, match=PATH):
                    await call(half(inline))
            gathering = asyncio.ensure_future(ring.gather("x"))
            with await worker.receive() as message:
                with pytest.raises(TypeError, match=PATH):
                    await message.reply(half(inline))
                await message.reply("it goes on")
            assert await gathering == ["it goes on"]
        assert ring.statistics().broadcast_free_nbytes == ring.statistics().broadcast_nbytes


@pytest.mark.ring(slab_nbytes="1MiB")
async def test_a_tensor_that_is_freed_while_it_waits_for_space_is_not_sent(client: Client) -> None:
    tensor = torch.ones(150_000)
    slot = await client.slot(600_000)
    waiting = asyncio.ensure_future(client.submit({"weights": tensor}))
    await eventually(lambda: client.statistics().waiting == 1)
    freed(tensor)
    slot.close()
    with pytest.raises(TypeError, match="its memory was freed or replaced while it waited"):
        await waiting
    assert client.statistics().in_flight == client.statistics().slots_in_use == 0


async def test_a_tensor_of_a_slot_whose_data_a_caller_has_set_is_looked_at_anew(serve: Any, connect: Any) -> None:
    async def echo(claim: shmring.Claim) -> None:
        await claim.done({name: tensor.clone() for name, tensor in claim.payload.items()})

    await serve(echo)
    client = await connect()
    async with client.slot(NBYTES) as slot:
        tensor = slot.tensor((4,), torch.float32)
        with contextlib.suppress(RuntimeError):  # torch does not resize what is not its own
            tensor.untyped_storage().resize_(0)
        tensor.fill_(1)
        tensor.data = torch._neg_view(torch.arange(4.0))
        assert torch.equal((await client.request({"x": tensor}))["x"], -torch.arange(4.0))
        tensor.data = freed(torch.ones(4), 4)
        with pytest.raises(TypeError, match=r"payload\.x can't be sent: its storage of 4 bytes"):
            await client.request({"x": tensor})
