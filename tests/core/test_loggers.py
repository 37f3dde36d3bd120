"""A line of the log that can't be written changes nothing else; and what is lost is shown."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmring.core.loggers import logger_of

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [
    path
    for package in ("shmring", "engine", "frontend")
    for path in sorted((ROOT / package).rglob("*.p*"))
    if path.suffix in (".py", ".pyx")
]


class Raising(logging.Handler):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("shmring.of a test")
    logger.setLevel(logging.INFO)
    yield logger
    logger.handlers.clear()


def test_what_is_logged_is_as_by_pythons_own_logger(caplog: pytest.LogCaptureFixture) -> None:
    logger = logger_of("shmring.another")
    logger.warning("client %d has %s", 3, "gone", extra={"request_id": "mine"})
    try:
        raise ValueError("no")
    except ValueError:
        logger.exception("it failed")
    logger.debug("nobody wants to know this")
    said, failed = caplog.records
    assert (said.name, said.levelname, said.getMessage(), said.request_id) == (
        *("shmring.another", "WARNING", "client 3 has gone"),
        "mine",
    )
    assert (said.pathname, said.funcName) == (__file__, "test_what_is_logged_is_as_by_pythons_own_logger")
    assert failed.exc_info is not None
    assert failed.exc_info[0] is ValueError


@pytest.mark.parametrize("shown", [True, False])
def test_an_error_of_a_filter_or_handler_is_shown_and_goes_nowhere(
    shown: bool, logger: logging.Logger, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging, "raiseExceptions", shown)
    logger.addHandler(Raising(RuntimeError("the disk is full")))
    logger_of(logger.name).error("client %d has gone", 3)
    text = capsys.readouterr().err
    assert ("RuntimeError: the disk is full" in text and "'client %d has gone'" in text and "(3,)" in text) is shown


def test_a_signal_in_the_middle_of_it_is_raised(logger: logging.Logger) -> None:
    logger.addHandler(Raising(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        logger_of(logger.name).error("client %d has gone", 3)


def test_each_module_logs_in_this_way() -> None:
    """Only these use Python's own loggers: they set what is logged, and log nothing."""
    theirs = {"shmring/core/loggers.py", "shmring/service/logs.py", "shmring/service/tracing.py", "frontend/media/network.py"}
    theirs |= {"frontend/media/decoder_process.py"}
    found = {str(path.relative_to(ROOT)) for path in SOURCES if "logging.getLogger(" in path.read_text()}
    assert found == theirs


def test_an_object_that_was_dropped_is_given_back_before_it_is_warned_of() -> None:
    """Where warnings are errors, nothing that stands behind one is done: so it is the last line of its function."""
    found = 0
    for path in SOURCES:
        lines = path.read_text().split("\n") if path.suffix in {".py", ".pyx"} else []
        for number, line in enumerate(lines):
            if re.match(r" +warn_of\(", line):
                found += 1
                behind = next((each for each in lines[number + 1 :] if each.strip()), "")
                assert re.match(r" {0,4}(def|cdef|cpdef|class|@|#)|\S|$", behind), (
                    f"{path}:{number + 1}: {behind} stands behind it"
                )
    assert found >= 5
