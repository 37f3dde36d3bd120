"""``bench ray``: what is planned, and what its report makes of measurements. (The cluster itself: ``make test-ray``.)"""

from __future__ import annotations

from bench.ray.cluster import Measurement
from bench.ray.command import CASES, PLAN, WAYS, Case

MIB = 1 << 20


def test_every_way_is_measured_in_every_case_of_its_node() -> None:
    assert {case.place for case in CASES} == set(WAYS)
    assert all(ways == WAYS[case.place] for case, ways in CASES.items() if case.nbytes)
    assert all(case.window * case.nbytes <= 192 * MIB for case in CASES)
    assert {case.window for case in CASES if case.nbytes == MIB} == {1, 16}
    assert {verdict.met for verdict in PLAN.findings({}).targets} == {None}


def test_the_worse_window_decides_a_target() -> None:
    alone, many = Case("same", MIB, 1), Case("same", MIB, 16)
    measured = {
        alone: {"shmring": [Measurement(900.0, 0.1)] * 3, "numpy": [Measurement(100.0, 1.0)] * 3},
        many: {"shmring": [Measurement(900.0, 0.1)] * 3, "numpy": [Measurement(per_s, 1.0) for per_s in (100.0, 150.0, 150.0)]},
        Case("other", 0): {"connecting": [Measurement(25.0, 9.0)] * 3},
    }
    findings = PLAN.findings(measured)
    verdicts = {(verdict.what, verdict.at): (verdict.met, verdict.measured) for verdict in findings.targets}
    assert verdicts["Ray, same node, one copy: requests/s of calls with numpy", "1 MB"] == (False, "6 x")
    assert verdicts["Ray, connecting", "either node"] == (True, "40 ms")
    assert sum(met is not None for met, _ in verdicts.values()) == 2
    assert [table.title for table in findings.tables] == ["Requests of the same node", "Connecting"]
