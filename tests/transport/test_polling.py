"""Busy polling: a loop that does not sleep for a while after a message, and then does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shmring
from shmring import Client, Ring
from shmring.core.compiled import (
    LINK_S,
    TURN_S,
    VAIN_VIGILS,
    VIGIL_RETRY,
    VIGIL_S,
    VIGIL_TURNS,
    Poller,
    RecordWriter,
    Vigil,
    ring_nbytes,
)
from shmring.core.messages import Refused
from shmring.transport import loops
from tests.model.inside import LinkInPython
from tests.sessions import let_die, session_of
from tests.tables import for_each
from tests.waiting import eventually, turns


class Loop:
    """Runs what is due when it is told to; an iteration with nothing due is sleep."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def iterate(self) -> bool:
        """One iteration; returns whether there will be another without sleeping."""
        due, self.due = self.due, []
        for callback in due:
            callback()
        return bool(self.due)


class Link(LinkInPython):
    """Has so many things to do, each of which takes a while."""

    def __init__(self, clock: list[float], works: int = 0, work_s: float = 0.0, memory: bytearray | None = None) -> None:
        super().__init__(bytearray(ring_nbytes(64)) if memory is None else memory, -1)
        self.clock = clock
        self.works = works
        self.work_s = work_s
        self.turns: list[float] = []  # what each was given
        self.asleep = False
        self.restless = 0  # times that something comes just when it would fall asleep

    def has_turn(self, now_s: float) -> bool:
        self.turns.append(now_s + LINK_S - self.clock[0])
        if not self.works:
            return False
        self.works -= 1
        self.clock[0] += self.work_s
        return True

    def may_sleep(self, now_s: float, at_once: bool) -> bool:
        self.restless -= 0 if at_once else 1
        self.asleep = at_once or self.restless < 0
        return self.asleep


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def poller_of(loop: Loop, clock: list[float], give_way: Callable[[], object] = lambda: None) -> Poller:
    return Poller(loop, clock=lambda: clock[0], give_way=give_way)


def wake(poller: Poller, link: Link) -> None:
    link.attend(poller, link, print, RecordWriter(bytearray(ring_nbytes(64)), -1), busy_poll_s=0.0)
    link.rouse()


def turns_until_asleep(loop: Loop) -> int:
    turns = 1
    while loop.iterate():
        turns += 1
        assert turns < 1000, "it never sleeps"
    return turns


def test_a_link_has_turns_as_long_as_there_is_something_and_one_more(clock: list[float]) -> None:
    loop, link = Loop(), Link(clock, works=5)
    wake(poller_of(loop, clock), link)
    assert len(loop.due) == 1
    assert turns_until_asleep(loop) == 6
    assert link.asleep


def test_a_link_that_does_not_fall_asleep_has_another_turn(clock: list[float]) -> None:
    loop, link = Loop(), Link(clock)
    link.restless = 3
    wake(poller_of(loop, clock), link)
    assert turns_until_asleep(loop) == 4


def turns_while_others_run(poller: Poller, loop: Loop, clock: list[float]) -> int:
    """How many turns a link has that polls busily for a second, where each yield takes as long as the others run."""
    link = Link(clock)
    link.restless = 1_000_000
    began = clock[0]
    wake(poller, link)
    poller.extend(1.0)
    while loop.iterate() and clock[0] < began + 0.2:
        pass
    return len(link.turns)


def busy_poller(loop: Loop, clock: list[float], yields_s: list[float]) -> Poller:
    """A poller each of whose yields takes so long, while some records come."""

    def others_run() -> None:
        clock[0] += yields_s[0]
        poller.records += 16

    poller = poller_of(loop, clock, others_run)
    return poller


def test_links_sleep_at_once_where_a_yield_costs_more_than_being_woken(clock: list[float]) -> None:
    loop = Loop()
    poller = busy_poller(loop, clock, [0.004])
    assert turns_while_others_run(poller, loop, clock) < 10
    assert turns_while_others_run(poller, loop, clock) == 1  # still
    clock[0] += 0.3
    assert 1 < turns_while_others_run(poller, loop, clock) < 10  # tried again, and given up again


def test_what_yields_have_brought_long_ago_does_not_count(clock: list[float]) -> None:
    loop, yields_s = Loop(), [0.0005]
    poller = busy_poller(loop, clock, yields_s)
    assert turns_while_others_run(poller, loop, clock) > 100
    yields_s[0] = 0.004
    assert turns_while_others_run(poller, loop, clock) < 20


@pytest.mark.parametrize("yield_s", [0.0005, 0.0012])
def test_links_go_on_looking_where_a_yield_brings_more_than_it_costs(clock: list[float], yield_s: float) -> None:
    loop = Loop()
    assert turns_while_others_run(busy_poller(loop, clock, [yield_s]), loop, clock) > 100


def test_links_have_their_turns_in_turn_and_none_is_left_out(clock: list[float]) -> None:
    loop = Loop()
    poller = poller_of(loop, clock)
    links = [Link(clock, works=6, work_s=LINK_S) for _ in range(10)]
    for link in links:
        wake(poller, link)
    while loop.iterate():
        taken = [len(link.turns) for link in links]
        assert max(taken) - min(taken) <= 1
    assert all(link.asleep for link in links)
    assert all(abs(given - LINK_S) < 1e-9 for link in links for given in link.turns)


def test_a_turn_ends_when_its_time_is_over(clock: list[float]) -> None:
    loop = Loop()
    poller = poller_of(loop, clock)
    for _ in range(100):
        wake(poller, Link(clock, works=1, work_s=0.0015))
    while True:
        before = clock[0]
        more = loop.iterate()
        assert clock[0] - before <= TURN_S + 0.0015
        if not more:
            break


def test_a_link_that_falls_asleep_as_the_turn_is_over_leaves_the_others_theirs(clock: list[float]) -> None:
    class Slow(Link):
        def has_turn(self, now_s: float) -> bool:
            clock[0] += TURN_S + 0.001
            return super().has_turn(now_s)

    loop = Loop()
    poller = poller_of(loop, clock)
    slow, other = Slow(clock), Link(clock)
    wake(poller, slow)
    wake(poller, other)
    assert loop.iterate()
    assert (slow.asleep, other.turns) == (True, [])
    assert not loop.iterate()
    assert (len(slow.turns), len(other.turns)) == (1, 1)


def test_what_a_link_raises_costs_nobody_a_turn(clock: list[float]) -> None:
    class Broken(Link):
        def has_turn(self, now_s: float) -> bool:
            if super().has_turn(now_s):
                raise RuntimeError("a bug")
            return False

    loop = Loop()
    poller = poller_of(loop, clock)
    broken, other = Broken(clock, works=1), Link(clock, works=1)
    wake(poller, broken)
    wake(poller, other)
    with pytest.raises(RuntimeError, match="a bug"):
        loop.iterate()
    turns_until_asleep(loop)
    assert (broken.works, other.works) == (0, 0)
    assert broken.asleep
    assert other.asleep


def test_a_link_that_wakes_another_in_its_turn_falls_asleep_itself(clock: list[float]) -> None:
    loop = Loop()
    poller = poller_of(loop, clock)
    woken = Link(clock)

    class Waking(Link):
        def has_turn(self, now_s: float) -> bool:
            if not self.turns:
                wake(poller, woken)
            return super().has_turn(now_s)

    waking = Waking(clock)
    wake(poller, waking)
    assert turns_until_asleep(loop) == 2
    assert (len(waking.turns), len(woken.turns)) == (1, 1)


# -- busy polling ----------------------------------------------------------------------------------------------------------


def test_it_keeps_awake_for_as_long_as_it_says_after_the_last_message(clock: list[float]) -> None:
    loop, link = Loop(), Link(clock)
    poller = poller_of(loop, clock)
    poller.extend(0.001)
    wake(poller, link)
    assert loop.iterate()
    clock[0] += 0.0009
    poller.extend(0.001)
    poller.extend(0.0)  # of a link that polls not so long
    clock[0] += 0.0009
    assert loop.iterate()
    clock[0] += 0.0002
    assert not loop.iterate()
    assert link.asleep


@pytest.mark.parametrize("others_run_s", [0.0, 0.00002])
def test_who_finds_nothing_lets_others_run(clock: list[float], others_run_s: float) -> None:
    """Where nobody wants the core, less often: a yield costs half a microsecond."""
    yields: list[int] = []

    def others_run() -> None:
        yields.append(1)
        clock[0] += others_run_s

    loop, link = Loop(), Link(clock, works=3)
    poller = poller_of(loop, clock, others_run)
    poller.extend(0.001)
    wake(poller, link)
    for _ in range(3):
        loop.iterate()
    assert not yields
    loop.iterate()
    assert len(yields) == 1
    link.works = 1
    loop.iterate()
    loop.iterate()
    assert len(yields) == (2 if others_run_s else 1)
    loop.iterate()
    assert len(yields) == (3 if others_run_s else 2)


def test_what_comes_while_others_run_is_found_in_the_same_turn(clock: list[float]) -> None:
    """A peer that wanted the core may have answered."""
    memory = bytearray(ring_nbytes(64))
    loop, link, other = Loop(), Link(clock, memory=memory), Link(clock)
    for reader in (link, other):
        reader.restless = 2
    poller = poller_of(loop, clock, lambda: RecordWriter(memory, -1).write(b"an answer"))
    wake(poller, other)
    wake(poller, link)
    assert loop.iterate()
    assert (len(link.turns), len(other.turns)) == (2, 2)


@pytest.mark.both_loops
async def test_both_ends_poll_and_sleep_again(serve: Any, connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]  # it stands still, or a busy machine makes it seem that they sleep
    monkeypatch.setattr(loops, "Poller", lambda loop, **options: Poller(loop, clock=lambda: now[0], **options))

    async def handle(claim: shmring.Claim) -> None:
        await claim.reply(int(claim.payload["x"].sum()))

    ring = await serve(busy_poll_s=0.1)
    client = await connect(busy_poll_s=0.1)
    poller = ring._shell.life.poller
    assert session_of(client).link._poller is poller, "each loop has one"
    running = asyncio.create_task(ring.run(handle))
    for value in range(20):
        assert await client.request({"x": torch.full((1000,), value)}) == 1000 * value
    bells = session_of(client).link.bells
    [frontend] = ring._shell._frontends.values()
    assert bells + frontend.link.bells <= 4, "who polls needs no bell"
    assert poller.is_due
    now[0] += 0.2
    await eventually(lambda: not poller.is_due)
    turns_before = poller.turns
    await turns()
    assert poller.turns == turns_before > 0
    running.cancel()


@pytest.mark.ring(busy_poll_s=0.1)
@pytest.mark.client(busy_poll_s=0.1)
async def test_a_frontend_that_hears_of_the_end_while_it_looks_for_a_reply(ring: Ring, client: Client) -> None:
    """Its session lets go of the ring that it reads there and then."""
    submission = await client.submit([1])
    for frontend in ring._shell._frontends.values():
        frontend.send(Refused("no more"))
    with pytest.raises(shmring.EngineDeadError, match="no more"):
        await submission.next()
    assert not client.connected
    let_die(ring)


@pytest.mark.ring(busy_poll_s=0.1)
@pytest.mark.client(busy_poll_s=0.1)
async def test_an_engine_that_hears_of_the_end_while_it_looks_for_a_request(ring: Ring, client: Client) -> None:
    await client.submit([1])
    with ring.claim_nowait():
        pass
    session_of(client)._say_goodbye()
    with pytest.raises(shmring.WouldBlock):
        ring.claim_nowait()
    assert not ring.statistics().clients


@pytest.mark.parametrize("in_hand", [0, 1])
async def test_who_polls_and_has_nothing_in_hand_looks_before_the_loop_goes_on(
    in_hand: int, serve: Any, socket_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shmring.ring.ring._LOOK_S", 0.1)
    loop, turns = asyncio.get_running_loop(), []
    ring = await serve(busy_poll_s=0.1)
    client = await asyncio.to_thread(shmring.threads.connect, "test", socket_dir=str(socket_dir))
    try:
        for _ in range(1000):
            held = [client.submit_nowait("held") for _ in range(in_hand)]
            claims = [await ring.claim() for _ in held]
            turns.clear()
            loop.call_soon(turns.append, None)
            threading.Timer(0.001, client.submit_nowait, ["sent meanwhile"]).start()
            with await ring.claim() as claim:
                assert claim.payload == "sent meanwhile"
            for claim in claims:
                claim.done()
            if bool(turns) == bool(in_hand):  # else it was sent before anybody waited, or others wanted the core
                break
        else:
            pytest.fail("whoever works on a request may be in the loop" if in_hand else "nobody looked")
    finally:
        await asyncio.to_thread(client.close)


async def test_without_it_an_end_that_has_nothing_to_do_sleeps(ring: Ring, client: Client) -> None:
    await eventually(lambda: not ring._shell.life.poller.is_due and not session_of(client).link._poller.is_due)


@for_each("seconds", [-0.001, 0.2])
def test_a_time_that_makes_no_sense_is_refused(seconds: float) -> None:
    for kind in (shmring.RingConfig, shmring.ClientConfig):
        with pytest.raises(ValueError, match="busy_poll_s must be between 0 and"):
            kind(busy_poll_s=seconds)


def vigils(vigil: Vigil, starts: int, *, found: bool, now_s: float = 0.0) -> int:
    """Begins vigils, one after the other; returns how many were kept before the link fell asleep."""
    kept = 0
    for _ in range(starts):
        now_s += 1.0
        vigil.begin(now_s)
        if vigil.is_over(now_s + VIGIL_S / 2, False):
            continue
        kept += 1
        if found:
            vigil.begin(now_s + VIGIL_S / 2)
        else:
            assert vigil.is_over(now_s + 2 * VIGIL_S, False)
    return kept


def test_a_link_looks_on_for_a_moment_after_a_record_came() -> None:
    assert vigils(Vigil(), 100, found=True) == 100


def test_a_link_that_looks_in_vain_sleeps_at_once_and_tries_again_now_and_then() -> None:
    vigil = Vigil()
    assert vigils(vigil, VAIN_VIGILS, found=False) == VAIN_VIGILS
    assert 0 < vigils(vigil, 10 * VIGIL_RETRY, found=False, now_s=1000.0) <= 11
    vigil = Vigil()
    vigils(vigil, VIGIL_RETRY, found=False)
    assert vigils(vigil, 1, found=True, now_s=1000.0) == 1
    assert vigils(vigil, VAIN_VIGILS, found=False, now_s=2000.0) == VAIN_VIGILS, "one that helped is believed"


def test_a_link_looks_on_while_the_loop_looks_for_others_for_so_many_turns_of_theirs() -> None:
    vigil, now_s = Vigil(), 1.0
    vigil.begin(now_s)
    now_s += 2 * VIGIL_S
    assert [vigil.is_over(now_s, others_look=True) for _ in range(VIGIL_TURNS + 1)] == [False] * VIGIL_TURNS + [True]
    vigil.begin(now_s)
    assert vigil.is_over(now_s + 2 * VIGIL_S, others_look=False), "nobody else would have it look"


def test_two_ends_that_both_sleep_find_out_that_they_need_not() -> None:
    """Each answers at once, but being woken takes it a while: who looks again must look for longer than that."""
    waking_s, answering_s = 50e-6, 50e-6
    ends = Vigil(), Vigil()
    for vigil in ends:
        vigils(vigil, VAIN_VIGILS, found=False)  # something has held both up for a while
    now_s, looked = 1000.0, []
    for number in range(4 * VIGIL_RETRY):  # records that the two send each other in turn
        ends[number % 2].begin(now_s)
        now_s += answering_s
        looked.append(not ends[1 - number % 2].is_over(now_s, False))
        now_s += 0.0 if looked[-1] else waking_s
    assert not looked[0]
    assert all(looked[-VIGIL_RETRY:])


async def test_an_end_with_nothing_to_do_sleeps(ring: Ring, client: Client) -> None:
    """Also one that has just had its first messages, and was answered at once."""
    for number in range(20):
        submission = await client.submit([number])
        with await ring.claim():
            pass
        with pytest.raises(StopAsyncIteration):
            await submission.next()
    [frontend] = ring._shell._frontends.values()
    async with asyncio.timeout(5):
        while frontend.link.awake or session_of(client).link.awake:
            await asyncio.sleep(0.001)
