"""Encoder outputs through a real store: kept by one worker, found by a scheduler, loaded by others; and vLLM goes on where the
store is missing, silent, full or gone, and says so once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring import threads
from shmring.integrations.vllm import encoder_store
from shmring.integrations.vllm.encoder_keys import EncoderKeys
from shmring.integrations.vllm.encoder_scheduler import Load, Step
from shmring.integrations.vllm.encoder_settings import EncoderSettings
from shmring.integrations.vllm.encoder_store import EncoderStore
from shmring.integrations.vllm.encoder_worker import WorkerHalf
from tests.stores import end_stores, store_pids
from tests.vllm.made_up_configuration import configuration
from tests.waiting import until

ROWS, WIDTH = 64, 512  # 64 KB
CPU = torch.device("cpu")
Cache = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_store, "_CONNECT_S", 0.1)
    monkeypatch.setattr(encoder_store, "_LOOK_S", 0.05)


@pytest.fixture
def settings(socket_dir: Path) -> EncoderSettings:
    return EncoderSettings(store="ec", socket_dir=str(socket_dir), wait_s=0.05)


@pytest.fixture
def serve(socket_dir: Path) -> Callable[..., threads.Ring]:
    def start(kept_nbytes: str = "3MiB") -> threads.Ring:
        return threads.serve(
            "ec", slab_nbytes="4MiB", reply_nbytes="64KiB", kept_nbytes=kept_nbytes, socket_dir=str(socket_dir)
        )

    return start


@pytest.fixture
def ring(serve: Callable[..., threads.Ring]) -> Iterator[threads.Ring]:
    with serve() as ring:
        yield ring


@pytest.fixture
def make(settings: EncoderSettings) -> Iterator[Callable[..., WorkerHalf]]:
    """``make(keep=True)``: a worker's half with a client of its own."""
    made: list[WorkerHalf] = []

    def start(settings: EncoderSettings = settings, *, keep: bool = False, **options: Any) -> WorkerHalf:
        store = EncoderStore.create(settings, "a worker", use="keep" if keep else "load")
        keys = EncoderKeys(configuration(), settings, "0.32.0")
        made.append(WorkerHalf(store, keys, device=CPU, keep=keep, **options))
        return made[-1]

    yield start
    for worker in made:
        worker._store.close()


def output(number: int, rows: int = ROWS) -> torch.Tensor:
    return torch.full((rows, WIDTH), number, dtype=torch.bfloat16)


def name(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


def save(worker: WorkerHalf, *numbers: int) -> Cache:
    cache = {name(number): output(number) for number in numbers}
    for identifier in cache:
        worker.save(cache, identifier)
    return cache


def step(*numbers: int, number: int = 1, rows: int = ROWS, has_input: bool = True) -> Step:
    loads = [Load(name(each), "r", place, rows, has_input) for place, each in enumerate(numbers)]
    return Step(number, loads, encoded={} if loads else None)


def loaded(worker: WorkerHalf, *numbers: int) -> tuple[list[int], Any]:
    """Which of these a step puts into an empty cache, and what it has encoded."""
    cache: Cache = {}
    message = step(*numbers)
    assert worker.load(cache, message) == message.number
    for number in numbers:
        assert name(number) not in cache or torch.equal(cache[name(number)], output(number))
    return [number for number in numbers if name(number) in cache], message.encoded


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage() for record in caplog.records if record.name == "vllm.shmring" and record.levelno >= logging.WARNING
    ]


def test_what_one_worker_keeps_another_loads_where_it_lies(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    encoder, reader = make(keep=True), make()
    save(encoder, 1, 2)
    until(lambda: ring.statistics().kept == 2)
    cache: Cache = {}
    message = step(1, 2, 3)
    assert reader.load(cache, message) == 1
    assert [torch.equal(cache[name(each)], output(each)) for each in (1, 2)] == [True, True]
    assert message.encoded == {"r": [2]}, "what is not there is encoded"
    assert ring.statistics().kept_pinned == 2, "vLLM's cache views it"
    del cache[name(1)]
    until(lambda: ring.statistics().kept_pinned == 1)
    cache.clear()
    until(lambda: ring.statistics().kept_pinned == 0)


def test_a_step_without_loads_says_nothing(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    cache: Cache = {}
    assert make().load(cache, step()) is None
    assert cache == {}


def test_what_vllms_cache_has_is_not_loaded_again(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    encoder, reader = make(keep=True), make()
    save(encoder, 1)
    until(lambda: ring.statistics().kept == 1)
    own = output(1)
    cache = {name(1): own}
    assert reader.load(cache, step(1)) == 1
    assert cache[name(1)] is own


def test_a_worker_that_keeps_nothing_gives_nothing(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    save(make(), 1)
    encoder = make(keep=True)
    save(encoder, 2)
    until(lambda: ring.statistics().kept == 1)


def test_a_counted_identifier_is_neither_kept_nor_looked_for(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    counted = "renderer0-mm-1-image-0"
    encoder, reader = make(keep=True), make()
    encoder.save({counted: output(7)}, counted)
    save(encoder, 1)
    until(lambda: ring.statistics().kept == 1)
    message = step(1)
    message.loads.insert(0, Load(counted, "s", 5, ROWS, True))
    cache: Cache = {}
    reader.load(cache, message)
    assert list(cache) == [name(1)]
    assert message.encoded == {"s": [5]}


def test_an_output_of_another_shape_is_not_used(
    ring: threads.Ring, make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    encoder, reader = make(keep=True), make()
    save(encoder, 1, 2)
    until(lambda: ring.statistics().kept == 2)
    cache: Cache = {}
    message = step(1, 2, rows=ROWS + 1)
    reader.load(cache, message)
    assert (cache, message.encoded) == ({}, {"r": [0, 1]})
    (said,) = warnings(caplog)
    assert "has the shape (64, 512), and not 65 rows" in said
    until(lambda: ring.statistics().kept_pinned == 0)


def test_a_strided_output_is_kept_as_it_is_read(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    encoder, reader = make(keep=True), make()
    wide = torch.arange(ROWS * WIDTH * 2, dtype=torch.float32).view(ROWS, WIDTH * 2)[:, ::2]
    encoder.save({name(1): wide}, name(1))
    until(lambda: ring.statistics().kept == 1)
    cache: Cache = {}
    reader.load(cache, step(1))
    assert torch.equal(cache[name(1)], wide)


def test_copies_to_a_device_are_made_once_and_their_sources_held(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    """The device is torch's ``meta``, to which nothing is copied."""
    held: list[torch.Tensor] = []
    encoder, reader = make(keep=True), make(hold=held.append)
    reader._device = torch.device("meta")
    save(encoder, 1)
    until(lambda: ring.statistics().kept == 1)
    cache: Cache = {}
    reader.load(cache, step(1))
    assert cache[name(1)].device.type == "meta"
    assert torch.equal(held[0], output(1))
    cache.clear()
    assert ring.statistics().kept_pinned == 1, "the copy may be under way"
    held.clear()
    until(lambda: ring.statistics().kept_pinned == 0)


def test_what_one_of_several_workers_cant_load_all_of_them_encode(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    told: list[list[bool]] = []

    def agree(have: list[bool]) -> list[bool]:
        told.append(have)
        return [True, False, False]

    encoder, reader = make(keep=True), make(agree=agree)
    save(encoder, 1, 2)
    until(lambda: ring.statistics().kept == 2)
    message, cache = step(1, 2, 3), Cache()
    reader.load(cache, message)
    assert told == [[True, True, False]]
    assert ([*cache], message.encoded) == ([name(1)], {"r": [1, 2]})
    until(lambda: ring.statistics().kept_pinned == 1)


def test_what_the_store_has_lost_is_kept_again_when_a_request_comes_with_it(
    serve: Callable[..., threads.Ring], make: Callable[..., WorkerHalf]
) -> None:
    with serve("200KiB") as ring:  # for two
        encoder = make(keep=True)
        cache = save(encoder, 1, 2)
        until(lambda: ring.statistics().kept == 2)
        cache |= save(encoder, 3)
        until(lambda: ring.statistics().kept_evictions == 1)
        encoder.save_again(cache, Step(1, seen=[name(3), name(9)]))
        until(lambda: ring.statistics().kept_pinned == 0)
        assert ring.statistics().kept_evictions == 1, "the one is there, the other is not this worker's"
        encoder.save_again(cache, Step(2, seen=[name(1), name(3)]))
        until(lambda: ring.statistics().kept_evictions == 2)
        assert loaded(make(), 1, 2, 3)[0] == [1, 3]


# -- where something is wrong ------------------------------------------------------------------------------------------------


def test_without_a_store_everything_is_encoded_and_the_log_says_so_once(
    settings: EncoderSettings, make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make(keep=True)
    for _ in range(3):
        cache = save(worker, 1)
        worker.save_again(cache, Step(1, seen=[name(1)]))
        assert loaded(worker, 1) == ([], {"r": [0]})
    (said,) = warnings(caplog)
    assert "the store 'ec' is not there, so encoders work as without it" in said


def test_a_store_that_comes_later_is_used(
    serve: Callable[..., threads.Ring], make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    encoder, reader = make(keep=True), make()
    assert loaded(reader, 1) == ([], {"r": [0]})
    with serve() as ring:
        until(lambda: encoder._store.connected and reader._store.connected)
        save(encoder, 1)
        until(lambda: ring.statistics().kept == 1)
        assert loaded(reader, 1) == ([1], {})


def test_a_store_that_goes_and_one_that_comes_after_it(
    serve: Callable[..., threads.Ring], make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    encoder, reader = make(keep=True), make()
    cache: Cache = {}
    for life in range(2):
        with serve() as ring:
            until(lambda: encoder._store.connected and reader._store.connected)
            assert loaded(reader, 1) == ([], {"r": [0]}), "the next one is empty"
            save(encoder, 1)
            until(lambda: ring.statistics().kept == 1)
            cache = {}
            reader.load(cache, step(1))
        until(lambda: not encoder._store.connected and not reader._store.connected)
        assert torch.equal(cache[name(1)], output(1)), f"what was loaded stays, in life {life}"
        for _ in range(3):
            save(encoder, 2)
            assert loaded(reader, 1, 2) == ([], {"r": [0, 1]})
    assert len(warnings(caplog)) <= 6  # of two workers: before the first life, and behind each


def test_a_load_that_can_be_neither_loaded_nor_encoded_is_an_error(ring: threads.Ring, make: Callable[..., WorkerHalf]) -> None:
    with pytest.raises(RuntimeError, match="request r came without the medium itself"):
        make().load({}, step(1, has_input=False))


def test_where_all_content_is_in_use_an_output_is_not_kept_and_the_log_says_so_once(
    serve: Callable[..., threads.Ring], make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    with serve("200KiB") as ring:  # for two
        encoder, reader = make(keep=True), make()
        save(encoder, 1, 2)
        until(lambda: ring.statistics().kept == 2)
        cache: Cache = {}
        reader.load(cache, step(1, 2))
        for number in (3, 4, 5):
            save(encoder, number)
        until(lambda: ring.statistics().kept_refusals == 3)
        encoder._store._settle()
        until(lambda: warnings(caplog) or encoder._store._settle())
        (said,) = warnings(caplog)
        assert "an encoder output of 65536 bytes is not kept" in said
        cache.clear()
        until(lambda: ring.statistics().kept_pinned == 0)
        save(encoder, 6)
        until(lambda: ring.statistics().kept_evictions == 1)


def test_an_output_that_can_never_fit_is_not_kept_and_the_log_says_so_once(
    ring: threads.Ring, make: Callable[..., WorkerHalf], caplog: pytest.LogCaptureFixture
) -> None:
    encoder = make(keep=True)
    for number in range(2):
        encoder.save({"a": torch.zeros(8 << 20, 1, dtype=torch.uint8)}, "a")
        save(encoder, number)
    until(lambda: ring.statistics().kept == 2)
    (said,) = warnings(caplog)
    assert "an encoder output of 8388608 bytes is not kept" in said


def test_a_store_that_does_not_answer_costs_one_bounded_wait_a_second(
    settings: EncoderSettings, ring: threads.Ring, caplog: pytest.LogCaptureFixture
) -> None:
    now_s = 0.0
    store = EncoderStore(settings, "a scheduler", use="look", now=lambda: now_s)
    store._thread.start()
    until(lambda: store.connected)
    client = store._client
    asked: list[float] = []

    class Silent:
        """The client, whose engine reads nothing."""

        connected = True
        lost_error = None

        def find_many(self, keys: list[bytes], timeout: float) -> list[Any]:
            asked.append(timeout)
            raise TimeoutError("no answer")

    store._client = Silent()  # type: ignore[assignment]
    for _ in range(5):
        assert store.find([bytes(32)], 0.05) == [None]
    assert asked == [0.05]
    now_s = 1.5
    assert store.find([bytes(32)], 0.05) == [None]
    assert asked == [0.05, 0.05]
    (said,) = warnings(caplog)
    assert "the store 'ec' does not answer, so encoders work as without it" in said
    store._client = client
    now_s = 3.0
    assert store.find([bytes(32)], 5.0) == [None]
    assert store._said == set()
    store.close()


def test_a_store_is_started_if_that_is_asked_for_and_started_again(socket_dir: Path, make: Callable[..., WorkerHalf]) -> None:
    settings = EncoderSettings(store="own", start=True, slab=16 << 20, socket_dir=str(socket_dir))
    encoder, reader = make(settings, keep=True), make(settings)
    try:
        save(encoder, 1)
        assert until(lambda: loaded(reader, 1)[0] == [1])
        first = store_pids(socket_dir)
        end_stores(socket_dir)
        until(lambda: {*store_pids(socket_dir)} - {*first} and encoder._store.connected and reader._store.connected)
        save(encoder, 2)
        assert until(lambda: loaded(reader, 2)[0] == [2])
    finally:
        for worker in (encoder, reader):  # or they would start the next one
            worker._store.close()
            worker._store._thread.join()
        end_stores(socket_dir)
