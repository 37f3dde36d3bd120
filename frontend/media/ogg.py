"""Pages that an Ogg file lacks: each page has a number, and says how much sound there is up to its end.

Recordings are sent and stored page by page. libav leaves out a page whose checksum is wrong, and decodes the next one as if it
followed directly, so only the file shows that a page is missing. The number of the next page shows that pages are missing. Its
*granule*, the number of samples up to its end, shows how long they were. A granule alone shows nothing, since a sender may
pause.
"""

from __future__ import annotations

import dataclasses
import re
import struct
from collections.abc import Iterator
from fractions import Fraction

from av.audio.stream import AudioStream
from av.container import InputContainer

from shmring.frontend.media.damage import Shortfall

__all__ = ["chain_starts", "lost_pages"]

_PAGE = struct.Struct("<4sBBQIIIB")  # OggS, version, flags, granule, stream, number, checksum, number of segments
_FIRST_OF_STREAM = re.compile(rb"OggS\0[\2\6]")
_NO_GRANULE = (1 << 64) - 1  # no packet ends in this page
_ROUNDING_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Page:
    granule: int
    stream: int
    number: int
    end: int


def chain_starts(data: memoryview) -> Iterator[int]:
    """Yields where other recordings begin (the standard's word is a chain). Streams that belong together begin together."""
    end = 0
    for match in _FIRST_OF_STREAM.finditer(data):
        page = _page(data, match.start())
        if page is None:
            return
        if match.start() != end:
            yield match.start()
        end = page.end


def lost_pages(data: memoryview, container: InputContainer, stream: AudioStream) -> list[Shortfall]:
    """Finds pages of a recording that are missing.

    Args:
        data: the file.
        container: of it, of which no packet has been read.
        stream: the track. Its unit of time is a sample.
    """
    seconds = stream.time_base or Fraction(0)
    durations: dict[int, int] = {}  # of the packets of each page, by its place
    for packet in container.demux(stream):
        if packet.size and packet.pos is not None:
            durations[packet.pos] = durations.get(packet.pos, 0) + max(packet.duration or 0, 0)
    missing = []
    lost = read = held = 0  # samples
    before: _Page | None = None
    granule: int | None = None
    has_gap = False
    pages = [(place, page) for place in sorted(durations) if (page := _page(data, place))]
    numbers = {page.number for _, page in pages}
    for place, page in pages:
        if before is None and not _follows_head(data, place, page):
            missing.append(Shortfall(missing=0, promised=0, unit="", cause="its beginning is missing (OGG)"))
        has_gap |= before is not None and page.number > before.number + 1 and page.number - 1 not in numbers
        before = page
        read += durations[place]
        held += durations[place]
        if page.granule == _NO_GRANULE:
            continue
        if has_gap and granule is not None:
            lost += max(0, page.granule - granule - held)
        granule, held, has_gap = page.granule, 0, False
    if lost * seconds > _ROUNDING_S:
        lost_s, read_s = float(lost * seconds), float(read * seconds)
        missing.append(Shortfall(missing=lost_s, promised=read_s + lost_s, unit="s", cause="are missing in the middle"))
    return missing


def _follows_head(data: memoryview, place: int, first: _Page) -> bool:
    """Whether the first page of sound follows the ones that say what it is, whose granule is 0."""
    last = None
    for page in _pages(data, place):
        if page.stream == first.stream and page.granule in (0, _NO_GRANULE):
            last = page.number
    return last is None or first.number <= last + 1


def _pages(data: memoryview, end: int) -> Iterator[_Page]:
    place = 0
    while place < end and (page := _page(data, place)) is not None:
        yield page
        place = page.end


def _page(data: memoryview, place: int) -> _Page | None:
    if place + _PAGE.size > len(data):
        return None
    name, _, _, granule, stream, number, _, num_segments = _PAGE.unpack_from(data, place)
    if name != b"OggS":
        return None
    segments = place + _PAGE.size
    end = segments + num_segments + sum(data[segments : segments + num_segments])
    return _Page(granule=granule, stream=stream, number=number, end=end)
