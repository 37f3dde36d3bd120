"""vLLM-Omni's connector layer without the rest of it: its own files, unchanged, of a package whose requirements need GPUs. For
the benchmark and for tests.

The layer is the factory, the base class, the connector for shared memory, the serializer, the reading of YAML, the loops that
put and get, and the adapter by which a scheduler uses them. Packages around it are empty: importing the real ones imports
models. What the layer uses of vLLM is real where that is installed; elsewhere small classes stand in for it.

The files are found in ``OMNI_SOURCES``, which has the directory ``vllm_omni`` of a wheel; in the environment that
``make test-vllm`` makes; or where the package is installed.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import enum
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["WHY_NOT", "load", "loaded", "sources"]

WHY_NOT = "vLLM-Omni is not here: make test-vllm gets its sources, or OMNI_SOURCES names the directory that has vllm_omni"

_ROOT = Path(__file__).resolve().parents[2]
_EMPTY = (
    "vllm_omni",
    "vllm_omni.distributed",
    "vllm_omni.distributed.omni_connectors",
    "vllm_omni.entrypoints",
)
_SEGMENTS = ("shm_write_bytes", "shm_read_bytes")  # what the layer uses of stage_utils.py


def sources() -> Path | None:
    """Returns the directory that has the package; None: there is none."""
    given = os.environ.get("OMNI_SOURCES")
    places = [Path(given)] if given else sorted((_ROOT / ".venv-vllm" / "omni").glob("*"))
    with contextlib.suppress(ValueError):  # the layer is loaded
        if (spec := importlib.util.find_spec("vllm_omni")) is not None and spec.origin is not None:
            places.append(Path(spec.origin).parents[1])
    return next((place for place in places if (place / "vllm_omni/distributed/omni_connectors/factory.py").exists()), None)


def load(directory: Path) -> list[str]:
    """Makes the layer importable in this process; returns the names of the modules that stand in for others."""
    before = set(sys.modules)
    for name in _EMPTY:
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(directory / name.replace(".", "/"))]
    _load_segments(directory / "vllm_omni/entrypoints/stage_utils.py")
    _stand_in("vllm_omni.metrics", OrchestratorAggregator=object)
    if importlib.util.find_spec("vllm") is None:
        _stand_in("vllm.outputs", RequestOutput=RequestOutput, CompletionOutput=CompletionOutput)
        _stand_in("vllm.logger", init_logger=logging.getLogger)
        _stand_in("vllm.v1.metrics.stats", PrefillStats=object)
        _stand_in("vllm.v1.request", Request=object, RequestStatus=RequestStatus)
        _stand_in("vllm.v1.utils", ConstantList=list)
        _stand_in(
            "vllm.distributed.parallel_state", get_tensor_model_parallel_rank=int, get_tensor_model_parallel_world_size=int
        )
    return sorted(set(sys.modules) - before)


@contextlib.contextmanager
def loaded(directory: Path) -> Iterator[None]:
    """The layer is there in the block; afterwards nothing of it is imported any more."""
    load(directory)
    try:
        yield
    finally:
        stands_in = getattr(sys.modules.get("vllm"), "__file__", None) is None
        for name in list(sys.modules):
            top = name.split(".")[0]
            if top == "vllm_omni" or (top == "vllm" and stands_in) or name == "shmring.integrations.omni.connector":
                del sys.modules[name]


def _stand_in(name: str, **attributes: Any) -> None:
    """Makes a module of these attributes, and the packages that it is in."""
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:count]), ModuleType(".".join(parts[:count])))
    sys.modules[name].__dict__.update(attributes)


def _load_segments(path: Path) -> None:
    """Takes two functions of a module that imports the platform's devices."""
    functions: list[ast.stmt] = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef) and node.name in _SEGMENTS
    ]
    assert len(functions) == len(_SEGMENTS), f"{path} has no {' and '.join(_SEGMENTS)}"
    name = "vllm_omni.entrypoints.stage_utils"
    module = sys.modules[name] = ModuleType(name)
    module.__dict__.update(_shm=shared_memory, logger=logging.getLogger(name), Any=Any)
    exec(compile(ast.Module(functions, []), str(path), "exec"), module.__dict__)


class RequestOutput:
    """As vLLM's, where that is not installed."""

    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


@dataclasses.dataclass
class CompletionOutput:
    """As vLLM's, where that is not installed."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Any = None
    finish_reason: str | None = None


class RequestStatus(enum.IntEnum):
    """As vLLM's, where that is not installed; the status that vLLM-Omni adds to it is there."""

    WAITING = 0
    WAITING_FOR_CHUNK = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_ABORTED = 5

    @staticmethod
    def is_finished(status: RequestStatus) -> bool:
        """Whether a request of this status has ended."""
        return status >= RequestStatus.FINISHED_STOPPED
