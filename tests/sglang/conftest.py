"""Tests of the plug-in for SGLang. Those with the real thing run where SGLang is: `make test-sglang`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_real_*.py"]
