"""Opening recordings and clips with libav (PyAV), so that hostile files reach as little of it as possible.

* The demuxer is chosen by the file's signature (:mod:`shmring.frontend.media.signatures`), from a short list. libav would ask
  300 demuxers, and among them are those of playlists (HLS, DASH, concat, SDP, image sequences), which open whatever files and
  sockets a playlist names. Only MPEG audio without a signature is left to libav's probing, which may come to no other
  conclusion.
* Whatever else a demuxer wants to open is refused: libav is given a file of memory, no protocol to reach others by, and a
  function to open others that opens none. (Some demuxers ask for the one, some for the other.) MP4's external references are
  not followed in any case, as libav's ``enable_drefs`` is off.
* Only common decoders are let in: libav decodes while it looks for the parameters of streams, and its hundreds of decoders of
  forgotten formats are where its vulnerabilities are found. Each is limited in pixels and starts no threads.
* Tags at the front of sound files are skipped: they hold pictures that would be decoded, and can be compressed.

Invariant: whatever the bytes are, :class:`MediaError` is all that comes out of :func:`opened`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import av
import av.container
import av.error
import av.stream
from av.audio.stream import AudioStream
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from shmring.frontend.media.damage import Shortfall, missing_end, missing_s, promised_s
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.fragments import lost_fragments
from shmring.frontend.media.mp4 import beginning_of, check_tables, contradictions, missing_samples, whole_part, why_unreadable
from shmring.frontend.media.ogg import lost_pages
from shmring.frontend.media.pieces import Piece, pieces_of
from shmring.frontend.media.riff import wav_sizes
from shmring.frontend.media.signatures import demuxer_of, is_still_picture

__all__ = [
    "SOUND_DECODERS",
    "VIDEO_DECODERS",
    "OpenFile",
    "coded_sizes",
    "media_errors",
    "missing_of",
    "missing_pieces",
    "opened",
    "packets_of",
    "prepare_decoder",
    "split",
    "track_of_piece",
    "tracks",
]

#: Decoders, as libav names them.
SOUND_DECODERS = frozenset(
    (
        *("aac", "alac", "flac", "mp3", "mp3float", "mp2", "mp2float", "opus", "vorbis", "ac3", "eac3", "amrnb", "amrwb"),
        *("pcm_u8", "pcm_s8", "pcm_alaw", "pcm_mulaw", "adpcm_ms", "adpcm_ima_wav", "adpcm_ima_qt"),
        *("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le", "pcm_s32be"),
        *("pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be"),
    )
)
VIDEO_DECODERS = frozenset(
    (
        *("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "gif", "mjpeg", "prores"),
        *("mpeg4", "msmpeg4", "h263", "mpeg1video", "mpeg2video", "theora"),
    )
)

_ACCEPTED = {
    "recording": "WAV, AIFF, CAF, FLAC, MP3, AAC, Ogg, MP4/QuickTime, Matroska/WebM, AVI, MPEG-TS",
    "clip": "MP4/QuickTime, Matroska/WebM, Ogg, AVI, MPEG-TS, GIF, animated WebP and AVIF",
}

_PROBE_NBYTES = 1 << 20  # what libav reads ahead to find the parameters of streams; its own default is 5 MB
_BUFFER_NBYTES = 64 << 10  # each read takes the interpreter lock; libav's default of 32 KiB takes it twice as often
_MAX_STREAMS = 64  # a film with sound and subtitles in many languages has 40; libav's default is 1000
_OPEN_TIMEOUT_S = 10.0  # memory answers at once: if opening takes longer, libav goes round in circles
_MAX_FRAMING_NBYTES = 64  # between two packets of a Matroska file, the head of a cluster among them: about 22
_PADDING_PIXELS = 1 << 16
_MAX_FRAME_SAMPLES = 1 << 20  # of sound, in one packet; FLAC's blocks have 65 536 at most

_NO_PROTOCOLS = {"protocol_whitelist": "none"}  # the name of no protocol
_PROBED = "mp3,aac"  # what libav may find where there is no signature

_Stream = TypeVar("_Stream", AudioStream, VideoStream)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenFile:
    """An open file.

    Attributes:
        container: of libav.
        demuxer: libav's name of it.
        piece: what was opened.
        data: its bytes, as libav reads them.
        is_whole: an MP4 is not cut off, so far as its boxes say.
        shortfalls: what is missing by the file's own sizes.
    """

    container: av.container.InputContainer
    demuxer: str
    piece: Piece
    data: memoryview
    is_whole: bool
    shortfalls: list[Shortfall]


@contextlib.contextmanager
def media_errors(what: str) -> Iterator[None]:
    """Whatever libav says is the fault of the bytes it was given.

    Args:
        what: "recording" or "clip".
    """
    try:
        yield
    except MediaError:
        raise
    except (MemoryError, av.error.MemoryError) as error:
        raise MediaError(f"the {what} asks for more memory than there is") from error
    except av.error.FFmpegError as error:
        raise MediaError(f"the {what} is damaged or truncated: {error.strerror or type(error).__name__}") from error
    except (ValueError, ArithmeticError, LookupError) as error:  # PyAV's own, about values that make no sense to it
        raise MediaError(f"the {what} is damaged: {type(error).__name__}") from error


def split(data: bytes) -> list[Piece]:
    """Returns the pieces of a file, one or more, each to be opened by itself (:mod:`shmring.frontend.media.pieces`).

    Raises:
        MediaError: they are too many.
    """
    tags_nbytes = _tags_nbytes(data)
    view = memoryview(data)[tags_nbytes:]
    demuxer, start = demuxer_of(view)
    if tags_nbytes and (demuxer is None or start):
        demuxer, start = "mp3", 0  # what usually has such tags; its demuxer also looks for a beginning further on
    return pieces_of(view[start:], demuxer)


@contextlib.contextmanager
def opened(piece: Piece, what: str, decoders: frozenset[str], max_frame_pixels: int) -> Iterator[OpenFile]:
    """Opens a file's container.

    Args:
        piece: the file, or a piece of it.
        what: "recording" or "clip", for errors.
        decoders: that may be used.
        max_frame_pixels: frames that are larger are not decoded.

    Raises:
        MediaError: it is in no format that is accepted, or damaged.
    """
    demuxer, view = piece.demuxer, piece.data()
    options = {
        "codec_whitelist": ",".join(sorted(decoders)),
        **_NO_PROTOCOLS,
        "format_whitelist": demuxer or _PROBED,
        "probesize": str(_PROBE_NBYTES),
        "fpsprobesize": "0",
        "max_streams": str(_MAX_STREAMS),
        "threads": "1",
        **_decoder_options(max_frame_pixels),
    }
    shortfalls = list(piece.shortfalls)
    whole, is_whole = view, True
    if demuxer == "mov":
        whole = view = view[beginning_of(view) :]
        view, is_whole = whole_part(view)
        check_tables(view)
    elif demuxer == "wav":
        options["ignore_length"] = str(int(wav_sizes(view, len(view)).goes_to_the_end))
    elif demuxer is not None:
        end = missing_end(demuxer, view)
        shortfalls += [end] if end else []
    refused = MediaError(f"not a {what} in a format that is accepted ({_ACCEPTED[what]})")
    if demuxer == "webp" or is_still_picture(view):  # an animated WebP is a clip, but not libav's
        raise refused
    with media_errors(what):
        try:
            container = av.open(
                _MemoryFile(view),
                "r",
                format=demuxer,
                options=options,
                metadata_errors="replace",
                buffer_size=_BUFFER_NBYTES,
                timeout=(_OPEN_TIMEOUT_S, None),
                io_open=_refuse_to_open,
            )
        except (av.error.ArgumentError, av.error.InvalidDataError):
            if demuxer is None:  # libav found something else, or nothing
                raise refused from None
            if demuxer == "mov":
                raise MediaError(f"the {what} is {why_unreadable(whole)}") from None
            raise
        with container:
            if demuxer == "mov" and not (container.streams.video or container.streams.audio or container.streams.subtitles):
                raise MediaError(f"the {what} is {why_unreadable(whole)}")
            name = container.format.name.split(",")[0]
            yield OpenFile(container=container, demuxer=name, piece=piece, data=view, is_whole=is_whole, shortfalls=shortfalls)


def tracks(streams: Sequence[_Stream], what: str, decoders: frozenset[str], demuxer: str) -> list[_Stream]:
    """Returns the tracks that can be decoded: those that the file says to play by default first, and in the file's order.

    Raises:
        MediaError: there are none.
    """
    shown = [stream for stream in streams if not stream.disposition & Disposition.attached_pic]  # a recording's cover
    if not shown:
        raise MediaError(f"the file ({demuxer}) holds no {'sound' if what == 'recording' else 'clip'}")
    names = {stream.index: _decoder_of(stream) for stream in shown}
    accepted = [stream for stream in shown if names[stream.index] in decoders]
    if not accepted:
        listed = ", ".join(dict.fromkeys(names.values()))
        raise MediaError(f"the {what} is encoded with {listed}, which is not accepted")
    # Beside an animation, an AVIF has a picture for those who show none.
    return sorted(accepted, key=lambda stream: (_is_picture(stream), not stream.disposition & Disposition.default))


def _is_picture(stream: AudioStream | VideoStream) -> bool:
    return stream.frames == 1 and not stream.duration


def track_of_piece(candidates: list[_Stream], index: int | None) -> _Stream:
    """Returns the track of a further piece: the one with the number that it has in the first, or else the first one."""
    return next((stream for stream in candidates if stream.index == index), candidates[0])


def missing_pieces(pieces: Sequence[Piece], unread: Sequence[tuple[Piece, MediaError]]) -> list[Shortfall]:
    """Returns what is missing where some pieces of a file can't be read.

    Args:
        pieces: all of them.
        unread: those, and why.
    """
    if not unread:
        return []
    total, missing = sum(piece.nbytes for piece in pieces), sum(piece.nbytes for piece, _ in unread)
    cause = f"are in {len(unread)} of its {len(pieces)} parts, which can't be read ({unread[0][1]})"
    return [Shortfall(missing=missing, promised=total, unit="bytes", cause=cause)]


def prepare_decoder(stream: AudioStream | VideoStream, max_frame_pixels: int) -> None:
    """Makes a stream ready to be decoded, alone: packets of the others are not even read."""
    for other in stream.container.streams:
        if other.index != stream.index:
            other.discard = av.stream.Discard.all
    stream.codec_context.thread_count = 1
    stream.codec_context.options = _decoder_options(max_frame_pixels)


def packets_of(file: OpenFile, stream: _Stream) -> Iterator[Packet[_Stream]]:
    """Yields the packets of a track; at last an empty one, which gets out what its decoder still has."""
    # PyAV ends with an empty packet for each stream, and does not know those that libav has found on the way: they come last.
    with contextlib.suppress(IndexError):
        yield from file.container.demux(stream)


def missing_of(
    file: OpenFile,
    stream: AudioStream | VideoStream,
    what: str,
    decoders: frozenset[str],
    end_s: float,
    max_nbytes: int,
    max_duration_s: float,
) -> list[Shortfall]:
    """Compares what a file promises of a track with where its packets end.

    Args:
        file: open; all its packets have been read.
        stream: the track.
        what: "recording" or "clip".
        decoders: that may be used.
        end_s: when the track's last packet ends.
        max_nbytes: of a file that is accepted: a larger size is no promise.
        max_duration_s: that is accepted: a longer one does not count.
    """
    if file.demuxer == "mov" and not file.is_whole:
        return missing_samples(stream, len(file.data))
    promised = promised_s(file.container, stream, file.data, max_duration_s)
    if file.demuxer == "mov":
        lost = lost_fragments(file.piece.fragments, file.piece.moved, stream)
        return missing_s(promised, end_s, max_duration_s) + lost + contradictions(stream, file.data)
    if file.demuxer == "wav":
        shortfall = wav_sizes(file.data, max_nbytes).shortfall
        return [shortfall] if shortfall else []
    if file.demuxer == "ogg" and isinstance(stream, AudioStream):
        with opened(file.piece, what, decoders, 1) as again:
            track = again.container.streams[stream.index]
            assert isinstance(track, AudioStream), "it is the same file"
            return lost_pages(again.data, again.container, track)
    if file.demuxer != "matroska":
        return missing_s(promised, end_s, max_duration_s)
    # Its duration is that of the longest track. And libav passes over what is damaged without a word, up to the next cluster.
    last_end_s, lost_s = _survey(file.piece, what, decoders, stream.index)
    missing = missing_s(promised, max(end_s, last_end_s), max_duration_s)
    if lost_s > 0:
        missing.append(Shortfall(missing=lost_s, promised=promised or last_end_s, unit="s", cause="are missing in the middle"))
    return missing


def _survey(piece: Piece, what: str, decoders: frozenset[str], track: int) -> tuple[float, float]:
    """Goes through the packets of all tracks: when the last of them ends, and how much of one track is lost in between.

    It is lost where bytes were passed over that are more than what stands between two packets, and time with them.
    """
    end_s = lost_s = 0.0
    reached = 0  # bytes of the file
    track_end_s: float | None = None
    num_packets = num_passed_over = 0
    is_passed_over = False
    with opened(piece, what, decoders, 1) as file:
        for packet in file.container.demux():  # Matroska has all its tracks in its head
            if not packet.size or packet.pts is None or not packet.time_base or packet.pos is None:
                continue
            num_packets += 1
            if reached and packet.pos - reached > _MAX_FRAMING_NBYTES:
                is_passed_over = True
                num_passed_over += 1
            reached = max(reached, packet.pos + packet.size)
            time_s = float(packet.pts * packet.time_base)
            packet_end_s = time_s + float((packet.duration or 0) * packet.time_base)
            end_s = max(end_s, packet_end_s)
            if packet.stream.index == track:
                if is_passed_over and track_end_s is not None:
                    lost_s += max(0.0, time_s - track_end_s)
                track_end_s = packet_end_s if track_end_s is None else max(track_end_s, packet_end_s)
                is_passed_over = False
    is_usual = 2 * num_passed_over > num_packets  # transparency, for example, stands behind each frame
    return end_s, 0.0 if is_usual else lost_s


def coded_sizes(data: bytes, name: str) -> list[tuple[int, int]]:
    """Returns width and height of all pictures in a HEIC or AVIF, as their own headers say; nothing is decoded.

    Raises:
        MediaError: they can't be read.
    """
    noun = "picture"
    check_tables(data)
    options = {
        "codec_whitelist": "hevc,libdav1d,av1",
        **_NO_PROTOCOLS,
        "format_whitelist": "mov",
        "probesize": str(_PROBE_NBYTES),
        "threads": "1",
    }
    with media_errors(noun):
        file = _MemoryFile(memoryview(data))
        with av.open(
            file, "r", format="mov", options=options, timeout=(_OPEN_TIMEOUT_S, None), io_open=_refuse_to_open
        ) as container:
            streams = container.streams.video
            sizes = [(stream.codec_context.width, stream.codec_context.height) for stream in streams if stream.codec_context]
    if not sizes:
        raise MediaError(f"the picture is {'an' if name[0] in 'AH' else 'a'} {name} without a picture that can be decoded")
    return sizes


def _decoder_of(stream: AudioStream | VideoStream) -> str:
    # PyAV has no context where libav has no decoder.
    return stream.codec_context.codec.name if stream.codec_context is not None else "an unknown codec"


def _decoder_options(max_frame_pixels: int) -> dict[str, str]:
    # Decoders count whole blocks and what they put around them: the frame itself is checked exactly when it is there.
    return {"max_pixels": str(max_frame_pixels * 5 // 4 + _PADDING_PIXELS), "max_samples": str(_MAX_FRAME_SAMPLES)}


def _tags_nbytes(data: bytes) -> int:
    """How much of the file is ID3v2 tags, of which there may be several."""
    place = 0
    while data[place : place + 3] == b"ID3" and len(data) >= place + 10:
        size = data[place + 6 : place + 10]
        place += 10 + (size[0] << 21 | size[1] << 14 | size[2] << 7 | size[3])
    return min(place, len(data))


def _refuse_to_open(url: str, flags: int, options: dict[str, Any]) -> NoReturn:
    raise MediaError("the file refers to other files or addresses, which is not accepted")


class _MemoryFile:
    """A file to read from memory.

    Unlike ``io.BytesIO`` it raises nothing: PyAV keeps an exception until libav next reports something, which may be about the
    next file that is opened on the same thread.
    """

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.nbytes = len(view)
        self._place = 0

    def read(self, size: int) -> bytes:
        start = self._place
        self._place = min(start + max(size, 0), self.nbytes)
        return bytes(self.view[start : self._place])

    def seek(self, offset: int, whence: int = 0) -> int:
        place = offset + {0: 0, 1: self._place, 2: self.nbytes}.get(whence, -1 - offset)
        if not 0 <= place <= self.nbytes:
            return -1
        self._place = place
        return place

    def tell(self) -> int:
        return self._place
