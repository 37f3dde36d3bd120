"""A mapping stays as long as anybody uses it, and no longer."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shmring.core.compiled import Mapping, Regions
from shmring.errors import ClosedError
from tests.forked import in_child
from tests.garbage import uncollected

PAGE = mmap.PAGESIZE


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("mapping")
    os.ftruncate(fd, 4 * PAGE)
    yield fd
    os.close(fd)


def is_mapped(address: int) -> bool:
    return any(
        line.startswith((f"{address:x}-", f"{address:012x}-")) for line in Path("/proc/self/maps").read_text().splitlines()
    )


def test_it_is_the_memory_behind_the_descriptor(fd: int) -> None:
    first, second = Mapping(fd, 4 * PAGE), Mapping(fd, PAGE)
    assert (first.nbytes, second.nbytes) == (4 * PAGE, PAGE)
    np.frombuffer(first, np.uint8)[5] = 7
    assert bytes(memoryview(second)[4:7]) == b"\0\7\0"
    assert ctypes.string_at(second.address + 5, 1) == b"\7"
    assert os.pread(fd, 1, 5) == b"\7"


def test_it_goes_with_the_object_and_what_was_built_on_it(fd: int) -> None:
    with uncollected():
        for build in (
            memoryview,
            lambda buffer: np.ndarray((4,), np.uint8, buffer),
            lambda buffer: np.frombuffer(buffer, np.uint8)[1:],
        ):
            mapping = Mapping(fd, PAGE)
            address = mapping.address
            built = build(mapping)
            del mapping
            assert is_mapped(address)
            del built
            assert not is_mapped(address)


def test_a_region_keeps_it_and_so_does_a_view_of_one(fd: int) -> None:
    mapping, regions = Mapping(fd, PAGE), Regions()
    address = mapping.address
    region = regions.open(mapping, 64, 64, (0, 0))
    del mapping
    view = np.ndarray((4,), np.uint8, region.memory())
    region.abandon()
    regions.close()
    assert is_mapped(address)
    del view
    assert not is_mapped(address)


def test_nothing_can_be_mapped_too(fd: int) -> None:
    nothing = Mapping(fd, 0)
    assert (nothing.nbytes, bytes(nothing)) == (0, b"")


@pytest.fixture
def tail_fd() -> Iterator[int]:
    fd = os.memfd_create("tail")
    os.ftruncate(fd, 2 * PAGE)
    yield fd
    os.close(fd)


@pytest.mark.parametrize(("writable", "protection"), [(True, "rw-s"), (False, "r--s")])
def test_two_descriptors_are_one_range_of_addresses(fd: int, tail_fd: int, writable: bool, protection: str) -> None:
    os.pwrite(fd, b"head", 2 * PAGE - 4)
    os.pwrite(tail_fd, b"tail", 0)
    mapping = Mapping(fd, 2 * PAGE, tail_fd, 2 * PAGE, writable)
    assert mapping.nbytes == 4 * PAGE
    assert bytes(memoryview(mapping)[2 * PAGE - 4 : 2 * PAGE + 4]) == b"headtail"
    line = next(
        line
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.startswith((f"{mapping.address + 2 * PAGE:x}-", f"{mapping.address + 2 * PAGE:012x}-"))
    )
    assert line.split()[1] == protection
    mapping.advise(0, 4 * PAGE, mmap.MADV_WILLNEED)
    address = mapping.address
    del mapping
    assert not is_mapped(address)
    assert not is_mapped(address + 2 * PAGE)


def test_a_tail_that_can_not_be_mapped_leaves_nothing_mapped(fd: int) -> None:
    before = Path("/proc/self/maps").read_text().count("memfd:mapping")
    with pytest.raises(OSError, match="Bad file descriptor"):
        Mapping(fd, PAGE, -1, PAGE)
    assert Path("/proc/self/maps").read_text().count("memfd:mapping") == before
    with pytest.raises(OverflowError):
        Mapping(fd, PAGE, fd, 2**64 - PAGE)


def test_what_the_kernel_refuses_is_an_error_with_its_number(fd: int) -> None:
    with pytest.raises(OSError, match="Bad file descriptor", check=lambda error: error.errno == errno.EBADF):
        Mapping(-1, PAGE)
    with pytest.raises(OverflowError):
        Mapping(fd, -1)


def test_advice_and_protection_are_for_ranges_of_its_own(fd: int) -> None:
    mapping = Mapping(fd, 2 * PAGE)
    mapping.advise(0, 2 * PAGE, mmap.MADV_WILLNEED)
    mapping.protect(PAGE, PAGE, mmap.PROT_READ)
    line = next(
        line for line in Path("/proc/self/maps").read_text().splitlines() if line.startswith(f"{mapping.address + PAGE:x}")
    )
    assert line.split()[1] == "r--s"
    for call in (mapping.advise, mapping.protect):
        for offset, nbytes in ((0, 3 * PAGE), (3 * PAGE, 0), (PAGE, 2**64 - PAGE)):
            with pytest.raises(OSError, match="not in a mapping", check=lambda error: error.errno == errno.ENOMEM):
                call(offset, nbytes, 1)
    with pytest.raises(OSError, match="Invalid argument"):
        mapping.protect(1, PAGE, mmap.PROT_READ)
    with pytest.raises(OSError, match="Invalid argument"):
        mapping.advise(0, PAGE, 9999)


def test_a_forked_child_unmaps_nothing(fd: int) -> None:
    """What is kept out of children is not mapped there; something else may be, at the same address."""
    mapping = Mapping(fd, PAGE)
    address = mapping.address

    def as_child() -> None:
        nonlocal mapping
        del mapping
        assert is_mapped(address)

    in_child(as_child)


def test_memory_that_is_not_mapped_is_no_place(fd: int) -> None:
    """An end that is over has a mapping of nothing: who still asks for a place in it is told so."""
    nothing, regions = Mapping(-1, 0), Regions()
    with pytest.raises(ClosedError, match="not mapped any more"):
        regions.open(nothing, 0, 0, (1, 1))
    with pytest.raises(ValueError, match="exceed a mapping"):
        regions.open(Mapping(fd, PAGE), PAGE, 1, (1, 1))
    regions.close()
