"""Encoders and readers are killed while they write, look up and load: nothing stays, and nothing wrong is read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shmring import threads
from tests.nursery import Forked, Nursery
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 50
MEDIA = 40  # of 64 KB, of which the store keeps some thirty

_COMMON = """
import sys, torch
from shmring.integrations.vllm.encoder_keys import EncoderKeys
from shmring.integrations.vllm.encoder_scheduler import Load, Step
from shmring.integrations.vllm.encoder_settings import EncoderSettings
from shmring.integrations.vllm.encoder_store import EncoderStore
from shmring.integrations.vllm.encoder_worker import WorkerHalf
from tests.vllm.made_up_configuration import configuration
directory, use, first, media = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
settings = EncoderSettings(store="ec", socket_dir=directory)
store = EncoderStore.create(settings, use, use=use)
worker = WorkerHalf(store, EncoderKeys(configuration(), settings, "0.32.0"), device=torch.device("cpu"), keep=use == "keep")
print("ready", flush=True)
"""

ENCODER = f"""{_COMMON}
while True:
    name = str(first % media)
    worker.save({{name: torch.full((64, 512), first % media, dtype=torch.bfloat16)}}, name)
    first += 1
"""

READER = f"""{_COMMON}
held = {{}}
while True:
    loads = [Load(str((first + place) % media), "r", place, 64, True) for place in range(3)]
    cache = {{}}
    worker.load(cache, Step(1, loads, encoded={{}}))
    for name, tensor in cache.items():
        if not bool((tensor == int(name)).all()):
            print("wrong", name, tensor.unique().tolist(), flush=True)
    held = cache
    first += 1
"""


@pytest.fixture
def start(nursery: Nursery, socket_dir: Path, tmp_path: Path) -> Iterator[Callable[[str, str, int], Forked]]:
    forked: list[Forked] = []

    def run(text: str, use: str, first: int) -> Forked:
        output = tmp_path / f"output-{len(forked)}"
        forked.append(nursery.start_text(output, text, str(socket_dir), use, str(first), str(MEDIA)))
        return forked[-1]

    yield run
    for each in forked:
        each.process.kill()


def test_whoever_is_killed_leaves_nothing_and_nothing_wrong_is_read(
    start: Callable[[str, str, int], Forked], socket_dir: Path
) -> None:
    numbers = random.Random(7)
    with threads.serve("ec", slab_nbytes="8MiB", kept_nbytes="2MiB", reply_nbytes="64KiB", socket_dir=str(socket_dir)) as ring:
        witness, encoder = start(READER, "load", 0), start(ENCODER, "keep", 0)
        forked = [witness, encoder]
        for each in forked:
            assert each.says() == ["ready"]
        for number in range(KILLS):
            is_reader = bool(number % 2)
            victim = start(READER, "load", number) if is_reader else start(ENCODER, "keep", number)
            forked.append(victim)
            assert victim.says() == ["ready"]
            goal = work_of(ring) + numbers.randrange(40)
            until(lambda goal=goal: work_of(ring) >= goal)  # it is somewhere in the middle of something
            victim.process.kill()
            until(lambda: ring.statistics().clients == 2)
        encoder.process.kill()
        until(lambda: ring.statistics().clients == 1)
        assert not witness.is_dead
        witness.process.kill()
        until(lambda: held_of(ring) == (0, 0, 0, 0))
        left = ring.statistics()
        assert left.protocol_errors == 0
        assert left.kept_evictions > 0
        assert left.kept_hits > 0
        assert [line for each in forked for line in each.lines if line.startswith(("wrong", "Traceback"))] == []


def held_of(ring: threads.Ring) -> tuple[int, ...]:
    """What clients have."""
    seen = ring.statistics()
    return seen.clients, seen.leased_nbytes, seen.quarantined_nbytes, seen.kept_pinned


def work_of(ring: threads.Ring) -> int:
    """How much has happened so far."""
    seen = ring.statistics()
    return seen.kept + seen.kept_evictions + seen.kept_hits
