"""The engine's numbers and times, by name; frontends export them."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import shmring
from shmring.service.distributions import Distribution
from shmring.service.logs import dropped_lines
from shmring.service.numbers import Count, Number

__all__ = ["EngineMetrics", "EngineTimes", "ring_numbers"]


@dataclasses.dataclass(slots=True)
class EngineMetrics:
    """Counters of the engine core; times in seconds.

    Attributes:
        steps: steps executed.
        step_requests: requests in those steps, each counted once for each step; divided by ``steps``, the mean batch.
        step_seconds: seconds spent in steps.
        prompt_tokens: tokens of requests that were answered, as far as the executor says them.
        generated_tokens: tokens of answers.
        finished_requests: requests answered.
        failed_requests: requests that the executor refused or failed.
        refused_requests: requests that never got in line: too many waited, or they made no sense.
        timed_out_requests: requests whose deadline passed.
        waiting_requests: requests that wait for a step now.
        running_requests: requests in the running step now.
        loop_lag_seconds: how late the engine's loop was at most in the last 15 to 30 s.
        log_lines_dropped: lines of the engine's log that nobody read, or that could not be written.
    """

    steps: Count = 0
    step_requests: Count = 0
    step_seconds: Annotated[float, "counter"] = 0.0
    prompt_tokens: Annotated[Count, Number("shmring_prompt_tokens")] = 0
    generated_tokens: Annotated[Count, Number("shmring_generation_tokens")] = 0
    finished_requests: Count = 0
    failed_requests: Count = 0
    refused_requests: Count = 0
    timed_out_requests: Count = 0
    waiting_requests: Annotated[int, Number("shmring_num_requests_waiting")] = 0
    running_requests: Annotated[int, Number("shmring_num_requests_running")] = 0
    loop_lag_seconds: float = 0.0
    log_lines_dropped: Count = 0

    def collect(self, ring: shmring.RingStatistics) -> dict[str, float]:
        """Returns these counters and the ring's, by name; of workers, how many get messages.

        The epoch is an identity, not a number, and is left out.
        """
        self.log_lines_dropped = dropped_lines()
        return {**dataclasses.asdict(self), **ring_numbers(ring)}


def ring_numbers(ring: shmring.RingStatistics) -> dict[str, float]:
    """Returns a ring's numbers by name, as :class:`~shmring.engine.counted.EngineNumbers` has them."""
    numbers = {f"ring_{name}": value for name, value in ring.as_dict().items() if name != "epoch"}
    return numbers | {"ring_workers": sum(worker.is_member for worker in ring.workers)}


@dataclasses.dataclass(slots=True)
class EngineTimes:
    """How long the parts of requests took in the engine, in seconds.

    Attributes:
        queue: from arrival in the engine to the first step.
        prefill: from the first step to the first part of the answer.
        decode: from the first part of the answer to the last, of answers in text.
        step: time of a step.
    """

    queue: Annotated[Distribution, Number("shmring_request_queue_time_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    prefill: Annotated[Distribution, Number("shmring_request_prefill_time_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    decode: Annotated[Distribution, Number("shmring_request_decode_time_seconds")] = dataclasses.field(
        default_factory=Distribution
    )
    step: Annotated[Distribution, Number("shmring_step_time_seconds")] = dataclasses.field(default_factory=Distribution)

    def as_dict(self) -> dict[str, Distribution]:
        """Returns them by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
