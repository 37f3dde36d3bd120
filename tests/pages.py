"""The programs in docs/ that make its pages, for the tests that hold those pages to the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

_DOCS = Path(__file__).resolve().parents[1] / "docs"


def load_maker(name: str) -> ModuleType:
    """Imports ``docs/<name>.py``, which is in no package."""
    specification = importlib.util.spec_from_file_location(name, _DOCS / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module
