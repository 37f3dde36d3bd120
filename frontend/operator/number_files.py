"""The files in which a frontend's numbers lie, so that each frontend can answer ``/metrics`` for all.

``prometheus_client`` makes them sparse, and maps them. If the disk is full when a number of a new kind is written, the kernel
ends the process (SIGBUS). So their space is reserved here, before ``prometheus_client`` is imported. If it can't be had, this
frontend keeps its numbers to itself: no request is worth less for that.
"""

from __future__ import annotations

import contextlib
import os

from shmring.core.loggers import logger_of

__all__ = ["DIRECTORY_VARIABLE", "reserve_number_files"]

logger = logger_of("shmring.frontend.operator.number_files")

#: Names the directory; without it, a frontend shows its own numbers.
DIRECTORY_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

_KINDS = ("counter", "histogram", "gauge_livesum", "gauge_livemax")  # a test compares them with the numbers that there are
_NBYTES = 512 << 10  # of each file: three thousand values, of which there are some hundred. A histogram has twenty
_OWNER_NBYTES = 4 << 10  # for each owner of keys: its requests by status, its tokens and its refusals


def reserve_number_files(owners: int) -> None:
    """Reserves the space of this process' files, or has this process do without them.

    Args:
        owners: of keys; each has numbers of its own.
    """
    directory = os.environ.get(DIRECTORY_VARIABLE)
    if directory is None:
        return
    paths = [os.path.join(directory, f"{kind}_{os.getpid()}.db") for kind in _KINDS]
    try:
        for path in paths:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, _NBYTES + owners * _OWNER_NBYTES)
            finally:
                os.close(fd)
    except OSError as error:
        del os.environ[DIRECTORY_VARIABLE]
        for path in paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        reason = error.strerror
        logger.warning(
            "no space for numbers in %s, so /metrics of this frontend shows its own ones only: %s", directory, reason
        )
