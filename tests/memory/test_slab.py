"""The slab: reserved in full or not at all, nameless from the start, gone with the last process that maps it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import resource
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import posix_ipc
import pytest

from shmring.config import BACKINGS, Backing
from shmring.errors import SlabError
from shmring.memory import huge_pages
from shmring.memory import slab as slab_module
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY, Slab, sweep
from tests.garbage import uncollected
from tests.segments import own_name, segments_of
from tests.tables import for_each

PREFIX = f"{NAME_PREFIX}-{os.getuid()}-"
NAME = own_name("unit")
MIB = 1 << 20
PAGE = mmap.PAGESIZE
MEMFD = f"/memfd:{NAME_PREFIX}-"


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create(NAME, MIB, epoch=7, prefault=True)
    yield slab
    slab.close()


@pytest.fixture
def prefix(monkeypatch: pytest.MonkeyPatch) -> str:
    """A prefix of this test's own: engines of other test runs sweep, too."""
    monkeypatch.setattr(slab_module, "NAME_PREFIX", f"{NAME_PREFIX}test{os.getpid()}")
    return f"{slab_module.NAME_PREFIX}-{os.getuid()}-"


@pytest.fixture
def taken(prefix: str) -> Iterator[str]:
    """The path of a segment that is there already, in the place of that of the engine ``NAME`` of epoch 1."""
    path = f"/{prefix}{NAME}-{1:016x}"
    posix_ipc.SharedMemory(path, posix_ipc.O_CREX, size=0).close_fd()
    yield path
    posix_ipc.unlink_shared_memory(path)


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    """Each test leaves as many descriptors as there were, and no segment."""
    before = descriptors()
    yield
    assert descriptors() == before
    assert segments_of(NAME) == []


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
    assert segments_of(NAME) == []
    assert os.readlink(f"/proc/self/fd/{slab.fd}").endswith("(deleted)")


def test_every_page_is_reserved_even_if_none_is_touched() -> None:
    slab = Slab.create(NAME, MIB, epoch=1, prefault=False)
    status = os.fstat(slab.fd)
    assert status.st_size == MIB
    assert status.st_blocks * 512 >= MIB
    assert status.st_mode & 0o777 == 0o600
    slab.close()


def test_prefaulting_maps_every_page(slab: Slab) -> None:
    assert mapping(slab.address)["Rss"] == f"{MIB >> 10} kB"


def test_a_forked_child_does_not_get_the_mapping(slab: Slab) -> None:
    assert "dc" in mapping(slab.address)["VmFlags"].split(), "madvise(MADV_DONTFORK) shows as 'dc'"


def test_a_full_shm_is_a_clear_error_and_leaves_nothing(small_shm: None) -> None:
    with pytest.raises(SlabError) as caught:
        Slab.create(NAME, MIB, epoch=1, prefault=True, backing="/dev/shm")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.nbytes == MIB
    assert caught.value.path == f"/{PREFIX}{NAME}-{1:016x}"
    for part in (f"reserving {MIB} bytes", "are free", "lower slab_nbytes", "--shm-size"):
        assert part in str(caught.value)


def test_a_name_that_exists_is_an_error(taken: str) -> None:
    with pytest.raises(SlabError, match="creating a segment", check=lambda error: error.path == taken):
        Slab.create(NAME, MIB, epoch=1, prefault=False, backing="/dev/shm")
    assert (SHM_DIRECTORY / taken[1:]).exists(), "it is somebody else's"


@for_each("backing", BACKINGS)
@for_each("step", ["_reserve", "_create_memfd", "Mapping", "_seal"])
def test_a_failure_midway_leaves_nothing(step: str, backing: Backing, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise SlabError("broken")

    monkeypatch.setattr(slab_module, step, fail)
    with pytest.raises(SlabError, match="broken"):
        Slab.create(NAME, MIB, epoch=1, prefault=False, reply_nbytes=PAGE, backing=backing)


@pytest.mark.parametrize("step", ["_keep_from_children", "prefault"])
def test_a_failure_at_the_end_leaves_nothing(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise SlabError("broken")

    monkeypatch.setattr(Slab, step, fail)
    with pytest.raises(SlabError, match="broken"):
        Slab.create(NAME, MIB, epoch=1, prefault=True, reply_nbytes=PAGE)


# -- where it lies -------------------------------------------------------------------------------------------------------


def place_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}").partition(NAME)[0]


@pytest.mark.parametrize(
    ("backing", "place", "shm_nbytes"),
    [("auto", f"/dev/shm/{PREFIX}", MIB - 4 * PAGE), ("/dev/shm", f"/dev/shm/{PREFIX}", MIB - 4 * PAGE), ("memfd", MEMFD, 0)],
)
def test_it_lies_where_it_was_asked_to_and_replies_lie_in_a_memfd(
    backing: Backing, place: str, shm_nbytes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "shmring.ring")
    slab = Slab.create(NAME, MIB, epoch=1, prefault=False, reply_nbytes=4 * PAGE, backing=backing)
    assert (slab.nbytes, slab.reply_nbytes, slab.shm_nbytes) == (MIB, 4 * PAGE, shm_nbytes)
    assert (place_of(slab.fd), place_of(slab.reply_fd)) == (place, MEMFD)
    for fd, nbytes in ((slab.fd, MIB - 4 * PAGE), (slab.reply_fd, 4 * PAGE)):
        status = os.fstat(fd)
        assert status.st_size == nbytes
        assert status.st_blocks * 512 >= nbytes, "every page is reserved"
        assert not os.get_inheritable(fd)
    assert ("in a memfd, and not in /dev/shm: as configured" in caplog.text) == (backing == "memfd")
    slab.close()


@pytest.fixture
def small_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/shm has 64 KiB free, if it is asked. ``integration/test_guarantees_processes.py`` has one that is really small."""
    ask = os.fstatvfs

    def fstatvfs(fd: int) -> os.statvfs_result:
        found = list(ask(fd))
        if os.readlink(f"/proc/self/fd/{fd}").startswith("/dev/shm/"):
            found[0:5] = [PAGE, PAGE, 32, 16, 16]
        return os.statvfs_result(found)

    monkeypatch.setattr(os, "fstatvfs", fstatvfs)


def test_what_does_not_fit_goes_to_a_memfd_and_the_log_says_why(small_shm: None, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shmring.ring")
    slab = Slab.create(NAME, MIB, epoch=1, prefault=False)
    assert (place_of(slab.fd), slab.shm_nbytes) == (MEMFD, 0)
    assert f"{MIB} bytes of the slab are in a memfd" in caplog.text
    assert f"reserving {MIB} bytes in /dev/shm failed" in caplog.text
    assert f"{16 * PAGE} bytes of {32 * PAGE} are free" in caplog.text
    slab.close()


def test_what_just_fits_stays_in_shm(small_shm: None) -> None:
    slab = Slab.create(NAME, 18 * PAGE, epoch=1, prefault=False, reply_nbytes=2 * PAGE)
    assert slab.shm_nbytes == 16 * PAGE
    slab.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_what_others_take_meanwhile_makes_it_go_to_a_memfd(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    allocate = os.posix_fallocate

    def posix_fallocate(fd: int, offset: int, nbytes: int) -> None:
        if place_of(fd) != MEMFD:
            raise OSError(number, os.strerror(number))
        allocate(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    slab = Slab.create(NAME, MIB, epoch=1, prefault=False)
    assert slab.shm_nbytes == 0
    slab.close()
    with pytest.raises(SlabError, match="backing='memfd'", check=lambda error: error.errno == number):
        Slab.create(NAME, MIB, epoch=1, prefault=False, backing="/dev/shm")


@pytest.mark.usefixtures("taken")
def test_where_no_segment_can_be_made_a_memfd_is_taken() -> None:
    slab = Slab.create(NAME, MIB, epoch=1, prefault=False)
    assert slab.shm_nbytes == 0
    slab.close()


@for_each("reply_nbytes", [0, 1 << 60])
def test_more_than_the_memory_is_a_clear_error_and_nobody_is_killed_for_it(reply_nbytes: int) -> None:
    with pytest.raises(
        SlabError, match=r"a slab of 1.049e\+06 TiB can't be had: .* of the machine's .* are available"
    ) as caught:
        Slab.create(NAME, MIB + (1 << 60), epoch=1, prefault=False, reply_nbytes=reply_nbytes, backing="memfd")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.nbytes == MIB + (1 << 60)


@contextlib.contextmanager
def limited(kind: int, nbytes: int) -> Iterator[None]:
    """Lowers a limit of this process, as ``ulimit`` does."""
    soft, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (soft, hard))


def mapped_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@for_each("backing", ["memfd", "/dev/shm"])
def test_a_limit_of_the_shell_is_named_and_not_the_size_of_the_slab(backing: Any) -> None:
    for kind, limit, words in (
        (
            resource.RLIMIT_FSIZE,
            MIB,
            ("ftruncate: File too large", f"{MIB} bytes (ulimit -f; 'Max file size' of /proc/self/limits)"),
        ),
        (resource.RLIMIT_AS, mapped_nbytes() + MIB, ("mmap: Cannot allocate memory", "(ulimit -v; 'Max address space' of ")),
    ):
        with pytest.raises(SlabError) as caught, limited(kind, limit):
            Slab.create(NAME, 64 * MIB, epoch=1, prefault=False, backing=backing)
        for part in (f"reserving {64 * MIB} bytes in", *words):
            assert part in str(caught.value)
        assert "lower slab_nbytes" not in str(caught.value)


def test_a_call_that_a_sandbox_forbids_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forbidden:
        def __init__(self, *_: Any) -> None:
            pass

        def advise(self, *_: Any) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(huge_pages, "Mapping", Forbidden)
    with pytest.raises(SlabError, match=r"failed \(madvise\(MADV_DONTFORK\): Operation not permitted\): a sandbox .*'Seccomp'"):
        Slab.create(NAME, 64 * MIB, epoch=1, prefault=False, backing="memfd")


# -- what others can do with it -----------------------------------------------------------------------------------------

TRY = """
    import ctypes, errno, fcntl, mmap, os, sys
    fd, nbytes = int(sys.argv[1]), int(sys.argv[2])
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def attempt(name, call):
        try:
            failed = call()
            print(name, errno.errorcode[ctypes.get_errno()] if failed == -1 else "done")
        except OSError as error:
            print(name, errno.errorcode[error.errno])

    def through_another_descriptor():
        mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), nbytes).close()

    def made_writable():
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        address = libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        assert address != ctypes.c_void_p(-1).value
        return libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)

    attempt("read", lambda: os.pread(fd, 1, 0) and None)
    attempt("truncate", lambda: os.ftruncate(fd, 0))
    attempt("grow", lambda: os.ftruncate(fd, 2 * nbytes))
    attempt("write", lambda: os.pwrite(fd, b"!", 0) and None)
    attempt("map", lambda: mmap.mmap(fd, nbytes).close())
    attempt("reopen", through_another_descriptor)
    attempt("mprotect", made_writable)
    attempt("punch", lambda: libc.fallocate(fd, 3, 0, nbytes))
    attempt("unseal", lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE) and None)
"""


def what_another_process_can_do(fd: int, nbytes: int) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(TRY), str(fd), str(nbytes)],
        pass_fds=[fd], capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return dict(line.split() for line in done.stdout.splitlines())


def test_nobody_can_truncate_a_slab_in_a_memfd() -> None:
    slab = Slab.create(NAME, MIB, epoch=1, prefault=True, backing="memfd")
    can = what_another_process_can_do(slab.fd, MIB)
    assert {name for name, result in can.items() if result == "EPERM"} == {"truncate", "grow", "unseal"}
    assert can["map"] == can["mprotect"] == "done", "frontends write their slots"
    slab.bytes_at(0, MIB)[:] = 1
    slab.close()


def test_nobody_but_the_engine_can_write_what_replies_are_in() -> None:
    slab = Slab.create(NAME, MIB, epoch=1, prefault=True, reply_nbytes=4 * PAGE)
    slab.bytes_at(MIB - 4 * PAGE, 4 * PAGE)[:] = 7
    can = what_another_process_can_do(slab.reply_fd, 4 * PAGE)
    assert can == {
        "read": "done", "truncate": "EPERM", "grow": "EPERM", "write": "EPERM", "map": "EPERM", "reopen": "EPERM",
        "mprotect": "EACCES", "punch": "EPERM", "unseal": "EPERM",
    }  # fmt: skip
    assert slab.bytes_at(MIB - 4 * PAGE, 4 * PAGE).tolist() == [7] * 4 * PAGE
    slab.close()


# -- attaching ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def divided() -> Iterator[Slab]:
    """A slab with a part for replies, of four pages."""
    slab = Slab.create(NAME, MIB, epoch=7, prefault=False, reply_nbytes=4 * PAGE)
    yield slab
    slab.close()


def attached(slab: Slab) -> Slab:
    return Slab.attach((os.dup(slab.fd), os.dup(slab.reply_fd)), slab.nbytes, slab.reply_nbytes, slab.epoch)


def test_both_parts_are_one_range_of_addresses_at_both_ends(divided: Slab) -> None:
    assert divided.parts == [(0, MIB - 4 * PAGE), (MIB - 4 * PAGE, 4 * PAGE)]
    across = slice(MIB - 5 * PAGE, MIB - 3 * PAGE)
    divided.bytes_at(0, MIB)[across] = np.arange(2 * PAGE, dtype=np.uint8)
    other = attached(divided)
    assert np.array_equal(other.bytes_at(0, MIB)[across], np.arange(2 * PAGE, dtype=np.uint8))
    assert (other.find(other.address + MIB - 1), other.find(other.address + MIB)) == (MIB - 1, None)
    for slab, protection in ((divided, "rw-s"), (other, "r--s")):
        for offset, expected in ((0, "rw-s"), (MIB - 4 * PAGE, protection)):
            found = mapping(slab.address + offset)
            assert found["range"].split()[1] == expected
            assert "dc" in found["VmFlags"].split(), "forked children get neither"
    divided.bytes_at(MIB - PAGE, 1)[0] = 99
    assert other.bytes_at(MIB - PAGE, 1)[0] == 99, "what the engine writes now is there"
    address = other.address
    other.close()
    assert mapping(address) == mapping(address + MIB - 4 * PAGE) == {}


def test_prefaulting_at_either_end_maps_every_page_of_both_parts(divided: Slab) -> None:
    other = attached(divided)
    for slab in (divided, other):
        slab.prefault(0, MIB - PAGE)  # across the boundary
        slab.prefault(MIB - PAGE, PAGE)
        assert mapping(slab.address)["Rss"] == f"{(MIB - 4 * PAGE) >> 10} kB"
        assert mapping(slab.address + MIB - 4 * PAGE)["Rss"] == f"{4 * PAGE >> 10} kB"
    other.close()


def test_attaching_takes_both_descriptors_over(divided: Slab) -> None:
    attached(divided).close()


def test_a_part_for_replies_that_others_could_write_is_refused(divided: Slab) -> None:
    forged = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(forged, 4 * PAGE)
    for fd in (forged, os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)):
        os.ftruncate(fd, 4 * PAGE)
        with pytest.raises(SlabError, match="others could write"):
            Slab.attach((os.dup(divided.fd), fd), MIB, 4 * PAGE, epoch=7)


@for_each("leased_nbytes", [MIB - 5 * PAGE, MIB - 4 * PAGE, MIB])
@for_each("reply_nbytes", [3 * PAGE, 5 * PAGE, MIB, -PAGE])
def test_parts_that_are_not_of_the_announced_sizes_are_refused(divided: Slab, leased_nbytes: int, reply_nbytes: int) -> None:
    with pytest.raises(SlabError, match="announced"):
        Slab.attach((os.dup(divided.fd), os.dup(divided.reply_fd)), leased_nbytes + reply_nbytes, reply_nbytes, epoch=7)


def test_both_ends_see_the_same_bytes(slab: Slab) -> None:
    other = Slab.attach((os.dup(slab.fd), -1), MIB, 0, epoch=7)
    assert other.address != slab.address
    other.bytes_at(5 * PAGE, 16)[:] = 42
    assert slab.bytes_at(5 * PAGE, 16).tolist() == [42] * 16
    assert "dc" in mapping(other.address)["VmFlags"].split()
    other.close()


def test_attaching_takes_the_descriptor_over_and_needs_none(slab: Slab) -> None:
    fd = os.dup(slab.fd)
    other = Slab.attach((fd, -1), MIB, 0, epoch=7)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    other.close()


@pytest.mark.parametrize("nbytes", [MIB // 2, 2 * MIB])
def test_a_slab_that_is_not_of_the_announced_size_is_refused(slab: Slab, nbytes: int) -> None:
    with pytest.raises(SlabError, match="announced"):
        Slab.attach((os.dup(slab.fd), -1), nbytes, 0, epoch=7)


# -- addresses and views -------------------------------------------------------------------------------------------------


def test_find_knows_its_own_addresses_only(slab: Slab) -> None:
    assert slab.find(slab.address) == 0
    assert slab.find(slab.address + MIB - 1) == MIB - 1
    assert slab.find(slab.address + MIB) is None
    assert slab.find(slab.address - 1) is None
    assert slab.find(int(np.zeros(1).ctypes.data)) is None


def test_closing_unmaps_and_closes(slab: Slab) -> None:
    other = Slab.create(NAME, MIB, epoch=2, prefault=False)
    address = other.address
    other.close()
    other.close()
    assert mapping(address) == {}


def test_living_views_outlive_the_closing_and_the_mapping_goes_with_the_last_of_them() -> None:
    with uncollected():
        slab = Slab.create(NAME, MIB, epoch=2, prefault=False)
        address, view = slab.address, slab.bytes_at(PAGE, 64)
        view[:] = 9
        tail = view[32:]
        slab.close()
        del view
        assert tail.tolist() == [9] * 32
        assert mapping(address) != {}
        del tail
        assert mapping(address) == {}, "the closed slab itself must not keep the mapping"


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
        slab.bytes_at(8192, 4096)[:] = 1
        print(slab.bytes_at(0, 8).tobytes(), flush=True)
        slab.bytes_at(12288, 1)[0] = 1
        print("survived")
    """
    done = run_script(script)
    assert done.stdout == "b'shmrslab'\n"
    assert done.returncode == -11


def test_advice_to_nowhere_is_an_error(slab: Slab) -> None:
    with pytest.raises(SlabError, match="mprotect", check=lambda error: error.errno == errno.EINVAL):
        slab.protect(1, PAGE, readable=True, writable=True)
    with pytest.raises(SlabError, match=r"madvise\(MADV_POPULATE_READ\) of 4096 bytes"):
        slab.prefault(1 << 46, PAGE)


def test_a_kernel_without_populate_touches_the_pages_instead(slab: Slab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "_MADV_POPULATE_WRITE", 9999)
    fresh = Slab.create(NAME, MIB, epoch=3, prefault=False)
    fresh.bytes_at(PAGE, 4)[:] = 77
    fresh.prefault(0, MIB)
    assert mapping(fresh.address)["Rss"] == f"{MIB >> 10} kB"
    assert fresh.bytes_at(PAGE, 4).tolist() == [77] * 4, "touching changes nothing"
    fresh.close()


# -- sweeping -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def leftover(prefix: str) -> Iterator[Path]:
    """What a process leaves that dies between creating its segment and unlinking it."""
    path = SHM_DIRECTORY / f"{prefix}dead"
    posix_ipc.SharedMemory(f"/{path.name}", posix_ipc.O_CREX, mode=0o600, size=PAGE).close_fd()
    yield path
    path.unlink(missing_ok=True)


def test_a_sweep_removes_what_a_crash_left(leftover: Path) -> None:
    assert sweep() == [leftover.name]
    assert not leftover.exists()


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


def test_a_slab_works_if_its_name_was_swept_before_its_lock(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep may come between the creation of the name and its lock."""
    create = posix_ipc.SharedMemory

    def swept_at_once(path: str, *arguments: int, **options: int) -> posix_ipc.SharedMemory:
        segment = create(path, *arguments, **options)
        assert sweep() == [], "its engine lives"
        assert not (SHM_DIRECTORY / path[1:]).exists()
        return segment

    monkeypatch.setattr(slab_module.posix_ipc, "SharedMemory", swept_at_once)
    slab = Slab.create(NAME, MIB, epoch=4, prefault=False)
    slab.bytes_at(0, 1)
    slab.close()


def test_a_sweep_names_the_engine_that_died_between_lock_and_unlink(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And only such a one: :func:`test_a_slab_works_if_its_name_was_swept_before_its_lock` is of a living one."""

    def die(path: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(slab_module.posix_ipc, "unlink_shared_memory", die)
    with pytest.raises(KeyboardInterrupt):
        Slab.create(NAME, MIB, epoch=4, prefault=False, backing="/dev/shm")
    assert sweep() == [f"{prefix}{NAME}-{4:016x}"]
    assert sweep() == []
