"""A GPU for tests that have none."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def cuda() -> Any:
    """A GPU made of host memory, see fake_cuda.py; running by itself, nothing failing."""
    specification = importlib.util.spec_from_file_location("fake_cuda", Path(__file__).with_name("fake_cuda.py"))
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module.FakeCuda()
