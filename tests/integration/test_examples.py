"""The programs in examples/ do what they say, as their users start them; the executor there is tested with its page."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
import torch

import shmring
import shmring.threads
from shmring.frontend.commands.serve_process import ServerProcess
from shmring.processes.process import Process

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SAMPLES = sorted((ROOT / "frontend" / "samples").glob("*.jpg"))
LIMIT_S = 100.0  # only a hang reaches it

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Process]


@pytest.fixture
def environment(socket_dir: Path) -> dict[str, str]:
    return {**os.environ, "XDG_RUNTIME_DIR": str(socket_dir), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Start]:
    """``start("embedder.py", "engine")``: a program whose lines can be read, until the test has ended."""
    with ExitStack() as processes:

        def run(*command: str, stderr: int | None = None) -> Process:
            options: dict[str, Any] = {"cwd": EXAMPLES, "env": environment, "stdin": subprocess.DEVNULL, "stderr": stderr}
            process = Process.start([sys.executable, *command], stdout=subprocess.PIPE, text=True, **options)
            return processes.enter_context(process)

        yield run


def ended(process: Process) -> list[str]:
    """Waits until a program has ended well; returns the lines that nobody has read."""
    lines = process.rest(LIMIT_S).splitlines()
    assert process.wait(LIMIT_S) == 0, lines
    return lines


def load(name: str) -> ModuleType:
    """Imports an example, for a look at one of its functions."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_embedder_makes_batches_and_fails_what_is_wrong_alone(start: Start, socket_dir: Path) -> None:
    engine = start("embedder.py", "engine")
    assert engine.line() == "embedder is ready"
    with shmring.threads.connect("embedder", socket_dir=str(socket_dir / "shmring")) as client:
        pictures = [torch.full((224, 224, 3), 10 * number, dtype=torch.uint8) for number in range(8)]
        pictures[3] = pictures[3][:100]
        engine.send(signal.SIGSTOP)  # so that all of them are there when it looks
        submissions = [client.submit_nowait({"pixels": picture}) for picture in pictures]
        engine.send(signal.SIGCONT)
        with pytest.raises(shmring.RemoteError, match="ValueError: pixels must be torch"):
            submissions.pop(3).result(timeout=LIMIT_S)
        replies = [submission.result(timeout=LIMIT_S) for submission in submissions]
        assert [reply["batch"] for reply in replies] == [7] * 7
        with pytest.raises(shmring.RemoteError, match="ValidationError"):
            client.request({"pixel": pictures[0]}, timeout=LIMIT_S)
    lines = ended(start("embedder.py", "embed", *map(str, SAMPLES)))
    assert [line.split()[-1] for line in lines] == [*map(str, SAMPLES)]
    assert lines[0].startswith("1.000 ")
    engine.send(signal.SIGINT)
    assert ended(engine) == []


@pytest.mark.parametrize("kind", ["live", "recording"])
def test_the_cameras_frames_are_looked_at(start: Start, kind: str) -> None:
    detector = start("camera.py", "detector")
    assert detector.line() == "the detector is ready"
    lines = ended(start("camera.py", kind))
    [(sent, dropped)] = [
        map(int, match.groups()) for line in lines if (match := re.match(r"(\d+) frames sent, (\d+) dr", line))
    ]
    assert sent + dropped == 60
    assert dropped == 0 or kind == "live"
    found = [match.groups() for line in lines if (match := re.match(r"frame +(\d+): the spot is at column (\d+)$", line))]
    assert len(found) == len(lines) - 1 == sent
    assert [int(column) for _, column in found] == [10 * int(number) for number, _ in found]
    detector.send(signal.SIGTERM)
    assert ended(detector) == []


async def test_a_live_camera_drops_what_does_not_fit(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(socket_dir))
    camera = load("camera")
    async with shmring.serve(camera.NAME, slab_nbytes="64MiB", max_inflight=camera.IN_FLIGHT) as ring:
        filming = asyncio.create_task(camera.film_live(camera.Camera(frames=10, frames_per_second=1000)))
        claims = [await ring.claim() for _ in range(2)]
        said = ""
        while "dropped" not in said:  # it says so before it has any answer
            await asyncio.sleep(0.01)
            said += capsys.readouterr().out
        assert said == "2 frames sent, 8 dropped\n"
        for claim in claims:
            with claim:
                await claim.reply(camera.find_spot(claim.payload["pixels"]))
        await filming
    assert capsys.readouterr().out == "frame   0: the spot is at column 0\nframe   1: the spot is at column 10\n"


def test_the_supervisor_restarts_its_engine_and_callers_go_on(start: Start) -> None:
    supervisor = start("supervisor.py")
    first = started(supervisor)
    caller = start("supervisor.py", "call", "100")
    assert caller.line() == "answer 0"
    os.kill(first, signal.SIGKILL)
    assert supervisor.line() == f"engine {first} has ended (-9); the next one is started in 0.1 s"
    second = started(supervisor)
    assert [line for line in ended(caller) if "100 answers" in line]
    supervisor.send(signal.SIGTERM)
    assert ended(supervisor) == ["stopped"]
    with pytest.raises(ProcessLookupError):
        os.kill(second, 0)


def test_an_engine_ends_with_its_supervisor(start: Start) -> None:
    supervisor = start("supervisor.py")
    engine = Process(started(supervisor))
    supervisor.send(signal.SIGKILL)
    engine.wait(LIMIT_S)
    assert not engine.lives
    engine.close()


def started(supervisor: Process) -> int:
    match = re.fullmatch(r"engine (\d+) is started", supervisor.line())
    assert match
    return int(match[1])


def test_the_fastapi_server_embeds_and_outlives_its_engine(start: Start) -> None:
    engine = start("embedder.py", "engine")
    assert engine.line() == "embedder is ready"
    server = start("-m", "uvicorn", "fastapi_app:app", "--port=0", stderr=subprocess.STDOUT)
    while not (match := re.search(r"running on (http://\S+)", server.line())):
        pass
    with httpx.Client(base_url=match[1], timeout=LIMIT_S) as caller:
        content = SAMPLES[0].read_bytes()
        answer = caller.post("/embed", content=content)
        assert len(answer.json()["embedding"]) == 64
        assert caller.get("/health").json() == {"engine": "embedder", "requests": 1}
        assert caller.post("/embed", content=b"no picture").status_code == 400
        assert caller.post("/embed", content=content[:2000]).status_code == 400
        assert caller.post("/embed", content=bytes(20_000_001)).status_code == 413
        engine.send(signal.SIGKILL)
        engine.wait(LIMIT_S)
        engine = start("embedder.py", "engine")
        assert engine.line() == "embedder is ready"
        assert caller.post("/embed", content=content).json() == answer.json()
    server.send(signal.SIGINT)
    assert any("Application shutdown complete" in line for line in ended(server))


def test_the_data_loader_trains_on_what_the_engine_sees(start: Start, tmp_path: Path) -> None:
    for number, path in enumerate(SAMPLES):
        (directory := tmp_path / ("even" if number % 2 == 0 else "odd")).mkdir(exist_ok=True)
        shutil.copy(path, directory)
    engine = start("embedder.py", "engine")
    assert engine.line() == "embedder is ready"
    losses = [float(line.rpartition(" ")[2]) for line in ended(start("data_loader.py", str(tmp_path)))]
    assert len(losses) == 20
    assert losses[-1] < losses[0]


def test_the_fixtures_pass_their_tests(start: Start) -> None:
    lines = ended(start("-m", "pytest", "-p", "no:cacheprovider", "-c", os.devnull, "test_caller.py"))
    assert re.search(r"\b4 passed\b", lines[-1])


def test_the_server_runs_the_executor(environment: dict[str, str], tmp_path: Path) -> None:
    arguments = [
        "--port=0",
        f"--executor-path={EXAMPLES}",
        "--executor=colours:Colours",
        "--slab-nbytes=64MiB",
        "--name=examples",
    ]
    with ServerProcess.start(arguments, environment=environment, cwd=tmp_path, stop_limit_s=20) as server:
        server.wait_until_ready()
        question: dict[str, Any] = {"model": "colours", "messages": [{"role": "user", "content": "red and blue"}]}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=question, timeout=LIMIT_S).json()
    assert answer["choices"][0]["message"]["content"].split() == ["red", "and", "blue"]


def test_each_example_is_named_in_the_table() -> None:
    table = (EXAMPLES / "README.md").read_text()
    assert set(re.findall(r"\]\((\w+\.py)\)", table)) == {path.name for path in EXAMPLES.glob("*.py")}
