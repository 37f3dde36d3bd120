"""Where times begin anew: nothing but numbers."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from shmring.frontend.media.seams import Seams, max_gap_s
from tests.tables import for_each

SECONDS = Fraction(1, 25)


def seams_of(
    times: list[int], *, keyframes: set[int] | None = None, max_gap_s: float | None = 600.0, decoded: list[int] | None = None
) -> list[int]:
    """The numbers of the frames with which parts begin."""
    seams = Seams(SECONDS, max_gap_s)
    return [
        number
        for number, time in enumerate(times)
        if seams.add(
            time, 1, is_keyframe=keyframes is None or number in keyframes, decoded=decoded[number] if decoded else None
        )
    ]


def test_times_that_go_back_begin_a_part() -> None:
    assert seams_of([*range(10), *range(10), *range(5, 15)]) == [10, 20]


def test_an_overlap_of_one_frame_is_a_seam() -> None:
    assert seams_of([*range(10), *range(9, 20)]) == [10]


@for_each(("jump", "is_seam"), [(15_000, False), (15_001, True), (-15_001, True)])
def test_a_jump_that_is_too_far_begins_a_part_also_without_a_keyframe(jump: int, is_seam: bool) -> None:
    assert seams_of([*range(10), 9 + jump, 10 + jump], keyframes={0}) == ([10] if is_seam else [])


def test_a_transport_stream_stands_still_for_ten_seconds_at_most() -> None:
    assert max_gap_s("mpegts", 600) == 10
    assert max_gap_s("mov", 5) == 600
    assert max_gap_s("matroska", 3600) == 3600


def test_frames_that_are_stored_in_another_order_are_no_seam() -> None:
    # I0 P3 B1 B2 | I6 B4 B5 P9 B7 B8
    assert seams_of([0, 3, 1, 2, 6, 4, 5, 9, 7, 8], keyframes={0, 4}) == []


def test_frames_that_are_shown_for_long_are_no_seam() -> None:
    assert seams_of([0, 1, 9000, 9001, 20_000, 10_000], keyframes={0}) == []


def test_two_frames_at_a_time_are_a_seam_only_if_the_first_one_lasts_and_nothing_is_said() -> None:
    seams = Seams(SECONDS, None)
    assert [seams.add(5, 0, is_keyframe=True) for _ in range(3)] == [False, False, False]
    assert [seams.add(5, 1, is_keyframe=True) for _ in range(3)] == [False, True, True]
    assert seams.times_s == []


def test_where_the_order_of_decoding_is_stored_it_tells_without_keyframes() -> None:
    times = [*range(20), *range(20)]
    assert seams_of(times, keyframes={0}, decoded=times) == [20]
    assert seams_of([0, 1, 2, 1, 2, 3], keyframes={0}, decoded=[0, 1, 2, 1, 2, 3]) == []  # rounding, and guesses


def test_one_wild_time_is_a_part_of_its_own() -> None:
    times = [*range(10), 10**6, *range(11, 20)]
    assert seams_of(times, keyframes={0}) == [10, 11]


def test_a_frame_that_is_shown_for_too_long_lasts_for_an_unknown_time() -> None:
    seams = Seams(SECONDS, 600)
    for time, duration in ((0, 1), (1, 10**6), (10**6 + 1, 1), (10**6 + 2, 10**9)):
        seams.add(time, duration, is_keyframe=False)
    assert seams.length_s() == 0.08
    assert len(seams.times_s) == 1


def test_parts_are_added_up() -> None:
    seams = Seams(SECONDS, 600)
    for time in [*range(25), *range(100_000, 100_050), *range(75)]:
        seams.add(time, 1, is_keyframe=True)
    assert seams.times_s == [1, 3]
    assert seams.length_s() == 6


@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(0, 100), st.booleans()), max_size=60))
def test_all_parts_together_last_as_long_as_their_frames_at_least(frames: list[tuple[int, int, bool]]) -> None:
    seams = Seams(SECONDS, 600)
    num_seams = sum(seams.add(time, duration, is_keyframe=is_keyframe) for time, duration, is_keyframe in frames)
    assert num_seams >= len(seams.times_s)
    assert seams.times_s == sorted(seams.times_s)
    assert seams.length_s() >= (seams.times_s or [0])[-1]
