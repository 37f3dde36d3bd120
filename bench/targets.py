"""The targets of the project as data, and whether a transport run meets them.

A target says what is compared, where, and the threshold. Ratios are taken within each repetition and their median counts;
where a target spans several sizes, the worst of them does. What a run did not measure is neither met nor missed: a verdict
says so, and what other modes measure (requests, serving, the allocator, soaking) stands in the list with their name.

Throughput is that of one producer with 16 messages in flight, latency that with one, both of float32: the base of the sweeps in
:mod:`bench.cases`.
"""

from __future__ import annotations

import abc
import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from bench.cases import Case
from bench.peers import PEERS
from bench.records import Result, Results, Side
from bench.results import Verdict, format_nbytes

__all__ = ["TARGETS", "Elsewhere", "Target", "command_of", "evaluate", "missed"]

_KB, _MB = 1 << 10, 1 << 20
_SMALL = (4 * _KB, 64 * _KB)
_LARGE = (1 * _MB, 8 * _MB, 64 * _MB)
_UP_TO_1_MB = (4 * _KB, 64 * _KB, 1 * _MB)

_SHOWN_PLACES = 4  # of a target that spans many

_COPY, _IN_PLACE, _BUSY_POLL = "shmring", "shmring-in-place", "shmring-busy-poll"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(abc.ABC):
    """Something to reach.

    Attributes:
        what: is compared, for people.
        at: where, for people.
        limit: the threshold.
        unit: of it.
        at_least: whether more is better.
    """

    what: str
    at: str
    limit: float
    unit: str
    at_least: bool

    @abc.abstractmethod
    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        """Yields each place's name and number; None where it was not measured."""

    @property
    def asked(self) -> str:
        """The threshold in words."""
        return f"{'>=' if self.at_least else '<='} {self.limit:g} {self.unit}"

    def judge(self, results: Results) -> Verdict:
        """Returns whether results meet it."""
        places = list(self.places(results))
        measured = [number for _, number in places if number is not None]
        if not measured:
            return Verdict(self.what, self.at, self.asked, detail="not part of this run")
        worst = min(measured) if self.at_least else max(measured)
        met = worst >= self.limit if self.at_least else worst <= self.limit
        return Verdict(self.what, self.at, self.asked, f"{worst:.3g} {self.unit}", met, self._detail(places))

    def _detail(self, places: list[tuple[str, float | None]]) -> str:
        """The places in words; the worst of them, if there are many."""
        rest = ""
        if len(places) > _SHOWN_PLACES:
            known = [(name, number) for name, number in places if number is not None]
            places = [*sorted(known, key=lambda place: place[1], reverse=not self.at_least)[:_SHOWN_PLACES]]
            rest = f"; the worst of {len(known)}"
        return ", ".join(f"{name}: {'not measured' if number is None else f'{number:.3g}'}" for name, number in places) + rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Faster(Target):
    """Messages a second of one of ours, as a multiple of a peer's."""

    ours: str
    peer: str
    sizes: Sequence[int]

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        for nbytes in self.sizes:
            ours, theirs = _base(results, self.ours, nbytes), _base(results, self.peer, nbytes)
            yield format_nbytes(nbytes), _median_ratio(ours.runs, theirs.runs) if ours and theirs else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _OfMemcpy(Target):
    """Messages a second of one of ours, as a part of the copies a second into memory that is in no cache."""

    sizes: Sequence[int]

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        limits = {limit.nbytes: limit.copies_cold_runs for limit in results.limits}
        for nbytes in self.sizes:
            ours = _base(results, _COPY, nbytes)
            yield format_nbytes(nbytes), _median_ratio(ours.runs, limits[nbytes]) if ours and nbytes in limits else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sooner(Target):
    """The least one-way latency of any event-driven peer, as a multiple of ours; of those that copy, where ours does.

    Attributes:
        event_driven: else it is the least of those that spin.
    """

    ours: str
    sizes: Sequence[int] = _UP_TO_1_MB
    event_driven: bool = True

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        in_place = PEERS[self.ours].in_place
        for nbytes in self.sizes:
            ours = _base(results, self.ours, nbytes, window=1)
            others = [
                result
                for name, peer in PEERS.items()
                if not name.startswith(_COPY) and peer.event_driven is self.event_driven and (in_place or not peer.in_place)
                if (result := _base(results, name, nbytes, window=1)) is not None
            ]
            if ours is None or not others:
                yield format_nbytes(nbytes), None
                continue
            nearest = min(others, key=lambda result: result.latency_p50_us.median)
            ratio = nearest.latency_p50_us.median / ours.latency_p50_us.median
            yield f"{format_nbytes(nbytes)} ({nearest.peer})", ratio


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Latency(Target):
    """One-way latency of one of ours, in microseconds; or as a multiple of what it is at another size."""

    ours: str
    sizes: Sequence[int]
    relative_to: int | None = None

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        base = None if self.relative_to is None else _base(results, self.ours, self.relative_to, window=1)
        for nbytes in self.sizes:
            found = _base(results, self.ours, nbytes, window=1)
            if found is None or (self.relative_to is not None and base is None):
                yield format_nbytes(nbytes), None
            else:
                yield format_nbytes(nbytes), found.latency_p50_us.median / (base.latency_p50_us.median if base else 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Sides(Target):
    """A number of both sides of ours, in every case of a kind."""

    peers: Sequence[str]
    chosen: Callable[[Case], bool]
    number: Callable[[Side, Results], float | None]

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        for result in results.results:
            if result.peer in self.peers and self.chosen(result.case):
                where = f"{_copies(result.peer)}, {result.case.title}"
                for side, name in ((result.producer, "producer"), (result.consumer, "consumer")):
                    if (number := self.number(side, results)) is not None:
                        yield f"{name} of {where}", number


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scaling(Target):
    """What several producers move together, as a multiple of what one moves, at the same size and window."""

    producers: int

    def places(self, results: Results) -> Iterator[tuple[str, float | None]]:
        for result in results.results:
            if result.peer == _COPY and result.case.producers == self.producers:
                one = results.find(_COPY, msgspec.structs.replace(result.case, producers=1))
                if one is not None:
                    yield format_nbytes(result.case.nbytes), _median_ratio(result.runs, one.runs)


@dataclasses.dataclass(frozen=True)
class Elsewhere:
    """A target that another mode measures.

    Attributes:
        mode: which; the value of ``mode`` in its JSON. ``a-b`` is what ``python -m bench a --b`` measures.
    """

    mode: str
    what: str
    at: str
    asked: str


def command_of(mode: str) -> str:
    """Returns the command line that measures what a mode's JSON holds."""
    if mode == "soak":
        return "python -m tests.soak"
    return f"python -m bench {mode.replace('-', ' --')}"


def _base(results: Results, peer: str, nbytes: int, window: int = 16) -> Result | None:
    return results.find(peer, Case(nbytes, window=window).bounded())


def _median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The median over the repetitions that both were measured in."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=False))


def _copies(peer: str) -> str:
    return "in place" if peer == _IN_PLACE else "copy"


def _without_copies(case: Case) -> bool:
    return not case.copies_out and case.producers == 1 and case.window > 1


def _at_64_mb(case: Case) -> bool:
    return case.nbytes == 64 * _MB and not case.copies_out and case.producers == 1


def _lag(side: Side, results: Results) -> float | None:
    return None if side.lag_max_on_core_ms is None else side.lag_max_on_core_ms.median


def _cpu(side: Side, results: Results) -> float | None:
    return side.cpu_us_per_message.median


def _above_torch(side: Side, results: Results) -> float | None:
    return (side.resident_nbytes - results.torch_resident_nbytes) / _MB


def _idling(side: Side, results: Results) -> float | None:
    return None if side.idle_percent is None else side.idle_percent.median


def _connecting(side: Side, results: Results) -> float | None:
    return None if side.connect_ms is None else side.connect_ms.median


def _faster(at: str, sizes: Sequence[int], limits: Mapping[str, float], ours: str = _COPY) -> Iterator[Target]:
    """Yields a target for each peer."""
    for peer, limit in limits.items():
        what = f"{PEERS[ours].title}: messages/s of {PEERS[peer].title}" if peer in PEERS else f"{ours}: messages/s of {peer}"
        yield _Faster(what=what, at=at, limit=limit, unit="x", at_least=True, ours=ours, peer=peer, sizes=sizes)


#: In the order of the table.
TARGETS: tuple[Target | Elsewhere, ...] = (
    *_faster("4 KB, 64 KB", _SMALL, {"iceoryx2": 1.5, "pyzmq": 3.0, "torch-queue": 30.0}),
    *_faster("1 MB to 64 MB", _LARGE, {"iceoryx2": 0.95, "pyzmq": 3.0}),
    _OfMemcpy(what="of the memcpy limit, cold", at="1 MB", limit=0.65, unit="x", at_least=True, sizes=_LARGE[:1]),
    _OfMemcpy(what="of the memcpy limit, cold", at="8 MB, 64 MB", limit=0.95, unit="x", at_least=True, sizes=_LARGE[1:]),
    *_faster("8 MB", _LARGE[1:2], {"torch-queue": 8.0}),
    *_faster("1 MB to 64 MB", _LARGE, {"spinning-arena": 1.2}),
    *_faster("1 MB, 8 MB", _LARGE[:2], {"iceoryx2-loaned": 1.3}, ours=_IN_PLACE),
    _Sooner(
        what="one copy: p50 of the nearest event-driven peer that copies", at="4 KB to 1 MB", limit=1.0, unit="x",
        at_least=True, ours=_COPY,
    ),
    _Sooner(
        what="in place: p50 of the nearest event-driven peer", at="4 KB to 1 MB", limit=1.0, unit="x", at_least=True,
        ours=_IN_PLACE,
    ),
    _Latency(
        what="in place: p50 at 8 MB over that at 4 KB", at="8 MB", limit=1.3, unit="x", at_least=False, ours=_IN_PLACE,
        sizes=_LARGE[1:2], relative_to=4 * _KB,
    ),
    _Latency(
        what="busy polling: p50", at="4 KB, 64 KB", limit=25.0, unit="us", at_least=False, ours=_BUSY_POLL, sizes=_SMALL,
    ),
    _Sooner(
        what="busy polling: p50 of the nearest peer that spins", at="4 KB, 64 KB", limit=1.0, unit="x", at_least=True,
        ours=_BUSY_POLL, sizes=_SMALL, event_driven=False,
    ),
    _Sides(
        what="busy polling: CPU of an end with nothing to do", at="each side", limit=1.0, unit="% of a core", at_least=False,
        peers=(_BUSY_POLL,), chosen=lambda case: True, number=_idling,
    ),
    _Sides(
        what="CPU time per message, in place", at="each side, any size", limit=20.0, unit="us", at_least=False,
        peers=(_IN_PLACE,), chosen=_without_copies, number=_cpu,
    ),
    _Scaling(
        what="8 producers together, of one producer's messages/s", at="any size", limit=0.9, unit="x", at_least=True,
        producers=8,
    ),
    Elsewhere("request-scaling", "CPU time per message with 32 clients, of that with 1", "small messages", "<= 1.2 x"),
    Elsewhere("request-scaling", "CPU time per message with 10,000 slots used, of that with 10", "small messages", "<= 1.2 x"),
    _Sides(
        what="longest stall of an event loop, waits for a core aside", at="each side, 64 MB", limit=5.0, unit="ms",
        at_least=False, peers=(_COPY, _IN_PLACE), chosen=_at_64_mb, number=_lag,
    ),
    _Sides(
        what="resident memory above a process that only imported torch, the slab aside", at="each side, any size", limit=64.0,
        unit="MB", at_least=False, peers=(_COPY, _IN_PLACE), chosen=lambda case: True, number=_above_torch,
    ),
    _Sides(
        what="connecting, once the slab exists", at="any size", limit=5.0, unit="ms", at_least=False, peers=(_COPY, _IN_PLACE),
        chosen=lambda case: case.producers == 1, number=_connecting,
    ),
    Elsewhere("request", "request/reply, 16 in flight, one client", "64 KB", ">= 20,000/s"),
    Elsewhere("request", "request/reply, 16 in flight: requests/s of pyzmq", "64 KB", ">= 5 x"),
    Elsewhere("soak", "resident memory over the run", "both ends", "flat"),
    Elsewhere("allocator", "fill at first failure, log-uniform trace", "mean, least", ">= 90 %, >= 75 %"),
    Elsewhere("allocator", "time per operation", "10,000 live slots", "<= 5 us"),
    Elsewhere("serve", "slab path: requests/s of the inline path", "preset of PR 32104", ">= 1.3 x"),
    Elsewhere("gpu", "pinned slot: GB/s of pin_memory() memory", "8 MB and above", ">= 0.95 x"),
    Elsewhere("gpu", "pinned slot: GB/s of cloning, then copying", "64 MB", ">= 3 x"),
    Elsewhere("gpu", "device slab: p50 of a hand-over", "any size", "<= 150 us"),
    Elsewhere("gpu", "device slab: p50 over that of the smallest size", "any size", "<= 1.3 x"),
)  # fmt: skip


def evaluate(results: Results) -> list[Verdict]:
    """Returns a verdict on every target; those of other modes are not measured."""
    verdicts = []
    for target in TARGETS:
        if isinstance(target, Target):
            verdicts.append(target.judge(results))
        else:
            verdicts.append(Verdict(target.what, target.at, target.asked, detail=command_of(target.mode)))
    return verdicts


def missed(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Returns the verdicts on targets that were measured and missed."""
    return [verdict for verdict in verdicts if verdict.met is False]
