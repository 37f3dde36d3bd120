"""A program: two stages of vLLM-Omni, each a process, that pass chunks on by one connector.

``python -m bench.omni.stages WAY DIRECTORY`` is a :class:`bench.programs.Program`. It answers an :class:`Order` with a
:class:`Measurement`.

What is vLLM-Omni's: the factory, the serializer, ``SharedMemoryConnector``, and the loop that receives (a question for each
request that waits, and then a pause of a millisecond). ``woken`` is shmring's connector without that loop: the receiver waits
in ``get_with_deadline``. The receiver keeps up: the sender is told that a chunk was taken, and puts the next one after a pause.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec

from bench.programs import orders

OWN, LOOPED, WOKEN = "omni", "shmring", "woken"

#: What the store is called; the first connector that needs it starts it.
STORE = "bench-omni"
_SLAB = "512MiB"
_WARM_UP = 3  # chunks before anything is timed
_PAUSE_S = 0.002  # in which the receiver asks for the next chunk
_LIMIT_S = 60.0  # for a chunk; what takes so long is lost
_IDLE_S = 2.0
_WAITING = 8  # requests, of a receiver that has nothing to do


class Order(msgspec.Struct, frozen=True):
    """What to do: pass so many chunks of a size on; or, with none, have a receiver wait for chunks that do not come."""

    nbytes: int
    count: int


class Measurement(msgspec.Struct, frozen=True):
    """Of an order.

    Attributes:
        p50_ms: from a chunk in the sender to its tensors in the receiver.
        sender_ms, receiver_ms, store_ms: CPU for each chunk; of a receiver that waits, in a second.
    """

    p50_ms: float
    sender_ms: float
    receiver_ms: float
    store_ms: float = 0.0

    @property
    def cpu_ms(self) -> float:
        return self.sender_ms + self.receiver_ms + self.store_ms


def _connector(way: str, stage: int, directory: str) -> Any:
    """Makes a stage's connector, by vLLM-Omni's factory."""
    from bench.omni import layer

    logging.disable(logging.WARNING)
    found = layer.sources()
    if found is None:
        raise RuntimeError(layer.WHY_NOT)
    layer.load(found)
    import torch
    from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
    from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec

    from shmring.integrations.omni import CONNECTOR, register

    torch.set_num_threads(1)
    register()
    ours = {"shmring_store": STORE, "shmring_socket_dir": directory, "shmring_slab": _SLAB, "shmring_namespace": "bench"}
    spec = ConnectorSpec("SharedMemoryConnector" if way == OWN else CONNECTOR, {"stage_id": stage, **ours})
    return OmniConnectorFactory.create_connector(spec)


def _cpu_s(pid: int) -> float:
    """The time that a process has had on processors."""
    return time.clock_gettime((~pid << 3) | 2)  # as clock_getcpuclockid(3) makes it


# -- the receiver --------------------------------------------------------------------------------------------------------


class _Receiver:
    """A stage that takes chunks, by vLLM-Omni's loop, or woken."""

    def __init__(self, way: str, connector: Any) -> None:
        self._way = way
        self._connector = connector
        self._loop: Any = None
        if way != WOKEN:
            from vllm_omni.distributed.omni_connectors.transfer_adapter.base import OmniTransferAdapterBase

            class Loop(OmniTransferAdapterBase):  # type: ignore[misc]  # vLLM-Omni has no types here
                def _poll_single_request(self, request: Any) -> bool:
                    if request.is_given_up:
                        return True
                    result = connector.get("0", "1", request.request_id)
                    if result is None:
                        return False
                    request.took(result[0])
                    return True

            self._loop = Loop(None)

    def expect(self, key: str, took: Any) -> SimpleNamespace | None:
        """Takes a chunk when it comes; returns what the loop has of it."""
        if self._loop is None:
            took(self._connector.get_with_deadline("0", "1", key, deadline=time.monotonic() + _LIMIT_S)[0])
            return None
        request = SimpleNamespace(request_id=key, took=took, is_given_up=False)
        self._loop._pending_load_reqs.append(request)
        with self._loop._recv_cond:
            self._loop._recv_cond.notify()
        return request

    def idle_ms(self) -> float:
        """CPU in a second while it waits for chunks that do not come."""
        keys = [f"never-{number}" for number in range(_WAITING)]
        requests: list[Any] = []
        if self._loop is None:
            waiting = [threading.Thread(target=self._wait_in_vain, args=(key,), daemon=True) for key in keys]
            for thread in waiting:
                thread.start()
        else:
            requests = [self.expect(key, None) for key in keys]
        time.sleep(_IDLE_S / 4)
        began_s = time.process_time()
        time.sleep(_IDLE_S)
        used_s = time.process_time() - began_s
        for request in requests:  # its loop forgets them
            request.is_given_up = True
        return used_s / _IDLE_S * 1e3

    def _wait_in_vain(self, key: str) -> None:
        self._connector.get_with_deadline("0", "1", key, deadline=time.monotonic() + 2 * _IDLE_S)


def _receive(way: str, directory: str, pipe: Connection) -> None:
    receiver = _Receiver(way, connector := _connector(way, 1, directory))
    pipe.send("up")
    with contextlib.suppress(EOFError):
        while True:
            prefix, order = pipe.recv()
            if not order.count:
                pipe.send(receiver.idle_ms())
                continue
            late_s: list[float] = []
            total = 0.0
            came = threading.Event()

            def took(data: Any) -> None:
                nonlocal total
                late_s.append(time.monotonic() - data["sent"])  # noqa: B023
                total += float(data["hidden"].view(-1)[-1])
                came.set()  # noqa: B023

            for number in range(_WARM_UP + order.count):
                if number == _WARM_UP:
                    late_s.clear()
                    total, began_s = 0.0, time.process_time()
                came.clear()
                receiver.expect(f"{prefix}_{number}", took)
                if not came.wait(_LIMIT_S):
                    raise TimeoutError(f"chunk {number} did not come")
                pipe.send_bytes(b"")
            if total != order.count:
                raise ValueError("the tensors are others")
            pipe.send((statistics.median(late_s), time.process_time() - began_s))
    connector.close()


# -- the sender ----------------------------------------------------------------------------------------------------------


class _Sender:
    """A stage that puts chunks, and the process of the one that takes them."""

    def __init__(self, way: str, directory: str) -> None:
        self._connector = _connector(way, 0, directory)
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        context.Process(target=_receive, args=(way, directory, other), daemon=True).start()
        other.close()
        self._pipe.recv()
        self._numbers = itertools.count()
        self._store_pid = None if way == OWN else _store_pid(directory)

    def measure(self, order: Order) -> Measurement:
        import torch

        prefix = f"b{os.getpid()}_{next(self._numbers)}"
        self._pipe.send((prefix, order))
        if not order.count:
            return Measurement(0.0, 0.0, self._pipe.recv())
        tensor = torch.ones(order.nbytes // 2, dtype=torch.bfloat16).view(-1, 64)
        for number in range(_WARM_UP + order.count):
            if number == _WARM_UP:
                began_s, store_s = time.process_time(), self._store_s()
            data = {"hidden": tensor, "sent": time.monotonic(), "ids": [1, 2, 3]}
            done, *_ = self._connector.put("0", "1", f"{prefix}_{number}", data)
            if not done:
                raise RuntimeError(f"chunk {number} could not be put")
            if not self._pipe.poll(_LIMIT_S):
                raise TimeoutError(f"chunk {number} was not taken")
            self._pipe.recv_bytes()
            time.sleep(_PAUSE_S)
        sender_s = time.process_time() - began_s
        p50_s, receiver_s = self._pipe.recv()
        store_s = self._store_s() - store_s
        return Measurement(p50_s * 1e3, *(each / order.count * 1e3 for each in (sender_s, receiver_s, store_s)))

    def _store_s(self) -> float:
        return 0.0 if self._store_pid is None else _cpu_s(self._store_pid)

    def close(self) -> None:
        self._pipe.close()
        self._connector.close()


def _store_pid(directory: str) -> int:
    import asyncio

    import shmring

    snapshot = asyncio.run(shmring.inspect(STORE, socket_dir=directory))
    pid: int = snapshot.program["store"]["pid"]
    return pid


def main() -> None:
    way, directory = sys.argv[1:3]
    sender = _Sender(way, directory)
    try:
        for order, answer in orders(Order):
            try:
                found: object = sender.measure(order)
            except Exception as error:  # noqa: BLE001 - it is the answer
                found = error
            answer(found)
    finally:
        sender.close()


if __name__ == "__main__":
    main()
