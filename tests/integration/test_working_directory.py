"""What lies in the working directory is not run: not the README's own engine.py, nor a platform.py."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import httpx
import pytest

from shmring.frontend.commands.serve_process import ServerError, ServerProcess
from shmring.frontend.processes.supervisor import Serving
from shmring.processes.process import Process

# Names of ours, of what we import, and of what the interpreter and torch import.
TRAPS = (
    *("engine", "frontend", "shmring", "bench"),
    *("click", "msgspec", "numpy", "prometheus_client", "torch", "uvicorn", "uvloop", "PIL", "av", "openai", "rich"),
    *("asyncio", "base64", "json", "logging", "platform", "random", "socket", "string", "tempfile", "types", "typing"),
    *("sitecustomize", "usercustomize"),
)
SPRING = "import os, sys\nopen(os.environ['SPRUNG'], 'a').write(__name__ + ' ' + ' '.join(sys.orig_argv) + '\\n')\n"

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "frontend" / "samples"
COMMAND = Path(sysconfig.get_path("scripts"), "shmring")


@pytest.fixture
def sprung(tmp_path: Path) -> Path:
    """Where traps say that they were imported; they lie in the working directory of :func:`run`."""
    trapped = tmp_path / "trapped"
    trapped.mkdir()
    for name in TRAPS:
        (trapped / f"{name}.py").write_text(SPRING)
    return tmp_path / "sprung"


def environment(sprung: Path, **more: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return own | {"SPRUNG": str(sprung), "XDG_RUNTIME_DIR": str(sprung.parent), "TMPDIR": str(sprung.parent)} | more


def test_the_traps_work(sprung: Path) -> None:
    subprocess.run([sys.executable, "-c", "import engine"], cwd=sprung.parent / "trapped", env=environment(sprung), check=True)
    assert sprung.read_text().startswith("engine ")


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["engine", "--help"], ["frontend", "--help"]])
def test_commands_that_only_talk_import_nothing_from_there(sprung: Path, arguments: list[str]) -> None:
    command = [COMMAND, *arguments]
    subprocess.run(command, cwd=sprung.parent / "trapped", env=environment(sprung), capture_output=True, timeout=60, check=True)
    assert not sprung.exists()


# What Python, and the script by which an installed command starts, import before anything of ours runs.
BEFORE_US = ("sitecustomize", "usercustomize", "types", "shmring")


def test_an_empty_part_of_the_path_is_not_the_working_directory(sprung: Path) -> None:
    for name in BEFORE_US:
        (sprung.parent / "trapped" / f"{name}.py").unlink()
    done = subprocess.run(
        [COMMAND, "--version"],
        cwd=sprung.parent / "trapped",
        env=environment(sprung, PYTHONPATH=f":{ROOT}"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout[:8]) == (0, "shmring "), done.stderr
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.slow  # it starts a server
@pytest.mark.parametrize("path", [None, f":{ROOT}", f"{ROOT}:"])
def test_a_server_and_its_processes_import_nothing_from_there(sprung: Path, path: str | None) -> None:
    if path is not None:
        for name in BEFORE_US:
            (sprung.parent / "trapped" / f"{name}.py").unlink()
    more = {} if path is None else {"PYTHONPATH": path}
    command = [str(COMMAND), "serve", "--port=0", "--slab-nbytes=16MiB", "--api-server-count=1"]
    directory = sprung.parent / "trapped"
    with Process.start(command, ready_flag="--ready-fd=", cwd=directory, env=environment(sprung, **more)) as server:
        serving = server.wait_until_ready(Serving)
        picture = base64.b64encode((SAMPLES / "chelsea.jpg").read_bytes()).decode()
        part = {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture}"}}
        question = {"model": "shmring-fingerprints", "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(f"{serving.url}/v1/embeddings", json=question, timeout=60)  # a decoder is started for it
        assert answer.status_code == 200, answer.text
        assert server.stop(20) == 0
    assert not sprung.exists(), sprung.read_text()


@pytest.mark.slow  # it imports torch
def test_neither_does_the_doctor(sprung: Path) -> None:
    command = [COMMAND, "doctor", "--slab-nbytes=16MiB"]
    directory = sprung.parent / "trapped"
    done = subprocess.run(
        command, cwd=directory, env=environment(sprung), capture_output=True, text=True, timeout=110, check=False
    )
    assert "self-test" in done.stdout
    assert not sprung.exists(), sprung.read_text()


def test_nor_does_the_server_of_the_demonstration(sprung: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(sprung.parent / "trapped")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("SPRUNG", str(sprung))
    with ServerProcess.start(["--port=none"]) as server, pytest.raises(ServerError, match="did not start"):
        server.wait_until_ready()
    assert not sprung.exists(), sprung.read_text()


def test_a_directory_called_shmring_does_not_hide_the_package(tmp_path: Path) -> None:
    """As in the parent of a clone: an editable installation by an import hook would lose to the empty namespace package."""
    (tmp_path / "shmring").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", "import shmring; print(shmring.__version__)"],
        cwd=tmp_path,
        env=environment(tmp_path / "sprung"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{done.stderr}\nIs this an older installation? pip install -e ."
