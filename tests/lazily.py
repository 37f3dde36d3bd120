"""Modules that tests have at hand, and that are imported when a test uses them: each worker of a run reads every test."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def lazily(name: str) -> Any:
    """Returns a module whose code is executed at the first look at an attribute. For what imports thousands of others."""
    if name not in sys.modules:
        specification = importlib.util.find_spec(name)
        assert specification is not None
        assert specification.loader is not None
        specification.loader = importlib.util.LazyLoader(specification.loader)
        sys.modules[name] = module = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
    return sys.modules[name]
