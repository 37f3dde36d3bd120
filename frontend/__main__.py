"""``python -m frontend``: one frontend process. It ends on SIGTERM and SIGINT, and with its parent if that is named.

Alone, it listens on a host and port. Under the supervisor it gets a listening socket that it shares with its siblings, and
a pipe on which it says that it is ready.

Its end: it stops listening at once; requests may go on for ``--shutdown-timeout``; then those that still run are cancelled,
and have a moment to say so (503, or a last event of a stream). A second signal ends the waiting. Last, it leaves the engine,
and ends without unloading what it imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NoReturn

import click
import uvloop

import shmring
from engine.client import EngineClient
from engine.logs import configure_logging
from frontend.app import create_app
from frontend.memory import make_malloc_return_memory
from frontend.options import LOG_LEVELS, FiniteRange, frontend_options, settings_of
from frontend.server import Server
from frontend.settings import FrontendSettings
from shmring.transport.liveness import ProcessWatch

__all__ = ["main"]

logger = logging.getLogger("frontend")

_CONNECT_TIMEOUT_S = 30.0  # for the engine to import torch and to fill its slab: about 1 s for each 4 GiB; a model takes longer
_SHUTDOWN_TIMEOUT_S = 2.0
_INLINE_NBYTES = 128 << 20  # of media in one message, without shared memory; the engine's messages hold twice as much


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a frontend listens, and who it belongs to."""

    name: str
    socket_dir: str | None
    host: str
    port: int
    listen_fd: int | None
    ready_fd: int | None
    parent_pid: int | None
    connect_timeout_s: float
    shutdown_timeout_s: float
    log_level: str


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--name", default="shmring", show_default=True, help="The engine's name.")
@click.option("--socket-dir", default=None, help="Where the engine's socket lies.  [default: the user's runtime directory]")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="Where to listen; 0 is any free port."
)
@click.option("--listen-fd", type=int, default=None, help="A listening socket to inherit instead.")
@click.option("--ready-fd", type=int, default=None, help="A pipe on which to say that requests are being served.")
@click.option("--parent-pid", type=int, default=None, help="End when this process, the parent, has ended.")
@click.option(
    "--connect-timeout",
    "connect_timeout_s",
    default=_CONNECT_TIMEOUT_S,
    show_default=True,
    type=FiniteRange(min=0),
    help="Seconds to wait for the engine, which may be loading a model.",
)
@click.option(
    "--shutdown-timeout",
    "shutdown_timeout_s",
    default=_SHUTDOWN_TIMEOUT_S,
    show_default=True,
    type=FiniteRange(min=0),
    help="Seconds that requests may go on when the process is told to end; with 0 they are aborted at once.",
)
@click.option("--log-level", default="info", show_default=True, type=LOG_LEVELS, help="What to log.")
@frontend_options
def main(
    name: str,
    socket_dir: str | None,
    host: str,
    port: int,
    listen_fd: int | None,
    ready_fd: int | None,
    parent_pid: int | None,
    connect_timeout_s: float,
    shutdown_timeout_s: float,
    log_level: str,
    **values: Any,
) -> None:
    """Runs one frontend process: it serves HTTP, and decodes pictures into the slab of a running engine."""
    make_malloc_return_memory()
    warnings.filterwarnings("ignore", module=r"PIL\.")  # about callers' pictures: whatever matters, the caller is told
    configure_logging(log_level, "frontend")
    place = _Place(
        name=name,
        socket_dir=socket_dir,
        host=host,
        port=port,
        listen_fd=listen_fd,
        ready_fd=ready_fd,
        parent_pid=parent_pid,
        connect_timeout_s=connect_timeout_s,
        shutdown_timeout_s=shutdown_timeout_s,
        log_level=log_level,
    )
    try:
        uvloop.run(_serve(place, settings_of(values)))
    except (shmring.ShmringError, OSError, ValueError) as error:
        raise SystemExit(f"shmring frontend: {error}") from None
    _leave()


def _leave() -> NoReturn:
    """Ends the process without unloading torch (half a second, and twice that on busy cores) and without waiting for threads.

    Everything of ours is closed by now, and the engine takes back what a thread may still be writing to when we are dead.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(place: _Place, settings: FrontendSettings) -> None:
    description = f"frontend {os.getpid()}"
    config = shmring.ClientConfig(socket_dir=place.socket_dir, connect_timeout_s=place.connect_timeout_s)
    if settings.disable_mm_shm:
        config = dataclasses.replace(config, inline_nbytes=_INLINE_NBYTES)
    with _watching_parent(place.parent_pid):
        async with await EngineClient.connect(place.name, config, description=description) as engine:
            server = Server(
                create_app(engine, settings),
                host=place.host,
                port=place.port,
                log_level=place.log_level,
                shutdown_timeout_s=place.shutdown_timeout_s,
                on_started=lambda: _say_ready(place.ready_fd),
            )
            sockets = [socket.socket(fileno=place.listen_fd)] if place.listen_fd is not None else None
            await server.serve(sockets)


def _say_ready(ready_fd: int | None) -> None:
    if ready_fd is not None:
        os.write(ready_fd, b"\n")
        os.close(ready_fd)


@contextlib.contextmanager
def _watching_parent(parent_pid: int | None) -> Iterator[None]:
    """Ends this process with its parent, also if that is killed."""
    if parent_pid is None:
        yield
        return
    watch = ProcessWatch(asyncio.get_running_loop(), _open_parent(parent_pid), _orphaned)
    try:
        yield
    finally:
        watch.close()


def _open_parent(parent_pid: int) -> int:
    try:
        pidfd = os.pidfd_open(parent_pid)
    except ProcessLookupError:
        _orphaned()
        raise
    if os.getppid() != parent_pid:  # it ended before we watched, and its pid may be somebody else's by now
        _orphaned()
    return pidfd


def _orphaned() -> None:
    # The supervisor made it, and can't remove it any more; whoever of us is first does.
    shutil.rmtree(os.environ.get("PROMETHEUS_MULTIPROC_DIR", ""), ignore_errors=True)
    signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    main()
