"""``bench serve``: events are read wherever a stream is cut, what is counted is right, failures are told apart, both paths of a
real server are loaded and compared, and nothing of a server outlives the run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import io
import json
import os
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

from bench.children import BenchError
from bench.machine import Machine
from bench.meter import Lag
from bench.results import Findings, Spread, write_json
from bench.serving import command, report, run
from bench.serving.client import Client, Exchange
from bench.serving.command import serve_command
from bench.serving.load import Generator, Latency, Measurement, measure, play, request_body
from bench.serving.media import media_parts, picture, recording, video
from bench.serving.plan import PRESETS, Load, Media, MediaKind, Plan, ServerOptions, arrival_times
from bench.serving.run import ServerError, cpu_s, serving
from shmring.frontend.media.sources import MediaSource
from shmring.frontend.openai.chat import CHAT_PARSER, engine_request
from shmring.frontend.openai.embeddings import EMBEDDING_PARSER, take_inputs
from shmring.frontend.serve_process import ServerProcess
from tests.nursery import Nursery
from tests.tables import for_each

TEXT_ONLY = Media(kinds=())


# -- what is sent, and when ----------------------------------------------------------------------------------------------


def test_requests_come_at_the_rate_asked_for_and_as_bursty() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        load = Load(requests=20_000, request_rate=50, burstiness=burstiness, seed=3)
        gaps = np.diff(arrival_times(load))
        assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrival_times(load) == arrival_times(load)
    assert arrival_times(load) != arrival_times(msgspec.structs.replace(load, seed=4))
    assert arrival_times(Load(requests=3)) == [0.0] * 3


def test_media_have_the_sizes_asked_for() -> None:
    generator = np.random.default_rng(1)
    with Image.open(io.BytesIO(picture((96, 64), generator))) as opened:
        assert (opened.size, opened.format) == ((96, 64), "JPEG")
    with av.open(io.BytesIO(video((64, 48), 7, generator))) as clip:
        assert [(frame.width, frame.height) for frame in clip.decode(video=0)] == [(64, 48)] * 7
    with av.open(io.BytesIO(recording(0.5, generator))) as sound:
        assert sum(frame.samples for frame in sound.decode(audio=0)) == 8000


def test_media_follow_from_the_seed_and_differ() -> None:
    load = Load(requests=4, media=Media(picture_size=(32, 32)))
    parts = media_parts(load)
    assert len({bytes(part) for part in parts}) == 4
    assert list(map(bytes, parts)) == list(map(bytes, media_parts(load)))
    assert bytes(parts[0]) != bytes(media_parts(msgspec.structs.replace(load, seed=2))[0])


@for_each("kinds", [("picture",), ("audio",), ("video",), ()])
def test_the_server_reads_what_is_sent(kinds: tuple[MediaKind, ...]) -> None:
    media = Media(kinds=kinds, picture_size=(32, 32), audio_seconds=0.1, video_size=(32, 32), video_frames=2)
    chats = Load(requests=1, output_tokens=9, media=media)
    generation, sources = engine_request(CHAT_PARSER.parse(request_body(chats, "a model", media_parts(chats), 3)))
    names = {"picture": "image", "audio": "audio", "video": "video"}
    assert [source.kind for source in sources] == [names[kind] for kind in kinds]
    assert generation.sampling.max_tokens == 9
    embeddings = Load(requests=1, endpoint="embeddings", media=media)
    body = request_body(embeddings, "a model", media_parts(embeddings), 3)
    [one] = take_inputs(EMBEDDING_PARSER.parse(body), 1)
    assert isinstance(one, MediaSource) == bool(kinds)


# -- what is counted -------------------------------------------------------------------------------------------------------


def exchange(began: float, sent: float, tokens: list[float], ended: float, failure: str | None = None) -> Exchange:
    made = Exchange(began)
    made.sent, made.ended, made.failure = sent, ended, failure
    made.token_times.extend(tokens)
    made.output_tokens = len(tokens)
    return made


def measured(*exchanges: Exchange, variant: str = "slab") -> Measurement:
    found = measure(variant, exchanges, 100.0, 0.5, Lag(2.98, 0.0))
    return msgspec.structs.replace(found, cpu_s={"engine": 0.25, "frontends": 1.5})


def test_statistics_of_a_load() -> None:
    found = measured(
        exchange(100.0, 100.1, [101.0, 101.5, 103.0], 103.0),
        exchange(101.0, 101.0, [101.5], 102.0),
        exchange(102.0, 102.0, [], 102.5, "HTTP 503 overloaded"),
        exchange(103.5, 103.5, [104.0], 104.5, "the stream ended before [DONE]"),
        exchange(104.0, 104.0, [], 105.0, "HTTP 503 overloaded"),
    )
    assert (found.requests, found.completed) == (5, 2)
    assert found.failures == {"HTTP 503 overloaded": 2, "the stream ended before [DONE]": 1}
    assert found.duration_s == pytest.approx(5.0)
    assert found.requests_per_s == pytest.approx(2 / 5)
    assert found.output_tokens_per_s == pytest.approx(4 / 5)
    assert found.ttft == Latency(2, 750.0, 750.0, 995.0)
    assert found.tpot == Latency(1, 1000.0, 1000.0, 1000.0)
    assert found.itl == Latency(2, 1000.0, 1000.0, pytest.approx(1490.0))
    assert found.e2e == Latency(2, 2000.0, 2000.0, pytest.approx(2980.0))
    assert found.peak_concurrency == 2
    assert found.generator == Generator(0.5, 2.98)
    assert [one.failure is None for one in found.exchanges] == [True, True, False, False, False]


def test_a_load_of_which_nothing_came_back_has_no_latencies() -> None:
    found = measured(exchange(100.0, 100.0, [], 101.0, "connection: ClientConnectorError"))
    assert (found.ttft, found.tpot, found.itl, found.e2e) == (None, None, None, None)
    assert found.requests_per_s == 0


def results(plan: Plan, *measurements: Measurement) -> run.Results:
    slab_nbytes = {measurement.variant: 10 for measurement in measurements}
    return run.Results(Machine.here(), "a client", plan, 1000, slab_nbytes, list(measurements))


def test_a_comparison_is_made_within_each_repetition(tmp_path: Path) -> None:
    slab = [measured(exchange(100.0, 100.0, [101.0], ended)) for ended in (102.0, 110.0, 104.0)]
    copied = [measured(exchange(100.0, 100.0, [101.0], ended), variant="copied") for ended in (104.0, 130.0, 104.0)]
    found = results(
        Plan(load=Load(requests=1), compare=True, repetitions=3),
        *(one for both in zip(slab, copied, strict=True) for one in both),
    )
    (table,) = report.report(found).tables
    rows = {row[0]: row[1:] for row in table.rows}
    assert table.columns == ["", "slab", "copied", "slab / copied"]
    assert rows["requests/s"] == ["0.25 (0.10 .. 0.50)", "0.25 (0.03 .. 0.25)", "2.00 (1.00 .. 3.00)"]
    assert rows["answered"] == ["3 of 3", "3 of 3", ""]
    assert rows["engine's CPU, ms/request"][0] == "250.0 (250.0 .. 250.0)"
    write_json(report.report(found), tmp_path / "results.json")
    stored = json.loads((tmp_path / "results.json").read_bytes())
    assert stored["mode"] == "serve"
    assert stored["targets"] == [], "this is not the load of the target"
    assert stored["results"] is None, "single requests are read by nobody"
    assert stored["coverage"] == {
        "planned": [{"case": "the load", "subjects": ["slab", "copied"], "repetitions": 3}], "gaps": [],
    }  # fmt: skip
    assert stored["tables"][0]["rows"][0] == ["answered", "3 of 3", "3 of 3", ""]


@pytest.mark.parametrize(("ended", "met"), [(102.0, True), (102.2, False)])
def test_two_engines_are_held_against_the_target_of_their_load(
    monkeypatch: pytest.MonkeyPatch, ended: float, met: bool
) -> None:
    for preset, limit in (("engines-wait", ">= 1.9 x"), ("engines-compute", ">= 1 x")):
        plan = plan_of("--preset", preset, monkeypatch=monkeypatch)
        assert (plan.compare_engines, plan.repetitions, plan.server.api_servers) == (2, 3, 2)
        two = measured(exchange(100.0, 100.0, [101.0], ended), variant="2 engines")
        one = measured(exchange(100.0, 100.0, [101.0], 104.0), variant="1 engine")
        found = report.report(results(plan, two, one, two, one))
        assert found.tables[0].columns == ["", "2 engines", "1 engine", "2 engines / 1 engine"]
        [verdict] = found.targets
        assert (verdict.asked, verdict.met) == (limit, met or preset == "engines-compute")
    other = plan_of("--preset", "engines-wait", "--executor-options={}", monkeypatch=monkeypatch)
    assert report.report(results(other, two, one)).targets == [], "this is not the load of a target"


def test_servers_of_one_and_of_several_engines_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of("--compare-engines=3", "--media=none", monkeypatch=monkeypatch)
    assert {name: server.engines for name, server in run._wanted(plan).items() if server is not None} == {
        "3 engines": 3,
        "1 engine": 1,
    }


def test_failures_and_a_busy_generator_are_told() -> None:
    failed = measured(exchange(100.0, 100.0, [100.2], 100.6), exchange(100.0, 100.0, [], 100.5, "HTTP 503 overloaded"))
    found = results(Plan(load=Load(requests=2)), failed)
    assert ["failed: HTTP 503 overloaded", "1"] in report.report(found).tables[0].rows
    assert any("1 requests failed" in note for note in report.report(found).notes)
    assert any("it may be what was measured" in note for note in report.report(found).notes)


def test_a_spread_has_the_median_between_its_ends() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(2.0, 1.0, 3.0)


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


async def models(_: web.Request) -> web.Response:
    return web.json_response({"data": [{"id": "stub"}]})


Stub = tuple[Script, str]


@pytest.fixture
async def stub() -> AsyncIterator[Stub]:
    """What the stub does, and its URL."""
    script = Script()
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/v1/models", models)
    for path in ("/v1/chat/completions", "/v1/embeddings"):
        app.router.add_post(path, script.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield script, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


async def ask(url: str, load: Load) -> Exchange:
    async with Client(url, load.endpoint, load.request_timeout_s, "a key") as client:
        return await client.exchange(request_body(load, "stub", [], 0), time.perf_counter())


async def test_tokens_are_events_with_text_unless_the_server_counts(stub: Stub) -> None:
    script, url = stub
    found = await ask(url, Load(requests=1, output_tokens=5, media=TEXT_ONLY))
    assert found.failure is None
    assert (len(found.token_times), found.output_tokens) == (2, 5)
    assert found.began <= found.sent < found.token_times[0] <= found.token_times[1] <= found.ended
    assert script.bodies[0]["max_tokens"] == 5
    assert script.bodies[0]["stream"] is True
    del script.pieces[3]
    script.pieces = [bytes([byte]) for byte in b": a comment\r\n" + b"".join(script.pieces)]  # wherever it is cut
    assert (await ask(url, Load(requests=1, media=TEXT_ONLY))).output_tokens == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": 503, "pieces": [b'{"error": {"message": "m", "code": "overloaded"}}']}, "HTTP 503 overloaded"),
        ({"status": 400, "pieces": [b'{"error": {"message": "m", "type": "bad"}}']}, "HTTP 400 bad"),
        ({"status": 502, "pieces": [b"<html>"]}, "HTTP 502"),
        ({"pieces": [chunk("a"), ERROR]}, "in the stream engine_dead"),
        ({"pieces": [chunk("a")]}, "the stream ended before [DONE]"),
        ({"pieces": [ROLE, DONE]}, "the stream had no tokens"),
        ({"pieces": [b"data: " + b"x" * (600 << 10)] * 2}, "a line of the stream is longer than 1,048,576 bytes"),
        ({"pieces": [b"data: <html>\n\n"]}, "not an answer of OpenAI's API: DecodeError"),
        ({"pieces": [chunk("a")], "hangs_up": True}, "connection: ClientPayloadError"),
        ({"pieces": [chunk("a")], "hangs": True}, "no whole answer within 0.3 s"),
    ],
)
async def test_every_failure_has_its_reason(stub: Stub, changes: dict[str, Any], reason: str) -> None:
    script, url = stub
    vars(script).update(changes)
    assert (await ask(url, Load(requests=1, media=TEXT_ONLY, request_timeout_s=0.3))).failure == reason


async def test_nobody_there_is_a_failure_too() -> None:
    assert (await ask("http://127.0.0.1:1", Load(requests=1))).failure == "connection: ClientConnectorError"
    with pytest.raises(BenchError, match="does the server run"):
        async with Client("http://127.0.0.1:1", "chat", 1.0) as client:
            await client.model()


async def test_embeddings_are_counted_without_tokens(stub: Stub) -> None:
    script, url = stub
    load = Load(requests=1, endpoint="embeddings", media=TEXT_ONLY)
    script.pieces = [b'{"data": [{"embedding": "AAAA"}]}']
    found = await ask(url, load)
    assert (found.failure, found.output_tokens) == (None, 0)
    script.pieces = [b'{"data": []}']
    assert (await ask(url, load)).failure == "the answer had no embeddings"


async def test_no_more_are_in_flight_than_allowed(stub: Stub) -> None:
    script, url = stub
    load = Load(requests=30, max_concurrency=4, media=TEXT_ONLY)
    async with Client(url, "chat", 10.0) as client:
        found = await play("url", load, client, functools.partial(request_body, load, "stub", []))
    assert (found.completed, script.peak) == (30, 4)
    assert found.peak_concurrency <= 4
    assert len({body["messages"][0]["content"][0]["text"] for body in script.bodies}) == 30
    # A request's clock starts when a turn comes free, not when all were due.
    assert found.exchanges[-1].began > found.exchanges[0].began


async def test_a_slow_server_gets_the_same_load(stub: Stub) -> None:
    script, url = stub
    script.hangs = True
    load = Load(requests=6, request_rate=100, request_timeout_s=0.4, media=TEXT_ONLY)
    async with Client(url, "chat", load.request_timeout_s) as client:
        found = await play("url", load, client, functools.partial(request_body, load, "stub", []))
    assert [one.began - found.exchanges[0].began for one in found.exchanges] == pytest.approx(arrival_times(load))
    assert script.peak == 6
    assert {one.failure for one in found.exchanges} == {"no whole answer within 0.4 s"}


async def test_a_server_that_runs_already_is_measured_by_its_url(stub: Stub) -> None:
    _, url = stub
    plan = Plan(load=Load(requests=5, media=TEXT_ONLY, warm_up_requests=1), url=f"{url}/v1/", api_key="secret")
    lines: list[str] = []
    found = await run.run(plan, lines.append)
    assert len(lines) == run.steps(plan)
    assert found.measurements[0].completed == 5
    assert "secret" not in msgspec.json.encode(report.report(found)).decode()
    assert report.report(found).notes


# -- the command -----------------------------------------------------------------------------------------------------------


def plan_of(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> Plan:
    plans: list[Plan] = []

    def keep(plan: Plan) -> Any:
        plans.append(plan)
        raise SystemExit(0)

    monkeypatch.setattr(command, "_run", keep)
    done = CliRunner().invoke(serve_command, arguments)
    assert done.exit_code == 0, done.output
    return plans[0]


def test_a_preset_sets_what_no_option_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["pr32104"]
    plan = plan_of("--preset", "pr32104", "--compare", monkeypatch=monkeypatch)
    assert (plan.load.requests, plan.load.max_concurrency, plan.load.output_tokens) == (1000, 400, 128)
    assert plan.load.media.kinds == ("video",)
    assert (plan.load.media.video_frames, plan.server.api_servers, plan.repetitions) == (10, 3, 3)
    plan = plan_of(
        "--preset", "pr32104", "--scale", "0.1", "--video-frames", "4", "--num-prompts", "7", monkeypatch=monkeypatch
    )
    assert (plan.load.requests, plan.load.max_concurrency, plan.load.media.video_frames) == (7, 40, 4)
    assert plan.load.media.video_size == preset["video_size"]


@for_each(
    "arguments",
    [
        ["--compare", "--url", "http://127.0.0.1:1"],
        ["--compare", "--disable-mm-shm"],
        ["--compare-engines=2", "--url", "http://127.0.0.1:1"],
        ["--compare-engines=2", "--compare"],
        ["--compare-engines=1"],
        ["--scale", "0.1"],
        ["--media", "none", "--media", "audio"],
        ["--video-size", "641x360"],
        ["--picture-size", "large"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str]) -> None:
    done = CliRunner().invoke(serve_command, arguments)
    assert done.exit_code == 2, done.output
    assert "Error" in done.output


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_signal_ends_the_run_in_order(number: signal.Signals, exit_code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[bool] = []

    async def end() -> None:
        with contextlib.suppress(BaseException):  # as the HTTP client has around what it reads
            os.kill(os.getpid(), number)

    async def running(*_: object) -> Any:
        await end()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            stopped.append(True)

    monkeypatch.setattr(run, "run", running)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's & has it ignored
    try:
        done = CliRunner().invoke(serve_command, ["--url", "http://127.0.0.1:1"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (done.exit_code, stopped) == (exit_code, [True])


# -- real servers ----------------------------------------------------------------------------------------------------------


def private_directories() -> list[Path]:
    return list(Path("/tmp").glob(f"shmring-serve-{os.getpid()}-*"))


@pytest.mark.slow
def test_both_paths_of_a_real_server_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    measured: list[Measurement] = []
    made = report.report

    def keep(results: run.Results) -> Findings:
        measured.extend(results.measurements)
        return made(results)

    monkeypatch.setattr(report, "report", keep)
    load = ["--num-prompts=12", "--max-concurrency=4", "--output-tokens=6", "--warm-up=3"]
    media = ["--media=picture", "--media=audio", "--media=video", "--picture-size=64x48", "--audio-seconds=0.5"]
    clips = ["--video-size=64x48", "--video-frames=3"]
    servers = ["--compare", "--repetitions=2", "--api-servers=1", "--slab-nbytes=32MiB"]
    done = CliRunner().invoke(serve_command, [*load, *media, *clips, *servers, f"--json={path}"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "slab / copied" in done.output
    assert [one.variant for one in measured] == ["slab", "copied"] * 2
    for one in measured:
        # The executor fails what arrives with another checksum: these have crossed whole.
        assert (one.completed, one.failures) == (12, {})
        assert {request.output_tokens for request in one.exchanges} == {6}
        assert one.ttft is not None
        assert one.e2e is not None
        assert one.itl is not None
        assert 0 < one.ttft.median_ms <= one.e2e.p99_ms
        assert one.itl.count == 12 * 5
        assert 1 < one.peak_concurrency <= 4
        assert one.cpu_s["frontends"] > 0
    stored = json.loads(path.read_bytes())
    (carried,) = [row for row in stored["tables"][0]["rows"] if row[0] == "through the slab, bytes/request"]
    assert int(carried[1].replace(",", "")) > 64 * 48 * 3
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
async def test_a_server_is_stopped_however_its_block_is_left(deaf: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", STAND_IN.format(deaf=deaf, status=0)))
    monkeypatch.setattr(run, "_STOP_LIMIT_S", 0.5 if deaf else 15.0)
    servers: list[ServerProcess] = []
    began = asyncio.Event()

    async def use() -> None:
        async with serving(ServerOptions(), Load(requests=1)) as server:
            servers.append(server)
            began.set()
            await asyncio.Event().wait()

    using = asyncio.ensure_future(use())
    await began.wait()
    assert cpu_s(servers[0]).keys() == {"engine", "frontends"}
    using.cancel()
    await asyncio.wait([using])
    assert using.cancelled()
    with pytest.raises(ServerError, match="ended during the run"):
        cpu_s(servers[0])
    assert private_directories() == []


async def test_a_server_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", STAND_IN.format(deaf=False, status=3)))
    with pytest.raises(ServerError, match="exit code 3"):
        async with serving(ServerOptions(), Load(requests=1)):
            pass
    assert "last words" in caplog.text
    monkeypatch.setattr(run, "_PROGRAM", ("-S", "-c", "import sys; sys.exit('no such slab')"))
    with pytest.raises(ServerError, match=r"did not start:\nno such slab"):
        async with serving(ServerOptions(), Load(requests=1)):
            pass
    assert private_directories() == []


#: Has a server, says which process it is, and waits. The server lives for as long as its standard input does.
HAS_A_SERVER = """
import asyncio
from bench.serving import run
from bench.serving.plan import Load, ServerOptions

STAND_IN = '''
import os, sys
word = '{"url": "http://127.0.0.1:9", "engines": [], "frontends": [%d]}' % os.getpid()
print(word, file=open(int(sys.argv[-1].removeprefix("--ready-fd=")), "w"), flush=True)
sys.stdin.read()
'''

async def main():
    async with run.serving(ServerOptions(), Load(requests=1)) as served:
        print(served.process.pid, flush=True)
        await asyncio.Event().wait()

run._PROGRAM = ("-S", "-c", STAND_IN)
asyncio.run(main())
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
