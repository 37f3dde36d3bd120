"""Tests of code that calls an engine: pytest fixtures with a real ring, whose requests the test answers itself.

    pytest examples/test_caller.py

The engine's side is `shmring.threads`, which needs no plugin of pytest; the code under test may use asyncio or threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import shmring
import shmring.threads


async def find_label(pixels: torch.Tensor, socket_dir: str | None = None, timeout: float = 60) -> str:
    """Stands for the code under test: asks an engine for scores, and says what a picture shows."""
    async with shmring.connect("classifier", socket_dir=socket_dir) as client:
        try:
            scores = await client.request({"pixels": pixels}, timeout=timeout, reply_type=dict[str, float])
        except (TimeoutError, shmring.EngineDeadError):
            return "unknown"
    return max(scores, key=lambda label: scores[label])


@pytest.fixture
def ring(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shmring.threads.Ring]:
    """An engine's ring, in a directory of its own: tests that run side by side do not meet."""
    directory = tmp_path_factory.mktemp("ring")
    directory.chmod(0o700)
    with shmring.threads.serve("classifier", slab_nbytes="4MiB", socket_dir=str(directory)) as ring:
        yield ring


@pytest.fixture
def beside() -> Iterator[ThreadPoolExecutor]:
    """Runs the code under test while the test is the engine."""
    with ThreadPoolExecutor() as threads:
        yield threads


def test_the_best_score_is_the_label(ring: shmring.threads.Ring, beside: ThreadPoolExecutor) -> None:
    label = beside.submit(asyncio.run, find_label(torch.ones(3, 32, 32), ring.config.socket_dir))
    with ring.claim(timeout=60) as claim:
        assert claim.payload["pixels"].shape == (3, 32, 32)
        claim.reply({"cat": 0.2, "dog": 0.7})
    assert label.result(timeout=60) == "dog"


def test_an_engine_that_is_silent_is_not_waited_for(ring: shmring.threads.Ring, beside: ThreadPoolExecutor) -> None:
    label = beside.submit(asyncio.run, find_label(torch.ones(3, 32, 32), ring.config.socket_dir, timeout=0.1))
    assert label.result(timeout=60) == "unknown"


def test_an_engine_that_dies_gives_no_label(ring: shmring.threads.Ring, beside: ThreadPoolExecutor) -> None:
    label = beside.submit(asyncio.run, find_label(torch.ones(3, 32, 32), ring.config.socket_dir))
    with ring.claim(timeout=60):
        ring.close()
    assert label.result(timeout=60) == "unknown"


def test_a_failure_is_the_engines_and_not_hidden(ring: shmring.threads.Ring, beside: ThreadPoolExecutor) -> None:
    label = beside.submit(asyncio.run, find_label(torch.ones(3, 32, 32), ring.config.socket_dir))
    with ring.claim(timeout=60) as claim:
        claim.fail(ValueError("the picture is too small"))
    with pytest.raises(shmring.RemoteError, match="too small"):
        label.result(timeout=60)
