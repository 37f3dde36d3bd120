"""What an engine process can be told: frozen, and free of torch, so that a command line is checked before that is imported."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shmring.config import RingConfig, validate_name
from shmring.engine.scheduler import SchedulerConfig

__all__ = ["DEFAULT_EXECUTOR", "EXECUTORS", "MAX_ENGINES", "EngineSettings", "engine_names"]

#: The built-in executors, by name.
EXECUTORS = {
    "fingerprints": "shmring.engine.executors.fingerprints.executor:FingerprintsExecutor",
    "synthetic": "shmring.engine.executors.synthetic:SyntheticExecutor",
    "transformers": "shmring.engine.executors.transformers:TransformersExecutor",
}

DEFAULT_EXECUTOR = "fingerprints"

#: The most engines of one server: far more than there are accelerators in one machine.
MAX_ENGINES = 64

_LOADS_A_MODEL = "transformers"  # of the built-in ones
_ITS_PACKAGES = ("transformers", "jinja2", "PIL")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def engine_names(name: str, data_parallel_size: int) -> list[str]:
    """Returns the names of the engines of a server: its own, or with several NAME-0, NAME-1 and so on."""
    return [name] if data_parallel_size == 1 else [f"{name}-{rank}" for rank in range(data_parallel_size)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine process.

    Attributes:
        name: what frontends connect to.
        data_parallel_size: engines on this machine that serve the same, this one included; each takes its part of the cores.
        executor: what computes: a name in :data:`EXECUTORS`, or ``module:Class``.
        executor_path: a directory that ``module`` is also looked for in, after everything that is installed.
        model: a local path or a hub's name, for executors that load a model.
        executor_options: whatever else the executor takes.
        mm_processor_kwargs: how media are prepared.
        ring: the slab, and what frontends may do.
        max_num_seqs: requests in a step; None: what the executor takes.
        max_batch_nbytes: bytes of media from which a step admits no further request.
        max_waiting: requests that may wait for a step.
        step_timeout_s: from when on a running step is ill health.
        profiler_dir: where profiles are written; None: no profiling.
        log_level: what is logged, to stderr.
    """

    name: str = "shmring"
    data_parallel_size: int = 1
    executor: str = DEFAULT_EXECUTOR
    executor_path: str | None = None
    model: str | None = None
    executor_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    ring: RingConfig = dataclasses.field(default_factory=RingConfig)
    max_num_seqs: int | None = None
    max_batch_nbytes: int = SchedulerConfig().max_batch_nbytes
    max_waiting: int = SchedulerConfig().max_waiting
    step_timeout_s: float = 60.0
    profiler_dir: str | None = None
    log_level: str = "info"

    def check(self) -> None:
        """Looks, without importing anything large, whether the executor and its model are there.

        Raises:
            ValueError: the name can't be one; there is no such executor, or it does not go with this model; says what to do.
        """
        validate_name(self.name)
        if self.executor not in EXECUTORS:
            self._check_module()
        elif self.executor == _LOADS_A_MODEL:
            _check_packages()
            _check_model(self.model)
        elif self.model is not None:
            raise ValueError(f"the executor {self.executor!r} loads no model; leave --executor out to serve {self.model!r}")

    def _check_module(self) -> None:
        module, colon, attribute = self.executor.partition(":")
        if not (colon and module and attribute):
            names = ", ".join(sorted(EXECUTORS))
            raise ValueError(f"there is no executor {self.executor!r}; choose one of {names}, or write module:Class")
        package = module.partition(".")[0]
        if not _can_be_imported(package) and not (self.executor_path and PathFinder.find_spec(package, [self.executor_path])):
            raise ValueError(
                f"there is no module {package!r} for the executor {self.executor!r}; say where it lies with --executor-path "
                "(the working directory is not searched)"
            )


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is loaded, and was not found by a name: __main__
        return True


def _check_packages() -> None:
    missing = [name for name in _ITS_PACKAGES if not _can_be_imported(name)]
    if missing:
        raise ValueError(
            f"serving a model needs {', '.join(missing)}: pip install -e '.[transformers]' in a checkout of shmring"
        )


def _check_model(model: str | None) -> None:
    """A directory must be a model's; what looks like no directory is left to the hub, which is asked when it is loaded."""
    if not model:
        raise ValueError(f"the executor {_LOADS_A_MODEL!r} needs a model: a directory, or a name on the Hugging Face hub")
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(f"the directory {model!r} holds no model: it has no config.json")
    elif directory.is_absolute() or model.startswith((".", "~")) or not _HUB_NAME.fullmatch(model):
        raise ValueError(f"there is no directory {model!r}, and a model on the Hugging Face hub is called owner/name")
