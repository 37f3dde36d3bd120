"""vLLM's ``LLM``, which has no event loop: the same answers with the plug-in and without."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]


def run(directory: Path, **settings: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SHMRING_VLLM")} | settings
    command = [sys.executable, "-m", "tests.vllm.offline", str(directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_the_answers_are_the_same(runtime_directory: Path) -> None:
    without = run(runtime_directory)
    # Where something else runs beside, a request may wait for space longer than it does by default; then it would go inline.
    settings = {"SHMRING_VLLM_SLAB": "256MiB", "SHMRING_VLLM_WAIT_S": "10", "SHMRING_VLLM_CHECK": "1"}
    output = run(runtime_directory, SHMRING_VLLM="1", **settings)
    digests = re.findall(r"^digest (\w+)$", without + output, re.MULTILINE)
    assert len(digests) == 2
    assert digests[0] == digests[1]
    (line,) = re.findall(r"^report (.*)$", output, re.MULTILINE)
    report = json.loads(line)
    assert (report["taken"], report["lost"], report["slots_in_use"], report["copies"]) == (8, 0, 0, False)
    assert "shmring: large tensors sent: 8 copied, 86.7 MB" in output
    assert "shmring" not in without
