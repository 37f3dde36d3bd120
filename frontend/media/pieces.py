"""Files that were joined, byte by byte: each of them is a piece, and is read as a file of its own.

People put parts of a recording one behind the other (``cat a.mp4 b.mp4``), and so do programs that upload them in parts. libav
reads the first of them, or takes its description for all others. Pieces are told apart by what a format begins with:

* MP4: the file's type stands behind media data, or an index behind fragments. Fragments whose times begin anew are a piece,
  too, with the head of the file that they are in (:mod:`shmring.frontend.media.fragments`).
* Matroska, FLAC, AIFF, CAF: another head.
* Ogg: a page that begins a stream, behind others that do not.
* WAV: another head. Those of the same format become one piece (:mod:`shmring.frontend.media.riff`).
* MPEG-TS: tables that list other programs, or other tracks of a program, and none of those before. Where these stay, times
  tell (:mod:`shmring.frontend.media.seams`).

Others are one piece, whatever is in them.

What libav would take at its word is set right here: an edit list whose edits last 0, which means "to the end" and is taken for
"nothing at all"; an edit in the middle that shows nothing; sizes of AIFF and CAF (:mod:`shmring.frontend.media.chunked`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator

from shmring.frontend.media.chunked import sizes_set_right
from shmring.frontend.media.damage import Shortfall
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fragments import Fragment, parts_of, places_to_write, read_fragments
from shmring.frontend.media.ogg import chain_starts
from shmring.frontend.media.riff import wav_pieces
from shmring.frontend.media.signatures import boxes

__all__ = ["Piece", "pieces_of"]

_MAX_PIECES = 1000  # ten minutes in segments of a second with a head each are 600; to open one takes a millisecond

_HEADS = {
    "matroska": re.compile(rb"\x1a\x45\xdf\xa3.{1,64}?\x42\x82.(?:webm|matroska)", re.DOTALL),
    "flac": re.compile(rb"fLaC[\x00\x80]\x00\x00\x22"),
    "aiff": re.compile(rb"FORM.{4}AIF[FC]", re.DOTALL),
    "caf": re.compile(rb"caff\x00\x01\x00\x00desc"),
}
# A packet that begins with a table of programs (PAT), or of a program's tracks (PMT): ISO 13818-1, 2.4.4.
_TS_TABLE = re.compile(rb"G(?:[\x40\x60]\0[\x10-\x1f]\0\0|[\x40-\x7f].[\x10-\x1f]\0\x02)[\xb0-\xbf]", re.DOTALL)
_TS_HEAD_NBYTES = 5
_LATEST = b"\x7f\xff\xff\xff"
_NOTHING = 8 * b"\xff"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """A part of a file that can be read as a file.

    Attributes:
        demuxer: libav's name of its format; None: it has no signature.
        views: its bytes.
        written: what stands at which place instead of them.
        fragments: of an MP4.
        moved: by how many bytes they stand further in front than their places say.
        shortfalls: what is told of its sizes.
    """

    demuxer: str | None
    views: tuple[memoryview, ...]
    written: tuple[tuple[int, bytes], ...] = ()
    fragments: tuple[Fragment, ...] = ()
    moved: int = 0
    shortfalls: tuple[Shortfall, ...] = ()

    @property
    def nbytes(self) -> int:
        """How many bytes of the file are in it, its head not counted where that is another's, too."""
        return sum(len(view) for view in self.views[1:] or self.views)

    def data(self) -> memoryview:
        """Returns its bytes: those of the file, or a copy where something else is written in them."""
        if len(self.views) == 1 and not self.written:
            return self.views[0]
        copy = bytearray().join(self.views)
        for place, text in self.written:
            copy[place : place + len(text)] = text
        return memoryview(copy)


def pieces_of(view: memoryview, demuxer: str | None) -> list[Piece]:
    """Returns a file's pieces, one or more.

    Args:
        view: the file.
        demuxer: libav's name of its format.

    Raises:
        MediaError: they are too many.
    """
    if demuxer == "mov":
        pieces = [piece for file in _cut(view, _mp4_starts(view)) for piece in _mp4_pieces(file)]
    elif demuxer in _HEADS:
        starts = (match.start() for match in _HEADS[demuxer].finditer(view))
        pieces = [_with_its_sizes(demuxer, file) for file in _cut(view, starts)]
    elif demuxer == "ogg":
        pieces = [Piece(demuxer=demuxer, views=(file,)) for file in _cut(view, chain_starts(view))]
    elif demuxer == "wav":
        pieces = [Piece(demuxer=demuxer, views=views) for views in wav_pieces(view)]
    elif demuxer == "mpegts":
        pieces = [Piece(demuxer=demuxer, views=(file,)) for file in _cut(view, _ts_starts(view))]
    else:
        pieces = [Piece(demuxer=demuxer, views=(view,))]
    if len(pieces) > _MAX_PIECES:
        raise _too_many()
    return pieces


def _with_its_sizes(demuxer: str, view: memoryview) -> Piece:
    written, shortfalls = sizes_set_right(demuxer, view)
    return Piece(demuxer=demuxer, views=(view,), written=written, shortfalls=shortfalls)


def _too_many() -> MediaError:
    return MediaError(f"the file consists of more than the {_MAX_PIECES} files that are accepted")


def _cut(view: memoryview, starts: Iterable[int]) -> list[memoryview]:
    """Cuts a file where others begin."""
    places = list(itertools.islice((start for start in starts if start), _MAX_PIECES))
    if len(places) == _MAX_PIECES:
        raise _too_many()
    return [view[start:end] for start, end in itertools.pairwise([0, *places, len(view)])]


def _mp4_starts(view: memoryview) -> Iterator[int]:
    names: set[bytes] = set()
    for place, name, _ in boxes(view):
        if (name == b"ftyp" and b"mdat" in names) or (name == b"moov" and b"moof" in names):
            yield place
            names = set()
        names.add(name)


def _mp4_pieces(view: memoryview) -> list[Piece]:
    fragments = read_fragments(view)
    parts = parts_of(fragments)
    if len(parts) < 2 or any(name == b"mdat" for place, name, _ in boxes(view) if place < fragments[0].start):
        written = places_to_write(fragments, fragments, 0) if fragments else _edits_set_right(view)
        return [Piece(demuxer="mov", views=(view,), written=tuple(written), fragments=tuple(fragments))]
    head = view[: fragments[0].start]
    ends = [part[0].start for part in parts[1:]] + [len(view)]
    pieces = []
    for part, end in zip(parts, ends, strict=True):
        start = part[0].start
        moved = start - len(head)
        written = places_to_write(fragments, part, moved)
        views = (head, view[start:end]) if moved else (view[:end],)
        pieces.append(Piece(demuxer="mov", views=views, written=tuple(written), fragments=tuple(part), moved=moved))
    return pieces


def _ts_starts(view: memoryview) -> Iterator[int]:
    programs: set[bytes] = set()
    tracks: dict[bytes, set[bytes]] = {}
    last = start = 0  # of the last table of programs, and of the piece
    for match in _TS_TABLE.finditer(view):
        place = match.start()
        table = bytes(view[place + _TS_HEAD_NBYTES : place + 188])
        end = 3 + int.from_bytes(table[1:3], "big") % 4096 - 4  # a sum follows
        if end > len(table):
            continue
        if table[0] == 0:
            listed = {table[entry : entry + 4] for entry in range(8, end - 3, 4)}
            if programs and not listed & programs:
                yield (start := place)
                tracks = {}
            programs, last = listed, place
            continue
        program = table[3:5]
        listed = set(_tracks_of_program(table, end))
        if listed and tracks.get(program) and not listed & tracks[program]:
            if last > start:
                yield (start := last)
            tracks = {}
        if listed and any(entry[:2] == program for entry in programs):
            tracks[program] = listed


def _tracks_of_program(table: bytes, end: int) -> Iterator[bytes]:
    """Yields the kind of each track with the number of its packets."""
    entry = 12 + int.from_bytes(table[10:12], "big") % 4096
    while entry + 5 <= end:
        yield table[entry : entry + 1] + (int.from_bytes(table[entry + 1 : entry + 3], "big") % 8192).to_bytes(2, "big")
        entry += 5 + int.from_bytes(table[entry + 3 : entry + 5], "big") % 4096


def _edits_set_right(view: memoryview) -> list[tuple[int, bytes]]:
    """Returns what to write in the edit lists of a file without fragments.

    Where all edits last 0, the last one lasts. And libav knows an edit that shows nothing as the first one only: of any other
    it shows the frames from the beginning on. Such an edit is made to show what comes behind all frames.
    """
    written = []
    for start, name, end in boxes(view):
        index = bytes(view[start:end]) if name == b"moov" and end <= len(view) else b""
        if b"mvex" in index:
            continue
        for match in re.finditer(b"elst", index):
            place = match.end() + 8  # behind version, flags and the number of edits
            width = 8 if index[place - 8 : place - 7] == b"\1" else 4  # of a duration and of a time
            count = int.from_bytes(index[place - 4 : place], "big")
            if not 0 < count * (2 * width + 4) <= len(index) - place:
                continue
            durations = []
            for number, edit in enumerate(range(place, place + count * (2 * width + 4), 2 * width + 4)):
                if index[edit + width : edit + 2 * width] != _NOTHING[:width]:
                    durations.append((edit, index[edit : edit + width]))
                elif number:
                    written.append((start + edit + width, _LATEST.rjust(width, b"\0")))
            if durations and not any(any(duration) for _, duration in durations):
                written.append((start + durations[-1][0] + width - 4, _LATEST))
    return written
