"""Tests of the plug-in for vLLM. Those with the real thing run where vLLM is: `make test-vllm`."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_real_*.py"]
