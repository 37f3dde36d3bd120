"""Decoders: a budget that ends whatever they do, who waits for whom, and that none is left behind. With real processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmring.engine.inputs import InputSpec, PictureSpec, VideoSpec
from shmring.frontend.callers.caller import caller
from shmring.frontend.media import decoder_pool
from shmring.frontend.media.decoder_pool import BudgetSpentError, DecoderDiedError, DecoderPool, _Places
from shmring.frontend.media.jobs import Decode, Decoded, Failed, Probe, Probed
from shmring.frontend.media.options import MediaIoKwargs, MediaKind, MediaLimits
from shmring.processes.process import Process
from tests.waiting import eventually

SPEC = InputSpec(picture=PictureSpec(max_pixels=10_000), video=VideoSpec(num_frames=2, max_pixels=10_000))
LIMITS = MediaLimits(max_image_scans=1_000_000, max_video_expansion=1e9)
SMALL_FRAMES = (1024, 540)


@pytest.fixture
def pool() -> Iterator[DecoderPool]:
    """Two decoders."""
    with ThreadPoolExecutor(1) as threads:
        pool = DecoderPool(2, threads)
        yield pool
        pool.close()


def probe_of(kind: MediaKind) -> Probe:
    return Probe(kind, SPEC, LIMITS, MediaIoKwargs())


async def decode(pool: DecoderPool, kind: MediaKind, data: bytes, budget_s: float = 60.0) -> tuple[Decoded, float]:
    """Decodes a medium; returns what became of it, and how much processor time decoding took."""
    probed = (await pool.run(probe_of(kind), data, 0, 10.0)).reply
    assert isinstance(probed, Probed), probed
    outcome = await pool.run(Decode(kind, probed.header, MediaIoKwargs()), data, 100_000, budget_s)
    assert outcome.result is not None
    outcome.result.close()
    assert isinstance(outcome.reply, Decoded), outcome.reply
    return outcome.reply, outcome.cpu_s


def children_of(pid: int | str) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def cpu_s_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def nurseries() -> list[int]:
    """The processes that fork this process' decoders: there is at most one that lives."""
    return [
        child
        for child in children_of(os.getpid())
        if b"shmring.frontend.media.decoder_process" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]


def nursery() -> int:
    """The one that there is."""
    [pid] = nurseries()
    return pid


async def test_a_budget_ends_what_no_packet_ends(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    data = many_scans(10_000) + bytes(256 << 10)  # 70 s, in one call of libjpeg
    probed = (await pool.run(probe_of("image"), data, 0, 10.0)).reply
    assert isinstance(probed, Probed)
    before = set(children_of(nursery()))
    with pytest.raises(BudgetSpentError):
        await pool.run(Decode("image", probed.header, MediaIoKwargs()), data, 100_000, 0.2)
    await eventually(lambda: pool.statistics().free == 2)
    assert len(before - set(children_of(nursery()))) == 1
    assert (await decode(pool, "image", many_scans(1)))[0].length > 0  # the next one gets another


async def test_the_budget_is_processor_time_even_if_others_use_the_cores(
    pool: DecoderPool, long_clip: Callable[..., bytes], run_python: Callable[..., Process]
) -> None:
    data = long_clip(40, SMALL_FRAMES)
    _, cpu_s = await decode(pool, "video", data)
    for _ in range(4):
        run_python("-c", "while True: pass")
    assert (await decode(pool, "video", data, budget_s=4 * cpu_s + 0.2))[0].length == 2


async def test_a_small_file_with_much_work_is_decoded_among_the_large_ones(
    pool: DecoderPool, many_scans: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = many_scans(90)
    assert len(data) < 100_000
    monkeypatch.setattr(decoder_pool, "_SMALL_S", 60.0)
    _, needed_s = await decode(pool, "image", data)
    monkeypatch.setattr(decoder_pool, "_SMALL_S", needed_s / 4)
    among_large_s: list[float] = []
    run_once = pool._run_once

    async def noted(*arguments: Any, **named: Any) -> Any:
        outcome = await run_once(*arguments, **named)
        among_large_s.append(outcome.cpu_s)
        return outcome

    monkeypatch.setattr(pool, "_run_once", noted)
    decoded, cpu_s = await decode(pool, "image", data, budget_s=4 * needed_s)
    assert decoded.length > 0
    assert cpu_s == needed_s / 4 + among_large_s[-1]  # what it had taken among the small ones counts, too
    with pytest.raises(BudgetSpentError):
        await decode(pool, "image", data, budget_s=needed_s / 3)


async def test_small_media_do_not_wait_for_large_ones(
    pool: DecoderPool, many_scans: Callable[..., bytes], long_clip: Callable[..., bytes]
) -> None:
    clips = [asyncio.create_task(decode(pool, "video", long_clip(5000, SMALL_FRAMES))) for _ in range(5)]
    await eventually(lambda: pool.statistics().waiting == 4)
    statistics = pool.statistics()
    assert (statistics.total, statistics.free) == (2, 1)  # kept for small ones
    await decode(pool, "image", many_scans(1, 64))
    assert pool.statistics().waiting == 4
    assert not any(clip.done() for clip in clips)
    await eventually(lambda: pool.statistics().waiting_s > 0.1)
    for clip in clips:
        clip.cancel()
    await asyncio.gather(*clips, return_exceptions=True)
    await eventually(lambda: pool.statistics().free == 2)
    assert pool.statistics().waiting == 0
    assert pool.statistics().waiting_s == 0.0


async def test_cancelling_at_any_moment_gives_the_place_back(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    data = many_scans(300, 1000)
    for turn in range(12):
        jobs = [asyncio.create_task(decode(pool, "image", data)) for _ in range(4)]
        for _ in range(turn * turn):
            await asyncio.sleep(0)
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
    await eventually(lambda: pool.statistics().free == 2)
    assert pool.statistics().waiting == 0
    await decode(pool, "image", many_scans(1, 64))


async def test_a_decoder_that_dies_costs_nobody_a_picture(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    """Nor does the death of the process that starts them, with which all of them die."""
    await decode(pool, "image", many_scans(1, 64))
    await eventually(lambda: len(children_of(nursery())) == 1)  # those of other tests have ended
    for kills_the_parent in (False, True):
        decoding = [asyncio.create_task(decode(pool, "image", many_scans(10))) for _ in range(5)]
        await eventually(lambda: pool.statistics().free == 0)
        victim = nursery() if kills_the_parent else children_of(nursery())[0]
        os.kill(victim, signal.SIGKILL)  # as a crash, or the kernel that needs memory
        assert [decoded.length > 0 for decoded, _ in await asyncio.gather(*decoding)] == [True] * 5
    assert pool.statistics().free == 2
    assert len(children_of(nursery())) <= 2


@pytest.mark.slow  # it starts decoders again and again
async def test_idle_decoders_that_die_cost_nobody_a_picture(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    killed = set()
    for _ in range(10):
        await asyncio.gather(*(decode(pool, "image", many_scans(1, 64)) for _ in range(2)))
        for pid in nurseries():  # none: it was just killed, and those that it had started took the pictures before they died
            os.kill(pid, signal.SIGKILL)  # its children get their signal a moment later: one that lives may be as good as dead
            killed.add(pid)
    while killed.issuperset(nurseries()):  # what was killed is waited for when the next one is started
        await decode(pool, "image", many_scans(1, 64))


async def test_a_medium_that_kills_its_decoders_kills_two_and_that_is_another_error_than_a_bad_one(
    pool: DecoderPool, many_scans: Callable[..., bytes]
) -> None:
    data = many_scans(10_000) + bytes(256 << 10)  # which is not small: that would be a third decoder
    probed = (await pool.run(probe_of("image"), data, 0, 10.0)).reply
    assert isinstance(probed, Probed)
    await eventually(lambda: len(children_of(nursery())) == 1)  # those of other tests have ended
    [first] = children_of(nursery())
    decoding = asyncio.create_task(pool.run(Decode("image", probed.header, MediaIoKwargs()), data, 100_000, 600.0))
    await eventually(lambda: cpu_s_of(first) > 0.1)
    os.kill(first, signal.SIGKILL)
    [second] = await eventually(lambda: set(children_of(nursery())) - {first})
    await eventually(lambda: cpu_s_of(second) > 0.1)  # it has the medium
    os.kill(second, signal.SIGKILL)
    with pytest.raises(DecoderDiedError):
        await decoding
    await eventually(lambda: children_of(nursery()) == [])
    bad = (await pool.run(probe_of("image"), b"no picture", 0, 10.0)).reply
    assert isinstance(bad, Failed)
    assert bad.expected
    empty = (await pool.run(probe_of("image"), b"", 0, 10.0)).reply
    assert isinstance(empty, Failed)
    assert "empty" in empty.text


async def test_what_forks_decoders_is_started_again(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    await decode(pool, "image", many_scans(1, 64))
    first = nursery()
    decoders = children_of(first)
    os.kill(first, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(map(lives, [first, *decoders])):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    await decode(pool, "image", many_scans(1, 64))
    assert nursery() != first


_FRONTEND = """
import asyncio, sys
from concurrent.futures import ThreadPoolExecutor
from shmring.engine.inputs import InputSpec, PictureSpec
from shmring.frontend.media.decoder_pool import DecoderPool
from shmring.frontend.media.jobs import Decode, Probe
from shmring.frontend.media.options import MediaIoKwargs, MediaLimits
async def main():
    data = open(sys.argv[1], "rb").read()
    pool = DecoderPool(2, ThreadPoolExecutor(1))
    job = Probe("image", InputSpec(picture=PictureSpec(max_pixels=10_000)), MediaLimits(max_image_scans=10**6), MediaIoKwargs())
    header = (await pool.run(job, data, 0, 600.0)).reply.header
    print("decoding", flush=True)
    await pool.run(Decode("image", header, MediaIoKwargs()), data, 100_000, 600.0)
asyncio.run(main())
"""


def test_decoders_end_with_a_frontend_that_is_killed(
    many_scans: Callable[..., bytes], run_python: Callable[..., Process], tmp_path: Path
) -> None:
    (tmp_path / "picture").write_bytes(many_scans(20_000))
    frontend = run_python("-c", _FRONTEND, tmp_path / "picture")
    assert frontend.line() == "decoding"
    [forker] = children_of(frontend.pid)
    processes = [forker, *children_of(forker)]
    assert len(processes) >= 2
    watched = list(map(Process, processes))
    frontend.kill()
    for process in watched:
        process.wait(10)  # or decoders outlive their frontend
        process.close()


async def test_decoders_let_the_loops_go_first(pool: DecoderPool, many_scans: Callable[..., bytes]) -> None:
    await decode(pool, "image", many_scans(1))
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert {os.getpriority(os.PRIO_PROCESS, child) for child in children_of(nursery())} == {min(19, own + 5)}
    assert os.getpriority(os.PRIO_PROCESS, nursery()) == own
    assert {Path(f"/proc/{child}/oom_score_adj").read_text() for child in children_of(nursery())} == {"500\n"}


async def test_callers_have_decoders_in_turn() -> None:
    places, order = _Places(2), list[bytes]()
    give_back = [await places.take(is_small=True) for _ in range(2)]

    async def wait(who: bytes) -> None:
        caller.set(who)
        done = await places.take(is_small=True)
        order.append(who)
        give_back.append(done)

    tasks = [asyncio.create_task(wait(who)) for who in (b"heavy", b"heavy", b"heavy", b"heavy", b"light", b"other", b"heavy")]
    await asyncio.sleep(0)
    assert places.statistics().waiting == 7
    while give_back:
        give_back.pop(0)()
        for _ in range(3):
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert order == [b"heavy", b"light", b"other", b"heavy", b"heavy", b"heavy", b"heavy"]
    assert places.statistics().free == 2
    assert places._last_turn == {}
    assert not places._taken


async def test_seconds_of_decoders_are_counted_by_caller_also_while_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, places = 100.0, _Places(2)
    monkeypatch.setattr(decoder_pool.time, "monotonic", lambda: now_s)
    caller.set("heavy")
    give_back = await places.take(is_small=True)
    now_s = 104.0
    assert places.take_seconds() == {"heavy": 4.0}
    caller.set("light")
    (await places.take(is_small=True))()
    now_s = 105.0
    give_back()
    assert places.take_seconds() == {"heavy": 1.0, "light": 0.0}
    now_s = 106.0
    assert not places.take_seconds()


async def test_one_caller_s_media_have_their_order_and_small_ones_the_last_place() -> None:
    places = _Places(2)
    first_large = await places.take(is_small=False)
    large = asyncio.ensure_future(places.take(is_small=False))
    await asyncio.sleep(0)
    assert not large.done(), "the last free place is for small ones"
    (await places.take(is_small=True))()
    cancelled = asyncio.ensure_future(places.take(is_small=False))
    await asyncio.sleep(0)
    cancelled.cancel()
    first_large()
    (await large)()
    await asyncio.wait([cancelled])
    assert places.statistics().free == 2
    assert places._last_turn == {}
