"""What memory there is, and a slab that can't be had: refused before anything is reserved, with all that is known."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shmring
from shmring.errors import SlabError
from shmring.memory import available
from shmring.memory.available import lack_of_memory
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1 kB\nMemAvailable:   8388608 kB\nSwapFree:       {swap} kB\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine of 16 GiB, 8 of them available; a container with 4, and 2 free in its /dev/shm."""
    (tmp_path / "meminfo").write_text(MEMINFO.format(swap=0))
    (tmp_path / "membership").write_text("0::/pod\n")
    (tmp_path / "pod").mkdir()
    (tmp_path / "pod" / "memory.max").write_text(f"{4 * GIB}\n")
    (tmp_path / "shm").mkdir()
    for name, path in (("MEMINFO", "meminfo"), ("MEMBERSHIP", "membership"), ("CGROUPS", ""), ("SHM_DIRECTORY", "shm")):
        monkeypatch.setattr(available, name, tmp_path / path)
    shm = os.statvfs_result((4096, 4096, 3 * GIB >> 12, 0, 2 * GIB >> 12, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _: shm)
    return tmp_path


def test_what_can_not_be_had_is_refused_with_all_that_is_known(machine: Path) -> None:
    assert lack_of_memory(4 * GIB) == ""
    assert lack_of_memory(10 << 40) == (
        "a slab of 10 TiB can't be had: 8 GiB of the machine's 16 GiB are available, "
        f"{machine}/pod/memory.max allows this container 4 GiB, {machine}/shm has 2 GiB of 3 GiB free; "
        "lower slab_nbytes, or raise the container's memory limit (docker run --memory=, resources.limits.memory)"
    )
    assert "slabs of 4.001 GiB can't be had" in lack_of_memory(4 * GIB + (1 << 20), "slabs")


@for_each(
    ("swap_kib", "nbytes", "is_said"),
    [(0, 8 * GIB, False), (0, 9 * GIB, True), (2 << 20, 10 * GIB, False), (2 << 20, 11 * GIB, True)],
)
def test_without_a_limit_of_the_container_the_machine_s_memory_and_swap_count(
    machine: Path, swap_kib: int, nbytes: int, is_said: bool
) -> None:
    (machine / "pod" / "memory.max").write_text("max\n")
    (machine / "meminfo").write_text(MEMINFO.format(swap=swap_kib))
    assert bool(text := lack_of_memory(nbytes, option="--slab-nbytes")) == is_said
    assert not is_said or text.endswith(" free; lower --slab-nbytes")
    assert not (is_said and swap_kib) or "2 GiB of swap are free" in text


def test_where_nothing_is_known_nothing_is_refused(machine: Path) -> None:
    (machine / "pod" / "memory.max").unlink()
    (machine / "meminfo").unlink()
    assert lack_of_memory(10 << 40) == ""


@for_each("backing", ["auto", "/dev/shm", "memfd"])
async def test_nothing_is_made_for_a_slab_that_can_not_be_had(
    machine: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch, backing: Any
) -> None:
    def made(*_: Any) -> None:
        raise AssertionError("a file was made")

    monkeypatch.setattr("posix_ipc.SharedMemory", made)
    monkeypatch.setattr(os, "memfd_create", made)
    config = shmring.RingConfig(slab_nbytes="10TiB", backing=backing, socket_dir=str(socket_dir))
    with pytest.raises(
        SlabError, match=r"a slab of 10 TiB can't be had: 8 GiB of the machine's 16 GiB are available"
    ) as caught:
        await shmring.serve("too-large", config)
    assert caught.value.nbytes == 10 << 40


@for_each("command", ["serve", "engine"])
def test_a_command_refuses_it_before_it_imports_or_loads_anything_large(command: str, socket_dir: Path) -> None:
    options = ["--slab-nbytes=10TiB", f"--socket-dir={socket_dir}", *(["--port=0"] if command == "serve" else [])]
    program = [sys.executable, "-X", "importtime", "-P", "-m", "shmring.frontend.cli", command, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1, said
    assert "of 10 TiB can't be had" in said[-1]
    assert said[-1].endswith("lower --slab-nbytes") or "raise the container's memory limit" in said[-1]
    assert "| torch" not in done.stderr, "it has imported torch"
