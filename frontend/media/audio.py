"""Recordings: how long they are from their packets, and their samples or spectrogram straight into the caller's memory.

Theory of operation: a slot is acquired before a recording is decoded, so an upper bound of its length must be known before.
What the header says is not one. :func:`probe` reads all packets without decoding them and adds up how long they last, which
costs about a thousandth of decoding. :func:`decode_into` decodes a packet at a time, mixes down, resamples and writes; so in
private memory there is a packet and a block, however long the recording is. If there is more than was promised, somebody lies,
and that is an error; if there is less, the target is filled as far as it goes.

How: the first track of sound that can be decoded, also of a clip; one that the file says to play by default goes before.
Channels are mixed to one (:mod:`shmring.frontend.media.mixing`). The delay that codecs add is removed where the container says
so. Packets that can't be decoded are left out, as players do, and counted (:mod:`shmring.frontend.media.damage`).

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out, and no sample is NaN or infinite.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Generator, Iterator
from fractions import Fraction
from typing import Protocol

import av
import av.error
import numpy as np
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream
from av.packet import Packet
from numpy.typing import NDArray

from shmring.engine.inputs import SoundSpec
from shmring.frontend.media.container import (
    SOUND_DECODERS,
    OpenFile,
    media_errors,
    missing_of,
    missing_pieces,
    opened,
    packets_of,
    prepare_decoder,
    split,
    track_of_piece,
    tracks,
)
from shmring.frontend.media.damage import Shortfall, accepted_shortfall, joined, largest, missing_packets, of_all_parts
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.mel import LogMelWriter, num_mel_frames
from shmring.frontend.media.mixing import Mixture, check_format, mixed
from shmring.frontend.media.options import MediaLimits
from shmring.frontend.media.pieces import Piece
from shmring.frontend.media.seams import Seams, max_gap_s

__all__ = ["DecodedSound", "SoundHeader", "decode_into", "probe"]

# Codecs begin and end with some milliseconds that no packet's duration tells of: 23 for AAC, 27 for MP3, 80 for Opus' preroll.
_SLACK_S = 0.25
# 24 dB over full scale. Recordings in floating point pass 1 at times; what passes this was never scaled to it.
_MAX_AMPLITUDE = 16.0
# Some store whole numbers as floating point, up to 32 768 or 2 147 483 648.
_MAX_WHOLE_AMPLITUDE = 2.0**31
_COUNTING = ("flac",)  # formats in which a gap between two packets is a loss: each has the number of its first sample
_ADTS = ("aac", "mpegts")  # formats in which each packet of AAC says its rate
_ADTS_RATES = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8000, 7350, 0, 0, 0)
_MAX_PACKETS = 500_000  # ten minutes of Opus in its shortest frames, 2.5 ms, are 240 000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SoundHeader:
    """What a recording will be decoded to.

    Attributes:
        num_samples: at most, at ``sample_rate``.
        sample_rate: of what is decoded, in Hz.
        mel_bands: of the spectrogram; None: a waveform is wanted.
        tracks: the number of its stream in each piece of its file; None: the piece can't be read.
        shortfalls: what of it is missing, so far as is known before it is decoded.
        max_missing_share: how much may be.
    """

    num_samples: int
    sample_rate: int
    mel_bands: int | None
    tracks: tuple[int | None, ...] = (0,)
    shortfalls: tuple[Shortfall, ...] = ()
    max_missing_share: float = MediaLimits.max_missing_share

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the memory it needs: (samples,) or (frames, bands); float32."""
        if self.mel_bands is None:
            return (self.num_samples,)
        return num_mel_frames(self.num_samples, self.sample_rate), self.mel_bands


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodedSound:
    """What a recording turned out to be.

    Attributes:
        length: of the target's first dimension, how much was written.
        duration_s: of the recording.
        shortfall: what the caller is told of what is missing; nothing if nothing is.
    """

    length: int
    duration_s: float
    shortfall: str = ""


def probe(data: bytes, spec: SoundSpec, limits: MediaLimits) -> SoundHeader:
    """Finds out how much memory a recording needs; nothing is decoded.

    Args:
        data: its file, in any of the containers of :mod:`shmring.frontend.media.container`.
        spec: what it is to become.
        limits: what it may be.

    Raises:
        MediaError: it holds no sound that can be decoded, is too long, or is damaged.
    """
    if len(data) > limits.max_audio_nbytes:
        raise MediaError(f"the recording takes {len(data)} bytes, more than the {limits.max_audio_nbytes} that are accepted")
    if not data:
        raise MediaError("the recording is empty: it has no bytes")
    pieces = split(data)
    number = 0
    while True:  # a track may be there and hold nothing
        survey = _Survey(limits)
        with opened(pieces[0], "recording", SOUND_DECODERS, limits.max_frame_pixels) as file:
            candidates = _tracks(file)
            stream = candidates[number]
            is_last = number + 1 == len(candidates)
            if not (is_last or stream.codec_context.sample_rate):  # libav found nothing of it to decode
                number += 1
                continue
            survey.read(file, stream)
        if survey.duration_s > 0 or is_last:
            break
        number += 1
    for piece in pieces[1:]:
        survey.read_further(piece)
    shortfalls = survey.all_shortfalls(pieces)
    accepted_shortfall("recording", shortfalls, limits.max_missing_share)
    return SoundHeader(
        num_samples=math.ceil((survey.duration_s + _SLACK_S * len(pieces)) * spec.sample_rate),
        sample_rate=spec.sample_rate,
        mel_bands=spec.mel_bands if spec.form == "log_mel" else None,
        tracks=tuple(survey.tracks),
        shortfalls=tuple(shortfalls),
        max_missing_share=limits.max_missing_share,
    )


def decode_into(data: bytes, header: SoundHeader, target: NDArray[np.float32]) -> DecodedSound:
    """Decodes a recording into the caller's memory.

    Args:
        data: what :func:`probe` was given.
        header: what it returned.
        target: of ``header.shape``, float32. After an error its content is undefined.

    Raises:
        MediaError: it is damaged, or longer than its packets said.
        ValueError: the target has another shape or dtype.
    """
    if target.shape != header.shape or target.dtype != np.float32:
        raise ValueError(f"the target is {target.dtype} {target.shape}, the recording needs float32 {header.shape}")
    mixture = Mixture()
    sound = _decode_into(data, header, target, mixture.counted)
    if mixture.is_worse_than_a_channel():
        sound = _decode_into(data, header, target, mixture.without_losses)
    return sound


def _decode_into(
    data: bytes,
    header: SoundHeader,
    target: NDArray[np.float32],
    before_mixing: Callable[[Iterator[AudioFrame]], Iterator[AudioFrame]],
) -> DecodedSound:
    writer = LogMelWriter(target, header.sample_rate) if header.mel_bands is not None else _WaveformWriter(target)
    num_samples = 0
    counts = _PacketCounts()
    with media_errors("recording"), contextlib.closing(_frames(data, header, counts)) as frames:
        for frame in mixed(before_mixing(frames), header.sample_rate):
            samples = frame.to_ndarray()[0]
            num_samples += len(samples)
            if num_samples > header.num_samples:
                raise MediaError("the recording is damaged: there is more in it than its packets say")
            peak = np.abs(samples).max(initial=0.0)
            if not peak <= _MAX_AMPLITUDE:  # written so that NaN fails as well
                raise _out_of_range(float(peak))
            writer.write(samples.astype(np.float32, copy=False))
    shortfalls = [*header.shortfalls, *missing_packets(counts.damaged, counts.total, "packets")]
    shortfall = accepted_shortfall("recording", shortfalls, header.max_missing_share)
    if not num_samples:
        raise MediaError("the recording is empty: it has no samples")
    writer.finish()
    return DecodedSound(length=writer.length, duration_s=num_samples / header.sample_rate, shortfall=shortfall)


def _out_of_range(peak: float) -> MediaError:
    if math.isfinite(peak) and peak <= _MAX_WHOLE_AMPLITUDE:
        return MediaError(
            f"the recording has samples up to {peak:.6g} in floating point, where full scale is 1: they look like whole "
            "numbers. Divide them by full scale (32768 if they were 16-bit), or send them as whole numbers"
        )
    return MediaError("the recording is damaged: it has samples that are no numbers, or far over full scale")


class _Writer(Protocol):
    length: int

    def write(self, samples: NDArray[np.float32]) -> None: ...

    def finish(self) -> None: ...


class _WaveformWriter:
    """Writes samples as they come."""

    def __init__(self, target: NDArray[np.float32]) -> None:
        self.length = 0
        self._target = target

    def write(self, samples: NDArray[np.float32]) -> None:
        self._target[self.length : self.length + len(samples)] = samples
        self.length += len(samples)

    def finish(self) -> None:
        """Has nothing left to write."""


@dataclasses.dataclass
class _PacketCounts:
    """Packets that were read, and those among them that could not be decoded."""

    total: int = 0
    damaged: int = 0


def _tracks(file: OpenFile) -> list[AudioStream]:
    return tracks(file.container.streams.audio, "recording", SOUND_DECODERS, file.container.format.name)


def _track(file: OpenFile, index: int) -> AudioStream:
    stream = file.container.streams[index]
    assert isinstance(stream, AudioStream), "a header belongs to its file"
    prepare_decoder(stream, MediaLimits().max_frame_pixels)
    return stream


class _Survey:
    """Reads packets without decoding them.

    Attributes:
        duration_s: how many seconds of sound there are, at most.
        tracks: the recording's, in each piece.
    """

    def __init__(self, limits: MediaLimits) -> None:
        self.duration_s = 0.0
        self.tracks: list[int | None] = []
        self._limits = limits
        self._seams: Seams | None = None
        self._time_base = Fraction(1)
        self._num_packets = 0
        self._missing: list[tuple[list[Shortfall], float]] = []
        self._unread: list[tuple[Piece, MediaError]] = []

    def all_shortfalls(self, pieces: list[Piece]) -> list[Shortfall]:
        """Returns what is missing."""
        missing = [*of_all_parts(self._missing), *missing_pieces(pieces, self._unread)]
        return [*largest(missing), *joined(self._seams.times_s if self._seams else [])]

    def read(self, file: OpenFile, stream: AudioStream) -> None:
        """Reads a piece."""
        limits = self._limits
        prepare_decoder(stream, limits.max_frame_pixels)
        check_format(stream.codec_context.sample_rate, stream.codec_context.layout.nb_channels)
        end_s = self._read_packets(file, stream)
        missing = missing_of(
            file, stream, "recording", SOUND_DECODERS, end_s, limits.max_audio_nbytes, limits.max_audio_duration_s
        )
        self._missing.append(([*file.shortfalls, *missing], end_s))
        self.tracks.append(stream.index)

    def read_further(self, piece: Piece) -> None:
        """Reads a piece that is not the first; if that is impossible, it is missing."""
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(opened(piece, "recording", SOUND_DECODERS, self._limits.max_frame_pixels))
                stream = track_of_piece(_tracks(file), self.tracks[0])
            except MediaError as error:
                self.tracks.append(None)
                self._unread.append((piece, error))
                return
            self.read(file, stream)

    def _read_packets(self, file: OpenFile, stream: AudioStream) -> float:
        """Adds up how long the packets last; returns when the last of them ends, or how long they last if they can't pause."""
        time_base, longest_s = stream.time_base, self._limits.max_audio_duration_s
        if time_base is None:
            raise MediaError("the recording is damaged: it has no unit of time")
        if self._seams is None:
            self._time_base = time_base
            self._seams = Seams(time_base, max_gap_s(file.demuxer, longest_s))
        unit = time_base / self._time_base
        before_s = self._seams.length_s()
        has_rates_of_its_own = file.demuxer in _ADTS and stream.codec_context.name == "aac"
        units = time_base.numerator, time_base.denominator
        max_total = int((longest_s - self.duration_s) / time_base)
        total, complete = 0, True
        first: int | None = None
        last = 0
        for packet in packets_of(file, stream):
            self._num_packets += 1
            if self._num_packets > _MAX_PACKETS:
                raise MediaError(f"the recording has more than the {_MAX_PACKETS} packets that are accepted")
            if not packet.size:
                continue
            duration = max(packet.duration or 0, 0)
            if has_rates_of_its_own:
                duration = _adts_duration(packet, *units) or duration
            total += duration
            complete = complete and duration > 0
            if (position := packet.pts) is not None:
                first = position if first is None else min(first, position)
                last = max(last, position + duration)
                if unit != 1:
                    position, duration = round(position * unit), round(duration * unit)
                self._seams.add(position, duration, is_keyframe=False, decoded=position)
            if total > max_total:
                raise _too_long(longest_s)
        known_s = length_s = float(total * time_base)
        if not complete:  # some packets do not say how long they last
            length_s = max(length_s, self._seams.length_s() - before_s)
        self.duration_s += length_s
        if self.duration_s > longest_s:
            raise _too_long(longest_s)
        if file.demuxer in _COUNTING:
            return known_s
        return max(length_s, float((last - min(first or 0, 0)) * time_base))


def _adts_duration(packet: Packet[AudioStream], numerator: int, denominator: int) -> int:
    """Returns how long a packet of AAC lasts at most, by its own head; 0: it has none. libav counts by the first one's rate.

    Args:
        packet: of AAC.
        numerator: of the unit of time, in seconds.
        denominator: of it.
    """
    head = bytes(memoryview(packet)[:7])
    if len(head) < 7 or head[0] != 0xFF or head[1] & 0xF6 != 0xF0:
        return 0
    rate = _ADTS_RATES[head[2] >> 2 & 15]
    return -(-1024 * (1 + (head[6] & 3)) * denominator // (rate * numerator)) if rate else 0


def _too_long(longest_s: float) -> MediaError:
    return MediaError(f"the recording is longer than the {longest_s:g} s that are accepted")


def _frames(data: bytes, header: SoundHeader, counts: _PacketCounts) -> Generator[AudioFrame]:
    for piece, index in zip(split(data), header.tracks, strict=True):
        if index is None:
            continue
        with opened(piece, "recording", SOUND_DECODERS, MediaLimits().max_frame_pixels) as file:
            for packet in packets_of(file, _track(file, index)):
                counts.total += packet.size > 0
                try:
                    yield from packet.decode()
                except av.error.InvalidDataError:
                    counts.damaged += 1
