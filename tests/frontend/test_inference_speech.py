"""/v1/audio/transcriptions and translations over HTTP, with a small handler as engine: what the engine is sent and what callers
get. Answers and events are checked by the types of OpenAI's own client, and the client itself runs against a real server.
"""

from __future__ import annotations

import asyncio
import io
import json
import wave
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
from openai.types.audio import Transcription, TranscriptionStreamEvent, TranscriptionVerbose
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import (
    GenerateReply,
    GenerateRequest,
    InputSpec,
    ModelDescription,
    SoundSpec,
    SpeechParams,
    SpeechSegment,
    SpeechWord,
    Waveform,
)
from tests.tables import for_each

OpenApp = Callable[..., Awaitable[httpx.AsyncClient]]

HEARING = ModelDescription("test", "m", ["transcribe", "translate"], InputSpec(sound=SoundSpec("waveform", 16_000)), 8)
TRANSCRIPTIONS, TRANSLATIONS = "/v1/audio/transcriptions", "/v1/audio/translations"


def wav(samples: Any) -> bytes:
    """The file of a recording at 16 kHz."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16_000)
        writer.writeframes((samples * 32_767).astype("<i2").tobytes())
    return file.getvalue()


SOUND = np.random.default_rng(3).uniform(-0.5, 0.5, 24_000).astype(np.float32)  # 1.5 s
FILE = wav(SOUND)

_EVENT = TypeAdapter[Any](TranscriptionStreamEvent)


def segment(start_s: float, end_s: float, text: str) -> SpeechSegment:
    return SpeechSegment(start_s, end_s, text, [1, 2], 0.0, -0.25, 0.125)


PIECES = [
    GenerateReply(" It rains.", [1, 2], 0, 3, segments=[segment(0.02, 0.7, " It rains.")], language="german"),
    GenerateReply(" --> Nobody\n\n minds.", [3], 0, 6, "stop", segments=[segment(0.7, 3661.5, " --> Nobody\n\n minds.")]),
]


async def say(claim: shmring.Claim) -> None:
    for piece in PIECES:
        await claim.reply(piece)


@pytest.fixture
async def http(open_engine: Any, open_app: OpenApp) -> httpx.AsyncClient:
    http = await open_app(await open_engine(say, HEARING))
    del http.headers["content-type"]  # the form says its own
    return http


async def post(http: httpx.AsyncClient, path: str = TRANSCRIPTIONS, file: bytes | None = FILE, **fields: Any) -> httpx.Response:
    files = {} if file is None else {"file": ("a.wav", file)}
    return await http.post(path, data={"model": "m", **fields}, files=files or {"x": (None, "y")})


async def test_an_answer_is_a_text(http: httpx.AsyncClient) -> None:
    response = await post(http)
    assert response.status_code == 200, response.text
    Transcription.model_validate(response.json(), strict=True)
    text = "It rains. --> Nobody\n\n minds."
    assert response.json() == {"text": text, "usage": {"type": "duration", "seconds": 2}}
    assert response.headers["x-shmring-slab-bytes"] == str(SOUND.nbytes)
    plain = await post(http, response_format="text")
    assert (plain.text, plain.headers["content-type"]) == (f"{text}\n", "text/plain; charset=utf-8")


async def test_an_answer_with_segments_says_all_of_them(http: httpx.AsyncClient) -> None:
    for path, task in ((TRANSCRIPTIONS, "transcribe"), (TRANSLATIONS, "translate")):
        answer = (await post(http, path, response_format="verbose_json", temperature="0.5")).json()
        language = "english" if task == "translate" else "german"
        assert (answer["task"], answer["language"], answer["duration"]) == (task, language, 1.5)
        first, second = answer["segments"]
        assert first == {
            "id": 0,
            "seek": 0,
            "start": 0.02,
            "end": 0.7,
            "text": " It rains.",
            "tokens": [1, 2],
            "temperature": 0.5,
            "avg_logprob": -0.25,
            "compression_ratio": first["compression_ratio"],
            "no_speech_prob": 0.125,
        }
        assert (second["id"], second["start"]) == (1, 0.7)
        TranscriptionVerbose.model_validate(answer, strict=True)
    granular = await post(http, response_format="verbose_json", **{"timestamp_granularities[]": "segment"})
    assert len(granular.json()["segments"]) == 2


async def test_subtitles_have_one_line_for_each_segment(http: httpx.AsyncClient) -> None:
    srt = await post(http, response_format="srt")
    assert srt.text == ("1\n00:00:00,020 --> 00:00:00,700\nIt rains.\n\n2\n00:00:00,700 --> 01:01:01,500\n-> Nobody minds.\n\n")
    vtt = await post(http, response_format="vtt")
    assert vtt.text == (
        "WEBVTT\n\n00:00:00.020 --> 00:00:00.700\nIt rains.\n\n00:00:00.700 --> 01:01:01.500\n-> Nobody minds.\n\n"
    )
    assert vtt.headers["content-type"] == "text/plain; charset=utf-8"


async def test_a_stream_has_the_events_of_the_api(http: httpx.AsyncClient) -> None:
    response = await post(http, stream="true")
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    *parts, rest = response.text.split("\n\n")
    assert rest == ""
    events = [json.loads(part.removeprefix("data: ")) for part in parts]
    for event in events:
        _EVENT.validate_python(event)
    *deltas, done = events
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event["delta"] for event in deltas) == done["text"] == (await post(http)).json()["text"]


async def test_the_engine_gets_the_recording_and_what_is_wanted(open_engine: Any, open_app: OpenApp) -> None:
    requests: list[tuple[GenerateRequest, Any]] = []

    async def note(claim: shmring.Claim) -> None:
        [medium] = claim.payload.media
        assert isinstance(medium, Waveform)
        requests.append((msgspec.structs.replace(claim.payload, media=[]), (medium.sample_rate, medium.samples.numpy().copy())))
        await claim.reply(GenerateReply("", [], 0, 0, "stop"))

    http = await open_app(await open_engine(note, HEARING))
    del http.headers["content-type"]
    fields = {
        "language": "de",
        "prompt": "Häuser",
        "temperature": "0.25",
        "seed": "7",
        "priority": "2",
        "un known": "x",
        "x" * 200: "y",
    }
    response = await post(http, **fields)
    assert (response.status_code, response.json()["text"]) == (200, "")
    assert response.headers["x-shmring-ignored-fields"] == f"un%20known, {'x' * 64}"
    assert (await post(http, TRANSLATIONS)).status_code == 200
    (heard, (rate, samples)), (translated, _) = requests
    assert heard.speech == SpeechParams("transcribe", "de")
    assert translated.speech == SpeechParams("translate")
    assert (heard.prompt, heard.sampling.temperature, heard.sampling.seed, heard.priority) == ("Häuser", 0.25, 7, 2)
    assert (translated.prompt, translated.sampling.temperature) == (None, 0.0)
    assert rate == 16_000
    assert np.abs(samples - SOUND).max() < 1e-4


async def test_words_have_times_where_the_model_says_them(open_engine: Any, open_app: OpenApp) -> None:
    wanted = []

    async def say_words(claim: shmring.Claim) -> None:
        wanted.append(claim.payload.speech.words)
        said = segment(0.02, 0.7, " It rains.")
        said.words = [SpeechWord("It", 0.02, 0.3), SpeechWord("rains.", 0.3333333, 0.7)] if wanted[-1] else []
        await claim.reply(GenerateReply(" It rains.", [1, 2], 0, 3, "stop", segments=[said], language="english"))

    http = await open_app(await open_engine(say_words, msgspec.structs.replace(HEARING, word_times=True)))
    del http.headers["content-type"]
    words = [{"word": "It", "start": 0.02, "end": 0.3}, {"word": "rains.", "start": 0.333, "end": 0.7}]
    for granularities, has_words, has_segments in (
        (["word"], True, False),
        (["segment", "word"], True, True),
        ([], False, True),
    ):
        answer = (await post(http, response_format="verbose_json", **{"timestamp_granularities[]": granularities})).json()
        TranscriptionVerbose.model_validate(answer)
        assert answer.get("words") == (words if has_words else None)
        assert ("segments" in answer) == has_segments
    assert wanted == [True, True, False]


@for_each(
    ("path", "fields", "param", "code"),
    [
        (TRANSCRIPTIONS, {"model": ""}, "model", "invalid_value"),
        (TRANSCRIPTIONS, {"file": None}, "file", "invalid_value"),
        (TRANSCRIPTIONS, {"file": b"no recording"}, "file", "invalid_audio"),
        (TRANSCRIPTIONS, {"file": b""}, "file", "invalid_audio"),
        (TRANSCRIPTIONS, {"response_format": "xml"}, "response_format", "invalid_value"),
        (TRANSCRIPTIONS, {"response_format": "diarized_json"}, "response_format", "invalid_value"),
        (TRANSCRIPTIONS, {"temperature": "hot"}, "temperature", "invalid_value"),
        (TRANSCRIPTIONS, {"temperature": "2"}, "temperature", "invalid_value"),
        (TRANSCRIPTIONS, {"temperature": ["0", "1"]}, "temperature", "invalid_value"),
        (TRANSCRIPTIONS, {"stream": "maybe"}, "stream", "invalid_value"),
        (TRANSCRIPTIONS, {"stream": "true", "response_format": "srt"}, "response_format", "unsupported_value"),
        (
            TRANSCRIPTIONS,
            {"timestamp_granularities[]": "word", "response_format": "verbose_json"},
            "timestamp_granularities",
            "unsupported_value",
        ),
        (TRANSCRIPTIONS, {"timestamp_granularities[]": "word"}, "timestamp_granularities", "invalid_value"),
        (TRANSCRIPTIONS, {"timestamp_granularities[]": "segment"}, "timestamp_granularities", "invalid_value"),
        (TRANSCRIPTIONS, {"include[]": "logprobs"}, "include", "unsupported_value"),
        (TRANSCRIPTIONS, {"top_p": "0.5"}, "top_p", "unsupported_value"),
        (TRANSCRIPTIONS, {"prompt": "x" * 70_000}, "prompt", "text_too_long"),
        (TRANSCRIPTIONS, {"priority": "-1"}, "priority", "unsupported_value"),
        (TRANSLATIONS, {"to_language": "fr"}, "to_language", "unsupported_value"),
    ],
)
async def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, path: str, fields: dict[str, Any], param: str, code: str
) -> None:
    response = await post(http, path, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code), error


async def test_a_model_that_hears_nothing_says_what_it_does(open_core: Any, open_app: OpenApp) -> None:
    http = await open_app(await open_core())
    del http.headers["content-type"]
    for path, name in ((TRANSCRIPTIONS, "transcriptions"), (TRANSLATIONS, "translations")):
        error = (await post(http, path, model="shmring-synthetic")).json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_task", "model")
        assert f"does not do {name}" in error["message"]


# -- forms --------------------------------------------------------------------------------------------------------------------

HEAD = b'content-disposition: form-data; name="%s"\r\n\r\n'


def form(*parts: bytes, end: bytes = b"--b--\r\n") -> bytes:
    return b"".join(b"--b\r\n" + part + b"\r\n" for part in parts) + end


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_form"),
        (b"nonsense", 400, "invalid_form"),
        (form(HEAD % b"model" + b"m").replace(b"--b", b"--c"), 400, "invalid_form"),
        (form(HEAD % b"model" + b"m", end=b""), 400, "invalid_form"),
        (form(HEAD % b"file" + b"x", end=b"--b"), 400, "invalid_form"),
        (form(b"\r\nx"), 400, "invalid_form"),
        (form(b"content-disposition: attachment; name=x\r\n\r\nx"), 400, "invalid_form"),
        (form(b"content-disposition: " + b"x" * 10_000 + b"\r\n\r\nx"), 400, "invalid_form"),
        (form(*[HEAD % b"x" + b"y"] * 65), 400, "invalid_form"),
        (form(HEAD % b"file" + b"x", HEAD % b"file" + b"y"), 400, "invalid_value"),
        (form(HEAD % b"prompt" + b"\xff"), 400, "invalid_value"),
        (form(b'content-disposition: form-data; name="audio"; filename="a.wav"\r\n\r\nx'), 400, "invalid_value"),
        (form(HEAD % b"file" + b"x" * 40_000), 413, "body_too_large"),
    ],
)
async def test_forms_that_are_none_are_refused(
    open_engine: Any, open_app: OpenApp, caplog: pytest.LogCaptureFixture, body: bytes, status: int, code: str
) -> None:
    http = await open_app(await open_engine(say, HEARING), max_body_nbytes=30_000)
    response = await http.post(TRANSCRIPTIONS, content=body, headers={"content-type": "multipart/form-data; boundary=b"})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert "character 9" not in response.text
    assert not caplog.records  # what is wrong with a caller's form is for that caller to know


async def test_a_body_that_is_no_form_is_refused(http: httpx.AsyncClient) -> None:
    for headers in ({"content-type": "application/json"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        response = await http.post(TRANSCRIPTIONS, content=b"{}", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")
    response = await http.post(TRANSCRIPTIONS, content=b"{}", headers={"content-type": "multipart/form-data"})
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_form")
    response = await http.post("/v1/chat/completions", data={"model": "m"}, files={"file": b"x"})
    assert response.status_code == 415


async def test_pages_of_other_sites_post_no_forms(open_engine: Any, open_app: OpenApp) -> None:
    """A browser asks before it posts JSON, and not before it posts a form."""
    engine = await open_engine(say, HEARING)
    http = await open_app(engine)
    del http.headers["content-type"]
    for origin, status in (("http://test", 200), ("http://evil.example", 403), ("null", 403), ("http://test:81", 403)):
        http.headers["origin"] = origin
        response = await post(http)
        assert response.status_code == status, origin
        assert status == 200 or response.json()["error"]["code"] == "origin_not_allowed"


async def test_pages_of_allowed_sites_post_forms(open_engine: Any, open_app: OpenApp) -> None:
    from shmring.frontend.settings import CorsSettings

    cors = CorsSettings(allowed_origins=("http://friend.example",))
    http = await open_app(await open_engine(say, HEARING), cors=cors)
    del http.headers["content-type"]
    for origin, status in (("http://friend.example", 200), ("http://evil.example", 403)):
        http.headers["origin"] = origin
        assert (await post(http)).status_code == status


# -- the client ---------------------------------------------------------------------------------------------------------------


async def test_the_client_hears(open_engine: Any, open_server: Any) -> None:
    """Also a file of some megabytes, which comes in many pieces."""
    noise = np.random.default_rng(4).uniform(-0.5, 0.5, 60 * 16_000).astype(np.float32)
    url = await open_server(await open_engine(say, HEARING, slab_nbytes="32MiB"), api_keys=("a-key",))
    text = "It rains. --> Nobody\n\n minds."

    def hear() -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as client:
            answer = client.audio.transcriptions.create(model="m", file=("a.wav", wav(noise)))
            assert (answer.text, answer.usage.seconds) == (text, 60)
            verbose = client.audio.transcriptions.create(
                model="m", file=("a.wav", FILE), response_format="verbose_json", timestamp_granularities=["segment"]
            )
            assert [item.text for item in verbose.segments] == [piece.text for piece in PIECES]
            assert client.audio.translations.create(model="m", file=("a.wav", FILE)).text == text
            assert client.audio.transcriptions.create(model="m", file=("a.wav", FILE), response_format="vtt").startswith(
                "WEBVTT"
            )
            with pytest.raises(openai.BadRequestError, match="recording"):
                client.audio.transcriptions.create(model="m", file=("a.wav", b"x"))

    await asyncio.to_thread(hear)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as client:
        stream = await client.audio.transcriptions.create(model="m", file=("a.wav", FILE), stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == text
