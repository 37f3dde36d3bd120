"""Looking at a ring from outside: ``shmring.inspect``. The engine lends nothing for it, and counts no frontend."""

from __future__ import annotations

import asyncio
import os

import msgspec

from shmring.core.welcome import check_engine_name
from shmring.door import timeout_of
from shmring.snapshot import RingSnapshot
from shmring.transport.endpoint import inspect_engine
from shmring.transport.listener import socket_path

__all__ = ["inspect", "inspect_process"]


async def inspect(name: str, *, socket_dir: str | None = None, timeout: float | None = 5.0) -> RingSnapshot:
    """Asks the engine of a name what it is doing now: who has which memory, which requests are old, what went wrong.

    It works for any ring of this user, whatever program serves it, and also while the slab is full.

    Args:
        name: the engine's name.
        socket_dir: where its socket is; None: the user's runtime directory.
        timeout: seconds.

    Raises:
        EngineDeadError: there is no engine of that name.
        PermissionError: its socket, or the directory of that, is not safe.
        RemoteProtocolError: it is of a version that can't be asked, or another engine listens in its place.
        TimeoutError: its loop does not run; ``kill -USR1`` has a server's process write its stacks to its log.
    """
    _, snapshot = await inspect_process(name, socket_dir=socket_dir, timeout=timeout)
    return snapshot


async def inspect_process(name: str, *, socket_dir: str | None, timeout: float | None) -> tuple[int, RingSnapshot]:
    """Asks as :func:`inspect`, and the kernel which process answers.

    Returns:
        The pid that the engine has here: not what it says itself if it runs in another container. What it is doing.
    """
    async with asyncio.timeout(timeout_of(timeout)):
        pid, answer = await inspect_engine(socket_path(name, socket_dir), frozenset({os.getuid()}))
    snapshot = msgspec.json.decode(answer, type=RingSnapshot)
    check_engine_name(snapshot.name, name)
    return pid, snapshot
