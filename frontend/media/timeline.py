"""Which frames of a clip are shown when, which of them are wanted, and which packets must be decoded for those.

Pure: it gets packets, in the order in which they are stored, which is the order of decoding. Frames are shown in another
one where some refer to later ones. A frame's time is its packet's presentation timestamp, never its number divided by a frame
rate; so variable frame rates, negative beginnings and the cuts of edit lists come out right.

Where timestamps are missing, frames are counted as they come out of the decoder, and none is skipped.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from array import array
from fractions import Fraction

import numpy as np

__all__ = ["Selection", "Timeline", "frames_to_sample"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The frames of a clip that are wanted, in the order in which they are shown.

    Attributes:
        positions: their timestamps, in the stream's unit of time; or their numbers, where there are no timestamps.
        starts: for each the number of the packet from which decoding must begin to get it.
        first_position: of the clip's first frame.
        seconds: that one position lasts.
        duration_s: of the clip.
        has_timestamps: whether positions are timestamps.
        num_decoded: how many packets must be decoded for them.
    """

    positions: tuple[int, ...]
    starts: tuple[int, ...]
    first_position: int
    seconds: Fraction
    duration_s: float
    has_timestamps: bool
    num_decoded: int

    def time_of(self, position: int) -> float:
        """Returns seconds from the clip's first frame."""
        return float((position - self.first_position) * self.seconds)


def frames_to_sample(total: int, duration_s: float, num_frames: int, fps: float | None) -> list[int]:
    """Returns which of a clip's frames are taken: evenly over it, the first and the last among them.

    These are ``linspace(0, total - 1, n)``, rounded down, of frames, not of time; ``n`` is the number wanted, or fewer if
    that would be more than so many a second.

    Args:
        total: frames of the clip, at least 1.
        duration_s: of the clip.
        num_frames: wanted; -1: all.
        fps: frames a second, at most.

    Source: vLLM's OpenCV video backend, which chooses the same.
    """
    count = total if num_frames < 0 else min(num_frames, total)
    if fps is not None:
        count = min(count, math.floor(duration_s * fps))
    count = max(1, count)
    return [int(index) for index in np.linspace(0, total - 1, count)]


class Timeline:
    """Collects a clip's packets.

    Args:
        seconds: that one unit of the stream's timestamps lasts.
        frame_rate: of the stream, if it is known; used where timestamps are missing.
        trusts_keyframes: whether decoding can begin at each packet that is said to be a keyframe, and not at the first only.
    """

    def __init__(self, seconds: Fraction, frame_rate: Fraction | None, trusts_keyframes: bool) -> None:
        self.num_packets = 0
        self._seconds = seconds
        self._frame_rate = frame_rate
        self._trusts_keyframes = trusts_keyframes
        self._positions = array("q")
        self._packets = array("q")
        self._keyframe_packets = array("q")
        self._keyframe_positions = array("q")
        self._has_timestamps = True
        self._end: int | None = None

    def add(self, position: int | None, duration: int, is_keyframe: bool, is_shown: bool) -> None:
        """Takes the next packet.

        Args:
            position: its timestamp, if it has one.
            duration: of its frame; 0 where that is not known.
            is_keyframe: whether it refers to no other.
            is_shown: whether it becomes a frame that is to be seen.
        """
        number = self.num_packets
        self.num_packets += 1
        if position is None:
            self._has_timestamps = False
            position = number
        if is_keyframe and (self._trusts_keyframes or not self._keyframe_packets):
            self._keyframe_packets.append(number)
            self._keyframe_positions.append(position)
        if is_shown and self._keyframe_packets:  # what comes before the first keyframe can't be decoded
            self._positions.append(position)
            self._packets.append(number)
            if duration > 0:
                self._end = max(position + duration, self._end if self._end is not None else position + duration)

    def span_s(self) -> float:
        """Returns the seconds from the first frame to the last, so far as is known."""
        if not self._has_timestamps or not self._positions:
            return float(self.num_packets / self._frame_rate) if self._frame_rate else 0.0
        # Frames are stored nearly in order, and this is asked for each: the ends tell enough.
        return float(abs(self._positions[-1] - self._positions[0]) * self._seconds)

    def end_s(self) -> float:
        """Returns when the last frame ends, counted from the time 0 of the file, or from its first frame if that is before."""
        if not self._positions:
            return 0.0
        if not self._has_timestamps:
            return self.span_s()
        positions = sorted(set(self._positions))
        return float((self._end_of(positions) - min(positions[0], 0)) * self._seconds)

    def select(self, num_frames: int, fps: float | None) -> Selection | None:
        """Chooses frames, as :func:`frames_to_sample` says; None: there are none."""
        if not self._has_timestamps:
            return self._select_by_number(num_frames, fps)
        packet_at = dict(zip(self._positions, self._packets, strict=True))  # of frames at the same time the last is seen
        if not packet_at:
            return None
        positions = sorted(packet_at)
        duration_s = float((self._end_of(positions) - positions[0]) * self._seconds)
        selected = [positions[index] for index in frames_to_sample(len(positions), duration_s, num_frames, fps)]
        starts = [self._start_of(packet_at[position], position) for position in selected]
        num_decoded = reached = 0
        for position, start in zip(selected, starts, strict=True):
            packet = packet_at[position]
            num_decoded += max(0, packet + 1 - max(start, reached))
            reached = max(reached, packet + 1)
        return Selection(
            positions=tuple(selected),
            starts=tuple(starts),
            first_position=positions[0],
            seconds=self._seconds,
            duration_s=duration_s,
            has_timestamps=True,
            num_decoded=num_decoded,
        )

    def _select_by_number(self, num_frames: int, fps: float | None) -> Selection | None:
        total = len(self._positions)
        if not total:
            return None
        seconds = 1 / self._frame_rate if self._frame_rate else Fraction(0)
        selected = frames_to_sample(total, float(total * seconds), num_frames, fps if seconds else None)
        return Selection(
            positions=tuple(selected),
            starts=(self._keyframe_packets[0],) * len(selected),
            first_position=0,
            seconds=seconds,
            duration_s=float(total * seconds),
            has_timestamps=False,
            num_decoded=self._packets[-1] + 1 if selected[-1] == total - 1 else selected[-1] + 1,
        )

    def _end_of(self, positions: list[int]) -> int:
        """When the last frame ends: it lasts as long as it says, or else as long as the others do on average."""
        last = positions[-1]
        if self._end is not None and self._end > last:
            return self._end
        if len(positions) > 1:
            return last + (last - positions[0]) // (len(positions) - 1)
        return last

    def _start_of(self, packet: int, position: int) -> int:
        """The last keyframe that is stored before a frame and shown before it.

        One that is stored before and shown after it begins what follows: frames between the two may refer to the one before.
        """
        index = bisect.bisect_right(self._keyframe_packets, packet) - 1
        while index > 0 and self._keyframe_positions[index] > position:
            index -= 1
        return self._keyframe_packets[index]
