"""Opening recordings and clips with libav (PyAV), so that hostile files reach as little of it as possible.

* The demuxer is chosen here, by the first bytes, from a short list. libav would ask 300 demuxers, and among them are those of
  playlists (HLS, DASH, concat, SDP, image sequences), which open whatever files and sockets a playlist names.
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
from collections.abc import Iterator
from typing import Any, NoReturn

import av
import av.container
import av.error
import av.stream
from av.audio.stream import AudioStream
from av.video.stream import VideoStream

from frontend.media.errors import MediaError
from frontend.media.mp4 import check_tables
from frontend.media.riff import check_wav

__all__ = ["SOUND_DECODERS", "VIDEO_DECODERS", "demuxer_of", "media_errors", "opened", "prepare_decoder"]

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
    "recording": "WAV, AIFF, FLAC, MP3, AAC, Ogg, MP4/QuickTime, Matroska/WebM, AVI",
    "clip": "MP4/QuickTime, Matroska/WebM, Ogg, AVI, GIF",
}

_PROBE_NBYTES = 1 << 20  # what libav reads ahead to find the parameters of streams; its own default is 5 MB
_BUFFER_NBYTES = 64 << 10  # each read takes the interpreter lock; libav's default of 32 KiB takes it twice as often
_MAX_STREAMS = 64  # a film with sound and subtitles in many languages has 40; libav's default is 1000
_OPEN_TIMEOUT_S = 10.0  # memory answers at once: if opening takes longer, libav goes round in circles
_PADDING_PIXELS = 1 << 16
_MAX_FRAME_SAMPLES = 1 << 20  # of sound, in one packet; FLAC's blocks have 65 536 at most

_NO_PROTOCOLS = {"protocol_whitelist": "none"}  # the name of no protocol
_TAGGED = ("mp3", "aac", "flac")

_MAGIC: tuple[tuple[int, bytes, str], ...] = (
    (0, b"fLaC", "flac"),
    (0, b"OggS", "ogg"),
    (0, b"\x1aE\xdf\xa3", "matroska"),
    (0, b"GIF87a", "gif"),
    (0, b"GIF89a", "gif"),
    (8, b"WAVE", "wav"),
    (8, b"AVI ", "avi"),
    (8, b"AIFF", "aiff"),
    (8, b"AIFC", "aiff"),
    (4, b"ftyp", "mov"),
    (4, b"moov", "mov"),  # QuickTime files of old begin with any of these
    (4, b"mdat", "mov"),
    (4, b"wide", "mov"),
    (4, b"free", "mov"),
    (4, b"skip", "mov"),
)


def demuxer_of(data: bytes | memoryview) -> str | None:
    """Returns libav's name of the demuxer for a file that begins so; None: none that is accepted."""
    head = bytes(data[:12])
    for place, magic, name in _MAGIC:
        if head[place : place + len(magic)] == magic:
            return name
    if len(head) >= 2 and head[0] == 0xFF and head[1] & 0xE0 == 0xE0:  # the synchronisation of MPEG audio
        if head[1] & 0xF6 == 0xF0:
            return "aac"  # ADTS, which says that it is layer 0
        return "mp3" if head[1] & 0x06 else None
    return None


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


@contextlib.contextmanager
def opened(data: bytes, what: str, decoders: frozenset[str], max_frame_pixels: int) -> Iterator[av.container.InputContainer]:
    """Opens a file's container.

    Args:
        data: the file.
        what: "recording" or "clip", for errors.
        decoders: that may be used.
        max_frame_pixels: frames that are larger are not decoded.

    Raises:
        MediaError: it is in no format that is accepted, or damaged.
    """
    tags_nbytes = _tags_nbytes(data)
    file = _MemoryFile(memoryview(data)[tags_nbytes:])
    demuxer = demuxer_of(file.view)
    if tags_nbytes and demuxer not in _TAGGED:
        demuxer = "mp3"  # what else has such tags; its demuxer also looks for a beginning further on
    if demuxer is None:
        raise MediaError(f"not a {what} in a format that is accepted ({_ACCEPTED[what]})")
    if demuxer == "mov":
        check_tables(data)
    if demuxer == "wav":
        check_wav(file.view)
    options = {
        "codec_whitelist": ",".join(sorted(decoders)),
        **_NO_PROTOCOLS,
        "format_whitelist": demuxer,
        "probesize": str(_PROBE_NBYTES),
        "fpsprobesize": "0",
        "max_streams": str(_MAX_STREAMS),
        "threads": "1",
        **_decoder_options(max_frame_pixels),
    }
    with media_errors(what):
        container = av.open(
            file,
            "r",
            format=demuxer,
            options=options,
            metadata_errors="replace",
            buffer_size=_BUFFER_NBYTES,
            timeout=(_OPEN_TIMEOUT_S, None),
            io_open=_refuse_to_open,
        )
        with container:
            yield container


def prepare_decoder(stream: AudioStream | VideoStream, what: str, decoders: frozenset[str], max_frame_pixels: int) -> None:
    """Makes a stream ready to be decoded, alone: packets of the others are not even read.

    Raises:
        MediaError: it has no decoder that is accepted.
    """
    # PyAV has no context where libav has no decoder.
    name = stream.codec_context.codec.name if stream.codec_context is not None else "an unknown codec"
    if name not in decoders:
        raise MediaError(f"the {what} is encoded with {name}, which is not accepted")
    for other in stream.container.streams:
        if other.index != stream.index:
            other.discard = av.stream.Discard.all
    stream.codec_context.thread_count = 1
    stream.codec_context.options = _decoder_options(max_frame_pixels)


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
