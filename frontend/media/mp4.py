"""Looks at the tables of an MP4 before libav does, which believes how many samples they claim, and at what of it is missing.

libav builds an index entry of 24 bytes for each sample, and the tables can claim samples without listing them: "a hundred
million, all of one size". A file of 700 bytes then takes gigabytes and seconds in ``avformat_open_input``, before anybody could
ask how long the clip is. An edit list multiplies them: each edit gets entries for all samples that it shows. So claims are
compared with what an accepted file can hold. Compressed headers and the tables of encrypted files, which have the same
property, are refused.

This is no parser, on purpose: libav takes tables in places where they do not belong, so a parser that walks the boxes as
the standard has them walks past those. Their names are searched for everywhere but in the media data. The numbers of honest
tables can't look like a name, as each of them is smaller than the file; only metadata such as a cover picture could, once
in many thousands.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np
from av.audio.stream import AudioStream
from av.video.stream import VideoStream
from numpy.typing import NDArray

from shmring.frontend.media.damage import Shortfall
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.signatures import boxes, inner_boxes

__all__ = ["beginning_of", "check_tables", "contradictions", "missing_samples", "whole_part", "why_unreadable"]

# Ten minutes of 240 frames and 94 blocks of sound a second are 200 000. Their index takes 12 MB.
_MAX_SAMPLES = 500_000
# Two or three edits are usual: silence before the first sample, and the rest. Their index takes 48 MB.
_MAX_SAMPLES_IN_EDITS = 2_000_000
_MIN_EDIT_NBYTES = 12
# libav makes one entry of so many samples of uncompressed sound.
_SAMPLES_OF_AN_ENTRY = 1024

_NAMES = re.compile(b"trak|stsz|stz2|stts|stsc|stco|co64|elst|trun|soun|cmov|senc|saiz|saio")
_INDEX = re.compile(b"moov.{4,256}?(?:mvhd|trak|tkhd|mdia)|trak.{4,256}?(?:tkhd|mdia)", re.DOTALL)
_TABLES = frozenset((b"mdhd", b"stts", b"stsz", b"stsc", b"stco"))  # that every track has
_SAME_AS = {b"stz2": b"stsz", b"co64": b"stco"}
_TOLERATED_DIFFERENCE = 0.1  # of durations; some writers leave out the last frame's
_WIDE_DIFFERENCE = 1.5  # more is a damaged unit of time
_MOST_HIDDEN = 8  # times as much as is shown: a clip of which so little is shown may have a damaged unit of time
_ENDLESS = 0x7FFF_FFFF
_ENCRYPTED = "encrypted MP4 files are not accepted"
_REFUSED = {
    b"cmov": "MP4 files with a compressed header are not accepted",
    b"senc": _ENCRYPTED,
    b"saiz": _ENCRYPTED,
    b"saio": _ENCRYPTED,
}


def check_tables(data: bytes | memoryview) -> None:
    """Refuses an MP4 or QuickTime file whose tables claim what it can't hold.

    Raises:
        MediaError: they do, or it has a compressed header or is encrypted.
    """
    num_samples = num_in_edits = 0

    def count(track: _Track) -> None:
        nonlocal num_samples, num_in_edits
        num_entries = track.num_entries(len(data))
        num_samples += num_entries
        num_in_edits += num_entries * track.num_edits

    track = _Track()
    for start, end in _without_media_data(data):
        for match in _NAMES.finditer(data, start, end):
            name, place = match.group(), match.end()
            if name == b"trak":
                count(track)
                track = _Track()
            elif name == b"trun":
                num_samples += _number(data, place + 4)
            elif name in _REFUSED:
                raise MediaError(_REFUSED[name])
            else:
                track.note(name, data, place)
    count(track)
    if num_samples > _MAX_SAMPLES:
        raise MediaError(f"the MP4 claims {num_samples} samples, more than the {_MAX_SAMPLES} that are accepted")
    if num_in_edits > _MAX_SAMPLES_IN_EDITS:
        raise MediaError(f"the MP4's edit lists show {num_in_edits} samples, {_MAX_SAMPLES_IN_EDITS} are accepted")


class _Track:
    """What the tables of one track claim. There can be several of a kind; then the worst counts."""

    def __init__(self) -> None:
        self._listed = 0
        self._of_one_size = 0
        self._chunks = 0
        self._in_chunks: list[tuple[int, int]] = []
        self._is_sound = False
        self.num_edits = 0
        self._is_counted_in_samples = True

    def note(self, name: bytes, data: bytes | memoryview, place: int) -> None:
        """Takes a table up. Each begins with 4 bytes of version and flags."""
        if name == b"stsz" and _number(data, place + 4):
            self._of_one_size = max(self._of_one_size, _number(data, place + 8))
        elif name in (b"stsz", b"stz2"):
            self._listed = max(self._listed, min(_number(data, place + 8), 2 * len(data)))
        elif name in (b"stco", b"co64"):
            self._chunks = max(self._chunks, min(_number(data, place + 4), len(data) // 4))
        elif name == b"stts":
            self._is_counted_in_samples &= _number(data, place + 4) == 1 and _number(data, place + 12) == 1
        elif name == b"stsc":
            self._note_chunks(data, place)
        elif name == b"elst":  # libav counts what there is room for, whatever the table claims
            self.num_edits += min(_number(data, place - 8), len(data)) // _MIN_EDIT_NBYTES
        elif name == b"soun":
            self._is_sound = True

    def _note_chunks(self, data: bytes | memoryview, place: int) -> None:
        """Samples per chunk come as (first chunk, samples in it and in those that follow, ...)."""
        count = min(_number(data, place + 4), (len(data) - place) // 12, _MAX_SAMPLES)
        for entry in range(place + 8, place + 8 + 12 * count, 12):
            self._in_chunks.append((_number(data, entry), _number(data, entry + 4)))

    def num_entries(self, file_nbytes: int) -> int:
        """Returns how many entries libav would make, at most."""
        if not (self._is_sound and self._is_counted_in_samples):
            return max(self._listed, self._of_one_size)
        # Uncompressed sound: entries are made of chunks, and each sample takes a byte of the file at least.
        total = 0
        ends = [first for first, _ in self._in_chunks[1:]] + [self._chunks + 1]
        for (first, samples), following in zip(self._in_chunks, ends, strict=False):
            total += max(0, following - first) * -(-samples // _SAMPLES_OF_AN_ENTRY)
        return max(total, self._listed, self._of_one_size if self._of_one_size > file_nbytes else 0)


def whole_part(data: memoryview) -> tuple[memoryview, bool]:
    """Returns a file without the fragment whose description it ends in, which libav would not open; and whether it is whole."""
    start, name, end = 0, b"", 0
    for box in boxes(data):
        start, name, end = box
    if end <= len(data):
        return data, True
    return (data[:start] if name in (b"moof", b"sidx", b"styp") else data), False


def why_unreadable(data: memoryview) -> str:
    """Returns what is the matter with a file that libav does not read, or finds no tracks in."""
    name, end = b"", 0
    for _, name, end in boxes(data):  # noqa: B007 (the last one counts)
        pass
    is_cut = end > len(data)
    if _INDEX.search(data):
        damage = "damaged or truncated" if is_cut and name == b"moov" else "damaged"
        return f"{damage}: the index of the MP4 can't be read"
    if is_cut:
        return "truncated: it is an MP4 without its index, which is at its end. Send the whole file"
    damage = "damaged or truncated" if name == b"mdat" else "damaged"
    return f"{damage}: it is an MP4 without an index"


def missing_samples(stream: AudioStream | VideoStream, file_nbytes: int) -> list[Shortfall]:
    """Counts samples of a track that the tables of a truncated file list, and that it does not have. More may be missing."""
    entries = stream.index_entries
    total = len(entries)
    missing = sum(entry.pos + entry.size > file_nbytes for entry in entries)
    if not missing:
        return [Shortfall(missing=0, promised=0, unit="", cause="its end is missing (MP4)")]
    return [Shortfall(missing=missing, promised=total, unit="frames")]


def contradictions(stream: AudioStream | VideoStream, data: memoryview) -> list[Shortfall]:
    """Compares what the tables of a track say: of how many samples they are, and how long these last.

    libav takes as many as the shortest table has. If two of three tables agree, there are as many as these say.
    """
    tables = _tables_of(data, stream.index)
    lacking = sorted(name.decode() for name in _TABLES - tables.keys())
    if lacking and tables.keys() - {b"mvhd"}:
        cause = f"its index is damaged: it has no {', '.join(lacking)}"
        return [Shortfall(missing=0, promised=0, unit="", cause=cause)]
    if lacking:
        return []
    times = tables[b"stts"].entries(2)
    num_chunks = len(tables[b"stco"].entries(tables[b"stco"].width))
    chunks = tables[b"stsc"].entries(3)
    in_chunks = np.diff(np.minimum([*chunks[:, 0], num_chunks + 1], num_chunks + 1)).clip(0) @ chunks[:, 1]
    counts = sorted(int(count) for count in (times[:, 0].sum(), tables[b"stsz"].number(4), in_chunks))
    if counts[0] < counts[1]:
        cause = "are not in all tables of its index, which is damaged"
        return [Shortfall(missing=counts[1] - counts[0], promised=counts[1], unit="frames", cause=cause)]
    lasting, said = int(times[:, 0] @ times[:, 1]), tables[b"mdhd"].duration
    tolerated = max(_TOLERATED_DIFFERENCE * max(lasting, said), said / max(1, counts[0]))
    if said and counts[0] > 1 and abs(lasting - said) > tolerated:
        cause = f"its index is damaged: by its tables, its frames last for {lasting / said:.3g} times its duration"
        return [Shortfall(missing=0, promised=0, unit="", cause=cause)]
    lasting_s, shown_s = lasting / tables[b"mdhd"].units_a_second, _shown_s(tables)
    hides_most = lasting_s > shown_s * (_MOST_HIDDEN if b"elst" in tables else _WIDE_DIFFERENCE)
    if shown_s and (hides_most or shown_s > lasting_s * _WIDE_DIFFERENCE):
        cause = f"by its index, {shown_s:.3g} s of it are shown, and its frames last for {lasting_s:.3g} s"
        return [Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=shown_s > lasting_s)]
    return []


def _shown_s(tables: dict[bytes, _Table]) -> float:
    """Returns how many seconds of a track are shown, by its edits or else its head; 0: it does not say, or all the rest."""
    if b"mvhd" not in tables:
        return 0.0
    edits = tables.get(b"elst")
    shown = edits.shown if edits else tables[b"tkhd"].duration if b"tkhd" in tables else 0
    return shown / tables[b"mvhd"].units_a_second


class _Table:
    """A box of a track's index, from its version and flags on."""

    def __init__(self, name: bytes, content: memoryview) -> None:
        self._name, self._content = name, content
        self.width = 2 if name == b"co64" else 1

    def number(self, place: int) -> int:
        return _number(self._content, 4 + place)

    def entries(self, width: int) -> NDArray[np.float64]:
        """Returns the entries of a table, of so many numbers each, as far as there are any."""
        count = min(self.number(0), max(0, len(self._content) - 8) // (4 * width), _MAX_SAMPLES)
        return np.frombuffer(self._content, ">u4", width * count, 8).reshape(count, width).astype(np.float64)

    @property
    def duration(self) -> int:
        """Of a head: how long it lasts, in its unit; 0: it does not say."""
        place, nbytes = (24, 8) if self._content[0] else (16, 4)
        place += 4 if self._name == b"tkhd" else 0
        duration = bytes(self._content[place : place + nbytes])
        return 0 if duration == b"\xff" * nbytes else int.from_bytes(duration, "big")

    @property
    def units_a_second(self) -> int:
        """Of a head of media, or of the file."""
        return max(1, _number(self._content, 20 if self._content[0] else 12))

    @property
    def shown(self) -> float:
        """Of a list of edits: how long those last together that show something, in the file's unit; 0: one has no end."""
        lasts, time = (">u8", ">i8") if self._content[0] else (">u4", ">i4")
        kind = np.dtype([("lasts", lasts), ("time", time), ("rate", ">u4")])
        count = min(self.number(0), max(0, len(self._content) - 8) // kind.itemsize, _MAX_SAMPLES)
        edits = np.frombuffer(self._content, kind, count, 8)
        lasting = edits["lasts"][edits["time"] >= 0]
        return 0.0 if (lasting >= _ENDLESS).any() else float(lasting.sum(dtype=np.float64))


def _tables_of(data: memoryview, track: int) -> dict[bytes, _Table]:
    """Returns the tables of a track, by name, and the head of a file without fragments.

    Both kinds of sizes and of places have the name of the usual one.
    """
    tables: dict[bytes, _Table] = {}
    indexes = [(start, end) for start, name, end in boxes(data) if name == b"moov"]
    inner = [*inner_boxes(data, *indexes[0])] if indexes else []
    outer = [(start, end) for start, name, end in inner if name == b"trak"][track : track + 1]
    heads = {name: (start, end) for start, name, end in inner if name in (b"mvhd", b"mvex")}
    if outer and b"mvhd" in heads and b"mvex" not in heads:  # fragments may last longer than the head says
        start, end = heads[b"mvhd"]
        if end - start >= 32:
            tables[b"mvhd"] = _Table(b"mvhd", data[start + 8 : end])
    while outer:
        for start, name, end in inner_boxes(data, *outer.pop()):
            if name in (b"edts", b"mdia", b"minf", b"stbl"):
                outer.append((start, end))
            elif end - start >= 16:
                tables.setdefault(_SAME_AS.get(name, name), _Table(name, data[start + 8 : end]))
    return tables


def beginning_of(data: memoryview) -> int:
    """Returns where the file begins from which an MP4's tables count.

    Some write a box of their own before a finished file, and leave its tables as they were: then these count from ``ftyp``
    on. The first sample tells: it begins where the media data do, or shortly behind.
    """
    starts = {name: (start, end) for start, name, end in reversed(list(boxes(data)))}
    if b"ftyp" not in starts or b"moov" not in starts or b"mdat" not in starts or not starts[b"ftyp"][0]:
        return 0
    begin, first_data = starts[b"ftyp"][0], starts[b"mdat"][0] + 8
    offsets = []
    for match in re.finditer(b"stco|co64", data[slice(*starts[b"moov"])]):
        place, width = starts[b"moov"][0] + match.end() + 8, 4 if match.group() == b"stco" else 8
        offsets.append(int.from_bytes(data[place : place + width], "big"))
    return begin if offsets and min(offsets) < first_data <= min(offsets) + begin else 0


def _without_media_data(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """The places of all outermost boxes but ``mdat``; of what is no box, whatever it is."""
    place = 0
    for start, name, end in boxes(data):
        if name != b"mdat":
            yield start, min(end, len(data))
        place = end
    if place < len(data):
        yield place, len(data)


def _number(data: bytes | memoryview, place: int) -> int:
    return int.from_bytes(data[place : place + 4], "big")
