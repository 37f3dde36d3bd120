"""The slab: one preallocated region of tmpfs memory, and how it comes and goes.

Creation, in this order: the name is created exclusively (``/shmring-<uid>-<name>-<epoch>``), locked with ``flock``, and
unlinked at once, so it exists for microseconds; then every page is reserved with ``posix_fallocate`` (a full ``/dev/shm``
is an error now, never SIGBUS later; ``ftruncate`` alone reserves nothing), mapped, kept out of forked children, and
touched. From the unlink on, the memory belongs to the descriptors and mappings of living processes: when the last of
them ends, however it ends, the kernel frees it.

A process that dies in those microseconds leaves a name; :func:`sweep` removes names of this user whose lock can be
taken, and no others: a living engine's is locked until it is gone.

Source: vLLM's ``shm_object_storage`` and SGLang name their segments for as long as they live, which is how sglang #40723
and vllm #54002 fill ``/dev/shm``; Docker's 64 MB of it is vllm #48879.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import struct
from pathlib import Path

import numpy as np
import posix_ipc
from numpy.typing import NDArray

from shmring.core.mapping import Mapping
from shmring.errors import SlabError

__all__ = ["SHM_DIRECTORY", "Slab", "sweep"]

SHM_DIRECTORY = Path("/dev/shm")
NAME_PREFIX = "shmring"

_LAYOUT_VERSION = 1
_SLAB_MAGIC = b"shmrslab"
_SLAB_HEADER = struct.Struct("<8sQQQ")  # magic, layout version, epoch, size in bytes: for tools; nobody here reads it

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_PROT_NONE = 0


class Slab:
    """A mapping of the slab in this process. Made by :meth:`create` (the engine) or :meth:`attach` (a frontend).

    Attributes:
        fd: the descriptor behind it; -1 in a frontend, which needs only the mapping.
        nbytes: size.
        epoch: identity of the engine's life that it belongs to.
        address: where it is mapped.
        mapping: the mapping, for regions of it; an empty one once the slab was closed.
    """

    def __init__(self, fd: int, mapping: Mapping, epoch: int) -> None:
        self.fd = fd
        self.nbytes = mapping.nbytes
        self.epoch = epoch
        self.mapping = mapping
        self.address = mapping.address

    @classmethod
    def create(cls, name: str, nbytes: int, epoch: int, *, prefault: bool) -> Slab:
        """Creates, reserves and maps a slab; blocks for about a second per 4 GiB.

        Args:
            name: the engine's name, part of the segment's name while that exists.
            nbytes: size, a multiple of the page size.
            epoch: identity of the engine's life.
            prefault: whether to touch every page now.

        Raises:
            SlabError: ``/dev/shm`` is missing, forbidden or too small. Nothing is left behind.
        """
        path = f"/{NAME_PREFIX}-{os.getuid()}-{name}-{epoch:016x}"
        fd = _create_unlinked(path, nbytes)
        try:
            _reserve(fd, nbytes, path)
            mapping = _map(fd, nbytes)
        except BaseException:
            os.close(fd)
            raise
        slab = cls(fd, mapping, epoch)
        slab._advise(_MADV_DONTFORK, required=True)
        slab._advise(_MADV_HUGEPAGE)
        _SLAB_HEADER.pack_into(mapping, 0, _SLAB_MAGIC, _LAYOUT_VERSION, epoch, nbytes)
        if prefault:
            slab.prefault(0, nbytes)
        return slab

    @classmethod
    def attach(cls, fd: int, nbytes: int, epoch: int) -> Slab:
        """Maps a slab that an engine passed. Takes the descriptor over, and closes it: the mapping is enough.

        That it is the slab of this engine follows from how it came. What stands in its header proves nothing: any process with
        the slab may have written it.

        Raises:
            SlabError: the descriptor is not of the size that was announced, or can't be mapped.
        """
        try:
            size = os.fstat(fd).st_size
            if size != nbytes:
                raise SlabError(f"the engine announced a slab of {nbytes} bytes and passed one of {size}", nbytes=nbytes)
            mapping = _map(fd, nbytes)
        finally:
            os.close(fd)
        slab = cls(-1, mapping, epoch)
        slab._advise(_MADV_DONTFORK, required=True)
        return slab

    def anchor(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns the bytes at ``offset`` as an array that keeps the mapping alive."""
        return np.frombuffer(memoryview(self.mapping), np.uint8, nbytes, offset)

    def find(self, address: int) -> int | None:
        """Returns the offset of an address of this process in the slab, or None if it is elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset < self.nbytes else None

    def prefault(self, offset: int, nbytes: int) -> None:
        """Maps the pages of a range now, so that no copy pays for it; releases the interpreter lock meanwhile."""
        try:
            self.mapping.advise(offset, nbytes, _MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise _os_error("prefault", error, nbytes) from error
            # A kernel before 5.14. Reading maps a reserved page as well; writing, even what is there, could undo what another
            # process writes at that moment.
            self.anchor(offset, nbytes)[:: mmap.PAGESIZE].max(initial=0)

    def protect(self, offset: int, nbytes: int, *, readable: bool, writable: bool) -> None:
        """Sets what this process may do with a range (see ``ClientConfig.map_leased_only``)."""
        protection = (mmap.PROT_READ if readable else _PROT_NONE) | (mmap.PROT_WRITE if writable else _PROT_NONE)
        try:
            self.mapping.protect(offset, nbytes, protection)
        except OSError as error:
            raise _os_error("mprotect", error, nbytes) from error

    def close(self) -> None:
        """Closes the descriptor and the mapping; where views are alive, the mapping goes with the last of them."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.mapping = Mapping(-1, 0)  # in its place: a reference to the real one would keep it mapped

    def _advise(self, advice: int, *, required: bool = False) -> None:
        try:
            self.mapping.advise(0, self.nbytes, advice)
        except OSError as error:
            if required:
                raise _os_error("madvise", error, self.nbytes) from error


def sweep() -> list[str]:
    """Removes segment names of this user that a crash between create and unlink left; returns them.

    What else lies there under such a name (anybody can put something) is not ours, and stops nobody.
    """
    removed = []
    for path in SHM_DIRECTORY.glob(f"{NAME_PREFIX}-{os.getuid()}-*"):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue  # its owner has just unlinked it, or it is no segment of ours
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            removed.append(path.name)
        except (BlockingIOError, FileNotFoundError):
            continue  # its owner lives
        finally:
            os.close(fd)
    return removed


def _create_unlinked(path: str, nbytes: int) -> int:
    try:
        fd: int = posix_ipc.SharedMemory(path, posix_ipc.O_CREX, mode=0o600, size=0).fd
    except (OSError, posix_ipc.Error) as error:
        raise SlabError(
            f"creating a segment in {SHM_DIRECTORY} failed: {error}; is it mounted, and writable for uid {os.getuid()}?",
            path=path,
            errno=getattr(error, "errno", None),
            nbytes=nbytes,
        ) from error
    fcntl.flock(fd, fcntl.LOCK_EX)  # waits, if at all, for a sweep that looks at us; the lock ends with the descriptor
    with contextlib.suppress(posix_ipc.ExistentialError):  # swept before the lock was ours: as good as unlinked
        posix_ipc.unlink_shared_memory(path)
    return fd


def _reserve(fd: int, nbytes: int, path: str) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        filesystem = os.statvfs(SHM_DIRECTORY)
        free, size = filesystem.f_bavail * filesystem.f_frsize, filesystem.f_blocks * filesystem.f_frsize
        raise SlabError(
            f"reserving {nbytes} bytes in {SHM_DIRECTORY} failed ({os.strerror(error.errno or 0)}): {free} bytes of {size} "
            "are free; lower slab_nbytes, or mount it larger (docker run --shm-size, an emptyDir with medium: Memory)",
            path=path,
            errno=error.errno,
            nbytes=nbytes,
        ) from error


def _map(fd: int, nbytes: int) -> Mapping:
    try:
        return Mapping(fd, nbytes)
    except OSError as error:
        raise _os_error("mmap", error, nbytes) from error


def _os_error(what: str, error: OSError, nbytes: int) -> SlabError:
    number = error.errno or 0
    return SlabError(f"{what} of {nbytes} bytes of the slab failed: {os.strerror(number)}", errno=number, nbytes=nbytes)
