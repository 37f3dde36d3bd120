"""Names of requests that an operator has ended, on their way to frontends and their numbers on the way back."""

from __future__ import annotations

import asyncio

import pytest

from shmring.engine import operator_aborts
from shmring.engine.operator_aborts import OperatorAborts


class Frontend:
    """Ends so many requests, and asks on."""

    def __init__(self, aborts: OperatorAborts, ended: int) -> None:
        self.told: list[list[str]] = []
        self._aborts = aborts
        self._ended = ended
        self.running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        token = ended = 0
        while True:
            token, names = await self._aborts.next_names(token, ended)
            self.told.append(names)
            ended = self._ended


async def test_all_frontends_are_told_and_what_they_have_ended_is_added_up() -> None:
    aborts = OperatorAborts()
    assert await aborts.tell(["a"]) == 0
    frontends = [Frontend(aborts, ended) for ended in (1, 2, 3)]
    await asyncio.sleep(0)
    assert await asyncio.gather(aborts.tell(["a"]), aborts.tell(["b", "c"])) == [6, 6]
    assert [frontend.told for frontend in frontends] == [[["a"], ["b", "c"]]] * 3
    for frontend in frontends:
        frontend.running.cancel()
    await asyncio.wait([frontend.running for frontend in frontends])
    assert not aborts._asking
    assert await aborts.tell(["a"]) == 0


async def test_one_that_hangs_or_goes_away_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_aborts, "_LIMIT_S", 0.01)
    aborts = OperatorAborts()
    hanging = asyncio.create_task(aborts.next_names(0, 0))
    frontend = Frontend(aborts, 2)
    await asyncio.sleep(0)
    assert await aborts.tell(["a"]) == 2
    token, names = await hanging
    assert names == ["a"]
    late = asyncio.create_task(aborts.next_names(token, 100))
    await asyncio.sleep(0)
    assert await aborts.tell(["b"]) == 2, "what it says too late counts for nothing else"
    assert (await late)[1] == ["b"]
    frontend.running.cancel()
