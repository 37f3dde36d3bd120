"""The loggers of this package: a line of the log that can't be written changes nothing else.

A program's own filter or handler may raise, and Python's loggers hand that on to whoever logs. Here, that would be the middle
of a handshake, of a reconnect, or of a loop that serves many. So such an error is shown on the standard error output, in the
way in which ``logging`` shows the errors of its own handlers (``logging.raiseExceptions`` set to False turns both off).
"""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["Logger", "logger_of"]

_SHOWING = logging.Handler()  # of which only what shows an error is used


class Logger(logging.LoggerAdapter[logging.Logger]):
    """What :func:`logger_of` returns. All its methods that log end in :meth:`log`."""

    def log(self, level: int, msg: object, *args: object, stacklevel: int = 1, **options: Any) -> None:
        """Logs as :meth:`logging.Logger.log`, and raises no ``Exception``."""
        try:
            self.logger.log(level, msg, *args, stacklevel=stacklevel + 1, **options)  # one more: of this method
        except Exception:  # noqa: BLE001 - of a filter or a handler of the program: nobody here can do anything about it
            _SHOWING.handleError(logging.makeLogRecord({"msg": msg, "args": args}))


def logger_of(name: str) -> Logger:
    """Returns the logger of this name, for a module of this package. What is logged by it raises no ``Exception``.

    A line of the log still stands behind what has to be done: a handler may block, and a signal may raise in the middle of it.
    """
    return Logger(logging.getLogger(name))
