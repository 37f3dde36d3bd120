"""The simulator of both ends: it walks, explores, tells states apart, and finds what is broken on purpose."""

from __future__ import annotations

import dataclasses
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from shmring.client.sending import Sending
from shmring.client.session import Session as RealSession
from shmring.core.compiled import ClientBook, ClientSlotRecord, EngineBook, TakenRuns
from shmring.core.effects import ClientEffect, EngineEffect, Granted
from shmring.core.states import Request, RequestEvent
from shmring.line import Place, WaitingLine, give
from shmring.memory.slots import HostSlots, Slots
from shmring.ring.claim import Claim
from shmring.ring.replies import Replies
from shmring.ring.shell import Shell
from tests.model.observed import ObservedClientBook, ObservedEngineBook
from tests.model.state import FIELDS
from tests.simulation import books
from tests.simulation.command import simulate_command
from tests.simulation.engine import Handling
from tests.simulation.exploration import EXPLORATIONS, explore
from tests.simulation.failure import Failure, replay, shorten
from tests.simulation.frontend import Caller, HeldReply
from tests.simulation.scenario import Action, Forgery, Kind, Scenario, Violation
from tests.simulation.simulation import Simulation
from tests.simulation.state import duplicate, encode
from tests.simulation.walk import choose, walk
from tests.tables import for_each, slow

# As test_midst: what computes for ever is ended by its CPU time.
pytestmark = pytest.mark.timeout(600)

MOST_STEPS = 60_000  # in which a walk must find what is broken on purpose
MOST_ACTIONS = 48  # that a failure comes down to: the one with most takes 44, since something happens in the midst of calls
#: With which few actions show what others show late.
SEEDS = {"no_generation_check": 9, "a_reply_that_is_not_sent_keeps_its_slot": 13}
#: What comes down to few actions where nothing happens in the midst of calls.
PLAIN = {"requests_end_twice", "a_cancelled_turn_is_nobodys", "a_reply_that_is_not_sent_keeps_its_slot"}


# -- walking and exploring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [2_000, slow(50_000)])
def test_a_walk_finds_nothing_and_everything_happens(steps: int) -> None:
    walked = walk(steps, seed=23, injectors=1, stops=True)
    assert walked.failure is None
    assert walked.steps == steps
    assert walked.states > 0.75 * steps
    if steps >= 50_000:  # a short one may leave out what is rare
        assert walked.episodes > 2
        assert [kind for kind in Kind if not walked.actions[kind]] == []


@pytest.mark.parametrize("steps", [800, slow(10_000)])
def test_a_walk_with_the_models_beside_finds_no_difference(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(books, "chosen", books.PAIRS)
    walked = walk(steps, seed=11, injectors=1, stops=True)
    assert walked.failure is None
    assert walked.steps == steps


def test_a_walk_is_what_its_seed_says() -> None:
    walks = [walk(200, seed) for seed in (3, 3, 4)]
    assert walks[0].actions == walks[1].actions
    assert walks[0].states == walks[1].states
    assert walks[0].actions != walks[2].actions


@pytest.mark.parametrize("name", ["idle", slow("crowded"), slow("lives")])
def test_every_state_of_a_small_scenario_is_sound(name: str) -> None:
    found = explore(name, max_states=20_000)
    assert found.failure is None
    assert found.complete
    assert found.states > 350  # slots go back in the record of a request's end: fewer than if each had a record
    assert found.settled > 100


@pytest.mark.parametrize(("name", "max_states"), [("stopped", 1_200), slow("unread", 1_100), slow("overtaken", 1_000)])
def test_nobody_waits_without_need_for_who_has_stopped_or_reads_nothing(name: str, max_states: int) -> None:
    """In the first states, in which what was wrong once showed."""
    found = explore(name, max_states)
    assert found.failure is None
    assert found.settled > 100


def test_who_waits_behind_several_windows_is_served_when_these_were_given_up() -> None:
    """They lie over what processes keep whose connections have ended, and each is kept for a second."""
    scenario = Scenario(
        leasable_blocks=20, reply_blocks=1, max_lease_blocks=9, quota_blocks=4, max_leases=1, max_inflight=5, base_blocks=3,
        lease_blocks=2, processes=4, stops=True, slot_blocks=(1, 2, 6, 20), reply_blocks_wanted=(0, 1), max_slots=3,
        max_queue=8, turns_wait=True, looks=True,
    )  # fmt: skip
    with closing(Simulation(scenario)) as simulation:
        for action in (
            Action(Kind.CONNECT, 2),
            *(Action(Kind.FORGE, process, Forgery.OLD_EPOCH) for process in (1, 2)),
            *(Action(Kind.CONNECT, process) for process in (2, 1)),
            *(
                Action(Kind.REQUEST, process, blocks)
                for process, blocks in ((2, 20), (1, 20), (1, 6), (1, 6), (2, 2), (0, 20), (0, 6))
            ),
        ):
            simulation.apply(action)
        simulation.settle()


def test_an_exploration_that_is_cut_short_says_so() -> None:
    found = explore("requests", max_states=200)
    assert not found.complete
    assert found.failure is None
    assert found.states >= 200


# -- states --------------------------------------------------------------------------------------------------------------------


def walked_simulation(seed: int, steps: int) -> Simulation:
    random = Random(seed)
    simulation = Simulation(Scenario.draw(random))
    for _ in range(steps):
        simulation.happen(choose(random, simulation.enabled()))
    return simulation


@for_each("seed", range(8))
def test_a_copy_is_the_same_state_and_goes_its_own_way(seed: int) -> None:
    with closing(walked_simulation(seed, 200)) as simulation, closing(duplicate(simulation)) as copy:
        before = encode(simulation)
        assert encode(copy) == before
        assert copy.enabled() == simulation.enabled()
        random = Random(seed)
        for _ in range(50):
            copy.apply(choose(random, copy.enabled()))
        copy.settle()
        assert encode(simulation) == before
        simulation.check()


def test_numbers_that_only_name_something_make_no_difference() -> None:
    simulation = Simulation(msgspec.structs.replace(EXPLORATIONS["idle"], max_slots=2))
    simulation.apply(Action(Kind.TRY, 0, 1))  # takes the base lease's only block
    before = encode(simulation)
    for action in (
        Action(Kind.TRY, 0, 1),  # asks for a further lease in passing
        Action(Kind.TO_ENGINE, 0),
        Action(Kind.TO_FRONTEND, 0),
        Action(Kind.TRY, 0, 1),  # finds it
        Action(Kind.LEAVE, 0, 1),
        Action(Kind.TICK),
        Action(Kind.FRONTEND_TIMER, 0),
        Action(Kind.TO_ENGINE, 0),
    ):
        assert action in simulation.enabled()
        simulation.apply(action)
    assert encode(simulation) == before


def test_what_can_be_told_apart_is_another_state() -> None:
    simulation = Simulation(EXPLORATIONS["disturbed"])
    states = {encode(simulation)}
    actions = [Action(Kind.REQUEST, 0, 1), Action(Kind.COPIED, 0), Action(Kind.TO_ENGINE, 0), Action(Kind.CLAIM)]
    actions += [Action(Kind.ABORT, 0), Action(Kind.TO_ENGINE, 0), Action(Kind.FINISH), Action(Kind.TO_FRONTEND, 0)]
    for count, action in enumerate(actions, start=2):
        simulation.apply(action)
        states.add(encode(simulation))
        assert len(states) == count


def successors(scenario: Scenario, trace: Sequence[Action]) -> set[bytes]:
    """All states that can follow after a trace."""

    def world(*actions: Action) -> Simulation:
        simulation = Simulation(scenario)
        for action in (*trace, *actions):
            simulation.happen(action)
        return simulation

    with closing(world()) as simulation:
        enabled = simulation.enabled()
    found = set()
    for action in enabled:
        with closing(world(action)) as simulation:
            found.add(encode(simulation))
    return found


@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize("name", EXPLORATIONS)
def test_what_follows_from_equal_states_is_equal(name: str) -> None:
    """Else something that makes a difference is left out of a state."""
    scenario = EXPLORATIONS[name]
    traces: dict[bytes, list[Action]] = {}
    queue: deque[list[Action]] = deque([[]])
    equal: list[tuple[list[Action], list[Action]]] = []  # in pairs
    while queue and len(equal) < 600:
        trace = queue.popleft()
        with closing(Simulation(scenario)) as simulation:
            for action in trace:
                simulation.happen(action)
            enabled = simulation.enabled()
        for action in enabled:
            with closing(Simulation(scenario)) as simulation:
                for earlier in (*trace, action):
                    simulation.happen(earlier)
                state = encode(simulation)
            if state not in traces:
                traces[state] = [*trace, action]
                queue.append([*trace, action])
            else:
                equal.append((traces[state], [*trace, action]))
    assert len(equal) > 20
    for one, other in Random(name).sample(equal, min(60, len(equal))):
        assert successors(scenario, one) == successors(scenario, other), f"{[*map(str, one)]} and {[*map(str, other)]}"


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_no_field_of_the_books_is_left_out_of_a_state() -> None:
    """A new field belongs into ``tests/simulation/state.py``, and then here."""
    assert {name: set(fields) for name, fields in FIELDS.items()} == {
        "EngineBook": {
            "clients", "lendings", "_replies", "_reply_wants", "_may_overtake", "_next_reply_generation", "_lent_replies",
            "late_aborts", "stale_releases", "kept", "_next_use", "_is_draining",
        },
        "KeptBook": {
            "by_key", "by_generation", "unpinned", "waits", "dropped", "hits", "misses", "refusals", "taken", "withdrawn",
            "evictions", "evictions_for_content", "evicted_nbytes", "deliveries_dropped",
        },
        "KeptRecord": {"generation", "key", "start", "blocks", "nbytes", "is_copied", "payload", "pins", "hits", "for_one"},
        "Lending": {"_free", "_wants", "_window", "_next_lease_id"},
        "LeaseRecord": {
            "lease_id", "client_id", "memory", "start", "blocks", "state", "live", "recalled", "given_up", "kept_blocks",
            "new_moments", "silent_moments",
        },
        "EngineSlotRecord": {"generation", "lease", "start", "blocks", "state", "kept"},
        "RequestRecord": {"request_id", "slots", "state", "unread_replies"},
        "LeaseWant": {"client_id", "token", "blocks", "preferred_blocks", "waits", "rest_moments", "patience"},
        "ReplyWant": {"client_id", "blocks", "request_id"},
        "Window": {"client_id", "start", "blocks", "next_lease_id", "vain_moments"},
        "ClientRecord": {
            "client_id", "last_generation", "last_request_id", "connected", "dead", "leases", "slots", "requests", "replies",
            "unsent_replies", "pins", "waits",
        },
        "ClientBook": {
            "leases", "_waiters", "_submitted", "_others", "_token", "_requested_nbytes", "_request_waits",
            "_wish_nbytes", "_next_generation",
        },
        "HeldLease": {"lease_id", "is_base", "slots", "empty_since", "recalled", "kept_blocks"},
        "ClientSlotRecord": {"lease", "start", "blocks", "nbytes", "state", "held", "viewed", "generation"},
        "Waiter": {"nbytes", "held", "vain_moments", "rest_moments", "patience"},
    }  # fmt: skip
    assert fields(Caller) == {"wants", "detail", "task", "slots", "number"}
    assert fields(Handling) == {"claim", "number", "replies", "replying", "is_last", "is_released", "is_left"}
    assert fields(HeldReply) == {"generation", "start", "blocks", "array"}


# -- what is broken on purpose ------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def mutate(patch: Patch, **events: Callable[..., Any]) -> None:
    """Breaks events of a book: those that shells ask for. ``make guards`` builds mutants of what compiled ends do in C."""
    mutants = []
    for book in (ObservedEngineBook, ObservedClientBook):
        own = {name: event for name, event in events.items() if hasattr(book, name)}
        mutants.append(type(book.__name__, (book,), {"follow": lambda *arguments, **named: None, **own}))
    patch.setattr(books, "chosen", books.Books(*mutants))


def no_quarantine(patch: Patch) -> None:
    def disconnect(book: EngineBook, client_id: int) -> list[EngineEffect]:
        book.clients[client_id].dead = True  # as if the end of a connection were a proof
        return EngineBook.disconnect(book, client_id)

    mutate(patch, disconnect=disconnect)


def death_is_enough(patch: Patch) -> None:
    def died(book: EngineBook, client_id: int) -> list[EngineEffect]:
        client = book.clients.get(client_id)
        for lease in client.leases.values() if client is not None else ():
            lease.live = TakenRuns()  # as if no claim of ours read anything
        return EngineBook.died(book, client_id)

    mutate(patch, died=died)


def no_generation_check(patch: Patch) -> None:
    def follow(book: EngineBook, name: str, client_id: int, *arguments: Any, **named: Any) -> None:
        if name == "submit" and isinstance(book, EngineBook):
            book.clients[client_id].last_generation = 0

    mutate(patch, follow=follow)


def no_draining_in_the_engine(patch: Patch) -> None:
    def follow(book: EngineBook, name: str, client_id: int, *arguments: Any, **named: Any) -> None:
        if name == "release_slots":
            for generation in arguments[1]:
                EngineBook.last_view_gone(book, client_id, generation)  # as if no view of it could be alive

    mutate(patch, follow=follow)


def no_draining_in_a_frontend(patch: Patch) -> None:
    left_viewed = HostSlots.left_viewed

    def mutated(slots: HostSlots, record: Any) -> None:
        left_viewed(slots, record)
        record.viewed = False  # the same

    patch.setattr(HostSlots, "left_viewed", mutated)


def abort_releases_what_is_read(patch: Patch) -> None:
    def abort(book: EngineBook, client_id: int, request_id: int) -> list[EngineEffect]:
        request = book.clients[client_id].requests.get(request_id)
        generations = [] if request is None else [slot.generation for slot in request.slots or ()]
        is_claimed = request is not None and request.state is Request.RUNNING
        effects = EngineBook.abort(book, client_id, request_id)
        there = [generation for generation in generations if generation in book.clients[client_id].slots]
        return effects + (EngineBook.release_slots(book, client_id, there, ()) if is_claimed and there else [])

    mutate(patch, abort=abort)


def goodbye_keeps_nothing(patch: Patch) -> None:
    def goodbye(book: EngineBook, client_id: int, leases: Any, replies: Any, pinned: Any = ()) -> list[EngineEffect]:
        return EngineBook.goodbye(book, client_id, (), replies, pinned)

    mutate(patch, goodbye=goodbye)


def goodbye_keeps_no_replies(patch: Patch) -> None:
    def goodbye(book: EngineBook, client_id: int, leases: Any, replies: Any, pinned: Any = ()) -> list[EngineEffect]:
        return EngineBook.goodbye(book, client_id, leases, (), pinned)

    mutate(patch, goodbye=goodbye)


def nobody_is_woken_by_a_return(patch: Patch) -> None:
    def return_leases(book: EngineBook, client_id: int, lease_ids: Collection[int]) -> list[EngineEffect]:
        return [effect for effect in EngineBook.return_leases(book, client_id, lease_ids) if not isinstance(effect, Granted)]

    mutate(patch, return_leases=return_leases)


def a_cancelled_waiter_keeps_its_turn(patch: Patch) -> None:
    def cancel(book: ClientBook, ticket: int) -> list[ClientEffect]:
        book._waiters.pop(ticket, None)
        return []

    mutate(patch, cancel=cancel)


def recalls_are_not_heard(patch: Patch) -> None:
    mutate(patch, recalled=lambda book, lease_ids: [])


def requests_end_twice(patch: Patch) -> None:
    def end(book: EngineBook, client_id: int, request_id: int, event: RequestEvent) -> bool:
        EngineBook.end(book, client_id, request_id, event)
        return True

    mutate(patch, end=end)
    patch.setattr(Claim, "_end_with", lambda claim, event, error: claim._shell.end_claim(claim, event, error))


def a_block_is_lost(patch: Patch) -> None:
    def return_leases(book: EngineBook, client_id: int, lease_ids: Collection[int]) -> list[EngineEffect]:
        starts = [lease.start for lease in book.clients[client_id].leases.values() if lease.lease_id in lease_ids]
        effects = EngineBook.return_leases(book, client_id, lease_ids)
        for start in starts:
            book.host._free.carve(start, 1)
        return effects

    mutate(patch, return_leases=return_leases)


# What the shells do, and what is between two awaits of theirs.


def who_was_cancelled_keeps_what_came(patch: Patch) -> None:
    """A waiter to whom its slot comes as it is cancelled."""
    stay = WaitingLine.stay

    def mutated(line: WaitingLine[Any], place: Place[Any], unused: Any, left: Any = None) -> Any:
        return stay(line, place, lambda thing: None if isinstance(thing, ClientSlotRecord) else unused(thing), left)

    patch.setattr(WaitingLine, "stay", mutated)


def who_waits_for_space_keeps_its_turn(patch: Patch) -> None:
    """What the simulator has found: all who are in flight wait for the space of slots whose holders wait for their turn."""

    async def mutated(sending: Sending, nbytes: int, flight: Any) -> Any:
        return await sending._host_slots.acquire(nbytes, held=False)

    patch.setattr(Sending, "_space", mutated)


def a_cancelled_turn_is_nobodys(patch: Patch) -> None:
    async def mutated(sending: Sending, *, again: bool) -> None:
        sending.end.crowded = True
        await sending._turns.enter()

    patch.setattr(Sending, "turn", mutated)


def a_copy_that_is_cancelled_keeps_its_slot(patch: Patch) -> None:
    patch.setattr(RealSession, "give_up", lambda session, slot: None, raising=False)
    patch.setattr(Slots, "give_up", lambda slots, record: None)


def a_reply_that_is_not_sent_keeps_its_slot(patch: Patch) -> None:
    def granted(replies: Replies, place: Place[Any], slot: Any) -> list[EngineEffect]:
        give(place, slot)
        return []

    patch.setattr(Replies, "granted", granted)


def what_was_dropped_is_not_looked_for(patch: Patch) -> None:
    patch.setattr(RealSession, "expect_unread", lambda session: None)


def who_is_silent_is_waited_for(patch: Patch) -> None:
    mutate(patch, moment_passed=lambda book: [])


def callers_wait_for_who_has_the_turn(patch: Patch) -> None:
    def mutated(slots: Slots) -> None:
        slots._moment = None
        slots.carry_out([])

    patch.setattr(Slots, "_moment_passed", mutated)


def deaths_of_views_are_not_heard(patch: Patch) -> None:
    patch.setattr(RealSession, "_collect_deaths", lambda session: session._regions.collect())


def nobody_is_told_of_the_end(patch: Patch) -> None:
    lose = Slots.lose
    patch.setattr(Slots, "lose", lambda slots: lose(slots)[:0])


def an_abort_takes_what_a_handler_reads(patch: Patch) -> None:
    forget_claim = Shell._request_aborted

    def mutated(shell: Shell, effect: Any) -> None:
        claim = shell.end.claims.get((effect.client_id, effect.request_id))
        forget_claim(shell, effect)
        if claim is not None:
            claim.release()

    patch.setattr(Shell, "_request_aborted", mutated)


@pytest.mark.timeout(900)  # 60,000 steps take more than a minute
@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize(
    "mutation",
    [
        no_quarantine,
        death_is_enough,
        no_generation_check,
        no_draining_in_the_engine,
        no_draining_in_a_frontend,
        abort_releases_what_is_read,
        goodbye_keeps_nothing,
        goodbye_keeps_no_replies,
        nobody_is_woken_by_a_return,
        a_cancelled_waiter_keeps_its_turn,
        recalls_are_not_heard,
        requests_end_twice,
        a_block_is_lost,
        who_was_cancelled_keeps_what_came,
        who_waits_for_space_keeps_its_turn,
        a_cancelled_turn_is_nobodys,
        a_copy_that_is_cancelled_keeps_its_slot,
        a_reply_that_is_not_sent_keeps_its_slot,
        deaths_of_views_are_not_heard,
        nobody_is_told_of_the_end,
        an_abort_takes_what_a_handler_reads,
    ],
)
def test_what_is_broken_is_found_and_comes_down_to_a_few_actions(mutation: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        walked = walk(MOST_STEPS, SEEDS.get(mutation.__name__, 8), in_the_midst=mutation.__name__ not in PLAIN)
        assert walked.failure is not None
        print(f"{mutation.__name__}: step {walked.steps}, {len(walked.failure.trace)} actions: {walked.failure.text}")
        assert len(walked.failure.trace) <= MOST_ACTIONS
        assert str(replay(walked.failure)) == walked.failure.text
    assert replay(walked.failure) is None


@pytest.mark.slow  # the same
@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        (what_was_dropped_is_not_looked_for, "dropped"),
        (who_is_silent_is_waited_for, "stopped"),
        (callers_wait_for_who_has_the_turn, "overtaken"),
    ],
)
def test_what_needs_few_actions_is_found_with_the_fewest(mutation: Callable[[Patch], None], name: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        found = explore(name, max_states=20_000)
        assert found.failure is not None
        assert str(replay(found.failure)) == found.failure.text
    assert replay(found.failure) is None


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_walks_and_writes_what_it_did(tmp_path: Path) -> None:
    path = tmp_path / "walk.json"
    result = CliRunner().invoke(simulate_command, ["--steps", "600", "--seed", "2", "--json", str(path)])
    assert result.exit_code == 0
    assert "600 steps" in result.output
    written = json.loads(path.read_bytes())
    assert (written["seed"], written["steps"], written["failure"]) == (2, 600, None)
    assert sum(written["actions"].values()) == 600
    assert CliRunner().invoke(simulate_command, ["--replay", str(path)]).exit_code == 1  # there is nothing to run again


def test_the_command_explores_and_says_what_was_complete(tmp_path: Path) -> None:
    path = tmp_path / "explored.json"
    arguments = ["--scenario", "code of shapes", "--scenario", "requests", "--max-states", "200", "--json", str(path)]
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code == 0
    explored = json.loads(path.read_bytes())["explorations"]
    assert [(found["name"], found["complete"]) for found in explored] == [("code of shapes", True), ("requests", False)]


@pytest.mark.slow  # seconds of computing each
@pytest.mark.parametrize("arguments", [["--steps", "5000", "--seed", "1"], ["--scenario", "disturbed"]])
def test_a_violation_can_be_run_again_until_it_holds(tmp_path: Path, arguments: list[str]) -> None:
    path = tmp_path / "failure.json"
    with pytest.MonkeyPatch.context() as patch:
        no_quarantine(patch)
        result = CliRunner().invoke(simulate_command, [*arguments, "--json", str(path)])
        assert result.exit_code == 1
        assert "memory was taken back that its process can still write" in result.stderr
        again = CliRunner().invoke(simulate_command, ["--replay", str(path)])
        assert again.exit_code == 1
        assert "memory was taken back that its process can still write" in again.stderr
    fixed = CliRunner().invoke(simulate_command, ["--replay", str(path)])
    assert fixed.exit_code == 0
    assert "it holds now" in fixed.output


def test_a_failure_comes_down_to_the_same_actions_however_busy_the_machine_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here an hour passes between any two looks at a clock that others than this process move on."""
    clock = itertools.count(step=3600)
    for name in ("perf_counter", "monotonic"):
        monkeypatch.setattr(time, name, lambda: float(next(clock)))
    needed = {Action(Kind.TICK, 3), Action(Kind.TICK, 77)}

    def replayed(failure: Failure) -> Violation | None:
        return Violation("it broke") if needed <= set(failure.trace) else None

    monkeypatch.setattr("tests.simulation.failure.replay", replayed)
    trace = tuple(Action(Kind.TICK, number) for number in range(100))
    assert set(shorten(Failure("it broke", EXPLORATIONS["requests"], trace, settles=False)).trace) == needed
