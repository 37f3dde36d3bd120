"""Two engines of vLLM side by side, in one process or of one name: tensors go through an engine core's own ring, or inline."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.servers import picture
from bench.vllm.server import serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
SIDE = 1344


@pytest.mark.parametrize(("name", "second"), [("", "copied"), ("twin", "inline engine")], ids=["made-up names", "one name"])
def test_two_llms_in_one_process_both_answer(runtime_directory: Path, name: str, second: str) -> None:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("SHMRING_VLLM", "_SHMRING_VLLM"))}
    environment |= {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "64MiB", "SHMRING_VLLM_CHECK": "1", "SHMRING_VLLM_NAME": name}
    environment |= {"SHMRING_VLLM_WAIT_S": "10"}
    command = [sys.executable, "-m", "tests.vllm.two_llms", str(runtime_directory)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    assert re.findall(r"^answer (\d) ", output, re.MULTILINE) == ["0", "1"]
    tensors = [json.loads(line) for line in re.findall(r"^tensors \d (.*)$", output, re.MULTILINE)]
    assert tensors == [{"copied": 1}, {second: 1}]
    assert output.count("has a slab of 64 MiB") == (1 if name else 2)
    assert output.count(
        "engine core 0 has no slab, and tensors go inline: an engine named 'twin-0' is running already"
    ) == bool(name)
    assert "AssertionError" not in output


def test_a_second_server_of_one_name_answers_and_gets_the_name_when_the_first_has_ended(runtime_directory: Path) -> None:
    directories = [runtime_directory / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    settings = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "64MiB", "XDG_RUNTIME_DIR": str(runtime_directory)}
    with (
        serve(directories[0], side=SIDE, api_servers=2, environment=settings) as first,
        serve(directories[1], side=SIDE, environment=settings) as second,
    ):
        assert first.ask(picture(SIDE, 0))
        assert second.ask(picture(SIDE, 0))
        assert second.tensors() == {"inline engine": 1}
        assert second.log.count("engine core 0 has no slab, and tensors go inline: an engine named 'test-0' is running") == 1
        assert second.log.count("tensors go inline until the ring of engine core 0 is reached: an engine named") == 1
        for core in first.processes("EngineCore"):
            core.kill()  # which ends the whole of that server
        until(lambda: "go through shared memory (test-0)" in second.log)
        assert second.ask(picture(SIDE, 1))
        assert second.tensors() == {"inline engine": 1, "copied": 1}
