"""The targets of the project as data, and whether a transport run meets them.

A target says what is compared, where, and the threshold. Ratios are taken within each repetition and their median counts;
where a target spans several sizes, the worst of them does. What a run did not measure is neither met nor missed: a verdict
says so. What other modes measure (requests, serving, the allocator, soaking) they judge themselves.

Throughput is that of one producer with 16 messages in flight, latency that with one, both of float32: the base of the sweeps in
:mod:`bench.transport`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from bench.messages import Case
from bench.peers import PEERS
from bench.records import Result, Results, Side
from bench.repetitions import median_ratio
from bench.results import Spread, Verdict, format_nbytes

_KB, _MB = 1 << 10, 1 << 20
_SMALL = (4 * _KB, 64 * _KB)
_LARGE = (1 * _MB, 8 * _MB, 64 * _MB)
_UP_TO_1_MB = (4 * _KB, 64 * _KB, 1 * _MB)

_SHOWN_PLACES = 4  # of a target that spans many

_COPY, _IN_PLACE, _BUSY_POLL = "shmring", "shmring-in-place", "shmring-busy-poll"
_OURS = (_COPY, _IN_PLACE)

#: The number of each place of a target; None where it was not measured.
Numbers = Iterator[tuple[str, float | None]]


@dataclasses.dataclass(frozen=True)
class Known:
    """A target that is missed on some machines, for a reason that a decision gives, with what was tried.

    Attributes:
        decision: its number in ``docs/decisions/``.
        limit: how far it is missed there. What misses that, too, is news.
    """

    decision: int
    limit: float


@dataclasses.dataclass(frozen=True)
class Target:
    """Something to reach: what is compared, and where, for people; the threshold; and what the results of a mode say of it."""

    what: str
    at: str
    limit: float
    unit: str
    numbers: Callable[[Any], Iterable[tuple[str, float | None]]]
    at_least: bool = True
    known: Known | None = None

    def judge(self, results: Any) -> Verdict:
        """Returns whether results meet it."""
        numbers = self.numbers(results)
        return judge(self.what, self.at, self.limit, self.unit, numbers, at_least=self.at_least, known=self.known)

    def misses(self, results: Any) -> list[tuple[str, float]]:
        """Returns the places where it is missed, with their numbers."""
        numbers = ((name, number) for name, number in self.numbers(results) if number is not None)
        return [(name, number) for name, number in numbers if not _reaches(number, self.limit, self.at_least)]


def _reaches(number: float, limit: float, at_least: bool) -> bool:
    return number >= limit if at_least else number <= limit


def judge(
    what: str,
    at: str,
    limit: float,
    unit: str,
    numbers: Iterable[tuple[str, float | None]],
    *,
    at_least: bool = True,
    known: Known | None = None,
) -> Verdict:
    """Returns a verdict, which the worst place decides."""

    asked = f"{'>=' if at_least else '<='} {limit:g} {unit}"
    places = list(numbers)
    measured = sorted(
        ((name, number) for name, number in places if number is not None), key=lambda place: place[1], reverse=not at_least
    )
    if not measured:
        return Verdict(what, at, asked, detail="not part of this run")
    worst, rest = measured[0][1], ""
    if len(places) > _SHOWN_PLACES:
        places, rest = [*measured[:_SHOWN_PLACES]], f"; the worst of {len(measured)}"
    detail = ", ".join(f"{name}: {'not measured' if number is None else f'{number:.3g}'}" for name, number in places) + rest
    met = _reaches(worst, limit, at_least)
    decision = known.decision if known is not None and not met and _reaches(worst, known.limit, at_least) else None
    return Verdict(what, at, asked, f"{worst:.3g} {unit}", met, detail, decision)


# -- what is compared ----------------------------------------------------------------------------------------------------

#: Numbers of results at a size, one of each repetition or of all together; none if they have not measured it.
_Runs = Callable[[Results, int], Sequence[float]]


def _by_size(sizes: Sequence[int], ours: _Runs, theirs: _Runs | None = None) -> Callable[[Results], Numbers]:
    """A number of each size, as a multiple of another if there is one: the median over the repetitions that have both."""

    def numbers(results: Results) -> Numbers:
        for nbytes in sizes:
            runs = ours(results, nbytes)
            others = itertools.repeat(1.0) if theirs is None else theirs(results, nbytes)
            yield format_nbytes(nbytes), median_ratio(runs, others)

    return numbers


def _of(peer: str, number: Callable[[Result], Sequence[float]], window: int = 16) -> _Runs:
    """A number of a peer's base case."""

    def runs(results: Results, nbytes: int) -> Sequence[float]:
        result = results.base(peer, nbytes, window)
        return () if result is None else number(result)

    return runs


def _speed(peer: str) -> _Runs:
    """Messages a second."""
    return _of(peer, lambda result: result.runs)


def _p50_us(peer: str) -> _Runs:
    """One-way latency, in microseconds."""
    return _of(peer, lambda result: (result.latency_p50_us.median,), window=1)


def _cpu_us(peer: str) -> _Runs:
    """CPU time of a message at both sides, in microseconds."""
    return _of(peer, lambda result: (result.cpu_us,))


def _memcpy(results: Results, nbytes: int) -> Sequence[float]:
    """Copies a second into memory that is in no cache."""
    return next((limit.copies_cold_runs for limit in results.limits if limit.nbytes == nbytes), ())


def _sooner(ours: str, sizes: Sequence[int] = _UP_TO_1_MB, event_driven: bool = True) -> Callable[[Results], Numbers]:
    """The least one-way latency of any event-driven peer, or of any that spins, as a multiple of ours.

    Where ours copies, only peers that copy are looked at.
    """
    in_place = PEERS[ours].in_place
    peers = [
        name
        for name, peer in PEERS.items()
        if not name.startswith(_COPY) and peer.event_driven is event_driven and (in_place or not peer.in_place)
    ]

    def numbers(results: Results) -> Numbers:
        for nbytes in sizes:
            mine_us = _p50_us(ours)(results, nbytes)
            others_us = {name: us for name in peers for us in _p50_us(name)(results, nbytes)}
            if not mine_us or not others_us:
                yield format_nbytes(nbytes), None
            else:
                nearest = min(others_us, key=others_us.__getitem__)
                yield f"{format_nbytes(nbytes)} ({nearest})", others_us[nearest] / mine_us[0]

    return numbers


def _sides(
    peers: Sequence[str], number: Callable[[Side, Results], float | None], chosen: Callable[[Case], bool] = lambda case: True
) -> Callable[[Results], Numbers]:
    """A number of both sides of ours, in every case of a kind."""

    def numbers(results: Results) -> Numbers:
        for result in results.results:
            if result.peer in peers and chosen(result.case):
                where = f"{'in place' if result.peer == _IN_PLACE else 'copy'}, {result.case.title}"
                for side, name in ((result.producer, "producer"), (result.consumer, "consumer")):
                    if (value := number(side, results)) is not None:
                        yield f"{name} of {where}", value

    return numbers


def _alone(sizes: Sequence[int]) -> Callable[[Case], bool]:
    """The cases of these sizes with one producer, whose consumer copies nothing out."""
    return lambda case: case.nbytes in sizes and not case.copies_out and case.producers == 1


def _together(producers: int, peer: str = _COPY, others: int = 1) -> Callable[[Results], Numbers]:
    """What several producers of ours move together, as a multiple of what so many others of a peer do, at the same size."""

    def numbers(results: Results) -> Numbers:
        for result in results.results:
            if result.peer == _COPY and result.case.producers == producers:
                theirs = results.find(peer, msgspec.structs.replace(result.case, producers=others))
                if theirs is not None:
                    yield format_nbytes(result.case.nbytes), median_ratio(result.runs, theirs.runs)

    return numbers


def _median(spread: Spread | None) -> float | None:
    return None if spread is None else spread.median


def _than(
    at: str, sizes: Sequence[int], limits: Mapping[str, float], ours: str = _COPY, known: Known | None = None
) -> Iterator[Target]:
    """Yields a target for each peer."""
    for peer, limit in limits.items():
        what = f"{PEERS[ours].title}: messages/s of {PEERS[peer].title}"
        yield Target(what, at, limit, "x", _by_size(sizes, _speed(ours), _speed(peer)), known=known)


#: In the order of the table.
TARGETS: tuple[Target, ...] = (
    *_than("4 KB, 64 KB", _SMALL, {"iceoryx2": 1.5, "torch-queue": 30.0, "faster-fifo": 1.0}),
    *_than("4 KB", _SMALL[:1], {"inline-msgpack": 1.5, "pyzmq": 2.0}),
    *_than("64 KB", _SMALL[1:], {"inline-msgpack": 2.5, "pyzmq": 5.0}),
    *_than("1 MB", _LARGE[:1], {"inline-msgpack": 3.5}),
    *_than("1 MB to 64 MB", _LARGE, {"iceoryx2": 1.05}),
    *_than("1 MB", _LARGE[:1], {"pyzmq": 3.0}, known=Known(25, 2.5)),
    *_than("8 MB, 64 MB", _LARGE[1:], {"pyzmq": 3.0}),
    Target("shmring, one copy: speed of memcpy, cold", "1 MB", 0.65, "x", _by_size(_LARGE[:1], _speed(_COPY), _memcpy)),
    Target("shmring, one copy: speed of memcpy, cold", "8 MB, 64 MB", 1.05, "x", _by_size(_LARGE[1:], _speed(_COPY), _memcpy)),
    *_than("8 MB", _LARGE[1:2], {"torch-queue": 8.0}),
    *_than("1 MB", _LARGE[:1], {"spinning-arena": 1.0}, ours=_BUSY_POLL),
    *_than("8 MB, 64 MB", _LARGE[1:], {"spinning-arena": 1.2}),
    *_than("64 KB to 64 MB", (_SMALL[1], *_LARGE), {"iceoryx2-loaned": 1.5}, ours=_IN_PLACE),
    Target(
        "one copy: CPU of both sides, of iceoryx2's", "4 KB, 64 KB", 0.75, "x",
        _by_size(_SMALL, _cpu_us(_COPY), _cpu_us("iceoryx2")),
        at_least=False,
    ),
    Target(
        "in place: CPU of both sides, of iceoryx2's", "64 KB to 64 MB", 0.6, "x",
        _by_size((_SMALL[1], *_LARGE), _cpu_us(_IN_PLACE), _cpu_us("iceoryx2-loaned")), at_least=False,
    ),
    Target("one copy: p50 of the nearest event-driven peer that copies", "4 KB to 1 MB", 1.0, "x", _sooner(_COPY)),
    Target("in place: p50 of the nearest event-driven peer", "4 KB to 1 MB", 1.0, "x", _sooner(_IN_PLACE)),
    Target(
        "in place: p50 at 8 MB over that at 4 KB", "8 MB", 1.3, "x",
        _by_size([8 * _MB], _p50_us(_IN_PLACE), lambda results, _: _p50_us(_IN_PLACE)(results, 4 * _KB)),
        at_least=False,
    ),
    Target("busy polling: p50", "4 KB, 64 KB", 25.0, "us", _by_size(_SMALL, _p50_us(_BUSY_POLL)), at_least=False),
    Target(
        "busy polling: p50 of the nearest peer that spins", "4 KB, 64 KB", 1.0, "x",
        _sooner(_BUSY_POLL, _SMALL, event_driven=False),
    ),
    Target(
        "busy polling: CPU of an end with nothing to do", "each side", 1.0, "% of a core",
        _sides((_BUSY_POLL,), lambda side, results: _median(side.idle_percent)), at_least=False,
    ),
    Target(
        "CPU time per message, in place", "each side, any size", 20.0, "us",
        _sides(
            (_IN_PLACE,), lambda side, results: side.cpu_us_per_message.median,
            lambda case: not case.copies_out and case.producers == 1 and case.window > 1,
        ),
        at_least=False,
    ),
    Target(
        "8 producers together, of one producer's messages/s", "any size", 0.9, "x", _together(8), known=Known(21, 0.25)
    ),
    Target("8 producers together, of 8 producers of iceoryx2", "any size", 0.95, "x", _together(8, "iceoryx2", others=8)),
    *(
        Target(
            "longest stall of an event loop, without waits for a core", f"each side, {at}", limit_ms, "ms",
            _sides(
                _OURS, lambda side, results: _median(side.lag_max_on_core_ms),
                _alone(sizes),
            ),
            at_least=False,
        )
        for at, sizes, limit_ms in (("up to 1 MB", _UP_TO_1_MB, 1.0), ("64 MB", _LARGE[2:], 5.0))
    ),
    Target(
        "resident memory without the slab, above a process that only imported torch", "each side, any size", 64.0, "MB",
        _sides(_OURS, lambda side, results: (side.resident_nbytes - results.torch_resident_nbytes) / _MB), at_least=False,
    ),
    Target(
        "connecting, once the slab exists", "any size", 5.0, "ms",
        _sides(_OURS, lambda side, results: _median(side.connect_ms), lambda case: case.producers == 1), at_least=False,
    ),
)  # fmt: skip
