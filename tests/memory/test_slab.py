"""The slab: reserved in full or not at all, nameless from the start, gone with the last process that maps it."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import posix_ipc
import pytest

from shmring.errors import SlabError
from shmring.memory import slab as slab_module
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY, Slab, sweep

PREFIX = f"{NAME_PREFIX}-{os.getuid()}-"
MIB = 1 << 20
PAGE = mmap.PAGESIZE


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create("unit", MIB, epoch=7, prefault=True)
    yield slab
    slab.close()


def segments() -> list[str]:
    return [path.name for path in SHM_DIRECTORY.glob(f"{PREFIX}unit-*")]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mapping(address: int) -> dict[str, str]:
    """What the kernel says of the mapping that starts at an address; empty if there is none."""
    fields: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith((f"{address:x}-", f"{address:012x}-")):
            fields["range"] = line
        elif "-" in line.split()[0] and fields:
            break
        elif fields:
            key, _, value = line.partition(":")
            fields[key] = value.strip()
    return fields


def run_script(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )


# -- creating -----------------------------------------------------------------------------------------------------------


def test_a_slab_has_no_name_from_the_start(slab: Slab) -> None:
    assert segments() == []
    assert os.readlink(f"/proc/self/fd/{slab.fd}").endswith("(deleted)")


def test_every_page_is_reserved_even_if_none_is_touched() -> None:
    slab = Slab.create("unit", MIB, epoch=1, prefault=False)
    status = os.fstat(slab.fd)
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB
    assert status.st_mode & 0o777 == 0o600
    slab.close()


def test_prefaulting_maps_every_page(slab: Slab) -> None:
    assert mapping(slab.address)["Rss"] == f"{MIB >> 10} kB"


def test_a_forked_child_does_not_get_the_mapping(slab: Slab) -> None:
    assert "dc" in mapping(slab.address)["VmFlags"].split(), "madvise(MADV_DONTFORK) shows as 'dc'"


def test_a_full_shm_is_a_clear_error_and_leaves_nothing() -> None:
    too_large_nbytes = os.statvfs(SHM_DIRECTORY).f_blocks * os.statvfs(SHM_DIRECTORY).f_frsize + (64 << 20)
    before = descriptors()
    with pytest.raises(SlabError) as caught:
        Slab.create("unit", too_large_nbytes, epoch=1, prefault=True)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.nbytes == too_large_nbytes
    assert caught.value.path == f"/{PREFIX}unit-{1:016x}"
    for part in (f"reserving {too_large_nbytes} bytes", "are free", "lower slab_nbytes", "--shm-size"):
        assert part in str(caught.value)
    assert segments() == []
    assert descriptors() == before


def test_a_name_that_exists_is_an_error() -> None:
    path = f"/{PREFIX}unit-{1:016x}"
    taken = posix_ipc.SharedMemory(path, posix_ipc.O_CREX, size=0)
    try:
        with pytest.raises(SlabError, match="creating a segment") as caught:
            Slab.create("unit", MIB, epoch=1, prefault=False)
        assert caught.value.path == path
        assert segments() == [path[1:]], "it is somebody else's"
    finally:
        taken.close_fd()
        posix_ipc.unlink_shared_memory(path)


@pytest.mark.parametrize("step", ["_reserve", "_SLAB_HEADER"])
def test_a_failure_midway_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SlabError("broken")

    if step == "_reserve":
        monkeypatch.setattr(slab_module, "_reserve", fail)
    else:
        monkeypatch.setattr(slab_module, "Mapping", fail)
    before = descriptors()
    with pytest.raises(SlabError, match="broken"):
        Slab.create("unit", MIB, epoch=1, prefault=False)
    assert segments() == []
    assert descriptors() == before


# -- attaching ----------------------------------------------------------------------------------------------------------


def test_both_ends_see_the_same_bytes(slab: Slab) -> None:
    other = Slab.attach(os.dup(slab.fd), MIB, epoch=7)
    assert other.address != slab.address
    other.anchor(5 * PAGE, 16)[:] = 42
    assert slab.anchor(5 * PAGE, 16).tolist() == [42] * 16
    assert "dc" in mapping(other.address)["VmFlags"].split()
    other.close()


def test_attaching_takes_the_descriptor_over_and_needs_none(slab: Slab) -> None:
    before = descriptors()
    fd = os.dup(slab.fd)
    other = Slab.attach(fd, MIB, epoch=7)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other.close()
    assert descriptors() == before


@pytest.mark.parametrize("nbytes", [MIB // 2, 2 * MIB])
def test_a_slab_that_is_not_of_the_announced_size_is_refused(slab: Slab, nbytes: int) -> None:
    before = descriptors()
    with pytest.raises(SlabError, match="announced"):
        Slab.attach(os.dup(slab.fd), nbytes, epoch=7)
    assert descriptors() == before


# -- addresses and views -------------------------------------------------------------------------------------------------


def test_find_knows_its_own_addresses_only(slab: Slab) -> None:
    assert slab.find(slab.address) == 0
    assert slab.find(slab.address + MIB - 1) == MIB - 1
    assert slab.find(slab.address + MIB) is None
    assert slab.find(slab.address - 1) is None
    assert slab.find(int(np.zeros(1).ctypes.data)) is None


def test_closing_unmaps_and_closes(slab: Slab) -> None:
    before = descriptors()
    other = Slab.create("unit", MIB, epoch=2, prefault=False)
    address = other.address
    other.close()
    other.close()
    assert mapping(address) == {}
    assert descriptors() == before


def test_living_views_outlive_the_closing_and_the_mapping_goes_with_the_last_of_them() -> None:
    gc.disable()
    try:
        slab = Slab.create("unit", MIB, epoch=2, prefault=False)
        address, view = slab.address, slab.anchor(PAGE, 64)
        view[:] = 9
        tail = view[32:]
        slab.close()
        del view
        assert tail.tolist() == [9] * 32
        assert mapping(address) != {}
        del tail
        assert mapping(address) == {}, "the closed slab itself must not keep the mapping"
    finally:
        gc.enable()


def test_protecting_a_range_turns_a_stray_write_into_a_fault() -> None:
    script = """
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        from shmring.memory import slab as slab_module
        slab = slab_module.Slab.create("unit", 1 << 20, 1, prefault=True)
        slab.protect(0, 1 << 20, readable=True, writable=False)
        slab_module._MADV_POPULATE_WRITE = 9999
        slab.prefault(0, 1 << 20)  # without the kernel's help it must not write, or it would race with others' writes
        slab.protect(8192, 4096, readable=True, writable=True)
        slab.anchor(8192, 4096)[:] = 1
        print(slab.anchor(0, 8).tobytes(), flush=True)
        slab.anchor(12288, 1)[0] = 1
        print("survived")
    """
    done = run_script(script)
    assert done.stdout == "b'shmrslab'\n"
    assert done.returncode == -11


def test_advice_to_nowhere_is_an_error(slab: Slab) -> None:
    with pytest.raises(SlabError, match="mprotect") as caught:
        slab.protect(1, PAGE, readable=True, writable=True)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(SlabError, match="prefault"):
        slab.prefault(1 << 46, PAGE)


def test_a_kernel_without_populate_touches_the_pages_instead(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)
    fresh = Slab.create("unit", MIB, epoch=3, prefault=False)
    fresh.anchor(PAGE, 4)[:] = 77
    fresh.prefault(0, MIB)
    assert mapping(fresh.address)["Rss"] == f"{MIB >> 10} kB"
    assert fresh.anchor(PAGE, 4).tolist() == [77] * 4, "touching changes nothing"
    fresh.close()


# -- sweeping -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own: engines of other test runs sweep, too."""
    monkeypatch.setattr(slab_module, "NAME_PREFIX", f"{NAME_PREFIX}test{os.getpid()}")
    return f"{slab_module.NAME_PREFIX}-{os.getuid()}-"


@pytest.fixture
def leftover(prefix: str) -> Iterator[Path]:
    """What a process leaves that dies between creating its segment and unlinking it."""
    path = SHM_DIRECTORY / f"{prefix}dead"
    posix_ipc.SharedMemory(f"/{path.name}", posix_ipc.O_CREX, mode=0o600, size=PAGE).close_fd()
    yield path
    path.unlink(missing_ok=True)


def test_a_sweep_removes_what_a_crash_left(leftover: Path) -> None:
    before = descriptors()
    assert sweep() == [leftover.name]
    assert not leftover.exists()
    assert descriptors() == before


def test_a_sweep_leaves_what_a_living_engine_holds(leftover: Path) -> None:
    with leftover.open("rb") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        assert sweep() == []
        assert leftover.exists()
    assert sweep() == [leftover.name]


def test_a_sweep_leaves_other_names(prefix: str) -> None:
    others = [SHM_DIRECTORY / f"{slab_module.NAME_PREFIX}-{os.getuid() + 1}-unit", SHM_DIRECTORY / f"x{prefix}unit"]
    try:
        for path in others:
            path.touch()
        assert sweep() == []
        assert all(path.exists() for path in others)
    finally:
        for path in others:
            path.unlink()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a file another user's")
def test_a_sweep_leaves_what_another_user_put_under_our_prefix(leftover: Path) -> None:
    os.chown(leftover, 12345, 12345)
    assert sweep() == []
    assert leftover.exists()


@pytest.mark.parametrize("kind", ["symlink", "directory", "fifo"])
def test_what_somebody_else_puts_in_our_way_stops_nobody(kind: str, prefix: str, tmp_path: Path) -> None:
    """/dev/shm is writable for everybody: whatever lies there under our prefix must not keep an engine from starting."""
    trap = SHM_DIRECTORY / f"{prefix}trap"
    victim = tmp_path / "victim"
    victim.write_text("precious")
    if kind == "symlink":
        trap.symlink_to(victim)
    elif kind == "directory":
        trap.mkdir()
    else:
        os.mkfifo(trap)
    try:
        assert sweep() == []
        assert os.path.lexists(trap)
        assert victim.read_text() == "precious"
    finally:
        trap.rmdir() if kind == "directory" else trap.unlink(missing_ok=True)


def test_a_slab_whose_name_was_swept_in_the_making_is_as_good(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may come between the creation of the name and its lock."""
    create = posix_ipc.SharedMemory

    def swept_at_once(path: str, *arguments: int, **options: int) -> posix_ipc.SharedMemory:
        segment = create(path, *arguments, **options)
        assert sweep() == [path[1:]]
        return segment

    monkeypatch.setattr(slab_module.posix_ipc, "SharedMemory", swept_at_once)
    slab = Slab.create("unit", MIB, epoch=4, prefault=False)
    slab.anchor(0, 1)
    slab.close()
