"""WAV files with wrong sizes, and WAV files that were joined. libav reports neither: it stops reading where it believes that
the samples end.

A recorder that writes to a pipe can't know how long the recording will be. It writes some large size, or none; one that was
killed leaves 0. A size that would make the file larger than is accepted could never be kept, so it promises nothing: the
samples go on to the end of the file. A size that is too small is told by what follows the samples: if it is neither a chunk nor
another file, it is samples as well, as where the head was made for the first of many blocks. If the file as a whole is not said
to go on, the caller is told. Any other size is a promise.

Where a second head follows, WAVs were put one behind the other, as the parts of streamed speech are. Those of the same format
become one file, which promises what its parts promise.

libav takes the samples of a big-endian file (RIFX) for little-endian ones, the sizes of RF64 for those of its own chunk,
whether it is there or not, and whole numbers of 24 bits that are stored in 32 for floating point. Such a file is handed to it
as a plain one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import struct
from collections.abc import Iterator
from typing import Literal

import numpy as np

from shmring.frontend.media.damage import Shortfall, taken_for_samples
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.signatures import is_another_file

__all__ = ["WavSizes", "wav_pieces", "wav_sizes"]

_FORMS = (b"RIFF", b"RF64", b"BW64", b"RIFX")  # the middle two have sizes of 64 bits, in a chunk of their own
_HEAD = re.compile(rb"WAVE(?<=(?:RIFF|RF64|BW64|RIFX)....WAVE)[ -~]{4}", re.DOTALL)  # the latter begins the name of a chunk
_NAME_PLACE = 8  # of WAVE
_FIRST_CHUNK = 12
_CHUNK_NBYTES = 8  # of its head
_LARGEST = 0xFFFF_FFFF
_MAX_FORMAT_NBYTES = 1024  # the usual ones have 16 to 50
_FORMAT_NUMBERS = (2, 2, 4, 4, 2, 2, 2, 2, 4, 4, 2, 2)  # bytes of each; the last three begin an identifier
_EXTENSIBLE = b"\xfe\xff"
_BITS, _USED_BITS = _CHUNK_NBYTES + 14, _CHUNK_NBYTES + 18  # places in the chunk of the format
_SWAPPED_TAGS = (1, 3, 0xFFFE)  # samples of several bytes: whole numbers, floating point, or what an identifier says
_IGNORED_S = 0.1  # what follows the samples, and is no more than this, may be a tag of some kind or filling
_MAX_PARTS = 50_000  # ten minutes in parts of 20 ms are 30 000


@dataclasses.dataclass(frozen=True, kw_only=True)
class WavSizes:
    """What the sizes of a WAV file say.

    Attributes:
        shortfall: bytes of samples that are missing, if any, or that are more than the file says.
        goes_to_the_end: the samples do, whatever their own size says.
    """

    shortfall: Shortfall | None = None
    goes_to_the_end: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Wav:
    """What the head of a WAV file says.

    Attributes:
        order: of bytes in numbers.
        riff_nbytes: of all chunks.
        format: the chunk that says what a sample is.
        place: where the samples begin.
        nbytes: of them.
        is_readable: libav understands the file.
    """

    order: Literal["little", "big"]
    riff_nbytes: int
    format: bytes
    place: int
    nbytes: int
    is_readable: bool

    @property
    def block_nbytes(self) -> int:
        """Bytes of one sample of all channels, or of what is encoded together."""
        return max(1, int.from_bytes(self.format[_CHUNK_NBYTES + 12 : _CHUNK_NBYTES + 14], self.order))

    def plain_format(self) -> bytes:
        """Returns the chunk with its numbers as little-endian ones, and all bits of samples as ones that are used."""
        chunk = self.format
        if self.order == "big":
            place, swapped = 4, b""
            for nbytes in (4, *_FORMAT_NUMBERS):
                swapped += chunk[place : place + nbytes][::-1]
                place += nbytes
            chunk = chunk[:4] + swapped + chunk[place:]
        return chunk[:_USED_BITS] + chunk[_BITS : _BITS + 2] + chunk[_USED_BITS + 2 :] if _has_unused_bits(chunk) else chunk

    def samples(self, data: memoryview) -> memoryview:
        """Returns samples as little-endian ones, which are all there."""
        fields = [int.from_bytes(self.format[_CHUNK_NBYTES + place :][:2], self.order) for place in (0, 14)]
        nbytes = fields[1] // 8 if fields[0] in _SWAPPED_TAGS else 1
        if self.order == "little" or nbytes < 2:
            return data
        whole = data[: len(data) // nbytes * nbytes]
        return memoryview(np.frombuffer(whole, np.uint8).reshape(-1, nbytes)[:, ::-1].tobytes())

    def extent(self, data: memoryview) -> tuple[int, int]:
        """Returns where the samples end, and how many bytes of them are promised."""
        present = len(data) - self.place
        if self.nbytes >= present:
            return len(data), self.nbytes
        end = self.place + self.nbytes
        if self.nbytes == 0 and self.riff_nbytes <= self.place:  # what a recorder writes first, and mends at its end
            return len(data), present
        if self.is_chunk(data, self.padded_end) or self.is_chunk(data, end) or is_another_file(data[self.padded_end :]):
            return end, self.nbytes
        return (len(data), present) if self.says_to_go_on or self.has_much_behind(data) else (end, self.nbytes)

    @property
    def padded_end(self) -> int:
        """Where the samples end, and what fills them up to an even number of bytes."""
        return self.place + self.nbytes + self.nbytes % 2

    @property
    def says_to_go_on(self) -> bool:
        """Whether there is more behind the samples, by the size of all chunks."""
        return self.riff_nbytes >= self.padded_end

    def has_much_behind(self, data: memoryview) -> bool:
        """Whether what is behind the samples would be heard."""
        bytes_a_second = int.from_bytes(self.format[_CHUNK_NBYTES + 8 : _CHUNK_NBYTES + 12], self.order)
        return len(data) - self.padded_end > _IGNORED_S * bytes_a_second

    def is_chunk(self, data: memoryview, place: int) -> bool:
        """Whether what begins here looks like a chunk: a name of four letters, and a size that fits.

        It fits if the chunk is there, or if it ends where the file should.
        """
        end = place + _CHUNK_NBYTES
        if end > len(data) or not all(0x20 <= byte < 0x7F for byte in data[place : place + 4]):
            return False
        end += int.from_bytes(data[place + 4 : end], self.order)
        return end <= len(data) or 0 <= self.riff_nbytes + _CHUNK_NBYTES - end <= 1


def _has_unused_bits(chunk: bytes) -> bool:
    """Whether samples use fewer bits than they have, by the format; unused ones are the lowest, and 0."""
    return (
        len(chunk) >= _USED_BITS + 2
        and chunk[_CHUNK_NBYTES:][:2] == _EXTENSIBLE
        and chunk[_BITS:][:2] != chunk[_USED_BITS:][:2]
    )


def wav_sizes(data: memoryview, max_nbytes: int) -> WavSizes:
    """Returns what is wrong with the sizes of a WAV file.

    Args:
        data: the file. Of others nothing is said.
        max_nbytes: of a file that is accepted.
    """
    wav = _read(data)
    if wav is None:
        return WavSizes()
    end, promised = wav.extent(data)
    if wav.place + promised > max_nbytes:
        return WavSizes(goes_to_the_end=True)
    missing = wav.place + promised - end
    if missing > 0:
        return WavSizes(shortfall=Shortfall(missing=missing, promised=promised, unit="bytes of samples"))
    goes_to_the_end = promised > wav.nbytes
    shortfall = None
    if wav.nbytes and not wav.says_to_go_on and wav.has_much_behind(data):
        more = len(data) - wav.padded_end
        if goes_to_the_end:
            shortfall = taken_for_samples(more, wav.nbytes)
        elif is_another_file(data[wav.padded_end :]):
            told = f"{more} bytes behind its {wav.nbytes} bytes of samples are another file, or its tags, and are left out"
            shortfall = Shortfall(missing=0, promised=0, unit="", cause=told, is_damage=False)
    return WavSizes(shortfall=shortfall, goes_to_the_end=goes_to_the_end)


def wav_pieces(data: memoryview) -> list[tuple[memoryview, ...]]:
    """Returns the files that a WAV file was joined of, or the file itself; each as what it is put together of.

    Args:
        data: the file.

    Raises:
        MediaError: they are too many.
    """
    heads = itertools.islice(_HEAD.finditer(data, _FIRST_CHUNK), _MAX_PARTS)
    starts = [match.start() - _NAME_PLACE for match in heads]
    if len(starts) >= _MAX_PARTS:
        raise MediaError(f"the recording is joined of more than the {_MAX_PARTS} WAV files that are accepted")
    parts = [data[start:end] for start, end in itertools.pairwise([0, *starts, len(data)])]
    wavs = [(wav, part) for part in parts for wav in _read_all(part)]
    if len(parts) == 1 and len(wavs) < 2 and all(wav.is_readable for wav, _ in wavs):
        return [(data,)]
    pieces: list[list[memoryview]] = []
    promises: list[int] = []
    last: _Wav | None = None
    for wav, part in wavs:
        end, promised = wav.extent(part)
        if last is None and 0 <= len(data) - promised <= 2 * wav.place:  # its head was set right for the file as a whole
            promised = end - wav.place
        if last is None or (last.order, last.format) != (wav.order, wav.format):
            pieces.append([memoryview(b"")])
            promises.append(0)
        torn = (end - wav.place) % wav.block_nbytes  # a part of a sample would put all that follows out of place
        promises[-1] += promised - promised % wav.block_nbytes
        pieces[-1][0] = memoryview(_head(wav, promises[-1]))
        pieces[-1].append(wav.samples(part[wav.place : end - torn]))
        last = wav
    return [tuple(piece) for piece in pieces] or [(data,)]


def _head(wav: _Wav, nbytes: int) -> bytes:
    """The head of a file with so many bytes of samples."""
    riff_nbytes = 4 + len(wav.format) + _CHUNK_NBYTES + nbytes
    sizes = [min(size, _LARGEST).to_bytes(4, "little") for size in (riff_nbytes, nbytes)]
    return b"RIFF" + sizes[0] + b"WAVE" + wav.plain_format() + b"data" + sizes[1]


def _read_all(data: memoryview) -> Iterator[_Wav]:
    """Reads a WAV file, and yields it once for each of its chunks of samples."""
    wav = _read(data)
    while wav is not None:
        yield wav
        place, found = wav.padded_end, None
        while found is None and wav.is_chunk(data, place):
            nbytes = int.from_bytes(data[place + 4 : place + _CHUNK_NBYTES], wav.order)
            if bytes(data[place : place + 4]) == b"data":
                found = dataclasses.replace(wav, place=place + _CHUNK_NBYTES, nbytes=nbytes)
            place += _CHUNK_NBYTES + nbytes + nbytes % 2
        wav = found


def _read(data: memoryview) -> _Wav | None:
    """Reads a WAV file up to its samples; None: it has none, or is no such file."""
    if len(data) < _FIRST_CHUNK or bytes(data[:4]) not in _FORMS or bytes(data[_NAME_PLACE:_FIRST_CHUNK]) != b"WAVE":
        return None
    order: Literal["little", "big"] = "big" if bytes(data[:4]) == b"RIFX" else "little"
    riff_nbytes = int.from_bytes(data[4:8], order)
    is_rf64 = bytes(data[:4]) in (b"RF64", b"BW64")
    large: tuple[int, ...] = (0, 0, 0)  # bytes of all chunks, bytes of samples, samples
    format_chunk = b""
    place = _FIRST_CHUNK
    while place + _CHUNK_NBYTES <= len(data):
        name, nbytes = bytes(data[place : place + 4]), int.from_bytes(data[place + 4 : place + 8], order)
        chunk, place = place, place + _CHUNK_NBYTES
        if name == b"data":
            if nbytes == _LARGEST and large[1]:
                nbytes = large[1]
            return _Wav(
                order=order,
                riff_nbytes=riff_nbytes,
                format=format_chunk,
                place=place,
                nbytes=nbytes,
                is_readable=order == "little"
                and not _has_unused_bits(format_chunk)
                and (large[1] if is_rf64 else nbytes) == nbytes < 1 << 63
                and max(large) < 1 << 63,
            )
        if name == b"ds64" and place + 24 <= len(data):
            large = struct.unpack_from("<3Q", data, place)
            riff_nbytes = large[0]
        place += nbytes + nbytes % 2
        if name == b"fmt " and nbytes <= _MAX_FORMAT_NBYTES:
            format_chunk = bytes(data[chunk:place])
    return None
