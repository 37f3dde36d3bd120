"""What frontends tell an engine, for people: requests that are on their way to it, by caller, and how late their loops are.

A frontend reports each second, as long as there is something to tell. Who has not reported for longer has nothing, or has gone.
"""

from __future__ import annotations

from collections import Counter

from shmring.engine.protocol import FrontendReport

__all__ = ["FrontendReports"]

_FRESH_S = 3.0  # a busy frontend may be late


class FrontendReports:
    """The last report of each frontend. A book: the time is an argument of each call."""

    def __init__(self) -> None:
        self._reports: dict[str, tuple[float, FrontendReport]] = {}

    def take(self, report: FrontendReport, now: float) -> None:
        """Takes a report in the place of the last one of the same frontend."""
        self._drop_old(now)
        self._reports[report.frontend] = now, report

    def requests(self, now: float) -> Counter[str]:
        """Returns how many requests are being prepared, by caller."""
        self._drop_old(now)
        counts = Counter[str]()
        for _, report in self._reports.values():
            counts.update({owner: requests for owner, (requests, _) in report.callers.items() if requests})
        return counts

    def text(self, now: float) -> str:
        """Returns a sentence on them, if there are any."""
        count = self.requests(now).total()
        if not count:
            return ""
        reports = [report for _, report in self._reports.values()]
        busy, decoders = sum(report.busy for report in reports), sum(report.decoders for report in reports)
        waiting = sum(report.waiting for report in reports)
        requests = "1 request is" if count == 1 else f"{count} requests are"
        media = f"{busy} of {decoders} decoders are busy{f', and {waiting} media wait for one' if waiting else ''}"
        return f"{requests} being prepared in frontends (bodies, pictures, sounds; {media})."

    def lags(self, now: float) -> dict[str, tuple[float, float]]:
        """Returns how late the loops of frontends were, in seconds, and how many seconds ago that was over, by their titles."""
        self._drop_old(now)
        lags = [(report.lag_s, report.title, report.lag_ago_s + now - at) for at, report in self._reports.values()]
        return {title: (lag_s, ago_s) for lag_s, title, ago_s in sorted(lags)}

    def _drop_old(self, now: float) -> None:
        self._reports = {name: each for name, each in self._reports.items() if now - each[0] < _FRESH_S}
