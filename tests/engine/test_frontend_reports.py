"""Which requests are on their way, and how late loops are, as frontends tell it."""

from __future__ import annotations

from shmring.engine.frontend_reports import FrontendReports
from shmring.engine.protocol import FrontendReport


def report(name: str, callers: dict[str, tuple[int, float]], busy: int, waiting: int, lag_s: float = 0.0) -> FrontendReport:
    return FrontendReport(name, f"the {name}", callers, 4, busy, waiting, lag_s, 2.0)


def test_the_last_report_of_each_frontend_counts_for_three_seconds() -> None:
    reports = FrontendReports()
    assert (reports.requests(0.0), reports.text(0.0)) == ({}, "")
    reports.take(report("first", {"alice": (9, 1.0)}, 4, 9), 10.0)
    reports.take(report("first", {"alice": (7, 1.0), "gone": (0, 1.0)}, 4, 20), 11.0)
    reports.take(report("second", {"alice": (4, 1.0), "bob": (1, 0.0)}, 3, 5), 12.0)
    assert reports.requests(12.0) == {"alice": 11, "bob": 1}
    assert reports.text(12.0) == (
        "12 requests are being prepared in frontends (bodies, pictures, sounds; 7 of 8 decoders are busy, and 25 media wait "
        "for one)."
    )
    assert reports.requests(14.5) == {"alice": 4, "bob": 1}
    assert not reports.requests(15.0)
    assert not reports._reports


def test_of_each_frontend_it_is_told_how_late_its_loop_was_and_when() -> None:
    reports = FrontendReports()
    for number, lag_s in enumerate((4.0, 0.5, 0.25)):
        reports.take(report("first", {}, 0, 0, lag_s), 10.0 + number)
    reports.take(report("second", {}, 0, 0, 0.1), 13.0)
    assert reports.lags(13.5) == {"the first": (0.25, 3.5), "the second": (0.1, 2.5)}
    assert reports.lags(15.5) == {"the second": (0.1, 4.5)}


def test_of_frontends_with_one_title_the_latest_loop_is_told() -> None:
    reports = FrontendReports()
    for name, lag_s in (("first", 0.5), ("second", 4.0), ("third", 0.25)):
        reports.take(FrontendReport(name, "frontend", {}, 4, 0, 0, lag_s, 2.0), 10.0)
    assert reports.lags(10.0) == {"frontend": (4.0, 2.0)}
