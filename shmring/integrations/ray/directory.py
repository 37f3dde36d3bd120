"""Where engines are: names in a Ray cluster, and what an engine says of itself.

An engine is a named actor, and its name is known on every node as soon as the actor is created. While Ray starts it, or starts
it again elsewhere, looking it up waits. A pattern stands for all engines whose names are like it, also for those to come.
"""

from __future__ import annotations

import asyncio
import fnmatch
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError

from shmring.door import validate_name
from shmring.errors import EngineDeadError, LocalProtocolError
from shmring.transport.liveness import ProcessId

__all__ = [
    "NAMESPACE",
    "Load",
    "Where",
    "actor_name",
    "check_in_cluster",
    "is_like",
    "is_pattern",
    "look_up",
    "membership",
    "names_like",
    "node_id",
    "store_nbytes",
    "validate_pattern",
]

#: Of the names of engines in a Ray cluster.
NAMESPACE = "shmring"

_LOOK_S = 0.1  # between two looks for an engine that is not there: starting an actor takes seconds
_LONGEST_LOOK_S = 1.0  # if it has not been there for long

_PREFIX = "shmring:"  # of the names of actors

#: What an engine has to do: requests of all clients, those of them that it has not claimed, and whether it drains.
Load = tuple[int, int, bool]


class Where(msgspec.Struct, frozen=True):
    """What an engine says to who looks it up.

    Attributes:
        node: Ray's id of its node.
        ring: the name of its ring there.
        socket_dir: where that ring's socket lives.
        process: where it runs.
        max_inflight, max_tensors, max_payload_nbytes, max_values: bounds of its ring, for requests.
        store_nbytes: the size of Ray's object store on its node.
        address: where clients on other nodes connect to; empty: nowhere. Who enters is told a token for it.
    """

    node: str
    ring: str
    socket_dir: str
    process: ProcessId
    max_inflight: int
    max_tensors: int
    max_payload_nbytes: int
    max_values: int
    store_nbytes: int
    address: str = ""


def actor_name(name: str) -> str:
    """Returns what the actor of an engine is called."""
    return _PREFIX + name


def is_pattern(name: str) -> bool:
    """Whether this stands for several engines: there is a ``*`` in it, which stands for any characters."""
    return "*" in name


def is_like(name: str, pattern: str) -> bool:
    """Whether an engine's name is like a pattern, or is that name."""
    return fnmatch.fnmatchcase(name, pattern)


def validate_pattern(name: str) -> str:
    """Returns an engine's name, or a pattern of such names, else raises ``ValueError``."""
    if not isinstance(name, str):
        raise TypeError(f"an engine's name is a str, not {type(name).__name__}")
    validate_name(name.replace("*", "x"))
    return name


def check_in_cluster() -> None:
    """Raises :class:`LocalProtocolError` unless this process is connected to a Ray cluster."""
    if not ray.is_initialized():
        raise LocalProtocolError("this process is not connected to a Ray cluster; call ray.init(address=...) first")


async def names_like(patterns: list[str]) -> list[str]:
    """Returns the names of all engines in the cluster that are like one of these patterns, also of those that are starting."""
    actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
    names = [
        actor["name"].removeprefix(_PREFIX)
        for actor in actors
        if actor["namespace"] == NAMESPACE and actor["name"].startswith(_PREFIX)
    ]
    return sorted(name for name in names if any(is_like(name, pattern) for pattern in patterns))


def node_id() -> str:
    """Returns Ray's id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def membership() -> tuple[str, str] | None:
    """Returns what differs each time that this process joins a cluster; None: it is in none.

    Ray's calls join a cluster by themselves where a process is in none, and the handles of another cluster mean nothing there.
    """
    if not ray.is_initialized():
        return None
    return node_id(), str(ray.get_runtime_context().get_job_id())


def store_nbytes(node: str) -> int:
    """Returns the size of a node's object store. Blocks: it asks the cluster's head."""
    resources = next((each["Resources"] for each in ray.nodes() if each["NodeID"] == node), None)
    return int((resources or {}).get("object_store_memory", 0))


async def look_up(name: str, timeout_s: float | None) -> tuple[Any, Where]:
    """Finds an engine, and waits while it starts.

    Args:
        name: the engine's.
        timeout_s: how long; None: as long as it takes.

    Returns:
        Its actor, and what that says of itself.

    Raises:
        EngineDeadError: no engine of that name answers in time; the text says what was seen last.
        LocalProtocolError: this process is not connected to a Ray cluster.
    """
    check_in_cluster()
    last = "no actor has it"
    since_s = asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    actor = await asyncio.to_thread(ray.get_actor, actor_name(name), NAMESPACE)
                    return actor, msgspec.msgpack.decode(await actor.where.remote(), type=Where)
                except ValueError:  # there is no actor of that name
                    last = "no actor has it"
                except RayActorError as error:
                    last = str(error)
                except RayError as error:
                    raise EngineDeadError(f"engine {name!r} can't be looked up: {error}", engine=name) from error
                waited_s = asyncio.get_running_loop().time() - since_s
                await asyncio.sleep(min(max(_LOOK_S, waited_s / 10), _LONGEST_LOOK_S))
    except TimeoutError:
        raise EngineDeadError(
            f"no engine {name!r} has answered in this Ray cluster within {timeout_s or 0:g} s: {last}", engine=name
        ) from None
