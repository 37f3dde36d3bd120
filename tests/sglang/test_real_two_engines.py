"""Two of SGLang's ``Engine`` in one process: each scheduler's tensors go through its own ring."""

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


def test_two_engines_in_one_process_both_answer(runtime_directory: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if "SHMRING_SGLANG" not in name}
    environment |= {"SHMRING_SGLANG": "1", "SHMRING_SGLANG_SLAB": "64MiB", "XDG_RUNTIME_DIR": str(runtime_directory)}
    command = [sys.executable, "-m", "tests.sglang.two_engines", str(Path(sys.prefix) / "model")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert {*re.findall(r"^answer (\d) ", output, re.MULTILINE)} == {"0", "1"}
    tensors = [json.loads(line) for line in re.findall(r"^tensors \d (.*)$", output, re.MULTILINE)]
    assert len(tensors) == 2
    for ways in tensors:
        assert "copied" in ways
        assert {*ways} <= {"copied", "inline connecting"}
    names = re.findall(r"scheduler 0 has a slab of 64 MiB \((\S+)\)", output)
    assert len({*names}) == 2
    assert "is not in the slab" not in output
