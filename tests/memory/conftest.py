"""A GPU for tests that have none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def fakes() -> Any:
    """The module of fake_cuda.py."""
    specification = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).with_name("fake_cuda.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def cuda(fakes: Any) -> Any:
    """A GPU made of host memory, see fake_cuda.py; running by itself, nothing failing."""
    return fakes.FakeCuda()


@pytest.fixture
def device_memory(fakes: Any) -> Any:
    """The memory of that GPU, as its driver hands it out."""
    return fakes.FakeMemory()
