"""Which prepared media are worth keeping: judged beside a memory that keeps everything, the least recently used going first."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable

from shmring.frontend.media.keeping import Keeping
from tests.tables import for_each

NBYTES = 1 << 20
CAPACITY = 40  # media


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


class Server:
    """So many frontends of an engine, which requests reach at random; one medium each."""

    def __init__(self, frontends: int, *, keeps_all: bool = False) -> None:
        self.frontends = [Keeping(CAPACITY * NBYTES) for _ in range(frontends)]
        self.found = self.given = 0
        self._kept: OrderedDict[int, None] = OrderedDict()
        self._keeps_all = keeps_all
        self._random = random.Random(5)

    def ask(self, numbers: Iterable[int]) -> Server:
        for number in numbers:
            keeping = self._random.choice(self.frontends)
            if number in self._kept:
                self._kept.move_to_end(number)
                self.found += 1
                keeping.found(1)
            elif keeping.prepared(key_of(number), NBYTES) or self._keeps_all:
                self.given += 1
                self._kept[number] = None
                if len(self._kept) > CAPACITY:
                    self._kept.popitem(last=False)
        return self


def in_turn(count: int, requests: int = 8000) -> list[int]:
    return [number % count for number in range(requests)]


def some_popular(popular: int, share: float, requests: int = 8000) -> list[int]:
    """The others come once."""
    chance = random.Random(7)
    return [chance.randrange(popular) if chance.random() < share else 1000 + number for number in range(requests)]


@for_each("frontends", [1, 2, 8])
def test_what_fits_is_kept_at_once(frontends: int) -> None:
    server = Server(frontends).ask(in_turn(CAPACITY))
    assert server.given == CAPACITY
    assert server.found == 8000 - CAPACITY
    assert not any(keeping.is_selective for keeping in server.frontends)


@for_each("frontends", [1, 2, 8])
@for_each("count", [CAPACITY + 5, 2 * CAPACITY, 5 * CAPACITY])
def test_of_more_media_in_turn_than_can_be_kept_some_are_found(frontends: int, count: int) -> None:
    """Where all are kept, none is ever found."""
    assert Server(frontends, keeps_all=True).ask(in_turn(count)).found == 0
    server = Server(frontends).ask(in_turn(count))
    assert server.found > 8000 * CAPACITY / count * 0.4
    assert server.given < 8000 * 0.5


@for_each("frontends", [1, 2, 8])
def test_what_comes_once_is_mostly_left_alone(frontends: int) -> None:
    assert Server(frontends).ask(range(8000)).given < 8000 * 0.2


@for_each("frontends", [1, 2, 8])
@for_each(
    "numbers",
    [some_popular(5, 0.5), some_popular(10, 0.1), [*in_turn(200, 2000), *some_popular(5, 0.5)], [*range(2000), *in_turn(30)]],
    ids=["popular media", "seldom popular media", "media that become popular", "media that come again at last"],
)
def test_hardly_less_is_found_than_if_all_were_kept(numbers: list[int], frontends: int) -> None:
    found = Server(frontends).ask(numbers).found
    assert found >= 0.95 * Server(frontends, keeps_all=True).ask(numbers).found


def selective() -> Keeping:
    """One for which keeping was in vain."""
    keeping = Keeping(CAPACITY * NBYTES)
    for number in range(CAPACITY + 1):
        assert not keeping.is_selective
        assert keeping.prepared(key_of(10**6 + number), NBYTES)
    assert keeping.is_selective
    return keeping


def test_then_what_is_prepared_again_soon_is_kept_and_nothing_else() -> None:
    keeping = selective()
    assert not keeping.prepared(key_of(1), NBYTES)
    for number in range(2, 2 + CAPACITY // 2 - 1):
        assert not keeping.prepared(key_of(number), NBYTES)
    assert keeping.prepared(key_of(1), NBYTES)
    assert not keeping.prepared(key_of(2 + CAPACITY), CAPACITY // 2 * NBYTES)
    assert not keeping.prepared(key_of(2), NBYTES)  # too long ago


def test_after_some_rounds_everything_is_tried_again() -> None:
    keeping = selective()
    passed_over = 0
    for number in range(20 * CAPACITY):
        if keeping.prepared(key_of(number), NBYTES):
            break
        passed_over += 1
    assert passed_over == 8 * (CAPACITY + 1)
    for number in range(passed_over + 1, passed_over + 1 + 3 * CAPACITY):  # and goes on, if it pays now
        keeping.found(1)
        assert keeping.prepared(key_of(number), NBYTES)


def test_what_is_remembered_is_bounded() -> None:
    keeping = Keeping(1 << 40)
    for number in range(10_000):
        keeping.prepared(key_of(number), 1)
    assert len(keeping._recent) == 4096
    assert keeping._recent_nbytes == sum(keeping._recent.values()) == 4096 * 4096


def test_a_medium_that_is_larger_than_all_that_may_be_kept_does_no_harm() -> None:
    keeping = Keeping(4096)
    assert keeping.prepared(key_of(1), 10 * 4096)
    assert not keeping.prepared(key_of(2), 10 * 4096)
    assert keeping.prepared(key_of(2), 10 * 4096)


def test_what_is_prepared_again_is_remembered_once() -> None:
    keeping = Keeping(64 << 20)
    for number in range(30):
        keeping.prepared(b"%d" % (number % 3), 1 << 20)
        assert keeping._recent_nbytes == sum(keeping._recent.values()) == min(number + 1, 3) << 20
