"""The scheduler's half of the connector for encoder outputs: what the store has, pinned until the workers have it.

Theory of operation. In each step, vLLM's scheduler asks for each medium that a request needs whether its output is elsewhere,
and has it encoded if not. What is found is pinned here, in the moment in which it is found: it can't go before a worker has it.
The step's message names what the workers have to load. When their answer to that step is back, each of them has a pin or a copy
of its own, and the scheduler's pin goes. One that no message has named goes when it was not asked for in some steps: its
request waits for something else, or has ended.

The first time that a request is seen, all its media are looked up with one round trip. What was not found is not looked up
again in the same step. An output that two requests of a step need is loaded once.

A request may come without the pixels, where an encoder has answered before: then the output can come from nowhere else, and if
the store has it no more, that request fails.

Invariants: what a message names has a pin until the answer to that message, or until so many steps later that there will be
none; an output that vLLM encodes in a step is not loaded in it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

__all__ = ["Load", "Pins", "SchedulerHalf", "Step"]

_UNUSED_STEPS = 8  # in which a request may wait for memory of the cache, say, and be asked for again without a look-up
_ANSWER_STEPS = 64  # after which no answer will come: far more than vLLM has in flight


class Content(Protocol):
    """What is pinned in the store."""

    def close(self) -> None:
        """Gives the pin back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """What workers load.

    Attributes:
        identifier: what vLLM calls the medium.
        request_id: of a request that needs it.
        index: of the medium in that request.
        rows: of the output.
        has_input: whether the request has what an encoder needs.
    """

    identifier: str
    request_id: str
    index: int
    rows: int
    has_input: bool


@dataclasses.dataclass(slots=True)
class Step:
    """What the scheduler's half tells the workers' halves, with each step of vLLM.

    Attributes:
        number: of the step.
        loads: what they load.
        seen: the media of requests that come with this step, where this engine keeps outputs.
        encoded: what vLLM encodes in this step: the media's numbers, by request. It is the same dict that vLLM's own message
            has, so that a worker that can't load an output has it encoded. None: nothing is loaded.
    """

    number: int
    loads: list[Load] = dataclasses.field(default_factory=list)
    seen: list[str] = dataclasses.field(default_factory=list)
    encoded: dict[str, list[int]] | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Pin:
    """An output that is pinned.

    Attributes:
        content: of it.
        step: in which it was asked for last.
        messages: that name it, and are not answered yet.
    """

    content: Content
    step: int
    messages: int = 0


class Pins:
    """What the scheduler knows of the store, and has pinned there.

    Args:
        find: looks outputs up by their identifiers; returns the contents, pinned, and None for what is not there.
    """

    def __init__(self, find: Callable[[Sequence[str]], Sequence[Content | None]]) -> None:
        self._find = find
        self._pins: dict[str, _Pin] = {}
        self._absent: set[str] = set()  # in this step
        self._loads: dict[str, Load] = {}  # of this step
        self._messages: collections.OrderedDict[int, list[str]] = collections.OrderedDict()  # that are not answered, by step
        self._step = 0

    def has(self, identifier: str) -> bool:
        """Whether an output is in the store; then it is pinned."""
        pin = self._pins.get(identifier)
        if pin is None:
            self.look_up([identifier])
            return identifier in self._pins
        pin.step = self._step
        return True

    def look_up(self, identifiers: Iterable[str]) -> None:
        """Looks for outputs with one round trip: for those of which this step does not know yet."""
        unknown = [each for each in dict.fromkeys(identifiers) if each not in self._pins and each not in self._absent]
        if not unknown:
            return
        for identifier, content in zip(unknown, self._find(unknown), strict=True):
            if content is None:
                self._absent.add(identifier)
            else:
                self._pins[identifier] = _Pin(content, self._step)

    def load(self, load: Load) -> None:
        """Has an output loaded with this step. One that is not pinned is not: vLLM encodes it."""
        if load.identifier in self._pins:
            self._loads.setdefault(load.identifier, load)

    def next_step(self) -> tuple[int, list[Load]]:
        """A step is complete: returns its number, and what workers load. Pins that nobody needs any more go."""
        number, loads = self._step, list(self._loads.values())
        self._loads.clear()
        self._absent.clear()
        self._step += 1
        if loads:
            self._messages[number] = [load.identifier for load in loads]
            for load in loads:
                self._pins[load.identifier].messages += 1
        while self._messages and next(iter(self._messages)) < self._step - _ANSWER_STEPS:
            self.answered(next(iter(self._messages)))
        self.let_go([each for each, pin in self._pins.items() if pin.step < self._step - _UNUSED_STEPS])
        return number, loads

    def answered(self, number: int) -> None:
        """All workers have what this step's message named."""
        identifiers = self._messages.pop(number, ())
        for identifier in identifiers:
            self._pins[identifier].messages -= 1
        self.let_go(identifiers)

    def let_go(self, identifiers: Iterable[str]) -> None:
        """Gives the pins of these outputs back, but for those that a message names, or this step's will."""
        for identifier in identifiers:
            pin = self._pins.get(identifier)
            if pin is not None and not pin.messages and identifier not in self._loads:
                del self._pins[identifier]
                pin.content.close()

    def close(self) -> None:
        """Gives all pins back."""
        self._messages.clear()
        for pin in self._pins.values():
            pin.content.close()
        self._pins.clear()


class SchedulerHalf:
    """See the head of this file. Called by the scheduler's thread.

    Args:
        find: as of :class:`Pins`; None: this engine loads nothing.
        keeps: whether this engine keeps outputs.
        has_input: says of a medium whether it comes with what an encoder needs. Called only for requests that an encoder
            has announced.
    """

    def __init__(
        self,
        find: Callable[[Sequence[str]], Sequence[Content | None]] | None,
        *,
        keeps: bool,
        has_input: Callable[[Any], bool],
    ) -> None:
        self.pins = Pins(find or (lambda identifiers: [None] * len(identifiers)))
        self._loads = find is not None
        self._keeps = keeps
        self._has_input = has_input
        self._asked: set[str] = set()  # requests whose media were looked up
        self._local: set[str] = set()  # outputs that vLLM's own cache had after the last step
        self._placed: set[str] = set()  # and those that got a place there in this step
        self._unavailable: set[str] = set()  # requests, which fail

    def has(self, identifier: str) -> bool:
        """Whether an output need not be encoded."""
        return self._loads and self.pins.has(identifier)

    def is_ready(self, request: Any, computed_tokens: int) -> bool:
        """A request may be scheduled: looks its media up.

        Args:
            request: vLLM's.
            computed_tokens: what stands before them needs no output.

        Returns:
            False if it can't be scheduled, as an output of it is nowhere. It is among :meth:`unavailable`, once.
        """
        if not self._loads:
            return True
        announced = bool(request.ec_transfer_params)
        if request.request_id in self._asked and not announced:
            return True
        has = self._local | self._placed
        needed = [each for each in request.mm_features if _end_of(each) > computed_tokens and each.identifier not in has]
        if request.request_id not in self._asked:
            self._asked.add(request.request_id)
            self.pins.look_up([each.identifier for each in needed])
        if announced and any(not self.pins.has(each.identifier) and not self._has_input(each) for each in needed):
            self._unavailable.add(request.request_id)
            return False
        return True

    def unavailable(self) -> set[str]:
        """Returns the requests that have to fail, once."""
        requests, self._unavailable = self._unavailable, set()
        return requests

    def allocated(self, request: Any, index: int) -> None:
        """vLLM's cache has a place for an output, which is encoded or loaded in this step."""
        feature = request.mm_features[index]
        self._placed.add(feature.identifier)
        if self._loads:
            rows = feature.mm_position.get_num_embeds()
            has_input = feature.data is not None and (not request.ec_transfer_params or self._has_input(feature))
            self.pins.load(Load(feature.identifier, request.request_id, index, rows, has_input))

    def next_step(self, output: Any) -> Step:
        """A step is complete: returns what the workers are told.

        Args:
            output: vLLM's message to the workers, with what it encodes.
        """
        self._local.difference_update(output.free_encoder_mm_hashes)
        self._local |= self._placed  # also what had to go, and came again in this step
        self._placed.clear()
        number, loads = self.pins.next_step()
        seen = {each.identifier for new in output.scheduled_new_reqs for each in new.mm_features} if self._keeps else ()
        return Step(number, loads, sorted(seen), output.scheduled_encoder_inputs if loads else None)

    def answered(self, number: int) -> None:
        """All workers have what this step's message named."""
        self.pins.answered(number)

    def ended(self, request: Any) -> None:
        """A request has ended."""
        self._asked.discard(request.request_id)
        self.pins.let_go(each.identifier for each in request.mm_features or ())

    def close(self) -> None:
        """Gives all pins back."""
        self.pins.close()


def _end_of(feature: Any) -> int:
    end: int = feature.mm_position.offset + feature.mm_position.length
    return end
