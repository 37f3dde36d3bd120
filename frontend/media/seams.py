"""Where the times of a track begin anew: in files that were joined, and where a sender's clock was set.

Parts of a recording are often put one behind the other, byte by byte, and each part's times begin where they like: at 0
again, before the end of the part before, or hours later. Times that go back, or jump further than a clip of that format can
stand still, begin a *part*. The parts follow each other in the order of the file.

What is no seam: frames that are shown in another order than they are stored in, since a keyframe is shown after all that is
stored before it; a clock of 33 bits that starts at 0 again, which libav counts on; frames that are shown for long.

Pure: it sees numbers only.
"""

from __future__ import annotations

from fractions import Fraction

__all__ = ["Seams", "max_gap_s"]

_MAX_PAUSE_S = 600.0  # nobody looks at one frame for longer
_MAX_TS_PAUSE_S = 10.0  # the standard asks for a time every 0.7 s (ISO 13818-1, 2.7.4); this is also ffmpeg's bound
_TOLERATED_S = Fraction(1, 10)  # by which the order of decoding goes back where times are rounded or guessed


def max_gap_s(demuxer: str, max_duration_s: float) -> float:
    """Returns how many seconds there may be between two frames. More is no pause but another clock.

    Args:
        demuxer: libav's name of the format.
        max_duration_s: of all that is accepted.
    """
    return _MAX_TS_PAUSE_S if demuxer == "mpegts" else max(_MAX_PAUSE_S, max_duration_s)


class Seams:
    """Follows the times of a track, in the order in which they are stored.

    Args:
        seconds: that one unit of time lasts.
        max_gap_s: as :func:`max_gap_s` says; None: any gap is a pause.

    Attributes:
        times_s: of the seams, in seconds of what came before. Those are left out where two frames have the same time, which may
            be rounding: both are shown.
    """

    def __init__(self, seconds: Fraction, max_gap_s: float | None) -> None:
        self.times_s: list[float] = []
        self._seconds = seconds
        self._max_gap = None if max_gap_s is None else int(Fraction(max_gap_s) / seconds)
        self._tolerated = int(_TOLERATED_S / seconds)
        self._past = 0  # how long all parts before lasted
        self._is_empty = True
        self._first = self._latest = self._end = 0
        self._decoded: int | None = None

    def add(self, position: int, duration: int, *, is_keyframe: bool, decoded: int | None = None) -> bool:
        """Takes the next time; returns whether a part begins there.

        Args:
            position: when it is shown.
            duration: for how long; 0: not known.
            is_keyframe: all that is stored before it is shown before it, too.
            decoded: when it is decoded; None: the format does not store this.
        """
        duration = self.duration_of(duration)
        is_seam = not self._is_empty and self._begins_part(position, is_keyframe, decoded)
        if is_seam:
            self._past += self._end - self._first
            if position != self._latest:
                self.times_s.append(float(self._past * self._seconds))
        if is_seam or self._is_empty:
            self._is_empty = False
            self._first, self._latest, self._end, self._decoded = position, position, position + duration, decoded
        self._first = min(self._first, position)
        self._latest = max(self._latest, position)
        self._end = max(self._end, position + duration)
        if decoded is not None:
            self._decoded = decoded if self._decoded is None else max(self._decoded, decoded)
        return is_seam

    def duration_of(self, duration: int) -> int:
        """Returns how long a frame is shown; 0, which is not known, if it could not be shown for so long."""
        return 0 if self._max_gap is not None and duration > self._max_gap else duration

    def length_s(self) -> float:
        """Returns how long all parts together last, in seconds."""
        return float((self._past + self._end - self._first) * self._seconds)

    def _begins_part(self, position: int, is_keyframe: bool, decoded: int | None) -> bool:
        if self._max_gap is not None and abs(position - self._latest) > self._max_gap:
            return True
        if is_keyframe:  # at the same time as another is a seam only if that one lasts
            return position < self._latest or position == self._latest < self._end
        return decoded is not None and self._decoded is not None and decoded < self._decoded - self._tolerated
