"""Which frames are wanted, and which packets they need: nothing but numbers."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmring.frontend.media.timeline import Timeline, frames_to_sample
from tests.tables import for_each


def timeline_of(positions: list[int | None], keyframes: set[int], rate: int = 10, duration: int = 1) -> Timeline:
    timeline = Timeline(Fraction(1, rate), Fraction(rate), trusts_keyframes=True)
    for number, position in enumerate(positions):
        timeline.add(position, duration, number in keyframes, True)
    return timeline


@given(total=st.integers(1, 5000), num_frames=st.integers(1, 600))
def test_frames_are_spread_as_vllm_spreads_them(total: int, num_frames: int) -> None:
    indices = frames_to_sample(total, total / 30, num_frames, None)
    assert indices == np.linspace(0, total - 1, min(total, num_frames), dtype=int).tolist()
    assert indices == sorted(set(indices))


@for_each(
    ("num_frames", "fps", "count"),
    [(-1, None, 100), (200, None, 100), (16, None, 16), (16, 1.0, 10), (-1, 2.0, 20), (5, 2.0, 5), (16, 0.01, 1)],
)
def test_the_smaller_of_two_limits_counts(num_frames: int, fps: float | None, count: int) -> None:
    assert len(frames_to_sample(100, 10.0, num_frames, fps)) == count


def test_decoding_begins_at_the_keyframe_before() -> None:
    selection = timeline_of(list(range(30)), {0, 10, 20}).select(4, None)
    assert selection is not None
    assert selection.positions == (0, 9, 19, 29)
    assert selection.starts == (0, 0, 10, 20)
    assert selection.num_decoded == 30
    assert selection.duration_s == 3.0
    assert [selection.time_of(position) for position in selection.positions] == [0, 0.9, 1.9, 2.9]


def test_groups_of_pictures_without_a_wanted_frame_are_not_decoded() -> None:
    selection = timeline_of(list(range(1000)), set(range(0, 1000, 10))).select(3, None)
    assert selection is not None
    assert selection.starts == (0, 490, 990)
    assert selection.num_decoded == 1 + 10 + 10


def test_frames_shown_before_their_keyframe_need_the_one_before() -> None:
    # Stored: I0 P3 B1 B2 | I6 B4 B5: those two are stored after the second keyframe and refer to the frame at 3.
    selection = timeline_of([0, 3, 1, 2, 6, 4, 5], {0, 4}).select(-1, None)
    assert selection is not None
    assert selection.positions == (0, 1, 2, 3, 4, 5, 6)
    assert selection.starts == (0, 0, 0, 0, 0, 0, 4)


def test_what_comes_before_the_first_keyframe_is_not_there() -> None:
    selection = timeline_of(list(range(10)), {4}).select(-1, None)
    assert selection is not None
    assert selection.positions == (4, 5, 6, 7, 8, 9)
    assert selection.first_position == 4


def test_time_may_begin_anywhere_and_go_unevenly() -> None:
    selection = timeline_of([-7, -6, 3, 90], {0}, duration=0).select(-1, None)
    assert selection is not None
    assert [selection.time_of(position) for position in selection.positions] == [0, 0.1, 1.0, 9.7]
    assert selection.duration_s == pytest.approx(9.7 + 97 // 3 / 10)  # the last frame lasts as long as others on average


def test_frames_at_the_same_time_count_as_a_single_frame() -> None:
    selection = timeline_of([0, 1, 1, 2], {0}).select(-1, None)
    assert selection is not None
    assert selection.positions == (0, 1, 2)


def test_frames_that_are_not_shown_are_not_chosen() -> None:
    timeline = Timeline(Fraction(1, 10), None, trusts_keyframes=True)
    for number in range(6):
        timeline.add(number, 1, number == 0, number % 2 == 1)
    selection = timeline.select(-1, None)
    assert selection is not None
    assert selection.positions == (1, 3, 5)


def test_keyframes_that_are_not_trusted_are_no_beginnings() -> None:
    timeline = Timeline(Fraction(1, 10), None, trusts_keyframes=False)
    for number in range(9):
        timeline.add(number, 1, True, True)
    selection = timeline.select(3, None)
    assert selection is not None
    assert selection.starts == (0, 0, 0)


def test_without_timestamps_frames_are_counted() -> None:
    selection = timeline_of([None] * 20, {0, 10}).select(3, None)
    assert selection is not None
    assert not selection.has_timestamps
    assert selection.positions == (0, 9, 19)
    assert selection.starts == (0, 0, 0)
    assert selection.duration_s == 2.0
    assert selection.time_of(9) == pytest.approx(0.9)


@for_each("positions", [[], [None], [1]])
def test_without_a_keyframe_there_is_nothing(positions: list[int | None]) -> None:
    assert timeline_of(positions, set()).select(5, None) is None


def test_parts_follow_each_other() -> None:
    positions = [*range(10), *range(10), *range(5, 15), *range(900, 910)]
    timeline = Timeline(Fraction(1, 10), None, trusts_keyframes=True, max_gap_s=60)
    for number, position in enumerate(positions):
        timeline.add(position, 1, number % 5 == 0, True)
    selection = timeline.select(-1, None)
    assert selection is not None
    assert selection.positions == tuple(range(40))
    assert selection.starts == tuple(number // 5 * 5 for number in range(40))
    assert selection.shifts == ((0, 0), (10, 10), (20, 15), (30, 30 - 900))
    assert [selection.shift_of(packet) for packet in (0, 9, 10, 29, 30, 39)] == [0, 0, 10, 15, -870, -870]
    assert selection.duration_s == 4
    assert timeline.seams_s == [1, 2, 3]
    assert timeline.select(4, None).positions == (0, 13, 26, 39)  # type: ignore[union-attr]


def test_frames_of_a_part_begin_with_its_first_one_to_be_shown_not_to_be_stored() -> None:
    # Twice I2 B0 B1 P5 B3 B4: what is shown first is stored second.
    selection = timeline_of([2, 0, 1, 5, 3, 4] * 2, {0, 6}).select(-1, None)
    assert selection is not None
    assert selection.positions == tuple(range(12))
    assert selection.starts == (0,) * 6 + (6,) * 6


def test_frames_of_a_piece_need_none_of_another() -> None:
    timeline = Timeline(Fraction(1, 10), None, trusts_keyframes=False)
    for _ in range(2):
        timeline.begin_piece()
        for number in range(10):
            timeline.add(number, 1, number in (2, 5), True)
        assert timeline.piece_end_s() == 1
    selection = timeline.select(-1, None)
    assert selection is not None
    assert selection.positions == tuple(range(2, 18))  # what comes before a piece's first keyframe is not there
    assert selection.starts == (2,) * 8 + (12,) * 8


def test_frames_beside_a_seam_are_not_corrupt_because_packets_are_counted_anew() -> None:
    timeline = Timeline(Fraction(1, 10), None, trusts_keyframes=True, max_gap_s=10)
    for number, position in enumerate([*range(10), *range(10)]):
        timeline.add(position, 1, number in (0, 10), True, is_corrupt=number in (3, 8, 10, 15))
    assert timeline.num_corrupt == 2


@given(
    positions=st.lists(st.integers(-(2**62), 2**62), min_size=1, max_size=50),
    keyframes=st.sets(st.integers(0, 49)),
    num_frames=st.integers(1, 20),
)
def test_whatever_a_file_says_there_is_an_order(positions: list[int], keyframes: set[int], num_frames: int) -> None:
    selection = timeline_of(list(positions), keyframes | {0}).select(num_frames, None)
    assert selection is not None
    assert list(selection.positions) == sorted(set(selection.positions))
    assert min(num_frames, len(set(positions))) <= len(selection.positions) <= min(num_frames, len(positions))
    assert set(selection.starts) <= keyframes | {0}
    assert 1 <= selection.num_decoded <= len(positions)
