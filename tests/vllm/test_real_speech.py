"""The executor ``vllm`` with a speech model: a tiny Whisper in vLLM's engine writes what it writes in transformers."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.engine.tiny_models import write_tiny_model
from tests.vllm.heard import ENGINE
from tests.vllm.test_real_executor import run_program, serving

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long


@pytest.fixture(scope="module")
def model(runtime_directory: Path) -> Path:
    return write_tiny_model(runtime_directory / "tiny-whisper", "whisper")


@pytest.fixture(scope="module")
def seen(model: Path) -> dict[str, Any]:
    """What the program has seen."""
    return run_program(str(model), program="tests.vllm.heard")


def test_it_writes_what_transformers_writes(seen: dict[str, Any]) -> None:
    """Whatever else is written beside it."""
    assert seen["tasks"] == ["transcribe", "translate"]
    expected = seen["by transformers"]
    for name, written in expected.items():
        for found in (seen["alone"][name], seen["together"][name]):
            assert found["no speech"] == pytest.approx(written["no speech"], rel=1e-2)
            assert found | {"no speech": None} == written | {"no speech": None}, name
    assert len({json.dumps(each["tokens"]) for each in expected.values()}) == len(expected)
    assert expected["long"]["times"][-1][1] > 60


def test_chance_is_repeatable(seen: dict[str, Any]) -> None:
    first, again, other = seen["by chance"]
    assert first == again
    assert first != other


def test_what_it_does_not_do_is_refused(seen: dict[str, Any]) -> None:
    language, chat, encoding, words = seen["refused"]
    assert words == "ValueError: vLLM does not say when words are said"
    assert language == "ValueError: the model 'tiny-whisper' does not know the language 'xx'"
    assert "ValueError: the model 'tiny-whisper' writes down what is said in a recording, and nothing else" == chat == encoding


def test_who_is_forgotten_takes_nothing(seen: dict[str, Any]) -> None:
    assert seen["forgotten"] == [[1, False], [0, False], [1, True], [0, False]]


def test_a_recording_goes_through_a_server(model: Path, runtime_directory: Path) -> None:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(bytes(2 * 16_000 * 3))
    with serving("vllm-speech", model, runtime_directory, ENGINE) as server:
        for task in ("transcriptions", "translations"):
            form = {"model": "tiny-whisper", "response_format": "verbose_json"}
            answer = httpx.post(
                f"{server.url}/v1/audio/{task}", data=form, files={"file": ("a.wav", file.getvalue())}, timeout=600.0
            )
            assert answer.status_code == 200, answer.text
            assert (answer.json()["duration"], answer.json()["language"] in ("english", "german")) == (3.0, True)
            assert "".join(segment["text"] for segment in answer.json()["segments"]).strip() == answer.json()["text"]
        assert server.stop() == 0
