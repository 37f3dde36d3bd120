"""The memory of message rings: sealed by who makes it, and taken by nobody who could be harmed through it."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path

import pytest

from shmring.core.compiled import RingMemory, ring_nbytes
from shmring.errors import RemoteProtocolError
from shmring.transport.rings import map_rings, sealed_rings
from tests.forked import in_child
from tests.tables import for_each

CAPACITY = 1 << 16


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_what_one_end_writes_the_other_reads_also_when_the_descriptors_are_closed() -> None:
    before = descriptors()
    fds = sealed_rings(CAPACITY)
    assert not any(os.get_inheritable(fd) for fd in fds)
    ours, theirs = map_rings(fds, CAPACITY), map_rings(fds, CAPACITY)
    for fd in fds:
        os.close(fd)
    assert descriptors() == before, "a mapping keeps none"
    memoryview(ours[1])[:4] = b"here"
    assert bytes(memoryview(theirs[1])[:4]) == b"here"
    assert bytes(memoryview(theirs[0])[:4]) == bytes(4)


def test_nobody_can_truncate_what_both_ends_have_mapped() -> None:
    for fd in sealed_rings(CAPACITY):
        for nbytes in (0, ring_nbytes(CAPACITY) - 1, 2 * ring_nbytes(CAPACITY)):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, nbytes)
        with pytest.raises(PermissionError):
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
        os.close(fd)


def memfd(nbytes: int, seals: int) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


ALL = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.mark.parametrize(
    ("nbytes", "seals", "reason"),
    [
        (ring_nbytes(CAPACITY) - 1, ALL, "was announced"),
        (ring_nbytes(CAPACITY) + 4096, ALL, "was announced"),
        (0, ALL, "was announced"),
        (ring_nbytes(CAPACITY), 0, "not sealed"),
        (ring_nbytes(CAPACITY), fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL, "not sealed"),
        (ring_nbytes(CAPACITY), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL, "not sealed"),
        (ring_nbytes(CAPACITY), fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, "not sealed"),
    ],
)
def test_memory_that_could_be_truncated_is_refused(nbytes: int, seals: int, reason: str) -> None:
    good = sealed_rings(CAPACITY)
    fd = memfd(nbytes, seals)
    with pytest.raises(RemoteProtocolError, match=reason):
        map_rings((good[0], fd), CAPACITY)
    for each in (*good, fd):
        os.close(each)


def test_a_file_is_no_ring() -> None:
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:
        os.ftruncate(file.fileno(), ring_nbytes(CAPACITY))
        with pytest.raises(RemoteProtocolError, match=r"can be sealed|not sealed"):
            map_rings((file.fileno(),), CAPACITY)


@for_each("capacity", [0, 100, 1 << 40])
def test_a_size_that_no_ring_has_is_refused(capacity: int) -> None:
    with pytest.raises(RemoteProtocolError, match="power of two"):
        map_rings((), capacity)


def test_what_cannot_be_mapped_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        RingMemory(-1, CAPACITY)


def test_making_a_ring_that_fails_leaks_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    before = descriptors()
    made: list[int] = []

    def refuse_the_second(fd: int, offset: int, nbytes: int) -> None:
        made.append(fd)
        if len(made) == 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse_the_second)
    with pytest.raises(OSError, match="No space"):
        sealed_rings(CAPACITY)
    assert descriptors() == before


def test_a_forked_child_does_not_have_the_rings() -> None:
    fds = sealed_rings(CAPACITY)
    memories = map_rings(fds, CAPACITY)
    for fd in fds:
        os.close(fd)

    def as_child() -> None:
        assert "shmring-messages" not in Path("/proc/self/maps").read_text()

    in_child(as_child)
    assert len(memories) == 2
