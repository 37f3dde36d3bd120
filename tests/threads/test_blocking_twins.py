"""Each public name of the asyncio client and of what it returns is on the blocking one, with the same arguments."""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

import pytest

import shmring
import shmring.threads
from tests.pages import load_maker
from tests.tables import for_each

TWINS = {
    shmring.Client: shmring.threads.Client,
    shmring.EngineConnection: shmring.threads.EngineConnection,
    shmring.Submission: shmring.threads.Submission,
    shmring.Slot: shmring.threads.Slot,
    shmring.Kept: shmring.threads.Kept,
    shmring.Keeping: shmring.threads.Keeping,
}

#: What an asyncio program bounds with ``asyncio.timeout``.
WITH_A_TIMEOUT = {
    shmring.Client: {"submit"},
    shmring.Submission: {"next", "result", "wait"},
    shmring.Keeping: {"wait"},
}


@pytest.fixture(scope="module")
def make_reference() -> ModuleType:
    return load_maker("make_reference")


def arguments_of(call: Any) -> list[tuple[str, Any, Any]]:
    parameters = [parameter for name, parameter in inspect.signature(call).parameters.items() if name != "self"]
    return [(parameter.name, parameter.kind, parameter.default) for parameter in parameters]


@for_each("own", TWINS, ids=lambda kind: kind.__name__)
def test_a_blocking_client_has_what_an_asyncio_client_has(own: type, make_reference: ModuleType) -> None:
    """``tests/docs/test_api_page.py`` sees to it that the tables have every public name that is not internal."""
    twin = TWINS[own]
    [section] = [section for section in make_reference.SECTIONS if section.asyncio_class is own]
    names = set(section.members.split())
    assert {name for name in names if not hasattr(twin, name) and name not in make_reference.attributes(twin)} == set()
    bounded = set()
    for name in names:
        if not inspect.isroutine(getattr(own, name, None)):
            assert not inspect.isroutine(getattr(twin, name, None)), name
            continue
        arguments, expected = arguments_of(getattr(twin, name)), arguments_of(getattr(own, name))
        if arguments != expected:
            bounded.add(name)
            arguments.remove(("timeout", inspect.Parameter.KEYWORD_ONLY, None))
        assert arguments == expected, name
    assert bounded == WITH_A_TIMEOUT.get(own, set())


@for_each("own", TWINS, ids=lambda kind: kind.__name__)
def test_a_twin_has_the_name_and_the_text_of_what_it_is_made_of(own: type) -> None:
    for name, twin in vars(TWINS[own]).items():
        if inspect.isfunction(twin) and hasattr(twin, "__wrapped__"):
            assert twin.__name__ == name
            text = inspect.getdoc(getattr(own, name))
            assert text
            assert (inspect.getdoc(twin) or "").startswith(text)
