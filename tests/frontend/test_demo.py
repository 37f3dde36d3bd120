"""The demonstration, run as a user does, and how it tells that something is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from frontend import demo

ROOT = Path(__file__).resolve().parents[2]


def test_it_shows_that_altered_copies_find_their_originals() -> None:
    command = [sys.executable, "-m", "frontend.cli", "demo"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "150"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("✓") == 8 * 4
    assert "✗" not in result.stdout
    assert "0 were copied" in result.stdout
    assert "nothing is left in /dev/shm" in result.stdout


def test_the_nearest_is_the_most_similar() -> None:
    def answer(*embedding: float) -> demo._Answer:
        return demo._Answer(np.array(embedding), 1, 0, 1.0)

    originals = {"a": answer(1, 0), "b": answer(0, 1), "c": answer(0.6, 0.8)}
    assert demo._nearest(answer(0, 1), originals) == ("b", 1.0)
    assert demo._nearest(originals["b"], originals, but="b") == ("c", 0.8)


@pytest.mark.parametrize(
    ("alteration", "size"),
    [("_recompressed", (200, 100)), ("_scaled", (100, 50)), ("_brightened", (200, 100)), ("_cropped", (190, 96))],
)
def test_alterations_alter(alteration: str, size: tuple[int, int]) -> None:
    altered = getattr(demo, alteration)(Image.new("RGB", (200, 100), (100, 100, 100)))
    assert altered.size == size
    assert altered.getpixel((0, 0)) == ((110,) * 3 if alteration == "_brightened" else (100,) * 3)


def test_what_is_left_behind_is_found() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""], text=True)
    process.wait()
    segment = Path(f"/dev/shm/shmring-{os.getuid()}-demo-{os.getpid()}-0")
    segment.touch()
    try:
        problems = demo._left_behind(demo._Server(process, "", [process.pid, os.getpid()]))
    finally:
        segment.unlink()
    assert problems == [f"process {os.getpid()} survives", f"{segment} is left"]


def test_every_sample_picture_is_shown() -> None:
    assert len(dict(demo._samples())) == 8
