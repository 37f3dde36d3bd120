"""The arguments of a request are defined once: what calls take and hand on agrees with ``shmring/request_options.py``.

That blocking twins show what the calls of asyncio do is tested with all twins (``tests/threads/test_blocking_twins.py``).
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from shmring import Client
from shmring.request_options import Arguments, EngineOptions, ForEngine, RequestOptions, SubmitOptions

_OF_EACH_CALL = {  # beside the arguments of every call that sends a request
    "request": {"timeout", "reply_type", "retry"},
    "stream": {"timeout", "reply_type", "retry"},
    "submit": set[str](),
    "submit_nowait": {"ask"},
}


def named(call: Any) -> dict[str, Any]:
    """The arguments of a call that have names, and their defaults."""
    parameters = inspect.signature(call).parameters.values()
    return {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("name", _OF_EACH_CALL)
def test_a_call_has_the_arguments_of_a_request_and_its_own(name: str) -> None:
    arguments = named(getattr(Client, name))
    assert arguments.keys() == _OF_EACH_CALL[name] | set(SubmitOptions.__annotations__)
    told = ForEngine()
    assert {option: getattr(told, option) for option in EngineOptions.__annotations__}.items() <= arguments.items()


def test_type_checkers_know_of_all() -> None:
    fields = {name for name, value in vars(ForEngine).items() if inspect.isdatadescriptor(value)}
    assert set(EngineOptions.__annotations__) == fields
    assert set(SubmitOptions.__annotations__) == fields | {"key", "engine"}
    assert set(RequestOptions.__annotations__) == set(SubmitOptions.__annotations__) | {"timeout", "retry"}


def test_a_call_hands_on_what_it_gets() -> None:
    options = Arguments.of({"engine": "vision", "request_id": "mine", "key": "key"})
    assert (options.told, options.for_engine.request_id, options.key, options.engine) == (
        {"request_id": "mine"},
        "mine",
        "key",
        "vision",
    )


@pytest.mark.one_loop
async def test_a_call_says_that_it_has_no_such_argument(client: Any) -> None:
    for call in (client.request, client.stream, client.submit, client.submit_nowait):
        with pytest.raises(TypeError, match=rf"{call.__name__}\(\) got an unexpected keyword argument 'request_name'"):
            call(1, request_name="mine")
    with pytest.raises(TypeError, match=r"no argument 'request_name'.* it has request_id, key, engine"):
        Arguments.of({"request_name": "mine"})  # as a blocking twin, or a client in a Ray cluster
    with pytest.raises(ValueError, match="at most 256 characters"):
        Arguments.of({"request_id": "x" * 257})
