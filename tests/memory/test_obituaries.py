"""Deaths of what stands for a GPU's memory: noticed on any thread, told in the loop, once, and to those only who asked."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from shmring.gpu.obituaries import Obituaries


@pytest.fixture(autouse=True)
def without_collections() -> Iterator[None]:
    """What is watched dies by reference counting: nothing here may need the cyclic collector."""
    gc.disable()
    yield
    gc.enable()


def watchable() -> NDArray[np.uint8]:
    return np.zeros(8, np.uint8)


def test_a_death_on_another_thread_is_noticed_there_and_collected_here() -> None:
    woken_on: list[int] = []
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: woken_on.append(threading.get_ident()))
    held = [watchable()]
    obituaries.watch(1, held[0])
    obituaries.expect(1)
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert woken_on == [thread.ident]
    assert obituaries.collect() == [1]
    assert obituaries.collect() == []


def test_a_key_can_be_watched_again_after_its_death_and_the_old_death_is_not_the_new_ones() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    first = watchable()
    obituaries.watch(1, first)
    obituaries.expect(1)
    del first
    second = watchable()
    obituaries.watch(1, second)
    obituaries.expect(1)
    assert obituaries.collect() == [], "the death of the first is not that of the second"
    assert obituaries.watched(1) is second
    del second
    assert obituaries.collect() == [1]


def test_two_living_objects_of_one_key_are_our_own_bug() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    first = watchable()
    obituaries.watch(1, first)
    with pytest.raises(AssertionError, match="watched already"):
        obituaries.watch(1, watchable())


def test_what_is_forgotten_has_no_obituary() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    living, dying = watchable(), watchable()
    for key, value in ((1, living), (2, dying)):
        obituaries.watch(key, value)
        obituaries.expect(key)
    del dying, value
    obituaries.forget(1)
    obituaries.forget(2)
    obituaries.forget(3)
    del living
    assert obituaries.collect() == []
    assert len(obituaries) == 0


def test_deaths_are_told_in_order_and_only_of_the_dead() -> None:
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    objects = {key: watchable() for key in range(5)}
    for key, value in objects.items():
        obituaries.watch(key, value)
        obituaries.expect(key)
    del value
    del objects[3], objects[1]
    assert obituaries.living() == [0, 2, 4]
    assert obituaries.collect() == [3, 1]
    assert len(obituaries) == 3


def test_only_expected_deaths_wake_and_one_that_has_happened_is_told_at_once() -> None:
    wakes: list[int] = []
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: wakes.append(1))
    held = watchable()
    obituaries.watch(1, held)
    del held
    assert wakes == []
    assert obituaries.collect() == []
    obituaries.expect(1)
    assert wakes == [1]
    assert obituaries.collect() == [1]
    assert len(obituaries) == 0


def test_a_death_at_the_very_moment_at_which_it_is_expected_is_told_once() -> None:
    """The thread on which it dies, and the one that expects it, may both report it."""
    obituaries: Obituaries[int, NDArray[np.uint8]] = Obituaries(lambda: None)
    for _ in range(200):
        held = [watchable()]
        obituaries.watch(1, held[0])
        thread = threading.Thread(target=held.clear)
        thread.start()
        obituaries.expect(1)
        thread.join()
        assert obituaries.collect() == [1]
        assert obituaries.collect() == []
