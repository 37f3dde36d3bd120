"""Tests that need a GPU: skipped where there is none, run by ``make test-gpu`` where there is one."""

from __future__ import annotations

import pytest
import torch

_REASON = "needs a CUDA device, and torch finds none"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=_REASON))
