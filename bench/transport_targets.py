"""The targets of ``bench transport``. Throughput is that of one producer with 16 messages in flight, latency that with one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from bench.machine import torch_resident_nbytes
from bench.messages import Case
from bench.meter import Cost
from bench.peers import MEMCPY, PEERS
from bench.repetitions import Measured, Number, median, ratio
from bench.results import format_nbytes
from bench.targets import Known, Numbers, Target, medians, ratios

_KB, _MB = 1 << 10, 1 << 20
_SMALL = (4 * _KB, 64 * _KB)
_LARGE = (1 * _MB, 8 * _MB, 64 * _MB)
_UP_TO_1_MB = (4 * _KB, 64 * _KB, 1 * _MB)

_COPY, _IN_PLACE, _BUSY_POLL = "shmring", "shmring-in-place", "shmring-busy-poll"
_OURS = (_COPY, _IN_PLACE)


def _at(sizes: Sequence[int], window: int = 16) -> dict[str, Case]:
    """The cases of one producer, by size."""
    return {format_nbytes(nbytes): Case(nbytes, window=window) for nbytes in sizes}


def _sooner(ours: str, sizes: Sequence[int] = _UP_TO_1_MB, event_driven: bool = True) -> Callable[[Measured], Numbers]:
    """The least one-way latency of any event-driven peer, or of any that spins, as a multiple of ours.

    Where ours copies, only peers that copy are looked at.
    """
    in_place = PEERS[ours].in_place
    peers = [
        name
        for name, peer in PEERS.items()
        if not name.startswith(_COPY) and peer.event_driven is event_driven and (in_place or not peer.in_place)
    ]

    def numbers(measured: Measured) -> Numbers:
        for size, case in _at(sizes, window=1).items():
            of_case = {name: median(runs, "p50_us") for name, runs in measured.get(case, {}).items()}
            others = {name: us for name in peers if (us := of_case.get(name)) is not None}
            nearest = min(others, key=others.__getitem__, default="")
            mine = of_case.get(ours)
            yield f"{size} ({nearest})" if nearest else size, others[nearest] / mine if nearest and mine else None

    return numbers


def _sides(
    peers: Sequence[str], number: Callable[[Cost], float | None], chosen: Callable[[Case], bool] = lambda case: True
) -> Callable[[Measured], Numbers]:
    """A number of both sides of ours, in every case of a kind: of the worst process of a side."""

    def worst(costs: Sequence[Cost]) -> float | None:
        return max((value for cost in costs if (value := number(cost)) is not None), default=None)

    sides: dict[str, Number] = {"producer": lambda run: worst(run.producers), "consumer": lambda run: worst(run.consumer)}

    def numbers(measured: Measured) -> Numbers:
        for case, of_case in measured.items():
            for peer in peers if chosen(case) else ():
                for side, of_side in sides.items():
                    if (value := median(of_case.get(peer, ()), of_side)) is not None:
                        yield f"{side} of {'in place' if peer == _IN_PLACE else 'copy'}, {case.title}", value

    return numbers


def _alone(sizes: Sequence[int]) -> Callable[[Case], bool]:
    """The cases of these sizes with one producer."""
    return lambda case: case.nbytes in sizes and case.producers == 1


def _together(theirs: str = _COPY, others: int = 1) -> Callable[[Measured], Numbers]:
    """What 8 producers of ours move together, as a multiple of what so many others of a peer do, at the same size."""

    def numbers(measured: Measured) -> Numbers:
        for case in measured:
            if case.producers == 8:
                times = ratio(measured, case, _COPY, theirs, "messages_per_s", Case(case.nbytes, others, case.window))
                yield format_nbytes(case.nbytes), times

    return numbers


def _than(
    at: str, sizes: Sequence[int], limits: Mapping[str, float], ours: str = _COPY, known: Known | None = None
) -> Iterator[Target]:
    """Yields a target for each peer."""
    for peer, limit in limits.items():
        what = f"{PEERS[ours].title}: messages/s of {PEERS[peer].title}"
        yield Target(what, at, limit, "x", ratios(ours, peer, "messages_per_s", _at(sizes)), known=known)


_MEMCPY = "shmring, one copy: speed of memcpy, cold"
_STALL = "longest stall of an event loop, without waits for a core"

#: In the order of the table.
TARGETS: tuple[Target, ...] = (
    *_than("4 KB, 64 KB", _SMALL, {"iceoryx2": 1.5, "torch-queue": 30.0, "faster-fifo": 1.0}),
    *_than("4 KB", _SMALL[:1], {"inline-msgpack": 1.5, "pyzmq": 2.0}),
    *_than("64 KB", _SMALL[1:], {"inline-msgpack": 2.5, "pyzmq": 5.0}),
    *_than("1 MB", _LARGE[:1], {"inline-msgpack": 3.5}),
    *_than("1 MB to 64 MB", _LARGE, {"iceoryx2": 1.05}),
    *_than("1 MB", _LARGE[:1], {"pyzmq": 3.0}, known=Known(25, 2.5)),
    *_than("8 MB, 64 MB", _LARGE[1:], {"pyzmq": 3.0}),
    Target(_MEMCPY, "1 MB", 0.65, "x", ratios(_COPY, MEMCPY, "messages_per_s", _at(_LARGE[:1]))),
    Target(_MEMCPY, "8 MB, 64 MB", 1.05, "x", ratios(_COPY, MEMCPY, "messages_per_s", _at(_LARGE[1:]))),
    *_than("8 MB", _LARGE[1:2], {"torch-queue": 8.0}),
    *_than("1 MB", _LARGE[:1], {"spinning-arena": 1.0}, ours=_BUSY_POLL),
    *_than("8 MB, 64 MB", _LARGE[1:], {"spinning-arena": 1.2}),
    *_than("64 KB to 64 MB", (_SMALL[1], *_LARGE), {"iceoryx2-loaned": 1.5}, ours=_IN_PLACE),
    Target(
        "one copy: CPU of both sides, of iceoryx2's", "4 KB, 64 KB", 0.75, "x",
        ratios(_COPY, "iceoryx2", "both_us", _at(_SMALL)), at_least=False,
    ),
    Target(
        "in place: CPU of both sides, of iceoryx2's", "64 KB to 64 MB", 0.6, "x",
        ratios(_IN_PLACE, "iceoryx2-loaned", "both_us", _at((_SMALL[1], *_LARGE))), at_least=False,
    ),
    Target("one copy: p50 of the nearest event-driven peer that copies", "4 KB to 1 MB", 1.0, "x", _sooner(_COPY)),
    Target("in place: p50 of the nearest event-driven peer", "4 KB to 1 MB", 1.0, "x", _sooner(_IN_PLACE)),
    Target(
        "in place: p50 at 8 MB over that at 4 KB", "8 MB", 1.3, "x",
        ratios(_IN_PLACE, _IN_PLACE, "p50_us", {"8 MB": Case(8 * _MB, window=1)}, {"8 MB": Case(4 * _KB, window=1)}),
        at_least=False,
    ),
    Target("busy polling: p50", "4 KB, 64 KB", 25.0, "us", medians(_BUSY_POLL, "p50_us", _at(_SMALL, 1)), at_least=False),
    Target(
        "busy polling: p50 of the nearest peer that spins", "4 KB, 64 KB", 1.0, "x",
        _sooner(_BUSY_POLL, _SMALL, event_driven=False),
    ),
    Target(
        "busy polling: CPU of an end with nothing to do", "each side", 1.0, "% of a core",
        _sides((_BUSY_POLL,), lambda cost: None if cost.idle_share is None else cost.idle_share * 100), at_least=False,
    ),
    Target(
        "CPU time per message, in place", "each side, any size", 20.0, "us",
        _sides(
            (_IN_PLACE,), lambda cost: cost.cpu_s / cost.messages * 1e6, lambda case: case.producers == 1 and case.window > 1
        ),
        at_least=False,
    ),
    Target("8 producers together, of one producer's messages/s", "any size", 0.9, "x", _together(), known=Known(21, 0.25)),
    Target("8 producers together, of 8 producers of iceoryx2", "any size", 0.95, "x", _together("iceoryx2", others=8)),
    *(
        Target(
            _STALL, f"each side, {at}", limit_ms, "ms",
            _sides(_OURS, lambda cost: cost.stall_ms, _alone(sizes)), at_least=False,
        )
        for at, sizes, limit_ms in (("up to 1 MB", _UP_TO_1_MB, 1.0), ("64 MB", _LARGE[2:], 5.0))
    ),
    Target(
        "resident memory without the slab, above a process that only imported torch", "each side, any size", 64.0, "MB",
        _sides(_OURS, lambda cost: (cost.resident_nbytes - torch_resident_nbytes()) / _MB), at_least=False,
    ),
    Target(
        "connecting, once the slab exists", "any size", 5.0, "ms",
        _sides(_OURS, lambda cost: cost.connect_s and cost.connect_s * 1e3, lambda case: case.producers == 1), at_least=False,
    ),
)  # fmt: skip
