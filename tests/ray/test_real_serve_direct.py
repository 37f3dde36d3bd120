"""The frontend on Ray Serve, with a port of its own for each replica (direct ingress), as a load balancer uses it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.ray.conftest import Nodes, is_running, kill
from tests.ray.test_real_serve import MODEL, Application, check_the_end, picture
from tests.waiting import until

VARIABLES = {
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",  # there is no balancer that has to notice
}

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def application() -> Iterator[Application]:
    before = os.environ.copy()
    os.environ.update(VARIABLES)
    nodes = Nodes(2)
    try:
        application = Application(nodes)
        application.run()
        yield application
        application._serve.shutdown()
    finally:
        for name in VARIABLES:
            os.environ.pop(name)
        os.environ.update(before)
        nodes.close()


def urls(application: Application) -> dict[int, str]:
    """Where replicas listen, by the pids of their processes."""
    frontends = application.frontends()
    listening = [each for each in psutil.net_connections("tcp") if each.status == "LISTEN" and each.pid in frontends]
    return {each.pid: f"http://127.0.0.1:{each.laddr.port}" for each in listening if 30_000 <= each.laddr.port <= 31_000}


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)


def test_each_replica_answers_at_its_port(application: Application) -> None:
    until(lambda: len(urls(application)) == 2)
    for pid, url in urls(application).items():
        assert httpx.get(f"{url}/ready", timeout=30).json()["pid"] == pid
        assert httpx.get(f"{url}/-/healthz", timeout=30).status_code == 200
        seen: Any = picture()
        raw = client(url).chat.completions.with_raw_response.create(model=MODEL, messages=[seen])
        assert int(raw.headers["x-shmring-slab-bytes"]) > 100_000
        assert len(raw.headers.get_list("x-request-id")) == 1
        assert httpx.get(f"{url}/metrics", timeout=30).text.count("shmring_engine_up") >= 1


def test_who_hangs_up_has_its_request_aborted(application: Application) -> None:
    url = min(urls(application).values())
    said: Any = {"role": "user", "content": "hello"}
    stream = client(url).chat.completions.create(model=MODEL, messages=[said], stream=True, max_tokens=100_000)
    next(iter(stream))
    assert application.in_flight() == 1
    stream.close()
    until(lambda: application.in_flight() == 0)
    body = {"model": MODEL, "messages": [said], "max_tokens": 100_000}
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/chat/completions", json=body, timeout=3)
    until(lambda: application.in_flight() == 0)
    numbers = httpx.get(f"{url}/metrics", timeout=30).text
    assert 'code="503"' not in numbers, "it is counted as a caller that has gone"
    assert "shutting_down" not in numbers


def test_a_body_that_is_too_large_is_refused_when_its_head_came(application: Application) -> None:
    port = int(min(urls(application).values()).rpartition(":")[2])
    head = f"POST /v1/embeddings HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {1 << 40}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(64).startswith(b"HTTP/1.1 413 ")


def test_when_an_engine_dies_its_port_is_closed(application: Application) -> None:
    until(lambda: len(application.engines()) == len(urls(application)) == 2)
    at, engines = urls(application), application.engines()
    kill(min(engines))
    until(lambda: len([pid for pid in at if is_running(pid)]) == 1)
    for pid, url in at.items():
        if is_running(pid):
            assert client(url).embeddings.create(model=MODEL, input="a").data
        else:
            with contextlib.suppress(httpx.ConnectError):
                assert httpx.get(f"{url}/ready", timeout=30).json()["pid"] != pid, "nobody listens there, or its successor"
    until(lambda: len(application.engines()) == len(urls(application)) == 2)


def test_the_end_waits_for_requests_and_leaves_nothing(application: Application) -> None:
    said: Any = {"role": "user", "content": "hello"}
    streams = [
        client(url).chat.completions.create(model=MODEL, messages=[said], stream=True, max_tokens=300)
        for url in urls(application).values()
    ]
    check_the_end(application, streams)
