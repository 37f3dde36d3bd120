"""The fragments of an MP4: where their times begin anew, and which of them are missing.

Each fragment (``moof``) has a number, and says for each track when it begins. Cameras, browsers and streaming servers write
them one after the other. If a file was joined, or lacks one, nothing else tells; and libav sorts samples by time, so it mixes
parts that begin at the same time. So each part gets the head of the file, and is read as a file of its own.

Most fragments count from where they begin. Some say at which byte of the file that is. Where this is no longer so, because
something in front of it was added or is lost, it is set right.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence

from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from shmring.frontend.media.damage import Shortfall
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.signatures import boxes, inner_boxes

__all__ = ["Fragment", "lost_fragments", "parts_of", "places_to_write", "read_fragments"]

_SAYS_PLACE = 1  # flag of tfhd
_BEFORE_FRAGMENTS = (b"styp", b"sidx", b"emsg", b"prft")
_ROUNDING_S = 0.1
_MAX_FRAGMENTS = 100_000  # ten minutes with one for each of 60 frames and 47 blocks of sound a second are 64 000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fragment:
    """What a fragment says of itself.

    Attributes:
        start: where its first box begins, which may be one that belongs to it.
        place: where its ``moof`` does.
        number: its own.
        times: when each track begins that has samples in it, in the track's unit.
        bases: where it says from which byte of the file it counts, and which that is.
    """

    start: int
    place: int
    number: int
    times: dict[int, int]
    bases: tuple[tuple[int, int], ...]


def read_fragments(data: memoryview) -> list[Fragment]:
    """Reads the fragments of a file, in its order.

    Raises:
        MediaError: they are too many.
    """
    fragments: list[Fragment] = []
    start: int | None = None
    for place, name, end in boxes(data):
        if name in _BEFORE_FRAGMENTS:
            start = place if start is None else start
        else:
            if name == b"moof":
                if len(fragments) == _MAX_FRAGMENTS:
                    raise MediaError(f"the MP4 has more than the {_MAX_FRAGMENTS} fragments that are accepted")
                fragments.append(_read(data, place if start is None else start, place, min(end, len(data))))
            start = None
    return fragments


def parts_of(fragments: list[Fragment]) -> list[list[Fragment]]:
    """Puts those together whose times go on."""
    parts: list[list[Fragment]] = []
    latest: dict[int, int] = {}
    for fragment in fragments:
        if not parts or any(time <= latest.get(track, time - 1) for track, time in fragment.times.items()):
            parts.append([])
            latest = {}
        parts[-1].append(fragment)
        latest |= fragment.times
    return parts


def places_to_write(fragments: list[Fragment], part: list[Fragment], moved: int) -> list[tuple[int, bytes]]:
    """Returns where to write what, so that fragments count from where they begin.

    Args:
        fragments: of the file. If none of them counts from itself, its writer does otherwise, and nothing is written.
        part: those that are to be set right.
        moved: by how many bytes they will stand further in front than in the file.
    """
    if not any(base == fragment.place for fragment in fragments for _, base in fragment.bases):
        return []
    return [
        (place - moved, (fragment.place - moved).to_bytes(8, "big"))
        for fragment in part
        for place, base in fragment.bases
        if base != fragment.place - moved
    ]


def lost_fragments(part: Sequence[Fragment], moved: int, stream: AudioStream | VideoStream) -> list[Shortfall]:
    """Finds fragments that are missing: their numbers, and the time that they lasted.

    Numbers alone say nothing, as some writers count tracks that are in other files; nor does time, as a sender may pause.

    Args:
        part: the fragments that there are.
        moved: by how many bytes they stand further in front than they say.
        stream: the track; all its packets have been read.
    """
    gaps = [after.place - moved for before, after in itertools.pairwise(part) if after.number > before.number + 1]
    if not gaps or not stream.time_base:
        return []
    samples = sorted((entry.pos, entry.timestamp) for entry in stream.index_entries)
    if len(samples) < 2:
        return []
    times = sorted(time for _, time in samples)
    lasts = statistics.median(after - before for before, after in itertools.pairwise(times))
    lost = 0.0
    for gap in gaps:
        before = max((time for place, time in samples if place < gap), default=None)
        after = min((time for place, time in samples if place >= gap), default=None)
        if before is not None and after is not None:
            lost += max(0.0, after - before - lasts)
    lost_s, promised_s = float(lost * stream.time_base), float((times[-1] - times[0] + lasts) * stream.time_base)
    if lost_s <= _ROUNDING_S:
        return []
    return [Shortfall(missing=lost_s, promised=promised_s, unit="s", cause="are missing in the middle")]


def _read(data: memoryview, start: int, place: int, end: int) -> Fragment:
    number, bases = 0, []
    times: dict[int, int] = {}
    for box, name, box_end in inner_boxes(data, place, end):
        if name == b"mfhd":
            number = _number(data, box + 12, 4)
        elif name == b"traf":
            track, time, has_samples = 0, None, False
            for inner, inner_name, _ in inner_boxes(data, box, box_end):
                if inner_name == b"tfhd":
                    track = _number(data, inner + 12, 4)
                    if _number(data, inner + 9, 3) & _SAYS_PLACE:
                        bases.append((inner + 16, _number(data, inner + 16, 8)))
                elif inner_name == b"tfdt":
                    time = _number(data, inner + 12, 8 if _number(data, inner + 8, 1) else 4)
                elif inner_name == b"trun":
                    has_samples = has_samples or _number(data, inner + 12, 4) > 0
            if has_samples and time is not None:
                times.setdefault(track, time)
    return Fragment(start=start, place=place, number=number, times=times, bases=tuple(bases))


def _number(data: memoryview, place: int, nbytes: int) -> int:
    return int.from_bytes(data[place : place + nbytes], "big")
