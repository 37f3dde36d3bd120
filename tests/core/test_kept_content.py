"""Kept content as a frontend sees it: what its engine says of it is compared with the slab."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from shmring.core.compiled import KeptContent, Mapping, Regions, kept_slot
from shmring.core.geometry import BLOCK_NBYTES
from shmring.core.messages import SLOT_HEADER_NBYTES, Found
from shmring.errors import RemoteProtocolError

BLOCKS = 4


@pytest.fixture
def slab() -> Iterator[Mapping]:
    fd = os.memfd_create("slab")
    os.ftruncate(fd, BLOCKS * BLOCK_NBYTES)
    yield Mapping(fd, BLOCKS * BLOCK_NBYTES)
    os.close(fd)


def found(offset: int, nbytes: int) -> Found:
    return Found(1, 1 << 40, offset, nbytes, True, b"\xc0")


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(BLOCKS * BLOCK_NBYTES, 1), ((BLOCKS - 1) * BLOCK_NBYTES, BLOCK_NBYTES), (BLOCK_NBYTES, BLOCKS * BLOCK_NBYTES), (64, 1)],
)
def test_content_that_is_not_in_the_slab_is_refused(slab: Mapping, offset: int, nbytes: int) -> None:
    KeptContent(found(BLOCK_NBYTES, BLOCK_NBYTES), 1, Regions(), slab, 16)
    with pytest.raises(RemoteProtocolError, match="is not in the slab"):
        KeptContent(found(offset, nbytes), 1, Regions(), slab, 16)


def test_kept_content_has_the_blocks_of_its_header_and_its_bytes() -> None:
    for nbytes, blocks in ((1, 1), (BLOCK_NBYTES - SLOT_HEADER_NBYTES, 1), (BLOCK_NBYTES, 2), (3 * BLOCK_NBYTES, 4)):
        assert kept_slot(found(BLOCK_NBYTES, nbytes)).blocks == blocks
