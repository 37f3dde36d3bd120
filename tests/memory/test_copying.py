"""Copies past the cache and into it: every width of stores, every alignment, with helpers or without, and not a byte beside."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from shmring.memory import _copying, copying
from shmring.memory.copying import cache_nbytes, copy_into_cache, copy_past_cache, last_level_cache_nbytes
from shmring.memory.tensors import make_packer
from tests.tables import for_each

Copy = Callable[[int, int, int], object]

streams = pytest.mark.skipif(_copying.WIDTH == 0, reason="this processor has no streaming stores")
helped = pytest.mark.skipif(_copying.limit_helpers(3) == 0, reason="there is one core, and nobody to help")
both_ways = pytest.mark.parametrize("copy", [copy_past_cache, copy_into_cache])

MIB = 1 << 20
PIECE = 256 << 10


@pytest.fixture
def width(request: pytest.FixtureRequest) -> Iterator[int]:
    yield _copying.limit_width(request.param)
    _copying.limit_width(64)


def check(copy: Copy, nbytes: int) -> None:
    """Copies from and to addresses of every kind."""
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 256, np.uint8)
    target = np.empty(nbytes + 512, np.uint8)
    aligned = -int(target.ctypes.data) % 64 + 64
    for to in (0, 1, 17, 32, 63):
        for start in (0, 1, 16, 33, 63):
            target[:] = 0xAA
            copy(int(target.ctypes.data) + aligned + to, int(source.ctypes.data) + start, nbytes)
            written = slice(aligned + to, aligned + to + nbytes)
            np.testing.assert_array_equal(target[written], source[start : start + nbytes])
            target[written] = 0xAA
            assert (target == 0xAA).all(), (to, start)


SIZES = for_each("nbytes", [0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000, 2047, 2048, 2049, 2112, 4096, 100_001])


@streams
@pytest.mark.parametrize("width", [16, 32, 64], indirect=True)
@SIZES
def test_what_is_copied_past_the_cache_is_the_same_and_nothing_beside_it_changes(width: int, nbytes: int) -> None:
    check(_copying.copy_past_cache, nbytes)


@SIZES
def test_what_is_copied_into_the_cache_is_the_same_and_nothing_beside_it_changes(nbytes: int) -> None:
    check(_copying.copy_into_cache, nbytes)


@streams
def test_stores_are_as_wide_as_the_processor_allows() -> None:
    assert _copying.WIDTH in (16, 32, 64)
    assert _copying.limit_width(16) == 16
    assert _copying.limit_width(1 << 20) == _copying.WIDTH


@both_ways
@for_each("arguments", [(0, 0, -1), (0, 0), ("a", 0, 0), (0, 0, 1 << 70)])
def test_what_is_no_copy_is_refused(copy: Callable[..., None], arguments: tuple[object, ...]) -> None:
    with pytest.raises((ValueError, TypeError, OverflowError)):
        copy(*arguments)


def test_what_a_cache_holds_is_what_the_kernel_says_and_no_more_than_one_process_gets(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < cache_nbytes() <= last_level_cache_nbytes()
    monkeypatch.setattr(copying, "last_level_cache_nbytes", lambda: 480 * MIB)
    assert cache_nbytes() == 32 * MIB
    monkeypatch.setattr(copying, "last_level_cache_nbytes", lambda: 8 * MIB)
    assert cache_nbytes() == 8 * MIB


# -- the quicker way ---------------------------------------------------------------------------------------------------------


def ways_of(times: int, nbytes: int = 4 * MIB, into: int = 0, past: int = 0) -> tuple[int, int]:
    """Copies into the cache, each time as if both ways had taken so long before; returns how many went there, and past it."""
    source, target = np.arange(nbytes, dtype=np.uint8), np.zeros(nbytes, np.uint8)
    into_before, past_before = _copying.long_copies()
    for _ in range(times):
        if into:
            _copying.pretend(into, past)
            into_before, past_before = into_before + 4, past_before + 4
        target[:] = 0
        copy_into_cache(int(target.ctypes.data), int(source.ctypes.data), nbytes)
        assert np.array_equal(source, target)
    into_after, past_after = _copying.long_copies()
    return into_after - into_before, past_after - past_before


@pytest.mark.parametrize(
    ("into", "past", "goes_past"),
    [
        pytest.param(100, 200, False, id="the cache is quicker"),
        pytest.param(100, 81, False, id="streaming is hardly quicker"),
        pytest.param(100, 79, True, id="streaming is a quarter quicker"),
    ],
)
def test_a_long_copy_goes_past_the_cache_while_that_is_a_good_deal_quicker(into: int, past: int, goes_past: bool) -> None:
    counts = ways_of(65, into=into, past=past)  # 65 x 9 copies, of which every 32nd looks at the other way
    assert counts in [(rest, 65 - rest) if goes_past else (65 - rest, rest) for rest in (2, 3)]


def test_a_copy_that_is_not_long_goes_into_the_cache() -> None:
    _copying.pretend(100, 10)
    before = _copying.long_copies()
    assert ways_of(8, nbytes=4 * MIB - 1) == (0, 0)
    assert _copying.long_copies() == before


def test_a_process_tries_both_ways_first() -> None:
    in_a_process("""
    target = np.zeros_like(source)
    for both in [(1, 0), (1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3), (4, 4)]:
        _copying.copy_into_cache(int(target.ctypes.data), int(source.ctypes.data), source.nbytes)
        assert _copying.long_copies() == both, _copying.long_copies()
    assert np.array_equal(source, target)
    """)


# -- helpers -------------------------------------------------------------------------------------------------------------


@helped
@both_ways
def test_nobody_writes_any_more_when_a_long_copy_returns(copy: Copy) -> None:
    source, target = np.zeros(8 * MIB, np.uint8), np.empty(8 * MIB, np.uint8)
    ends = target[PIECE - 1 :: PIECE][-4:]
    helped_turns = 0
    for turn in range(5000):
        before = _copying.pieces_helped()
        copy(int(target.ctypes.data), int(source.ctypes.data), 8 * MIB)
        ends[:] = 0x55  # before a helper that is still at a piece could come there
        assert not target[: -4 * PIECE].any()
        assert (ends == 0x55).all(), turn
        helped_turns += _copying.pieces_helped() > before
        if helped_turns >= 300:
            return
    assert helped_turns, "nobody helped"


@helped
@both_ways
def test_a_long_copy_is_whole_when_it_returns_whoever_made_it(copy: Copy) -> None:
    before = _copying.pieces_helped()
    nbytes = 16 * MIB + 12_345
    source = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    target = np.empty(nbytes + 128, np.uint8)
    for turn in range(200):
        target[:] = 0xAA
        copy(int(target.ctypes.data) + 64, int(source.ctypes.data), nbytes)
        assert np.array_equal(target[64 : 64 + nbytes], source), turn
        assert (target[:64] == 0xAA).all()
        assert (target[64 + nbytes :] == 0xAA).all()
        if turn >= 20 and _copying.pieces_helped() > before:
            return
    pytest.fail("nobody helped with 200 copies")


@both_ways
def test_short_copies_and_those_that_nobody_may_help_with_are_made_alone(copy: Copy) -> None:
    source, target = np.ones(8 * MIB, np.uint8), np.zeros(8 * MIB, np.uint8)
    before = _copying.pieces_helped()
    for _ in range(20):
        copy(int(target.ctypes.data), int(source.ctypes.data), 4 * MIB - 1)
    assert _copying.limit_helpers(0) == 0
    try:
        copy(int(target.ctypes.data), int(source.ctypes.data), 8 * MIB)
    finally:
        _copying.limit_helpers(3)
    assert _copying.pieces_helped() == before
    assert target.all()


def test_several_threads_copy_at_a_time_and_one_of_them_has_help() -> None:
    wrong: list[int] = []

    def run(number: int) -> None:
        source = np.random.default_rng(number).integers(0, 256, 9 * MIB, np.uint8)
        for turn in range(12):
            target = np.zeros(9 * MIB, np.uint8)
            copy = copy_past_cache if turn % 2 else copy_into_cache
            copy(int(target.ctypes.data), int(source.ctypes.data), 9 * MIB)
            if not np.array_equal(source, target):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def in_a_process(script: str) -> None:
    head = """
    import os, signal, sys
    import numpy as np
    from shmring.memory import _copying
    MIB = 1 << 20
    source = np.random.default_rng(1).integers(0, 256, 16 * MIB, np.uint8)
    def copy(turns=1):
        for _ in range(turns):
            target = np.zeros(16 * MIB, np.uint8)
            _copying.copy_past_cache(int(target.ctypes.data), int(source.ctypes.data), 16 * MIB)
            assert np.array_equal(source, target)
    def copy_until_helped():
        before = _copying.pieces_helped()
        for _ in range(500):
            copy()
            if _copying.pieces_helped() > before:
                return
        sys.exit("nobody helped")
    """
    program = textwrap.dedent(head) + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@helped
def test_a_forked_child_has_helpers_of_its_own() -> None:
    in_a_process("""
    copy_until_helped()
    for _ in range(5):
        child = os.fork()
        if not child:
            copy_until_helped()
            os._exit(0)
        copy(3)
        assert os.waitpid(child, 0)[1] == 0
    copy_until_helped()
    """)


@helped
def test_helpers_take_no_signals() -> None:
    in_a_process("""
    copy_until_helped()
    main = os.getpid()
    masks = {}
    for task in os.listdir("/proc/self/task"):
        status = open(f"/proc/self/task/{task}/status").read()
        masks[int(task)] = int(status.split("SigBlk:")[1].split()[0], 16)
    signals = [1 << (number - 1) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGCHLD)]
    ours = masks.pop(main)
    assert not any(ours & bit for bit in signals)
    assert masks, "no helper"
    helper = [mask for mask in masks.values() if all(mask & bit for bit in signals)]
    assert helper, masks
    assert not helper[0] & 1 << (signal.SIGSEGV - 1), "a fault would end the process without a word"
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, [])
    """)


def test_who_has_one_core_has_no_helpers() -> None:
    in_a_process("""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    assert _copying.limit_helpers(3) == 0
    before = len(os.listdir("/proc/self/task"))
    copy(10)
    assert _copying.pieces_helped() == 0
    assert len(os.listdir("/proc/self/task")) == before
    """)


@helped
def test_who_gets_one_core_later_has_no_helpers_any_more() -> None:
    in_a_process("""
    copy_until_helped()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    before = _copying.pieces_helped()
    copy(20)
    assert _copying.pieces_helped() == before
    """)


@for_each("large_nbytes", [MIB, 5 * MIB])
@for_each("processor_streams", [True, False])
def test_a_payload_arrives_with_and_without_streaming_stores(processor_streams: bool, large_nbytes: int) -> None:
    assert _copying.limit_width(64 if processor_streams else 0) == (_copying.WIDTH if processor_streams else 0)
    large = torch.arange(large_nbytes // 4 + 3, dtype=torch.int32)
    payload = {"large": large, "view": large[1::2], "odd": torch.arange(77, dtype=torch.uint8), "array": np.arange(1001)}
    packed = make_packer(16, 1 << 16).pack(payload, 0, 1 << 16)
    region = np.zeros(packed.slot_nbytes, np.uint8)
    packed.copy_into(int(region.ctypes.data))
    _copying.limit_width(64)
    for part in packed.parts:
        expected = part.source.contiguous().numpy() if isinstance(part.source, torch.Tensor) else part.source
        copied = region[part.offset : part.offset + part.nbytes]
        assert copied.tobytes() == expected.tobytes()
