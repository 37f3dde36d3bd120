"""An answer that is made for all who ask within a second."""

from __future__ import annotations

import asyncio

import pytest

from shmring.frontend.http.shared_answer import SharedAnswer


class Maker:
    def __init__(self) -> None:
        self.made = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def make(self) -> int:
        self.made += 1
        made = self.made
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return made


async def test_all_who_ask_within_a_second_get_one_answer() -> None:
    maker = Maker()
    answer = SharedAnswer(maker.make, 600.0)
    asking = [asyncio.create_task(answer.get()) for _ in range(50)]
    await asyncio.sleep(0)
    maker.may_end.set()
    assert set(await asyncio.gather(*asking)) == {1}
    assert await answer.get() == maker.made == 1


async def test_it_has_an_age_and_can_be_forgotten() -> None:
    maker = Maker()
    maker.may_end.set()
    old = SharedAnswer(maker.make, 0.0)
    assert [await old.get(), await old.get()] == [1, 2]
    lasting = SharedAnswer(maker.make, 600.0)
    assert [await lasting.get(), await lasting.get()] == [3, 3]
    lasting.forget()
    assert await lasting.get() == 4


async def test_who_hangs_up_takes_it_from_nobody() -> None:
    maker = Maker()
    answer = SharedAnswer(maker.make, 600.0)
    first, second = asyncio.create_task(answer.get()), asyncio.create_task(answer.get())
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    maker.may_end.set()
    assert await second == 1
    assert first.cancelled()


async def test_after_a_failure_it_is_made_anew() -> None:
    maker = Maker()
    maker.may_end.set()
    maker.error = OSError("no file")
    answer = SharedAnswer(maker.make, 600.0)
    for _ in range(2):
        with pytest.raises(OSError, match="no file"):
            await answer.get()
    maker.error = None
    assert await answer.get() == 3
