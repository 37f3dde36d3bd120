"""What the plug-ins share: what they find out about a server, and why a tensor goes the server's own way."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

import shmring
from shmring.errors import CapacityError
from shmring.integrations.promises import broken, names_in, parameters_differ, uses_are_missing
from shmring.integrations.traffic import Traffic, reason_of
from tests.tables import for_each


class Server:
    """Stands for a class of a server's."""

    def send(self, request: object, timeout: float) -> object:
        def later() -> object:
            return SimpleNamespace(request=request).encode(timeout)

        return later


def test_a_server_that_is_as_it_was_breaks_no_promise() -> None:
    checks = [
        lambda server: parameters_differ([(server.send, ["self", "request"])]),
        lambda server: uses_are_missing([(server.send, ["encode", "SimpleNamespace"])]),
    ]
    assert broken(lambda: Server, checks) == []


def test_each_check_of_a_server_says_what_it_finds_also_if_it_raises() -> None:
    def parameters(server: type[Server]) -> Iterator[str]:
        yield from parameters_differ([(server.send, ["self", "timeout"]), (server.send, ["request"])])

    def _missing(server: type[Server]) -> Iterator[str]:
        yield from uses_are_missing([(server.receive, ["decode"])])

    def uses(server: type[Server]) -> Iterator[str]:
        yield from uses_are_missing([(server.send, ["encode", "decode"])])

    findings = broken(lambda: Server, [parameters, _missing, uses])
    assert findings == [
        "Server.send takes self, request, timeout, and not self, timeout",
        "Server.send takes self, request, timeout, and not request",
        "missing: AttributeError: type object 'Server' has no attribute 'receive'",
        "Server.send does not use decode",
    ]


def test_a_server_that_can_not_be_imported_is_a_finding() -> None:
    def find() -> object:
        raise ImportError("No module named 'server'")

    assert broken(find, [lambda hooks: ["not asked"]]) == ["ImportError: No module named 'server'"]


def test_names_are_those_of_functions_inside_as_well() -> None:
    assert {"encode", "SimpleNamespace"} <= names_in(Server.send)


@for_each(
    ("error", "reason"),
    [
        (TypeError("a tensor of no kind"), "kind"),
        (CapacityError("too large", needed=2, capacity=1), "size"),
        (TimeoutError(), "space"),
        (shmring.EngineDeadError("gone", engine="test"), "engine"),
        (shmring.ClosedError("closed"), "engine"),
        (RuntimeError("a bug"), "error"),
    ],
)
def test_why_a_tensor_goes_inline(error: Exception, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.clear()
    assert reason_of(error, logging.getLogger("shmring.test")) == reason
    assert [record.levelname for record in caplog.records] == (["ERROR"] if reason == "error" else [])


def test_tensors_are_counted_by_way_and_reason() -> None:
    traffic = Traffic(public=False)
    assert traffic.summary() == "none"
    traffic.count("copied", 2_000_000)
    traffic.count("copied", 1_000_000)
    traffic.count("inline", 500_000, "space")
    assert traffic.summary() == "2 copied, 3.0 MB; 1 inline (space), 0.5 MB"
