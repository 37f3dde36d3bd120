"""Which requests an operator has ended, for frontends: a request whose media are being prepared is in no engine yet.

Each frontend keeps a call open that asks for the next names (:meth:`OperatorAborts.next_names`). It is answered when an
operator has named some. With the next such call, the frontend says how many requests it has ended by that.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

__all__ = ["OperatorAborts"]

_LIMIT_S = 0.5  # for all frontends to say it; one that hangs or has just died does not


class OperatorAborts:
    """The frontends of an engine that ask."""

    def __init__(self) -> None:
        self._asking: set[asyncio.Future[tuple[int, list[str]]]] = set()
        self._ending: dict[int, asyncio.Future[int]] = {}  # frontends that were told and have not said it, by token
        self._tokens = itertools.count(1)
        self._telling = asyncio.Lock()  # a frontend that was told asks anew before the next names are told

    async def next_names(self, token: int, ended: int) -> tuple[int, list[str]]:
        """Waits for names.

        Args:
            token: of the last names that this frontend got; 0: there were none.
            ended: how many requests it has ended since.
        """
        said = self._ending.pop(token, None)
        if said is not None and not said.done():
            said.set_result(int(ended))
        names: asyncio.Future[tuple[int, list[str]]] = asyncio.get_running_loop().create_future()
        self._asking.add(names)
        try:
            return await names
        finally:
            self._asking.discard(names)

    async def tell(self, names: Sequence[str]) -> int:
        """Tells all frontends names; returns how many requests they have ended."""
        async with self._telling:
            loop = asyncio.get_running_loop()
            for asking in self._asking:
                if not asking.done():
                    token = next(self._tokens)
                    self._ending[token] = loop.create_future()
                    asking.set_result((token, list(names)))
            said = list(self._ending.values())
            if said:
                await asyncio.wait(said, timeout=_LIMIT_S)
            self._ending.clear()
        return sum(each.result() for each in said if each.done())
