"""The simulator of both books: it walks, explores, tells states apart, and finds what is broken on purpose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from shmring.core.effects import Acquired, ClientEffect, EngineEffect, Send
from shmring.core.messages import SlotRef
from shmring.core.states import ENGINE_SLOT, ClientSlot, EngineSlot, EngineSlotEvent, RequestEvent
from tests.model import records
from tests.model.blocks import TakenRuns
from tests.model.client_book import ClientBook
from tests.model.engine_book import EngineBook
from tests.model.state import FIELDS
from tests.simulation import books
from tests.simulation.command import simulate_command
from tests.simulation.exploration import EXPLORATIONS, explore
from tests.simulation.failure import replay
from tests.simulation.frontend import HeldReply, Session, Waiter
from tests.simulation.scenario import Action, Kind, Scenario
from tests.simulation.simulation import Simulation
from tests.simulation.state import duplicate, encode
from tests.simulation.walk import choose, walk

MOST_STEPS = 60_000  # in which a walk must find what is broken on purpose
SEEDS = {"no_generation_check": 9, "a_cancelled_waiter_keeps_its_turn": 11}  # with which few actions show what others show late


# -- walking and exploring -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [8_000, pytest.param(50_000, marks=pytest.mark.slow)])
def test_a_walk_finds_nothing_and_everything_happens(steps: int) -> None:
    walked = walk(steps, seed=12)
    assert walked.failure is None
    assert walked.steps == steps
    assert walked.episodes > 2
    assert walked.states > 0.75 * steps
    assert [kind for kind in Kind if not walked.actions[kind]] == []


def test_a_walk_with_the_models_beside_finds_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "chosen", books.PAIRS)
    walked = walk(3_000, seed=11)
    assert walked.failure is None
    assert walked.steps == 3_000


@pytest.mark.parametrize("seed", range(4))
def test_the_ends_do_what_their_models_do(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    random = Random(seed)
    scenario = msgspec.structs.replace(Scenario.draw(random), workers=0)  # whose ends are the product's in any case
    compiled = Simulation(scenario)
    monkeypatch.setattr(books, "chosen", books.MODELS)
    modelled = Simulation(scenario)
    for _ in range(400):
        actions = compiled.enabled()
        assert modelled.enabled() == actions
        action = choose(random, actions)
        for simulation, chosen in ((compiled, books.COMPILED), (modelled, books.MODELS)):
            monkeypatch.setattr(books, "chosen", chosen)  # of lives and sessions that begin
            simulation.apply(action)
        assert encode(modelled) == encode(compiled)
        contents = [memoryview(world.engine.slab) for world in (compiled, modelled) if world.engine is not None]
        assert contents[:1] == contents[1:]  # headers and arrays


def test_a_walk_is_what_its_seed_says() -> None:
    walks = [walk(600, seed) for seed in (3, 3, 4)]
    assert walks[0].actions == walks[1].actions
    assert walks[0].states == walks[1].states
    assert walks[0].actions != walks[2].actions


@pytest.mark.parametrize(
    "name", ["idle", pytest.param("crowded", marks=pytest.mark.slow), pytest.param("lives", marks=pytest.mark.slow)]
)
def test_every_state_of_a_small_scenario_is_sound(name: str) -> None:
    found = explore(name, max_states=20_000)
    assert found.failure is None
    assert found.complete
    assert found.states > 350  # slots go back in the record of a request's end: fewer than if each had a record
    assert found.settled > 100


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


@pytest.mark.parametrize("seed", range(8))
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
        Action(Kind.EXPIRE, 0),
        Action(Kind.TO_ENGINE, 0),
    ):
        assert action in simulation.enabled()
        simulation.apply(action)
    assert encode(simulation) == before


def test_what_can_be_told_apart_is_another_state() -> None:
    simulation = Simulation(EXPLORATIONS["disturbed"])
    states = {encode(simulation)}
    actions = [Action(Kind.REQUEST, 0, 1), Action(Kind.SEND, 0), Action(Kind.TO_ENGINE, 0), Action(Kind.CLAIM)]
    actions += [Action(Kind.ABORT, 0), Action(Kind.TO_ENGINE, 0), Action(Kind.FINISH), Action(Kind.TO_FRONTEND, 0)]
    for count, action in enumerate(actions, start=2):
        simulation.apply(action)
        states.add(encode(simulation))
        assert len(states) == count


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def test_no_field_of_the_books_is_left_out_of_a_state() -> None:
    """A new field belongs into ``tests/simulation/state.py``, and then here."""
    assert {name: set(fields) for name, fields in FIELDS.items()} == {
        "EngineBook": {
            "clients", "lendings", "_replies", "_reply_wants", "_next_reply_generation", "_lent_replies", "late_aborts",
            "stale_releases", "kept", "_next_use",
        },
        "KeptBook": {"by_key", "by_generation", "unpinned", "hits", "misses", "evictions"},
        "KeptRecord": {"generation", "key", "start", "blocks", "nbytes", "is_copied", "payload", "pins"},
        "Lending": {"_free", "_wants", "_window", "_next_lease_id"},
        "LeaseRecord": {
            "lease_id", "client_id", "memory", "start", "blocks", "state", "live", "recalled", "given_up", "kept_blocks",
        },
        "EngineSlotRecord": {"generation", "lease", "start", "blocks", "state", "kept"},
        "RequestRecord": {"request_id", "slots", "state"},
        "LeaseWant": {"client_id", "token", "blocks", "preferred_blocks", "waits"},
        "ReplyWant": {"client_id", "blocks"},
        "Window": {"client_id", "start", "blocks"},
        "ClientRecord": {
            "client_id", "last_generation", "last_request_id", "connected", "dead", "leases", "slots", "requests", "replies",
            "unsent_replies", "pins",
        },
        "ClientBook": {
            "leases", "_waiters", "_submitted", "_others", "_token", "_requested_nbytes", "_request_waits",
            "_wish_nbytes", "_next_generation",
        },
        "HeldLease": {"lease_id", "is_base", "slots", "empty_since", "recalled", "kept_blocks"},
        "ClientSlotRecord": {"lease", "start", "blocks", "nbytes", "state", "held", "viewed", "generation"},
        "Waiter": {"nbytes", "held"},
    }  # fmt: skip
    assert fields(Waiter) == {"is_held", "blocks", "cancelled"}
    assert fields(HeldReply) == {"generation", "start", "blocks", "view"}


# -- what is broken on purpose ------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


@pytest.fixture
def models(monkeypatch: Patch) -> None:
    """Simulations are of the models: the compiled books can't be patched. ``make guards`` builds mutants of those."""
    monkeypatch.setattr(books, "chosen", books.MODELS)


def no_quarantine(patch: Patch) -> None:
    disconnect = EngineBook.disconnect

    def mutated(book: EngineBook, client_id: int) -> list[EngineEffect]:
        book.clients[client_id].dead = True  # as if the end of a connection were a proof
        return disconnect(book, client_id)

    patch.setattr(EngineBook, "disconnect", mutated)


def death_is_enough(patch: Patch) -> None:
    died = EngineBook.died

    def mutated(book: EngineBook, client_id: int) -> list[EngineEffect]:
        client = book.clients.get(client_id)
        for lease in client.leases.values() if client is not None else ():
            lease.live = TakenRuns()  # as if no claim of ours read anything
        return died(book, client_id)

    patch.setattr(EngineBook, "died", mutated)


def no_generation_check(patch: Patch) -> None:
    publish = EngineBook._publish

    def mutated(book: EngineBook, client: records.ClientRecord, slot: SlotRef, last: int) -> records.EngineSlotRecord:
        return publish(book, client, slot, -1)

    patch.setattr(EngineBook, "_publish", mutated)


def no_lease_check(patch: Patch) -> None:
    publish = EngineBook._publish

    def mutated(book: EngineBook, client: records.ClientRecord, slot: SlotRef, last: int) -> records.EngineSlotRecord:
        leases = {lease.lease_id: lease for other in book.clients.values() for lease in other.leases.values()}
        return publish(book, dataclasses.replace(client, leases=leases), slot, last)

    patch.setattr(EngineBook, "_publish", mutated)


def no_draining_in_the_engine(patch: Patch) -> None:
    release_slots = EngineBook.release_slots

    def mutated(book: EngineBook, client_id: int, generations: Sequence[int], viewed: Collection[int]) -> list[EngineEffect]:
        return release_slots(book, client_id, generations, ())

    patch.setattr(EngineBook, "release_slots", mutated)


def no_draining_in_a_frontend(patch: Patch) -> None:
    leave = ClientBook._leave

    def mutated(book: ClientBook, slot: Any, event: Any, event_viewed: Any, now: float) -> None:
        slot.viewed = False  # as if no view of it could be alive
        leave(book, slot, event, event_viewed, now)

    patch.setattr(ClientBook, "_leave", mutated)


def abort_releases_what_is_read(patch: Patch) -> None:
    patch.setitem(ENGINE_SLOT[EngineSlot.CLAIMED], EngineSlotEvent.ABORT, EngineSlot.RELEASED)


def goodbye_keeps_nothing(patch: Patch) -> None:
    goodbye = EngineBook.goodbye

    def mutated(
        book: EngineBook, client_id: int, leases: Collection[int], replies: Collection[int], pinned: Collection[int] = ()
    ) -> list[EngineEffect]:
        return goodbye(book, client_id, (), replies, pinned)

    patch.setattr(EngineBook, "goodbye", mutated)


def goodbye_keeps_no_replies(patch: Patch) -> None:
    goodbye = EngineBook.goodbye

    def mutated(
        book: EngineBook, client_id: int, leases: Collection[int], replies: Collection[int], pinned: Collection[int] = ()
    ) -> list[EngineEffect]:
        return goodbye(book, client_id, leases, (), pinned)

    patch.setattr(EngineBook, "goodbye", mutated)


def nobody_is_woken_by_a_return(patch: Patch) -> None:
    return_leases = EngineBook.return_leases

    def mutated(book: EngineBook, client_id: int, lease_ids: Collection[int]) -> list[EngineEffect]:
        with pytest.MonkeyPatch.context() as unserved:
            unserved.setattr(book, "_serve_wants", list)
            return return_leases(book, client_id, lease_ids)

    patch.setattr(EngineBook, "return_leases", mutated)


def a_cancelled_waiter_keeps_its_turn(patch: Patch) -> None:
    def mutated(book: ClientBook, ticket: int) -> list[ClientEffect]:
        book._waiters.pop(ticket, None)
        return []

    patch.setattr(ClientBook, "cancel", mutated)


def recalls_are_not_heard(patch: Patch) -> None:
    patch.setattr(ClientBook, "recalled", lambda book, lease_ids: [])


def requests_end_twice(patch: Patch) -> None:
    def mutated(book: EngineBook, client_id: int, request_id: int, event: RequestEvent) -> bool:
        return True

    patch.setattr(EngineBook, "end", mutated)


def a_block_is_lost(patch: Patch) -> None:
    take_back = EngineBook._take_back

    def mutated(book: EngineBook, client: records.ClientRecord, lease: records.LeaseRecord) -> None:
        take_back(book, client, lease)
        if not book.host._free.carve(lease.start, 1):
            raise AssertionError("the lease was not free")

    patch.setattr(EngineBook, "_take_back", mutated)


def one_event_in_the_midst_of_another(patch: Patch) -> None:
    """A frontend that gives a slot up before it has sent what the event before asked it to send."""

    def mutated(session: Session, effects: Sequence[ClientEffect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    session.send(message)
                case Acquired(ticket, slot):
                    waiter = session.waiters.pop(ticket)
                    if waiter.cancelled:
                        session._gives_up(waiter)
                        session.carry_out(session.book.give_up(slot, session.now))
                    else:
                        session._take(slot)
        session.slots = [slot for slot in session.slots if slot.state is not ClientSlot.FREE]

    patch.setattr(Session, "carry_out", mutated)


@pytest.mark.slow  # seconds of computing each
@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    "mutation",
    [
        no_quarantine,
        death_is_enough,
        no_generation_check,
        no_lease_check,
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
        one_event_in_the_midst_of_another,
    ],
)
def test_what_is_broken_is_found_and_comes_down_to_a_few_actions(mutation: Callable[[Patch], None]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        walked = walk(MOST_STEPS, seed=SEEDS.get(mutation.__name__, 8))
        assert walked.failure is not None
        print(f"{mutation.__name__}: step {walked.steps}, {len(walked.failure.trace)} actions: {walked.failure.text}")
        assert len(walked.failure.trace) <= 40
        assert str(replay(walked.failure)) == walked.failure.text
    assert replay(walked.failure) is None


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
    arguments = ["--scenario", "idle", "--scenario", "requests", "--max-states", "600", "--json", str(path)]
    result = CliRunner().invoke(simulate_command, arguments)
    assert result.exit_code == 0
    explored = json.loads(path.read_bytes())["explorations"]
    assert [(found["name"], found["complete"]) for found in explored] == [("idle", True), ("requests", False)]


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("arguments", [["--steps", "5000"], ["--scenario", "disturbed"]])
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
