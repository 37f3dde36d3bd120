"""The slab: preallocated memory in tmpfs, from its creation to its end.

It is two files side by side in one range of addresses. The first has the header and what is leased. It is a segment in
``/dev/shm`` or a memfd, as configured. The second has the replies, and is always a memfd: the engine maps it, and then seals it
against future writing, so that frontends can only map it for reading.

Creation of a segment, in this order: the name is created exclusively (``/shmring-<uid>-<name>-<epoch>``), locked with
``flock``, and unlinked at once, so it exists for microseconds; then every page is reserved with ``posix_fallocate`` (a full
``/dev/shm`` is an error now, never SIGBUS later; ``ftruncate`` alone reserves nothing), in huge pages as far as there are any,
mapped, kept out of forked children, and touched. From the unlink on, the memory belongs to the descriptors and mappings of
living processes: when the last of them ends, however it ends, the kernel frees it.

A process that dies in those microseconds leaves a name; :func:`sweep` removes names of this user that it can lock, and no
others: a living engine keeps its lock. Between the creation of a name and its lock, a sweep may remove the name of a living
engine. That does no harm, since the engine was about to remove it. To tell such a name from one that a dead engine has left: a
segment is empty until its engine has the lock, and has a size from then on.

A memfd has no name, and no mount limits it: its pages count only as memory of the machine and of the container. It is sealed
against shrinking and growing. A segment can't be sealed: a process with its descriptor can truncate it, and the next access of
any other process is SIGBUS.

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

import numpy as np
import posix_ipc
from numpy.typing import NDArray

from shmring.config import Backing
from shmring.core.compiled import Mapping
from shmring.core.loggers import logger_of
from shmring.errors import SlabError
from shmring.memory.available import MEMINFO, SHM_DIRECTORY, lack_of_memory, sizes_of, text_of
from shmring.memory.huge_pages import reserve_huge_pages
from shmring.memory.limits import RefusedCallError, calling, is_about_size, limit_behind

__all__ = ["SHM_DIRECTORY", "Slab", "map_read_only", "reserve_for_one_writer", "sweep"]

logger = logger_of("shmring.ring")

NAME_PREFIX = "shmring"

_LAYOUT_VERSION = 1
_SLAB_MAGIC = b"shmrslab"
_SLAB_HEADER = struct.Struct("<8sQQQ")  # magic, layout version, epoch, size in bytes: for tools; shmring does not read it

_MADV_DONTFORK = 10
_MADV_POPULATE_READ = 22  # Linux 5.14
_MADV_POPULATE_WRITE = 23
_PROT_NONE = 0

_F_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; no mapping made from now on can be written
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_READ_ONLY = _FIXED_SIZE | _F_SEAL_FUTURE_WRITE


class Slab:
    """A mapping of the slab in this process. Made by :meth:`create` (the engine) or :meth:`attach` (a frontend).

    Attributes:
        fd, reply_fd: its descriptors, of the leasable part and of the reply reserve; -1: there is none. A frontend has none,
            since it needs only the mapping.
        nbytes: size, replies included.
        reply_nbytes: the part at its end that replies are in.
        shm_nbytes: what of it lies in ``/dev/shm``; the rest lies in memfds. 0 in a frontend, which can't know.
        epoch: identity of the engine's life that it belongs to.
        address: where it is mapped.
        mapping: the mapping, for regions of it; an empty one once the slab was closed.
    """

    def __init__(self, fds: tuple[int, int], mapping: Mapping, reply_nbytes: int, epoch: int, *, shm_nbytes: int = 0) -> None:
        self.fd, self.reply_fd = fds
        self.nbytes = mapping.nbytes
        self.reply_nbytes = reply_nbytes
        self.shm_nbytes = shm_nbytes
        self.epoch = epoch
        self.mapping = mapping
        self.address = mapping.address

    @classmethod
    def create(
        cls, name: str, nbytes: int, epoch: int, *, prefault: bool, reply_nbytes: int = 0, backing: Backing = "auto"
    ) -> Slab:
        """Creates, reserves and maps a slab; blocks for about 0.13 seconds per GiB, and 0.3 where there are no huge pages.

        Args:
            name: the engine's name, part of the segment's name while that exists.
            nbytes: size, replies included, a multiple of the page size.
            epoch: identity of the engine's life.
            prefault: whether to touch every page now.
            reply_nbytes: the part at its end that only this process can write; what is before it is a multiple of the page
                size.
            backing: where the rest lies; see :class:`~shmring.config.RingConfig`.

        Raises:
            SlabError: ``/dev/shm`` is missing, forbidden or too small, or the machine does not have so much memory. Nothing is
                left behind.
        """
        if lack := lack_of_memory(nbytes):
            raise SlabError(lack, errno=errno.ENOSPC, nbytes=nbytes)
        leased_nbytes, reply_fd = nbytes - reply_nbytes, -1
        fd, shm_nbytes = _create_leased(name, leased_nbytes, epoch, backing)
        try:
            if reply_nbytes:
                reply_fd = _create_memfd(f"{name}-replies", reply_nbytes)
            mapping = _map(fd, leased_nbytes, reply_fd, reply_nbytes, writable=True)
            if not shm_nbytes:
                _seal(fd, _FIXED_SIZE)
            if reply_nbytes:
                _seal(reply_fd, _READ_ONLY)
        except BaseException:
            _close(fd, reply_fd)
            raise
        slab = cls((fd, reply_fd), mapping, reply_nbytes, epoch, shm_nbytes=shm_nbytes)
        try:
            slab._keep_from_children()
            _SLAB_HEADER.pack_into(mapping, 0, _SLAB_MAGIC, _LAYOUT_VERSION, epoch, nbytes)
            if prefault:
                slab.prefault(0, nbytes)
        except BaseException:
            slab.close()
            raise
        return slab

    @classmethod
    def attach(cls, fds: tuple[int, int], nbytes: int, reply_nbytes: int, epoch: int) -> Slab:
        """Maps a slab that an engine passed. Takes the descriptors over, and closes them: the mapping is enough.

        The slab came over the engine's socket, so it is the slab of this engine. Its header proves nothing: any process with
        the slab may have written it. But no other process may be able to write the replies, and this is checked.

        Args:
            fds: of the leasable part and of the reply reserve; -1 as the second if ``reply_nbytes`` is 0.
            nbytes: size, replies included.
            reply_nbytes: of what replies are in.
            epoch: identity of the engine's life.

        Raises:
            SlabError: a descriptor is not of the size that was announced, or can't be mapped; or others could write the
                replies.
        """
        fd, reply_fd = fds
        try:
            _check_size(fd, nbytes - reply_nbytes)
            if reply_nbytes:
                _check_size(reply_fd, reply_nbytes)
                if not _is_sealed(reply_fd, _READ_ONLY):
                    raise SlabError("the engine passed a part for replies that others could write", nbytes=reply_nbytes)
            mapping = _map(fd, nbytes - reply_nbytes, reply_fd, reply_nbytes, writable=False)
        finally:
            _close(fd, reply_fd)
        slab = cls((-1, -1), mapping, reply_nbytes, epoch)
        slab._keep_from_children()
        return slab

    @property
    def parts(self) -> list[tuple[int, int]]:
        """Offset and bytes of the two parts that are mapped by themselves: the leasable part, and the reply reserve."""
        leased_nbytes = self.nbytes - self.reply_nbytes
        return [(0, leased_nbytes), *([(leased_nbytes, self.reply_nbytes)] if self.reply_nbytes else [])]

    def bytes_at(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Returns the bytes at ``offset`` as an array that keeps the mapping alive."""
        return np.frombuffer(memoryview(self.mapping), np.uint8, nbytes, offset)

    def find(self, address: int) -> int | None:
        """Returns the offset of an address of this process in the slab, or None if it is elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset < self.nbytes else None

    def prefault(self, offset: int, nbytes: int) -> None:
        """Maps the pages of a range now, so that copies need not do it; releases the interpreter lock meanwhile."""
        writable_end = self.nbytes if self.reply_fd >= 0 else self.nbytes - self.reply_nbytes
        writable_nbytes = min(max(0, writable_end - offset), nbytes)
        if writable_nbytes:
            self._populate(offset, writable_nbytes, _MADV_POPULATE_WRITE)
        if nbytes > writable_nbytes:
            self._populate(offset + writable_nbytes, nbytes - writable_nbytes, _MADV_POPULATE_READ)

    def _populate(self, offset: int, nbytes: int, advice: int) -> None:
        try:
            self.mapping.advise(offset, nbytes, advice)
        except OSError as error:
            if error.errno != errno.EINVAL:
                name = "MADV_POPULATE_WRITE" if advice == _MADV_POPULATE_WRITE else "MADV_POPULATE_READ"
                raise _os_error(f"madvise({name})", error, nbytes) from error
            # A kernel before 5.14. Reading maps a reserved page as well; writing, even what is there, could undo what another
            # process writes at that moment.
            self.bytes_at(offset, nbytes)[:: mmap.PAGESIZE].max(initial=0)

    def protect(self, offset: int, nbytes: int, *, readable: bool, writable: bool) -> None:
        """Sets what this process may do with a range (see ``ClientConfig.map_leased_only``)."""
        protection = (mmap.PROT_READ if readable else _PROT_NONE) | (mmap.PROT_WRITE if writable else _PROT_NONE)
        try:
            self.mapping.protect(offset, nbytes, protection)
        except OSError as error:
            raise _os_error("mprotect", error, nbytes) from error

    def close(self) -> None:
        """Closes the descriptors and the mapping; if views are alive, the mapping goes with the last of them."""
        _close(self.fd, self.reply_fd)
        self.fd = self.reply_fd = -1
        self.mapping = Mapping(-1, 0)  # in its place: a reference to the real one would keep it mapped

    def _keep_from_children(self) -> None:
        try:
            self.mapping.advise(0, self.nbytes, _MADV_DONTFORK)
        except OSError as error:
            raise _os_error("madvise(MADV_DONTFORK)", error, self.nbytes) from error


def reserve_for_one_writer(name: str, nbytes: int, *, prefault: bool) -> tuple[int, Mapping]:
    """Reserves memory that only this process can write. Processes that get the descriptor can read it.

    Args:
        name: of the engine.
        nbytes: a multiple of the page size.
        prefault: whether to touch every page now.

    Returns:
        The descriptor, which is the caller's, and the mapping.

    Raises:
        SlabError: there is not as much memory.
    """
    fd = _create_memfd(name, nbytes)
    try:
        mapping = _map(fd, nbytes, -1, 0, writable=True)
        _seal(fd, _READ_ONLY)
        mapping.advise(0, nbytes, _MADV_DONTFORK)
        if prefault:
            with contextlib.suppress(OSError):  # a kernel before 5.14: the first message that copies there pays for it
                mapping.advise(0, nbytes, _MADV_POPULATE_WRITE)
    except BaseException:
        os.close(fd)
        raise
    return fd, mapping


def map_read_only(fds: tuple[int, int, int], nbytes: tuple[int, int, int], *, prefault: bool) -> Mapping:
    """Maps the memory that an engine lets its workers read, side by side and read-only. Closes no descriptor.

    Args:
        fds: of what is leased, opened to be read; of the replies; and of the broadcasts, which only the engine can write.
        nbytes: of each.
        prefault: whether to map every page now.

    Raises:
        SlabError: one of them is not of the size that was announced, can't be mapped, or could be written by others.
    """
    for fd, size in zip(fds, nbytes, strict=True):
        _check_size(fd, size)
    if not all(_is_sealed(fd, _READ_ONLY) for fd in fds[1:]):
        raise SlabError("the engine passed memory for replies or broadcasts that others could write", nbytes=sum(nbytes[1:]))
    try:
        mapping = Mapping(fds[0], nbytes[0], fds[1], nbytes[1], False, False, fds[2], nbytes[2])
        mapping.advise(0, sum(nbytes), _MADV_DONTFORK)
    except OSError as error:
        raise _os_error("mmap", error, sum(nbytes)) from error
    if prefault:
        with contextlib.suppress(OSError):  # a kernel before 5.14
            mapping.advise(0, sum(nbytes), _MADV_POPULATE_READ)
    return mapping


def sweep() -> list[str]:
    """Removes segment names of this user that a crash between creating and unlinking has left.

    Other files with such a name (any user can create one) are ignored.

    Returns:
        The names of engines that are dead: each had the lock of its segment once, and nobody has it now. A name that nobody has
        locked yet is removed as well, and not returned: its engine may be starting at this moment, and needs the name no more.
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
            if os.fstat(fd).st_size:  # looked at under the lock
                removed.append(path.name)
        except (BlockingIOError, FileNotFoundError):
            continue  # its owner lives
        finally:
            os.close(fd)
    return removed


def _create_leased(name: str, nbytes: int, epoch: int, backing: Backing) -> tuple[int, int]:
    """Returns the descriptor of reserved memory, and how much of it lies in ``/dev/shm``: all, or nothing."""
    why = "as configured"
    if backing != "memfd":
        path = f"/{NAME_PREFIX}-{os.getuid()}-{name}-{epoch:016x}"
        try:
            fd = _create_segment(path, nbytes)
            logger.info("%d bytes of the slab are in %s", nbytes, SHM_DIRECTORY)
            return fd, nbytes
        except SlabError as error:
            if backing != "auto":
                raise
            why = str(error)
    fd = _create_memfd(name, nbytes)
    logger.info("%d bytes of the slab are in a memfd, and not in %s: %s", nbytes, SHM_DIRECTORY, why)
    return fd, 0


def _create_segment(path: str, nbytes: int) -> int:
    fd = _create_unlinked(path, nbytes)
    advice = (
        "lower slab_nbytes, mount it larger (docker run --shm-size, an emptyDir with medium: Memory), or take backing='memfd'"
    )
    try:
        _reserve(fd, nbytes, os.fspath(SHM_DIRECTORY), advice, path=path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_memfd(name: str, nbytes: int) -> int:
    """Makes a memfd that can still be sealed."""
    try:
        fd = os.memfd_create(f"{NAME_PREFIX}-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise _os_error("memfd_create", error, nbytes) from error
    try:
        _reserve(fd, nbytes, "a memfd", "lower slab_nbytes, or free memory (MemAvailable of /proc/meminfo is what counts)")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _seal(fd: int, seals: int) -> None:
    try:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except OSError as error:
        raise _os_error("sealing", error, os.fstat(fd).st_size) from error


def _is_sealed(fd: int, seals: int) -> bool:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & seals == seals
    except OSError:  # it is no memfd
        return False


def _check_size(fd: int, nbytes: int) -> None:
    size = os.fstat(fd).st_size
    if size != nbytes:
        raise SlabError(f"the engine announced {nbytes} bytes of a slab and passed {size}", nbytes=nbytes)


def _close(*fds: int) -> None:
    for fd in fds:
        if fd >= 0:
            os.close(fd)


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
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)  # waits, if at all, for a sweep that looks at us; the lock ends with the descriptor
        os.ftruncate(fd, mmap.PAGESIZE)  # tells a sweep that this was locked once; it takes no memory
        with contextlib.suppress(posix_ipc.ExistentialError):  # swept before the lock was ours: as good as unlinked
            posix_ipc.unlink_shared_memory(path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reserve(fd: int, nbytes: int, place: str, advice: str, *, path: str | None = None) -> None:
    """Reserves memory for a file.

    It first checks whether there is so much. Just trying would take all free memory until it fails. And if no mount limits the
    file, it would not fail: the kernel would kill processes to get the memory.
    """
    try:
        if nbytes > _room(fd)[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        huge_nbytes = reserve_huge_pages(fd, nbytes)
        with calling("fallocate"):
            os.posix_fallocate(fd, 0, nbytes)
        logger.info("%d of %d bytes in %s lie in huge pages", huge_nbytes, nbytes, place)
    except OSError as error:
        free_nbytes, size = _room(fd)
        limit = limit_behind(error)
        reasons = [limit] if limit is not None else []
        if limit is None or is_about_size(error):
            reasons += [f"{free_nbytes} bytes of {size} are free", advice]
        raise SlabError(
            f"reserving {nbytes} bytes in {place} failed ({_described(error)}): {'; '.join(reasons)}",
            path=path,
            errno=error.errno,
            nbytes=nbytes,
        ) from error


def _room(fd: int) -> tuple[int, int]:
    """Returns the free bytes and the size of the mount that a file lies in; if that has no limit, of the memory."""
    filesystem = os.fstatvfs(fd)
    if filesystem.f_blocks:
        return filesystem.f_bavail * filesystem.f_frsize, filesystem.f_blocks * filesystem.f_frsize
    size = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    return sizes_of(text_of(MEMINFO) or "").get("MemAvailable", size), size  # the size, if nobody mounted /proc


def _map(fd: int, nbytes: int, reply_fd: int, reply_nbytes: int, *, writable: bool) -> Mapping:
    try:
        return Mapping(fd, nbytes, reply_fd, reply_nbytes, writable)
    except OSError as error:
        raise _os_error("mmap", error, nbytes + reply_nbytes) from error


def _described(error: OSError) -> str:
    text = os.strerror(error.errno or 0)
    return f"{error.call}: {text}" if isinstance(error, RefusedCallError) else text


def _os_error(what: str, error: OSError, nbytes: int) -> SlabError:
    number, limit = error.errno or 0, limit_behind(error)
    text = f"{what} of {nbytes} bytes of the slab failed: {os.strerror(number)}{'' if limit is None else f'; {limit}'}"
    return SlabError(text, errno=number, nbytes=nbytes)
