"""Requests to encode, in slices: a step works on them input by input for some milliseconds, and the rest comes again.

The cost of one request should not delay others. A request of 2048 texts would keep everybody for half a second if it were one
piece of work, and 40 of them at once for 20 seconds; here a small request waits for the one input that is being encoded, and
for the end of a slice. Two rules say whose input is next:

- *Small* requests come first, in order of arrival: those that, by their executor's estimate, are encoded within a slice. So a
  small request is answered at once, even beside many large ones.
- Of the others, the one that has had least time comes next. One of them has a turn at least every ``_STARVING_S``, even beside
  many small ones.

A slice ends when its time is over; or as soon as all small requests of the step are answered, unless the others have waited for
long: answers are sent between two slices.

Invariants: an input is encoded once; a request's embeddings are in the order of its inputs; between two steps nothing keeps a
view but an input that takes steps, until it is encoded or its request is forgotten.

Source: least attained service first is Kleinrock's foreground-background scheduling ("Queueing Systems", volume 2, 1976). That
it is best where most requests are small and few are large: Nuyens and Wierman, "The Foreground-Background queue: A survey"
(2008).
"""

from __future__ import annotations

import dataclasses
import heapq
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Mapping
from typing import TypeAlias

import torch

from shmring.engine.answers import without_frames
from shmring.engine.executors.interface import ExecutorDeadError, StepOutput
from shmring.engine.protocol import EncodeReply, EncodeRequest, Medium, Text

__all__ = ["Encoded", "EncodingLine"]

logger = logging.getLogger("shmring.engine.executors")

_SLICE_S = 0.004  # a small request waits for so long at most, beside one input; ending and beginning a slice takes 0.1 ms
_SMALL_S = 0.004  # a small request takes so long at most, by its estimate
_STARVING_S = 0.010  # after which a large one has a turn
_PART_INPUTS = 256  # of a reply: their embeddings are copied to its slot in well under a millisecond

#: An input's embedding, of shape (embedding size,), float32, and its tokens.
Encoded: TypeAlias = tuple[torch.Tensor, int]

_GOES_ON = StepOutput(finished=False, keep_inputs=True)


def _report(error: Exception) -> Exception:
    if not isinstance(error, ValueError):
        logger.error("an input could not be encoded\n%s", "".join(traceback.format_exception(error)))
    return without_frames(error)


@dataclasses.dataclass(slots=True, eq=False)
class _Progress:
    """How far a request is.

    Attributes:
        is_small: whether it comes first.
        seconds: that were spent on it.
        done: inputs that are encoded.
        begun: the next one, if it takes steps.
        embeddings: of those that were not replied yet.
        tokens: of all that are encoded.
    """

    is_small: bool
    seconds: float = 0.0
    done: int = 0
    begun: Generator[None, None, Encoded] | None = None
    embeddings: list[torch.Tensor] = dataclasses.field(default_factory=list)
    tokens: int = 0


class EncodingLine:
    """The requests that are being encoded. Used by one thread.

    Args:
        encode: encodes an input; or returns a generator that does, and yields where a slice may end. What it raises fails the
            request.
        expected_s: returns about how many seconds of work an input is.
        report: returns the error for the caller, without frames, and logs errors that are not the caller's fault. It may raise
            :class:`ExecutorDeadError`.
        slice_s: for how long a step begins with further inputs; 0: it encodes one.
    """

    def __init__(
        self,
        encode: Callable[[Text | Medium], Encoded | Generator[None, None, Encoded]],
        expected_s: Callable[[Text | Medium], float],
        report: Callable[[Exception], Exception] = _report,
        slice_s: float = _SLICE_S,
    ) -> None:
        self._encode = encode
        self._expected_s = expected_s
        self._report = report
        self._slice_s = slice_s
        self._progress: dict[int, _Progress] = {}  # in order of arrival
        self._large_at = 0.0  # when one that is not small had its last turn

    def execute(self, requests: Mapping[int, EncodeRequest]) -> dict[int, StepOutput | Exception]:
        """Works for a slice.

        Args:
            requests: all that go on, by number.
        """
        outputs: dict[int, StepOutput | Exception] = dict.fromkeys(requests, _GOES_ON)
        now = time.perf_counter()
        if all(progress.is_small for progress in self._progress.values()):
            self._large_at = now  # the first of those that come now waits no longer than the others did
        for number, request in requests.items():
            if number not in self._progress:
                self._progress[number] = _Progress(self._is_small(request))
        mine = [(number, progress) for number, progress in self._progress.items() if number in requests]
        small = deque(number for number, progress in mine if progress.is_small)
        large = [(progress.seconds, number) for number, progress in mine if not progress.is_small]
        heapq.heapify(large)
        ends_early = bool(small) and now - self._large_at < _STARVING_S
        has_begun = False
        end = now + self._slice_s
        while (small or large) and (now < end or not has_begun):
            if ends_early and not small:
                break
            has_begun = True
            if small and (not large or now - self._large_at < _STARVING_S):
                number = small.popleft()
            else:
                _, number = heapq.heappop(large)
            progress = self._progress[number]
            output = self._advance(progress, requests[number])
            before, now = now, time.perf_counter()
            progress.seconds += now - before
            if not progress.is_small:
                self._large_at = now
            if output is not None:
                outputs[number] = output
            elif progress.is_small:
                small.appendleft(number)
            else:
                heapq.heappush(large, (progress.seconds, number))
        return outputs

    def _advance(self, progress: _Progress, request: EncodeRequest) -> StepOutput | Exception | None:
        """Encodes an input, or a part of it; returns what its caller is to be sent, if it is time for that."""
        if not request.inputs:
            return ValueError("a request to encode has at least one input")
        try:
            encoded = self._encode_part(progress, request)
        except ExecutorDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a request fails only that request
            return self._report(error)
        if encoded is None:
            return None
        embedding, tokens = encoded
        progress.embeddings.append(embedding)
        progress.tokens += tokens
        progress.done += 1
        is_last = progress.done == len(request.inputs)
        if not is_last and len(progress.embeddings) < _PART_INPUTS:
            return None
        embeddings, progress.embeddings = progress.embeddings, []
        return StepOutput(EncodeReply(torch.stack(embeddings), progress.tokens), finished=is_last, keep_inputs=not is_last)

    def _encode_part(self, progress: _Progress, request: EncodeRequest) -> Encoded | None:
        steps = progress.begun or self._encode(request.inputs[progress.done])
        if isinstance(steps, tuple):
            return steps
        progress.begun = steps
        try:
            next(steps)
        except StopIteration as stopped:
            progress.begun = None
            encoded: Encoded = stopped.value
            return encoded
        return None

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._progress.pop(number, None)

    def _is_small(self, request: EncodeRequest) -> bool:
        seconds = 0.0
        for item in request.inputs:
            seconds += self._expected_s(item)
            if seconds > _SMALL_S:
                return False
        return True
