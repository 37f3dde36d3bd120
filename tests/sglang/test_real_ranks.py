"""Two ranks of tensor parallelism and two tokenizers: one copy for both ranks; then each kind of process is killed."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import psutil
import pytest

from bench.servers import picture
from tests.sglang.server import Server, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)

RANKS = ["--tp", "2"]
OPTIONS = [*RANKS, "--tokenizer-worker-num", "2"]
PICTURES = [picture(672, seed) for seed in range(4)]
PLUGGED = {"SHMRING_SGLANG": "1", "SHMRING_SGLANG_SLAB": "256MiB"}


@pytest.fixture
def directory(tmp_path_factory: pytest.TempPathFactory, runtime_directory: Path) -> Path:
    path = runtime_directory / str(len(list(runtime_directory.iterdir())))
    path.mkdir(mode=0o700)
    return path


def connect_both(server: Server) -> None:
    """Has both tokenizers connect, which each does with its first request.

    The kernel decides which one gets a request, and may choose the same one for minutes. So the other is stopped meanwhile.
    SGLang's server replaces a tokenizer that is stopped for longer than five seconds; then the new one is tried as well.
    """

    def are_connected() -> bool:
        for tokenizer in (tokenizers := server.processes("tokenizer_worker")):
            with contextlib.suppress(openai.OpenAIError, psutil.NoSuchProcess), stopped(*{*tokenizers} - {tokenizer}):
                server.ask(picture(56, 0), timeout=30)
        report = server.report()
        return report["tokenizers"] == 3 and report["ranks"] == 1  # who asks is one more

    until(are_connected)


@contextlib.contextmanager
def stopped(*processes: psutil.Process) -> Iterator[None]:
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


def test_answers_are_the_same(directory: Path) -> None:
    said = {}
    for way, environment in (("sglang", {}), ("shmring", PLUGGED)):
        where = directory / way
        where.mkdir(mode=0o700)
        with serve(where, environment=environment, options=OPTIONS, ranks=2) as server:
            if environment:
                connect_both(server)
                before = server.report()
            said[way] = [server.ask(url) for url in PICTURES]
            if environment:
                after = server.report()
                assert after["taken"] - before["taken"] == after["shared"] - before["shared"] == len(PICTURES)
                assert after["lost"] == 0
    assert len({*said["shmring"]}) == len(PICTURES)
    assert said["shmring"] == said["sglang"]


class Load:
    """Callers who ask about pictures until they are told to stop, whatever they are answered."""

    def __init__(self, server: Server) -> None:
        self.answers = 0
        self._server = server
        self._over = threading.Event()
        self._callers = [threading.Thread(target=self._ask, args=(number,)) for number in range(4)]

    def _ask(self, number: int) -> None:
        while not self._over.wait(0.01):
            try:
                self._server.ask(PICTURES[number], timeout=60)
                self.answers += 1
            except openai.OpenAIError:
                pass

    def __enter__(self) -> Load:
        for caller in self._callers:
            caller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for caller in self._callers:
            caller.join()


def test_kill_9_of_a_tokenizer_gives_its_memory_back(directory: Path) -> None:
    with serve(directory, environment=PLUGGED, options=OPTIONS, ranks=2) as server:
        connect_both(server)
        with Load(server) as load:
            until(lambda: load.answers >= 4)
            server.processes("tokenizer_worker")[0].kill()
            answered = load.answers
            until(lambda: load.answers >= answered + 4)
        server.ask()
        until(lambda: (report := server.report())["slots_in_use"] <= 1 and report["quarantined_bytes"] == 0)
        assert server.left_behind() == []


@pytest.mark.parametrize("rank", [0, 1])
def test_kill_9_of_a_rank_leaves_nothing(directory: Path, rank: int) -> None:
    """With one tokenizer: with several, SGLang's launcher does not act on the signal by which it ends itself, and stays."""
    with serve(directory, environment=PLUGGED, options=RANKS, ranks=2) as server:
        server.ask(picture(56, 0))
        until(lambda: server.report()["tokenizers"] == 2)  # who asks is one more
        schedulers = sorted(server.processes("scheduler"), key=lambda process: process.cmdline()[0])
        assert len(schedulers) == 2
        with Load(server) as load:
            until(lambda: load.answers >= 4)
            schedulers[rank].kill()
            until(lambda: not server.process.lives)  # SGLang ends itself
        assert server.left_behind() == []
