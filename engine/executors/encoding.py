"""Requests to encode, in slices: a step works on them input by input for some milliseconds, and the rest comes again.

The cost of one request should not delay others. A request of 2048 texts would keep everybody for half a second if it were one
piece of work, and 40 of them at once for 20 seconds; here a small request waits for the one input that is being encoded, and
for the end of a slice. Two rules say whose input is next:

- *Small* requests come first, in the order of the step: those that, by their executor's estimate, are encoded within a slice.
  So a small request is answered at once, even beside many large ones.
- Of the others, the one that has had least time comes next, of those of one owner: whose request is the first of the step. One
  of them has a turn at least every ``_STARVING_S``, even beside many small ones.

An executor that encodes several inputs faster together than one by one is offered several at a time, in this order.

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
import itertools
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from shmring.engine.executors.failures import report
from shmring.engine.executors.interface import COMES_AGAIN, ExecutorDeadError, StepOutput, priced
from shmring.engine.protocol import EncodeReply, EncodeRequest, Medium, Text

__all__ = ["Encoded", "EncodingLine"]

_SLICE_S = 0.004  # a small request waits for so long at most, beside one input; ending and beginning a slice takes 0.1 ms
_SMALL_S = 0.004  # a small request takes so long at most, by its estimate
_STARVING_S = 0.010  # after which a large one has a turn
_PART_INPUTS = 256  # of a reply: their embeddings are copied to its slot in well under a millisecond

#: An input's embedding, of shape (embedding size,), float32, and its tokens.
Encoded: TypeAlias = tuple[torch.Tensor, int]


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
        encode: encodes inputs, offered in the order in which they are to be encoded: all, or as many of the first as it takes
            together, and one at least. Returns for each that it took its embedding, or the error with which its request fails.
            For a single input, it may return a generator that encodes it, and yields where a slice may end. What it raises
            fails the request of the first.
        expected_s: returns about how many seconds of work an input is.
        report: returns the error for the caller, without frames, and logs errors that are not the caller's fault. It may raise
            :class:`ExecutorDeadError`.
        together: how many inputs are offered at a time. If they are not all taken, the step ends.
        slice_s: for how long a step begins with further inputs; 0: it encodes once.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[Text | Medium]], Sequence[Encoded | Exception] | Generator[None, None, Encoded]],
        expected_s: Callable[[Text | Medium], float],
        report: Callable[[Exception], Exception] = report,
        together: int = 1,
        slice_s: float = _SLICE_S,
    ) -> None:
        self._encode = encode
        self._expected_s = expected_s
        self._report = report
        self._together = together
        self._slice_s = slice_s
        self._progress: dict[int, _Progress] = {}
        self._large_at = 0.0  # when one that is not small had its last turn

    def execute(self, requests: Mapping[int, EncodeRequest]) -> dict[int, StepOutput | Exception]:
        """Works for a slice.

        Args:
            requests: all that go on, by number.
        """
        outputs: dict[int, StepOutput | Exception] = dict.fromkeys(requests, COMES_AGAIN)
        now = time.perf_counter()
        if all(progress.is_small for progress in self._progress.values()):
            self._large_at = now  # the first of those that come now waits no longer than the others did
        for number, request in requests.items():
            if number not in self._progress:
                self._progress[number] = _Progress(self._is_small(request))
        mine = [(number, self._progress[number]) for number in requests]
        before_s = {number: progress.seconds for number, progress in mine}
        small = deque(number for number, progress in mine if progress.is_small)
        owner = next((requests[number].owner for number, progress in mine if not progress.is_small), "")
        large = [self._place(number, owner, requests) for number, progress in mine if not progress.is_small]
        heapq.heapify(large)
        ends_early = bool(small) and now - self._large_at < _STARVING_S
        end = now + self._slice_s
        while small or (large and not ends_early):
            turn = self._next_turn(small, large, requests, now)
            offered = [item for number, items in turn for item in items]
            results = self._encode_first(turn[0][0], offered)
            before, now = now, time.perf_counter()
            self._progress[turn[0][0]].seconds += 0.0 if results else now - before
            for number, output in self._note_turn(turn, results, requests, now - before, now):
                if output is not None:
                    outputs[number] = output
                elif self._progress[number].is_small:
                    small.appendleft(number)
                else:
                    heapq.heappush(large, self._place(number, owner, requests))
            if 0 < len(results) < len(offered) or now >= end:
                break
        return {number: priced(outputs[number], progress.seconds - before_s[number]) for number, progress in mine}

    def _place(self, number: int, owner: str, requests: Mapping[int, EncodeRequest]) -> tuple[bool, float, int]:
        """Where a large request stands in line; those of the owner come first."""
        return requests[number].owner != owner, self._progress[number].seconds, number

    def _next_turn(
        self, small: deque[int], large: list[tuple[bool, float, int]], requests: Mapping[int, EncodeRequest], now: float
    ) -> list[tuple[int, Sequence[Text | Medium]]]:
        """Takes from the line who is next, each with its next inputs. None of them begins a second part of its reply."""
        turn: list[tuple[int, Sequence[Text | Medium]]] = []
        room = self._together
        is_late = now - self._large_at >= _STARVING_S
        while room and (small or large):
            if small and (not large or not is_late):
                number, share = small.popleft(), room
            else:
                share = 1 if small else -(-room // len(large))
                _, _, number = heapq.heappop(large)
                is_late = False
            progress = self._progress[number]
            share = min(share, _PART_INPUTS - len(progress.embeddings))
            turn.append((number, requests[number].inputs[progress.done : progress.done + share]))
            room -= len(turn[-1][1])
        return turn

    def _encode_first(self, number: int, offered: Sequence[Text | Medium]) -> Sequence[Encoded | Exception]:
        """Encodes the first of what is offered; returns nothing while an input that takes steps goes on."""
        progress = self._progress[number]
        try:
            results = progress.begun or self._encode(offered)
            if not isinstance(results, Generator):
                return results
            progress.begun = results
            try:
                next(results)
            except StopIteration as stopped:
                progress.begun = None
                return [stopped.value]
        except ExecutorDeadError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a request fails only that request
            return [error]
        return []

    def _note_turn(
        self,
        turn: Sequence[tuple[int, Sequence[Text | Medium]]],
        results: Sequence[Encoded | Exception],
        requests: Mapping[int, EncodeRequest],
        took_s: float,
        now: float,
    ) -> Iterator[tuple[int, StepOutput | Exception | None]]:
        """Takes what has come of a turn; returns what the callers are to be sent, if it is time for that."""
        following = iter(results)
        for number, items in turn:
            progress = self._progress[number]
            output = None
            taken = list(itertools.islice(following, len(items)))
            for result in taken:
                progress.seconds += took_s / len(results)
                output = output or self._note(progress, requests[number], result)
            if not progress.is_small and (taken or not results):
                self._large_at = now
            yield number, output

    def _note(self, progress: _Progress, request: EncodeRequest, result: Encoded | Exception) -> StepOutput | Exception | None:
        """Takes what an input became; returns what its caller is to be sent, if it is time for that."""
        if isinstance(result, Exception):
            return self._report(result)
        embedding, tokens = result
        progress.embeddings.append(embedding)
        progress.tokens += tokens
        progress.done += 1
        is_last = progress.done == len(request.inputs)
        if not is_last and len(progress.embeddings) < _PART_INPUTS:
            return None
        embeddings, progress.embeddings = progress.embeddings, []
        return StepOutput(EncodeReply(torch.stack(embeddings), progress.tokens), finished=is_last, keep_inputs=not is_last)

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
