"""A process is killed at each transition of each life cycle, at either end, and the invariants are looked at afterwards.

``programs/tour.py`` goes through all of them; each case is a tour that ends in a SIGKILL. Whoever is left must go on: a
frontend's death gives its memory back, an engine's fails what was pending, and the next engine of the name can start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.core.states import TABLES
from tests.segments import own_name, segments_of

NAME = own_name("tour")
LIMIT_S = 10.0

#: Transitions that no process can be brought to, and why.
UNREACHED = {
    "client_slot.SUBMITTED.ABORT": "a client that aborts sends a message and leaves its slot's state alone",
    "request.WAITING.DEADLINE": "a ring ends requests by their claims, so they have been taken up; schedulers may do without",
    "request.WAITING.ERROR": "likewise",
}

TRANSITIONS = [
    f"{name}.{state.name}.{event.name}" for name, table in TABLES.items() for state, events in table.items() for event in events
]
#: Which end's book makes the transitions of a table.
OWNERS = {"client_slot": "frontend", "engine_slot": "engine", "lease": "engine", "request": "engine"}


Start = Callable[..., Any]


@pytest.fixture
def start(launch: Callable[..., Any], socket_dir: Path) -> Start:
    """``start("engine", SHMRING_CRASH_AT=...)``: one end of the tour."""
    return lambda end, **environment: launch("tour", end, NAME, str(socket_dir), **environment)


async def connect(socket_dir: Path) -> shmring.Client:
    return await shmring.connect(NAME, socket_dir=str(socket_dir), lease_nbytes="64KiB", prefault=False, connect_timeout_s=30)


async def works(client: shmring.Client) -> None:
    data = torch.arange(50_000).to(torch.uint8)
    answer = await client.request({"mode": "answer", "x": data}, timeout=LIMIT_S)
    assert torch.equal(answer["x"], data)


async def until_whole(observer: shmring.Client) -> dict[str, int]:
    """Waits until the observer alone has anything of the slab; the engine checks its book each time it is asked."""
    deadline = time.monotonic() + LIMIT_S
    own = observer.statistics().leased_nbytes
    while True:
        counts: dict[str, int] = await observer.call("statistics", timeout=LIMIT_S)
        slots = counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"]
        if (
            (slots, counts["waiting"], counts["running"], counts["departed_clients"], counts["clients"]) == (0, 0, 0, 0, 1)
            and counts["kept_pinned"] == 0
            and counts["free_nbytes"] + counts["kept_nbytes"] + own == counts["leasable_nbytes"]
            and counts["reply_free_nbytes"] == counts["reply_nbytes"]
        ):
            return counts
        assert time.monotonic() < deadline, counts


# -- the tests -----------------------------------------------------------------------------------------------------------


async def test_the_tour_sees_every_transition(start: Start, socket_dir: Path) -> None:
    """So no transition is added to a table without a case here, or a reason."""
    engine = start("engine")
    assert (await engine.said())[0] == "ready"
    observer = await connect(socket_dir)
    frontend = start("frontend")
    word, *by_frontend = await frontend.said()
    assert word == "toured"
    await frontend.died()
    await until_whole(observer)
    by_engine = await observer.call("reached", timeout=LIMIT_S)
    assert {*by_frontend, *by_engine} == set(TRANSITIONS) - UNREACHED.keys()
    await observer.close()


CASES = [
    pytest.param(transition, victim, moment, id=f"{transition}-{victim}-{moment}")
    for transition in TRANSITIONS
    if transition not in UNREACHED
    for victim in ("frontend", "engine")
    for moment in ("before", "after")
]


@pytest.mark.parametrize(("transition", "victim", "moment"), CASES)
async def test_a_process_killed_at_a_transition_harms_nobody(
    start: Start, socket_dir: Path, transition: str, victim: str, moment: str
) -> None:
    owner = OWNERS[transition.partition(".")[0]]
    hook = {"SHMRING_CRASH_AT": f"{transition}.{moment}", "SHMRING_CRASH_WHO": "self" if owner == victim else "peer"}
    engine = start("engine", **(hook if owner == "engine" else {}))
    assert (await engine.said())[0] == "ready"
    observer = await connect(socket_dir)
    frontend = start("frontend", **(hook if owner == "frontend" else {}))
    if victim == "frontend":
        await frontend.died()
        assert "toured" not in frontend.output.read_text(), "it was not killed"
        counts = await until_whole(observer)
        assert counts["protocol_errors"] == 0
        await works(observer)
        assert not engine.is_dead
    else:
        await engine.died()
        with pytest.raises(shmring.EngineDeadError):
            await observer.request({"mode": "answer", "x": torch.ones(5)}, timeout=LIMIT_S)
        # Killed as the tour's client left, it may have been left in order before.
        assert (await frontend.said())[0] in ("lost", "toured")
        await frontend.died()
        assert segments_of(NAME) == []
        with contextlib.suppress(FileNotFoundError):
            (socket_dir / "tour").unlink()
        successor = start("engine")
        assert (await successor.said())[0] == "ready"
        async with await connect(socket_dir) as client:
            await works(client)
            await until_whole(client)
    await observer.close()
