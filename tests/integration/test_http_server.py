"""``shmring serve`` with real processes: the official client, callers that hang up, and SIGKILL of each process in turn."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import psutil
import pytest
from PIL import Image
from prometheus_client.parser import text_string_to_metric_families

from shmring.frontend.app import _METRICS_AGE_S
from shmring.frontend.commands.serve_process import ServerProcess
from tests.segments import own_name, segments_of
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = ROOT / "frontend" / "samples"
NAME = own_name("http-server")
JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
MODEL = "shmring-fingerprints"

# Processes that import torch, again and again.
pytestmark = pytest.mark.slow


class Server(ServerProcess):
    """A running ``shmring serve``."""

    metrics_dir: Path

    @property
    def engine(self) -> int:
        [engine] = self.engines
        return engine

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


def children_of(pid: int) -> dict[int, str]:
    """The children of a process, with their command lines."""
    children = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        with contextlib.suppress(FileNotFoundError):
            children[int(child)] = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return children


def lives(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def serving(socket_dir: Path, *options: str) -> Iterator[Server]:
    """Runs a server on a free port; kills what is left of it in the end."""
    with Server.start(
        ["--port=0", f"--name={NAME}", f"--socket-dir={socket_dir}", *options],
        environment={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(socket_dir)},
        errors=socket_dir / "errors",
    ) as server:
        server.wait_until_ready(90)
        [server.metrics_dir] = socket_dir.glob("shmring-metrics-*")
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server that tests share, and which they leave whole."""
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        serving(Path(place), "--slab-nbytes=64MiB") as running,
    ):
        yield running
        assert running.stop() == 0  # within ten seconds: five, and unloading torch on a busy machine
        assert not [pid for pid in (running.engine, *running.frontends) if lives(pid)]
        assert not running.metrics_dir.exists()


@pytest.fixture
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of it, with a connection for each request, so that both frontends get some."""
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=JSON, limits=limits) as client:
        yield client


# -- pictures -----------------------------------------------------------------------------------------------------------


def encoded(picture: Image.Image, quality: int = 90) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=quality)
    return file.getvalue()


def messages_of(*files: bytes) -> list[dict[str, Any]]:
    urls = [f"data:image/jpeg;base64,{base64.b64encode(file).decode('ascii')}" for file in files]
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]


def body_of(*files: bytes) -> bytes:
    return json.dumps({"model": MODEL, "encoding_format": "base64", "messages": messages_of(*files)}).encode()


@pytest.fixture(scope="module")
def body() -> bytes:
    """A request that takes a moment: a picture of two megapixels."""
    return body_of(encoded(Image.open(SAMPLES / "hubble.jpg").resize((1600, 1250))))


async def numbers(http: httpx.AsyncClient) -> dict[str, float]:
    """What /metrics says now."""
    await asyncio.sleep(_METRICS_AGE_S)  # so old may an answer be
    families = text_string_to_metric_families((await http.get("/metrics")).text)
    return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}


async def settled(http: httpx.AsyncClient, timeout: float = 15.0) -> dict[str, float]:
    """Waits until no request is in flight but the question itself, and no slot is in use; returns all numbers."""
    deadline = time.monotonic() + timeout
    names = ("shmring_frontend_slots_in_use", "shmring_engine_ring_slots_in_use", "shmring_frontend_slot_waiters")
    while True:
        metrics = await numbers(http)
        if metrics["shmring_http_in_flight"] == 1 and not any(metrics[name] for name in names):
            return metrics
        assert time.monotonic() < deadline, metrics
        await asyncio.sleep(0.05)


# -- the official client ------------------------------------------------------------------------------------------------


def test_the_official_client_finds_originals_by_altered_copies(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

        def embed(*files: bytes) -> np.ndarray[Any, Any]:
            response = client.embeddings.create(model=MODEL, input=[], extra_body={"messages": messages_of(*files)})
            assert [item.index for item in response.data] == list(range(len(files)))
            return np.array([item.embedding for item in response.data])

        assert [model.id for model in client.models.list()] == [MODEL]
        paths = sorted(SAMPLES.glob("*.jpg"))
        originals = embed(*(path.read_bytes() for path in paths))
        assert originals.shape == (8, 512)
        np.testing.assert_allclose(np.linalg.norm(originals, axis=1), 1, atol=1e-5)
        for index, path in enumerate(paths):
            picture = Image.open(path).convert("RGB")
            width, height = picture.size
            copies = embed(
                encoded(picture, quality=50),
                encoded(picture.resize((width // 2, height // 2))),
                encoded(picture.point(lambda value: min(255, round(value * 1.1)))),
                encoded(picture.crop((width // 40, height // 40, width - width // 40, height - height // 40))),
            )
            assert (copies @ originals.T).argmax(axis=1).tolist() == [index] * 4, path.name


def test_the_official_client_understands_errors(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError) as unknown:
            client.embeddings.create(model="another", input=[], extra_body={"messages": messages_of(b"x")})
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as tokens:
            client.embeddings.create(model=MODEL, input=[1, 2, 3])
        assert (tokens.value.code, tokens.value.param) == ("unsupported_input", "input"), "fingerprints have no tokens"
        with pytest.raises(openai.BadRequestError, check=lambda error: error.code == "unsupported_task"):
            client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}])
        good = (SAMPLES / "coffee.jpg").read_bytes()
        with pytest.raises(openai.BadRequestError, check=lambda error: error.param == "messages[0].content[1].image_url"):
            client.embeddings.create(model=MODEL, input=[], extra_body={"messages": messages_of(good, good[:5000])})
        short = client.embeddings.create(
            model=MODEL, input=[], dimensions=7, encoding_format="float", extra_body={"messages": messages_of(good)}
        )
        assert len(short.data[0].embedding) == 7


def clip(size: tuple[int, int], rate: int, codec: str, seed: int) -> bytes:
    """Two seconds of pictures that move over a larger one."""
    picture = Image.open(sorted(SAMPLES.glob("*.jpg"))[seed]).convert("RGB").resize((480, 360))
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        for index in range(2 * rate):
            left = 160 * index // (2 * rate)
            frame = av.VideoFrame.from_image(picture.crop((left, 60, left + 320, 300)).resize(size))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_sounds_clips_and_texts_find_their_like(server: Server) -> None:
    """Each is asked for in one request with all the others, in each of the ways in which it can be sent."""

    def data_url(mime: str, file: bytes) -> str:
        return f"data:{mime};base64,{base64.b64encode(file).decode('ascii')}"

    def part(kind: str, url: str) -> dict[str, Any]:
        return {"type": kind, kind: {"url": url}}

    recordings = [path.read_bytes() for path in sorted(SAMPLES.glob("speech-*.wav"))]
    clips = [clip((320, 240), 12, "mpeg4", seed) for seed in range(3)]
    again = [clip((240, 180), 8, "mpeg4", seed) for seed in range(3)]
    texts = ["A dog runs over the grass.", "Stars and galaxies far away.", "A cup of coffee, please."]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        parts = [
            *(part("audio_url", data_url("audio/wav", file)) for file in recordings),
            *(part("video_url", data_url("video/mp4", file)) for file in clips),
            *({"type": "text", "text": text} for text in texts),
        ]
        messages = {"messages": [{"role": "user", "content": parts}]}
        embeddings = client.embeddings.create(model=MODEL, input=[], extra_body=messages).data
        originals = np.array([item.embedding for item in embeddings])
        recording = base64.b64encode(recordings[0]).decode("ascii")
        audio = {"type": "input_audio", "input_audio": {"data": recording, "format": "wav"}}
        messages = {"messages": [{"role": "user", "content": [audio]}]}
        [same] = client.embeddings.create(model=MODEL, input=[], extra_body=messages).data
        inputs = [*(data_url("video/mp4", file) for file in again), *(text.upper().rstrip(".") for text in texts)]
        copies = client.embeddings.create(model=MODEL, input=inputs)
    np.testing.assert_allclose(same.embedding, originals[0], atol=1e-6)
    nearest = (np.array([item.embedding for item in copies.data]) @ originals.T).argmax(axis=1)
    count = len(recordings)
    assert nearest.tolist() == list(range(count, count + 6))


def parts_of_a_recording(seconds: tuple[float, ...], container: str) -> list[bytes]:
    """Consecutive parts of a sound that goes up, each of them a file."""
    rate, files, start = 16_000, [], 0.0
    for length in seconds:
        times = start + np.arange(round(rate * length)) / rate
        samples = (16_000 * np.sin(2 * np.pi * (200 * times + 300 * times**2))).astype(np.int16)
        start += length
        file = io.BytesIO()
        with av.open(file, "w", format=container) as output:
            stream = output.add_stream("pcm_s16le" if container == "wav" else "flac", rate=rate, layout="mono")
            frame = av.AudioFrame.from_ndarray(samples[None], format="s16", layout="mono")
            frame.rate = rate
            output.mux([*stream.encode(frame), *stream.encode()])
        files.append(file.getvalue())
    return files


def parts_of_a_clip(container: str) -> list[bytes]:
    """Two seconds of pictures that move, in two files whose times begin at the same, and in one."""
    picture = Image.open(SAMPLES / "astronaut.jpg").convert("RGB").resize((480, 360))
    files = []
    for indexes in (range(24), range(24, 48), range(48)):
        file = io.BytesIO()
        with av.open(file, "w", format=container) as output:
            stream = output.add_stream("libx264", rate=24)
            stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
            for index in indexes:
                frame = av.VideoFrame.from_image(picture.crop((160 * index // 48, 0, 160 * index // 48 + 320, 240)))
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        files.append(file.getvalue())
    return files


async def test_files_that_were_joined_are_used_whole_and_told(server: Server, http: httpx.AsyncClient) -> None:
    async def embed(kind: str, file: bytes) -> tuple[np.ndarray[Any, Any], str]:
        url = f"data:{kind}/x;base64,{base64.b64encode(file).decode('ascii')}"
        content = {"messages": [{"role": "user", "content": [{"type": f"{kind}_url", f"{kind}_url": {"url": url}}]}]}
        response = await http.post("/v1/embeddings", json={"model": MODEL} | content)
        assert response.status_code == 200, response.text
        return np.array(response.json()["data"][0]["embedding"]), response.headers.get("x-shmring-media-shortfall", "")

    [whole] = parts_of_a_recording((3.0,), "wav")
    wavs, flacs = (parts_of_a_recording((1.0, 1.5, 0.5), container) for container in ("wav", "flac"))
    clips = [parts_of_a_clip(container) for container in ("mpegts", "matroska", "mp4")]
    for kind, parts, in_one, seams in (
        ("audio", wavs, whole, ""),  # which have no times
        ("audio", flacs, whole, "1.00 s, 2.50 s; its 3 parts"),
        *(("video", parts, in_one, "1.00 s; its 2 parts") for *parts, in_one in clips),
    ):
        joined, told = await embed(kind, b"".join(parts))
        expected, nothing = await embed(kind, in_one)
        first, _ = await embed(kind, parts[0])
        assert joined @ expected > 0.999
        assert first @ expected < 0.99
        assert nothing == ""
        _, _, of_times = told.partition(" is not as its file says: its times begin anew at ")
        assert of_times == (f"{seams} follow each other as they are stored" if seams else "")


async def test_both_frontends_answer_for_all(server: Server, http: httpx.AsyncClient, body: bytes) -> None:
    async def slab_bytes() -> float:
        return (await settled(http))["shmring_frontend_slab_bytes_total"]

    earlier = await slab_bytes()
    await asyncio.sleep(0.5)
    while (now := await slab_bytes()) != earlier:  # the other frontend says now and then what it has counted
        earlier = now
        await asyncio.sleep(0.5)
    before = await numbers(http)
    responses = await asyncio.gather(*(http.post("/v1/embeddings", content=body) for _ in range(20)))
    assert {response.status_code for response in responses} == {200}
    assert {response.headers["x-shmring-copies"] for response in responses} == {"0"}
    async with asyncio.timeout(30):
        while await slab_bytes() < before["shmring_frontend_slab_bytes_total"] + 20 * 1600 * 1250 * 3:
            await asyncio.sleep(0.05)
    after = await settled(http)
    nbytes = 20 * 1600 * 1250 * 3
    assert after["shmring_frontend_slab_bytes_total"] - before["shmring_frontend_slab_bytes_total"] == nbytes
    assert after["shmring_frontend_copies_total"] == before["shmring_frontend_copies_total"]
    assert len(list(server.metrics_dir.glob("counter_*.db"))) == 2


# -- callers that hang up -------------------------------------------------------------------------------------------------


async def hang_up(server: Server, body: bytes, sent_nbytes: int, pause_s: float, reset: bool) -> None:
    """Sends some of a request, waits a moment, and goes; with a reset or without."""
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(HEAD % len(body) + body[:sent_nbytes])
    with contextlib.suppress(ConnectionError):
        await writer.drain()
    await asyncio.sleep(pause_s)
    if reset:
        writer.transport.abort()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_hanging_up_at_any_moment_leaves_the_slab_empty(server: Server, http: httpx.AsyncClient, body: bytes) -> None:
    randomness = random.Random(5)
    expected = (await http.post("/v1/embeddings", content=body)).json()["data"][0]["embedding"]
    before = await settled(http)

    async def stay() -> str:
        embedding: str = (await http.post("/v1/embeddings", content=body)).json()["data"][0]["embedding"]
        return embedding

    leaving = [
        hang_up(
            server,
            body,
            randomness.choice([len(body), len(body), len(body), randomness.randrange(len(body))]),
            randomness.random() * randomness.choice([0.01, 0.1, 1]),
            randomness.random() < 0.5,
        )
        for _ in range(40)
    ]
    answers = await asyncio.gather(*leaving, *(stay() for _ in range(40)))
    assert answers == [None] * 40 + [expected] * 40
    after = await settled(http)
    assert after["shmring_http_aborted_total"] > before["shmring_http_aborted_total"]
    assert after["shmring_engine_ring_protocol_errors_total"] == 0


@pytest.mark.parametrize("beginning", [b"", HEAD % 1000 + b"{"])
async def test_a_thousand_connections_that_say_nothing_keep_nobody_waiting(
    server: Server, http: httpx.AsyncClient, body: bytes, beginning: bytes
) -> None:
    before = await settled(http)
    connections = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(1000)]
    try:
        for _, writer in connections:
            writer.write(beginning)
        for path in ("/health", "/ready"):
            assert (await http.get(path)).status_code == 200
        responses = [await http.post("/v1/embeddings", content=body) for _ in range(4)]
        assert {response.status_code for response in responses} == {200}
    finally:
        for _, writer in connections:
            writer.transport.abort()
    after = await settled(http)
    assert after["shmring_engine_ring_protocol_errors_total"] == before["shmring_engine_ring_protocol_errors_total"]


async def test_bodies_that_come_slowly_keep_no_picture_waiting(server: Server, http: httpx.AsyncClient, body: bytes) -> None:
    """Forty callers, twice as many as may decode at a time, announce a megabyte and send a byte now and then."""
    await settled(http)

    async def drip() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            writer.write(HEAD % 1_000_000 + b"{")
            while True:
                await asyncio.sleep(0.2)
                writer.write(b" ")
        finally:
            writer.transport.abort()

    callers = [asyncio.create_task(drip()) for _ in range(40)]
    try:
        while (await numbers(http))["shmring_http_in_flight"] < 41:  # they and the question
            await asyncio.sleep(0.01)
        for _ in range(4):  # both frontends
            async with asyncio.timeout(5):  # half a second each, on two busy cores
                assert (await http.post("/v1/embeddings", content=body)).status_code == 200
    finally:
        for caller in callers:
            caller.cancel()
        await asyncio.wait(callers)
    await settled(http)


async def test_hanging_up_while_the_engine_works_aborts_there_too(socket_dir: Path, body: bytes) -> None:
    # Without kept media, about which a frontend asks the engine before it sends anything.
    with serving(socket_dir, "--slab-nbytes=64MiB", "--api-server-count=1", "--mm-processor-cache-gb=0") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            await http.get("/v1/models")  # or the request would wait for the engine to say what it does
            await hang_up_while_the_engine_works(server, http, body)


async def test_a_frontend_copies_large_answers_without_threads_of_torch(
    socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its loop waited for them, 0.1 s on busy cores. Where torch has one thread it would have none in any case.
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    with serving(socket_dir, "--slab-nbytes=64MiB", "--api-server-count=1") as server:
        [frontend] = server.frontends
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            threads = []
            for count in (1, 2000):
                answer = await http.post("/v1/embeddings", json={"model": MODEL, "input": ["hello"] * count})
                assert len(answer.json()["data"]) == count
                threads.append(psutil.Process(frontend).num_threads())
    assert threads[0] == threads[1]


async def hang_up_while_the_engine_works(server: Server, http: httpx.AsyncClient, body: bytes) -> None:
    before = await settled(http)
    os.kill(server.engine, signal.SIGSTOP)  # it takes as long as we want it to
    try:
        submitted = before["shmring_frontend_in_place_total"] + 1
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(HEAD % len(body) + body)
        await writer.drain()
        deadline = time.monotonic() + 20
        while (await numbers(http))["shmring_frontend_in_place_total"] < submitted:  # asks the stopped engine for 2 s
            assert time.monotonic() < deadline
        writer.close()
        await writer.wait_closed()
    finally:
        os.kill(server.engine, signal.SIGCONT)
    after = await settled(http)
    assert after["shmring_http_aborted_total"] == before["shmring_http_aborted_total"] + 1
    assert after["shmring_engine_ring_aborted_total"] == before["shmring_engine_ring_aborted_total"] + 1


# -- chats -----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_server() -> Iterator[Server]:
    """A server that answers conversations, without a model, and for those only who have a key."""
    with (
        tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as place,
        serving(
            Path(place),
            "--slab-nbytes=64MiB",
            "--api-server-count=1",
            "--executor=synthetic",
            '--executor-options={"step_s": 0.005}',
            "--served-model-name=made-up",
            "--api-key=sesame",
        ) as running,
    ):
        yield running


@pytest.fixture
async def chat_http(chat_server: Server) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of it, with its key."""
    headers = {"authorization": "Bearer sesame"}
    async with httpx.AsyncClient(base_url=chat_server.url, timeout=60, headers=headers) as client:
        yield client


def chat_body(**fields: Any) -> dict[str, Any]:
    content = [{"type": "text", "text": "What is this?"}, *messages_of((SAMPLES / "coffee.jpg").read_bytes())[0]["content"]]
    return {"model": "made-up", "messages": [{"role": "user", "content": content}], **fields}


def test_the_official_client_chats(chat_server: Server) -> None:
    with openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="sesame", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["made-up"]
        whole = client.chat.completions.create(**chat_body(max_tokens=4, seed=1, stop=["never"]))
        assert whole.choices[0].message.content == "[synthetic] token2 token3 token4"
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.usage.prompt_tokens) == (4, 3 + 64)
        stream = client.chat.completions.create(**chat_body(max_tokens=4, stream=True, stream_options={"include_usage": True}))
        chunks = list(stream)
        assert chunks[-1].usage == whole.usage
        pieces = [chunk.choices[0] for chunk in chunks[:-1]]
        assert pieces[0].delta.role == "assistant"
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["length"]
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(**chat_body(n=2))
        assert (refused.value.param, refused.value.code) == ("n", "unsupported_value")
        raw = client.chat.completions.with_raw_response.create(**chat_body(max_tokens=1))
        assert (raw.headers["x-shmring-synthetic"], raw.headers["x-shmring-copies"]) == ("true", "0")


def test_the_official_client_needs_the_key_and_the_key_is_on_no_frontend_s_command_line(chat_server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{chat_server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, check=lambda error: error.code == "invalid_api_key"),
    ):
        client.chat.completions.create(**chat_body())
    commands = children_of(chat_server.process.pid)
    assert len(commands) == 2
    assert not any("sesame" in command for command in commands.values())


async def test_hanging_up_on_a_stream_ends_it_in_the_engine(chat_http: httpx.AsyncClient) -> None:
    before = await settled(chat_http)
    for _ in range(5):
        body = chat_body(stream=True, max_tokens=100_000)
        async with chat_http.stream("POST", "/v1/chat/completions", json=body) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if "token3" in line:
                    break
    after = await settled(chat_http)
    assert after["shmring_http_aborted_total"] == before["shmring_http_aborted_total"] + 5
    deadline = time.monotonic() + 10
    while (metrics := await numbers(chat_http))["shmring_num_requests_running"]:  # texts have no slots that `settled` sees
        assert time.monotonic() < deadline
    assert metrics["shmring_engine_ring_aborted_total"] == before["shmring_engine_ring_aborted_total"] + 5


def test_an_engine_that_is_killed_ends_streams_with_an_error(socket_dir: Path) -> None:
    options = ("--slab-nbytes=64MiB", "--api-server-count=1", "--executor=synthetic", '--executor-options={"step_s": 0.005}')
    with (
        serving(socket_dir, *options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        body = chat_body(stream=True, max_tokens=100_000) | {"model": "shmring-synthetic"}
        stream = client.chat.completions.create(**body)
        received = 0

        def read() -> None:
            nonlocal received
            for _ in stream:
                received += 1
                if received == 5:
                    os.kill(server.engine, signal.SIGKILL)

        with pytest.raises(openai.APIError, check=lambda error: error.code == "engine_unavailable"):
            read()
        assert received >= 5
        assert server.process.wait(20) == 1


# -- processes that die ---------------------------------------------------------------------------------------------------


async def test_a_frontend_that_is_killed_is_replaced_and_the_other_loses_nothing(
    server: Server, http: httpx.AsyncClient, body: bytes
) -> None:
    await settled(http)
    victim = next(pid for pid, command in children_of(server.process.pid).items() if "-m shmring.frontend" in command)
    loading = [asyncio.create_task(http.post("/v1/embeddings", content=body)) for _ in range(30)]
    await asyncio.wait(loading, return_when=asyncio.FIRST_COMPLETED)
    os.kill(victim, signal.SIGKILL)
    results = await asyncio.gather(*loading, return_exceptions=True)
    answers = [result for result in results if isinstance(result, httpx.Response)]
    losses = [result for result in results if not isinstance(result, httpx.Response)]
    assert {answer.status_code for answer in answers} == {200}
    assert all(isinstance(loss, httpx.TransportError) for loss in losses)  # the victim's own connections

    def replaced() -> bool:
        commands = children_of(server.process.pid)
        return victim not in commands and sum("-m shmring.frontend" in command for command in commands.values()) == 2

    await asyncio.to_thread(until, replaced)
    deadline = time.monotonic() + 30
    while (metrics := await numbers(http))["shmring_engine_ring_clients"] < 2:
        assert time.monotonic() < deadline, metrics
        await asyncio.sleep(0.05)
    metrics = await settled(http)
    assert metrics["shmring_engine_ring_departed_clients"] == 0
    assert metrics["shmring_engine_ring_quarantined_nbytes"] == 0
    assert (await http.post("/v1/embeddings", content=body)).status_code == 200


@pytest.mark.slow  # it starts a server, and a frontend of it once more
async def test_a_stopped_frontend_is_replaced_and_its_callers_learn_of_it(socket_dir: Path) -> None:
    with serving(socket_dir, "--slab-nbytes=16MiB", "--heartbeat-timeout=2") as server:
        async with contextlib.AsyncExitStack() as stack:
            callers = [await stack.enter_async_context(httpx.AsyncClient(base_url=server.url, timeout=60)) for _ in range(8)]
            await asyncio.gather(*(caller.get("/health") for caller in callers))  # their connections stay
            victim = max(server.frontends, key=lambda pid: len(psutil.Process(pid).net_connections("tcp")))
            os.kill(victim, signal.SIGSTOP)
            results = await asyncio.gather(*(caller.get("/health") for caller in callers), return_exceptions=True)
        losses = [result for result in results if isinstance(result, BaseException)]
        assert losses
        assert all(isinstance(loss, httpx.ReadError | httpx.RemoteProtocolError) for loss in losses)  # and no timeout
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            while True:
                health = await http.get("/health")
                assert health.status_code == 200
                frontends = {frontend["index"]: frontend for frontend in health.json()["frontends"]}
                index = server.frontends.index(victim)
                if frontends[index]["restarts"] and frontends[index]["state"] == "serving":
                    break
                assert frontends[index]["state"] in ("unresponsive", "restarting")
                await asyncio.sleep(0.05)
        assert frontends[index]["pid"] != victim
        assert (frontends[1 - index]["pid"], frontends[1 - index]["restarts"]) == (server.frontends[1 - index], 0)


def test_a_killed_engine_is_503_and_ends_the_server_with_an_error(socket_dir: Path, body: bytes) -> None:
    with serving(socket_dir, "--slab-nbytes=64MiB", "--api-server-count=1", "--mm-processor-cache-gb=0") as server:

        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(base_url=server.url, timeout=60, headers=JSON) as http:
                await http.get("/v1/models")  # or it would wait for the engine to say what it does
                os.kill(server.engine, signal.SIGSTOP)
                asking = asyncio.create_task(http.post("/v1/embeddings", content=body))
                deadline = time.monotonic() + 20
                while (await numbers(http))["shmring_frontend_in_place_total"] < 1:
                    assert time.monotonic() < deadline
                os.kill(server.engine, signal.SIGKILL)
                return await asking

        response = asyncio.run(ask())
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert int(response.headers["retry-after"]) >= 1
        assert server.process.wait(20) == 1
        errors = (socket_dir / "errors").read_text()
        assert f"shmring: the engine (pid {server.engine}) was killed by signal 9 (Killed)" in errors
        assert "Traceback" not in errors
        assert not lives(server.frontends[0])
        assert not server.metrics_dir.exists()


def test_a_killed_supervisor_takes_everything_with_it(socket_dir: Path) -> None:
    with serving(socket_dir, "--slab-nbytes=16MiB") as server:
        server.process.kill()
        until(lambda: not any(lives(pid) for pid in (server.engine, *server.frontends)))
        until(lambda: not server.metrics_dir.exists())
        assert segments_of(NAME) == []


def test_a_server_that_can_not_start_says_why_and_leaves_nothing(socket_dir: Path) -> None:
    (socket_dir / "failing.py").write_text("def load(options):\n    raise ValueError('there is no such model')\n")
    command = [
        sys.executable,
        "-m",
        "shmring.frontend.cli",
        "serve",
        "--port=0",
        "--slab-nbytes=64MiB",
        "--executor=failing:load",
        f"--executor-path={socket_dir}",
        f"--socket-dir={socket_dir}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(socket_dir)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert result.returncode == 1
    assert "shmring engine: there is no such model\n" in result.stderr
    assert "before the server was ready; its own message is above" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert list(socket_dir.glob("shmring-metrics-*")) == []
