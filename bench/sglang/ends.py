"""A program: a tokenizer and the ranks of a scheduler, each a process, with SGLang's own code for what is sent between them.

``python -m bench.sglang.ends RANKS`` runs in an environment that has SGLang, as a :class:`bench.programs.Program`. It answers
an :class:`Order` with a :class:`Measurement`.

What is SGLang's: the pointers that tensors are wrapped in (with ``SHMRING_SGLANG=1`` the plug-in replaces them, by the same
entry point and hooks as in a server), their encoding for ZMQ, the broadcast to other ranks by gloo, and the barrier before
tensors are materialized and the agreement after it. Ranks sleep until a message comes; SGLang's look for one all the time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import statistics
import sys
import tempfile
import time
import warnings
from typing import Any

import msgspec

from bench.programs import orders

#: That SGLang is started with, whatever runs it: on the CPU, with one thread, without the network.
QUIET_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
_WARM_UP = 3  # messages before anything is timed


class Order(msgspec.Struct, frozen=True):
    """What to do: send so many tensors of a size, one after the other."""

    nbytes: int
    count: int


class Measurement(msgspec.Struct, frozen=True):
    """Of the tensors of an order.

    Attributes:
        p50_ms: from a tensor in the tokenizer to copies in the memory of all ranks.
        tokenizer_ms, ranks_ms: CPU for each tensor, of the tokenizer and of all ranks together.
        inline: tensors that were sent in SGLang's message.
    """

    p50_ms: float
    tokenizer_ms: float
    ranks_ms: float
    inline: int = 0

    @property
    def cpu_ms(self) -> float:
        return self.tokenizer_ms + self.ranks_ms


def _set_up() -> Any:
    """Loads SGLang and its plug-ins; returns its module of multimodal tensors."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    import torch
    from sglang.srt.managers import mm_utils
    from sglang.srt.plugins import load_plugins

    torch.set_num_threads(1)
    load_plugins()
    return mm_utils


def _ends(features: Any) -> Any:
    """The plug-in's ends in this process; None where it is off."""
    return getattr(features.ShmPointerMMData, "ends", None)


# -- a rank of the scheduler -------------------------------------------------------------------------------------------


def _run_rank(rank: int, ranks: int, directory: str) -> None:
    features = _set_up()
    import torch
    import zmq

    if (ends := _ends(features)) is not None:
        from shmring.integrations.sglang.scheduler import Owner, Sharer

        if rank:
            ends.sharer = Sharer(ends.settings, 0, rank)
        else:
            ends.owner = Owner(ends.settings, 0, ranks - 1)
    if ranks > 1:
        torch.distributed.init_process_group("gloo", f"file://{directory}/group", rank=rank, world_size=ranks)
    context = zmq.Context()
    tensors, done = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    if not rank:
        tensors.bind(f"ipc://{directory}/tensors")
    done.connect(f"ipc://{directory}/done")
    if ends is not None and rank:
        ends.sharer.wait_joined()
    done.send(b"up")
    device = torch.ones(1, dtype=torch.uint8)
    while True:
        sent = _receive(tensors, rank, ranks)
        if isinstance(sent, dict):
            tensor = _materialize(sent["feature"], ranks)
            if device.nbytes != tensor.nbytes:
                device = torch.ones(tensor.nbytes, dtype=torch.uint8)
            device.copy_(tensor.view(torch.uint8).flatten())
            if int(device[-1]) != sent["value"]:
                raise ValueError("the tensor is another one")
            del tensor, sent
            done.send(b"done")
        else:
            done.send(msgspec.json.encode(time.process_time()))


def _receive(tensors: Any, rank: int, ranks: int) -> Any:
    """As ``SchedulerRequestReceiver.recv_requests``: rank 0 receives, and sends on to the others."""
    from sglang.srt.utils import broadcast_pyobj
    from sglang.srt.utils.msgpack_utils import ext_hook

    received = [] if rank else [msgspec.msgpack.decode(tensors.recv(), ext_hook=ext_hook)]
    return (broadcast_pyobj(received, rank) if ranks > 1 else received)[0]


def _materialize(feature: Any, ranks: int) -> Any:
    """As ``SchedulerRequestReceiver._finalize_shm_features``, which does nothing for a tensor that came in the message."""
    import torch

    if isinstance(feature, torch.Tensor):
        return feature
    if ranks > 1:
        torch.distributed.barrier()
    tensor = feature.materialize()
    if ranks > 1:
        torch.distributed.all_reduce(torch.zeros(1, dtype=torch.int32), torch.distributed.ReduceOp.MAX)
    return tensor


# -- the tokenizer -----------------------------------------------------------------------------------------------------


class _Tokenizer:
    """Sends tensors, and hears when all ranks have them."""

    def __init__(self, ranks: int, directory: str) -> None:
        self._features = _set_up()
        import zmq

        self._ranks = ranks
        context = zmq.Context()
        self._tensors, self._done = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._done.bind(f"ipc://{directory}/done")
        self._tensors.connect(f"ipc://{directory}/tensors")
        self._hear()

    async def connect(self) -> None:
        """The plug-in connects with the first request."""
        if (ends := _ends(self._features)) is not None:
            from shmring.integrations.sglang.tokenizer import Sender

            ends.sender = Sender(ends.settings, schedulers=1, tokenizers=1, chooses=True, public=False)
            ends.sender.connect()
            while not ends.sender.is_connected(0):  # noqa: ASYNC110 # it tells nobody
                await asyncio.sleep(0.01)

    async def measure(self, order: Order) -> Measurement:
        import torch

        source = torch.ones(order.nbytes, dtype=torch.uint8)
        times_s: list[float] = []
        used_s = 0.0
        inline = 0
        for number in range(_WARM_UP + order.count):
            if number == _WARM_UP:
                ranks_s = self._ranks_cpu_s()
                times_s.clear()
                used_s = 0.0
            source.fill_(number % 251)
            began_s, cpu_s = time.monotonic(), time.process_time()
            inline += not self.send(source, number % 251)
            self._hear()
            await asyncio.sleep(0)  # the event loop goes on, as a server's does
            times_s.append(time.monotonic() - began_s)
            used_s += time.process_time() - cpu_s
        ranks_s = self._ranks_cpu_s() - ranks_s
        each = 1e3 / order.count
        return Measurement(
            statistics.median(times_s) * 1e3, used_s * each, ranks_s * each, inline if _ends(self._features) else 0
        )

    def send(self, tensor: Any, value: int) -> bool:
        """Sends a tensor; returns whether it is in shared memory."""
        from sglang.srt.utils.msgpack_utils import enc_hook

        feature = self._features._wrap_shm_or_inline(tensor)
        self._tensors.send(msgspec.msgpack.encode({"feature": feature, "value": value}, enc_hook=enc_hook))
        return feature is not tensor

    def _ranks_cpu_s(self) -> float:
        self._tensors.send(msgspec.msgpack.encode("cpu"))
        return sum(msgspec.json.decode(self._done.recv(), type=float) for _ in range(self._ranks))

    def _hear(self) -> None:
        """Waits until all ranks have said that they are up, or have copied a tensor."""
        for _ in range(self._ranks):
            self._done.recv()


async def _obey(tokenizer: _Tokenizer) -> None:
    await tokenizer.connect()
    for order, answer in orders(Order):
        answer(await tokenizer.measure(order))


def main(ranks: int) -> None:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as directory:
        from shmring.integrations.environment import name_the_run
        from shmring.integrations.sglang.settings import PREFIX

        name_the_run(PREFIX, "sglang")
        start = multiprocessing.get_context("spawn")
        processes = [start.Process(target=_run_rank, args=(rank, ranks, directory), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        try:
            asyncio.run(_obey(_Tokenizer(ranks, directory)))
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.join()


if __name__ == "__main__":
    main(int(sys.argv[1]))
