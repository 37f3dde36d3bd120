"""Logs: one line a kind and interval, whatever a peer does."""

from __future__ import annotations

import contextvars
import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from shmring.service.logs import ACCESS, CollapsingHandler, JsonFormatter, PrintableFormatter, concerned
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
OpenHandler = Callable[..., CollapsingHandler]


@pytest.fixture
def logger() -> logging.Logger:
    logger = logging.getLogger("tests.logs")
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    return logger


@pytest.fixture
def open_handler() -> Iterator[OpenHandler]:
    """``open_handler(logger, stream, interval_s)``: a handler, taken away and closed in the end."""
    opened: list[tuple[logging.Logger, CollapsingHandler]] = []

    def attach(logger: logging.Logger, stream: io.StringIO, interval_s: float = 60.0) -> CollapsingHandler:
        handler = CollapsingHandler(stream, interval_s)
        logger.addHandler(handler)
        opened.append((logger, handler))
        return handler

    yield attach
    for logger, handler in opened:
        logger.removeHandler(handler)
        handler.close()


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_nine_thousand_of_a_kind_are_two_lines(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream)
    for number in range(9000):
        logger.warning("%s was refused: %s", f"caller {number}", "too many")
    assert lines_of(stream) == ["caller 0 was refused: too many"]
    handler.close()
    assert lines_of(stream)[1:] == ["caller 8999 was refused: too many (8999 more of this kind within 60 s; this is the last)"]


def test_other_kinds_errors_and_details_are_all_written(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream)
    for number in range(2):
        logger.warning("first %d", number)
        logger.warning("second %d", number)
        logger.info("first %d", number)
        logger.error("error %d", number)
        logger.debug("detail %d", number)
    assert lines_of(stream) == ["first 0", "second 0", "first 0", "error 0", "detail 0", "error 1", "detail 1"]
    handler.close()


async def test_an_interval_ends_by_itself(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream, 0.05)
    with handler._locked():  # so that all three are of one interval, however slow this is
        for _ in range(3):
            logger.warning("again, 100%")
    await eventually(lambda: len(lines_of(stream)) == 2)
    assert lines_of(stream)[1] == "again, 100% (2 more of this kind within 0.05 s; this is the last)"
    await eventually(lambda: not handler._kinds)  # an interval in which nothing came


def test_what_a_caller_has_got_into_a_text_is_printed_and_not_carried_out(
    logger: logging.Logger, open_handler: OpenHandler
) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream)
    handler.setFormatter(PrintableFormatter("engine"))
    logger.error("a body of %s was refused\n%s", "\x1b]0;title\x07", "a traceback")
    assert stream.getvalue().endswith(" ERROR engine: a body of \\x1b]0;title\\x07 was refused\na traceback\n")


def test_a_line_ends_with_the_request_that_it_concerns(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream)
    handler.setFormatter(PrintableFormatter("engine"))

    def work() -> None:
        concerned.set("my-id")
        logger.error("it failed")
        logger.error("my-id failed")
        logger.error("another failed", extra={"request_id": "other-id"})
        logger.warning("a warning")

    contextvars.copy_context().run(work)
    logger.warning("a warning", extra={"request_id": "last-id"})
    handler.close()
    lines = [line.partition(" engine: ")[2] for line in lines_of(stream)]
    assert lines == [
        "it failed [request my-id]",
        "my-id failed",
        "another failed [request other-id]",
        "a warning [request my-id]",
        "a warning (1 more of this kind within 60 s; this is the last) [request last-id]",
    ]


def test_a_line_of_json_has_its_parts(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    open_handler(logger, stream).setFormatter(JsonFormatter("engine"))
    try:
        raise ValueError("a\nbug")
    except ValueError:
        logger.exception("%s \x1b[2J", "failed", extra={"request_id": "my-id", "parts": {"status": 500}})
    logger.info("nothing of a request")
    first, second = map(json.loads, lines_of(stream))
    assert first["message"].startswith("failed \x1b[2J\nTraceback")
    assert first["message"].endswith("ValueError: a\nbug")
    assert (first["level"], first["process"], first["pid"]) == ("ERROR", "engine", os.getpid())
    assert (first["request_id"], first["status"], first["logger"]) == ("my-id", 500, "tests.logs")
    assert datetime.fromisoformat(first["time"]).tzinfo is not None
    assert "request_id" not in second


def test_each_access_is_a_line(open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    logger = logging.getLogger(ACCESS)
    logger.setLevel(logging.INFO)
    open_handler(logger, stream)
    for number in range(20):
        logger.info("%d", number)
    assert lines_of(stream) == [str(number) for number in range(20)]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_writes_its_log_in_its_format_and_its_stacks_on_sigusr1(log_format: str) -> None:
    program = """if True:
        import logging, os, signal, sys
        from shmring.service.logs import configure_logging
        configure_logging("warning", "engine", sys.argv[1])
        def the_function_that_hangs():
            os.kill(os.getpid(), signal.SIGUSR1)
        the_function_that_hangs()
        logging.getLogger("any").warning("it goes on")
    """
    result = subprocess.run([sys.executable, "-c", program, log_format], capture_output=True, text=True, check=True)
    assert "in the_function_that_hangs" in result.stderr
    last = result.stderr.splitlines()[-1]
    assert json.loads(last)["message"] == "it goes on" if log_format == "json" else last.endswith("WARNING engine: it goes on")


def test_each_interval_has_its_line(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream, 600.0)

    def end_interval() -> None:
        timer = handler._timer
        assert timer is not None
        timer.cancel()
        timer.function()

    for _ in range(3):
        logger.warning("again")
    end_interval()
    logger.warning("again")
    end_interval()
    assert lines_of(stream)[1:] == [
        "again (2 more of this kind within 600 s; this is the last)",
        "again (1 more of this kind within 600 s; this is the last)",
    ]
    end_interval()  # one in which nothing came
    logger.warning("again")
    assert lines_of(stream)[3:] == ["again"]


def test_texts_that_are_no_constants_take_bounded_memory(logger: logging.Logger, open_handler: OpenHandler) -> None:
    stream = io.StringIO()
    handler = open_handler(logger, stream)
    for number in range(1000):
        logger.warning(f"text {number}")
    assert len(lines_of(stream)) == 1000
    assert len(handler._kinds) < 500


async def test_connections_to_an_engine_that_say_nothing_are_one_line_with_peer_and_reason(
    serve: Any, socket_dir: Path, open_handler: OpenHandler
) -> None:
    async def ignore(claim: Any) -> None: ...

    ring = await serve(ignore)
    [path] = socket_dir.glob("*.sock")
    stream = io.StringIO()
    handler = open_handler(logging.getLogger("shmring.ring"), stream)
    for count in range(50, 1000, 50):
        for _ in range(50):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
        await eventually(lambda count=count: ring.statistics().refused == count)
    who = f"a connection of process {os.getpid()} of uid {os.getuid()} was refused: "
    [line] = lines_of(stream)
    assert line == who + "the connection ended during the handshake"
    handler.close()
    assert re.fullmatch(re.escape(line) + r" \(949 more of this kind .*\)", lines_of(stream)[1])


async def test_a_connection_that_says_nothing_in_time_is_refused_with_that_reason(
    serve: Any, socket_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ignore(claim: Any) -> None: ...

    monkeypatch.setattr("shmring.ring.limits.HANDSHAKE_S", 0.05)
    ring = await serve(ignore)
    [path] = socket_dir.glob("*.sock")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        await eventually(lambda: ring.statistics().refused == 1)
    assert caplog.messages[-1].endswith("was refused: it sent no hello in time")


PRINTING = """
import logging, sys, threading, warnings
from shmring.service.logs import configure_logging, ending, finish_logging
configure_logging("warning", "engine", sys.argv[1])
print("to standard output")
print("one\\ntwo", file=sys.stderr)
sys.stderr.write("10 %\\r20 %\\rdone\\n")
warnings.warn("a warning of Python")
def end(): raise ArithmeticError("of a thread")
thread = threading.Thread(target=end, name="worker")
thread.start()
thread.join()
class Dropped:
    def __del__(self): raise ArithmeticError("of a destructor")
Dropped()
logging.getLogger("a.library").warning("%d", "no number")
sys.stderr.write("without an end")
if sys.argv[2] == "end":
    raise ending("shmring: it can't start")
raise ArithmeticError("of the process")
"""


@pytest.mark.parametrize("how", ["end", "fail"])
def test_all_that_a_process_writes_is_json_where_its_log_is(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", PRINTING, "json", how], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 1
    [said] = map(json.loads, done.stdout.splitlines())
    assert (said["process"], said["logger"], said["message"]) == ("engine", "shmring.output", "to standard output")
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    printed = [line["message"] for line in lines if line["logger"] == "shmring.output" and line["level"] == "INFO"]
    assert printed[:3] == ["one", "two", "done"]
    assert "Message: '%d'" in printed, "what Python says of a line that can't be made"
    assert printed[-1] == "without an end"
    [warning] = [line for line in lines if line["logger"] == "py.warnings"]
    assert "UserWarning: a warning of Python" in warning["message"]
    errors = [line["message"] for line in lines if line["level"] in ("ERROR", "CRITICAL")]
    assert [text.splitlines()[-1] for text in errors] == [
        "ArithmeticError: of a thread",
        "ArithmeticError: of a destructor",
        "shmring: it can't start" if how == "end" else "ArithmeticError: of the process",
    ]
    assert errors[0].startswith("the thread worker has ended by an error that nobody caught\nTraceback")
    assert "Dropped.__del__" in errors[1]


def test_as_text_what_is_printed_stays_as_it_is() -> None:
    program = [sys.executable, "-c", PRINTING, "text", "end"]
    done = subprocess.run(program, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.returncode, done.stdout) == (1, "to standard output\n")
    assert done.stderr.startswith("one\ntwo\n")
    assert done.stderr.endswith("without an endshmring: it can't start\n")
    assert "ERROR engine: the thread worker has ended by an error that nobody caught\nTraceback" in done.stderr
