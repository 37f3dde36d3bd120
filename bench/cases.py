"""What ``bench transport`` measures: cases, gathered in rounds whose repetitions are interleaved.

A case is one kind of message stream. Every combination of sizes, dtypes, producers, windows and copying out would take a
day, so each dimension is varied by itself around a base, unless somebody wants a part of it whole (:func:`sweeps`). What is
compared with each other stands in one round, so that whatever else the machine does hits all of it alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec

from bench.coverage import Key
from bench.interleaving import Round
from bench.messages import Case
from bench.peers import BASELINE

__all__ = ["QUICK_SIZES", "SIZES", "Case", "quick", "quick_without", "sweeps"]

#: The sizes of the full benchmark, and of the quick one.
SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = SIZES[:-1]

_QUICK_WITHOUT = ("ray",)  # it starts a cluster for every case
_QUICK_LARGE_PEERS = ("shmring", "shmring-in-place", "iceoryx2", "spinning-arena", "pyzmq")
_QUICK_LATENCY_PEERS = ("shmring", "shmring-in-place")
_QUICK_SCALING_NBYTES = 64 << 10  # small enough for the fixed cost of a message to show
_QUICK_SCALING_PRODUCERS = 8


def sweeps(
    peers: Sequence[str],
    sizes: Sequence[int] = SIZES,
    dtypes: Sequence[str] = ("float32", "bfloat16", "uint8"),
    producers: Sequence[int] = (1, 2, 4, 8),
    windows: Sequence[int] = (16, 1),
    copies_out: Sequence[bool] = (False, True),
    product: bool = False,
) -> list[Round]:
    """Returns rounds in which each dimension is varied by itself, at every size: windows, copying out, dtypes, producers.

    Args:
        peers: in every case.
        sizes, dtypes, producers, windows, copies_out: the first value of each is the base.
        product: every combination instead.
    """
    rounds: list[Round] = []
    for number, nbytes in itertools.product(producers, sizes):
        base = Case(nbytes, dtypes[0], number, windows[0], copies_out[0])
        cases = [base]
        if product:
            combinations = itertools.product(windows, copies_out, dtypes)
            cases = [Case(nbytes, dtype, number, window, copies) for window, copies, dtype in combinations]
        elif number == producers[0]:
            cases += [msgspec.structs.replace(base, window=window) for window in windows[1:]]
            cases += [msgspec.structs.replace(base, copies_out=copies) for copies in copies_out[1:]]
            cases += [msgspec.structs.replace(base, dtype=dtype) for dtype in dtypes[1:]]
        # With windows as large as memory allows, each once.
        distinct = tuple(dict.fromkeys(case.bounded() for case in cases))
        rounds.append(Round(distinct, tuple(peers), limits=number == producers[0]))
    return rounds


def quick(peers: Sequence[str]) -> list[Round]:
    """Returns the rounds that tell whether targets are met, and no more: up to 64 MB, and 8 producers of the baseline."""
    fast = tuple(name for name in peers if name not in _QUICK_WITHOUT)
    *small, large_nbytes, largest_nbytes = QUICK_SIZES
    return [  # in an order in which no process is started twice
        *(Round((Case(nbytes), Case(nbytes, window=1)), fast, limits=True) for nbytes in small),
        Round((Case(large_nbytes),), fast, limits=True),
        # Where most peers take seconds for two windows; those stay that a target is about.
        Round((Case(largest_nbytes),), tuple(name for name in fast if name in _QUICK_LARGE_PEERS), limits=True),
        # Where latency is compared with that of smaller ones, not with that of others.
        Round((Case(large_nbytes, window=1),), tuple(name for name in fast if name in _QUICK_LATENCY_PEERS)),
        Round((Case(_QUICK_SCALING_NBYTES, producers=_QUICK_SCALING_PRODUCERS), Case(_QUICK_SCALING_NBYTES)), (BASELINE,)),
    ]


def quick_without(peers: Sequence[str]) -> dict[Key, str]:
    """Returns what a quick run leaves out of those peers, by case and peer, and why."""
    left_out = {}
    for part in quick(peers)[:-1]:  # the last one is about the baseline alone
        for case, name in itertools.product(part.cases, peers):
            if name in _QUICK_WITHOUT:
                left_out[case.title, name] = "left out: it starts a cluster for every case"
            elif name not in part.peers:
                left_out[case.title, name] = "left out: no target is about it in this case"
    return left_out
