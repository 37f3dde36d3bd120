"""``bench ray``: what is planned, and what its report makes of measurements. (The cluster itself: ``make test-ray``.)"""

from __future__ import annotations

from bench.ray import serving
from bench.ray.cluster import Measurement
from bench.ray.command import CASES, WAYS, Case, Question, report
from bench.results import Coverage

MIB = 1 << 20


def test_every_way_is_measured_in_every_case_of_its_node() -> None:
    calls = {case: ways for case, ways in CASES.items() if isinstance(case, Case)}
    assert {case.place for case in calls} == set(WAYS)
    assert all(ways == WAYS[case.place] for case, ways in calls.items() if case.nbytes)
    assert all(case.window * case.nbytes <= 192 * MIB for case in calls)
    assert {case.window for case in calls if case.nbytes == MIB} == {1, 16}
    assert set(CASES) - set(calls) == {Question(what, window) for what in ("text", "picture") for window in (1, 16)}
    assert {verdict.met for verdict in report({}, Coverage.of([], {}), "").targets} == {None}


def test_the_worse_window_decides_a_target() -> None:
    alone, many = Case("same", MIB, 1), Case("same", MIB, 16)
    measured = {
        alone: {"shmring": [Measurement(900.0, 0.1)] * 3, "numpy": [Measurement(100.0, 1.0)] * 3},
        many: {"shmring": [Measurement(900.0, 0.1)] * 3, "numpy": [Measurement(per_s, 1.0) for per_s in (100.0, 150.0, 150.0)]},
        Case("other", 0): {"connecting": [Measurement(25.0, 9.0)] * 3},
    }
    findings = report(measured, Coverage.of([], {}), "ray 2.60.0")
    verdicts = {(verdict.what, verdict.at): (verdict.met, verdict.measured) for verdict in findings.targets}
    assert verdicts["Ray, same node, one copy: requests/s of calls with numpy", "1 MB"] == (False, "6 x")
    assert verdicts["Ray, connecting", "either node"] == (True, "40 ms")
    assert sum(met is not None for met, _ in verdicts.values()) == 2
    assert [table.title for table in findings.tables] == ["Requests of the same node", "Connecting"]


def test_ray_serve_is_judged_by_the_cpu_that_a_request_adds() -> None:
    question = Question("picture", 16)
    measured = {
        question: {
            serving.ON_RAY: [serving.Measurement(40.0, 15.0, 11.0)] * 3,
            serving.ALONE: [serving.Measurement(50.0, 10.5, 10.0)] * 3,
        }
    }
    findings = report(measured, Coverage.of([], {}), "ray 2.60.0")
    verdict = next(each for each in findings.targets if each.what.startswith("Ray Serve, direct ingress, a picture"))
    assert (verdict.met, verdict.measured) == (True, "1.1 x")
    (table,) = findings.tables
    assert table.rows[0][-2:] == ["1.43 x", "1.10 x"], "both are shown"
