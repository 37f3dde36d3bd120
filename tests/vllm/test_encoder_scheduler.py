"""The scheduler's half of the connector for encoder outputs: stories of what is looked up, pinned, loaded and let go.

The store is made up here, and counts what is asked and pinned; tests/vllm/test_encoder_store.py has a real one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from shmring.integrations.vllm.encoder_scheduler import SchedulerHalf

ROWS = 16


class Store:
    """Has outputs; what it was asked, and which of them are pinned how often."""

    def __init__(self, *identifiers: str) -> None:
        self.has = set(identifiers)
        self.asked: list[list[str]] = []
        self.pinned: list[str] = []

    def find(self, identifiers: Sequence[str]) -> list[Any]:
        self.asked.append([*identifiers])
        self.pinned += [each for each in identifiers if each in self.has]
        return [Content(self, each) if each in self.has else None for each in identifiers]


@dataclasses.dataclass
class Content:
    store: Store
    identifier: str

    def close(self) -> None:
        self.store.pinned.remove(self.identifier)


def request(name: str, *identifiers: str, announced: bool = False, data: Any = "pixels") -> Any:
    """As vLLM's: each medium stands behind the one before."""
    features = [
        SimpleNamespace(
            identifier=identifier,
            data=data,
            mm_position=SimpleNamespace(offset=20 * place, length=ROWS, get_num_embeds=lambda: ROWS),
        )
        for place, identifier in enumerate(identifiers)
    ]
    params = {each: {} for each in identifiers} if announced else None
    return SimpleNamespace(request_id=name, mm_features=features, ec_transfer_params=params)


class Scheduler:
    """Does what vLLM's does in a step, with the half that is tested."""

    def __init__(self, store: Store | None, *, keeps: bool = False) -> None:
        find = None if store is None else store.find
        self.half = SchedulerHalf(find, keeps=keeps, has_input=lambda feature: feature.data == "pixels")
        self.cached: set[str] = set()

    def step(self, *requests: Any, computed: int = 0, fits: bool = True, freed: Sequence[str] = ()) -> Any:
        """Schedules requests; those that do not fit are asked about, and get no place. Returns the message."""
        encoded: dict[str, list[int]] = {}
        self.cached.difference_update(freed)
        for each in requests:
            if not self.half.is_ready(each, computed):
                continue
            for index, feature in enumerate(each.mm_features):
                if feature.identifier in self.cached:
                    continue
                is_elsewhere = self.half.has(feature.identifier)
                if fits:
                    self.cached.add(feature.identifier)
                    self.half.allocated(each, index)
                    if not is_elsewhere:
                        encoded.setdefault(each.request_id, []).append(index)
        output = SimpleNamespace(
            free_encoder_mm_hashes=[*freed], scheduled_new_reqs=[*requests], scheduled_encoder_inputs=encoded
        )
        message = self.half.next_step(output)
        assert message.encoded is (encoded if message.loads else None), "a worker has encoded what it can't load"
        self.encoded = encoded
        return message


def loads(message: Any) -> list[tuple[str, str, int]]:
    return [(load.identifier, load.request_id, load.index) for load in message.loads]


def test_what_is_there_is_loaded_and_the_rest_is_encoded_after_one_look_up() -> None:
    store = Store("a", "c")
    scheduler = Scheduler(store)
    message = scheduler.step(request("r", "a", "b", "c"))
    assert loads(message) == [("a", "r", 0), ("c", "r", 2)]
    assert scheduler.encoded == {"r": [1]}
    assert store.asked == [["a", "b", "c"]]
    assert [load.rows for load in message.loads] == [ROWS, ROWS]


def test_a_pin_outlives_the_step_until_the_workers_have_answered_and_no_longer() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    message = scheduler.step(request("r", "a"))
    for _ in range(5):
        scheduler.step()
        assert store.pinned == ["a"]
    scheduler.half.answered(message.number)
    assert store.pinned == []
    scheduler.half.answered(message.number)  # once more changes nothing


def test_a_request_that_ends_before_the_answer_takes_no_pin_along() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    asked = request("r", "a")
    message = scheduler.step(asked)
    scheduler.half.ended(asked)
    assert store.pinned == ["a"]
    scheduler.half.answered(message.number)
    assert store.pinned == []


def test_an_output_that_is_loaded_twice_is_pinned_until_the_last_answer() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    first = scheduler.step(request("r", "a"))
    second = scheduler.step(request("s", "a"), freed=["a"])
    assert loads(second) == [("a", "s", 0)]
    assert store.asked == [["a"]], "it was pinned"
    scheduler.half.answered(first.number)
    assert store.pinned == ["a"]
    scheduler.half.answered(second.number)
    assert store.pinned == []


def test_an_answer_that_comes_while_it_is_loaded_again_takes_no_pin() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    first = scheduler.step(request("r", "a"))
    again = request("s", "a")
    scheduler.cached.clear()
    assert scheduler.half.is_ready(again, 0)
    assert scheduler.half.has("a")
    scheduler.half.allocated(again, 0)
    scheduler.half.answered(first.number)
    assert store.pinned == ["a"]
    second = scheduler.step()
    assert loads(second) == [("a", "s", 0)]
    scheduler.half.answered(second.number)
    assert store.pinned == []


def test_what_waits_for_a_place_is_not_looked_up_in_each_step() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    waiting = request("r", "a")
    for _ in range(30):
        scheduler.step(waiting, fits=False)
        assert store.pinned == ["a"]
    assert store.asked == [["a"]]
    assert loads(scheduler.step(waiting)) == [("a", "r", 0)]


@pytest.mark.parametrize("ends", [True, False], ids=["the request ends", "nobody asks any more"])
def test_what_was_found_and_is_not_used_is_let_go(ends: bool) -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    waiting = request("r", "a")
    scheduler.step(waiting, fits=False)
    if ends:
        scheduler.half.ended(waiting)
    else:
        for _ in range(20):
            scheduler.step()
    assert store.pinned == []


def test_where_no_answer_comes_the_pin_goes_in_the_end() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    scheduler.step(request("r", "a"))
    for _ in range(100):
        scheduler.step()
    assert store.pinned == []


def test_what_is_not_there_is_asked_for_once_in_a_step_and_again_in_the_next() -> None:
    store = Store()
    scheduler = Scheduler(store)
    scheduler.step(request("r", "a"), request("s", "a"), fits=False)
    assert store.asked == [["a"]]
    store.has.add("a")
    message = scheduler.step(request("r", "a"), request("s", "a"))
    assert loads(message) == [("a", "r", 0)], "two requests of a step load it once"
    assert store.asked == [["a"], ["a"]]


def test_what_comes_while_it_is_being_encoded_is_not_loaded_as_well() -> None:
    store = Store()
    scheduler = Scheduler(store)
    asked = request("r", "a")
    assert scheduler.half.is_ready(asked, 0)
    assert not scheduler.half.has("a")
    store.has.add("a")
    scheduler.half.allocated(asked, 0)
    assert loads(scheduler.step()) == []
    assert store.pinned == []


def test_what_vllms_own_cache_has_is_not_looked_up() -> None:
    store = Store("a", "b")
    scheduler = Scheduler(store)
    scheduler.step(request("r", "a"))
    scheduler.step(request("s", "a", "b"))
    assert store.asked == [["a"], ["b"]]


def test_media_before_the_tokens_that_are_computed_already_are_not_looked_up() -> None:
    store = Store("a", "b")
    scheduler = Scheduler(store)
    assert scheduler.half.is_ready(request("r", "a", "b"), 20)
    assert store.asked == [["b"]]


@pytest.mark.parametrize(
    ("has", "announced", "data", "fails"),
    [
        ((), True, None, True),
        ((), True, "only its size", True),
        ((), True, "pixels", False),
        (("a",), True, None, False),
        ((), False, "only its size", False),
    ],
    ids=["nothing", "size", "pixels", "in the store", "not announced"],
)
def test_a_request_without_pixels_fails_where_the_output_is_nowhere(
    has: tuple[str, ...], announced: bool, data: Any, fails: bool
) -> None:
    store = Store(*has)
    scheduler = Scheduler(store)
    asked = request("r", "a", announced=announced, data=data)
    assert scheduler.half.is_ready(asked, 0) is not fails
    assert scheduler.half.unavailable() == ({"r"} if fails else set())
    assert scheduler.half.unavailable() == set()


def test_a_request_without_pixels_does_not_fail_while_vllms_own_cache_has_the_output() -> None:
    store = Store("a")
    scheduler = Scheduler(store)
    first = scheduler.step(request("r", "a", announced=True, data=None))
    scheduler.half.answered(first.number)
    store.has.clear()
    assert scheduler.half.is_ready(request("s", "a", announced=True, data=None), 0)
    scheduler.step(freed=["a"])
    assert not scheduler.half.is_ready(request("t", "a", announced=True, data=None), 0)


def test_workers_hear_whether_what_they_cant_load_can_be_encoded() -> None:
    scheduler = Scheduler(Store("a", "b"))
    message = scheduler.step(request("r", "a"), request("s", "b", announced=True, data="only its size"))
    assert [load.has_input for load in message.loads] == [True, False]


def test_an_instance_that_only_encodes_looks_nothing_up_and_says_what_its_requests_have() -> None:
    scheduler = Scheduler(None, keeps=True)
    message = scheduler.step(request("r", "b", "a"))
    assert (message.loads, message.seen, scheduler.encoded) == ([], ["a", "b"], {"r": [0, 1]})
    assert scheduler.step().seen == []
    assert Scheduler(Store()).step(request("r", "a")).seen == []


def test_closing_gives_all_pins_back() -> None:
    store = Store("a", "b")
    scheduler = Scheduler(store)
    scheduler.step(request("r", "a"))
    scheduler.step(request("s", "b"), fits=False)
    scheduler.half.close()
    assert store.pinned == []
