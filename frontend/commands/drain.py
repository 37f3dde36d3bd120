"""``shmring drain`` and ``shmring restart``: end a server, one engine or one frontend in good order, and watch that.

A signal tells a process to end in good order. Here it is found out whom to send it to: snapshots of the engines
(:func:`shmring.inspect`) name the processes of a server. So there is no port, socket or key for this, and nothing that a killed
server would leave: the kernel decides whose processes one may signal. What ends has its own limit (``--shutdown-timeout``), and
the supervisor starts the next process. This command only watches, so ending it changes nothing.

A pid means nothing in another container. So it is compared with what the kernel says of the engine's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

import click
import msgspec

from shmring.client.inspecting import inspect_process
from shmring.engine.settings import MAX_ENGINES, engine_names
from shmring.errors import EngineDeadError, ShmringError
from shmring.frontend.settings import frontend_name
from shmring.processes.process import Process
from shmring.service.supervision import DRAIN_SIGNAL
from shmring.snapshot import RingSnapshot
from shmring.transport.listener import socket_path

__all__ = ["drain", "restart"]

_LOOK_S = 0.2
_ANSWER_S = 5.0  # after which an engine counts as one that does not answer


class _CannotError(Exception):
    """It can't be done; the text is for the operator."""


class _Server(msgspec.Struct, frozen=True):
    """What an engine says of its server (:class:`shmring.engine.core.ServerFacts`), and a store of itself."""

    name: str
    engines: int
    pid: int


def drain(name: str, socket_dir: str | None, timeout_s: float, *, engine: int | None, frontend: int | None) -> int:
    """Ends a server, or has one of its processes replaced; returns the exit code.

    Args:
        name: the server's.
        socket_dir: where its engines' sockets are.
        timeout_s: how long to watch.
        engine, frontend: which one; None: the whole server, or the other kind.
    """

    async def run(watch: _Watch) -> None:
        if engine is None and frontend is None:
            await watch.end()
            return
        with watch.alone():
            if engine is not None:
                await watch.replace_engine(engine)
            elif frontend is not None:
                await watch.replace_frontend(frontend)

    return _run("drain", name, socket_dir, timeout_s, run)


def restart(name: str, socket_dir: str | None, timeout_s: float) -> int:
    """Has all engines replaced, one after the other; returns the exit code. ``timeout_s`` is for each."""

    async def run(watch: _Watch) -> None:
        with watch.alone():
            for index in range(watch.server.engines):
                await watch.replace_engine(index)

    return _run("restart", name, socket_dir, timeout_s, run)


def _run(command: str, name: str, socket_dir: str | None, timeout_s: float, act: Callable[[_Watch], Awaitable[None]]) -> int:
    async def run() -> None:
        await act(await _Watch.find(name, socket_dir, timeout_s))

    try:
        asyncio.run(run())
    except KeyboardInterrupt:
        click.echo(f"shmring {command}: not watching any more; what was told to end goes on ending", err=True)
    except (_CannotError, ShmringError, OSError, ValueError, msgspec.DecodeError) as error:
        click.echo(f"shmring {command}: {error}", err=True)
    else:
        return 0
    return 1


class _Watch:
    """A server, as the snapshots of its engines show it."""

    def __init__(self, server: _Server, socket_dir: str | None, timeout_s: float) -> None:
        self.server = server
        self._names = engine_names(server.name, server.engines)
        self._socket_dir = socket_dir
        self._timeout_s = timeout_s

    @classmethod
    async def find(cls, name: str, socket_dir: str | None, timeout_s: float) -> _Watch:
        """Asks any engine of a server.

        Raises:
            _CannotError: none answers, or it is no engine of such a server.
        """
        for engine in (name, *engine_names(name, MAX_ENGINES)):
            if (snapshot := await _look(engine, socket_dir)) is not None:
                break
        else:
            raise _CannotError(f"no engine of a server {name!r} answers at {socket_path(name, socket_dir).parent}")
        try:
            server = msgspec.convert(snapshot.program.get("server") or snapshot.program.get("store"), _Server)
        except msgspec.ValidationError:
            raise _CannotError(f"no `shmring serve` runs {name!r}; end process {snapshot.pid} with SIGTERM") from None
        if server.name != name:
            raise _CannotError(
                f"{name!r} is an engine of the server {server.name!r}: name that one, and the engine by its number"
            )
        return cls(server, socket_dir, timeout_s)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Lets no other command replace processes of this server: each would take the other's for the one that stays.

        Raises:
            _CannotError: one is at work. (The kernel knows this name, and forgets it when its process ends.)
        """
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as lock:
            try:
                lock.bind(f"\0shmring-drain-{os.getuid()}-{self.server.pid}")
            except OSError:
                raise _CannotError("another `shmring drain` or `shmring restart` of this server is at work") from None
            yield

    async def _check_engines_running(self) -> None:
        for name in self._names:
            if (snapshot := await self._look(name)) is not None:
                _check_running(snapshot, self.server.pid)

    async def end(self) -> None:
        """Ends the server."""
        await self._check_engines_running()
        snapshot, _ = await self._other(but=None)
        await self._end("the store" if "store" in snapshot.program else "the server", self.server.pid, snapshot, None)

    async def replace_engine(self, index: int) -> None:
        """Ends an engine; returns when the next one serves all frontends that another engine serves."""
        if index >= len(self._names):
            raise _CannotError(f"there is no engine {index}; {self.server.name} has {len(self._names)}, and 0 is the first")
        name = self._names[index]
        if (before := await self._look(name)) is None:
            raise _CannotError(f"the engine {name} does not answer")
        _check_running(before, before.pid)
        await self._other(but=name)

        async def next_serves() -> bool:
            now = await self._look(name)
            if now is None or now.pid == before.pid:
                return False
            try:
                _, frontends = await self._other(but=name)
            except _CannotError:
                return True  # the others have gone meanwhile
            return frontends.keys() <= _frontends_of(now).keys()

        await self._end(f"the engine {name}", before.pid, before, next_serves)

    async def replace_frontend(self, index: int) -> None:
        """Ends a frontend; returns when the next one is there."""
        await self._check_engines_running()
        name = frontend_name(index)
        snapshot, frontends = await self._other(but=None)
        pid = next((pid for pid, each in frontends.items() if each == name), None)
        if pid is None:
            raise _CannotError(f"there is no {name}; {self.server.name} has {', '.join(sorted(frontends.values())) or 'none'}")
        if len(frontends) == 1:
            raise _CannotError(f"{name} is the only one: its callers would wait until it has ended")

        async def next_serves() -> bool:
            now = await self._look(snapshot.name)
            return now is not None and any(each == name and other != pid for other, each in _frontends_of(now).items())

        await self._end(name, pid, snapshot, next_serves)

    async def _end(
        self, title: str, pid: int, snapshot: RingSnapshot, next_serves: Callable[[], Awaitable[bool]] | None
    ) -> None:
        """Tells a process to end, and waits until it has, and the next one serves.

        Args:
            title: of the process.
            pid: its pid.
            snapshot: of an engine, which names the process.
            next_serves: says whether the next one does; None: there will be none.
        """
        waits_for = ""

        async def until(is_true: Callable[[], Awaitable[bool]], what: str) -> None:
            nonlocal waits_for
            waits_for = what
            click.echo(f"waiting for {waits_for}", err=True)
            while not await is_true():  # noqa: ASYNC110 - it is another process's
                await asyncio.sleep(_LOOK_S)

        async def has_ended() -> bool:
            return not process.lives

        try:
            process = Process(pid)
        except ProcessLookupError:
            raise _CannotError(f"{title} (pid {pid}) has just ended; try again") from None
        with contextlib.closing(process):
            # The pid may have passed to another process before it was opened, but not if it is still named.
            again = await self._look(snapshot.name)
            if again is None or again.epoch != snapshot.epoch or pid not in {again.pid, self.server.pid, *_frontends_of(again)}:
                raise _CannotError(f"{title} (pid {pid}) has just ended; try again")
            process.send(DRAIN_SIGNAL)
            try:
                async with asyncio.timeout(self._timeout_s):
                    await until(has_ended, f"{title} (pid {pid}) to end")
                    if next_serves is not None:
                        await until(next_serves, f"the next process in place of {title}")
            except TimeoutError:
                raise _CannotError(f"after {self._timeout_s:g} s (--timeout), still waiting for {waits_for}") from None
        click.echo(f"{title} {'has ended' if next_serves is None else 'was replaced'}", err=True)

    async def _other(self, but: str | None) -> tuple[RingSnapshot, dict[int, str]]:
        """Returns an engine, and the frontends of its server, by pid.

        Args:
            but: an engine that is to end, so that another one must take its requests; None: any engine will do.

        Raises:
            _CannotError: there is none.
        """
        for name in self._names:
            if name == but or (snapshot := await self._look(name)) is None:
                continue
            if but is None or not (snapshot.program.get("draining") or snapshot.program.get("paused")):
                return snapshot, _frontends_of(snapshot)
        if but is None:
            raise _CannotError(f"no engine of {self.server.name} answers")
        raise _CannotError(f"{self.server.name} has no other engine that takes requests meanwhile, so they would fail")

    async def _look(self, name: str) -> RingSnapshot | None:
        return await _look(name, self._socket_dir)


async def _look(name: str, socket_dir: str | None) -> RingSnapshot | None:
    """Returns a snapshot; None: there is no such engine now, or its loop does not run.

    Raises:
        _CannotError: its processes can't be told from here to end.
    """
    try:
        pid, snapshot = await inspect_process(name, socket_dir=socket_dir, timeout=_ANSWER_S)
    except (EngineDeadError, TimeoutError):
        return None
    if pid != snapshot.pid:
        raise _CannotError(f"the engine {name} runs in another container: run this command in that one")
    return snapshot


def _check_running(engine: RingSnapshot, pid: int) -> None:
    """Raises _CannotError if an engine is paused: requests would not end. ``pid`` is what can be ended all the same."""
    if engine.program.get("paused"):
        text = f"the engine {engine.name} is paused, so its requests would not end"
        raise _CannotError(f"{text}: POST /resume first, or end process {pid} with SIGTERM")


def _frontends_of(snapshot: RingSnapshot) -> dict[int, str]:
    """Returns the frontends of the server that are connected to an engine: their names, by pid."""
    prefix = frontend_name(0)[:-1]
    return {
        client.pid: client.name
        for client in snapshot.clients
        if client.state == "connected" and client.name.startswith(prefix) and client.name[len(prefix) :].isdecimal()
    }
