"""Tests of the plug-in for SGLang. Those with the real thing run where SGLang is: `make test-sglang`."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_real_*.py"]


def until(condition: Callable[[], Any], timeout_s: float = 600.0) -> Any:
    """Polls until it is true; fails with what it was last when the time is up, which only a hang reaches."""
    deadline = time.monotonic() + timeout_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"still {result!r} after {timeout_s} s"
        time.sleep(0.05)
    return result


@pytest.fixture(name="until")
def until_fixture() -> Callable[..., Any]:
    return until


@pytest.fixture(scope="module")
def runtime_directory() -> Iterator[Path]:
    """A private directory for a server's sockets and its log, whose path is short enough for a socket's address."""
    path = Path(tempfile.mkdtemp(prefix="shmr-", dir="/tmp"))
    yield path
    shutil.rmtree(path)
