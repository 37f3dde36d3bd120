"""The settings of an engine process: frozen, and without torch, so that a command line is checked before torch is imported."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, Literal

from shmring.config import RingConfig
from shmring.core.geometry import Geometry
from shmring.door import listening_place_of, parse_nbytes, validate_name
from shmring.engine.scheduler import SchedulerConfig
from shmring.service.far_engines import EngineTls, context_of_engine
from shmring.service.flags import NO_OPTION, Flag
from shmring.service.tracing import parse_endpoint

__all__ = [
    "DEFAULT_EXECUTOR",
    "DEFAULT_SHUTDOWN_TIMEOUT_S",
    "EXECUTORS",
    "MAX_ENGINES",
    "EngineSettings",
    "LogFormat",
    "ListenSettings",
    "LogLevel",
    "engine_names",
    "server_name",
]

#: The built-in executors, by name.
EXECUTORS = {
    "fingerprints": "shmring.engine.executors.fingerprints:FingerprintsExecutor",
    "synthetic": "shmring.engine.executors.synthetic:SyntheticExecutor",
    "transformers": "shmring.engine.executors.speech:executor_for",
    "vllm": "shmring.engine.executors.vllm_speech:executor_for",
}

DEFAULT_EXECUTOR = "fingerprints"

#: Together with the time for the rest, 30 s: what Kubernetes gives a pod to end.
DEFAULT_SHUTDOWN_TIMEOUT_S = 20.0

#: The most engines of one server: far more than there are accelerators in one machine.
MAX_ENGINES = 64

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["text", "json"]

# What the built-in executors that load a model need, and how that is installed.
_THEIR_PACKAGES = {
    "transformers": (("transformers", "jinja2", "PIL"), "pip install -e '.[transformers]' in a checkout of shmring"),
    "vllm": (("vllm",), "install shmring in an environment that has vLLM"),
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)


def engine_names(name: str, data_parallel_size: int) -> list[str]:
    """Returns the names of the engines of a server: its own, or with several NAME-0, NAME-1 and so on."""
    return [name] if data_parallel_size == 1 else [f"{name}-{rank}" for rank in range(data_parallel_size)]


def server_name(engine_name: str, data_parallel_size: int) -> str:
    """Returns the name of the server that has an engine of this name."""
    return engine_name if data_parallel_size == 1 else engine_name.rpartition("-")[0]


# The other fields of a ring's configuration have no option.
_RING_FLAGS = {
    "slab_nbytes": Flag(),
    "backing": Flag(names=("--slab-backing",)),
    "reply_nbytes": Flag(),
    "kept_nbytes": Flag(
        names=("--mm-processor-cache-gb",),
        kind=float,
        least=0,
        parse=lambda gib: int(gib * 2**30),
        text="GiB of the slab that may hold prepared media, to be used again without decoding; 0: none. None: half of it.",
    ),
    "max_clients": Flag(),
    "max_payload_nbytes": Flag(),
    "socket_dir": Flag(text="Where the engine's socket lies. None: the user's runtime directory."),
}


def _checked_place(place: str) -> str:
    listening_place_of(place, "--listen")
    return place


@dataclasses.dataclass(frozen=True, kw_only=True)
class ListenSettings:
    """Where an engine lets frontends on other hosts in.

    Attributes:
        listen: Where frontends on other hosts come in, HOST:PORT; of several engines, each has the next port. They need
            --engine-token-file. None: nowhere.
        engine_token_file: A file of the token that frontends on other hosts must show, which only its owner can read. None:
            the variable SHMRING_ENGINE_TOKEN.
        engine_certfile: The certificate for these frontends, in PEM, and those above it. None: only this host is let in.
        engine_keyfile: Its key, in PEM. None: in the file of the certificate.
        engine_tls: off: connections of these frontends are not encrypted, also beyond this host.
        engine_token: the token.
    """

    listen: Annotated[str | None, Flag(parse=_checked_place, metavar="HOST:PORT")] = None
    engine_token_file: Annotated[str | None, Flag(path="file")] = None
    engine_certfile: Annotated[str | None, Flag(path="file")] = None
    engine_keyfile: Annotated[str | None, Flag(path="file")] = None
    engine_tls: EngineTls = "auto"
    engine_token: Annotated[str | None, NO_OPTION] = dataclasses.field(default=None, repr=False)

    def of_rank(self, rank: int) -> ListenSettings:
        """Returns those of one of several engines: each listens at the next port. Port 0 is any that is free.

        Raises:
            ValueError: there is no such port.
        """
        if self.listen is None or not (port := listening_place_of(self.listen, "--listen")[1]):
            return self
        place = f"{self.listen.rpartition(':')[0]}:{port + rank}"
        return dataclasses.replace(self, listen=_checked_place(place))

    def check(self) -> None:
        """Looks whether the token and the files are there.

        Raises:
            ValueError: they are not; says what to do.
        """
        if self.listen is None:
            return
        if self.engine_token is None:
            raise ValueError("--listen needs a token: --engine-token-file, or the variable SHMRING_ENGINE_TOKEN")
        context_of_engine(self.engine_certfile, self.engine_keyfile, self.engine_tls)

    def arguments(self) -> dict[str, Any]:
        """Returns what :func:`shmring.serve` is to get."""
        if self.listen is None:
            return {}
        tls = context_of_engine(self.engine_certfile, self.engine_keyfile, self.engine_tls)
        return {"listen": self.listen, "token": self.engine_token, "tls": tls}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """One engine process.

    Attributes:
        name: The engine's name, which frontends connect to.
        data_parallel_size: engines on this machine that serve the same, this one included; each takes its part of the cores.
        model: A model to serve: a local path or a hub's name. The same as the argument MODEL.
        executor: The executor: fingerprints, synthetic, transformers, vllm, or module:Class of your own. None: transformers if
            a model is named, else fingerprints.
        executor_path: A directory that the module of module:Class lies in. The working directory is not searched.
        executor_options: Further options of the executor, as a JSON object.
        mm_processor_kwargs: How media are prepared, as a JSON object. The executor interprets it, and frontends follow the
            executor.
        ring: the slab, and what frontends may do.
        listening: where frontends on other hosts come in.
        max_num_seqs: Requests in a step. None: what the executor takes.
        max_batch_nbytes: Bytes of media from which a step admits no further request.
        max_waiting: Requests that may wait for a step.
        shutdown_timeout_s: Seconds that the requests of all frontends may go on after SIGTERM, SIGINT or SIGHUP; then they are
            aborted. A second signal ends it at once.
        step_timeout_s: Seconds from which a running step makes the engine report ill health.
        profiler_dir: Where profiling, when it is started, writes its traces. None: no profiling.
        log_level: What is logged, to stderr.
        log_format: How: text for people, or json, an object in a line.
        otlp_traces_endpoint: Where traces go, by OTLP: http://localhost:4317 for gRPC, http://localhost:4318 for HTTP. None:
            there are none.
    """

    name: str = "shmring"
    data_parallel_size: Annotated[int, NO_OPTION] = 1
    model: str | None = None
    executor: Annotated[str, Flag(default="")] = DEFAULT_EXECUTOR
    executor_path: Annotated[str | None, Flag(path="directory", parse=os.path.realpath)] = None
    executor_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    ring: Annotated[RingConfig, _RING_FLAGS] = dataclasses.field(default_factory=RingConfig)
    listening: ListenSettings = dataclasses.field(default_factory=ListenSettings)
    max_num_seqs: int | None = None
    max_batch_nbytes: int = SchedulerConfig().max_batch_nbytes
    max_waiting: int = SchedulerConfig().max_waiting
    shutdown_timeout_s: Annotated[float, Flag(least=0)] = DEFAULT_SHUTDOWN_TIMEOUT_S
    step_timeout_s: float = 60.0
    profiler_dir: str | None = None
    log_level: LogLevel = "info"
    log_format: LogFormat = "text"
    otlp_traces_endpoint: Annotated[str | None, Flag(parse=parse_endpoint, metavar="URL")] = None

    def scheduling(self, max_batch_size: int) -> SchedulerConfig:
        """Returns the bounds of steps, for an executor that takes so many requests in one."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs or max_batch_size,
            max_batch_nbytes=self.max_batch_nbytes,
            max_waiting=self.max_waiting,
        )

    def check(self, *, here: bool = True) -> None:
        """Looks, without importing anything large, whether the executor and its model are there.

        Args:
            here: False: the engine will run on another machine, so packages, modules and directories are not looked for.

        Raises:
            ValueError: the name can't be one; the slab is too small; there is no such executor, or it does not go with this
                model; says what to do.
        """
        validate_name(self.name)
        reply_nbytes = self.ring.reply_nbytes
        Geometry.of(parse_nbytes(self.ring.slab_nbytes), None if reply_nbytes is None else parse_nbytes(reply_nbytes))
        self.listening.check()
        if self.executor not in EXECUTORS:
            self._check_module(here=here)
        elif self.executor in _THEIR_PACKAGES:
            if here:
                _check_packages(self.executor)
            _check_model(self.executor, self.model, here=here)
        elif self.model is not None:
            raise ValueError(f"the executor {self.executor!r} loads no model; leave --executor out to serve {self.model!r}")

    def _check_module(self, *, here: bool) -> None:
        module, colon, attribute = self.executor.partition(":")
        if not (colon and module and attribute):
            names = ", ".join(sorted(EXECUTORS))
            raise ValueError(f"there is no executor {self.executor!r}; choose one of {names}, or write module:Class")
        package = module.partition(".")[0]
        if (
            here
            and not _can_be_imported(package)
            and not (self.executor_path and PathFinder.find_spec(package, [self.executor_path]))
        ):
            raise ValueError(
                f"there is no module {package!r} for the executor {self.executor!r}; say where it lies with --executor-path "
                "(the working directory is not searched)"
            )


def _can_be_imported(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:  # it is loaded, and was not found by a name: __main__
        return True


def _check_packages(executor: str) -> None:
    packages, advice = _THEIR_PACKAGES[executor]
    missing = [name for name in packages if not _can_be_imported(name)]
    if missing:
        raise ValueError(f"serving a model needs {', '.join(missing)}: {advice}")


def _check_model(executor: str, model: str | None, *, here: bool) -> None:
    """A directory must have a model. Any other name may be one of the hub, which is asked when the model is loaded."""
    if not model:
        raise ValueError(f"the executor {executor!r} needs a model: a directory, or a name on the Hugging Face hub")
    if not here:
        return
    directory = Path(model).expanduser()
    if directory.is_dir():
        if not (directory / "config.json").is_file():
            raise ValueError(f"the directory {model!r} holds no model: it has no config.json")
    elif directory.is_absolute() or model.startswith((".", "~")) or not _HUB_NAME.fullmatch(model):
        raise ValueError(f"there is no directory {model!r}, and a model on the Hugging Face hub is called owner/name")
