"""Which requests are on their way, as frontends tell it."""

from __future__ import annotations

from shmring.engine.preparing_reports import PreparingReports
from shmring.engine.protocol import PreparingReport


def test_the_last_report_of_each_frontend_counts_for_three_seconds() -> None:
    reports = PreparingReports()
    assert (reports.requests(0.0), reports.text(0.0)) == ({}, "")
    reports.take(PreparingReport("first", {"alice": (9, 1.0)}, 4, 4, 9), 10.0)
    reports.take(PreparingReport("first", {"alice": (7, 1.0), "gone": (0, 1.0)}, 4, 4, 20), 11.0)
    reports.take(PreparingReport("second", {"alice": (4, 1.0), "bob": (1, 0.0)}, 4, 3, 5), 12.0)
    assert reports.requests(12.0) == {"alice": 11, "bob": 1}
    assert reports.text(12.0) == (
        "12 requests are being prepared in frontends (bodies, pictures, sounds; 7 of 8 decoders are busy, and 25 media wait "
        "for one)."
    )
    assert reports.requests(14.5) == {"alice": 4, "bob": 1}
    assert not reports.requests(15.0)
    assert not reports._reports
