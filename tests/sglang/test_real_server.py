"""A scheduler and a tokenizer: answers are those of SGLang without the plug-in, and tensors go through the slab."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bench.servers import picture
from tests.sglang.server import Server, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1200)

ROOT = Path(__file__).resolve().parents[2]
SIDE = 672
PICTURES = [picture(SIDE, seed) for seed in range(6)]


def answers(server: Server) -> list[str]:
    """One picture at a time, then six at a time, two in one request, and two answers to one request."""
    alone = [server.ask(url) for url in PICTURES]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(server.ask, PICTURES))
    assert len({*alone}) == len({*together}) == len(PICTURES)  # they are about the pictures
    return [*alone, server.ask(*PICTURES[:2]), server.ask(PICTURES[0], n=2)]


@pytest.fixture(scope="module")
def without(runtime_directory: Path) -> list[str]:
    directory = runtime_directory / "without"
    directory.mkdir()
    with serve(directory) as server:
        said = answers(server)
        assert server.metrics() == {}
        assert "shmring:" not in server.log
        return said


@pytest.fixture(scope="module")
def server(runtime_directory: Path, without: list[str]) -> Iterator[Server]:
    """Started when the other one has ended: both together are much for a small machine."""
    with serve(runtime_directory, environment={"SHMRING_SGLANG": "1", "SHMRING_SGLANG_SLAB": "256MiB"}) as server:
        yield server


def test_answers_are_the_same(server: Server, without: list[str]) -> None:
    server.ask(picture(56, 0))  # the tokenizer connects with its first request
    until(lambda: "tensors go through shared memory" in server.log)
    before = server.tensors().get("copied", 0)
    assert answers(server) == without
    sent = server.tensors()
    assert sent["copied"] - before > 6 + 6 + 1
    assert set(sent) <= {"copied", "inline connecting"}
    assert server.report()["lost"] == 0


def test_the_program_of_the_page_shows_how_a_tensor_went(server: Server) -> None:
    copied = server.tensors()["copied"]
    command = [sys.executable, ROOT / "tests/programs/ask_about_a_picture.py", server.url, str(SIDE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("answer: ")
    assert f'way="copied"}} {copied + 1}.0\n' in done.stdout


def test_slots_come_back(server: Server) -> None:
    """SGLang has the last request in hand until the next one comes, which has no picture here."""
    server.ask()
    until(lambda: server.report()["slots_in_use"] <= 1)


def test_no_segment_is_made(server: Server) -> None:
    server.ask(PICTURES[0])
    assert server.left_behind() == []
