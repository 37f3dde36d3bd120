"""Connections that have sent much are parsed in turn. (With real connections: ``test_protocol.py``.)"""

from __future__ import annotations

import asyncio

from shmring.frontend.http.parsing_turns import ParsingTurns


class Connection:
    def __init__(self, slices: int, order: list[str], name: str, fails: bool = False) -> None:
        self._left = slices
        self._order = order
        self._name = name
        self._fails = fails

    @property
    def is_behind(self) -> bool:
        return self._left > 0

    def parse_slice(self) -> int:
        if self._fails:
            raise ArithmeticError("a bug")
        self._order.append(self._name)
        self._left -= 1
        return 100


async def test_connections_take_turns_and_the_loop_goes_on_between() -> None:
    turns, order = ParsingTurns(), list[str]()
    for name in "abc":
        turns.join(Connection(3, order, name))
    seen = []
    while not seen or seen[-1] < 9:
        await asyncio.sleep(0)
        seen.append(len(order))
    assert "".join(order) == "abcabcabc"
    assert {3, 6, 9} <= set(seen), "three slices in a turn cost more than it has"


async def test_a_bug_that_one_of_them_meets_holds_up_none_of_the_others() -> None:
    reported = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
    turns, order = ParsingTurns(), list[str]()
    turns.join(Connection(1, order, "a", fails=True))
    turns.join(Connection(2, order, "b"))
    async with asyncio.timeout(20):
        while len(order) < 2:
            await asyncio.sleep(0)
    assert [type(error) for error in reported] == [ArithmeticError]
