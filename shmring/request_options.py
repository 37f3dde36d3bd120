"""The arguments of a request besides its payload, defined once for all calls that send one.

Code on the way of a request does not name the arguments on which it does not act. So a new one for the engine is a line in
:class:`EngineOptions`, an argument of the calls in ``client/client.py`` and ``core/client_calls.pyx``, and a field of
:class:`~shmring.core.compiled.ForEngine`, which is written and read where it is defined. Blocking twins, clients in a Ray
cluster and injectors hand on what they get. (``Client.request`` and ``stream`` name theirs: a dictionary costs 2 % of a small
request.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypedDict, TypeVar, cast

from shmring.core.compiled import ForEngine

__all__ = ["Arguments", "EngineOptions", "ForEngine", "RequestOptions", "SubmitOptions", "signed_as"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """What an engine is told of a request besides its payload: the arguments of ``ForEngine`` and ``Injector.inject``."""

    request_id: str


class SubmitOptions(EngineOptions, total=False):
    """The arguments of all calls that send a request. :meth:`shmring.Client.request` says what they mean."""

    key: str | bytes | None
    engine: str | None


class RequestOptions(SubmitOptions, total=False):
    """The arguments of ``request`` and ``stream`` besides ``reply_type``, for type checkers."""

    timeout: float | None
    retry: int


class Arguments(NamedTuple):
    """The arguments of a call that sends a request: what the engine is told, and what chooses the engine."""

    told: EngineOptions
    for_engine: ForEngine
    key: str | bytes | None
    engine: str | None

    @classmethod
    def of(cls, named: Mapping[str, Any]) -> Arguments:
        """Returns the arguments of a call.

        Raises:
            TypeError: there is no argument of such a name, or one is of another type.
            ValueError: ``request_id`` is too long, or is no Unicode.
        """
        if unknown := named.keys() - SubmitOptions.__annotations__.keys():
            known = ", ".join(SubmitOptions.__annotations__)
            raise TypeError(f"a request has no argument {min(unknown)!r}; besides those of the call itself it has {known}")
        told = cast(EngineOptions, {name: named[name] for name in EngineOptions.__annotations__ if name in named})
        return cls(told, ForEngine(**told), named.get("key"), named.get("engine"))


def signed_as(model: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Shows a method that takes ``**options`` with the arguments of another one beside its own: for ``help``, and for pages."""

    def sign(method: _Method) -> _Method:
        own, shown = inspect.signature(method), inspect.signature(model).parameters.values()
        first = [each for each in shown if each.kind is not inspect.Parameter.KEYWORD_ONLY]
        others = [each for each in own.parameters.values() if each.kind is inspect.Parameter.KEYWORD_ONLY and each not in shown]
        parameters = [*first, *others, *(each for each in shown if each.kind is inspect.Parameter.KEYWORD_ONLY)]
        method.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # what inspect looks at
        return method

    return sign
