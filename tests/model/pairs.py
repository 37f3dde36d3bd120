"""The compiled books with their models beside them: each event happens to both, and must have the same outcome.

A pair is used like the compiled book, by compiled ends as well. After each event, effects or errors are compared, and the whole
state of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shmring.core.compiled import ClientBook, ClientSlotRecord, EngineBook
from shmring.core.effects import Acquired
from shmring.core.geometry import ClientBookLimits, EngineBookLimits, Geometry
from tests.model import client_book as model_client_book
from tests.model import engine_book as model_engine_book
from tests.model.observed import ObservedClientBook, ObservedEngineBook
from tests.model.state import plain

_Outcome = tuple[Any, BaseException | None]

ENGINE_EVENTS = (
    *("connect", "goodbye", "disconnect", "died", "request_lease", "return_leases", "moment_passed"),
    *("submit", "claim", "end", "abort", "release_slots", "last_view_gone"),
    *("acquire_reply", "queue_reply", "cancel_reply", "release_replies", "reply_sent", "discard_reply"),
    *("let_overtake", "replies_read"),
    *("find", "stop_waiting", "keep", "unpin", "drain", "withdraw", "drop_untaken"),
)

CLIENT_EVENTS = (
    *("granted", "recalled", "expire"),
    *("acquire", "queue", "prefetch", "cancel", "moment_passed"),  # which check capacity themselves
    *("submit", "released", "give_up", "last_view_gone", "kept", "split"),
)


class PairedEngineBook(ObservedEngineBook):
    """The engine's book and its model."""

    def __init__(self, geometry: Geometry, limits: EngineBookLimits) -> None:
        super().__init__(geometry, limits)
        self.model = model_engine_book.EngineBook(geometry, limits)
        self.state = plain(self.model)  # after the last event

    def follow(self, name: str, *arguments: Any, result: Any = None, error: BaseException | None = None) -> None:
        """A compiled end has done this to the book, in C: the model does the same."""
        expected, expected_error = outcome(getattr(self.model, name), arguments, {})
        self.compare(f"{name}{arguments}", (result, error), (expected, expected_error))

    def compare(self, event: str, ours: _Outcome, models: _Outcome) -> None:
        """Compares what both have done in an event, and checks each."""
        assert same_error(ours[1], models[1]), f"{event}: {ours[1]!r}, and the model says {models[1]!r}"
        assert ours[0] == models[0], f"{event}: {ours[0]}, and the model says {models[0]}"
        before, self.state = self.state, plain(self)
        assert self.state == plain(self.model), f"{event}: another state than the model's"
        assert ours[1] is None or self.state == before, f"{event}: {ours[1]!r}, and something has changed"
        self.check()
        self.model.check()


def outcome(event: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> tuple[Any, BaseException | None]:
    """What an event returns, or raises."""
    try:
        return event(*arguments, **named), None
    except Exception as error:  # noqa: BLE001 - whatever it is, the other must raise the same
        return None, error


def same_error(one: BaseException | None, other: BaseException | None) -> bool:
    """Whether two errors say the same."""
    return (
        type(one) is type(other)
        and str(one) == str(other)
        and getattr(one, "__dict__", None) == getattr(other, "__dict__", None)
    )


def _paired(name: str) -> Callable[..., Any]:
    def event(self: PairedEngineBook, *arguments: Any, **named: Any) -> Any:
        models = outcome(getattr(self.model, name), arguments, named)
        self.is_called = True
        ours = outcome(getattr(EngineBook, name), (self, *arguments), named)
        self.is_called = False
        self.compare(f"{name}{arguments}", ours, models)
        result, error = ours
        if error is not None:
            raise error
        return result

    return event


for _name in ENGINE_EVENTS:
    setattr(PairedEngineBook, _name, _paired(_name))


class PairedClientBook(ObservedClientBook):
    """A frontend's book and its model. Callers see the compiled book's slots; each stands for one of the model's."""

    def __init__(self, limits: ClientBookLimits) -> None:
        super().__init__(limits)
        self.model = model_client_book.ClientBook(limits)
        self.model_slots: dict[ClientSlotRecord, Any] = {}

    def of_model(self, argument: Any) -> Any:
        """What an argument is to the model."""
        if isinstance(argument, ClientSlotRecord):
            return self.model_slots[argument]
        return argument.model if isinstance(argument, PairedClientBook) else argument

    def meet(self, result: Any, expected: Any) -> None:
        """Compares what both have returned, and learns which slots of theirs are one."""
        if isinstance(result, ClientSlotRecord):
            assert plain(result) == plain(expected)
            self.model_slots[result] = expected
        elif isinstance(result, Acquired):
            assert result.ticket == expected.ticket
            self.meet(result.slot, expected.slot)
        elif isinstance(result, list | tuple):
            assert len(result) == len(expected), f"{result}, and the model says {expected}"
            for one, other in zip(result, expected, strict=True):
                self.meet(one, other)
        else:
            assert result == expected, f"{result}, and the model says {expected}"

    def follow(self, name: str, *arguments: Any, result: Any = None, error: BaseException | None = None, **named: Any) -> None:
        """A compiled end has done this to the book, in C: the model does the same."""
        self.take_views()
        models = outcome(getattr(self.model, name), [*map(self.of_model, arguments)], named)
        self.compare(f"{name}{arguments}", (result, error), models)

    def take_views(self) -> None:
        """Which slots are viewed, callers set."""
        for slot, model_slot in self.model_slots.items():
            model_slot.viewed = slot.viewed

    def compare(self, event: str, ours: _Outcome, models: _Outcome) -> None:
        """Compares what both have done in an event, and checks each."""
        assert same_error(ours[1], models[1]), f"{event}: {ours[1]!r}, and the model says {models[1]!r}"
        self.meet(ours[0], models[0])
        assert plain(self) == plain(self.model), f"{event}: another state than the model's"
        self.check()
        self.model.check()


def _paired_client_event(name: str) -> Callable[..., Any]:
    def event(self: PairedClientBook, *arguments: Any, **named: Any) -> Any:
        self.take_views()
        models = outcome(getattr(self.model, name), [self.of_model(argument) for argument in arguments], named)
        self.is_called = True
        ours = outcome(getattr(ClientBook, name), (self, *arguments), named)
        self.is_called = False
        self.compare(f"{name}{arguments}", ours, models)
        result, error = ours
        if error is not None:
            raise error
        return result

    return event


for _name in CLIENT_EVENTS:
    setattr(PairedClientBook, _name, _paired_client_event(_name))
