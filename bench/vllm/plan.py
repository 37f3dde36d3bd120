"""What ``bench vllm`` measures: ways, servers, and the requests that they get."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Literal

__all__ = [
    "KINDS",
    "LARGE",
    "PARALLEL",
    "QUICK",
    "SIDES",
    "WAYS",
    "Case",
    "Fleet",
    "Kind",
    "Way",
    "fleets",
    "full_cases",
    "pixels_mb",
]

#: How a request names its picture. ``jpeg``: as a file that the API server's cache knows; ``uuid``: by its name alone,
#: which the cache knows; ``new``: as a file that nobody has seen, which has to be prepared.
Kind = Literal["jpeg", "uuid", "new"]
KINDS: tuple[Kind, ...] = ("jpeg", "uuid", "new")

#: Of pictures, in pixels: 1, 10.8 and 43.4 MB of bfloat16 when prepared.
SIDES = (416, 1344, 2688)

_REQUESTS: Mapping[Kind, int] = {"jpeg": 48, "uuid": 160, "new": 24}  # some seconds at 43 MB, eight at a time


@dataclasses.dataclass(frozen=True)
class Way:
    """How tensors get to the engine core: what vLLM is started with."""

    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Sequence[str] = ()


#: The first is what the others are compared with.
WAYS = {
    "shmring": Way({"SHMRING_VLLM": "1"}),
    "inline": Way(),
    "torch_shm": Way(options=("--mm-tensor-ipc", "torch_shm")),
}


@dataclasses.dataclass(frozen=True)
class Fleet:
    """Servers that are alike but for the way."""

    side: int
    api_servers: int
    engines: int = 1

    @property
    def title(self) -> str:
        """It in words."""
        engines = f", {self.engines} engine cores" if self.engines > 1 else ""
        return f"{pixels_mb(self.side):.0f} MB, {self.api_servers} API server{'s' * (self.api_servers > 1)}{engines}"

    def ways(self, chosen: Sequence[str]) -> list[str]:
        """Which of the chosen ways can serve so: torch_shm has one engine core only."""
        return [way for way in chosen if way != "torch_shm" or self.engines == 1]


@dataclasses.dataclass(frozen=True)
class Case:
    """Requests of one kind to a fleet.

    Attributes:
        fleet: which.
        kind: how pictures are named.
        concurrency: requests at a time.
    """

    fleet: Fleet
    kind: Kind
    concurrency: int

    @property
    def title(self) -> str:
        """It in words."""
        return f"{self.kind}, {self.concurrency} at a time"

    @property
    def requests(self) -> int:
        """Of a repetition."""
        return _REQUESTS[self.kind] // (1 if self.concurrency > 1 else 2)


#: The servers, and those with several engine cores, that most targets speak about.
LARGE, PARALLEL = Fleet(SIDES[-1], 2), Fleet(SIDES[-1], 2, engines=2)
QUICK = [
    Case(LARGE, "jpeg", 8),
    Case(LARGE, "uuid", 8),
    Case(LARGE, "uuid", 1),
    Case(LARGE, "new", 8),
    Case(PARALLEL, "jpeg", 8),
]


def full_cases() -> list[Case]:
    """All of them, by fleet."""
    plain = [Fleet(side, api_servers) for side, api_servers in itertools.product(SIDES, (1, 2))]
    cases = [Case(*parts) for parts in itertools.product(plain, KINDS, (1, 8))]
    return [*cases, Case(PARALLEL, "jpeg", 8), Case(PARALLEL, "uuid", 8)]


def fleets(cases: Sequence[Case]) -> dict[Fleet, list[Case]]:
    """Returns the cases of each fleet."""
    return {fleet: [case for case in cases if case.fleet == fleet] for fleet in dict.fromkeys(case.fleet for case in cases)}


def pixels_mb(side: int) -> float:
    """What a picture takes when it is prepared."""
    return side * side * 3 * 2 / 1e6
