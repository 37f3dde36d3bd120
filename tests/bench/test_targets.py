"""Targets: judged by what was measured, by the worst of it, and not judged where nothing was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bench import targets
from bench.messages import Case
from bench.records import Results
from bench.results import Spread, Verdict

Make = Callable[..., Any]
KB, MB = 1 << 10, 1 << 20
ROOT = Path(__file__).resolve().parents[2]


def evaluate(results: Results) -> list[Verdict]:
    """A verdict on every target."""
    return [target.judge(results) for target in targets.TARGETS]


def verdict(results: Results, what: str, at: str = "") -> Verdict:
    (found,) = [one for one in evaluate(results) if what in one.what and at in one.at]
    return found


@pytest.mark.parametrize(("ours", "met"), [([150.0, 160.0, 150.0], True), ([149.0, 160.0, 100.0], False)])
def test_the_worst_size_decides(made_result: Make, made_results: Make, ours: list[float], met: bool) -> None:
    small, large = Case(4 * KB), Case(64 * KB)
    results = made_results(
        [
            made_result("shmring", small, [1000.0] * 3),
            made_result("iceoryx2", small, [100.0] * 3),
            made_result("shmring", large, ours),
            made_result("iceoryx2", large, [100.0] * 3),
        ]
    )
    found = verdict(results, "messages/s of iceoryx2, one copy", "4 KB, 64 KB")
    assert found.met is met
    assert found.asked == ">= 1.5 x"
    assert found.measured == ("1.5 x" if met else "1.49 x")
    assert found.detail.startswith("4 KB: 10, 64 KB: 1.")


def test_ratios_are_taken_within_repetitions(made_result: Make, made_results: Make) -> None:
    case = Case(8 * MB)
    results = made_results(
        [made_result("shmring", case, [10.0, 200.0, 30.0]), made_result("torch-queue", case, [1.0, 100.0, 3.0])]
    )
    assert verdict(results, "torch.multiprocessing.Queue", "8 MB").measured == "10 x"  # medians would say 10 over 3


def test_what_was_not_measured_is_neither_met_nor_missed(made_result: Make, made_results: Make) -> None:
    found = evaluate(made_results([]))
    assert len(found) == len(targets.TARGETS)
    assert {one.met for one in found} == {None}
    assert {one.word for one in found} == {"not measured"}
    partly = made_results(
        [made_result("shmring", Case(4 * KB), [90.0] * 3), made_result("torch-queue", Case(4 * KB), [10.0] * 3)]
    )
    assert verdict(partly, "messages/s of torch.multiprocessing.Queue", "4 KB, 64 KB").detail == "4 KB: 9, 64 KB: not measured"


def test_the_memcpy_limit_is_that_of_the_same_size(made_result: Make, made_results: Make) -> None:
    results = made_results(
        [made_result("shmring", Case(nbytes), [80.0] * 3) for nbytes in (1 * MB, 8 * MB)], limits={1 * MB: 100.0, 8 * MB: 100.0}
    )
    assert verdict(results, "speed of memcpy", "1 MB").met is True
    assert verdict(results, "speed of memcpy", "8 MB").met is False


def test_latency_is_compared_with_the_nearest_peer_that_sleeps(made_result: Make, made_results: Make) -> None:
    case = Case(4 * KB, window=1)
    results = made_results(
        [
            made_result("shmring", case, [1.0], p50_us=80.0),
            made_result("spinning-ring", case, [1.0], p50_us=20.0),
            made_result("iceoryx2-loaned", case, [1.0], p50_us=60.0),  # copies nothing
            made_result("iceoryx2", case, [1.0], p50_us=100.0),
            made_result("inline-msgpack", case, [1.0], p50_us=90.0),
        ]
    )
    found = verdict(results, "one copy: p50")
    assert found.met is True
    assert found.detail.startswith("4 KB (inline-msgpack): 1.12")


@pytest.mark.parametrize(("p50_us", "near", "met"), [(20.0, True, True), (24.0, True, False), (26.0, False, False)])
def test_busy_polling_is_compared_with_peers_that_spin(
    made_result: Make, made_results: Make, p50_us: float, near: bool, met: bool
) -> None:
    case = Case(4 * KB, window=1)
    results = made_results(
        [
            made_result("shmring-busy-poll", case, [1.0], p50_us=p50_us),
            made_result("spinning-ring", case, [1.0], p50_us=22.0),
            made_result("inline-msgpack", case, [1.0], p50_us=15.0),  # sleeps
        ]
    )
    assert verdict(results, "busy polling: p50 of the nearest").met is met
    assert [one.met for one in evaluate(results) if one.what == "busy polling: p50"] == [near]


@pytest.mark.parametrize(("percent", "met"), [(0.9, True), (1.1, False)])
def test_an_end_with_nothing_to_do_hardly_takes_a_core(
    made_result: Make, made_results: Make, percent: float, met: bool
) -> None:
    looked = made_result("shmring-busy-poll", Case(4 * KB, window=1), [1.0], idle_percent=Spread.of([percent]))
    others = [made_result("shmring-busy-poll", Case(4 * KB), [1.0])]
    found = verdict(made_results([looked, *others]), "nothing to do")
    assert found.met is met
    assert found.detail.count("window 1") == 2
    assert verdict(made_results(others), "nothing to do").met is None


def test_latency_in_place_hardly_depends_on_the_size(made_result: Make, made_results: Make) -> None:
    def measured(p50_us: float) -> Verdict:
        small = made_result("shmring-in-place", Case(4 * KB, window=1), [1.0], p50_us=60.0)
        large = made_result("shmring-in-place", Case(8 * MB, window=1), [1.0], p50_us=p50_us)
        return verdict(made_results([small, large]), "p50 at 8 MB over that at 4 KB")

    assert measured(70.0).met is True
    assert measured(90.0).met is False


def test_of_many_places_the_worst_are_shown(made_result: Make, made_results: Make) -> None:
    costs = [made_result("shmring-in-place", Case(nbytes * KB), [1.0], cpu_us=float(nbytes)) for nbytes in (4, 8, 12, 16)]
    found = verdict(made_results(costs), "CPU time per message, in place")
    assert found.detail.startswith("producer of in place, 16 KB of float32, 1 producer, window 16: 16, ")
    assert found.detail.endswith("; the worst of 8")
    assert " 4 KB" not in found.detail


def test_costs_are_of_the_worse_side(made_result: Make, made_results: Make) -> None:
    cheap = made_result("shmring-in-place", Case(4 * KB), [1.0], cpu_us=15.0)
    dear = made_result("shmring-in-place", Case(1 * MB), [1.0], cpu_us=25.0)
    assert verdict(made_results([cheap]), "CPU time per message, in place").met is True
    assert verdict(made_results([cheap, dear]), "CPU time per message, in place").met is False


@pytest.mark.parametrize(("runs", "met"), [([95.0] * 3, True), ([80.0] * 3, False)])
def test_producers_together_keep_up_with_one(made_result: Make, made_results: Make, runs: list[float], met: bool) -> None:
    one = made_result("shmring", Case(64 * KB), [100.0] * 3)
    eight = made_result("shmring", Case(64 * KB, producers=8), runs)
    assert verdict(made_results([one, eight]), "8 producers together, of one").met is met


@pytest.mark.parametrize(("per_s", "word"), [(30.0, "missed: decision 21"), (20.0, "missed"), (95.0, "met")])
def test_a_target_that_is_missed_as_far_as_a_decision_says_does_not_fail(
    made_result: Make, made_results: Make, per_s: float, word: str
) -> None:
    one = made_result("shmring", Case(64 * KB), [100.0] * 3)
    eight = made_result("shmring", Case(64 * KB, producers=8), [per_s] * 3)
    found = verdict(made_results([one, eight]), "8 producers together, of one")
    assert found.word == word
    assert found.met is (word == "met")
    assert found.fails is (word == "missed")


def test_a_known_miss_names_a_decision_and_is_one() -> None:
    decisions = {int(path.name[:4]): path.read_text() for path in (ROOT / "docs" / "decisions").glob("[0-9]*.md")}
    known = [target for target in targets.TARGETS if target.known is not None]
    assert known
    for target in known:
        assert target.known is not None
        assert target.known.limit < target.limit if target.at_least else target.known.limit > target.limit
        assert f"asked: {target.limit:g}" in decisions[target.known.decision], target.what


@pytest.mark.parametrize(("runs", "met"), [([96.0] * 3, True), ([90.0] * 3, False)])
def test_producers_together_keep_up_with_a_peers(made_result: Make, made_results: Make, runs: list[float], met: bool) -> None:
    case = Case(64 * KB, producers=8)
    results = made_results([made_result("shmring", case, runs), made_result("iceoryx2", case, [100.0] * 3)])
    assert verdict(results, "8 producers together, of 8 producers of iceoryx2").met is met


@pytest.mark.parametrize(("cpu_us", "met"), [(5.9, True), (6.1, False)])
def test_what_both_sides_cost_is_compared(made_result: Make, made_results: Make, cpu_us: float, met: bool) -> None:
    ours = made_result("shmring-in-place", Case(1 * MB), [1.0], cpu_us=cpu_us)
    theirs = made_result("iceoryx2-loaned", Case(1 * MB), [1.0], cpu_us=10.0)
    assert verdict(made_results([ours, theirs]), "in place: CPU of both sides").met is met
    assert verdict(made_results([ours]), "in place: CPU of both sides").met is None


def test_stalls_and_memory_are_judged(made_result: Make, made_results: Make) -> None:
    stalled = made_result("shmring", Case(64 * MB), [1.0], lag_ms=6.0, resident_nbytes=270 * MB)
    found = made_results([stalled])
    assert verdict(found, "longest stall", "side, 64 MB").met is False
    assert verdict(found, "longest stall", "side, 64 MB").measured == "6 ms"
    assert verdict(found, "resident memory").measured == "70 MB"
    assert verdict(found, "resident memory").met is False
    assert verdict(found, "connecting").met is True
    elsewhere = made_results([made_result("shmring", Case(8 * MB), [1.0], lag_ms=6.0)])
    assert verdict(elsewhere, "longest stall", "side, 64 MB").met is None
    small = made_results([made_result("shmring", Case(64 * KB), [1.0], lag_ms=1.1)])
    assert verdict(small, "longest stall", "up to 1 MB").met is False
