"""Processes that end, or fork, while views live: no crash, no noise, nothing left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.request_options import ForEngine
from tests.claiming import claimed
from tests.forked import in_child
from tests.nursery import Nursery
from tests.tables import slow

PROGRAM = Path(__file__).parent / "programs" / "leave.py"
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("how", "loop"),
    [
        slow("closed", "asyncio"),
        slow("closed", "uvloop"),
        ("unclosed", "uvloop"),
        ("exited", "asyncio"),
    ],
)
def test_an_interpreter_that_ends_with_living_views_does_not_crash(
    how: str, loop: str, nursery: Nursery, socket_dir: Path
) -> None:
    done = nursery.run_text(PROGRAM.read_text(), how, loop, str(socket_dir))
    assert (done.returncode, done.stdout) == (0, "leaving\n"), done.stderr
    assert "Fatal" not in done.stderr
    assert "Exception ignored" not in done.stderr


def drive(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Runs a coroutine without a loop, as far as it goes."""
    try:
        while True:
            coroutine.send(None)
    except StopIteration:
        pass
    finally:
        coroutine.close()


async def test_a_forked_child_can_use_neither_end(ring: Ring, client: Client) -> None:
    """Not even by leaving their blocks: its parent's peer must not hear of it."""
    slot = await client.slot(5000)
    submission = await client.submit({"x": torch.ones(5000)})
    waiting, claim = await claimed(ring, client, "waiting")
    attempts = [
        lambda: client.submit_nowait(1),
        lambda: client.slot_nowait(1),
        lambda: slot.tensor((1,), torch.uint8),
        lambda: ring.claim_nowait(),
        lambda: claim.reply_nowait({"x": torch.ones(5000)}),
    ]
    coroutines = [
        client.submit(1),
        ring.claim(),
        claim.reply({"x": torch.ones(5000)}),
        submission._end.shell.sending.submit_in_turn(1, ForEngine()),
    ]

    def as_child() -> None:
        for attempt in attempts:
            with pytest.raises(shmring.ClosedError, match="forked"):
                attempt()
        for coroutine in coroutines:
            with pytest.raises(shmring.ClosedError, match="forked"):
                drive(coroutine)
        slot.close()
        submission.abort()
        claim.done()
        for end in (client, ring):
            drive(end.close())
        for scheduled in list(asyncio.get_event_loop_policy().get_event_loop()._ready):
            scheduled._run()

    in_child(as_child)
    for coroutine in coroutines:
        coroutine.close()
    assert not claim.aborted
    assert client.connected
    with claim:
        await claim.reply("first")
    assert await submission.result() == "first"
    with await ring.claim() as second:
        await second.reply("second")
    assert await waiting.result() == "second"
    slot.tensor((1,), torch.uint8)
    slot.close()
    assert ring.statistics().clients == 1
    assert ring.statistics().protocol_errors == 0
