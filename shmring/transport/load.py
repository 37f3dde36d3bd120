"""The memory of an engine's load page: made, mapped and sealed by the engine, mapped read-only by its frontends.

It is a memfd of one page. The engine maps it, and then seals it against future writing, like the reply reserve: from then on no
process can map it for writing, write to it or truncate it. A frontend refuses a page that is not sealed in this way.
"""

from __future__ import annotations

import fcntl
import os

from shmring.core.compiled import LOAD_PAGE_NBYTES, LoadPage
from shmring.errors import RemoteProtocolError, SlabError

__all__ = ["create_load_page", "map_load_page"]

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; no mapping made from now on can be written
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL
_NAME = "shmring-load"


def create_load_page() -> tuple[int, LoadPage]:
    """Makes a page; returns its descriptor, which is the caller's, and the only mapping that can be written.

    Raises:
        SlabError: there is no memory, or there are no descriptors for it.
    """
    try:
        fd = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, LOAD_PAGE_NBYTES)  # now, or an error: no SIGBUS later
            page = LoadPage(fd, writable=True)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise SlabError(f"making the load page failed: {error}", errno=error.errno, nbytes=LOAD_PAGE_NBYTES) from error
    return fd, page


def map_load_page(fd: int) -> LoadPage:
    """Maps the page of an engine. The descriptor may be closed then.

    Raises:
        RemoteProtocolError: it is no load page, or another process could write to it or truncate it.
        SlabError: it can't be mapped.
    """
    size = os.fstat(fd).st_size
    if size != LOAD_PAGE_NBYTES:
        raise RemoteProtocolError(f"a load page has {LOAD_PAGE_NBYTES} bytes, and {size} were passed")
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise RemoteProtocolError(f"a load page is no memory that can be sealed: {error}") from error
    if seals & _SEALS != _SEALS:
        raise RemoteProtocolError("a load page is not sealed: frontends could write to it, or truncate it")
    try:
        return LoadPage(fd, writable=False)
    except OSError as error:
        raise SlabError(f"mapping the load page failed: {error}", errno=error.errno, nbytes=LOAD_PAGE_NBYTES) from error
