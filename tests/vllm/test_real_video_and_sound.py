"""A clip and a recording in one request: the tensors of both go through the slab, and stay in it to be sent again."""

from __future__ import annotations

import base64
import io
import wave
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from bench.vllm.server import Server, serve
from tests.vllm import tiny_omni

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

OPTIONS = (
    *("--limit-mm-per-prompt", '{"image": 0, "video": 1, "audio": 1}', "--max-model-len", "2048", "--skip-mm-profiling"),
    *("--max-num-batched-tokens", "2048"),
)


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    model = runtime_directory / "tiny-omni"
    tiny_omni.main(model)
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "256MiB", "SHMRING_VLLM_CHECK": "1", "SHMRING_VLLM_WAIT_S": "10"}
    environment["SHMRING_VLLM_MIN_NBYTES"] = "256KiB"
    with serve(runtime_directory, model_path=model, api_servers=2, environment=environment, options=OPTIONS) as server:
        yield server


def clip(seed: int) -> str:
    """Two seconds, as the data URL of an MP4."""
    file, numbers = io.BytesIO(), np.random.default_rng(seed)
    with av.open(file, "w", format="mp4") as container:
        stream: Any = container.add_stream("mpeg4", rate=8)
        stream.width = stream.height = 224
        for _ in range(16):
            frame = av.VideoFrame.from_ndarray(numbers.integers(0, 256, (224, 224, 3), dtype=np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return "data:video/mp4;base64," + base64.b64encode(file.getvalue()).decode()


def recording(seed: int) -> str:
    """Twenty seconds, as a WAV file."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, 16_000, 0, "NONE", ""))
        writer.writeframes(np.random.default_rng(seed).integers(-9000, 9000, 320_000, dtype=np.int16).tobytes())
    return base64.b64encode(file.getvalue()).decode()


def ask(server: Server, seed: int) -> str:
    content = [
        {"type": "video_url", "video_url": {"url": clip(seed)}},
        {"type": "input_audio", "input_audio": {"data": recording(seed), "format": "wav"}},
        {"type": "text", "text": "What is in it?"},
    ]
    body = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": content}]}, 300)
    assert answer["usage"]["prompt_tokens"] > 500, "it has seen and heard it"
    return str(answer["choices"][0]["message"]["content"])


def test_both_go_through_the_slab_and_stay_there(server: Server) -> None:
    first = ask(server, 1)
    assert server.tensors() == {"copied": 2}
    assert [ask(server, 1) for _ in range(7)] == [first] * 7
    counts = server.tensors()
    assert counts.keys() == {"copied", "kept"}
    assert counts["copied"] <= 4  # of two API servers
    assert sum(counts.values()) == 16
    assert server.engine()["lost"] == 0  # each checksum was compared
    assert "Traceback" not in server.log
