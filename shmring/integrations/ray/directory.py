"""Where engines are: names in a Ray cluster, and what an engine says of itself.

An engine is a named actor, and its name is known on every node as soon as the actor is created. While Ray starts it, or starts
it again elsewhere, looking it up waits.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError

from shmring.errors import EngineDeadError, LocalProtocolError

__all__ = ["NAMESPACE", "Where", "actor_name", "look_up", "node_id", "store_nbytes"]

#: Of the names of engines in a Ray cluster.
NAMESPACE = "shmring"

_LOOK_S = 0.1  # between two looks for an engine that is not there: starting an actor takes seconds


class Where(msgspec.Struct, frozen=True):
    """What an engine says to who looks it up.

    Attributes:
        node: Ray's id of its node.
        ring: the name of its ring there.
        socket_dir: where that ring's socket lives.
        pid: of its process.
        max_inflight, max_tensors, max_payload_nbytes, max_values: bounds of its ring, for requests.
        store_nbytes: the size of Ray's object store on its node.
    """

    node: str
    ring: str
    socket_dir: str
    pid: int
    max_inflight: int
    max_tensors: int
    max_payload_nbytes: int
    max_values: int
    store_nbytes: int


def actor_name(name: str) -> str:
    """Returns what the actor of an engine is called."""
    return f"shmring:{name}"


def node_id() -> str:
    """Returns Ray's id of the node of this process."""
    return str(ray.get_runtime_context().get_node_id())


def store_nbytes(node: str) -> int:
    """Returns the size of a node's object store. Blocks: it asks the cluster's head."""
    [resources] = [each["Resources"] for each in ray.nodes() if each["NodeID"] == node]
    return int(resources.get("object_store_memory", 0))


async def look_up(name: str, timeout_s: float) -> tuple[Any, Where]:
    """Finds an engine, and waits while it starts.

    Returns:
        Its actor, and what that says of itself.

    Raises:
        EngineDeadError: no engine of that name answers in time; the text says what was seen last.
        LocalProtocolError: this process is not connected to a Ray cluster.
    """
    if not ray.is_initialized():
        raise LocalProtocolError("this process is not connected to a Ray cluster; call ray.init(address=...) first")
    last = "no actor has it"
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
                await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        raise EngineDeadError(
            f"no engine {name!r} has answered in this Ray cluster within {timeout_s:g} s: {last}", engine=name
        ) from None
