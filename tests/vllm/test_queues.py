"""The queues between an engine core and its workers, in processes as vLLM has them; vLLM itself is not needed.

A worker here does what vLLM's does: it makes its end of the queue from a handle, a queue of its own for its answers, and
carries out what it is sent.
"""

from __future__ import annotations

import contextlib
import enum
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import psutil
import pytest
import torch

from shmring import threads
from shmring.integrations.vllm import queues as queues_module
from shmring.integrations.vllm.engine import Receiver
from shmring.integrations.vllm.engine_ring import EngineRing
from shmring.integrations.vllm.parcels import LARGE_NBYTES
from shmring.integrations.vllm.peers import PeerError
from shmring.integrations.vllm.queues import Handle, Reader, Writer
from shmring.integrations.vllm.settings import Settings
from shmring.integrations.vllm.workers import Queues
from tests.tables import slow
from tests.vllm.test_exchange import ENGINE, described, picture, request_with
from tests.waiting import until

pytestmark = pytest.mark.timeout(120)

MB = 1 << 20
SETTINGS = Settings(slab_nbytes=64 * MB, min_nbytes=64 << 10, keep_nbytes=24 * MB, broadcast_nbytes=16 * MB, name="test")


class Keeping(enum.Enum):
    """Said to a worker."""

    KEEPING = enum.auto()


KEEPING = Keeping.KEEPING


class Worker:
    """In place of vLLM's worker: its methods are called by name."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def execute_model(self, *tensors: torch.Tensor) -> list[float]:
        return [float(tensor.double().sum()) for tensor in tensors]

    def keep(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return len(self.kept)

    def let_go(self) -> None:
        self.kept.clear()
        gc.collect()

    def write(self, tensor: torch.Tensor) -> float:
        tensor += 1
        return float(tensor[0])

    def give_back(self, thing: Any) -> Any:
        return thing

    def say_pid(self) -> int:
        return os.getpid()

    def compute_for_ever(self) -> None:
        threading.Event().wait()


def work(handle: Handle, rank: int, ready: Any, directory: str) -> None:
    """The process of a worker. With ``KEEPING``, it keeps what it is given to compute with."""
    os.environ["XDG_RUNTIME_DIR"] = directory  # a fork server has that of its start
    queues_module._ENDING_S = (
        0.0  # vLLM's worker is also told by a pipe that the engine core has gone; this one has none to wait for
    )
    queues = Queues(None, SETTINGS, EngineRing(SETTINGS))
    steps = queues.create_from_handle(handle, rank)
    answers = queues(1, 1)
    ready.send(answers.export_handle())
    steps.wait_until_ready()
    answers.wait_until_ready()
    worker = Worker()
    with contextlib.suppress(RuntimeError):  # the engine core has gone
        while True:
            method, arguments = steps.dequeue(indefinite=True)
            if arguments and arguments[0] is KEEPING:
                method, arguments = "keep", arguments[1:]
            answers.enqueue(getattr(worker, method)(*arguments))
            del arguments


def context_of(method: str) -> Any:
    context = multiprocessing.get_context(method)
    if method == "forkserver":  # its processes need not import torch each
        context.set_forkserver_preload([__name__])
    return context


class Engine:
    """In place of vLLM's engine core: queues to workers and back."""

    def __init__(self, engine_ring: EngineRing, workers: int, method: str) -> None:
        context = context_of(method)
        queues = Queues(None, SETTINGS, engine_ring)
        self.steps: Writer = queues(workers, workers)
        self.processes = []
        pipes = []
        for rank in range(workers):
            pipe, childs = context.Pipe()
            arguments = (self.steps.export_handle(), rank, childs, os.environ["XDG_RUNTIME_DIR"])
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            pipes.append(pipe)
        self.answers: list[Reader] = [queues.create_from_handle(pipe.recv(), 0) for pipe in pipes]
        self.steps.wait_until_ready()
        for reader in self.answers:
            reader.wait_until_ready()

    def call(self, method: str, *arguments: Any) -> list[Any]:
        self.steps.enqueue((method, arguments))
        return [reader.dequeue() for reader in self.answers]

    def close(self) -> None:
        self.steps.shutdown()
        for reader in self.answers:
            reader.shutdown()
        for process in self.processes:
            process.join(10)
            process.kill()


@pytest.fixture(autouse=True)
def socket_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> Iterator[None]:
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined] # it would end with this process


@pytest.fixture
def engine_ring() -> EngineRing:
    ring = EngineRing(SETTINGS)
    ring.expect(0)
    return ring


@pytest.fixture
def start(engine_ring: EngineRing) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def start(workers: int = 2, method: str = "forkserver") -> Engine:
        engines.append(Engine(engine_ring, workers, method))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def large(value: float = 1.0) -> torch.Tensor:
    return torch.full((2 * LARGE_NBYTES,), value, dtype=torch.uint8)


# Workers that are spawned import torch each.
@pytest.mark.parametrize("method", [slow("spawn"), "fork"])
def test_all_workers_answer_each_step(start: Callable[..., Engine], method: str) -> None:
    engine = start(2, method)
    assert engine.call("execute_model", torch.ones(3), large()) == [[3.0, 2.0 * LARGE_NBYTES]] * 2
    assert engine.call("give_back", {"a": [1, None, "b"]}) == [{"a": [1, None, "b"]}] * 2
    (came, _) = engine.call("give_back", large(7))
    assert torch.equal(came, large(7))
    assert engine.steps.counts.viewed == 1
    assert engine.steps.counts.copied_out == 1


def test_what_is_not_to_compute_with_may_be_written_to(start: Callable[..., Engine]) -> None:
    assert start(1).call("write", large()) == [2.0]


def test_views_that_are_kept_do_not_hold_up_steps(start: Callable[..., Engine]) -> None:
    """Twice as much as there is memory for, and then twice as many as there may be messages outstanding."""
    engine = start(2)
    for count in range(1, 17):
        assert engine.call("execute_model", KEEPING, large()) == [count] * 2
    assert engine.steps.counts.viewed > 0
    assert engine.steps.counts.copied_out > 0
    engine.call("let_go")
    assert engine.call("execute_model", large()) == [[2.0 * LARGE_NBYTES]] * 2


def test_more_views_than_messages_may_be_outstanding(start: Callable[..., Engine], engine_ring: EngineRing) -> None:
    engine = start(1)
    receiver = Receiver(SETTINGS, 0, copies=False, pin="off", engine_ring=engine_ring)
    with lent(receiver, picture(2 * LARGE_NBYTES)) as tensor:
        for count in range(1, 301):
            assert engine.call("execute_model", KEEPING, tensor) == [count]
    assert 0 < engine.steps.counts.viewed < 256
    receiver.close()


def test_an_answer_that_takes_long_is_not_looked_for(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(1)
    looked: list[str] = []
    monkeypatch.setattr(engine.answers[0]._looking, "next", lambda _: looked.append("") or None)
    engine.steps.enqueue(("execute_model", (large(),)))
    engine.steps.enqueue(("say_pid", ()))  # vLLM sends more before it waits
    assert engine.answers[0].dequeue() == [2.0 * LARGE_NBYTES]
    assert not looked
    assert engine.answers[0].dequeue() == engine.processes[0].pid
    assert looked


def test_what_is_larger_than_all_memory_goes_in_pieces(start: Callable[..., Engine]) -> None:
    sent = torch.arange(5 * MB, dtype=torch.int64)
    (came, _) = start(2).call("give_back", sent)
    assert torch.equal(came, sent)


def test_where_there_is_no_memory_pieces_need_none(start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start(1)
    monkeypatch.setattr(engine.steps, "_has_room_for_views", lambda parcel: True)
    for count in range(1, 11):  # of 16 MiB, views take all
        assert engine.call("execute_model", KEEPING, large()) == [count]
    assert engine.steps.counts.in_pieces > 0
    assert engine.call("execute_model", torch.ones(3)) == [[3.0]]


@contextlib.contextmanager
def lent(receiver: Receiver, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields a tensor of an API server as vLLM's engine core has it."""
    from shmring.integrations.vllm.frontend import SyncFrontend

    frontend = SyncFrontend(SETTINGS, [ENGINE])
    came: list[torch.Tensor] = []

    def send() -> None:
        reference = frontend(tensor)
        assert reference is not None
        came.append(receiver(*described(tensor), reference))

    frontend.divert(request_with(tensor), ENGINE, send)
    yield came.pop()
    frontend.close()


def test_what_an_api_server_has_sent_is_not_copied(start: Callable[..., Engine], engine_ring: EngineRing) -> None:
    engine = start(2)
    receiver = Receiver(SETTINGS, 0, copies=False, pin="off", engine_ring=engine_ring)
    sent = picture(8 * MB)
    with lent(receiver, sent) as tensor:
        assert receiver.lies_in_slot(tensor)
        before = receiver._ring.statistics()
        assert engine.call("execute_model", tensor) == [[float(sent.double().sum())]] * 2
        after = receiver._ring.statistics()
        assert after.broadcast_in_place_nbytes - before.broadcast_in_place_nbytes == sent.nbytes
        assert after.broadcast_copied_nbytes == before.broadcast_copied_nbytes
        assert receiver.report()["slots_in_use"] == 1
        del tensor
    receiver.close()


def test_api_servers_are_told_what_an_engine_core_with_workers_counts(
    start: Callable[..., Engine], engine_ring: EngineRing
) -> None:
    start(2)
    receiver = Receiver(SETTINGS, 0, copies=False, pin="off", engine_ring=engine_ring)
    with threads.connect("test-0", lease_nbytes=4096) as client:
        assert client.call("report", timeout=30)["workers"] == 2
    receiver.close()


def test_its_slot_is_free_when_vllm_and_the_workers_have_let_go(start: Callable[..., Engine], engine_ring: EngineRing) -> None:
    engine = start(2)
    receiver = Receiver(SETTINGS, 0, copies=False, pin="off", engine_ring=engine_ring)
    with lent(receiver, picture(8 * MB)) as tensor:
        engine.call("execute_model", KEEPING, tensor)
        del tensor
    assert receiver.report()["slots_in_use"] == 1
    engine.call("let_go")
    until(lambda: receiver.report()["slots_in_use"] == 0)
    receiver.close()


def test_vllms_cache_keeps_no_more_of_the_slab_than_it_may(start: Callable[..., Engine], engine_ring: EngineRing) -> None:
    start(1)
    receiver = Receiver(SETTINGS, 0, copies=True, pin="off", engine_ring=engine_ring)
    cached = []
    for _ in range(5):  # of 8 MiB, where 24 may stay
        with lent(receiver, picture(8 * MB)) as tensor:
            cached.append(tensor)
            del tensor
    assert [receiver.lies_in_slot(tensor) for tensor in cached] == [True] * 3 + [False] * 2
    cached.clear()
    receiver.close()


def test_a_killed_worker_ends_the_wait_at_once(start: Callable[..., Engine]) -> None:
    engine = start(2)
    killed = engine.processes[0]
    os.kill(killed.pid, signal.SIGSTOP)
    engine.steps.enqueue(("say_pid", ()))
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(PeerError, match=f"pid {killed.pid}.*has died"):
        engine.answers[0].dequeue()
    with pytest.raises(PeerError, match="has died"):
        engine.call("say_pid")


def test_so_does_one_that_another_one_waits_for(start: Callable[..., Engine]) -> None:
    """vLLM waits for an answer of one worker, which waits for the others."""
    engine = start(2)
    killed = engine.processes[1]
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {killed.pid}\) has died"):
        engine.answers[0].dequeue()


def test_a_stopped_worker_ends_the_wait(start: Callable[..., Engine]) -> None:
    engine = start(2)
    stopped = engine.processes[1]
    os.kill(stopped.pid, signal.SIGSTOP)
    with pytest.raises(PeerError, match=rf"worker 1 \(pid {stopped.pid}\) was stopped"):
        engine.answers[0].dequeue()
    os.kill(stopped.pid, signal.SIGCONT)


def test_a_stopped_worker_that_does_not_read_ends_it_too(start: Callable[..., Engine]) -> None:
    engine = start(2)
    stopped = engine.processes[0]
    os.kill(stopped.pid, signal.SIGSTOP)

    def send_on_and_on() -> None:
        while True:
            engine.steps.enqueue(("give_back", ("x" * 10_000,)))

    with pytest.raises(PeerError, match="was stopped"):
        send_on_and_on()
    os.kill(stopped.pid, signal.SIGCONT)


def test_a_worker_that_is_killed_while_others_wait_for_its_room_ends_the_wait(start: Callable[..., Engine]) -> None:
    """vLLM's own queue waits for ever until a reader that has died says that it has read (vllm #45644)."""
    engine = start(2)
    errors: list[Exception] = []

    def send_on_and_on() -> None:
        try:
            while True:
                engine.steps.enqueue(("compute_for_ever", ()))
        except PeerError as error:
            errors.append(error)

    thread = threading.Thread(target=send_on_and_on)
    thread.start()
    until(lambda: engine.steps._ring.statistics().broadcasts_outstanding == 256)  # all that there may be
    engine.processes[1].kill()
    thread.join()
    engine.processes[0].kill()
    assert "worker 1" in str(errors[0])
    assert "has died" in str(errors[0])


def test_a_timeout_is_one(start: Callable[..., Engine]) -> None:
    engine = start(1)
    with pytest.raises(TimeoutError):
        engine.answers[0].dequeue(timeout=0.01)
    assert engine.call("execute_model") == [[]]


def test_whoever_waits_is_woken_by_shutdown(start: Callable[..., Engine]) -> None:
    engine = start(1)
    errors: list[Exception] = []

    def wait() -> None:
        try:
            engine.answers[0].dequeue(indefinite=True)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: engine.answers[0]._worker._connection.receiving.is_taken)  # type: ignore[union-attr]
    engine.answers[0].shutdown()
    thread.join()
    assert [str(error) for error in errors] == ["cancelled"]


def test_a_worker_joins_no_other_ring_of_that_name() -> None:
    """As where its engine core has died, and the next one has the name already."""
    with threads.serve("test-0", slab_nbytes=1 * MB) as ring:
        handle = Handle("test-0", ring.epoch + 1, os.getpid(), [0], True)
        with pytest.raises(PeerError, match="another engine has the name 'test-0' now"):
            Reader(handle, 0).wait_until_ready()
        threads.join("test-0", rank=0, connect_timeout_s=60).close()  # its place is free for who it belongs to


def test_after_shutdown_nothing_is_sent(start: Callable[..., Engine]) -> None:
    engine = start(1)
    engine.steps.shutdown()
    engine.steps.enqueue(("say_pid", ()))
    engine.steps.shutdown()


def runs(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def engine_that_is_killed(pids: Any) -> None:
    ring = EngineRing(SETTINGS)
    ring.expect(0)
    engine = Engine(ring, 2, "forkserver")
    engine.call("execute_model", KEEPING, large())
    pids.send([process.pid for process in engine.processes])
    engine.answers[0].dequeue()


def test_kill_9_of_the_engine_core_ends_its_workers_and_leaves_nothing() -> None:
    context = context_of("forkserver")
    pipe, childs = context.Pipe()
    engine = context.Process(target=engine_that_is_killed, args=(childs,))
    engine.start()
    pids = pipe.recv()
    before = {path for path in os.listdir("/dev/shm") if "test-0" in path}
    engine.kill()
    engine.join()
    until(lambda: not any(runs(pid) for pid in pids), 60)
    assert not before, "the slab has no name even while it is used"


class Theirs:
    """In place of vLLM's queue."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.made.append((arguments, named))

    @staticmethod
    def create_from_handle(handle: Any, rank: int) -> Any:
        return handle, rank


def test_what_does_not_fit_is_vllms_own(engine_ring: EngineRing, caplog: pytest.LogCaptureFixture) -> None:
    Theirs.made.clear()
    queues = Queues(Theirs, SETTINGS, engine_ring)
    assert isinstance(queues(4, 2, None, connect_ip="10.0.0.1"), Theirs)
    assert Theirs.made == [((4, 2, None), {"connect_ip": "10.0.0.1"})]
    assert "which are in several machines" in caplog.text
    assert queues.create_from_handle(SimpleNamespace(), 1) == (SimpleNamespace(), 1)


def test_where_a_sockets_path_is_too_long_the_queue_is_vllms_own(
    engine_ring: EngineRing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 100)))
    assert isinstance(Queues(Theirs, SETTINGS, engine_ring)(2, 2), Theirs)
    assert "vLLM's own queue is used: " in caplog.text
    assert "set a shorter socket_dir" in caplog.text


def test_where_there_is_no_memory_the_queue_is_vllms_own(
    engine_ring: EngineRing, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any, **named: Any) -> Any:
        raise OSError(28, "no space left on device")

    monkeypatch.setattr(engine_ring, "open", refuse)
    assert isinstance(Queues(Theirs, SETTINGS, engine_ring)(2, 2), Theirs)
    assert "vLLM's own queue is used" in caplog.text
