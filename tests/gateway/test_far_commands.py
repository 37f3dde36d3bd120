"""``shmring engine --listen`` and ``shmring frontend --engine``, as an operator starts them on two hosts."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

import shmring
from shmring.engine.__main__ import main as engine_command
from shmring.engine.client import EngineClient
from shmring.engine.protocol import EngineRequestPayload, GenerateReply, GenerateRequest
from shmring.frontend.__main__ import main as frontend_command
from shmring.frontend.commands.serve import options_of_words
from shmring.memory.slab import sweep
from shmring.processes.process import Process
from tests.gateway.test_far_clients import TOKEN
from tests.gateway.test_far_frontend import picture_of
from tests.tables import for_each
from tests.waiting import cancel

ROOT = Path(__file__).resolve().parents[2]

Start = Callable[..., Process]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


@pytest.fixture
def start(tmp_path: Path, token_file: Path) -> Iterator[Start]:
    """``start("engine", *options)``: a process, whose words go to a file."""
    processes: list[Process] = []
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHMRING_")}

    def run(command: str, *options: str) -> Process:
        with (tmp_path / f"{command}.log").open("ab") as log:
            own = [f"--engine-token-file={token_file}", "--engine-tls=off", *options]
            words = [sys.executable, "-P", "-m", "shmring.frontend.cli", command, *own]
            processes.append(
                Process.start(words, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=subprocess.STDOUT)
            )
        return processes[-1]

    yield run
    for process in processes:
        process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


async def status_of(http: httpx.AsyncClient, path: str) -> int:
    try:
        return (await http.get(path)).status_code
    except httpx.TransportError:
        return 0


@pytest.mark.slow  # an engine is started twice, and a frontend once
async def test_a_frontend_elsewhere_serves_pictures_and_outlives_its_engine(
    start: Start, socket_dir: Path, tmp_path: Path
) -> None:
    place = f"127.0.0.1:{free_port()}"
    engine_words = ("--name=far", "--slab-nbytes=64MiB", f"--socket-dir={socket_dir}", f"--listen={place}")

    def logs() -> list[str]:
        return [path.read_text() for path in tmp_path.glob("*.log")]

    url = {"type": "image_url", "image_url": {"url": picture_of((9, 99, 200))}}
    chat = {"model": "shmring-synthetic", "max_tokens": 4, "messages": [{"role": "user", "content": [url]}]}
    engine = start("engine", "--executor=synthetic", *engine_words)
    port = free_port()
    frontend = start("frontend", f"--engine=tcp://{place}/far", f"--port={port}", "--connect-timeout=120")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http:

        async def ask() -> httpx.Response:
            return await http.post("/v1/chat/completions", json=chat)

        async def is_ready() -> None:
            async with asyncio.timeout(120):
                while await status_of(http, "/ready") != 200:
                    assert engine.lives, logs()
                    assert frontend.lives, logs()
                    await asyncio.sleep(0.05)

        await is_ready()
        answer = await ask()
        assert answer.status_code == 200, answer.text
        first = answer.json()["choices"]
        engine.send(signal.SIGKILL)
        await engine.ended()
        answer = await ask()
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "engine_unavailable"
        engine = start("engine", "--executor=synthetic", *engine_words)
        await is_ready()
        answer = await ask()
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"] == first
    for process in (frontend, engine):
        process.send(signal.SIGTERM)
        await process.ended()
        assert process.returncode == 0, logs()
    assert not list(socket_dir.iterdir())
    assert not sweep()


_KNOWN = {"SHMRING_ENGINE_TOKEN": TOKEN}
_REFUSED: list[tuple[Any, list[str], dict[str, str], str]] = [
    (engine_command, ["--listen=127.0.0.1:0"], {}, "--listen needs a token"),
    (engine_command, ["--listen=127.0.0.1:0"], {"SHMRING_ENGINE_TOKEN": "short"}, "SHMRING_ENGINE_TOKEN: token has 16 to 1024"),
    (engine_command, ["--listen=127.0.0.1"], {}, "host and port"),
    (
        engine_command,
        ["--listen=127.0.0.1:0", f"--engine-certfile={__file__}"],
        _KNOWN,
        "can't be used",
    ),
    (
        engine_command,
        ["--listen=127.0.0.1:0", f"--engine-keyfile={__file__}"],
        _KNOWN,
        "--engine-certfile",
    ),
    (frontend_command, ["--engine=tcp://127.0.0.1:7000/far"], {}, "--engine needs a token"),
    (frontend_command, [], {"SHMRING_ENGINE": "tcp://127.0.0.1:7000/far"}, "--engine needs a token"),
    (frontend_command, ["--engine=127.0.0.1:7000"], {}, "tcp://host:port/name"),
    (frontend_command, ["--engine=tcp://127.0.0.1:7000/far", "-dp=2"], _KNOWN, "exclude each other"),
    (
        frontend_command,
        ["--engine=tcp://127.0.0.1:7000/far", f"--engine-ca-certs={__file__}"],
        _KNOWN,
        "--engine-ca-certs",
    ),
    (
        frontend_command,
        ["--engine=tcp://127.0.0.1:7000/far", f"--engine-token-file={__file__}"],
        {},
        "can be read by others than its owner",
    ),
]


@for_each("command, words, variables, text", _REFUSED)
def test_what_can_not_work_is_said_before_anything_is_started(
    command: Any, words: list[str], variables: dict[str, str], text: str
) -> None:
    result = CliRunner().invoke(command, words, env=variables)
    assert result.exit_code == 2, result.output
    assert text in " ".join(result.output.replace("│", " ").split()), result.output
    assert not variables.get("SHMRING_ENGINE_TOKEN") or variables["SHMRING_ENGINE_TOKEN"] not in result.output


def test_several_engines_of_a_server_listen_at_ports_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHMRING_ENGINE_TOKEN", TOKEN)
    options = options_of_words(["--listen=[::1]:7000", "-dp=2"])
    assert [engine.listening.listen for engine in options.engines] == ["[::1]:7000", "[::1]:7001"]
    assert all(engine.listening.engine_token == TOKEN for engine in options.engines)
    assert TOKEN not in repr(options)
    assert options.frontend.far.engine == ()


async def test_an_engine_on_another_host_gets_no_deadline_of_this_ones_clock(socket_dir: Path) -> None:
    deadlines: list[float | None] = []

    async def answer(claim: shmring.Claim) -> None:
        deadlines.append(claim.payload.deadline)
        await claim.done(GenerateReply("yes", [1], 1, 1, "stop"))

    options: dict[str, Any] = {"socket_dir": str(socket_dir), "slab_nbytes": "16MiB", "listen": "127.0.0.1:0", "token": TOKEN}
    async with shmring.serve("far", payload_type=EngineRequestPayload, **options) as ring:
        answering = asyncio.create_task(ring.run(answer))
        async with await EngineClient.connect(ring.address, token=TOKEN) as engine:
            async for _ in engine.generate(GenerateRequest(deadline=time.monotonic() - 100), timeout=60):
                pass
            with pytest.raises(shmring.LocalProtocolError, match="shmring inspect"):
                await engine.inspect(ring.address)
        await cancel(answering)
    assert deadlines == [None]
