"""The numbers of all engines of a cluster, for programs and people. Prometheus gets them from each node (``metrics.py``)."""

from __future__ import annotations

import asyncio

import msgspec
import ray
from ray.exceptions import RayError

import shmring
from shmring.door import timeout_of
from shmring.integrations.ray.directory import (
    NAMESPACE,
    Where,
    actor_name,
    check_in_cluster,
    names_like,
    validate_pattern,
)

__all__ = ["EngineReport", "statistics"]


class EngineReport(msgspec.Struct, frozen=True):
    """An engine's numbers at one moment.

    Attributes:
        node: Ray's id of its node.
        pid: of its process.
        ring: those of its ring; far requests count there as near ones do.
    """

    node: str
    pid: int
    ring: shmring.RingStatistics


async def statistics(name: str = "*", *, timeout: float | None = 10.0) -> dict[str, EngineReport]:
    """Asks the engines of the cluster for their numbers, all at once.

    Args:
        name: of an engine, or a pattern, in which ``*`` stands for any characters.
        timeout: seconds for all of them.

    Returns:
        Their numbers, by name. An engine that has not answered in time, or that is being started, is left out.

    Raises:
        LocalProtocolError: this process is not connected to a Ray cluster.
        ValueError: this is no name.
    """
    timeout = timeout_of(timeout)
    check_in_cluster()
    names = await names_like([validate_pattern(name)])
    tasks = {each: asyncio.create_task(_ask(each)) for each in names}
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=timeout)
    finally:
        for task in tasks.values():
            task.cancel()
    answers = await asyncio.gather(*tasks.values(), return_exceptions=True)
    return {each: answer for each, answer in zip(tasks, answers, strict=True) if isinstance(answer, EngineReport)}


async def _ask(name: str) -> EngineReport | None:
    try:
        actor = await asyncio.to_thread(ray.get_actor, actor_name(name), NAMESPACE)
        where, ring = await asyncio.gather(actor.where.remote(), actor.statistics.remote())
    except (RayError, ValueError):  # it has gone
        return None
    found = msgspec.msgpack.decode(where, type=Where)
    return EngineReport(found.node, found.process.pid, ring)
