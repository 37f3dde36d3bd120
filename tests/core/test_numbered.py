"""The table of what is in flight, beside a dict."""

from __future__ import annotations

import gc
import random
import weakref

from hypothesis import given
from hypothesis import strategies as st

from shmring.core.compiled import Numbered

# Few, so that they are taken and given again; far apart, so that some have one place in the table.
NUMBERS = st.one_of(st.integers(0, 300), st.integers(0, 300).map(lambda number: (1 << 40) * number), st.integers(0, 2**64 - 1))


class Item:
    """Can be referred to weakly, and refers to anything."""

    table: Numbered


@given(st.lists(st.tuples(st.booleans(), NUMBERS), max_size=400))
def test_it_is_a_dict(steps: list[tuple[bool, int]]) -> None:
    table, beside = Numbered(), dict[int, object]()
    for is_put, number in steps:
        if is_put and number not in beside:
            beside[number] = object()
            table.put(number, beside[number])
        else:
            assert table.take(number) is beside.pop(number, None)
        assert len(table) == len(beside)
        for known in beside:
            assert known in table
            assert table.get(known) is beside[known]
        assert (number in table) == (number in beside)
    assert table.items() == sorted(beside.items(), key=lambda pair: pair[0])
    assert table.values() == [beside[number] for number in sorted(beside)]
    table.clear()
    assert (len(table), table.items()) == (0, [])


def test_others_that_had_the_same_place_are_still_found() -> None:
    chance = random.Random(1)
    table, beside = Numbered(), dict[int, object]()
    for _ in range(5_000):
        if len(beside) < 31:  # more would make it grow, so that hardly any two meet
            number = chance.getrandbits(64)
            beside[number] = object()
            table.put(number, beside[number])
        else:
            for number in chance.sample([*beside], 8):
                assert table.take(number) is beside.pop(number)
        assert table.items() == sorted(beside.items())
        assert all(table.get(number) is item for number, item in beside.items())


def test_numbers_that_count_up_come_and_go() -> None:
    table = Numbered()
    for number in range(10_000):
        table.put(number, str(number))
        if number >= 100:
            assert table.take(number - 100) == str(number - 100)
    assert [number for number, _ in table.items()] == [*range(9_900, 10_000)]


def test_what_a_table_does_not_have_is_looked_for_up_to_an_empty_entry() -> None:
    table = Numbered()
    for number in range(1_000):
        table.put(number, number)
        assert table.get(number + 1_000) is None


def test_it_lets_go_of_what_it_has() -> None:
    item = Item()
    gone = weakref.ref(item)
    table = Numbered()
    table.put(1, item)
    del item
    assert gone() is not None
    del table
    assert gone() is None


def test_cycles_through_it_are_collected() -> None:
    item = Item()
    item.table = Numbered()
    item.table.put(1, item)
    gone = weakref.ref(item)
    del item
    gc.collect()
    assert gone() is None
