"""What executors of tests answer to a chat: the numbers from 1 to ``max_tokens``, one a step."""

from __future__ import annotations

from shmring.engine.executors.interface import StepInput, StepOutput
from shmring.engine.protocol import GenerateReply


class Counter:
    """Counts for each request.

    Attributes:
        sent: the last number of a request, and how many there are to be.
    """

    def __init__(self) -> None:
        self.sent: dict[int, list[int]] = {}

    def advance(self, part: StepInput) -> StepOutput:
        """Returns the next number of a request."""
        if part.payload is not None:
            self.sent[part.request_id] = [0, part.payload.sampling.max_tokens or 1]
        progress = self.sent[part.request_id]
        progress[0] += 1
        finished = progress[0] == progress[1]
        reply = GenerateReply(f"{progress[0]} ", [progress[0]], 1, progress[0], "length" if finished else None)
        return StepOutput(reply, finished=finished)
