"""/v1/audio/transcriptions and translations over HTTP, with a small handler as engine: what it is sent, and what callers get.

Answers and events are checked by the types of OpenAI's own client, and the client itself runs against a real server. What
is refused: test_refused_bodies.py; here, what is no form.
"""

from __future__ import annotations

import asyncio
import io
import json
import wave
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from openai.types.audio import Transcription, TranscriptionStreamEvent, TranscriptionVerbose
from pydantic import TypeAdapter

import shmring
from shmring.engine.protocol import (
    GenerateReply,
    GenerateRequest,
    SamplingParams,
    SpeechParams,
    SpeechSegment,
    SpeechWord,
    Waveform,
)
from shmring.frontend.settings import CorsSettings
from tests.frontend.talking import MODEL, OpenTalk, Talk, alone

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
async def http(open_talk: OpenTalk) -> httpx.AsyncClient:
    return forms_of(await open_talk(say))


def forms_of(talk: Talk) -> httpx.AsyncClient:
    del talk.http.headers["content-type"]  # a form says its own
    return talk.http


async def post(http: httpx.AsyncClient, path: str = TRANSCRIPTIONS, **fields: Any) -> httpx.Response:
    response = await http.post(path, data={"model": "m", **fields}, files={"file": ("a.wav", FILE)})
    assert response.status_code in (200, 403), response.text
    return response


async def test_an_answer_is_a_text(http: httpx.AsyncClient) -> None:
    response = await post(http)
    Transcription.model_validate(response.json(), strict=True)
    text = "It rains. --> Nobody\n\n minds."
    assert response.json() == {"text": text, "usage": {"type": "duration", "seconds": 2}}
    assert response.headers["x-shmring-slab-bytes"] == str(SOUND.nbytes)
    plain = await post(http, response_format="text")
    assert (plain.text, plain.headers["content-type"]) == (f"{text}\n", "text/plain; charset=utf-8")


async def test_an_answer_with_segments_says_all_of_them(http: httpx.AsyncClient) -> None:
    for path, task, language in ((TRANSCRIPTIONS, "transcribe", "german"), (TRANSLATIONS, "translate", "english")):
        answer = (await post(http, path, response_format="verbose_json", temperature="0.5")).json()
        TranscriptionVerbose.model_validate(answer, strict=True)
        assert (answer["task"], answer["language"], answer["duration"]) == (task, language, 1.5)
        first, second = answer["segments"]
        said = {"tokens": [1, 2], "temperature": 0.5, "avg_logprob": -0.25, "no_speech_prob": 0.125}
        said |= {"id": 0, "seek": 0, "start": 0.02, "end": 0.7, "text": " It rains."}
        assert first == said | {"compression_ratio": first["compression_ratio"]}
        assert (second["id"], second["start"]) == (1, 0.7)
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


async def test_the_engine_gets_the_recording_and_what_is_wanted(open_talk: OpenTalk) -> None:
    async def hear(claim: shmring.Claim) -> None:
        [medium] = claim.payload.media
        assert isinstance(medium, Waveform)
        heard.append((medium.sample_rate, medium.samples.numpy().copy()))
        claim.payload.media = []
        await claim.reply(GenerateReply("", [], 0, 0, "stop"))

    heard: list[tuple[int, Any]] = []
    talk = await open_talk(hear)
    http = forms_of(talk)
    fields = {"language": "de", "prompt": "Häuser", "temperature": "0.25", "seed": "7", "priority": "2"}
    response = await post(http, **fields, **{"un known": "x", "x" * 200: "y"})
    assert response.json()["text"] == ""
    assert response.headers["x-shmring-ignored-fields"] == f"un%20known, {'x' * 64}"
    await post(http, TRANSLATIONS)
    sampling = SamplingParams(temperature=0.25, seed=7)
    assert [alone(request) for request in talk.requests] == [
        GenerateRequest(prompt="Häuser", sampling=sampling, priority=2, speech=SpeechParams("transcribe", "de"), stream=False),
        GenerateRequest(sampling=SamplingParams(temperature=0.0), speech=SpeechParams("translate"), stream=False),
    ]
    for rate, samples in heard:
        assert rate == 16_000
        assert np.abs(samples - SOUND).max() < 1e-4


async def test_words_have_times_where_the_model_says_them(open_talk: OpenTalk) -> None:
    wanted = []

    async def say_words(claim: shmring.Claim) -> None:
        wanted.append(claim.payload.speech.words)
        said = segment(0.02, 0.7, " It rains.")
        said.words = [SpeechWord("It", 0.02, 0.3), SpeechWord("rains.", 0.3333333, 0.7)] if wanted[-1] else []
        await claim.reply(GenerateReply(" It rains.", [1, 2], 0, 3, "stop", segments=[said], language="english"))

    http = forms_of(await open_talk(say_words))
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
    open_talk: OpenTalk, caplog: pytest.LogCaptureFixture, body: bytes, status: int, code: str
) -> None:
    talk = await open_talk(say, max_body_nbytes=30_000)
    response = await talk.send(TRANSCRIPTIONS, body, headers={"content-type": "multipart/form-data; boundary=b"})
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


@pytest.mark.parametrize(
    ("settings", "statuses"),
    [
        ({}, {"http://test": 200, "http://evil.example": 403, "null": 403, "http://test:81": 403}),
        (
            {"cors": CorsSettings(allowed_origins=("http://friend.example",))},
            {"http://friend.example": 200, "http://evil.example": 403},
        ),
    ],
    ids=["nobody is allowed to", "one is allowed to"],
)
async def test_pages_of_other_sites_post_no_forms(open_talk: OpenTalk, settings: Any, statuses: dict[str, int]) -> None:
    """A browser asks before it posts JSON, and not before it posts a form."""
    http = forms_of(await open_talk(say, **settings))
    for origin, status in statuses.items():
        http.headers["origin"] = origin
        response = await post(http)
        assert response.status_code == status, origin
        assert status == 200 or response.json()["error"]["code"] == "origin_not_allowed"


# -- the client ---------------------------------------------------------------------------------------------------------------


async def test_the_client_hears(open_engine: Any, open_server: Any) -> None:
    """Also a file of some megabytes, which comes in many pieces."""
    noise = np.random.default_rng(4).uniform(-0.5, 0.5, 60 * 16_000).astype(np.float32)
    url = await open_server(await open_engine(say, MODEL, slab_nbytes="32MiB"), api_keys=("a-key",))
    text = "It rains. --> Nobody\n\n minds."

    def hear() -> None:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as client:
            hearing = client.audio.transcriptions
            asked: Any = {"model": "m", "file": ("a.wav", FILE)}
            answer = hearing.create(model="m", file=("a.wav", wav(noise)))
            assert (answer.text, answer.usage.seconds) == (text, 60)
            verbose = hearing.create(**asked, response_format="verbose_json", timestamp_granularities=["segment"])
            assert [item.text for item in verbose.segments] == [piece.text for piece in PIECES]
            assert client.audio.translations.create(**asked).text == text
            assert hearing.create(**asked, response_format="vtt").startswith("WEBVTT")
            with pytest.raises(openai.BadRequestError, match="recording"):
                hearing.create(model="m", file=("a.wav", b"x"))

    await asyncio.to_thread(hear)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="a-key", max_retries=0) as client:
        stream = await client.audio.transcriptions.create(model="m", file=("a.wav", FILE), stream=True)
        events = [event async for event in stream]
        assert events[-1].type == "transcript.text.done"
        assert events[-1].text == text
