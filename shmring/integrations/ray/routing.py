"""Which of several engines of a cluster a request goes to: as of several engines of one machine
(:mod:`shmring.client.routing`), and the near ones first.

A far request costs both nodes more than a near one. So a near engine is chosen, unless it has much more to do than another one:
``near_bound`` requests more. Among several near ones, and among all if no near one will do, the load decides.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

from shmring.client.routing import EngineLoad, Router

__all__ = ["ROUTES", "ClusterRouter", "Route"]

#: How a request's engine is chosen if neither a key, an engine nor a slot says so.
Route = Literal["nearest", "least_loaded", "round_robin"]
ROUTES: tuple[Route, ...] = get_args(Route)


class ClusterRouter:
    """Chooses engines.

    Args:
        names: of all engines.
        route: see :data:`Route`.
        near_bound: how many requests a near engine may have more than the least loaded one.
        first: as of :class:`~shmring.client.routing.Router`.
    """

    def __init__(self, names: Sequence[str], route: Route, near_bound: int, first: int = 0) -> None:
        self._is_nearest = route == "nearest"
        self._near_bound = near_bound
        self._router = Router(names, "least_loaded" if route == "nearest" else route, first)

    def choose(self, loads: Mapping[str, EngineLoad], near: Collection[str]) -> str:
        """Returns the engine for a request that may go to any.

        Args:
            loads: of the engines that are attached; of one at least.
            near: those of them that are on this node.
        """
        return self._router.choose((self._near_ones(loads, near) if self._is_nearest else {}) or loads)

    def _near_ones(self, loads: Mapping[str, EngineLoad], near: Collection[str]) -> dict[str, EngineLoad]:
        """The near engines that do not have too much to do, with their loads."""
        responding = {name: load for name, load in loads.items() if load.responds}
        most = min((load.in_flight for load in responding.values()), default=0) + self._near_bound
        return {name: load for name, load in responding.items() if name in near and load.in_flight <= most}

    def choose_for(self, key: str | bytes, names: Collection[str]) -> str:
        """Returns the engine that a key belongs to, which is the same on every node."""
        return self._router.choose_for(key, names)
