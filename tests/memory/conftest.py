"""A GPU for tests that have none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.model.fake_cuda import FakeCuda, FakeMemory
from tests.model.made_up_driver import context_depth


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    """A GPU made of host memory, see fake_cuda.py; running by itself, nothing failing."""
    yield FakeCuda()
    assert context_depth() == 0, "a context was entered and not left"


@pytest.fixture
def device_memory() -> FakeMemory:
    """The memory of that GPU, as its driver hands it out."""
    return FakeMemory()
