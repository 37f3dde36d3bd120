"""A server in an environment that lacks a package that decodes media, as one that was made for another server may."""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sysconfig
import urllib.error
import urllib.request
import venv
from pathlib import Path
from typing import Any

import pytest

from shmring.frontend.commands.serve_process import PROGRAM

ROOT = Path(__file__).resolve().parents[3]
PICTURE = ROOT / "frontend/samples/chelsea.jpg"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment that has all packages of this one but PyAV."""
    directory = tmp_path_factory.mktemp("environment")
    venv.create(directory / "environment", with_pip=False)
    (packages := directory / "packages").mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if path.name.partition(".")[0].partition("-")[0] != "av":
            (packages / path.name).symlink_to(path)
    [own] = (directory / "environment").glob("lib/python*/site-packages")
    (own / "packages.pth").write_text(f"{packages}\n{ROOT}\n")
    return directory / "environment/bin/python"


def embed(url: str, content: list[dict[str, Any]]) -> tuple[int, dict[str, Any]]:
    body = {"model": "shmring-fingerprints", "messages": [{"role": "user", "content": content}]}
    request = urllib.request.Request(f"{url}/v1/embeddings", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.slow
def test_it_says_so_at_the_start_and_to_callers_and_serves_texts(python: Path, socket_dir: Path, tmp_path: Path) -> None:
    picture = "data:image/jpeg;base64," + base64.b64encode(PICTURE.read_bytes()).decode()
    ready, told = os.pipe()
    command = [python, *PROGRAM, f"--socket-dir={socket_dir}", "--port=0", "--slab-nbytes=64MiB", f"--ready-fd={told}"]
    log = tmp_path / "log"
    with open(ready) as is_ready, log.open("wb") as errors:
        server = subprocess.Popen(
            command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=errors, pass_fds=[told]
        )
        os.close(told)
        with server:
            try:
                url = json.loads(is_ready.readline())["url"]
                status, answer = embed(url, [{"type": "image_url", "image_url": {"url": picture}}])
                assert (status, answer["error"]["code"]) == (501, "not_installed")
                assert "av" in answer["error"]["message"]
                assert "pip install 'shmring[serve]'" in answer["error"]["message"]
                assert embed(url, [{"type": "text", "text": "a cat"}])[0] == 200
            finally:
                server.terminate()
    said = log.read_text()
    assert "can't be decoded, and get 501: av not installed: pip install 'shmring[serve]'" in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_the_doctor_says_so(python: Path, tmp_path: Path) -> None:
    found = subprocess.run(
        [python, "-P", "-m", "shmring.frontend.cli", "doctor", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert "shmring[serve]" in found.stdout
