"""The rule for what is missing: how shares are compared, and what callers are told."""

from __future__ import annotations

import pytest

from shmring.frontend.media.damage import Shortfall, accepted_shortfall, missing_packets, missing_s
from shmring.frontend.media.errors import MediaError
from tests.tables import for_each


def test_nothing_is_said_of_what_is_whole() -> None:
    assert accepted_shortfall("clip", [], 0.0) == ""
    assert missing_packets(0, 100, "frames") == []
    assert missing_s(None, 5.0) == missing_s(5.0, 6.0) == missing_s(5.0, 4.95) == []


def test_the_caller_is_told_all_that_is_missing() -> None:
    shortfalls = [*missing_s(10.0, 9.5), *missing_packets(4, 100, "frames"), *missing_s(10.0, 9.5)]
    told = accepted_shortfall("clip", shortfalls, 0.1)
    assert told == "the clip is damaged or truncated: 0.5 of 10 s (5 %) are missing; 4 of 100 frames (4 %) can't be decoded"


@for_each("share", [0.0, 0.1, 0.5])
def test_as_much_as_is_accepted_may_be_missing_and_no_more(share: float) -> None:
    accepted_shortfall("clip", [Shortfall(missing=1000 * share, promised=1000, unit="rows")], share)
    with pytest.raises(
        MediaError, match=rf"at most {100 * share:g} % may be missing \(max_missing_share\)\. Send the whole file"
    ):
        accepted_shortfall("clip", [Shortfall(missing=1000 * share + 1, promised=1000, unit="rows")], share)


def test_two_packets_at_a_cut_are_told_and_not_counted() -> None:
    assert "2 of 4 packets" in accepted_shortfall("recording", missing_packets(2, 4, "packets"), 0.0)
    with pytest.raises(MediaError, match="3 of 4 packets"):
        accepted_shortfall("recording", missing_packets(3, 4, "packets"), 0.2)


def test_an_end_of_unknown_length_is_told_and_accepted() -> None:
    end = Shortfall(missing=0, promised=0, unit="", cause="its end is missing (OGG)")
    assert accepted_shortfall("recording", [end], 0.0) == "the recording is damaged or truncated: its end is missing (OGG)"


def test_all_is_not_a_hundred_percent_of_it() -> None:
    with pytest.raises(MediaError, match=r"1000 of 1000 rows \(all\) are missing"):
        accepted_shortfall("picture", [Shortfall(missing=1000, promised=1000, unit="rows")], 0.9)
