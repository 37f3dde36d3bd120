"""Stages that are killed at any moment: what was put can be got by who lives, and nothing stays behind in the store."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shmring
from bench.omni import layer
from tests.nursery import Nursery
from tests.omni.chunks import HANGS_S, chunk, number_of
from tests.omni.conftest import NAME
from tests.omni.test_connector import deliveries
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # a stage takes seconds to start on a busy machine, and there are a hundred

_STAGE = """
import sys
from pathlib import Path
from bench.omni import layer
layer.load(Path(sys.argv[1]))
from shmring.integrations.omni import CONNECTOR, register
register()
from vllm_omni.distributed.omni_connectors.factory import OmniConnectorFactory
from vllm_omni.distributed.omni_connectors.utils.config import ConnectorSpec
from tests.omni.chunks import chunk
import time
extra = {"shmring_store": sys.argv[2], "shmring_socket_dir": sys.argv[3], "shmring_start": False, "shmring_namespace": "test"}
connector = OmniConnectorFactory.create_connector(ConnectorSpec(CONNECTOR, extra))
print("ready", flush=True)
number = 0
held = []
while True:
    if sys.argv[4] == "sender":
        if connector.put("0", "1", f"{sys.argv[5]}_{number}", chunk(number % 256))[0]:
            print("put", number, flush=True)
            number += 1
    else:
        result = connector.get_with_deadline("0", "1", f"{sys.argv[5]}_{number}", deadline=time.monotonic() + 60)
        held = [*held[-1:], result]
        number += 1
"""


@pytest.fixture
def run_stage(omni: SimpleNamespace, nursery: Nursery, socket_dir: Path, tmp_path: Path) -> Callable[[str, str], Any]:
    def run(kind: str, prefix: str) -> Any:
        output = tmp_path / f"{kind}-{prefix}"
        return nursery.start_text(output, _STAGE, str(layer.sources()), NAME, str(socket_dir), kind, prefix)

    return run


def said_by(stage: Any) -> list[str]:
    """The lines of a stage, without those of vLLM's log."""
    return [line for line in stage.lines if line.startswith(("ready", "put "))]


def nothing_is_left(directory: Path, clients: int) -> bool:
    snapshot = asyncio.run(shmring.inspect(NAME, socket_dir=str(directory)))
    counts = snapshot.statistics
    return (counts["clients"], counts["departed_clients"], counts["kept_pinned"]) == (clients, 0, 0)


MOMENTS = [pytest.param(4, id="4 moments"), pytest.param(100, id="100 moments", marks=pytest.mark.slow)]


@pytest.mark.parametrize("moments", MOMENTS)
def test_what_a_killed_sender_has_put_can_be_got(
    moments: int, store: Any, connector: Any, run_stage: Any, socket_dir: Path, no_new_segments: None
) -> None:
    receiver = connector(1)
    pause = random.Random(1)
    for moment in range(moments):
        sender = run_stage("sender", str(moment))
        until(lambda sender=sender: len(said_by(sender)) > 1, HANGS_S)
        got: list[int] = []

        def take(until_s: float) -> bool:
            result = receiver.get_with_deadline("0", "1", f"{moment}_{len(got)}", deadline=until_s)  # noqa: B023
            if result is not None:
                got.append(number_of(result[0]))  # noqa: B023
            return result is not None

        for _ in range(pause.randrange(4)):
            assert take(time.monotonic() + HANGS_S)
        os.kill(sender.pid, signal.SIGKILL)
        until(lambda sender=sender: sender.is_dead, HANGS_S)
        said = len(said_by(sender)) - 1
        while len(got) < said:
            assert take(time.monotonic() + HANGS_S), "something that was put is lost"
        while take(time.monotonic() + 0.2):
            pass
        assert got == [number % 256 for number in range(len(got))]
        receiver.abandon_get(f"{moment}_{len(got)}")
    until(lambda: deliveries(socket_dir)["untaken"] == 0)
    until(lambda: nothing_is_left(socket_dir, 1))


@pytest.mark.parametrize("moments", MOMENTS)
def test_a_killed_receiver_leaves_nothing(
    moments: int, store: Any, connector: Any, run_stage: Any, socket_dir: Path, no_new_segments: None
) -> None:
    sender = connector(0)
    pause = random.Random(2)
    for moment in range(moments):
        receiver = run_stage("receiver", str(moment))
        until(lambda receiver=receiver: said_by(receiver) == ["ready"], HANGS_S)
        count = 1 + pause.randrange(6)
        for number in range(count):
            assert sender.put("0", "1", f"{moment}_{number}", chunk(number))[0]
        os.kill(receiver.pid, signal.SIGKILL)
        for number in range(count):
            sender.cleanup(f"{moment}_{number}")
        until(lambda receiver=receiver: receiver.is_dead, HANGS_S)
    assert deliveries(socket_dir)["untaken"] == 0
    until(lambda: nothing_is_left(socket_dir, 1))
    assert sender.health()["failures"] == 0
