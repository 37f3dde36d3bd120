"""vLLM's engine in this process, and its steps: what the executors have in common that it computes for.

A step is a step of vLLM's, in which it chooses what to compute: a token of each answer, and pieces of prompts. Before it, vLLM
is given the requests that are ready. vLLM's engine has no process of its own, so no tensor crosses to it in a message: what it
computes with is made here.

Invariants:

- vLLM has what was prepared of the requests in ``_requests``. Whatever ends a request ends it in both;
- a request that vLLM refuses fails alone, with vLLM's reason. A step that fails ends the engine, since what is left of it is
  unknown;
- the cache of vLLM's processor keeps whole media, and does not count on another cache behind it. A request that is refused or
  aborted after it was prepared never reaches that one.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from shmring.core.loggers import logger_of
from shmring.engine.executors.checkpoint import ModelSource
from shmring.engine.executors.failures import report, shortened
from shmring.engine.executors.interface import ExecutorDeadError, ExecutorOptions, StepInput, StepOutput, priced
from shmring.engine.executors.preparing import Preparing
from shmring.integrations.promises import broken, parameters_differ, uses_are_missing

__all__ = ["CHECKS", "VllmLoop", "VllmRequest", "find_engine", "number_of", "share_seconds"]

logger = logger_of("shmring.engine.executors.vllm")


_PAUSE_S = 0.001  # after a step of which nothing came: vLLM may wait for a grammar, and this thread must not spin meanwhile

# What is said elsewhere: with --model, --mm-processor-kwargs, --data-parallel-size and --log-level.
_SAID_ELSEWHERE = frozenset({"model", "mm_processor_kwargs", "data_parallel_size", "disable_log_stats"})


def find_engine() -> Any:
    """Imports vLLM's engine.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    return importlib.import_module("vllm.v1.engine.llm_engine")


def _methods(module: Any) -> Iterator[str]:
    engine, renderer = module.LLMEngine, importlib.import_module("vllm.renderers").BaseRenderer
    yield from parameters_differ(
        [
            (engine.__init__, ["self", "vllm_config", "executor_class", "log_stats"]),
            (engine.add_request, ["self", "request_id", "prompt", "params"]),
            (engine.abort_request, ["self", "request_ids"]),
            (engine.step, ["self"]),
            (renderer.render_messages, ["self", "messages", "params"]),
            (renderer.render_cmpl, ["self", "prompts", "tok_params"]),
        ]
    )
    yield from uses_are_missing(
        [
            (renderer._process_multimodal, ["_mm_processor_only_cache", "_mm_processor_cache", "_process_mm_uuids"]),
            (engine.add_request, ["process_inputs", "output_processor", "engine_core"]),
        ]
    )


#: What is relied on in vLLM, for :mod:`shmring.integrations.promises`. It has been the same in vLLM 0.32 and 0.33.
CHECKS = (_methods,)


@dataclasses.dataclass(slots=True, kw_only=True)
class VllmRequest(abc.ABC):
    """A request that runs.

    Attributes:
        names: what vLLM knows of it by, which it may have ended itself. They begin with the request's number: ``7-0``.
    """

    names: list[str] = dataclasses.field(default_factory=list)

    @property
    @abc.abstractmethod
    def weight(self) -> int:
        """About what it takes of a step, in tokens; 0: vLLM has nothing of it."""


_Request = TypeVar("_Request", bound=VllmRequest)


class VllmLoop(abc.ABC, Generic[_Request]):
    """vLLM's engine, and the requests of an executor that it computes for.

    Args:
        options: of the executor.
        defaults: arguments of the engine that are not among the options.

    Raises:
        ImportError: vLLM is not installed, or it is one that is not known here.
        OSError: vLLM can't start with this model.
        ValueError: an option is unknown or makes no sense.
    """

    def __init__(self, options: ExecutorOptions, defaults: Mapping[str, Any]) -> None:
        self._engine = _start_engine(options, defaults)
        self._name = ModelSource.of(options.model or "").name
        self._max_num_seqs: int = self._engine.vllm_config.scheduler_config.max_num_seqs
        self._preparing = Preparing[Any]()
        self._requests: dict[int, _Request] = {}

    @abc.abstractmethod
    def _enter(self, part: StepInput) -> StepOutput:
        """Gives a request to vLLM, in its first step or as far as it is prepared."""

    @abc.abstractmethod
    def _take(self, request: _Request, made: Sequence[Any]) -> StepOutput:
        """Takes what vLLM has made for a request."""

    def _in_turn(self, batch: Sequence[StepInput]) -> Sequence[StepInput]:
        """Returns the parts of a step in the order in which they are entered."""
        return batch

    def execute(self, batch: Sequence[StepInput]) -> Sequence[StepOutput | Exception]:
        """Gives vLLM the requests that are ready, and executes a step of it.

        Raises:
            ExecutorDeadError: vLLM's engine has failed.
        """
        outputs: dict[int, StepOutput | Exception] = {}
        self._preparing.begin_step()
        for part in self._in_turn(batch):
            try:
                outputs[part.request_id] = self._enter(part)
            except ExecutorDeadError:
                raise
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with a request fails that request
                outputs[part.request_id] = _report(error)
            self._forget_ended(part.request_id, outputs)
        if self._engine.has_unfinished_requests():
            weights = {number: request.weight for number, request in self._requests.items()}
            began = time.perf_counter()
            outputs |= self._step()
            outputs |= share_seconds(outputs, weights, time.perf_counter() - began)
        else:
            self._preparing.wait(outputs)
        beside_s = {part.request_id: sum(self._preparing.take_seconds(part.request_id).values()) for part in batch}
        return [priced(outputs[number], 0.0, seconds) for number, seconds in beside_s.items()]

    def forget(self, request_id: int) -> None:
        """Ends a request in vLLM's engine, unless it has ended."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._preparing.forget(request_id)
            self._engine.abort_request(request.names)

    def close(self) -> None:
        """Ends vLLM's workers, if it has any, and gives the memory of accelerators back; the rest goes with the process."""
        self._preparing.close()
        self._engine.model_executor.shutdown()

    def _step(self) -> dict[int, StepOutput | Exception]:
        """Executes a step; returns the outputs of the requests for which something came of it."""
        made = defaultdict[int, list[Any]](list)
        for each in self._step_engine():
            made[int(each.request_id.partition("-")[0])].append(each)
        outputs: dict[int, StepOutput | Exception] = {}
        for request_id in made.keys() & self._requests.keys():
            try:
                outputs[request_id] = self._take(self._requests[request_id], made[request_id])
            except Exception as error:  # noqa: BLE001 - it fails the request that it is about
                outputs[request_id] = _report(error)
            self._forget_ended(request_id, outputs)
        return outputs

    def _step_engine(self) -> list[Any]:
        try:
            made: list[Any] = self._engine.step()
        except Exception as error:  # noqa: BLE001 - any error of vLLM's engine is its end
            logger.critical("vLLM's engine has failed\n%s", traceback.format_exc())
            raise ExecutorDeadError(f"vLLM's engine has failed: {type(error).__name__}: {shortened(error)}") from None
        if not made:
            time.sleep(_PAUSE_S)
        return made

    def _forget_ended(self, request_id: int, outputs: Mapping[int, StepOutput | Exception]) -> None:
        output = outputs[request_id]
        if isinstance(output, Exception) or output.finished:
            self.forget(request_id)


def number_of(made: Any) -> int:
    """Returns which of a request's prompts something of vLLM's is for."""
    return int(made.request_id.partition("-")[2])


def share_seconds(
    outputs: Mapping[int, StepOutput | Exception], weights: Mapping[int, int], seconds: float
) -> dict[int, StepOutput | Exception]:
    """Returns the outputs of requests with what they took of a step."""
    whole = max(1, sum(weights.values()))
    return {
        number: priced(outputs[number], seconds * weight / whole) for number, weight in weights.items() if number in outputs
    }


def _start_engine(options: ExecutorOptions, defaults: Mapping[str, Any]) -> Any:
    # vLLM reads these when it is imported. Its engine is to be in this process, and its log is to be ours.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    if not options.model:
        raise ValueError("the vllm executor needs a model: a directory, or a name on the Hugging Face hub")
    try:
        vllm = importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise ImportError(f"the vllm executor needs {error.name}: install shmring in vLLM's environment") from None
    if findings := broken(find_engine, CHECKS):
        raise ImportError(f"vLLM {vllm.__version__} is not as the vllm executor needs it: {'; '.join(findings)}")
    arguments = importlib.import_module("vllm.engine.arg_utils").EngineArgs
    _check_options(options.options, {field.name for field in dataclasses.fields(arguments)})
    given = dict(defaults) | dict(options.options) | {"mm_processor_kwargs": dict(options.mm_processor_kwargs) or None}
    try:
        config = arguments(model=ModelSource.of(options.model).source, **given).create_engine_config()
        executor = importlib.import_module("vllm.v1.executor").Executor.get_class(config)
        engine = find_engine().LLMEngine(config, executor, log_stats=False, multiprocess_mode=False)
    except (ImportError, OSError):
        raise
    except ValueError as error:
        raise ValueError(f"vLLM can't start with model {options.model!r}: {shortened(error)}") from error
    except Exception as error:  # noqa: BLE001 - whatever keeps it from starting is one line for the operator, and in the log
        logger.critical("vLLM can't start\n%s", traceback.format_exc())
        raise OSError(f"vLLM can't start with model {options.model!r}: {shortened(error)}") from None
    engine.renderer._mm_processor_cache = engine.renderer._mm_processor_only_cache
    return engine


def _check_options(options: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(options) - (known - _SAID_ELSEWHERE)):
        elsewhere = " here; it has an option of its own" if unknown[0] in _SAID_ELSEWHERE else ""
        raise ValueError(f"vLLM's engine takes no argument {unknown[0]!r}{elsewhere}")


def _report(error: Exception) -> Exception:
    """Returns an error of the same meaning that holds no frames, which hold media."""
    return report(error, (ValueError, importlib.import_module("vllm.exceptions").VLLMClientError))
