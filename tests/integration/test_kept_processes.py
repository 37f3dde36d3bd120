"""Kept content and processes that are killed, whatever they were doing with it; and frontends that lie about it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring.core.messages import (
    MAX_WAITS,
    MAX_WITHDRAWN,
    Find,
    Found,
    Goodbye,
    Keep,
    NotKept,
    Refused,
    Release,
    SlotRef,
    StopWaiting,
    Unpin,
    Withdraw,
)
from tests.integration.test_forged import Forger
from tests.integration.test_process_death import statistics, until
from tests.waiting import cancel, eventually

Start = Callable[..., Any]


@pytest.fixture
def start(launch: Callable[..., Any], socket_dir: Path) -> Start:
    """``start("frontend", "keep")``: runs a program until the test ends."""

    def run(program: str, *arguments: str) -> Any:
        order = ["victim", str(socket_dir)]
        return launch(program, *([*arguments, *order] if program == "frontend" else [*order, *arguments]))

    return run


@pytest.fixture
async def observer(start: Start, socket_dir: Path) -> AsyncIterator[shmring.Client]:
    assert (await start("engine", "8MiB").said())[0] == "ready"
    async with shmring.connect("victim", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        yield client


def nothing_is_held(counts: dict[str, int]) -> bool:
    held = counts["slots_published"] + counts["slots_claimed"] + counts["slots_draining"] + counts["quarantined_nbytes"]
    return held + counts["kept_pinned"] + counts["departed_clients"] == 0 and counts["clients"] == 1


async def all_of_it_gives_way(client: shmring.Client) -> None:
    """What is kept, whoever kept it, is in nobody's way: all of the slab can be had."""
    async with client.slot((await statistics(client))["leasable_nbytes"] - 64, timeout=10):
        counts = await statistics(client)
        assert (counts["kept"], counts["kept_nbytes"], counts["free_nbytes"]) == (0, 0, 0)


@pytest.mark.parametrize("mode", ["keep", "keeping", "finding", "pinned"])
async def test_a_killed_frontend_leaves_what_it_kept_and_no_pins(observer: shmring.Client, start: Start, mode: str) -> None:
    frontend = start("frontend", mode)
    await frontend.said()
    if mode in ("keep", "pinned"):
        await until(observer, lambda counts: counts["kept_pinned"] == 1)
    frontend.signal(signal.SIGKILL)
    await until(observer, nothing_is_held)
    counts = await statistics(observer)
    assert counts["kept"] > 0
    assert counts["protocol_errors"] == 0
    if mode in ("keep", "pinned"):
        found = await observer.find((1).to_bytes(32, "little"))
        assert found is not None
        with found:
            expected = torch.randint(0, 256, (500_000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
            assert torch.equal(found.payload["x"], expected), "a restarted frontend finds what another one gave"
    await all_of_it_gives_way(observer)


async def test_frontends_that_are_killed_at_random_moments_harm_no_other(observer: shmring.Client, start: Start) -> None:
    survivor = start("frontend", "finding")
    await survivor.said()
    for mode in ("keeping", "finding", "keeping", "finding", "keeping", "finding"):
        victim = start("frontend", mode)
        await victim.said()
        victim.signal(signal.SIGKILL)
        await survivor.said()  # further checked answers
    await until(observer, lambda counts: (counts["clients"], counts["departed_clients"]) == (2, 0))
    assert not survivor.is_dead
    survivor.signal(signal.SIGKILL)
    await until(observer, nothing_is_held)
    await all_of_it_gives_way(observer)


async def test_a_stopped_frontend_keeps_its_pins_however_long_that_takes(observer: shmring.Client, start: Start) -> None:
    frontend = start("frontend", "keep")
    await frontend.said()
    frontend.signal(signal.SIGSTOP)
    for number in range(100, 140):
        with await observer.keep(number.to_bytes(32, "little"), {"x": torch.ones(300_000)}):
            pass
    with pytest.raises(TimeoutError):  # its memory is asked for, and does not come
        await observer.slot((await statistics(observer))["leasable_nbytes"] - 64, timeout=1.0)
    assert (await statistics(observer))["kept_pinned"] >= 1
    found = await observer.find((1).to_bytes(32, "little"))
    assert found is not None
    found.close()
    frontend.signal(signal.SIGKILL)
    await until(observer, nothing_is_held)


# -- frontends that lie ------------------------------------------------------------------------------------------------------


@pytest.fixture
async def ring(socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[shmring.Ring]:
    async def handle(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["x"].sum()))

    monkeypatch.setattr("shmring.ring.limits.MAX_PINS", 8)
    options: dict[str, Any] = {"slab_nbytes": "1MiB", "inline_nbytes": "1KiB"}
    async with shmring.serve("honest", socket_dir=str(socket_dir), **options) as ring:
        running = asyncio.create_task(ring.run(handle))
        yield ring
        await ring.close()
        await running
        ring._shell._book.check()


KEY = bytes(range(32))
PAYLOAD = b"\xc0"  # nil


def keep(
    forger: Forger,
    *,
    key: bytes = KEY,
    payload: bytes = PAYLOAD,
    number: int = 1,
    for_one: bool = False,
    **changed: int,
) -> Keep:
    slot = forger.slot(number=number, **changed)
    return Keep(number, key, slot.lease_id, slot.offset, slot.nbytes, slot.generation, False, payload, for_one)


def kept(forger: Forger, number: int, **changed: int) -> SlotRef:
    """Content that it has kept, as a slot of a submission."""
    fields = {"lease_id": 0, "offset": forger.lease.offset, "nbytes": 100, "generation": forger.generation(number)}
    return SlotRef(**{**fields, **changed})


FORGERIES: dict[str, tuple[Callable[[Forger, SlotRef], list[Any]], str]] = {
    "what was never kept": (lambda f, other: [f.submit(kept(f, 1))], "has not pinned"),
    "what another client has pinned": (lambda f, other: [f.submit(other)], "has not pinned"),
    "a generation that is none": (lambda f, other: [keep(f), f.submit(kept(f, 1, generation=1 << 63))], "has not pinned"),
    "what it has left": (lambda f, other: [keep(f), Unpin((f.generation(),)), f.submit(kept(f, 1))], "has not pinned"),
    "more than was kept": (lambda f, other: [keep(f), f.submit(kept(f, 1, nbytes=101))], "is not 101 bytes"),
    "another place": (lambda f, other: [keep(f), f.submit(kept(f, 1, offset=0))], "is not 100 bytes at 0"),
    "a pin twice": (lambda f, other: [keep(f), Unpin((f.generation(), f.generation()))], "does not have"),
    "a pin of another": (lambda f, other: [Unpin((other.generation,))], "does not have"),
    "a pin of nothing": (lambda f, other: [Unpin((0,))], "does not have"),
    "a slot that was kept, again": (lambda f, other: [keep(f), keep(f, number=2, key=bytes(32))], "overlaps a live slot"),
    "a slot that was submitted": (lambda f, other: [f.submit(f.slot()), keep(f)], "not a new one|overlaps"),
    "another's blocks": (lambda f, other: [keep(f, offset=other.offset)], "not inside lease|overlaps"),
    "another's lease": (lambda f, other: [keep(f, lease_id=1)], "does not hold"),
    "no lease": (lambda f, other: [keep(f, lease_id=0)], "does not hold"),
    "an old generation": (lambda f, other: [keep(f, number=2), keep(f, number=1, key=bytes(32))], "not a new one"),
    "a lease in which something is kept and used": (
        lambda f, other: [keep(f), f.submit(f.slot(number=2, offset=f.lease.offset)), Goodbye()],
        "overlaps a live slot",
    ),
    "a payload that is none": (lambda f, other: [keep(f, payload=b"\xc1")], "not msgpack"),
    "a payload whose tensor is elsewhere": (
        lambda f, other: [keep(f, payload=b"\xc7\x1c\x53" + b"\x09\0\x02\x01" + bytes(24))],
        "region 9",
    ),
    "a key that it waits for, again": (lambda f, other: [Find(1, KEY, True), Find(2, KEY, True)], "waits for content twice"),
    "a token by which it waits, again": (
        lambda f, other: [Find(1, KEY, True), Find(1, bytes(32), True)],
        "waits for content twice",
    ),
    "more keys to wait for than may be": (
        lambda f, other: [Find(number, number.to_bytes(32, "big"), True) for number in range(1, MAX_WAITS + 2)],
        "waits for more than 1024 keys",
    ),
    "a delivery, once more": (lambda f, other: [keep(f, for_one=True), keep(f, for_one=True)], "not a new one"),
    "a pin of what it has delivered": (lambda f, other: [keep(f, for_one=True), Unpin((f.generation(),))], "does not have"),
    "what it has delivered": (lambda f, other: [keep(f, for_one=True), f.submit(kept(f, 1))], "has not pinned"),
    "a delivery that it waits for, again": (
        lambda f, other: [Find(1, KEY, True, True), Find(2, KEY, True, True)],
        "waits for content twice",
    ),
    "more names than one message takes back": (lambda f, other: [Withdraw((KEY,) * (MAX_WITHDRAWN + 1))], "length <= 64"),
    "a short key": (lambda f, other: [keep(f, key=b"short")], "length >= 32"),
    "a long payload": (lambda f, other: [keep(f, payload=b"\xc5\x13\x88" + bytes(5000))], "length <= 4096"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
async def test_a_forged_message_ends_its_connection_and_nothing_else(
    ring: shmring.Ring, socket_dir: Path, forgery: str
) -> None:
    async with shmring.connect("honest", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        with await client.keep(bytes(32 * [7]), {"x": torch.ones(5000, dtype=torch.uint8)}) as content:
            found = content._pin.found
            forger = await Forger.attach(socket_dir)
            forge, reason = FORGERIES[forgery]
            await forger.send(*forge(forger, SlotRef(0, found.offset, found.nbytes, found.generation)))
            *_, last = await forger.messages()
            assert isinstance(last, Refused)
            with pytest.raises(AssertionError, match=reason):
                raise AssertionError(last.reason)
            assert ring.statistics().protocol_errors == 1
            assert await client.request(content.payload, timeout=5) == 5000
        await eventually(lambda: ring.statistics().slots_in_use == 0)
        ring._shell._book.check()
        forger.close()


async def test_endless_finds_of_one_frontend_delay_no_other(ring: shmring.Ring, socket_dir: Path) -> None:
    """Of a frontend that reads no answers: its backlog is bounded, and then it goes."""
    async with shmring.connect("honest", socket_dir=str(socket_dir), lease_nbytes="64KiB") as client:
        forger = await Forger.attach(socket_dir)
        content = b"\xc5\x0f\xa0" + bytes(4000)  # as large as an answer may be
        await forger.send(keep(forger, payload=content))
        flood = asyncio.create_task(forger.send(*(Find(number, bytes(32)) for number in range(100_000))))
        for number in range(50):
            assert await client.request({"x": torch.full((5000,), number % 5, dtype=torch.uint8)}, timeout=5) == 5000 * (
                number % 5
            )
            assert await client.find(number.to_bytes(32, "big")) is None or number == 0
        await eventually(lambda: flood.done() or ring.statistics().clients == 1, timeout=20)
        await cancel(flood)
        forger.close()
        await eventually(lambda: ring.statistics().clients == 1)


async def test_an_honest_forger_is_answered(ring: shmring.Ring, socket_dir: Path) -> None:
    """So that the forgeries above fail for the reason that they name."""
    forger = await Forger.attach(socket_dir)
    await forger.send(StopWaiting((6,)), Find(6, bytes(32), True), Find(9, KEY, True), StopWaiting((6, 6)))
    await forger.send(Find(7, KEY), keep(forger), Find(8, KEY), keep(forger, number=2, offset=forger.lease.offset + 4096))
    generation = forger.generation()
    await forger.send(Unpin((generation,) * 4), Goodbye())
    answers = [message for message in await forger.messages() if isinstance(message, Found | NotKept | Release)]
    assert answers == [
        NotKept(6, "absent"),
        NotKept(7, "absent"),
        Found(1, generation, forger.lease.offset, 100, False, PAYLOAD),
        Found(9, generation, forger.lease.offset, 100, False, PAYLOAD),
        Found(8, generation, forger.lease.offset, 100, False, PAYLOAD),
        Release((forger.generation(2),)),
        Found(2, generation, forger.lease.offset, 100, False, PAYLOAD),
    ]
    assert ring.statistics().protocol_errors == 0
    forger.close()
