"""The log of a server's processes: engine, frontends and supervisor write one format to stderr, and repeat no line too often.

A caller that connects ten thousand times, or sends ten thousand bad requests, must not cause ten thousand lines. So the first
warning (or information) of a kind is one line. At the end of each interval in which more of that kind came, there is one more
line, with their number and the last one. A kind is a logger, a level and a text before arguments are put in. Errors are this
server's own faults, and all of them are written; so is everything at the level DEBUG.

Texts must therefore be constants, with what differs (who, why) as arguments, and errors that a peer can provoke at will are
warnings. Only the log of accesses (``--access-log``) has a line for each request.

With ``--log-format json``, all that Python writes to standard output and standard error becomes such lines: what tells the user
how the start goes, last messages, and what libraries print. Warnings, and errors that nobody caught, are lines of the log in
either format. Only what is written in C stays as it is: stacks on SIGUSR1, and the words of a crash.

No line waits for whoever reads the log (:mod:`shmring.service.log_writer`).

A line that concerns a request ends with its name (``X-Request-Id``). Code that works for a request need not say it: a frontend
and an engine's step set :data:`concerned`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import io
import json
import logging
import os
import signal
import stat
import sys
import threading
import time
from contextvars import ContextVar
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn, TextIO

from shmring.core.loggers import logger_of
from shmring.core.printable import printable, printable_lines
from shmring.service.log_writer import LineWriter

__all__ = [
    "ACCESS",
    "OUTPUT",
    "CollapsingHandler",
    "JsonFormatter",
    "PrintableFormatter",
    "concerned",
    "configure_logging",
    "dropped_lines",
    "ending",
    "finish_logging",
    "leave",
    "log_format_of_this_process",
    "log_in_one_thread",
    "stacks_on_signal",
]

logger = logger_of("shmring.log")

#: The logger of accesses.
ACCESS = "shmring.frontend.access"

#: The name that lines of what is printed have, where they are JSON.
OUTPUT = "shmring.output"

#: Its text is the name of the request that the running code works for; of a step, the names of its requests. Empty: none.
concerned: ContextVar[object] = ContextVar("concerned", default="")

_STDOUT_FD, _STDERR_FD = 1, 2
_LAST_WORDS_S = 1.0  # for what a process that ends has written last; nobody may read it
_INTERVAL_S = 10.0
_MAX_KINDS = 256  # the sources have some fifty kinds; a text that is no constant would make any number of them

_MAX_PRINTED_CHARACTERS = 1 << 16  # of a line that does not end

_writers: list[LineWriter] = []
_format = "text"


def configure_logging(level: str, process: str, log_format: str = "text") -> None:
    """Sets up logging for a process of the server. From now on, nobody in it waits for whoever reads its standard output or its
    standard error. On SIGUSR1, it writes the stacks of its threads there as well.

    Args:
        level: of all loggers; a name in any case.
        process: what it is, for each line: ``engine``, ``frontend`` or ``supervisor``.
        log_format: ``text`` or ``json``.
    """
    global _format
    _format = log_format
    for fd, name in ((_STDOUT_FD, "stdout"), (_STDERR_FD, "stderr")):
        stream = getattr(sys, name)
        if isinstance(stream, _Printed):  # this is the second call
            setattr(sys, name, stream.stream)
            continue
        if stream is not getattr(sys, f"__{name}__"):
            continue  # a program has put another one there, and means that; or this is the second call
        if stream is None:  # it was closed, and the next file that is opened would get its number
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        _writers.append(LineWriter(fd, _tell_dropped))
        setattr(sys, name, _writers[-1])
    atexit.register(finish_logging)
    handler = CollapsingHandler(sys.stderr)
    handler.setFormatter(_formatter(process, log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger(ACCESS).setLevel(logging.INFO)  # it has an option of its own, and no level
    if log_format == "json":
        sys.stdout, sys.stderr = (_Printed(stream, _formatter(process, log_format)) for stream in (sys.stdout, sys.stderr))
    _log_what_nobody_caught()
    stacks_on_signal()


def log_in_one_thread(process: str, log_format: str) -> None:
    """Sets up the log of a process that forks, and may have no thread that writes. It writes little: nobody else uses it.

    Args:
        process, log_format: as of :func:`configure_logging`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_formatter(process, log_format))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    _log_what_nobody_caught()


def log_format_of_this_process() -> str:
    """Returns ``text`` or ``json``, for its children."""
    return _format


def ending(text: str) -> SystemExit:
    """Returns what ends the process with the exit code 1 when it is raised, and has its log say why."""
    if not isinstance(sys.stderr, _Printed):
        return SystemExit(text)
    sys.stderr.write_line(text, logging.CRITICAL)
    return SystemExit(1)


def _formatter(process: str, log_format: str) -> logging.Formatter:
    return JsonFormatter(process) if log_format == "json" else PrintableFormatter(process)


def _log_what_nobody_caught() -> None:
    """Has warnings of Python, and errors at which a thread, a destructor or the process ends, be lines of the log."""
    logging.captureWarnings(True)

    def in_process(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            logger.critical("the process ends by an error that nobody caught", exc_info=(kind, error, trace))
        else:
            sys.__excepthook__(kind, error, trace)

    def in_thread(found: threading.ExceptHookArgs) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, SystemExit):
            name = "" if found.thread is None else found.thread.name
            logger.error("the thread %s has ended by an error that nobody caught", name, exc_info=found.exc_value)

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        where = printable(repr(found.object))
        logger.error("an error could not be raised: %s %s", found.err_msg or "in", where, exc_info=found.exc_value)

    sys.excepthook, threading.excepthook, sys.unraisablehook = in_process, in_thread, unraisable


def finish_logging() -> None:
    """Writes what is left, for a second at most. To be called last, before ``os._exit``; other ends call it by themselves."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, _Printed):
            stream.write("\n")  # the end of a line that has none
    logging.shutdown()
    until_s = time.monotonic() + _LAST_WORDS_S
    for writer in _writers:
        writer.finish(max(0.0, until_s - time.monotonic()))


def leave(code: int = 0) -> NoReturn:
    """Ends the process when everything of ours is closed: without unloading torch, which takes most of a second, and without
    waiting for threads."""
    try:
        finish_logging()
    finally:  # also where the log has failed
        os._exit(code)


def dropped_lines() -> int:
    """Returns how many lines of this process were dropped: nobody read them, or they could not be written."""
    return sum(writer.dropped for writer in _writers)


def _tell_dropped(reason: str) -> None:
    logger.warning("%d lines of this log were dropped since the process began: %s", dropped_lines(), reason)


def stacks_on_signal() -> None:
    """Has SIGUSR1 write the stacks of all threads to standard error, also while the interpreter's lock is held for ever.

    The handler writes by itself, and at a pipe that nobody reads it would stop the process. So a pipe is opened once more,
    without waiting, where this user may do that. (The pipe as it is belongs to others as well.)
    """
    fd = os.dup(_STDERR_FD)  # who replaces standard error later means what is written there, and not this
    with contextlib.suppress(OSError):
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            fd = os.open(f"/proc/self/fd/{_STDERR_FD}", os.O_WRONLY | os.O_NONBLOCK)
    faulthandler.register(signal.SIGUSR1, file=fd)


class _Printed(io.TextIOBase):
    """A stream whose lines are written as lines of the log.

    Args:
        stream: where they go.
        formatter: makes them.

    Attributes:
        stream: see above.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        self.stream = stream
        self._formatter = formatter
        self._begun = ""
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        """Writes the lines of a text, and keeps the beginning of the last one until its end comes."""
        with self._lock:
            *lines, self._begun = (self._begun + text).split("\n")
            if len(self._begun) > _MAX_PRINTED_CHARACTERS:
                lines, self._begun = [*lines, self._begun], ""
            for line in lines:
                if shown := line.rstrip().rpartition("\r")[2]:  # a bar of progress is written over itself
                    self.write_line(shown, logging.INFO)
        return len(text)

    def flush(self) -> None:
        """Hands on what is written. A line without an end waits for it."""
        self.stream.flush()

    def write_line(self, text: str, level: int) -> None:
        """Writes a line of the log."""
        record = logging.LogRecord(OUTPUT, level, __file__, 0, text, None, None)
        self.stream.write(self._formatter.format(record) + "\n")

    def fileno(self) -> int:
        """Returns the descriptor, for what writes in C."""
        return self.stream.fileno()

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return self.stream.isatty()


class PrintableFormatter(logging.Formatter):
    """A line for people. Its text is made printable: callers can put escape sequences into it, and a terminal would carry them
    out.

    Args:
        process: what it is.
    """

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process}: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Returns the line without what is below it, such as a traceback."""
        line = super().formatMessage(record)
        name = _name_of(record)
        return line if not name or name in record.getMessage().split() else f"{line} [request {name}]"

    def format(self, record: logging.LogRecord) -> str:
        return printable_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """A line for programs: an object with ``time``, ``level``, ``process``, ``pid``, ``logger`` and ``message``, and where it
    has one ``request_id``; of an access also its parts.

    Args:
        process: what it is.
    """

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "process": self._process,
            "pid": os.getpid(),
            "logger": record.name,
            "message": super().format(record),  # with the traceback
        }
        if name := _name_of(record):
            line["request_id"] = name
        return json.dumps(line | getattr(record, "parts", {}))


def _name_of(record: logging.LogRecord) -> str:
    """Returns the name of the request that a line concerns: a caller's text."""
    return printable(str(getattr(record, "request_id", "")))


@dataclasses.dataclass(slots=True)
class _Repetitions:
    """Records of one kind that were not written in this interval: how many, and the last one with its request."""

    count: int = 0
    last_text: str = ""
    last_request_id: str = ""


class CollapsingHandler(logging.StreamHandler[TextIO | LineWriter]):
    """Writes one line a kind and interval; see the head of this file. Close it, or the last counts are not written.

    Args:
        stream: to write to.
        interval_s: how long a kind is silent after each of its lines.
    """

    def __init__(self, stream: TextIO | LineWriter, interval_s: float = _INTERVAL_S) -> None:
        super().__init__(stream)
        self._interval_s = interval_s
        self._kinds: dict[tuple[str, int, str], _Repetitions] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a record, or counts it. The caller holds the handler's lock."""
        if not hasattr(record, "request_id"):
            record.request_id = str(concerned.get())
        if not logging.DEBUG < record.levelno < logging.ERROR or record.name == ACCESS:
            super().emit(record)
            return
        kind = (record.name, record.levelno, str(record.msg))
        repetitions = self._kinds.get(kind)
        if repetitions is not None:
            repetitions.count += 1
            repetitions.last_request_id = _name_of(record)
            try:
                repetitions.last_text = record.getMessage()
            except Exception:  # noqa: BLE001 - arguments that do not fit their text; logging never fails its caller
                self.handleError(record)
            return
        if len(self._kinds) < _MAX_KINDS:
            self._kinds[kind] = _Repetitions()
            self._start_interval()
        super().emit(record)

    def close(self) -> None:
        """Writes the counted records."""
        with self._locked():
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._write_counts()
        super().close()

    def _start_interval(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(self._interval_s, self._end_interval)
            self._timer.daemon = True
            self._timer.start()

    def _end_interval(self) -> None:
        with self._locked():
            if self._timer is None:  # closed
                return
            self._timer = None
            self._write_counts()
            if self._kinds:
                self._start_interval()

    def _write_counts(self) -> None:
        """Writes a line for each kind that came again, and forgets those that did not."""
        for kind, repetitions in list(self._kinds.items()):
            if not repetitions.count:
                del self._kinds[kind]
                continue
            self._kinds[kind] = _Repetitions()
            name, level, _ = kind
            summary = f"{repetitions.count} more of this kind within {self._interval_s:g} s; this is the last"
            text = f"{repetitions.last_text} ({summary})"
            last = logging.LogRecord(name, level, __file__, 0, text, None, None)
            last.request_id = repetitions.last_request_id
            super().emit(last)

    def _locked(self) -> threading.RLock:
        assert self.lock is not None, "a handler has a lock from its creation on"
        return self.lock
