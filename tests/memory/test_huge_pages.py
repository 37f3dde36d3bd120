"""Huge pages: as many as there are, nothing that hurts where there are none, and every byte reserved either way."""

from __future__ import annotations

import errno
import logging
import mmap
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shmring.core.compiled import Mapping
from shmring.memory import huge_pages
from shmring.memory.huge_pages import HUGE_PAGE_NBYTES, can_be_had, reserve_huge_pages
from shmring.memory.slab import Slab
from tests.tables import for_each

MIB = 1 << 20

_MADV_COLLAPSE = 25


@pytest.fixture
def some_are_free() -> None:
    """Skips a test where the kernel gives no huge pages for shared memory, or has no six of them now and can't make them."""
    if not can_be_had():
        pytest.skip("this kernel gives no huge pages for shared memory")
    with mmap.mmap(-1, 7 * HUGE_PAGE_NBYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:  # wherever it begins, six fit
        for offset in range(0, len(area), HUGE_PAGE_NBYTES):
            area[offset] = 1
        try:
            area.madvise(_MADV_COLLAPSE)
        except OSError as error:
            pytest.skip(f"there are no huge pages now: {error}")


needs_huge_pages = pytest.mark.usefixtures("some_are_free")


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("unit", os.MFD_CLOEXEC)
    yield fd
    os.close(fd)


def huge_nbytes_of(address: int) -> int:
    """How much of the mapping that starts at an address the page tables map by huge pages."""
    _, _, rest = Path("/proc/self/smaps").read_text().partition(f"{address:x}-")
    assert rest, f"nothing is mapped at {address:x}"
    found = re.search(r"^ShmemPmdMapped: +(\d+) kB", rest, re.MULTILINE)
    assert found
    return int(found[1]) << 10


@needs_huge_pages
def test_what_is_reserved_is_there_and_is_empty(fd: int) -> None:
    nbytes = 3 * HUGE_PAGE_NBYTES + 5 * 4096
    assert reserve_huge_pages(fd, nbytes) == 3 * HUGE_PAGE_NBYTES
    status = os.fstat(fd)
    assert status.st_size == nbytes
    assert status.st_blocks * 512 == 3 * HUGE_PAGE_NBYTES
    assert os.pread(fd, nbytes, 0) == bytes(nbytes)


@needs_huge_pages
def test_a_slab_is_mapped_by_huge_pages_at_both_ends() -> None:
    slab = Slab.create("unit", 8 * MIB, epoch=1, prefault=True, reply_nbytes=4 * MIB)
    attached = Slab.attach((os.dup(slab.fd), os.dup(slab.reply_fd)), slab.nbytes, slab.reply_nbytes, slab.epoch)
    try:
        assert huge_nbytes_of(slab.address) == 4 * MIB
        assert huge_nbytes_of(slab.address + 4 * MIB) == 4 * MIB
        attached.prefault(0, 4 * MIB)
        assert huge_nbytes_of(attached.address) == 4 * MIB
    finally:
        attached.close()
        slab.close()


@needs_huge_pages
def test_a_slab_says_how_much_of_it_lies_in_huge_pages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shmring.ring")
    Slab.create("unit", 4 * MIB, epoch=1, prefault=False, backing="memfd").close()
    assert f"{4 * MIB} of {4 * MIB} bytes in a memfd lie in huge pages" in caplog.text


class _Refusing:
    """A mapping whose kernel has no huge pages."""

    def __init__(self, *_: int) -> None:
        self.asked = 0

    def advise(self, offset: int, nbytes: int, advice: int) -> None:
        if advice == huge_pages._MADV_COLLAPSE:
            self.asked += 1
            raise OSError(errno.EINVAL, "no")


def test_where_there_are_none_it_soon_stops_to_ask(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    refusing = _Refusing()
    monkeypatch.setattr(huge_pages, "Mapping", lambda *_: refusing)
    assert reserve_huge_pages(fd, 64 * MIB) == 0
    assert refusing.asked == 8
    assert os.fstat(fd).st_size == 64 * MIB
    assert not can_be_had()
    slab = Slab.create("unit", 16 * MIB, epoch=1, prefault=True)
    assert os.fstat(slab.fd).st_blocks * 512 == 16 * MIB
    slab.close()


def test_an_engine_does_not_wait_long_for_them(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter(range(100))
    monkeypatch.setattr(huge_pages.time, "monotonic", lambda: float(next(seconds)))
    reserve_huge_pages(fd, 64 * MIB)  # each range takes a second
    assert os.fstat(fd).st_blocks * 512 <= 6 * HUGE_PAGE_NBYTES


def test_a_mapping_starts_where_a_huge_page_may_and_leaves_nothing_behind(fd: int) -> None:
    os.ftruncate(fd, 4 * HUGE_PAGE_NBYTES)

    def mapped() -> list[str]:
        return [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("(deleted)")]

    before = mapped()
    for nbytes in (4096, HUGE_PAGE_NBYTES - 4096, HUGE_PAGE_NBYTES, HUGE_PAGE_NBYTES + 4096, 4 * HUGE_PAGE_NBYTES):
        mapping: Any = Mapping(fd, nbytes)
        if nbytes >= HUGE_PAGE_NBYTES:
            assert mapping.address % HUGE_PAGE_NBYTES == 0
        new = [line for line in mapped() if line not in before]
        assert new == [f"{mapping.address:x}-{mapping.address + nbytes:x}"]
        del mapping
        assert mapped() == before


def test_mapping_reserves_no_address_space_that_it_does_not_return() -> None:
    code = """if True:
        import os, re
        from shmring.core.compiled import Mapping
        fd = os.memfd_create("unit")
        os.ftruncate(fd, 6 << 20)
        def size():
            return int(re.search(r"VmSize:\\s+(\\d+)", open("/proc/self/status").read())[1])
        Mapping(fd, 6 << 20)
        before = size()
        for _ in range(200):
            Mapping(fd, 6 << 20)
            Mapping(fd, (6 << 20) - 5)
        assert size() == before, (size(), before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@for_each("nbytes", [1 << 50, 1 << 63, (1 << 64) - 1, (1 << 64) - 4096])
def test_more_than_there_are_addresses_is_refused(fd: int, nbytes: int) -> None:
    with pytest.raises(OSError, match="memory"):
        Mapping(fd, nbytes)


def test_a_full_file_system_is_an_error_and_no_sigbus(tmp_path: Path) -> None:
    if os.getuid():
        pytest.skip("only root may mount a small tmpfs")
    mount = f'mount -t tmpfs -o size=8m tmpfs "{tmp_path}" && exec "$0" -c "$1" "{tmp_path}/file"'
    code = """if True:
        import errno, os, sys
        from shmring.memory.huge_pages import reserve_huge_pages
        fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
        try:
            reserve_huge_pages(fd, 32 << 20)
        except OSError as error:
            assert error.errno == errno.ENOSPC, error
        else:
            raise AssertionError("32 MiB went into 8")
        print("refused")
    """
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mount, sys.executable, code], capture_output=True, text=True, timeout=60, check=False
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespace can be had: {done.stderr.strip()}")
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr
