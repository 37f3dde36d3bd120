"""Errors as callers get them: in few words, and without frames, which hold media. The log has what is not a caller's fault."""

from __future__ import annotations

import traceback

from shmring.core.loggers import logger_of
from shmring.engine.answers import without_frames
from shmring.engine.executors.interface import ContextLengthError, FormError, FormRefusedError, OverloadedError

__all__ = ["first_line", "report", "shortened"]

logger = logger_of("shmring.engine.executors")

_MAX_CHARACTERS = 500  # of what a library says; some print whole tensors


def shortened(error: Exception) -> str:
    """Returns what an error says, or the beginning of it."""
    return str(error)[:_MAX_CHARACTERS]


def first_line(error: Exception) -> str:
    """Returns what an error says first: libraries go on with what their authors need, or with advice about the network."""
    return next((line.strip() for line in shortened(error).splitlines() if line.strip()), type(error).__name__)


def report(error: Exception, at_fault: tuple[type[Exception], ...] = (ValueError,)) -> Exception:
    """Returns an error of the same meaning for a request's caller, and logs it unless the request is at fault.

    The error itself loses its frames as well: a future may hold it.

    Args:
        error: because of which a request fails.
        at_fault: kinds of errors that say what is wrong with a request.
    """
    if isinstance(error, ContextLengthError | FormError | FormRefusedError | OverloadedError):
        return without_frames(error)
    if not isinstance(error, at_fault):
        logger.error("a request failed\n%s", "".join(traceback.format_exception(error)))
    without_frames(error)
    return (
        ValueError(shortened(error))
        if isinstance(error, at_fault)
        else RuntimeError(f"{type(error).__name__}: {shortened(error)}")
    )
