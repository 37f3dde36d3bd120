"""Targets: judged by what was measured, by the worst of it, and not judged where nothing was."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench import transport_targets as targets
from bench.messages import Case, Measurement
from bench.peers import MEMCPY
from bench.repetitions import Measured
from bench.results import Verdict
from tests.bench.conftest import MB, made_run
from tests.tables import for_each

KB = 1 << 10
ROOT = Path(__file__).resolve().parents[2]


def runs(*speeds: float) -> list[Measurement]:
    return [made_run(per_s) for per_s in speeds]


def evaluate(measured: Measured) -> list[Verdict]:
    """A verdict on every target."""
    return [target.judge(measured) for target in targets.TARGETS]


def verdict(measured: Measured, what: str, at: str = "") -> Verdict:
    (found,) = [one for one in evaluate(measured) if what in one.what and at in one.at]
    return found


@for_each(("ours", "met"), [([150.0, 160.0, 150.0], True), ([149.0, 160.0, 100.0], False)])
def test_the_worst_size_decides(ours: Sequence[float], met: bool) -> None:
    theirs = runs(100, 100, 100)
    measured = {
        Case(4 * KB): {"shmring": runs(1000, 1000, 1000), "iceoryx2": theirs},
        Case(64 * KB): {"shmring": runs(*ours), "iceoryx2": theirs},
    }
    found = verdict(measured, "messages/s of iceoryx2, one copy", "4 KB, 64 KB")
    assert found.met is met
    assert found.asked == ">= 1.5 x"
    assert found.measured == ("1.5 x" if met else "1.49 x")
    assert found.detail.startswith("4 KB: 10, 64 KB: 1.")


def test_ratios_are_taken_within_repetitions() -> None:
    measured = {Case(8 * MB): {"shmring": runs(10, 200, 30), "torch-queue": runs(1, 100, 3)}}
    assert verdict(measured, "torch.multiprocessing.Queue", "8 MB").measured == "10 x"  # medians would say 10 over 3


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = evaluate({})
    assert {(one.met, one.word) for one in found} == {(None, "not measured")}
    partly = {Case(4 * KB): {"shmring": runs(90), "torch-queue": runs(10)}}
    assert verdict(partly, "messages/s of torch.multiprocessing.Queue", "4 KB, 64 KB").detail == "4 KB: 9, 64 KB: not measured"


def test_the_memcpy_limit_is_that_of_the_same_size() -> None:
    measured = {Case(nbytes): {"shmring": runs(80), MEMCPY: runs(100)} for nbytes in (1 * MB, 8 * MB)}
    assert verdict(measured, "speed of memcpy", "1 MB").met is True
    assert verdict(measured, "speed of memcpy", "8 MB").met is False


def latencies(**p50_us: float) -> Measured:
    return {Case(4 * KB, window=1): {name.replace("_", "-"): [made_run(p50_us=us)] for name, us in p50_us.items()}}


def test_latency_is_compared_with_the_nearest_peer_that_sleeps() -> None:
    # One spins, and one copies nothing.
    measured = latencies(shmring=80, spinning_ring=20, iceoryx2_loaned=60, iceoryx2=100, inline_msgpack=90)
    found = verdict(measured, "one copy: p50")
    assert found.met is True
    assert found.detail.startswith("4 KB (inline-msgpack): 1.12")


@for_each(("p50_us", "near", "met"), [(20.0, True, True), (24.0, True, False), (26.0, False, False)])
def test_busy_polling_is_compared_with_peers_that_spin(p50_us: float, near: bool, met: bool) -> None:
    measured = latencies(shmring_busy_poll=p50_us, spinning_ring=22, inline_msgpack=15)  # which sleeps
    assert verdict(measured, "busy polling: p50 of the nearest").met is met
    assert [one.met for one in evaluate(measured) if one.what == "busy polling: p50"] == [near]


@for_each(("percent", "met"), [(0.9, True), (1.1, False)])
def test_an_end_with_nothing_to_do_hardly_takes_a_core(percent: float, met: bool) -> None:
    others = {Case(4 * KB): {"shmring-busy-poll": runs(1)}}
    looked = {Case(4 * KB, window=1): {"shmring-busy-poll": [made_run(idle_percent=percent)]}}
    found = verdict(others | looked, "nothing to do")
    assert found.met is met
    assert found.detail.count("window 1") == 2
    assert verdict(others, "nothing to do").met is None


@for_each(("p50_us", "met"), [(70.0, True), (90.0, False)])
def test_latency_in_place_hardly_depends_on_the_size(p50_us: float, met: bool) -> None:
    of_size = {4 * KB: 60.0, 8 * MB: p50_us}
    measured = {Case(nbytes, window=1): {"shmring-in-place": [made_run(p50_us=us)]} for nbytes, us in of_size.items()}
    assert verdict(measured, "p50 at 8 MB over that at 4 KB").met is met


def test_of_many_places_the_worst_are_shown() -> None:
    measured = {Case(nbytes * KB): {"shmring-in-place": [made_run(cpu_us=nbytes)]} for nbytes in (4, 8, 12, 16)}
    found = verdict(measured, "CPU time per message, in place")
    assert found.detail.startswith("producer of in place, 16 KB, 1 producer, window 16: 16, ")
    assert found.detail.endswith("; the worst of 8")
    assert " 4 KB" not in found.detail


def test_costs_are_of_the_worse_side() -> None:
    cheap = {Case(4 * KB): {"shmring-in-place": [made_run(cpu_us=15)]}}
    dear = {Case(1 * MB): {"shmring-in-place": [made_run(cpu_us=25)]}}
    assert verdict(cheap, "CPU time per message, in place").met is True
    assert verdict(cheap | dear, "CPU time per message, in place").met is False


@for_each(("per_s", "word"), [(95.0, "met"), (80.0, "missed: decision 21"), (30.0, "missed: decision 21"), (20.0, "missed")])
def test_a_target_that_is_missed_as_far_as_a_decision_says_does_not_fail(per_s: float, word: str) -> None:
    measured = {Case(64 * KB): {"shmring": runs(100)}, Case(64 * KB, producers=8): {"shmring": runs(per_s)}}
    found = verdict(measured, "8 producers together, of one")
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


@for_each(("per_s", "met"), [(96.0, True), (90.0, False)])
def test_producers_together_keep_up_with_a_peers(per_s: float, met: bool) -> None:
    measured = {Case(64 * KB, producers=8): {"shmring": runs(per_s), "iceoryx2": runs(100)}}
    assert verdict(measured, "8 producers together, of 8 producers of iceoryx2").met is met


@for_each(("cpu_us", "met"), [(5.9, True), (6.1, False)])
def test_what_both_sides_cost_is_compared(cpu_us: float, met: bool) -> None:
    ours = {"shmring-in-place": [made_run(cpu_us=cpu_us)]}
    measured = {Case(1 * MB): ours | {"iceoryx2-loaned": [made_run(cpu_us=10)]}}
    assert verdict(measured, "in place: CPU of both sides").met is met
    assert verdict({Case(1 * MB): ours}, "in place: CPU of both sides").met is None


def test_stalls_and_memory_are_judged() -> None:
    found = {Case(64 * MB): {"shmring": [made_run(stall_ms=6, resident_nbytes=270 * MB)]}}
    assert verdict(found, "longest stall", "side, 64 MB").met is False
    assert verdict(found, "longest stall", "side, 64 MB").measured == "6 ms"
    assert verdict(found, "resident memory").measured == "70 MB"
    assert verdict(found, "resident memory").met is False
    assert verdict(found, "connecting").met is True
    elsewhere = {Case(8 * MB): {"shmring": [made_run(stall_ms=6)]}}
    assert verdict(elsewhere, "longest stall", "side, 64 MB").met is None
    small = {Case(64 * KB): {"shmring": [made_run(stall_ms=1.1)]}}
    assert verdict(small, "longest stall", "up to 1 MB").met is False
