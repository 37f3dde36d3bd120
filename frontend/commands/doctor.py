"""``shmring doctor``: checks whether this machine can run an engine, before an engine fails on it.

Each check looks at one thing and returns a row: its finding, and what to do about it. A check gets its input as an argument
(a file's text, a limit, a directory), so tests can give it the input of another machine; :func:`run_checks` reads the input
of this machine. A check never raises because of its finding: it is made for machines that lack something.

A *problem* keeps an engine from starting or from being safe; a *warning* costs speed, or will be a problem under load.
"""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import platform
import re
import resource
import socket
import stat
import statistics
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
import uvloop
from rich.console import Console
from rich.table import Table
from rich.text import Text

import shmring
from shmring.frontend.media.packages import DECODERS
from shmring.frontend.processes.memory_checks import Check, memory_checks
from shmring.frontend.processes.supervisor import ServeOptions
from shmring.memory import huge_pages
from shmring.memory.available import size_of, text_of
from shmring.memory.slab import NAME_PREFIX, SHM_DIRECTORY, sweep
from shmring.transport.listener import socket_path, sweep_names

__all__ = ["Check", "has_problem", "remove_leftovers", "run_checks", "show"]

_OLDEST_KERNEL = (5, 3)  # pidfd_open
_POPULATING_KERNEL = (5, 14)  # MADV_POPULATE_WRITE
_SO_PEERPIDFD = 77  # Linux 6.5, from the kernel's asm-generic/socket.h
_SEGMENT_INODES = 16  # a slab is one file; the others are for other programs
_FEW_FILES = 1024  # 2 for each of 256 frontends (RingConfig.max_clients) or one for each HTTP connection, and some to spare
_TOO_FEW_FILES = 128  # an engine with two frontends, and torch's own
_TEST_NBYTES = 1 << 20
_TEST_SLAB_NBYTES = 8 << 20
_TEST_REPETITIONS = 20
_TEST_TIMEOUT_S = 10.0
_IN_A_MEMFD = "unless it is configured otherwise, it goes to a memfd, which only memory limits"
_SWEEP_ADVICE = "shmring doctor --sweep removes them, and so does the next engine of this user"
_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}

# The names of distributions, also where a module has another name. Only those that decode can be missing.
_PACKAGES = ("shmring", "torch", "numpy", "msgspec", "uvloop", "posix_ipc", *DECODERS)


def run_checks(options: ServeOptions) -> list[Check]:
    """Looks at this machine, on which a server with such options is to run."""
    filesystem = os.statvfs(SHM_DIRECTORY) if SHM_DIRECTORY.is_dir() else None
    mounts = text_of(Path("/proc/self/mounts")) or ""
    cuda = torch.cuda.is_available()
    soft_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needs = options.memory_needs()
    socket_directory = socket_path("doctor", options.frontend.socket_dir).parent
    soft_memlock, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return [
        check_kernel(platform.release()),
        check_shm_mount(mounts, SHM_DIRECTORY),
        check_shm_space(filesystem, needs["slabs"]),
        check_shm_inodes(filesystem),
        *memory_checks(needs),
        check_huge_pages(huge_pages.can_be_had()),
        check_memlock(soft_memlock, needs["slabs"] // len(options.engines), cuda=cuda),
        check_open_files(soft_files),
        check_pidfd(),
        check_peer_pidfd(),
        check_descriptor_passing(),
        check_socket_directory(socket_directory),
        check_leftovers(SHM_DIRECTORY),
        check_left_names(socket_directory),
        *(check_package(name) for name in _PACKAGES),
        check_torch(cuda=cuda),
        check_exchange(),
    ]


def has_problem(checks: list[Check]) -> bool:
    """Says whether an engine would fail here."""
    return any(check.status == "problem" for check in checks)


def show(checks: list[Check], console: Console) -> None:
    """Prints the report as a table."""
    table = Table(show_lines=False)
    for heading in ("check", "status", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for check in checks:
        # As text: a finding may hold brackets, which rich would take for markup.
        table.add_row(check.name, Text(check.status, _STYLES[check.status]), Text(check.finding), Text(check.advice))
    console.print(table, highlight=False)


# -- the kernel and its memory ------------------------------------------------------------------------------------------


def check_kernel(release: str) -> Check:
    """Looks at the kernel's version, as ``uname -r`` says it."""
    match = re.match(r"(\d+)\.(\d+)", release)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < _OLDEST_KERNEL:
        return Check("kernel", "problem", release, "Linux 5.3 or later is needed: proof that a process is dead is a pidfd")
    if version < _POPULATING_KERNEL:
        return Check("kernel", "ok", release, "from Linux 5.14 on, attaching maps the slab faster")
    return Check("kernel", "ok", release)


def check_shm_mount(mounts: str, directory: Path) -> Check:
    """Looks at what is mounted where slabs are made; ``mounts`` is the text of ``/proc/self/mounts``."""
    name = f"{directory} mount"
    places = [os.fspath(place) for place in (directory, *directory.parents)]
    candidates = [line.split(" ")[1:4] for line in mounts.splitlines() if line.split(" ")[1] in places]
    if not candidates:
        return Check(name, "problem", "nothing is mounted there", f"mount -t tmpfs tmpfs {directory}")
    # The nearest mount decides. If several are at one place, the last one hides the others.
    _, kind, options = max(reversed(candidates), key=lambda mount: len(mount[0]))
    described = f"{kind} ({options})"
    if kind not in ("tmpfs", "devtmpfs"):
        return Check(name, "problem", described, f"the slab must be memory: mount a tmpfs at {directory}")
    if "ro" in options.split(","):
        return Check(name, "warning", f"{described}; {_IN_A_MEMFD}", f"mount -o remount,rw {directory}")
    return Check(name, "ok", described)


def check_shm_space(filesystem: os.statvfs_result | None, slabs_nbytes: int) -> Check:
    """Compares the space for slabs with those that are to be made."""
    name = f"{SHM_DIRECTORY} space"
    if filesystem is None:
        return Check(name, "warning", f"{SHM_DIRECTORY} does not exist; {_IN_A_MEMFD}", "mount a tmpfs there")
    size, free = filesystem.f_blocks * filesystem.f_frsize, filesystem.f_bavail * filesystem.f_frsize
    if not size:  # mounted without a limit; the machine's memory is one, and has a check of its own
        return Check(name, "ok", "not limited")
    finding = f"{size_of(free)} of {size_of(size)} are free; slabs take {size_of(slabs_nbytes)}"
    if slabs_nbytes <= free:
        return Check(name, "ok", finding)
    larger = "docker run --shm-size=, in Kubernetes an emptyDir with medium: Memory, else mount -o remount,size="
    room = f"remove what fills {SHM_DIRECTORY}, or enlarge it" if slabs_nbytes <= size else f"enlarge {SHM_DIRECTORY}"
    return Check(name, "ok", f"{finding}; {_IN_A_MEMFD}", f"optional, for --slab-backing /dev/shm: {room} ({larger})")


def check_shm_inodes(filesystem: os.statvfs_result | None) -> Check:
    """Looks whether files can be made there."""
    name = f"{SHM_DIRECTORY} inodes"
    if filesystem is None:
        return Check(name, "warning", f"{SHM_DIRECTORY} does not exist; {_IN_A_MEMFD}", "mount a tmpfs there")
    if not filesystem.f_files:
        return Check(name, "ok", "not limited")
    finding = f"{filesystem.f_favail} of {filesystem.f_files} are free"
    if filesystem.f_favail < _SEGMENT_INODES:
        advice = f"remove what fills {SHM_DIRECTORY}, or mount it with a larger nr_inodes="
        return Check(name, "warning", f"{finding}; {_IN_A_MEMFD}", advice)
    return Check(name, "ok", finding)


def check_huge_pages(can_be_had: bool) -> Check:
    """Says whether a slab gets huge pages, which make copies to it faster."""
    name = "huge pages"
    if can_be_had:
        return Check(name, "ok", "a slab gets them where memory is not in too many pieces")
    advice = (
        "optional: Linux 6.1 or later gives them, unless /sys/kernel/mm/transparent_hugepage/shmem_enabled says deny; "
        "slabs are then reserved in less than half of the time, and large copies are faster"
    )
    return Check(name, "ok", "the kernel gives none: a slab has pages of 4 KiB", advice)


# -- limits -------------------------------------------------------------------------------------------------------------


def check_memlock(limit_nbytes: int, slab_nbytes: int, *, cuda: bool) -> Check:
    """Looks at how much memory may be locked (``RLIMIT_MEMLOCK``), which matters where the slab is pinned for a GPU."""
    name = "locked memory"
    if limit_nbytes == resource.RLIM_INFINITY:
        return Check(name, "ok", "not limited")
    finding = f"limited to {size_of(limit_nbytes)}"
    if not cuda:
        return Check(name, "ok", f"{finding}; nothing is pinned without a GPU")
    if limit_nbytes >= slab_nbytes:
        return Check(name, "ok", finding)
    return Check(name, "warning", finding, "if pinning the slab fails: ulimit -l unlimited, docker run --ulimit memlock=-1")


def check_open_files(limit: int) -> Check:
    """Looks at the limit of open files: an engine takes two for each frontend, a frontend one for each connection."""
    name = "open files"
    if limit == resource.RLIM_INFINITY:
        return Check(name, "ok", "not limited")
    finding = f"limited to {limit}"
    advice = f"ulimit -n {max(_FEW_FILES, 65536)}: 2 for each frontend, and in a frontend 1 for each connection"
    if limit < _FEW_FILES:
        return Check(name, "problem" if limit < _TOO_FEW_FILES else "warning", finding, advice)
    return Check(name, "ok", finding)


# -- how frontends and engine identify each other ---------------------------------------------------------------------


def check_pidfd() -> Check:
    """Tries ``pidfd_open``."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        advice = "it is the only proof that a process is dead: allow it in the container's seccomp profile, or use Linux 5.3"
        return Check("pidfd_open", "problem", str(error), advice)
    return Check("pidfd_open", "ok", "works")


def check_peer_pidfd() -> Check:
    """Tries whether a socket gives a pidfd of the process at its other end."""
    name = "SO_PEERPIDFD"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            os.close(ours.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
        except OSError as error:
            advice = "fine while engine and frontends share a process namespace; across containers Linux 6.5 is needed"
            return Check(name, "warning", f"not there ({error.strerror}): the peer's pid is opened instead", advice)
    return Check(name, "ok", "works: frontends may live in another process namespace")


def check_descriptor_passing() -> Check:
    """Tries to pass a descriptor of memory over a socket, which is how frontends get the slab."""
    name = "descriptor passing"
    ours, theirs = socket.socketpair()
    with ours, theirs:
        try:
            fd = os.memfd_create("shmring-doctor", os.MFD_CLOEXEC)
            try:
                socket.send_fds(ours, [b"x"], [fd])
                return _compare_received(name, theirs, fd)
            finally:
                os.close(fd)
        except OSError as error:
            return Check(name, "problem", str(error), "allow memfd_create and sendmsg in the container's seccomp profile")


def _compare_received(name: str, receiving: socket.socket, sent: int) -> Check:
    _, ancillary, _, _ = receiving.recvmsg(1, socket.CMSG_SPACE(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC)
    received = array.array("i", b"".join(data for _, kind, data in ancillary if kind == socket.SCM_RIGHTS))
    try:
        if len(received) == 1 and os.path.samestat(os.fstat(received[0]), os.fstat(sent)):
            return Check(name, "ok", "works")
        return Check(
            name, "problem", "the descriptor did not arrive", "the sandbox strips it: run engine and frontends without"
        )
    finally:
        for fd in received:
            os.close(fd)


def check_socket_directory(directory: Path) -> Check:
    """Checks that no other user can put a socket where frontends look for it."""
    name = "socket directory"
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return _check_parent(name, directory)
    except OSError as error:
        return Check(name, "problem", str(error), "give --socket-dir another place")
    finding = f"{directory} (mode {stat.S_IMODE(status.st_mode):04o}, uid {status.st_uid})"
    if not stat.S_ISDIR(status.st_mode):
        return Check(name, "problem", f"{directory} is no directory", "remove it, or give --socket-dir another place")
    if status.st_uid != os.getuid():
        return Check(name, "problem", finding, f"it must belong to uid {os.getuid()}; give --socket-dir another place")
    if status.st_mode & 0o022:
        return Check(name, "problem", finding, f"others could put a socket there: chmod 700 {directory}")
    if status.st_mode & 0o077:
        return Check(name, "ok", finding, "other users can see which engines run; only allowed ones can connect")
    return Check(name, "ok", finding)


def _check_parent(name: str, directory: Path) -> Check:
    parent = next(place for place in directory.parents if place.exists())
    if os.access(parent, os.W_OK | os.X_OK):
        return Check(name, "ok", f"{directory} is made by the first engine")
    return Check(name, "problem", f"{directory} can't be made: {parent} is not writable", "give --socket-dir another place")


def check_leftovers(directory: Path) -> Check:
    """Looks for segments of this user's dead engines. A living engine's has a name for microseconds only, and is locked."""
    name = "left segments"
    left = {path: path.lstat().st_blocks * 512 for path in directory.glob(f"{NAME_PREFIX}-{os.getuid()}-*") if _is_left(path)}
    if not left:
        return Check(name, "ok", "none")
    names = ", ".join(sorted(path.name for path in left))
    return Check(name, "warning", f"{size_of(sum(left.values()))} in {names}", _SWEEP_ADVICE)


def check_left_names(directory: Path) -> Check:
    """Looks for sockets and locks of this user's dead engines."""
    left = sweep_names(directory, remove=False)
    if not left:
        return Check("left sockets", "ok", "none")
    return Check("left sockets", "warning", f"of {', '.join(left)} in {directory}", _SWEEP_ADVICE)


def remove_leftovers(socket_dir: str | None = None) -> list[str]:
    """Removes the files that this user's dead engines have left: names of slabs, sockets and locks. Returns the names of both.

    Args:
        socket_dir: where the sockets lie; None: the default.
    """
    return sweep() + sweep_names(socket_path("doctor", socket_dir).parent)


def _is_left(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False  # gone meanwhile, or not ours
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return os.fstat(fd).st_nlink > 0 and stat.S_ISREG(os.fstat(fd).st_mode)
    except BlockingIOError:
        return False  # its engine lives
    finally:
        os.close(fd)


# -- what is installed --------------------------------------------------------------------------------------------------


def check_package(name: str) -> Check:
    """Looks up an installed package's version."""
    try:
        return Check(name, "ok", metadata.version(name))
    except metadata.PackageNotFoundError:
        if name == "shmring":
            return Check(name, "ok", f"{shmring.__version__}, from {Path(shmring.__file__).parent}, not installed")
        if name in DECODERS:
            advice = (
                "a server can't decode media without it: pip install 'shmring[serve]'; in a checkout, pip install -e '.[serve]'"
            )
            return Check(name, "warning", "not installed", advice)
        return Check(name, "problem", "not installed", f"pip install {name}")


def check_torch(*, cuda: bool) -> Check:
    """Says what torch computes with."""
    threads = f"{torch.get_num_threads()} threads on {len(os.sched_getaffinity(0))} cores"
    if not cuda:
        built = f"built for CUDA {torch.version.cuda}, which sees no device" if torch.version.cuda else "built without CUDA"
        return Check("devices", "ok", f"CPU, {threads}; {built}")
    names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    return Check("devices", "ok", f"{names} (CUDA {torch.version.cuda}); CPU, {threads}")


def check_exchange() -> Check:
    """Sends tensors from a client to an engine, both in this process, and checks the sums that the engine returns."""
    name = "self-test"
    try:
        with tempfile.TemporaryDirectory(prefix="shmring-doctor-") as place:
            seconds = uvloop.run(_exchange(place))
    except TimeoutError:
        return Check(name, "problem", f"no answer within {_TEST_TIMEOUT_S:g} s", "is the machine overloaded?")
    except (shmring.ShmringError, OSError, ValueError) as error:
        return Check(name, "problem", str(error), "see the problems above")
    return Check(name, "ok", f"a tensor of {size_of(_TEST_NBYTES)} and its answer take {seconds * 1e6:.0f} us (median)")


async def _exchange(socket_dir: str) -> float:
    async with (
        asyncio.timeout(_TEST_TIMEOUT_S),
        shmring.serve(f"doctor-{os.getpid()}", slab_nbytes=_TEST_SLAB_NBYTES, socket_dir=socket_dir) as ring,
    ):
        answering = asyncio.create_task(ring.run(_answer))
        try:
            async with shmring.connect(f"doctor-{os.getpid()}", socket_dir=socket_dir) as client:
                return statistics.median([await _ask(client, number) for number in range(_TEST_REPETITIONS)])
        finally:
            answering.cancel()


async def _ask(client: shmring.Client, number: int) -> float:
    numbers = torch.full((_TEST_NBYTES // 4,), number, dtype=torch.int32)
    started = time.perf_counter()
    total = await client.request(numbers)
    elapsed_s = time.perf_counter() - started
    if total != number * len(numbers):
        raise ValueError(f"a tensor with the sum {number * len(numbers)} arrived with the sum {total}")
    return elapsed_s


async def _answer(claim: shmring.Claim) -> None:
    await claim.reply(int(claim.payload.numpy().sum()))
