"""``python -m shmring.engine`` as a process: starts, ends on a signal or with its parent, says what is wrong."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

import shmring
from shmring.engine.__main__ import main
from shmring.engine.client import EngineClient
from shmring.engine.protocol import ChatMessage, EncodeRequest, GenerateReply, GenerateRequest, SamplingParams, Text, TextPart
from shmring.engine.settings import EngineSettings
from shmring.processes.process import Process
from shmring.service.supervision import DRAIN_SIGNAL, Orders
from tests.nursery import Forked, Nursery
from tests.tables import for_each, slow

ROOT = Path(__file__).resolve().parents[2]
Start = Callable[..., Process]


@pytest.fixture
def start(socket_dir: Path, run_python: Callable[..., Process]) -> Start:
    """``start("--option=value", path=...)``: an engine, which says what is wrong; it can import what lies at the path."""

    def run(*options: str, path: Path = ROOT) -> Process:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{path}"}
        own = ("--name=main", "--slab-nbytes=16MiB", f"--socket-dir={socket_dir}")
        return run_python("-m", "shmring.engine", *own, *options, env=environment, stderr=subprocess.STDOUT)

    return run


_MODULE = "import runpy; runpy.run_module('shmring.engine', run_name='__main__', alter_sys=True)"


@pytest.fixture
def fork(nursery: Nursery, socket_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """``fork("--option=value")``: an engine that need not import torch, for what is not about its start."""
    engines: list[Forked] = []

    def run(*options: str) -> Forked:
        own = ("--name=main", "--slab-nbytes=16MiB", f"--socket-dir={socket_dir}")
        engines.append(nursery.start_text(tmp_path / "output", _MODULE, *own, *options))
        return engines[-1]

    yield run
    for engine in engines:
        engine.process.kill()


@pytest.fixture
def fail(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """``fail("--option", "value")``: what a start in this process says, which must fail."""

    def refuse() -> None:
        raise AssertionError("the engine was started")

    monkeypatch.setattr("shmring.engine.process.leave", refuse)
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level

    def run(*options: str) -> str:
        arguments = ["--name", "main", "--slab-nbytes", "16MiB", "--socket-dir", str(socket_dir), *options]
        result = CliRunner().invoke(main, arguments)
        assert isinstance(result.exception, SystemExit), result
        assert result.exit_code in (1, 2)
        return result.output

    yield run
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.mark.usefixtures("hangups")
@pytest.mark.parametrize("number", [signal.SIGTERM, slow(signal.SIGINT), slow(signal.SIGHUP)])
async def test_it_serves_until_a_signal_ends_it_cleanly(start: Start, socket_dir: Path, number: signal.Signals) -> None:
    engine = start()
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=30) as client:
        assert (await client.describe()).executor == "fingerprints"
        engine.send(number)
        assert await asyncio.wait_for(engine.ended(), 20) == 0
    assert list(socket_dir.iterdir()) == []


def asking(client: EngineClient, max_tokens: int) -> AsyncGenerator[GenerateReply, None]:
    message = ChatMessage("user", [TextPart("hello")])
    return client.generate(GenerateRequest([message], sampling=SamplingParams(max_tokens=max_tokens)))


@for_each("number", [signal.SIGTERM, DRAIN_SIGNAL])
async def test_what_it_has_is_carried_out_before_it_ends(
    fork: Callable[..., Forked], nursery: Nursery, socket_dir: Path, number: signal.Signals
) -> None:
    engine = fork("--executor=synthetic", '--executor-options={"step_s": 0.01}')
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=90) as client:
        outputs = asking(client, 50)
        first = await anext(outputs)
        engine.signal(number)
        *_, last = [output async for output in outputs]
        assert first.finish_reason is None
        assert (last.finish_reason, last.completion_tokens) == ("length", 50)
        await engine.died()
        assert nursery.exit_code_of(engine) == 0
    assert list(socket_dir.iterdir()) == []


@for_each("options", [["--shutdown-timeout=600"], ["--shutdown-timeout=0.1"]], ids=["a second signal", "its time is over"])
async def test_what_takes_longer_is_aborted(
    fork: Callable[..., Forked], nursery: Nursery, socket_dir: Path, options: list[str]
) -> None:
    engine = fork("--executor=synthetic", '--executor-options={"step_s": 0.01}', *options)
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=90) as client:
        outputs = asking(client, 100_000)
        await anext(outputs)
        engine.signal(DRAIN_SIGNAL)
        engine.signal(DRAIN_SIGNAL)
        while options == ["--shutdown-timeout=600"] and not engine.is_dead:
            engine.signal(signal.SIGTERM)  # soon after the first, it would be one signal, said twice
            await asyncio.sleep(0.05)
        with pytest.raises((shmring.EngineDeadError, shmring.RemoteError)):
            [_ async for _ in outputs]
        await engine.died()
        assert nursery.exit_code_of(engine) in (0, -signal.SIGTERM)  # one may come when it has all but ended
    assert list(socket_dir.iterdir()) == []


@for_each("backing", ["auto", "/dev/shm", "memfd"])
def test_a_slab_that_does_not_fit_is_one_clear_line(fail: Callable[..., str], backing: str) -> None:
    errors = fail("--slab-nbytes", "4000GiB", "--reply-nbytes", "4096", "--slab-backing", backing)
    assert "shmring engine: a slab of 3.906 TiB can't be had: " in errors
    assert "Traceback" not in errors


@pytest.mark.slow
async def test_a_second_engine_of_a_name_is_refused_and_harms_nothing(start: Start, socket_dir: Path) -> None:
    first = start()
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=30) as client:
        second = start()
        errors = await asyncio.to_thread(second.rest, 60)
        assert second.returncode == 1
        assert f"an engine named 'main' is running already (pid {first.pid}" in errors
        await client.check_health()


async def test_under_a_supervisor_it_has_the_orders_settings_and_ends_with_it(
    run_python: Callable[..., Process], socket_dir: Path
) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            fd = theirs.fileno()
            engine = run_python("-m", "shmring.engine", f"--supervisor-fd={fd}", pass_fds=(fd,))
        ring = shmring.RingConfig(slab_nbytes="16MiB", socket_dir=str(socket_dir))
        settings = EngineSettings(name="told", executor="synthetic", ring=ring)
        ours.sendall(msgspec.json.encode(Orders(0.01, settings)) + b"\n")
        words = b""
        while b"r" not in words:
            words += await asyncio.wait_for(asyncio.to_thread(ours.recv, 100), 60)
        assert words.startswith(b".")  # while it loads its executor, it lives and is not ready
        async with await EngineClient.connect("told", socket_dir=str(socket_dir)) as client:
            assert (await client.describe()).executor == "synthetic"
        ours.close()
        assert await asyncio.wait_for(engine.ended(), 20) == 0


@pytest.mark.slow
async def test_one_s_own_executor_is_found_where_it_is_said_to_lie(start: Start, socket_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from shmring.engine.executors.synthetic import SyntheticExecutor as Mine\n")
    (tmp_path / "engine.py").write_text("raise SystemExit('not what is meant')\n")
    start("--executor", "mine:Mine", "--executor-path", str(tmp_path))
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=30) as client:
        assert (await client.describe()).executor == "synthetic"


async def test_an_executor_that_dies_ends_the_process_with_its_reason(
    fork: Callable[..., Forked], nursery: Nursery, socket_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "mortal.py").write_text(
        "from shmring.engine.executors.synthetic import SyntheticExecutor\n"
        "from shmring.engine.executors import ExecutorDeadError\n\n"
        "class Mortal(SyntheticExecutor):\n"
        "    def execute(self, batch):\n"
        "        raise ExecutorDeadError('the device fell off the bus')\n"
    )
    engine = fork("--executor", "mortal:Mortal", "--executor-path", str(tmp_path))
    async with await EngineClient.connect("main", socket_dir=str(socket_dir), connect_timeout_s=30) as client:
        with pytest.raises(shmring.ShmringError, match="fell off the bus"):
            [_] = [output async for output in client.encode(EncodeRequest([Text("hello")]), timeout=20)]
        await engine.died()
        assert nursery.exit_code_of(engine) == 1
        with pytest.raises(shmring.EngineDeadError, match="the engine has died: the device fell off the bus"):
            await client.check_health()
    assert "shmring engine: the device fell off the bus" in engine.output.read_text()


@for_each(
    ("options", "complaint"),
    [
        (["--executor", "nothing"], "there is no executor 'nothing'"),
        (
            ["--executor", "no_such_module:Executor"],
            "there is no module 'no_such_module' for the executor",
        ),
        (["--executor", "synthetic", "--max-model-len", "1"], "max_model_len must be at least 2, got 1"),
        (["--executor", "synthetic", "--executor-options", '{"step": 1}'], "it takes step_s"),
        (["--executor", "synthetic", "--executor-options", "{step: 1}"], "write a JSON object"),
        (["--executor", "synthetic", "--mm-processor-kwargs", "[1]"], "Expected `object`, got `array`"),
        (["--max-batch-nbytes", "many"], "'many' is not a size"),
    ],
)
def test_what_can_not_be_is_one_clear_line(fail: Callable[..., str], options: list[str], complaint: str) -> None:
    errors = fail(*options)
    assert complaint in errors
    assert "Traceback" not in errors


@pytest.mark.slow
async def test_it_can_be_ended_while_it_loads_its_executor(start: Start, tmp_path: Path) -> None:
    started = tmp_path / "started"
    (tmp_path / "slow.py").write_text(
        f"import pathlib, time\n\ndef load(options):\n    pathlib.Path({str(started)!r}).touch()\n    time.sleep(600)\n"
    )
    engine = start("--executor", "slow:load", path=tmp_path)
    async with asyncio.timeout(30):
        while not started.exists():
            await asyncio.sleep(0.01)
    engine.send(signal.SIGTERM)
    assert await asyncio.wait_for(engine.ended(), 20) == 0


GIVING_UP = """
from shmring.engine import process
from shmring.service import logs
def fail(): raise ArithmeticError("the log is broken")
logs.finish_logging = fail
process._give_up()
"""


def test_an_engine_that_gives_up_ends_also_where_its_log_fails(nursery: Nursery) -> None:
    done = nursery.run_text(GIVING_UP + "\nprint('it goes on')")
    assert (done.returncode, done.stdout) == (1, "")
    assert "giving up on it" in done.stderr
    assert "ArithmeticError" not in done.stderr, "it has ended before"
