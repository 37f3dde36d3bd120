"""Which part of a medium is missing, and how much may be: one rule for all formats.

A file promises something: a number of bytes, samples, frames or rows. This promise is compared with the part that could be
read. Each format says in its own way how much there is:

=======================  ==================================================================
WAV, AIFF                bytes of samples; sizes beyond what is accepted are no promise
MP4, QuickTime           the samples that its index lists, or its fragments do
Matroska, WebM           the duration, and that all bytes belong to packets
MP3                      the frames that its first one counts (``Xing``, ``Info``, ``VBRI``)
FLAC, CAF, AVI           samples or frames, in the header
Ogg                      that the pages of a recording are numbered without a gap
JPEG, PNG, BMP, GIF      rows
=======================  ==================================================================

A length beyond what is accepted does not count, and is told: nobody can say whether it was cut off or made up.

AAC, MPEG-TS and MP3s without such a frame promise nothing: the bytes that are there count as the whole. An Ogg and a GIF at
least mark their end, so a missing end is noticed. Besides, packets that can't be decoded are left out and counted.

If the missing share is larger than the accepted one (:attr:`shmring.frontend.media.options.MediaLimits.max_missing_share`), the
medium is refused. If it is smaller, the medium is used as far as it can be read, and its caller is told how much is missing.
Both texts name the promise. Formats whose decoders give all or nothing (WebP, HEIC, AVIF, pictures that are stored in several
passes) are refused if any part is missing.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import av.container
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from shmring.frontend.media.errors import MediaError

__all__ = [
    "TOLERATED_PACKETS",
    "Shortfall",
    "accepted_shortfall",
    "joined",
    "largest",
    "missing_end",
    "missing_packets",
    "missing_s",
    "of_all_parts",
    "promised_s",
    "taken_for_samples",
]

#: So many packets that can't be decoded do not count: a stream that was cut out of another begins with a packet that needs the
#: one before, and ends in the middle of a packet.
TOLERATED_PACKETS = 2

# Durations in headers count silence that decoders leave out, and are rounded to frames: 80 ms for Opus, 46 for AAC.
_ROUNDING_S = 0.1
_MOST_S = 24 * 3600.0  # what says that it is longer does not know how long it is
_SHOWN_SEAMS = 3
_MAX_TOLD = 4
_MP3_HEAD_NBYTES = 4096  # its first frame, which has 1441 at most, and some padding before
# A frame without sound. Where its count stands depends on its version and its channels.
_MP3_COUNT = re.compile(
    rb"\xff(?P<version>[\xe0-\xff])(?P<rate>.).(?:.{32}|.{17}|.{9})"
    rb"(?:(?:Xing|Info)(?P<flags>.{4})(?P<xing>.{4})|VBRI.{10}(?P<vbri>.{4}))",
    re.DOTALL,
)
_MP3_RATES = (44_100, 48_000, 32_000)  # of version 1; half of it in version 2, a quarter in version 2.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortfall:
    """Something that a file promises but does not have.

    Attributes:
        missing: how much is missing, in the unit of ``promised``; 0: unknown.
        promised: how much there should be.
        unit: what it is counted in, such as ``"s"`` or ``"rows"``.
        cause: why; empty if the file ends early.
        tolerated: how much of it is not counted when shares are compared.
        is_damage: nothing need be missing if not, but the medium is not what its file says.
        largest_share: of the whole medium, if something is missing in one of its parts.
    """

    missing: float
    promised: float
    unit: str
    cause: str = ""
    tolerated: float = 0.0
    is_damage: bool = True
    largest_share: float = 1.0

    @property
    def share(self) -> float:
        """Which share of the medium is missing, 0 to 1."""
        if self.promised <= 0:
            return 0.0
        return min(self.largest_share, max(0.0, self.missing - self.tolerated) / self.promised)

    def __str__(self) -> str:
        if not self.missing:
            return self.cause
        percent = 100 * self.missing / self.promised
        shown = f"{percent:.2g} %" if percent < 99.5 else "all"
        amount = f"{_number(self.missing)} of {_number(self.promised)} {self.unit}"
        of_a_part = " in one of its parts" if self.largest_share < 1 else ""
        return f"{amount} ({shown}) {self.cause or 'are missing'}{of_a_part}"


def accepted_shortfall(noun: str, shortfalls: Sequence[Shortfall], max_share: float) -> str:
    """Returns the text for a medium's caller about missing parts; empty if none are missing.

    Args:
        noun: ``"picture"``, ``"recording"`` or ``"clip"``.
        shortfalls: all shortfalls that were found. The largest counts, since several checks may notice the same gap.
        max_share: how much may be missing.

    Raises:
        MediaError: too much is missing.
    """
    if not shortfalls:
        return ""
    worst = max(shortfalls, key=lambda shortfall: shortfall.share)
    if worst.share > max_share:
        raise MediaError(
            f"the {noun} is damaged or truncated: {worst}; at most {100 * max_share:g} % may be missing (max_missing_share). "
            "Send the whole file, or save it again as far as it can be read"
        )
    is_damaged = any(shortfall.is_damage for shortfall in shortfalls)
    said = "is damaged or truncated" if is_damaged else "is not as its file says"
    return f"the {noun} {said}: {'; '.join(dict.fromkeys(map(str, shortfalls)))}"


def largest(shortfalls: Sequence[Shortfall]) -> list[Shortfall]:
    """Returns those that are told, if each part of a joined file has some of its own."""
    told = list(dict.fromkeys(shortfalls))
    return told if len(told) <= _MAX_TOLD else sorted(told, key=lambda shortfall: -shortfall.share)[:_MAX_TOLD]


def of_all_parts(parts: Sequence[tuple[Sequence[Shortfall], float]]) -> list[Shortfall]:
    """Returns what is missing of a file that was joined; its share is that of all parts together.

    Args:
        parts: what is missing of each, and how many seconds of it there are.
    """
    if len(parts) < 2:
        return [shortfall for shortfalls, _ in parts for shortfall in shortfalls]
    shares = [max((shortfall.share for shortfall in shortfalls), default=0.0) for shortfalls, _ in parts]
    lengths_s = [
        max(there_s, _ROUNDING_S) / max(1 - share, _ROUNDING_S) for share, (_, there_s) in zip(shares, parts, strict=True)
    ]
    lost = sum(share * length_s for share, length_s in zip(shares, lengths_s, strict=True)) / sum(lengths_s)
    return [dataclasses.replace(shortfall, largest_share=lost) for shortfalls, _ in parts for shortfall in shortfalls]


def promised_s(
    container: av.container.InputContainer, stream: AudioStream | VideoStream, data: bytes | memoryview, max_duration_s: float
) -> float | None:
    """Returns how many seconds a track should have, as its file says it; None: it does not say so.

    Programs that write to a pipe put a large number where the length belongs. More than a day is no promise; nor is more than
    is accepted in an AIFF, where they put a number of bytes that lasts for hours.

    libav returns a duration for all files. For some it is a guess from the bytes that are there, which is no promise. The
    tables of an MP4 say more (:func:`shmring.frontend.media.mp4.missing_samples`), and so do the sizes in a WAV file
    (:func:`shmring.frontend.media.riff.wav_sizes`).
    """
    promised = _said_s(container, stream, data)
    most_s = max_duration_s if container.format.name == "aiff" else _MOST_S
    return promised if promised is not None and promised <= most_s else None


def _said_s(
    container: av.container.InputContainer, stream: AudioStream | VideoStream, data: bytes | memoryview
) -> float | None:
    demuxer = container.format.name.split(",")[0]
    if demuxer == "matroska":
        return container.duration / 1e6 if container.duration else None
    if demuxer == "avi" and isinstance(stream, VideoStream):
        return float(stream.frames / stream.average_rate) if stream.frames and stream.average_rate else None
    if demuxer in ("caf", "avi") and isinstance(stream, AudioStream):
        return stream.frames / stream.codec_context.sample_rate if stream.frames else None
    if demuxer == "mp3":
        return _counted_mp3_s(bytes(data[:_MP3_HEAD_NBYTES]))
    is_counted = demuxer in ("flac", "aiff") or (demuxer == "mov" and not stream.frames)
    if is_counted and stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return None


def missing_end(demuxer: str, data: bytes | memoryview) -> Shortfall | None:
    """Returns a shortfall if the end is missing, for formats that mark their end but do not have their length."""
    if demuxer == "ogg":
        last_page = bytes(data[-(1 << 17) :]).rfind(b"OggS")  # a page has 65 307 bytes at most
        flags = bytes(data[-(1 << 17) :])[last_page + 5 : last_page + 6]
        is_whole = bool(flags and flags[0] & 4)
    elif demuxer == "gif":
        is_whole = bytes(data[-16:]).rstrip(b"\0\r\n ").endswith(b";")
    else:
        return None
    return None if is_whole else Shortfall(missing=0, promised=0, unit="", cause=f"its end is missing ({demuxer.upper()})")


def missing_s(promised: float | None, read_s: float, max_duration_s: float) -> list[Shortfall]:
    """Compares seconds.

    Args:
        promised: by the file.
        read_s: that were there.
        max_duration_s: that is accepted. What should be longer may be cut off, or its length was made up by a program that did
            not know it: it is used, and its caller is told.
    """
    if promised is None or promised - read_s <= _ROUNDING_S:
        return []
    if promised > max_duration_s:
        cause = f"it says that it has {_number(promised)} s, and {_number(read_s)} s are there"
        return [Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False)]
    return [Shortfall(missing=promised - read_s, promised=promised, unit="s")]


def joined(seams_s: Sequence[float]) -> list[Shortfall]:
    """Says that a file was joined, and where.

    Args:
        seams_s: of its parts, in seconds of what came before.
    """
    if not seams_s:
        return []
    places = ", ".join(f"{time_s:.2f} s" for time_s in seams_s[:_SHOWN_SEAMS])
    more = f" and {len(seams_s) - _SHOWN_SEAMS} more" if len(seams_s) > _SHOWN_SEAMS else ""
    cause = f"its times begin anew at {places}{more}; its {len(seams_s) + 1} parts follow each other as they are stored"
    return [Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False)]


def taken_for_samples(more: int, nbytes: int) -> Shortfall:
    """Says that there are so many bytes behind those of samples, and that they count as such."""
    cause = f"{more} bytes behind its {nbytes} bytes of samples are taken for samples, as they are nothing else"
    return Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False)


def missing_packets(damaged: int, total: int, unit: str, cause: str = "can't be decoded") -> list[Shortfall]:
    """Counts what can't be decoded, or is damaged in another way."""
    if not damaged:
        return []
    return [Shortfall(missing=damaged, promised=total, unit=unit, cause=cause, tolerated=TOLERATED_PACKETS)]


def _counted_mp3_s(head: bytes) -> float | None:
    """Returns how many seconds an MP3's first frame counts. Of files that were joined, libav guesses it from their bytes."""
    match = _MP3_COUNT.search(head)
    if match is None:
        return None
    version, rate_index, flags, counted = match["version"][0] >> 3 & 3, match["rate"][0] >> 2 & 3, match["flags"], match["vbri"]
    if rate_index == len(_MP3_RATES) or (flags and not flags[3] & 1):  # no rate, or no count
        return None
    num_frames = int.from_bytes(match["xing"] or counted, "big")
    rate = _MP3_RATES[rate_index] >> {3: 0, 2: 1}.get(version, 2)
    return num_frames * (1152 if version == 3 else 576) / rate


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 or value == int(value) else f"{value:.3g}"
