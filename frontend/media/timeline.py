"""Which frames of a clip are shown when, which of them are wanted, and which packets must be decoded for those.

Pure: it gets packets, in the order in which they are stored, which is the order of decoding. Frames are shown in another
one where some refer to later ones. A frame's time is its packet's presentation timestamp, never its number divided by a frame
rate; so variable frame rates, negative beginnings and the cuts of edit lists come out right.

A file may have several parts, one behind the other, whose times begin anew (:mod:`shmring.frontend.media.seams`). In each
part, frames are put in the order of their times. A part begins when the part before ends; its times are shifted by that much.

Where timestamps are missing, frames are counted as they come out of the decoder, and none is skipped.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from array import array
from fractions import Fraction

import numpy as np

from shmring.frontend.media.seams import Seams

__all__ = ["Selection", "Timeline", "frames_to_sample"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selection:
    """The frames of a clip that are wanted, in the order in which they are shown.

    Attributes:
        positions: their timestamps, shifted, in the stream's unit of time; or their numbers, where there are no timestamps.
        starts: for each the number of the packet from which decoding must begin to get it.
        first_position: of the clip's first frame.
        seconds: that one position lasts.
        duration_s: of the clip.
        has_timestamps: whether positions are timestamps.
        num_decoded: how many packets must be decoded for them.
        shifts: of each part, the number of its first packet, and by how much its timestamps are shifted.
    """

    positions: tuple[int, ...]
    starts: tuple[int, ...]
    first_position: int
    seconds: Fraction
    duration_s: float
    has_timestamps: bool
    num_decoded: int
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)

    def shift_of(self, packet: int) -> int:
        """Returns by how much the timestamp of a packet is shifted, by the packet's number."""
        return self.shifts[bisect.bisect_right(self.shifts, packet, key=lambda shift: shift[0]) - 1][1]

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


@dataclasses.dataclass(kw_only=True)
class _Part:
    """Frames whose times go on; or those of a piece.

    Attributes:
        first_packet: its number.
        first_frame: the place of its first frame among all.
        end: when its last frame ends, so far as is known.
    """

    first_packet: int
    first_frame: int
    end: int | None = None


class Timeline:
    """Collects a clip's packets.

    Args:
        seconds: that one unit of the stream's timestamps lasts.
        frame_rate: of the stream, if it is known; used where timestamps are missing.
        trusts_keyframes: whether decoding can begin at each packet that is said to be a keyframe, and not only at the first
            one of each piece.
        max_gap_s: between two frames of a part; None: any.

    Attributes:
        num_packets: that were taken.
        num_unreachable: of these, how many come before the first keyframe of their piece.
    """

    def __init__(
        self, seconds: Fraction, frame_rate: Fraction | None, trusts_keyframes: bool, max_gap_s: float | None = None
    ) -> None:
        self.num_packets = self.num_unreachable = 0
        self._seconds = seconds
        self._frame_rate = frame_rate
        self._trusts_keyframes = trusts_keyframes
        self._seams = Seams(seconds, max_gap_s)
        self._parts = [_Part(first_packet=0, first_frame=0)]
        self._positions = array("q")
        self._packets = array("q")
        self._keyframe_packets = array("q")
        self._keyframe_positions = array("q")
        self._has_timestamps = True
        self._piece = _Part(first_packet=0, first_frame=0)
        self._corrupt_packets: list[int] = []

    @property
    def num_parts(self) -> int:
        """How many parts there are."""
        return len(self._parts)

    @property
    def num_corrupt(self) -> int:
        """How many packets are said to be there in part only, those not counted that are beside a seam.

        A transport stream counts its packets. Where another one begins, so does the count, and libav takes that for a loss: it
        marks one of the frames beside the seam.
        """
        seams = {part.first_packet - beside for part in self._parts[1:] for beside in (0, 1, 2)}
        return sum(packet not in seams for packet in self._corrupt_packets)

    @property
    def seams_s(self) -> list[float]:
        """Where parts begin, in seconds of what comes before."""
        return self._seams.times_s

    def begin_piece(self) -> None:
        """Says that the packets that follow refer to none of those before."""
        self._piece = _Part(first_packet=self.num_packets, first_frame=len(self._positions))

    def add(
        self,
        position: int | None,
        duration: int,
        is_keyframe: bool,
        is_shown: bool,
        *,
        decoded: int | None = None,
        is_corrupt: bool = False,
    ) -> None:
        """Takes the next packet.

        Args:
            position: its timestamp, if it has one.
            duration: of its frame; 0 where that is not known.
            is_keyframe: whether it refers to no other.
            is_shown: whether it becomes a frame that is to be seen.
            decoded: when it is decoded, if the format stores that.
            is_corrupt: whether it is said to be there in part only.
        """
        number = self.num_packets
        self.num_packets += 1
        duration = self._seams.duration_of(duration)
        if position is None:
            self._has_timestamps = False
            position = number
        if is_shown and self._has_timestamps and self._seams.add(position, duration, is_keyframe=is_keyframe, decoded=decoded):
            self._parts.append(_Part(first_packet=number, first_frame=len(self._positions)))
        if is_corrupt:
            self._corrupt_packets.append(number)
        can_begin = self._trusts_keyframes or not self._has_beginning
        if is_keyframe and can_begin:
            self._keyframe_packets.append(number)
            self._keyframe_positions.append(position)
        self.num_unreachable += is_shown and not self._has_beginning
        if is_shown and self._has_beginning:  # what comes before the first keyframe can't be decoded
            self._positions.append(position)
            self._packets.append(number)
            if duration > 0:
                for part in (self._parts[-1], self._piece):
                    part.end = max(position + duration, part.end if part.end is not None else position + duration)

    @property
    def _has_beginning(self) -> bool:
        """Whether there was a keyframe in this piece."""
        return bool(self._keyframe_packets) and self._keyframe_packets[-1] >= self._piece.first_packet

    def span_s(self) -> float:
        """Returns the seconds from the first frame to the last, so far as is known."""
        if not self._has_timestamps or not self._positions:
            return float(self.num_packets / self._frame_rate) if self._frame_rate else 0.0
        return self._seams.length_s()

    def piece_end_s(self) -> float:
        """Returns when a piece's last frame ends, counted from the time 0 of it, or from its first frame if that is before."""
        positions = sorted(set(self._positions[self._piece.first_frame :]))
        if not positions:
            return 0.0
        if not self._has_timestamps:
            return float((self.num_packets - self._piece.first_packet) / self._frame_rate) if self._frame_rate else 0.0
        return float((_end_of(positions, self._piece.end) - min(positions[0], 0)) * self._seconds)

    def select(self, num_frames: int, fps: float | None) -> Selection | None:
        """Chooses frames, as :func:`frames_to_sample` says; None: there are none."""
        if not self._has_timestamps:
            return self._select_by_number(num_frames, fps)
        frames, shifts, end = self._in_order()
        if not frames:
            return None
        first = frames[0][0]
        duration_s = float((end - first) * self._seconds)
        selected = [frames[index] for index in frames_to_sample(len(frames), duration_s, num_frames, fps)]
        starts = [self._start_of(packet, position - shift) for position, packet, shift in selected]
        num_decoded = reached = 0
        for (_, packet, _), start in zip(selected, starts, strict=True):
            num_decoded += max(0, packet + 1 - max(start, reached))
            reached = max(reached, packet + 1)
        return Selection(
            positions=tuple(position for position, _, _ in selected),
            starts=tuple(starts),
            first_position=first,
            seconds=self._seconds,
            duration_s=duration_s,
            has_timestamps=True,
            num_decoded=num_decoded,
            shifts=tuple(shifts),
        )

    def _in_order(self) -> tuple[list[tuple[int, int, int]], list[tuple[int, int]], int]:
        """Puts all frames in the order in which they are shown.

        Returns:
            Of each frame its shifted position, its packet, and by how much it is shifted; the parts' shifts; and when the last
            frame ends.
        """
        frames: list[tuple[int, int, int]] = []
        shifts: list[tuple[int, int]] = []
        end: int | None = None
        bounds = [part.first_frame for part in self._parts[1:]] + [len(self._positions)]
        for part, bound in zip(self._parts, bounds, strict=True):
            span = slice(part.first_frame, bound)
            # Of frames at the same time the last is seen.
            packet_at = dict(zip(self._positions[span], self._packets[span], strict=True))
            positions = sorted(packet_at)
            shift = 0 if end is None or not positions else end - positions[0]
            shifts.append((part.first_packet, shift))
            if positions:
                frames += [(position + shift, packet_at[position], shift) for position in positions]
                end = _end_of(positions, part.end) + shift
        return frames, shifts, end or 0

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

    def _start_of(self, packet: int, position: int) -> int:
        """The last keyframe that is stored before a frame and shown before it.

        One that is stored before and shown after it begins what follows: frames between the two may refer to the one before.
        """
        part = self._parts[bisect.bisect_right(self._parts, packet, key=lambda part: part.first_packet) - 1]
        index = bisect.bisect_right(self._keyframe_packets, packet) - 1
        while index > 0 and self._keyframe_packets[index] > part.first_packet and self._keyframe_positions[index] > position:
            index -= 1
        return self._keyframe_packets[index]


def _end_of(positions: list[int], end: int | None) -> int:
    """When the last frame ends: it lasts as long as it says, or else as long as the others do on average."""
    last = positions[-1]
    if end is not None and end > last:
        return end
    if len(positions) > 1:
        return last + (last - positions[0]) // (len(positions) - 1)
    return last
