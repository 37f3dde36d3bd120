"""``vllm serve`` with the connector for encoder outputs: API servers, engine cores and a worker in a process of its own."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from bench.servers import picture
from bench.vllm.encoder_engine import CONNECTOR
from bench.vllm.server import serve
from shmring import threads
from tests.segments import segments_of
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

SIDE, STORE = 416, "servers"


def options(role: str, sockets: Path) -> list[str]:
    extra = {"store": STORE, "socket_dir": str(sockets)}
    return [
        "--ec-transfer-config",
        json.dumps(CONNECTOR | {"ec_connector_extra_config": extra, "ec_role": role}),
        "--no-enable-prefix-caching",
    ]


def test_a_server_uses_what_another_one_has_encoded_also_in_a_worker_of_its_own_and_after_kill_9(
    runtime_directory: Path,
) -> None:
    directories = [runtime_directory / name for name in ("first", "second")]
    for directory in directories:
        directory.mkdir()
    with_plug_in = {"SHMRING_VLLM": "1", "SHMRING_VLLM_SLAB": "64MiB"}  # steps go to the worker through shmring as well
    with (
        threads.serve(STORE, slab_nbytes="64MiB", kept_nbytes="48MiB", socket_dir=str(runtime_directory)) as ring,
        serve(directories[0], side=SIDE, options=options("ec_both", runtime_directory)) as first,
        serve(
            directories[1],
            side=SIDE,
            environment=with_plug_in,
            options=options("ec_consumer", runtime_directory),
            in_process=False,
        ) as second,
    ):
        pictures = [picture(SIDE, seed) for seed in range(3)]
        answers = [first.ask(each) for each in pictures]
        until(lambda: ring.statistics().kept == 3)
        hits = ring.statistics().kept_hits
        assert [second.ask(each) for each in pictures[:2]] == answers[:2]
        assert ring.statistics().kept_hits >= hits + 2
        for core in first.processes("EngineCore"):
            core.send_signal(signal.SIGKILL)
        until(lambda: ring.statistics().clients == 2)
        hits = ring.statistics().kept_hits
        assert second.ask(pictures[2]) == answers[2]
        assert ring.statistics().kept_hits > hits
        assert ring.statistics().protocol_errors == 0
        assert "shmring: encoder outputs go through the store 'servers'" in second.log
    assert segments_of(STORE) == []
