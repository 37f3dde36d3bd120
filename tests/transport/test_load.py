"""The page in which an engine says how much is in flight there: only the engine can write it."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from shmring.core.compiled import LOAD_PAGE_NBYTES, LoadPage
from shmring.errors import RemoteProtocolError
from shmring.transport.load import create_load_page, map_load_page
from tests.forked import in_child


@pytest.fixture
def fd() -> Iterator[int]:
    fd, page = create_load_page()
    assert (page.in_flight, page.waiting, page.received_nbytes) == (0, 0, 0)
    yield fd
    os.close(fd)


def test_nobody_but_its_engine_can_write_it(fd: int) -> None:
    for protection in (mmap.PROT_WRITE, mmap.PROT_READ | mmap.PROT_WRITE):
        with pytest.raises(PermissionError):
            mmap.mmap(fd, LOAD_PAGE_NBYTES, mmap.MAP_SHARED, protection)
    with pytest.raises(PermissionError):
        LoadPage(fd, writable=True)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"\xff" * 16, 0)
    for nbytes in (0, 2 * LOAD_PAGE_NBYTES):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    page = map_load_page(fd)
    assert (page.in_flight, page.waiting, page.received_nbytes) == (0, 0, 0)


def test_an_engine_drains_from_one_moment_on() -> None:
    fd, page = create_load_page()
    peer = map_load_page(fd)
    assert not peer.draining
    peer.drain()  # which changes nothing: it is not its page
    assert not peer.draining
    page.drain()
    assert peer.draining
    os.close(fd)


def test_a_mapping_that_was_made_for_reading_can_not_be_made_writable(fd: int) -> None:
    view = mmap.mmap(fd, LOAD_PAGE_NBYTES, mmap.MAP_SHARED, mmap.PROT_READ)
    address = np.frombuffer(view, np.uint8).ctypes.data
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address), LOAD_PAGE_NBYTES, protection) == -1
    assert ctypes.get_errno() == errno.EACCES


def test_a_page_that_others_could_write_is_refused() -> None:
    fd = os.memfd_create("load", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, LOAD_PAGE_NBYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    with pytest.raises(RemoteProtocolError, match="not sealed"):
        map_load_page(fd)
    os.close(fd)


def test_what_is_no_page_is_refused() -> None:
    reading, writing = os.pipe()
    with pytest.raises(RemoteProtocolError, match="4096 bytes"):
        map_load_page(reading)
    os.close(reading)
    os.close(writing)
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR)
    os.ftruncate(fd, LOAD_PAGE_NBYTES)
    with pytest.raises(RemoteProtocolError, match="sealed"):
        map_load_page(fd)
    os.close(fd)


def test_a_forked_child_has_no_page(fd: int) -> None:
    page = map_load_page(fd)

    def as_child() -> None:
        nonlocal page
        assert (page.in_flight, page.waiting, page.received_nbytes) == (0, 0, 0)
        del page

    in_child(as_child)
