"""``import shmring`` is quick, and torch comes with the first thing that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import shmring

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import sys, shmring
shmring.RingConfig(slab_nbytes="64MiB"), shmring.EngineDeadError, shmring.__version__
assert set(shmring.__all__) <= set(dir(shmring))
print("torch" in sys.modules)
shmring.connect
print("torch" in sys.modules)
"""


def test_torch_is_imported_by_what_needs_it_and_not_before() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\nTrue\n"


def test_every_name_is_there_and_no_other() -> None:
    assert all(getattr(shmring, name) is not None for name in shmring.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        shmring.conect  # type: ignore[attr-defined]  # noqa: B018
