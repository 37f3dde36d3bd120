"""Each call of the asyncio interface, interrupted at some of its suspensions: ``make simulate`` takes all of them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from shmring.line import WaitingLine
from tests.suspensions.calls import CALLS, HANDLERS
from tests.suspensions.command import suspensions_command
from tests.suspensions.interrupting import Interrupted, Interruption
from tests.suspensions.trying import Trial, small_limits

_FIRST = 6  # suspensions; most calls have fewer, and the command takes all


@pytest.mark.first_row_on_both_loops
@pytest.mark.parametrize("name", [*CALLS, *HANDLERS])
async def test_nothing_is_left_of_a_call_that_is_interrupted(name: str, socket_dir: Path) -> None:
    random = Random(name)
    with small_limits():
        await Trial(name, socket_dir).at([random.randint(1, _FIRST)], random.choice(list(Interruption)))


@pytest.mark.one_loop
def test_the_command_takes_all_suspensions() -> None:
    result = CliRunner().invoke(suspensions_command, ["--call", "call"])
    assert result.exit_code == 0
    assert "interruptions, and nothing was left of any" in result.output


async def test_what_is_left_is_noticed(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that comes as its caller is cancelled, and that nobody gives back."""
    stay = WaitingLine.stay
    monkeypatch.setattr(WaitingLine, "stay", lambda line, place, unused, left=None: stay(line, place, lambda _: None, left))
    monkeypatch.setattr("tests.suspensions.world.LIMIT_S", 0.5)
    with small_limits(), pytest.raises(AssertionError, match="slots_writing"):
        await Trial("slot", socket_dir).each(Interruption.AFTER)


async def test_a_call_is_interrupted_where_it_suspends() -> None:
    async def call() -> str:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return "done"

    async def interrupted(number: int, how: Interruption) -> str:
        return await Interrupted(call(), number, how)

    assert await interrupted(3, Interruption.BEFORE) == "done"
    for number in (1, 2):
        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(interrupted(number, Interruption.BEFORE))
