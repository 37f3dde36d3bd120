"""Two API servers and an engine core: what the processor cache sends again stays in the slab; hang-ups; a killed API server."""

from __future__ import annotations

import http.client
import json
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from bench.servers import picture
from bench.vllm.server import Server, question, serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE = 1344
NBYTES = SIDE * SIDE * 3 * 2


@pytest.fixture(scope="module")
def server(runtime_directory: Path) -> Iterator[Server]:
    environment = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "512MiB", "SHMRING_VLLM_CHECK": "1"}
    with serve(runtime_directory, side=SIDE, api_servers=2, environment=environment) as server:
        yield server


PICTURES = [picture(SIDE, seed) for seed in range(3)]


def ask_all(server: Server, times: int, *, first: bool) -> list[str]:
    """Asks about each picture so often, eight requests at a time; only the first time with its bytes."""
    with ThreadPoolExecutor(8) as pool:
        asked = [
            pool.submit(server.ask, PICTURES[number] if first else None, uuid=f"picture-{number}")
            for _ in range(times)
            for number in range(len(PICTURES))
        ]
        return [answer.result() for answer in asked]


def difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {way: count - before.get(way, 0) for way, count in after.items() if count != before.get(way, 0)}


def test_it_says_that_it_is_on(server: Server) -> None:
    until(lambda: server.log.count("go through shared memory (test-0); up to 128 MiB of them stay there") == 2)
    assert "engine core 0 has a slab of 512 MiB (test-0); its tensors are read in place" in server.log


def test_what_is_sent_again_is_copied_once_by_each_api_server(server: Server) -> None:
    before = server.tensors()
    ask_all(server, 8, first=True)
    counts = difference(server.tensors(), before)
    assert counts["copied"] <= 2 * len(PICTURES)  # as the kernel hands connections out, one may have seen less
    assert counts == {"copied": counts["copied"], "kept": 8 * len(PICTURES) - counts["copied"]}


def test_a_hit_copies_no_byte(server: Server) -> None:
    until_both_have_seen_all(server)
    before, metrics = server.tensors(), server.metrics()
    ask_all(server, 8, first=False)
    assert difference(server.tensors(), before) == {"kept": 24}
    copied = 'shmring_tensor_bytes_total{reason="",way="copied"}'
    assert server.metrics()[copied] == metrics[copied]


def until_both_have_seen_all(server: Server) -> None:
    for _ in range(20):
        if server.engine()["kept_tensors"] >= 2 * len(PICTURES):
            return
        ask_all(server, 4, first=True)
    raise AssertionError(server.engine())


def test_nothing_goes_inline_and_everything_arrives(server: Server) -> None:
    assert not [way for way in server.tensors() if way.startswith("inline")]
    report = server.engine()
    assert report["lost"] == 0  # each checksum was compared
    assert report["kept_bytes"] == report["kept_tensors"] * NBYTES


def test_openai_streamed_and_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0)
    body: dict[str, Any] = question(PICTURES[0], uuid=None, max_tokens=4)
    options = {"model": "tiny", "messages": body["messages"], "max_tokens": 4, "temperature": 0, "seed": 1}
    whole = client.chat.completions.create(**options).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**options, stream=True)]
    assert whole == "".join(parts)


def test_callers_that_hang_up_leave_nothing(server: Server) -> None:
    before = server.engine()
    patience = random.Random(1)

    def hang_up(number: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=patience.uniform(0.01, 0.6))
        try:
            body = question(picture(SIDE, 100 + number % 4), uuid=None, max_tokens=300, stream=True)
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
            connection.getresponse().read(100)
        except TimeoutError:
            pass
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(hang_up, range(32)))
    # What is kept is what the processor cache has; all other slots are free again.
    until(lambda: (report := server.engine())["slots_in_use"] == report["kept_tensors"] and is_idle(server))
    assert server.engine()["lost"] == before["lost"] == 0
    assert server.ask(PICTURES[0])


def is_idle(server: Server) -> bool:
    return 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in server.get("/metrics")


def test_no_process_complains(server: Server) -> None:
    complaints = [line for line in server.log.splitlines() if "Traceback" in line or ("shmring" in line and "ERROR" in line)]
    assert complaints == []


def test_kill_9_of_the_api_servers_gives_everything_back(server: Server) -> None:
    """The launcher is stopped meanwhile, as it would end the whole service."""
    kept = server.engine()["kept_tensors"]
    assert kept >= 2 * len(PICTURES)
    launcher = psutil.Process(server.process.pid)
    first, second = server.processes("APIServer")
    launcher.suspend()
    try:
        first.send_signal(signal.SIGKILL)
        until(lambda: 0 < server.engine()["kept_tensors"] < kept)
        until(lambda: server.engine()["quarantined_bytes"] == 0)
        hits = server.engine()["hits"]
        with ThreadPoolExecutor(4) as pool:
            # The dead one's share of connections waits in its queue for ever.
            for _ in range(12):
                pool.submit(server.ask, PICTURES[0], uuid="picture-0", max_tokens=300, timeout=5)
            until(lambda: server.engine()["hits"] > hits)
            second.send_signal(signal.SIGKILL)
        until(lambda: server.engine()["kept_tensors"] == 0)
        until(lambda: (report := server.engine())["slots_in_use"] == 0 and report["quarantined_bytes"] == 0)
        assert server.engine()["lost"] == 0
    finally:
        launcher.resume()
