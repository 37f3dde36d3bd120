"""``bench request --scaling``: whether a request costs more with many clients connected, or with many slots in use.

Method: that of ``bench request`` (:mod:`bench.request.plan`), with one process of clients, and variants of shmring's adapter
in place of peers, all of the same slab, configuration and total of requests in flight. What is compared is CPU, since that
is what a book that scans, or a loop that polls, would spend more of.

- *Clients*: the process holds 32 connections, of which one asks, or all in turn. With all, requests that one connection
  would have carried in one write and one read take a write and a read each; that difference is the sockets', not the books'.
- *Slots*: before it asks, the client takes twice as many slots as are to be in use and gives every second one back, so that
  the free space lies in pieces between them. It submits the others, and the engine claims and keeps them: they are in use
  in both ends' books, and their views are alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import torch

import shmring
from bench.coverage import Coverage, Planned
from bench.machine import Machine
from bench.request.peers.peer import Ask, Peer
from bench.request.peers.shmring_request import RING, answer, request
from bench.request.plan import measured, started
from bench.request.processes import Measurement
from bench.request.questions import ITEM_NBYTES, Answer, Cell, Desk, Header
from bench.results import Spread, format_nbytes
from shmring.client import Connecting

__all__ = [
    "MAX_SCALING_NBYTES",
    "ScalingPlan",
    "ScalingResult",
    "ScalingResults",
    "planned_scaling",
    "run_scaling",
    "scaling_title",
    "scaling_steps",
]

#: Of a question's tensor: so that slots are of two blocks at most.
MAX_SCALING_NBYTES = 8 * 1000

_SLAB_NBYTES = 256 << 20  # 20,000 slots of two blocks take 164 MB; the rest is for replies and for what is asked
_LEASE_NBYTES = 4 << 20  # 32 clients have an eighth of a gigabyte together
_SLOTS_IN_A_REQUEST = 100  # so that 10,000 slots are 100 requests, well within max_inflight

_CLIENTS = 32
_SLOTS = 10_000
_FEW_SLOTS = 10


class _Variant(Peer):
    """shmring, with everything as in the other variants; see the head of this file."""

    async def serve(self, cell: Cell, shared: Any, desk: Desk, listening: Callable[[], None]) -> None:
        kept: list[shmring.Claim] = []
        changed = asyncio.Condition()

        async def wait_until_kept(requests: int) -> None:
            async with changed:
                await changed.wait_for(lambda: len(kept) == requests)

        calls = {"wait_until_kept": wait_until_kept}
        async with shmring.serve(RING, socket_dir=cell.directory, slab_nbytes=_SLAB_NBYTES, calls=calls) as ring:
            listening()
            try:
                async for claim in ring:
                    if "kept" in claim.payload:
                        kept.append(claim)
                        async with changed:
                            changed.notify_all()
                        continue
                    with claim:
                        await claim.reply(answer(claim.payload, desk))
            finally:
                for claim in kept:
                    claim.done()


class ConnectedClients(_Variant):
    """So many connections, of which the first few ask, in turn."""

    def __init__(self, connections: int, asking: int) -> None:
        self.name = f"clients-{connections}-{asking}"
        who = "it asks" if connections == 1 else "all ask" if asking == connections else "one asks"
        self.title = f"{connections} client{'s' * (connections > 1)} connected, {who}"
        self._connections = connections
        self._asking = asking

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(_connect(cell)) for _ in range(self._connections)]
            turns = itertools.cycle(clients[: self._asking])

            async def ask(header: Header, tensor: torch.Tensor) -> Answer:
                return await request(next(turns), header, tensor)

            yield ask


class SlotsInUse(_Variant):
    """One connection, with so many slots in the engine's hands."""

    def __init__(self, slots: int) -> None:
        self.name = f"slots-{slots}"
        self.title = f"{slots:,} slots in use"
        self._slots = slots

    @contextlib.asynccontextmanager
    async def connect(self, cell: Cell, shared: Any, client: int) -> AsyncIterator[Ask]:
        async with _connect(cell) as connected:
            submissions = await self._submit(connected, cell.nbytes)
            await connected.call("wait_until_kept", len(submissions))

            async def ask(header: Header, tensor: torch.Tensor) -> Answer:
                return await request(connected, header, tensor)

            yield ask
            for submission in submissions:
                submission.abort()

    async def _submit(self, client: shmring.RingClient, nbytes: int) -> list[shmring.Submission]:
        taken = [await client.slot(nbytes) for _ in range(2 * self._slots)]
        for slot in taken[1::2]:
            slot.close()
        in_use = taken[::2]
        submissions = []
        for start in range(0, len(in_use), _SLOTS_IN_A_REQUEST):
            some = in_use[start : start + _SLOTS_IN_A_REQUEST]
            tensors = [slot.tensor((nbytes // ITEM_NBYTES,), torch.float32) for slot in some]
            submissions.append(await client.submit({"kept": tensors}))
        for slot in in_use:
            slot.close()
        return submissions


def _connect(cell: Cell) -> Connecting:
    return shmring.connect(RING, socket_dir=cell.directory, lease_nbytes=_LEASE_NBYTES)


#: Groups of variants; the first of each is what the others of the group are compared with.
_VARIANTS: tuple[tuple[Peer, ...], ...] = (
    (ConnectedClients(1, 1), ConnectedClients(_CLIENTS, 1), ConnectedClients(_CLIENTS, _CLIENTS)),
    (SlotsInUse(_FEW_SLOTS), SlotsInUse(_SLOTS)),
)


class ScalingPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        sizes: of a question's tensor in bytes, multiples of 4, up to :data:`MAX_SCALING_NBYTES`.
        in_flight: requests of all connections together.
        reply_nbytes: size of a reply's tensor, a multiple of 4.
        repetitions: of each variant.
        timed_s, warm_up_s: of each repetition.
        limit_s: after which a repetition has failed.
    """

    sizes: Sequence[int]
    in_flight: Sequence[int]
    reply_nbytes: int
    repetitions: int
    timed_s: float
    warm_up_s: float
    limit_s: float = 120.0


class ScalingResult(msgspec.Struct, frozen=True):
    """A variant in a cell.

    Attributes:
        engine_us, client_us: microseconds of CPU for each request, at each end.
        engine_ratio, client_ratio, ratio: of the ends' and of both together to those of the group's first variant, in the
            same repetition.
    """

    variant: str
    title: str
    baseline: str
    nbytes: int
    in_flight: int
    requests: int
    requests_per_s: Spread
    engine_us: Spread
    client_us: Spread
    engine_ratio: Spread
    client_ratio: Spread
    ratio: Spread


class ScalingResults(msgspec.Struct, frozen=True):
    """A run."""

    machine: Machine
    reply_nbytes: int
    repetitions: int
    timed_s: float
    results: list[ScalingResult]
    coverage: Coverage | None = None


def run_scaling(plan: ScalingPlan, progress: Callable[[str], None]) -> ScalingResults:
    """Measures what a plan says. When this returns or raises, no process and no file of it is left.

    Args:
        plan: what to measure.
        progress: called with a line before each step; :func:`scaling_steps` says how many there are.

    Raises:
        BenchError: a request or a reply was not what was sent, or a process died or took too long.
    """
    variants = [*itertools.chain(*_VARIANTS)]
    results: list[ScalingResult] = []
    with tempfile.TemporaryDirectory(prefix="shmring-bench-") as directory:
        progress(f"starting {2 * len(variants)} processes")
        with started(variants, 1) as groups:
            for nbytes, in_flight in itertools.product(plan.sizes, plan.in_flight):
                cell = Cell(
                    nbytes=nbytes,
                    reply_nbytes=plan.reply_nbytes,
                    in_flight=in_flight,
                    clients=1,
                    warm_up_s=plan.warm_up_s,
                    timed_s=plan.timed_s,
                    limit_s=plan.limit_s,
                    directory=directory,
                )
                measurements = measured(groups, cell, plan.repetitions, progress)
                for first, *others in _VARIANTS:
                    results += [_result(cell, peer, first, measurements) for peer in (first, *others)]
    there = {(scaling_title(result.nbytes, result.in_flight), result.variant): plan.repetitions for result in results}
    coverage = Coverage.of(planned_scaling(plan), there)
    return ScalingResults(Machine.here(), plan.reply_nbytes, plan.repetitions, plan.timed_s, results, coverage)


def planned_scaling(plan: ScalingPlan) -> list[Planned]:
    """Returns the cases of a plan."""
    return [
        Planned(scaling_title(*case), [peer.name for peer in itertools.chain(*_VARIANTS)], plan.repetitions)
        for case in itertools.product(plan.sizes, plan.in_flight)
    ]


def scaling_title(nbytes: int, in_flight: int) -> str:
    """Returns a case in words."""
    return f"{format_nbytes(nbytes)}, {in_flight} in flight"


def scaling_steps(plan: ScalingPlan) -> int:
    """Returns how often :func:`run_scaling` reports progress."""
    return 1 + len(plan.sizes) * len(plan.in_flight) * plan.repetitions * sum(map(len, _VARIANTS))


def _result(cell: Cell, peer: Peer, first: Peer, measurements: dict[Peer, list[Measurement]]) -> ScalingResult:
    ours, theirs = measurements[peer], measurements[first]
    pairs = list(zip(ours, theirs, strict=True))
    return ScalingResult(
        variant=peer.name,
        title=peer.title,
        baseline=first.name,
        nbytes=cell.nbytes,
        in_flight=cell.in_flight,
        requests=sum(measurement.requests for measurement in ours),
        requests_per_s=Spread.of([measurement.requests_per_s for measurement in ours]),
        engine_us=Spread.of([measurement.engine_us for measurement in ours]),
        client_us=Spread.of([measurement.client_us for measurement in ours]),
        engine_ratio=Spread.of([measurement.engine_us / base.engine_us for measurement, base in pairs]),
        client_ratio=Spread.of([measurement.client_us / base.client_us for measurement, base in pairs]),
        ratio=Spread.of(
            [(measurement.engine_us + measurement.client_us) / (base.engine_us + base.client_us) for measurement, base in pairs]
        ),
    )
