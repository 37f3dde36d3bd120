"""Recordings: of every container and codec that is accepted the samples come out, at the rate that was asked for."""

from __future__ import annotations

import io
import itertools
import struct
import tracemalloc
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from shmring.engine.protocol import SoundSpec
from shmring.frontend.media.audio import DecodedSound, SoundHeader, decode_into, probe
from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.mel import LogMelWriter, num_mel_frames
from shmring.frontend.media.options import MediaLimits
from tests.tables import for_each

Array = np.ndarray[Any, Any]
SAMPLES = Path(__file__).resolve().parents[3] / "frontend" / "samples"
LIMITS = MediaLimits()
RATE = 16_000
WAVEFORM = SoundSpec(form="waveform", sample_rate=RATE)
SECONDS = 2


def chirp(rate: int, seconds: float = SECONDS) -> Array:
    """Sweeps from 200 Hz to 1.7 kHz: at each moment it is another tone, so that nothing can be out of place unnoticed."""
    time = np.arange(int(seconds * rate)) / rate
    return 0.5 * np.sin(2 * np.pi * (200 * time + 375 * time**2))


def decoded(data: bytes, spec: SoundSpec = WAVEFORM, limits: MediaLimits = LIMITS) -> tuple[Array, DecodedSound]:
    header = probe(data, spec, limits)
    target = np.full(header.shape, np.nan, np.float32)
    result = decode_into(data, header, target)
    assert np.isnan(target[result.length :]).all()
    return target[: result.length], result


def wav(
    payload: bytes,
    *,
    format_tag: int = 1,
    channels: int = 1,
    rate: int = RATE,
    bits: int = 16,
    claimed: int | None = None,
    riff: int | None = None,
    behind: bytes = b"",
) -> bytes:
    """A file that may claim another size of its samples, or of its whole, and have something behind the samples."""
    block = channels * bits // 8
    head = struct.pack("<HHIIHH", format_tag, channels, rate, min(rate * block, 0xFFFFFFFF), block, bits)
    size = len(payload) if claimed is None else claimed
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"data" + struct.pack("<I", size) + payload
    return b"RIFF" + struct.pack("<I", min(size + 36, 0xFFFFFFFF) if riff is None else riff) + b"WAVE" + chunks + behind


def sixteen_bits(rate: int = RATE) -> bytes:
    """The samples of a chirp."""
    return (chirp(rate) * 32767).astype("<i2").tobytes()


@for_each(
    ("container", "codec", "rate", "tolerance"),
    [
        ("wav", "pcm_s16le", 16_000, 1e-4),
        ("wav", "pcm_s16le", 44_100, 1e-3),
        ("wav", "pcm_u8", 16_000, 0.01),
        ("wav", "pcm_s24le", 48_000, 1e-3),
        ("wav", "pcm_f32le", 44_100, 1e-3),
        ("wav", "pcm_f64le", 16_000, 1e-6),
        ("wav", "pcm_mulaw", 8_000, 0.03),
        ("aiff", "pcm_s16be", 44_100, 1e-3),
        ("flac", "flac", 44_100, 1e-3),
        ("ogg", "flac", 44_100, 1e-3),
        ("matroska", "flac", 44_100, 1e-3),
        ("ipod", "alac", 44_100, 1e-3),
        ("mov", "pcm_s16le", 44_100, 1e-3),
        ("mp3", "libmp3lame", 44_100, 0.1),
        ("ogg", "libopus", 48_000, 0.05),
        ("webm", "libopus", 48_000, 0.05),
        ("mp4", "aac", 44_100, 0.2),
        ("adts", "aac", 44_100, None),  # has no place to say how much the codec delays
    ],
)
def test_every_format_is_decoded(
    recording_of: Callable[..., bytes], container: str, codec: str, rate: int, tolerance: float | None
) -> None:
    samples, result = decoded(recording_of(chirp(rate), rate, container, codec))
    assert result.duration_s == len(samples) / RATE == pytest.approx(SECONDS, abs=0.05)
    if tolerance is not None:
        middle = slice(RATE // 10, -RATE // 5)
        np.testing.assert_allclose(samples[: SECONDS * RATE][middle], chirp(RATE)[middle], atol=tolerance)


@for_each("path", sorted(SAMPLES.glob("*.wav")), ids=lambda path: path.stem)
def test_samples_are_decoded_exactly(path: Path) -> None:
    with wave.open(str(path)) as file:
        rate = file.getframerate()
        assert file.getnchannels() == 1
        expected = np.frombuffer(file.readframes(file.getnframes()), np.int16) / 32768
    samples, result = decoded(path.read_bytes(), SoundSpec(form="waveform", sample_rate=rate))
    np.testing.assert_array_equal(samples, expected.astype(np.float32))
    assert result.duration_s == len(expected) / rate


@for_each(("layout", "channels"), [("stereo", 2), ("2.1", 3), ("4.0", 4), ("5.1", 6)])
def test_channels_are_mixed_such_that_full_scale_stays_full_scale(
    recording_of: Callable[..., bytes], layout: str, channels: int
) -> None:
    loud = np.where(np.arange(RATE) // 100 % 2, 0.999, -0.999)
    samples, _ = decoded(recording_of(np.repeat(loud[np.newaxis], channels, 0), RATE, "wav", "pcm_f32le", layout))
    assert 0.9 < np.abs(samples).max() <= 1.0


def test_stereo_is_mixed_to_the_mean(recording_of: Callable[..., bytes]) -> None:
    left, right = chirp(RATE), 0.2 * np.random.default_rng(0).normal(size=SECONDS * RATE).clip(-2, 2)
    samples, _ = decoded(recording_of(np.stack([left, right]), RATE, "wav", "pcm_f32le", "stereo"))
    np.testing.assert_allclose(samples, (left + right) / 2, atol=1e-6)


@for_each("channels", [3, 4, 7, 8, 16])
def test_channels_that_are_only_counted_are_mixed_as_is_usual(channels: int) -> None:
    payload = np.repeat(np.int16([8000]), channels * 1000).tobytes()
    np.testing.assert_allclose(decoded(wav(payload, channels=channels))[0], 8000 / 32768, rtol=1e-3)


def test_channels_in_no_known_arrangement_are_refused() -> None:
    with pytest.raises(MediaError, match="11 channels in an arrangement"):
        decoded(wav(bytes(22 * 1000), channels=11))


@for_each("rate", [8_000, 24_000, 48_000])
def test_samples_have_the_rate_of_the_spec(recording_of: Callable[..., bytes], rate: int) -> None:
    data = recording_of(chirp(44_100), 44_100)
    samples, _ = decoded(data, SoundSpec(form="waveform", sample_rate=rate))
    np.testing.assert_allclose(samples[100:-100], chirp(rate)[100 : len(samples) - 100], atol=2e-3)


def test_a_spectrogram_is_that_of_the_samples(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(44_100), 44_100, "flac", "flac")
    samples, _ = decoded(data)
    log_mel, result = decoded(data, SoundSpec(form="log_mel", sample_rate=RATE, mel_bands=64))
    expected = np.empty((num_mel_frames(len(samples), RATE), 64), np.float32)
    writer = LogMelWriter(expected, RATE)
    writer.write(samples)
    writer.finish()
    np.testing.assert_allclose(log_mel, expected, atol=1e-4)
    assert result.duration_s == len(samples) / RATE


def test_a_very_short_recording_has_one_window() -> None:
    log_mel, result = decoded(wav(np.int16([1000, -1000]).tobytes()), SoundSpec())
    assert log_mel.shape == (1, 80)
    assert result.duration_s == 2 / RATE


def test_the_sound_of_a_clip_is_taken(clip_of: Callable[..., bytes], recording_of: Callable[..., bytes]) -> None:
    with pytest.raises(MediaError, match="holds no sound"):
        probe(clip_of([0, 100, 200]), WAVEFORM, LIMITS)
    file = io.BytesIO()
    with (
        av.open(file, "w", format="mp4") as output,
        av.open(io.BytesIO(recording_of(chirp(RATE), RATE, "mp4", "aac"))) as sound,
    ):
        video = output.add_stream("mpeg4", rate=25)
        video.width, video.height, video.pix_fmt = 64, 48, "yuv420p"
        audio = output.add_stream_from_template(sound.streams.audio[0])
        for level in range(50):
            output.mux(video.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8))))
        output.mux(video.encode(None))
        for packet in sound.demux(audio=0):
            if packet.dts is not None:
                packet.stream = audio
                output.mux(packet)
    samples, _ = decoded(file.getvalue())
    middle = slice(RATE // 10, -RATE // 5)
    np.testing.assert_allclose(samples[: SECONDS * RATE][middle], chirp(RATE)[middle], atol=0.05)


# -- what is refused, and when --------------------------------------------------------------------------------------------


def test_probing_decodes_nothing(recording_of: Callable[..., bytes]) -> None:
    data = bytearray(recording_of(chirp(44_100), 44_100, "ipod", "alac"))
    expected = probe(bytes(data), WAVEFORM, LIMITS)
    start, end = data.index(b"mdat") + 1000, data.index(b"moov") - 1000
    data[start:end] = b"\xff" * (end - start)
    assert probe(bytes(data), WAVEFORM, LIMITS) == expected
    with pytest.raises(MediaError, match=r"can't be decoded|no samples"):
        decoded(bytes(data))


def test_more_than_the_packets_said_is_refused(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(RATE), RATE)
    header = SoundHeader(num_samples=RATE, sample_rate=RATE, mel_bands=None)
    with pytest.raises(MediaError, match="more in it than its packets say"):
        decode_into(data, header, np.empty(header.shape, np.float32))


def test_an_mp4_that_lies_about_durations_is_as_long_as_it_says(recording_of: Callable[..., bytes]) -> None:
    data = bytearray(recording_of(chirp(44_100), 44_100, "mp4", "aac"))
    table = data.index(b"stts") + 4
    entries = int.from_bytes(data[table + 4 : table + 8], "big")
    for entry in range(entries):
        data[table + 12 + 8 * entry : table + 16 + 8 * entry] = (1).to_bytes(4, "big")  # each packet lasts a tick, not 1024
    assert decoded(bytes(data))[1].duration_s < 0.3


def test_too_long_is_refused(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(RATE), RATE, "ogg", "libopus")
    with pytest.raises(MediaError, match=r"longer than the 1.5 s"):
        probe(data, WAVEFORM, MediaLimits(max_audio_duration_s=1.5))
    probe(data, WAVEFORM, MediaLimits(max_audio_duration_s=2.1))


def test_too_large_a_file_is_refused() -> None:
    with pytest.raises(MediaError, match="11 bytes, more than the 10"):
        probe(b"x" * 11, WAVEFORM, MediaLimits(max_audio_nbytes=10))


@for_each("data", [b"", wav(b"")])
@for_each("form", ["waveform", "log_mel"])
def test_nothing_is_refused(data: bytes, form: Any) -> None:
    with pytest.raises(MediaError, match=r"empty|no samples|damaged"):
        decoded(data, SoundSpec(form=form))


@for_each("value", [np.nan, np.inf, -np.inf, 1e30])
@for_each("form", ["waveform", "log_mel"])
@for_each(("rate", "bits"), [(RATE, 32), (RATE, 64), (44_100, 32)])
def test_samples_that_are_no_numbers_are_refused(value: float, form: Any, rate: int, bits: int) -> None:
    samples = np.zeros(5000, np.dtype(f"<f{bits // 8}"))
    samples[1234] = value
    with pytest.raises(MediaError, match="no numbers"):
        decoded(wav(samples.tobytes(), format_tag=3, rate=rate, bits=bits), SoundSpec(form=form))


@for_each("rate", [1, 999, 768_001, 2**31 - 1])
def test_absurd_rates_are_refused(rate: int) -> None:
    with pytest.raises(MediaError, match=r"samples a second|damaged"):
        decoded(wav(bytes(2000), rate=rate))


def test_too_many_channels_are_refused() -> None:
    with pytest.raises(MediaError, match="65 channels"):
        decoded(wav(bytes(130 * 100), channels=65))


def test_a_packet_that_is_damaged_is_left_out_but_not_many(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(44_100, 4), 44_100, "flac", "flac")
    frames = [place for place in range(len(data)) if data[place : place + 2] == b"\xff\xf8"]
    few, many = bytearray(data), bytearray(data)
    few[frames[3] + 9 : frames[3] + 40] = bytes(31)
    for place in frames[2:]:
        many[place + 9 : place + 40] = bytes(31)
    assert 3 < decoded(bytes(few))[1].duration_s <= 4
    with pytest.raises(MediaError, match="damaged"):
        decoded(bytes(many))


def test_a_target_of_another_shape_is_the_caller_s_mistake(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(RATE), RATE)
    with pytest.raises(ValueError, match="the recording needs float32"):
        decode_into(data, probe(data, WAVEFORM, LIMITS), np.empty(5, np.float32))


@pytest.mark.parametrize("form", ["waveform", "log_mel"])
def test_no_temporary_is_as_large_as_the_recording(recording_of: Callable[..., bytes], form: Any) -> None:
    data = recording_of(np.tile(chirp(RATE), 60), RATE, "flac", "flac")
    header = probe(data, SoundSpec(form=form), LIMITS)
    target = np.empty(header.shape, np.float32)
    tracemalloc.start()
    try:
        result = decode_into(data, header, target)
        _, peak_nbytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert result.duration_s == pytest.approx(120, abs=0.1)
    assert peak_nbytes < 4 << 20  # its samples take 7.7 MB


# -- what is missing ------------------------------------------------------------------------------------------------------


FORMATS = [
    ("wav", "pcm_s16le", 44_100, "bytes of samples"),
    ("aiff", "pcm_s16be", 44_100, "s"),
    ("flac", "flac", 44_100, "s"),
    ("mp3", "libmp3lame", 44_100, "s"),
    ("webm", "libopus", 48_000, "s"),
    ("matroska", "aac", 44_100, "s"),
    ("caf", "pcm_s16le", 44_100, "s"),
    ("avi", "pcm_s16le", 44_100, "s"),
]


@for_each(("container", "codec", "rate", "unit"), FORMATS)
def test_half_a_recording_is_refused_in_every_format(
    recording_of: Callable[..., bytes], container: str, codec: str, rate: int, unit: str
) -> None:
    data = recording_of(chirp(rate), rate, container, codec)
    assert decoded(data)[1].shortfall == ""
    half = data[: len(data) // 2]
    with pytest.raises(MediaError, match=rf"the recording is damaged or truncated: .* of \S+ {unit} .*max_missing_share"):
        decoded(half)
    _, sound = decoded(half, limits=MediaLimits(max_missing_share=0.7))
    assert 0.3 * SECONDS < sound.duration_s < 0.6 * SECONDS
    assert f" {unit} (" in sound.shortfall


@for_each(("container", "codec", "rate", "unit"), FORMATS)
def test_a_recording_without_its_end_is_taken_as_far_as_it_goes(
    recording_of: Callable[..., bytes], container: str, codec: str, rate: int, unit: str
) -> None:
    data = recording_of(chirp(rate, 10), rate, container, codec)
    sound = decoded(data[: len(data) * 96 // 100])[1]
    assert 9 < sound.duration_s < 9.9
    assert sound.shortfall.startswith("the recording is damaged or truncated: ")


def test_an_ogg_promises_nothing_but_its_end(recording_of: Callable[..., bytes]) -> None:
    data = recording_of(chirp(48_000, 10), 48_000, "ogg", "libopus")
    assert decoded(data)[1].shortfall == ""
    sound = decoded(data[: len(data) // 2])[1]
    assert sound.shortfall == "the recording is damaged or truncated: its end is missing (OGG)"


# ffmpeg's and SoX's (of whole samples; the second is for 24 bits and two channels), and those of libraries for speech.
PLACEHOLDERS = [0xFFFFFFFF, 0x7FFFEFFC, 0x7FFFF000, 2_000_000_000, 1_000_000_000, 1 << 30]


@for_each(
    ("claimed", "riff"),
    [(0, 0), (0, 36), *itertools.product(PLACEHOLDERS, [0, 36, 0x7FFFF024, 0xFFFFFFFF])],
)
def test_a_wav_whose_sizes_say_nothing_goes_to_its_end(claimed: int, riff: int) -> None:
    data = wav(sixteen_bits(), claimed=claimed, riff=riff)
    samples, sound = decoded(data)
    assert (len(samples), sound.shortfall) == (SECONDS * RATE, "")
    assert probe(data, WAVEFORM, LIMITS).num_samples <= (SECONDS + 0.3) * RATE, "what a header claims costs nothing"


@for_each("claimed", [2_147_479_548, 2_000_000_000])
def test_a_wav_of_24_bits_and_an_extended_format_goes_to_its_end(claimed: int) -> None:
    whole = np.repeat((chirp(RATE) * 8_388_607).astype("<i4"), 2)
    payload = whole.view(np.uint8).reshape(-1, 4)[:, :3].tobytes()
    kind = struct.pack("<HHI", 22, 24, 3) + bytes.fromhex("0100000000001000800000aa00389b71")  # PCM, of 24 bits, left and right
    head = struct.pack("<HHIIHH", 0xFFFE, 2, RATE, 6 * RATE, 6, 24) + kind
    chunks = b"fmt " + struct.pack("<I", len(head)) + head + b"fact" + struct.pack("<II", 4, claimed // 6)
    data = b"RIFF" + struct.pack("<I", 0x7FFFF044) + b"WAVE" + chunks + b"data" + struct.pack("<I", claimed) + payload
    samples, sound = decoded(data)
    assert sound.shortfall == ""
    np.testing.assert_allclose(samples, chirp(RATE), atol=1e-6)


@for_each(("rate", "claimed"), [(RATE, None), (24_000, None), (24_000, 0xFFFFFFFF), (24_000, 0)])
def test_wavs_that_were_joined_are_heard_as_one(rate: int, claimed: int | None) -> None:
    payload = sixteen_bits(rate)
    parts = [payload[place : place + 9_600] for place in range(0, len(payload), 9_600)]
    samples, sound = decoded(b"".join(wav(part, rate=rate, claimed=claimed) for part in parts))
    assert sound.shortfall == ""
    np.testing.assert_array_equal(samples, decoded(wav(payload, rate=rate))[0])


def test_of_joined_wavs_what_the_last_one_lacks_is_told() -> None:
    samples, sound = decoded(wav(sixteen_bits()) * 5 + wav(sixteen_bits())[:-6400])
    assert sound.shortfall == "the recording is damaged or truncated: 6400 of 384000 bytes of samples (1.7 %) are missing"
    assert len(samples) == 6 * SECONDS * RATE - 3200


def test_joined_wavs_of_different_formats_follow_each_other() -> None:
    samples, _ = decoded(wav(sixteen_bits()) + wav(sixteen_bits(24_000), rate=24_000))
    assert len(samples) == pytest.approx(2 * SECONDS * RATE, abs=20)
    np.testing.assert_allclose(
        samples[SECONDS * RATE + 100 : -100], chirp(RATE)[100 : len(samples) - SECONDS * RATE - 100], atol=1e-3
    )


@for_each(("container", "codec"), [("flac", "flac"), ("aiff", "pcm_s16be"), ("caf", "pcm_s16le"), ("mp3", "libmp3lame")])
def test_other_recordings_that_were_joined_are_heard_whole(
    recording_of: Callable[..., bytes], container: str, codec: str
) -> None:
    first, second = (recording_of(scale * chirp(44_100), 44_100, container, codec) for scale in (0.5, 1.0))
    samples, sound = decoded(first + second)
    assert sound.duration_s == pytest.approx(2 * SECONDS, abs=0.1)
    assert np.abs(samples[len(samples) // 2 + RATE // 2 :]).max() == pytest.approx(0.5, abs=0.05)
    assert "missing" not in sound.shortfall


@for_each(("bits", "used", "channels"), [(32, 24, 1), (32, 24, 2), (32, 20, 1), (24, 20, 1), (16, 12, 1), (16, 0, 1)])
def test_samples_that_use_a_part_of_their_bits(bits: int, used: int, channels: int) -> None:
    sound = chirp(RATE)
    whole = np.repeat(np.rint(sound * ((1 << 31) - 1)).astype("<i4"), channels)
    samples = whole.view(np.uint8).reshape(-1, 4)[:, 4 - bits // 8 :].tobytes()
    block = channels * bits // 8
    identifier = bytes.fromhex("0100000000001000800000aa00389b71")
    chunk = struct.pack("<HHIIHHHHI", 0xFFFE, channels, RATE, RATE * block, block, bits, 22, used, 0) + identifier
    content = b"WAVEfmt " + struct.pack("<I", len(chunk)) + chunk + b"data" + struct.pack("<I", len(samples)) + samples
    heard, told = decoded(b"RIFF" + struct.pack("<I", len(content)) + content)
    assert np.abs(heard - sound).max() < 1e-3
    assert told.shortfall == ""


@for_each(
    ("form", "samples_nbytes", "num_samples"),
    [(0x7F000036, 0x7F000008, 0x7F000000 // 2), (0, 0, 0), (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF), (46, 8, 0)],
    ids=["SoX", "ffmpeg", "as large as can be", "not finished"],
)
def test_an_aiff_that_was_written_to_a_pipe_is_read_whole(
    recording_of: Callable[..., bytes], form: int, samples_nbytes: int, num_samples: int
) -> None:
    data = bytearray(recording_of(chirp(RATE), RATE, "aiff", "pcm_s16be"))
    places = (4, form), (data.index(b"SSND") + 4, samples_nbytes), (data.index(b"COMM") + 10, num_samples)
    for place, size in places:
        data[place : place + 4] = struct.pack(">I", size)
    samples, sound = decoded(bytes(data))
    assert (len(samples), sound.shortfall) == (SECONDS * RATE, "")


@for_each(
    ("container", "codec", "rate"),
    [
        ("wav", "pcm_s16le", 16_000),
        ("aiff", "pcm_s16be", 16_000),
        ("ogg", "libopus", 48_000),
        ("ipod", "aac", 48_000),
        ("flac", "flac", 16_000),
        ("mp3", "libmp3lame", 48_000),
    ],
)
def test_tags_may_stand_before_any_format(recording_of: Callable[..., bytes], container: str, codec: str, rate: int) -> None:
    data = recording_of(chirp(rate), rate, container, codec)
    tags = b"ID3\4\0\0\0\0\7\x68" + b"\xff" * 1000  # which look like the first bytes of a frame
    for tagged in (tags + data, tags + tags + data):
        np.testing.assert_array_equal(decoded(tagged)[0], decoded(data)[0])


NBYTES = SECONDS * RATE * 2
LIST = b"LIST" + struct.pack("<I", 200) + bytes(200)


@for_each(
    ("options", "told"),
    [
        *(({"claimed": NBYTES + more}, f"{more} of {NBYTES + more} bytes of samples") for more in (1, 16, 2000)),
        ({"claimed": NBYTES // 2, "riff": NBYTES + 36}, ""),
        ({"riff": NBYTES + 36 + len(LIST), "behind": LIST}, ""),
    ],
    ids=["1 more", "16 more", "2000 more", "half", "a chunk behind the samples, which is no sound"],
)
def test_a_wav_with_other_sizes_is_read_as_far_as_its_samples_go(options: dict[str, Any], told: str) -> None:
    samples, sound = decoded(wav(sixteen_bits(), **options))
    assert len(samples) == SECONDS * RATE
    assert told in sound.shortfall


@for_each("scale", [128.0, 32_767.0, 2.0**31])
def test_whole_numbers_as_floating_point_are_refused_with_what_to_do(scale: float) -> None:
    samples = (scale * chirp(RATE)).astype("<f4")
    with pytest.raises(MediaError, match=r"look like whole numbers\. Divide them by full scale"):
        decoded(wav(samples.tobytes(), format_tag=3, bits=32))


# -- where it begins, and which track -------------------------------------------------------------------------------------


@for_each("junk", [b"\n", bytes(1000), b"\x1f" * 9001, b"\xff\xfb" * 20], ids=len)
def test_junk_before_an_mp3_is_left_out(recording_of: Callable[..., bytes], junk: bytes) -> None:
    data = recording_of(chirp(44_100), 44_100, "mp3", "libmp3lame")
    assert decoded(junk + data)[1].duration_s == pytest.approx(SECONDS, abs=0.1)


@for_each("cut", [1, 100, 777])
def test_an_mp3_may_begin_in_the_middle_of_a_frame(recording_of: Callable[..., bytes], cut: int) -> None:
    data = recording_of(chirp(44_100), 44_100, "mp3", "libmp3lame")
    assert decoded(data[cut:])[1].duration_s == pytest.approx(SECONDS, abs=0.15)


@for_each(("container", "codec"), [("wav", "pcm_s16le"), ("flac", "flac"), ("ogg", "libopus"), ("mp4", "aac")])
def test_a_line_break_before_a_recording_is_left_out(recording_of: Callable[..., bytes], container: str, codec: str) -> None:
    rate = 48_000 if codec == "libopus" else 44_100
    data = b"\r\n" + recording_of(chirp(rate), rate, container, codec)
    assert decoded(data)[1].duration_s == pytest.approx(SECONDS, abs=0.1)


@for_each(("container", "codec"), [("caf", "pcm_s16le"), ("caf", "alac"), ("mpegts", "aac")])
def test_what_phones_make_is_decoded(recording_of: Callable[..., bytes], container: str, codec: str) -> None:
    samples, sound = decoded(recording_of(chirp(44_100), 44_100, container, codec))
    assert sound.duration_s == pytest.approx(SECONDS, abs=0.1)
    assert np.abs(samples[RATE // 2 : -RATE // 2]).max() == pytest.approx(0.5, abs=0.2)  # AAC of so few bits is rough


def test_a_track_that_can_t_be_decoded_is_passed_over(
    recording_of: Callable[..., bytes], two_tracks: Callable[..., bytes]
) -> None:
    first, second = (recording_of(chirp(44_100), 44_100, "matroska", codec) for codec in ("wavpack", "flac"))
    data = two_tracks(first, second, 0)
    assert decoded(data)[1].duration_s == pytest.approx(SECONDS, abs=0.1)


def test_the_track_is_the_default_one(recording_of: Callable[..., bytes], two_tracks: Callable[..., bytes]) -> None:
    quiet, loud = (recording_of(scale * chirp(RATE), RATE, "matroska", "flac") for scale in (0.1, 1.0))
    for default, peak in ((0, 0.05), (1, 0.5)):
        samples, _ = decoded(two_tracks(quiet, loud, default))
        assert np.abs(samples).max() == pytest.approx(peak, rel=0.05)


def test_sound_that_ends_before_the_picture_is_not_missing(
    clip_of: Callable[..., bytes], recording_of: Callable[..., bytes], two_tracks: Callable[..., bytes]
) -> None:
    data = two_tracks(recording_of(chirp(RATE), RATE, "matroska", "flac"), clip_of([20] * 250, "matroska", bf="0"), 0)
    samples, sound = decoded(data)
    assert (len(samples), sound.shortfall) == (SECONDS * RATE, "")
