"""``bench sglang``: what its report makes of measurements. (SGLang's own ends: ``make test-sglang``.)"""

from __future__ import annotations

from bench.results import Coverage
from bench.sglang.command import CASES, report
from bench.sglang.ends import Measurement


def test_every_column_and_target_is_of_what_was_measured() -> None:
    runs = {"shmring": [Measurement(2.0, 0.5, 0.5)] * 3, "sglang": [Measurement(10.0, 4.0, 4.0, inline=1)] * 3}
    findings = report(dict.fromkeys(CASES, runs), Coverage([], []), "sglang 0.5")
    assert findings.tables[0].rows[:2] == [
        ["10.8 MB, 1 rank", "shmring", "2.00", "+0% +0%", "1.00", "0.50", "0.50", "0.20 x", "0.12 x", "0"],
        ["10.8 MB, 1 rank", "sglang", "10.00", "+0% +0%", "8.00", "4.00", "4.00", "", "", "3"],
    ]
    assert [verdict.met for verdict in findings.targets] == [True] * 5
    assert {verdict.met for verdict in report({}, Coverage([], []), "").targets} == {None}
