"""A real Prometheus reads a server's numbers, and answers each question of the dashboard and of the alerts."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from shmring.frontend.commands.serve_process import ServerProcess
from tests.pages import load_maker
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,  # it starts two servers
    pytest.mark.skipif(
        not (shutil.which("prometheus") and shutil.which("promtool")),
        reason="no prometheus here (Debian: apt install prometheus)",
    ),
]
ROOT = Path(__file__).resolve().parents[2]
MONITORING = load_maker("make_monitoring")
LIMIT_S = 60.0
# What needs an event that this test does not bring about.
EMPTY = re.compile(r"shmring_(media_fetch|http_broken_streams|media_preparation)")


def get(url: str, **parameters: str) -> Any:
    return httpx.get(url, params=parameters, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="shmr-", dir="/tmp") as path:
        yield Path(path)


@pytest.fixture(scope="module")
def server(place: Path) -> Iterator[str]:
    options = ["--port=0", "--name=prom", f"--socket-dir={place}", "--slab-nbytes=64MiB", "--executor=synthetic"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(place)}
    with ServerProcess.start(options, environment=environment, errors=place / "errors") as running:
        running.wait_until_ready(90)
        yield running.url


@pytest.fixture(scope="module")
def prometheus(place: Path, server: str) -> Iterator[str]:
    """A Prometheus that reads the server's numbers every half second, and has our alerts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    scrape = {"job_name": "shmring", "static_configs": [{"targets": [server.removeprefix("http://")]}]}
    every = {"scrape_interval": "500ms", "scrape_timeout": "500ms", "evaluation_interval": "500ms"}
    config = {"global": every, "scrape_configs": [scrape], "rule_files": [str(MONITORING.ALERTS)]}
    (place / "prometheus.yml").write_text(json.dumps(config))
    command = ["prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data"]
    url = f"http://127.0.0.1:{port}"
    with (place / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={url[7:]}"], stdout=log, stderr=log)
    try:
        until(lambda: is_ready(url))
        yield url
    finally:
        process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        return bool(get(f"{url}/-/ready").status_code == 200)
    except httpx.TransportError:
        return False


def ask(prometheus: str, expression: str) -> Any:
    answer = get(f"{prometheus}/api/v1/query", query=expression).json()
    assert answer["status"] == "success", (expression, answer)
    return answer["data"]["result"]


def chat(server: str, **fields: Any) -> int:
    message = {"role": "user", "content": "hello"}
    body = {"model": "shmring-synthetic", "messages": [message], "max_tokens": 4, **fields}
    return httpx.post(f"{server}/v1/chat/completions", json=body, timeout=LIMIT_S).status_code


def test_each_question_has_an_answer(prometheus: str, server: str) -> None:
    """All names of the dashboard are there, and those of what happened have values."""
    assert chat(server, temperature="hot") == 400

    def unanswered() -> list[str]:
        assert chat(server) == 200
        return [
            text
            for text in MONITORING.expressions()
            if text not in alerts and not EMPTY.search(text) and not ask(prometheus, text)
        ]

    alerts = {rule[1] for rule in MONITORING.RULES}
    until(lambda: not unanswered())
    for expression in alerts:
        assert ask(prometheus, expression) == [], "a healthy server gives no alarm"
    [first_token] = ask(prometheus, "sum(shmring_time_to_first_token_seconds_count)")
    [succeeded] = ask(prometheus, "sum(shmring_request_success_total)")
    assert float(first_token["value"][1]) == float(succeeded["value"][1]) >= 1
    [failed] = ask(prometheus, 'shmring_request_failure_total{route="/v1/chat/completions"}')
    assert (failed["metric"]["reason"], failed["value"][1]) == ("invalid_value", "1")


def test_prometheus_has_the_alerts_and_their_types(prometheus: str) -> None:
    groups = get(f"{prometheus}/api/v1/rules").json()["data"]["groups"]
    rules = until(lambda: [rule for group in groups for rule in group["rules"]])
    assert [rule["name"] for rule in rules] == [rule[0] for rule in MONITORING.RULES]
    metadata = until(lambda: get(f"{prometheus}/api/v1/metadata").json()["data"])
    for counted in MONITORING.COUNTED:
        if counted.exposed_name in metadata:
            assert metadata[counted.exposed_name][0]["type"] == counted.kind
    assert {"shmring_engine_ring_submitted_total", "shmring_step_time_seconds"} <= metadata.keys()


UP = {"shmring_engine_up": "1x30"}
#: What is stored each minute, by series; and the alert that must come of it after half an hour, or none.
CASES: list[tuple[dict[str, str], str | None]] = [
    (UP, None),
    ({"shmring_engine_up": "0x30"}, "ShmringEngineDown"),
    (
        {'shmring_num_requests_running{instance="a"}': "3x30", 'shmring_engine_steps_total{instance="a"}': "7x30"},
        "ShmringEngineStuck",
    ),
    ({'shmring_num_requests_running{instance="a"}': "3x30", 'shmring_engine_steps_total{instance="a"}': "7+1x30"}, None),
    ({'shmring_request_failure_total{reason="slab_full"}': "0+1x30"}, "ShmringSlabFull"),
    ({'shmring_request_failure_total{reason="invalid_value"}': "0+1x30"}, None),
    ({"shmring_engine_ring_lease_requests_waiting": "1x30"}, "ShmringSlabTight"),
    ({"shmring_frontend_loop_lag_seconds": "0.8x30"}, "ShmringLoopLate"),
    ({"shmring_engine_loop_lag_seconds": "0.8x30"}, "ShmringLoopLate"),
    ({"shmring_engine_loop_lag_seconds": "0.02x30", "shmring_frontend_loop_lag_seconds": "0.02x30"}, None),
    ({"shmring_log_lines_dropped_total": "0+1x30"}, "ShmringLogDropped"),
    ({"shmring_engine_log_lines_dropped_total": "0+1x30"}, "ShmringLogDropped"),
    ({"shmring_log_lines_dropped_total": "7x30", "shmring_engine_log_lines_dropped_total": "7x30"}, None),
    ({"shmring_engine_ring_quarantined_nbytes": "4096x30"}, "ShmringMemoryQuarantined"),
    (
        {'shmring_http_requests_total{status="200"}': "0+10x30", 'shmring_http_requests_total{status="503"}': "0+1x30"},
        "ShmringRequestsFail",
    ),
    ({'shmring_http_requests_total{status="200"}': "0+10x30", 'shmring_http_requests_total{status="404"}': "0+9x30"}, None),
    (
        {
            'shmring_request_queue_time_seconds_bucket{le="10.0"}': "0x30",
            'shmring_request_queue_time_seconds_bucket{le="30.0"}': "0+5x30",
            'shmring_request_queue_time_seconds_bucket{le="+Inf"}': "0+5x30",
        },
        "ShmringQueueLong",
    ),
    ({"shmring_frontend_decoder_waiting_seconds": "6x30"}, "ShmringDecodersBusy"),
    ({"shmring_engine_ring_protocol_errors_total": "0+1x30"}, "ShmringProtocolErrors"),
]


def test_each_alert_is_given_when_it_should_be(place: Path) -> None:
    """promtool runs the rules over made-up series."""
    assert {name for _, name in CASES if name} == {rule[0] for rule in MONITORING.RULES}
    tests = []
    for series, name in CASES:
        rules = {rule[0]: rule for rule in MONITORING.RULES}
        expected = [{"alertname": other, "eval_time": "25m", "exp_alerts": []} for other in rules if other != name]
        stored = [{"series": each, "values": values} for each, values in series.items()]
        tests.append({"interval": "1m", "input_series": stored, "alert_rule_test": expected})
        if name is not None:
            tests[-1]["promql_expr_test"] = [
                {
                    "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
                    "eval_time": "25m",
                    "exp_samples": [{"labels": "{}", "value": 1}],
                }
            ]
    (place / "tests.yml").write_text(yaml.safe_dump({"rule_files": [str(MONITORING.ALERTS)], "tests": tests}))
    for command in (["check", "rules", str(MONITORING.ALERTS)], ["test", "rules", "tests.yml"]):
        result = subprocess.run(["promtool", *command], cwd=place, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
