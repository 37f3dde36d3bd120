"""The engine's side: a Ray actor that hosts a ring.

Theory of operation: the actor's loop has the ring. Clients on its node connect to its socket, without Ray. Each client on
another node is told a token of its own, by which it connects to the ring's gateway (:mod:`shmring.gateway`). For those that
can't connect, it has an injector of the ring (:meth:`shmring.Ring.injector`): a call of the actor is a request there; another
one aborts it, also if it comes first. Errors of requests travel as values beside the replies, so that they arrive as what they
are.

A client's *lifeline* is a reference that belongs to its process, and that is never fulfilled. Ray tells whoever waits for it
when that process has died; then the client's requests are aborted.

The engine watches its node's raylet, and ends with it: Ray starts an actor elsewhere when its raylet has died, and does not end
the old one for long, which would keep its GPU and answer clients on its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec
import ray

import shmring
from shmring.core.loggers import logger_of
from shmring.door import listening_place_of, parse_nbytes, timeout_of, validate_name
from shmring.engine.core import EngineCore
from shmring.engine.counted import EngineNumbers
from shmring.engine.executors import create_executor
from shmring.engine.executors.interface import ExecutorOptions
from shmring.engine.metrics import EngineMetrics
from shmring.engine.scheduler import SchedulerConfig
from shmring.errors import EngineDeadError, ShmringError
from shmring.gateway.gateway import Gateway
from shmring.gateway.serving import open_gateway
from shmring.integrations.ray.directory import NAMESPACE, Load, Where, actor_name, node_id, store_nbytes
from shmring.integrations.ray.metrics import keep_reporting
from shmring.integrations.ray.wire import Call, Sent, to_call, to_sent
from shmring.memory.bundles import Bundle
from shmring.ring.injecting import Injected, Injector
from shmring.transport.liveness import ProcessId

__all__ = ["EngineActor", "Engines", "HostedEngine", "UnknownClientError"]

logger = logger_of("shmring.ray")

#: Calls that an engine carries out at a time, each of which may be a request, and one for each client on another node.
_MAX_CALLS = 10_000

_TOKEN_NBYTES = 32

_MAX_GIVEN_UP = 10_000  # requests: most of them are over, and were when their client gave them up

_NODE_CHARACTERS = 12  # of a node's id, in the name of a ring: test clusters have several nodes on a machine

Handler = Callable[[shmring.Claim[Any]], Awaitable[object]]

_LONGEST_S = 1e7  # of a deadline, which loops can count


class UnknownClientError(EngineDeadError):
    """This life of the engine does not know the client: it must look the engine up again. Nothing was done."""


class HostedEngine:
    """The actor. Ray makes it anew when its process has died."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, name: str, handler: Handler | None, executor: str | None, options: dict[str, Any]
    ) -> None:
        self._name = name
        self._node = node_id()
        self._injectors: dict[str, Injector] = {}
        self._gateway: Gateway | None = None
        self._tokens: dict[str, bytes] = {}  # by client
        self._far: dict[tuple[str, int], Injected] = {}  # by client and its number of the request
        self._given_up: OrderedDict[tuple[str, int], None] = OrderedDict()  # before they have come, or when they were over
        self._watching: set[asyncio.Task[None]] = set()
        self._core: EngineCore | None = None
        self._is_draining = False
        self._end_with_raylet()
        host = ray.util.get_node_ip_address()
        listen = options.pop("listen", f"[{host}]:0" if ":" in host else f"{host}:0")
        ring_name = f"ray-{self._node[:_NODE_CHARACTERS]}-{name}"
        options.setdefault("socket_dir", f"/tmp/shmring-{os.getuid()}")  # of all processes, whatever their environment says
        if handler is not None:
            max_concurrency = options.pop("max_concurrency", 64)
            self._ring: shmring.Ring[Any] = await shmring.serve(ring_name, **options)
            running: Awaitable[None] = self._ring.run(handler, max_concurrency)
        else:
            assert executor is not None
            core = self._core = await self._make_core(ring_name, executor, options)
            self._ring = core.ring
            running = core.run()
        await self._listen(listen)
        config = self._ring.config
        self._where = Where(
            node=self._node,
            ring=ring_name,
            socket_dir=options["socket_dir"],
            process=ProcessId.own(),
            max_inflight=config.max_inflight,
            max_tensors=config.max_tensors,
            max_payload_nbytes=parse_nbytes(config.max_payload_nbytes),
            max_values=config.max_values,
            store_nbytes=await asyncio.to_thread(store_nbytes, self._node),
            address=self._ring.address,
        )
        self._start(self._run(running))
        self._start(keep_reporting({"node": self._node, "engine": name}, self._numbers))

    async def _listen(self, place: str | None) -> None:
        """Lets clients on other nodes connect. As Ray's own connections, these are not encrypted."""
        if place is None:
            return
        try:
            self._gateway = await open_gateway(
                self._ring, *listening_place_of(place, "listen"), secrets.token_bytes(_TOKEN_NBYTES), "off"
            )
        except OSError as error:
            logger.warning(
                "engine %r can't listen at %s, and clients on other nodes use the object store: %s", self._name, place, error
            )

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)

    async def _run(self, running: Awaitable[None]) -> None:
        """Runs the engine. When that ends, so does this process, and Ray starts another one."""
        try:
            await running
        except Exception:
            logger.critical("engine %r has ended, and its process with it", self._name, exc_info=True)
            os._exit(1)

    def _end_with_raylet(self) -> None:
        pid = os.environ.get("RAY_RAYLET_PID")  # this is how Ray tells its workers
        if pid is None:
            return
        pidfd = ProcessId.elder(int(pid)).open()  # it has started this process

        def ended() -> None:
            os.write(2, f"engine {self._name!r}: the raylet of its node has died, and it ends\n".encode())
            os._exit(1)

        asyncio.get_running_loop().add_reader(pidfd, ended)

    async def _make_core(self, ring_name: str, executor: str, options: dict[str, Any]) -> EngineCore:
        executor_options: ExecutorOptions | None = options.pop("executor_options", None)
        scheduler: SchedulerConfig | None = options.pop("scheduler", None)
        made = await asyncio.to_thread(create_executor, executor, executor_options)  # which may load a model for minutes
        return await EngineCore.create(ring_name, made, None, scheduler, **options)

    # -- for everybody -------------------------------------------------------------------------------------------------

    async def where(self) -> bytes:
        """Returns :class:`Where` this engine is, encoded."""
        return msgspec.msgpack.encode(self._where)

    async def statistics(self) -> shmring.RingStatistics:
        """Returns those of its ring."""
        return self._ring.statistics()

    def _numbers(self) -> EngineNumbers:
        """What its node's metrics say of it."""
        statistics = self._ring.statistics()
        if self._core is not None:
            return EngineNumbers(self._core.metrics.collect(statistics), self._core.times.as_dict())
        counts = EngineMetrics().collect(statistics)
        return EngineNumbers({name: count for name, count in counts.items() if name.startswith("ring_")}, {})

    async def load(self) -> Load:
        """Returns what it has to do."""
        statistics = self._ring.statistics()
        return statistics.running + statistics.waiting, statistics.waiting, self._is_draining

    def _load(self, client: str) -> Load:
        """Returns what it has to do, to be sent along with a reply to a client."""
        injector = self._injectors.get(client)
        return (*((0, 0) if injector is None else injector.engine_load), self._is_draining)

    async def drain(self, timeout_s: float = 60.0) -> bool:
        """Ends what it has; clients of several engines send it nothing more. Then it can be killed.

        Returns:
            Whether all requests have ended in that time.
        """
        limit_s = timeout_of(timeout_s, "timeout_s")
        self._is_draining = True
        if self._core is not None:
            return await self._core.drain(limit_s)
        return await self._ring.drain(limit_s, claiming=True)

    async def call(self, method: str, arguments: tuple[Any, ...]) -> tuple[Any, Exception | None]:
        """Calls a control method, as a client of the ring does."""
        try:
            async with shmring.connect(self._where.ring, socket_dir=self._where.socket_dir, description="call") as client:
                return await client.call(method, *arguments), None
        except (ShmringError, TimeoutError, ValueError) as error:
            return None, error.with_traceback(None)

    # -- for clients on other nodes --------------------------------------------------------------------------------------

    async def hold(self) -> None:
        """A lifeline: its reference belongs to the client that has called this, and is never fulfilled."""
        await asyncio.Event().wait()

    async def enter(self, client: str, description: str, lifeline: list[Any]) -> tuple[Load, bytes]:
        """A client begins.

        Args:
            client: by which its calls name it.
            description: for the log.
            lifeline: the reference, in a list: as an argument of its own, Ray would wait for it before calling.

        Returns:
            What the engine has to do, and the token by which this client may connect.
        """
        token = self._tokens[client] = secrets.token_bytes(_TOKEN_NBYTES)
        if self._gateway is not None:
            self._gateway.admit(token)
        self._injectors[client] = self._ring.injector(description)
        self._start(self._watch(client, lifeline[0]))
        return self._load(client), token

    async def _watch(self, client: str, lifeline: Any) -> None:
        with contextlib.suppress(ray.exceptions.RayError, asyncio.CancelledError):  # whatever it is, the client has gone
            await lifeline
        await self.leave(client)

    async def leave(self, client: str) -> None:
        """A client has gone: its requests are aborted."""
        injector = self._injectors.pop(client, None)
        if injector is not None:
            injector.close()
            token = self._tokens.pop(client)
            if self._gateway is not None:
                self._gateway.dismiss(token)

    async def abort(self, client: str, number: int) -> None:
        """Aborts a request, also one that has not come yet.

        Args:
            client, number: of its call.
        """
        injected = self._far.get((client, number))
        if injected is not None:
            injected.abort()
            return
        self._given_up[client, number] = None
        if len(self._given_up) > _MAX_GIVEN_UP:
            self._given_up.popitem(last=False)

    async def request(self, frame: bytes, bundle: Bundle | None = None) -> Sent:
        """Carries a request out that is to have one reply; if it has more, there are two or more in what this returns.

        Args:
            frame: a :class:`~shmring.integrations.ray.wire.Call`.
            bundle: its payload, unless that is in the frame.
        """
        replies: list[Bundle] = []
        call, payload = to_call(frame, bundle)
        del frame, bundle  # or this frame would keep its memory in the object store
        until_s = _until_s(call.left_s)
        try:
            with self._injected(call, [payload]) as injected:
                del payload
                while len(replies) < 2 and (more := await _read(injected, until_s)):
                    replies += more
        except (ShmringError, TimeoutError) as error:
            return to_sent([], self._told(error), self._load(call.client))
        return to_sent(replies, None, self._load(call.client))

    async def stream(self, frame: bytes, bundle: Bundle | None = None) -> AsyncGenerator[Sent, None]:
        """Carries a request out. All replies that are there travel in one object: Ray moves some thousand objects a second.

        Args:
            frame, bundle: as of :meth:`request`.
        """
        call, payload = to_call(frame, bundle)
        del frame, bundle
        until_s = _until_s(call.left_s)
        try:
            with self._injected(call, [payload]) as injected:
                del payload
                while more := await _read(injected, until_s):
                    yield to_sent(more, None, self._load(call.client))
        except (ShmringError, TimeoutError) as error:
            yield to_sent([], self._told(error), self._load(call.client))

    @contextlib.contextmanager
    def _injected(self, call: Call, payload: list[Bundle]) -> Iterator[Injected]:
        """A request in the ring's line, until it is over. Takes its payload out of the list."""
        injector, known = self._injectors.get(call.client), (call.client, call.number)
        if injector is None:
            raise UnknownClientError(f"engine {self._name!r} has started again", engine=self._name)
        if self._given_up.pop(known, self) is None:
            raise shmring.AbortedError(
                f"request {call.number} was aborted before it came", request_id=call.told.get("request_id") or call.number
            )
        injected = self._far[known] = injector.inject(payload.pop(), **call.told)
        try:
            yield injected
        finally:
            del self._far[known]
            injected.abort()

    def _told(self, error: Exception) -> Exception:
        """Returns an error as its client gets it."""
        if isinstance(error, shmring.ClosedError):
            return EngineDeadError(str(error), engine=self._name)
        return error.with_traceback(None)


def _until_s(left_s: float | None) -> float | None:
    if left_s is None:
        return None
    return asyncio.get_running_loop().time() + min(max(0.0, left_s), _LONGEST_S)


async def _read(injected: Injected, until_s: float | None) -> list[Bundle]:
    """Reads replies until the deadline: only while it waits, since a generator may be left for long in between."""
    scope = asyncio.timeout_at(until_s)
    try:
        async with scope:
            return await injected.read()
    except TimeoutError:
        if scope.expired():
            raise TimeoutError("the request's deadline has passed in the engine") from None
        raise


class Engines:
    """Starts engines. :data:`EngineActor` is one with Ray's defaults.

    Args:
        ray_options: of the actors, as ``ray.remote`` takes them.
    """

    def __init__(self, ray_options: dict[str, Any]) -> None:
        self._ray_options = ray_options

    def options(self, **ray_options: Any) -> Engines:
        """Returns what starts engines with these options of a Ray actor (resources, ``max_restarts``, scheduling).

        Raises:
            ValueError: one of them is the engine's own: its name is the argument of :meth:`remote`, and no request is carried
                out twice unless its client says so (``retry``).
        """
        for option in ("name", "namespace", "max_task_retries"):
            if option in ray_options:
                raise ValueError(f"{option} can't be set: an engine is named by remote(), and clients say retry= themselves")
        return Engines(self._ray_options | ray_options)

    def remote(self, name: str, handler: Handler | None = None, *, executor: str | None = None, **options: Any) -> Any:
        """Starts an engine somewhere in the cluster. It goes on when this process has ended only if Ray is told so
        (``options(lifetime="detached")``).

        Args:
            name: what clients connect to, on every node; one engine in the cluster may have it.
            handler: a coroutine function, called with each claim (:meth:`shmring.Ring.run`).
            executor: instead of that: the name of an executor of shmring's engine, or ``module:Class``.
            options: with a handler, ``max_concurrency``; with an executor, ``executor_options``, ``scheduler`` and what
                ``EngineCore.create`` takes; and arguments of :func:`shmring.serve`, without ``token`` and ``tls``. Without
                ``listen``, it is the node's address and any port; with None, clients on other nodes use the object store.

        Returns:
            The actor's handle: the engine ends when the last one is gone, unless it is detached.

        Raises:
            TypeError: it has neither a handler nor an executor, or both.
            ValueError: the name can't be one, or another engine has it.
        """
        if (handler is None) == (executor is None):
            raise TypeError("an engine has a handler, or an executor")
        validate_name(name)
        validate_name(f"ray-{'0' * _NODE_CHARACTERS}-{name}")
        settings: dict[str, Any] = {"max_concurrency": _MAX_CALLS, "max_restarts": -1, **self._ray_options}
        actor = ray.remote(HostedEngine).options(name=actor_name(name), namespace=NAMESPACE, **settings)
        return actor.remote(name, handler, executor, options)


#: ``EngineActor.remote("vision", handler)`` starts an engine; Ray starts it again as often as its process dies.
EngineActor = Engines({})
