"""The compiled books with their models beside them: each event happens to both, and must have the same outcome.

A pair is used like the compiled book. After each event, effects or errors are compared, and the whole state of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shmring.core import client_book, engine_book
from shmring.core.effects import Acquired
from shmring.core.geometry import ClientBookLimits, EngineBookLimits, Geometry
from tests.model import client_book as model_client_book
from tests.model import engine_book as model_engine_book
from tests.model.state import plain

__all__ = ["PairedClientBook", "PairedEngineBook"]

ENGINE_EVENTS = (
    *("connect", "goodbye", "disconnect", "died", "request_lease", "return_leases"),
    *("submit", "claim", "end", "abort", "release_slots", "last_view_gone"),
    *("acquire_reply", "queue_reply", "cancel_reply", "release_replies", "reply_sent", "discard_reply"),
    *("find", "keep", "unpin"),
)

CLIENT_EVENTS = (
    *("granted", "recalled", "expire"),
    *("acquire", "queue", "prefetch", "cancel"),  # which check capacity themselves
    *("submit", "released", "give_up", "last_view_gone", "kept", "split"),
)


class PairedEngineBook(engine_book.EngineBook):
    """The engine's book and its model."""

    def __init__(self, geometry: Geometry, limits: EngineBookLimits) -> None:
        super().__init__(geometry, limits)
        self.model = model_engine_book.EngineBook(geometry, limits)

    def follow(self, name: str, *arguments: Any, error: BaseException | None = None) -> Any:
        """Lets the model do what a compiled end has done to this book without a call from Python.

        Args:
            name: of the event.
            error: that it raised in this book.

        Returns:
            What the model returns: a compiled end keeps what the book returned, and the caller sees what it did with that.
        """
        expected, expected_error = outcome(getattr(self.model, name), arguments, {})
        assert same_error(error, expected_error), f"{name}{arguments}: {error!r}, and the model says {expected_error!r}"
        self.compare(f"{name}{arguments}")
        return expected

    def compare(self, event: str) -> None:
        """Compares the states of both after an event, and checks each."""
        assert plain(self) == plain(self.model), f"{event}: another state than the model's"
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
        compiled = getattr(engine_book.EngineBook, name)
        expected, expected_error = outcome(getattr(self.model, name), arguments, named)
        result, error = outcome(compiled, (self, *arguments), named)
        assert same_error(error, expected_error), f"{name}{arguments}: {error!r}, and the model says {expected_error!r}"
        assert result == expected, f"{name}{arguments}: {result}, and the model says {expected}"
        self.compare(f"{name}{arguments}")
        if error is not None:
            raise error
        return result

    return event


for _name in ENGINE_EVENTS:
    setattr(PairedEngineBook, _name, _paired(_name))


class PairedClientBook(client_book.ClientBook):
    """A frontend's book and its model. Callers see the compiled book's slots; each stands for one of the model's."""

    def __init__(self, limits: ClientBookLimits) -> None:
        super().__init__(limits)
        self.model = model_client_book.ClientBook(limits)
        self.model_slots: dict[client_book.ClientSlotRecord, Any] = {}

    def of_model(self, argument: Any) -> Any:
        """What an argument is to the model."""
        if isinstance(argument, client_book.ClientSlotRecord):
            return self.model_slots[argument]
        return argument.model if isinstance(argument, PairedClientBook) else argument

    def meet(self, result: Any, expected: Any) -> None:
        """Compares what both have returned, and learns which slots of theirs are one."""
        if isinstance(result, client_book.ClientSlotRecord):
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


def _paired_client_event(name: str) -> Callable[..., Any]:
    def event(self: PairedClientBook, *arguments: Any, **named: Any) -> Any:
        for slot, model_slot in self.model_slots.items():
            model_slot.viewed = slot.viewed  # which callers set
        expected, expected_error = outcome(
            getattr(self.model, name), [self.of_model(argument) for argument in arguments], named
        )
        result, error = outcome(getattr(client_book.ClientBook, name), (self, *arguments), named)
        assert same_error(error, expected_error), f"{name}{arguments}: {error!r}, and the model says {expected_error!r}"
        self.meet(result, expected)
        assert plain(self) == plain(self.model), f"{name}{arguments}: another state than the model's"
        self.check()
        self.model.check()
        if error is not None:
            raise error
        return result

    return event


for _name in CLIENT_EVENTS:
    setattr(PairedClientBook, _name, _paired_client_event(_name))
