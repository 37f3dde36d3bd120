"""The engine's numbers and times, by name; frontends export them."""

from __future__ import annotations

import dataclasses

import shmring
from shmring.service.distributions import Distribution
from shmring.service.logs import dropped_lines

__all__ = ["EngineMetrics", "EngineTimes"]


@dataclasses.dataclass(slots=True)
class EngineMetrics:
    """Counters of the engine core; times in seconds.

    Attributes:
        steps: steps executed.
        step_requests: requests in them, each counted once for each step.
        step_seconds: time spent in them.
        prompt_tokens: tokens of requests, as far as the executor says them.
        generated_tokens: tokens of answers.
        finished_requests: requests that were answered.
        failed_requests: requests that the executor refused or failed.
        refused_requests: requests that never got in line: too many waited, or they made no sense.
        timed_out_requests: requests whose deadline passed.
        waiting_requests: requests that wait for a step.
        running_requests: requests in the step that is running.
        loop_lag_seconds: how late the loop was at most in the last 15 to 30 s.
        log_lines_dropped: lines of this process' log that nobody read, or that could not be written.
    """

    steps: int = 0
    step_requests: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished_requests: int = 0
    failed_requests: int = 0
    refused_requests: int = 0
    timed_out_requests: int = 0
    waiting_requests: int = 0
    running_requests: int = 0
    loop_lag_seconds: float = 0.0
    log_lines_dropped: int = 0

    def collect(self, ring: shmring.RingStatistics) -> dict[str, float]:
        """Returns these counters and the ring's, by name; of workers, how many get messages.

        The epoch is an identity, not a number, and is left out.
        """
        self.log_lines_dropped = dropped_lines()
        numbers = {f"ring_{name}": value for name, value in ring.as_dict().items() if name != "epoch"}
        numbers["ring_workers"] = sum(worker.is_member for worker in ring.workers)
        return {**dataclasses.asdict(self), **numbers}


@dataclasses.dataclass(slots=True)
class EngineTimes:
    """How long the parts of requests took in the engine, in seconds.

    Attributes:
        queue: from a request's arrival to its first step.
        prefill: from there to the first part of its answer.
        decode: from there to the last part, of answers in text.
        step: a step.
    """

    queue: Distribution = dataclasses.field(default_factory=Distribution)
    prefill: Distribution = dataclasses.field(default_factory=Distribution)
    decode: Distribution = dataclasses.field(default_factory=Distribution)
    step: Distribution = dataclasses.field(default_factory=Distribution)

    def as_dict(self) -> dict[str, Distribution]:
        """Returns them by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
