"""``bench serve``: events are read wherever a stream is cut, what is counted is right, a failure ends it, both paths of a
real server are loaded and compared, and nothing of a server outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import select
import shutil
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

pytest.importorskip("aiohttp")

from aiohttp import web

from bench import repetitions
from bench.children import BenchError
from bench.command_line import terminated, until_terminated
from bench.plan import Runs
from bench.results import Findings
from bench.serving import run
from bench.serving.client import Client, Exchange
from bench.serving.command import PLAN, serve_command
from bench.serving.load import Latency, Measurement, Requests, measure
from bench.serving.media import media_parts, picture, video
from bench.serving.plan import NOTHING_KEPT, PRESETS, Endpoint, Load, Media
from bench.serving.run import cpu_s, serving
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.chat import CHAT_PARSER, engine_request
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, read_embedding
from tests.nursery import Nursery
from tests.tables import for_each

TEXT_ONLY = Load(requests=1, max_concurrency=4)


# -- what is sent --------------------------------------------------------------------------------------------------------


def test_media_have_the_sizes_asked_for() -> None:
    generator = np.random.default_rng(1)
    with Image.open(io.BytesIO(picture((96, 64), generator))) as opened:
        assert (opened.size, opened.format) == ((96, 64), "JPEG")
    with av.open(io.BytesIO(video((64, 48), 7, generator))) as clip:
        assert [(frame.width, frame.height) for frame in clip.decode(video=0)] == [(64, 48)] * 7


def test_media_follow_from_the_seed_and_differ() -> None:
    load = Load(requests=4, max_concurrency=1, media=Media((32, 32)))
    parts = media_parts(load)
    assert len({bytes(part) for part in parts}) == 4
    assert list(map(bytes, parts)) == list(map(bytes, media_parts(load)))


@for_each("media", [Media((32, 32)), Media((32, 32), frames=2), None])
def test_the_server_reads_what_is_sent(media: Media | None) -> None:
    chats = Load(requests=1, max_concurrency=1, output_tokens=9, media=media)
    generation, sources = engine_request(CHAT_PARSER.parse(Requests(chats, "a model", media_parts(chats)).body(3)))
    kinds = [] if media is None else ["video" if media.frames else "image"]
    assert [source.kind for source in sources] == kinds
    assert generation.sampling.max_tokens == 9
    embeddings = msgspec.structs.replace(chats, endpoint="embeddings")
    body = Requests(embeddings, "a model", media_parts(embeddings)).body(3)
    [one] = read_embedding(EMBEDDING_PARSER.parse(body), 1).inputs
    assert isinstance(one, MediaSource) == bool(kinds)


# -- what is counted -------------------------------------------------------------------------------------------------------


def exchange(began: float, tokens: list[float], ended: float) -> Exchange:
    made = Exchange(began, ended)
    made.token_times.extend(tokens)
    made.output_tokens = len(tokens)
    return made


def measured(*exchanges: Exchange) -> Measurement:
    found = measure(exchanges, 100.0, 0.5)
    return msgspec.structs.replace(found, cpu_s={"engine": 0.25, "frontends": 1.5})


def test_statistics_of_a_load() -> None:
    found = measured(
        exchange(100.0, [101.0, 101.5, 103.0], 103.0),
        exchange(101.0, [101.5], 102.0),
    )
    assert found.requests == 2
    assert found.duration_s == pytest.approx(3.0)
    assert found.requests_per_s == pytest.approx(2 / 3)
    assert found.ttft == Latency(750.0, 995.0)
    assert found.tpot == Latency(1000.0, 1000.0)
    assert found.e2e == Latency(2000.0, pytest.approx(2980.0))
    assert found.generator_cpu_s == 0.5


def test_a_load_of_one_token_each_has_no_time_between_tokens() -> None:
    found = measured(exchange(100.0, [100.5], 101.0))
    assert (found.ttft, found.tpot) == (Latency(500.0, 500.0), None)
    assert repetitions.values([found], "tpot.p99_ms") == [None]


def judged(preset: str, **servers: list[Measurement]) -> Findings:
    """What a run of servers has found, whose names are words."""
    return PLAN.findings({preset: {name.replace("_", " "): loads for name, loads in servers.items()}})


def loads(*ends: float) -> list[Measurement]:
    return [measured(exchange(100.0, [101.0], ended)) for ended in ends]


def test_a_comparison_is_made_within_each_repetition() -> None:
    found = judged("pr32104", slab=loads(102.0, 110.0, 104.0), copied=loads(104.0, 130.0, 104.0))
    (table,) = found.tables
    rows = {row[1]: dict(zip(table.columns[2:], row[2:], strict=True)) for row in table.rows}
    assert rows["slab"]["requests/s"] == "0.25"
    assert rows["slab"]["spread"] == "-60% +100%"
    assert (rows["slab"]["slab is"], rows["copied"]["slab is"]) == ("", "2.00 x")
    assert rows["slab"]["engine ms"] == "250.0"
    assert rows["slab"]["generator %"] == "12"
    assert [(verdict.asked, verdict.met) for verdict in found.targets if verdict.met is not None] == [(">= 1 x", True)]


@for_each(("ended", "met"), [(102.0, True), (102.2, False)])
def test_two_engines_are_held_against_the_target_of_their_load(ended: float, met: bool) -> None:
    for preset, asked in (("engines-wait", ">= 1.9 x"), ("engines-compute", ">= 1 x")):
        found = judged(preset, **{"2_engines": loads(ended) * 2, "1_engine": loads(104.0) * 2}).targets
        [verdict] = [each for each in found if each.met is not None]
        assert (verdict.asked, verdict.met) == (asked, met or preset == "engines-compute")


# -- a server that does what it is told to ---------------------------------------------------------------------------------


def chunk(text: str | None = None, **fields: Any) -> bytes:
    choices = [] if text is None else [{"delta": {"content": text}}]
    return b"data: " + msgspec.json.encode({"choices": choices, **fields}) + b"\n\n"


DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'
ERROR = b'data: {"error": {"message": "m", "type": "server_error", "code": "engine_dead"}}\n\n'


class Script:
    """What the stub answers to whom: a status and pieces; and what it has seen."""

    def __init__(self) -> None:
        self.status = 200
        self.pieces: list[bytes] = [ROLE, chunk("a"), chunk("b"), chunk(None, usage={"completion_tokens": 5}), DONE]
        self.hangs = False
        self.hangs_up = False
        self.bodies: list[Any] = []
        self.in_flight = self.peak = 0

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.in_flight += 1
        self.peak = max(self.peak, self.in_flight)
        try:
            self.bodies.append(await request.json())
            response = web.StreamResponse(status=self.status)
            await response.prepare(request)
            for piece in self.pieces:
                await response.write(piece)
                await asyncio.sleep(0)
            if self.hangs:
                await asyncio.sleep(60)
            if self.hangs_up and request.transport is not None:
                request.transport.abort()
            return response
        finally:
            self.in_flight -= 1


Stub = tuple[Script, str]


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    """What the stub does, and its URL."""
    script = Script()
    app = web.Application(client_max_size=64 << 20)
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        app.router.add_post(path, script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield script, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(url: str, endpoint: Endpoint = "chat", timeout_s: float = 10.0) -> Exchange:
    load = Load(requests=1, max_concurrency=1, endpoint=endpoint, output_tokens=5)
    async with Client(url, endpoint, timeout_s) as client:
        return await client.exchange(Requests(load, "stub", []).body(0), time.perf_counter())


async def test_tokens_are_events_with_text_unless_the_server_counts(stub: Stub) -> None:
    script, url = stub
    found = await ask(url)
    assert (len(found.token_times), found.output_tokens) == (2, 5)
    assert found.began < found.token_times[0] <= found.token_times[1] <= found.ended
    assert script.bodies[0]["max_tokens"] == 5
    assert script.bodies[0]["stream"] is True
    del script.pieces[3]
    script.pieces = [bytes([byte]) for byte in b": a comment\r\n" + b"".join(script.pieces)]  # wherever it is cut
    assert (await ask(url)).output_tokens == 2


@for_each(
    ("changes", "reason"),
    [
        (
            {"status": 503, "pieces": [b'{"error": {"message": "m", "code": "overloaded"}}']},
            'HTTP 503: {"error": {',
        ),
        ({"status": 400, "pieces": [b'{"error": {"message": "m", "type": "bad"}}']}, "HTTP 400: {"),
        ({"status": 502, "pieces": [b"<html>"]}, "HTTP 502: <html>"),
        ({"pieces": [chunk("a"), ERROR]}, "in the stream: {'message': 'm', 'type': 'server_error', 'code': 'engine_dead'}"),
        ({"pieces": [chunk("a")]}, "the stream ended before [DONE]"),
        ({"pieces": [ROLE, DONE]}, "the stream had no tokens"),
        ({"pieces": [b"data: <html>\n\n"]}, "no whole answer: DecodeError"),
        ({"pieces": [chunk("a")], "hangs_up": True}, "no whole answer: ClientPayloadError"),
        ({"pieces": [chunk("a")], "hangs": True}, "no whole answer within 0.3 s"),
    ],
)
async def test_every_failure_has_its_reason(
    stub: Stub, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, url = stub
    for name, value in changes.items():
        monkeypatch.setattr(script, name, value)
    with pytest.raises(BenchError, match=re.escape(reason)):
        await ask(url, timeout_s=0.3)


async def test_nobody_there_is_a_failure_too() -> None:
    with pytest.raises(BenchError, match="no whole answer: ClientConnectorError: Cannot connect"):
        await ask("http://127.0.0.1:1")
    with pytest.raises(BenchError, match="does the server run"):
        async with Client("http://127.0.0.1:1", "chat", 1.0) as client:
            await client.get("/metrics")


async def test_embeddings_are_counted_without_tokens(stub: Stub) -> None:
    script, url = stub
    script.pieces = [b'{"data": [{"embedding": "AAAA"}]}']
    found = await ask(url, "embeddings")
    assert found.output_tokens == 0
    script.pieces = [b'{"data": []}']
    with pytest.raises(BenchError, match="the answer had no embeddings"):
        await ask(url, "embeddings")


@pytest.mark.slow
async def test_no_more_are_in_flight_than_allowed_and_a_failure_ends_them(stub: Stub) -> None:
    script, url = stub
    load = msgspec.structs.replace(TEXT_ONLY, requests=30)
    async with Client(url, "chat", 10.0) as client:
        found = await Requests(load, "stub", []).play(client)
        assert (found.requests, script.peak) == (30, 4)
        assert len({body["messages"][0]["content"][0]["text"] for body in script.bodies}) == 30
        script.status = 503
        with pytest.raises(ExceptionGroup) as raised:
            await Requests(load, "stub", []).play(client)
    assert raised.group_contains(BenchError, match="HTTP 503")
    assert (len(script.bodies) < 40, script.peak) == (True, 4)


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_run_in_order(number: signal.Signals, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    async def end() -> None:
        with contextlib.suppress(BaseException):  # as the HTTP client has around what it reads
            os.kill(os.getpid(), number)

    async def asking() -> None:
        await end()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            stopped.append(True)

    monkeypatch.setattr(run, "run", lambda *_: until_terminated(asking()))
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    try:
        done = CliRunner().invoke(serve_command, ["--case", "repeated"])
        assert signal.getsignal(signal.SIGTERM) is terminated, "what is behind the loop is ended in order, too"
    finally:
        for its_number, handler in before.items():
            signal.signal(its_number, handler)
    assert (done.exit_code, stopped) == (exit_code, [True])


# -- real servers ----------------------------------------------------------------------------------------------------------


def private_directories() -> list[Path]:
    return list(Path("/tmp").glob(f"shmring-serve-{os.getpid()}-*"))


@pytest.mark.slow
def test_both_paths_of_a_real_server_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    kept: list[Runs] = []
    findings = Runs.findings

    def keep(runs: Runs) -> Findings:
        kept.append(runs)
        return findings(runs)

    monkeypatch.setattr(Runs, "findings", keep)
    load = Load(requests=12, max_concurrency=4, output_tokens=6, media=Media((64, 48), frames=3, distinct=2))
    server = ("--api-server-count=1", "--executor=synthetic", "--slab-nbytes=32MiB", NOTHING_KEPT)
    server += ('--mm-processor-kwargs={"num_frames": 3}',)
    monkeypatch.setitem(PRESETS, "pr32104", PRESETS["pr32104"]._replace(load=load, server=server))
    arguments = ["--case", "pr32104", "--repetitions=2", f"--json={path}"]
    done = CliRunner().invoke(serve_command, arguments, catch_exceptions=False)
    assert done.exit_code in (0, 1), done.output
    measured = kept[0].measured["pr32104"]
    assert {name: len(runs) for name, runs in measured.items()} == {"slab": 2, "copied": 2}
    for one in (one for runs in measured.values() for one in runs):
        # The executor fails what arrives with another checksum: these have crossed whole.
        assert one.requests == 12
        assert one.ttft is not None
        assert one.e2e is not None
        assert 0 < one.ttft.median_ms <= one.e2e.p99_ms
        assert one.cpu_s["frontends"] > 0
    stored = json.loads(path.read_bytes())
    assert [row[1] for row in stored["tables"][0]["rows"]] == ["slab", "copied"]
    assert {"cpu", "commit"} <= stored["machine"].keys()
    assert private_directories() == []


#: Stands in for ``shmring serve``: says what that says, about itself and a child, and stops as it is told to, or not.
STAND_IN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if {deaf} else lambda *_: (child.kill(), sys.exit({status})))
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", *sys.argv])
print("last words", file=sys.stderr, flush=True)
word = '{{"url": "http://127.0.0.1:9", "engines": [%d], "frontends": [%d]}}' % (child.pid, child.pid)
print(word, file=open(int(sys.argv[-1].removeprefix("--ready-fd=")), "w"), flush=True)
child.wait()
"""


@pytest.mark.parametrize("deaf", [False, True])
def test_a_server_is_stopped_however_its_block_is_left(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", STAND_IN.format(deaf=deaf, status=0)))
    monkeypatch.setattr(run, "_STOP_LIMIT_S", 0.5 if deaf else 15.0)
    with contextlib.suppress(KeyboardInterrupt), serving((), ()) as servers:
        assert [cpu_s(server).keys() for server in servers] == [{"engine", "frontends"}] * 2
        raise KeyboardInterrupt
    for server in servers:
        with pytest.raises(BenchError, match="ended during the run"):
            cpu_s(server)
    assert private_directories() == []


def test_a_server_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", STAND_IN.format(deaf=False, status=3)))
    with pytest.raises(BenchError, match="exit code 3"), serving(()):
        pass
    assert "last words" in caplog.text
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", "import sys; sys.exit('no such slab')"))
    with pytest.raises(BenchError, match=r"did not start:\nno such slab"), serving((), ()):
        pass
    assert private_directories() == []


#: Has a server, says which process it is, and waits. The server lives for as long as its standard input does.
HAS_A_SERVER = """
import signal
from bench.serving import run

STAND_IN = '''
import os, sys
word = '{"url": "http://127.0.0.1:9", "engines": [], "frontends": [%d]}' % os.getpid()
print(word, file=open(int(sys.argv[-1].removeprefix("--ready-fd=")), "w"), flush=True)
sys.stdin.read()
'''

run._PROGRAM = ("-S", "-c", STAND_IN)
with run.serving(()) as [server]:
    print(server.process.pid, flush=True)
    signal.pause()
"""


def test_a_server_ends_with_the_program_that_started_it(nursery: Nursery, tmp_path: Path) -> None:
    assert "--stop-with-stdin" in run._PROGRAM
    starter = nursery.start_text(tmp_path / "output", HAS_A_SERVER)
    try:
        server = os.pidfd_open(int(starter.says()[0]))
    finally:
        starter.process.kill()
    try:
        assert select.select([server], [], [], 20.0)[0], "it still runs"
    finally:
        os.close(server)
        for directory in Path("/tmp").glob(f"shmring-serve-{starter.pid}-*"):
            shutil.rmtree(directory)
