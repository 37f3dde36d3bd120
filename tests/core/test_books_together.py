"""Both books against each other: one engine, several frontends, and whatever may happen between them next.

The model is the simulator's (``tests.simulation``), which checks all invariants after every action; hypothesis draws the
scenario and the actions, and shortens what fails. At the end everybody finishes what was begun and leaves: nobody may
wait for ever, and the slab must come home whole.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.simulation.scenario import Kind, Scenario
from tests.simulation.simulation import Simulation

# Half a minute on an idle machine; what hypothesis draws, a crowded machine and the measuring of coverage each can double that.
pytestmark = pytest.mark.timeout(400)

MAX_DEPARTURES = 4  # in one example; else most steps would be about frontends that come and go
DEPARTURES = {Kind.GOODBYE, Kind.HANG_UP, Kind.CRASH, Kind.ENGINE_HANGS_UP, Kind.ENGINE_DIES, Kind.FORGE, Kind.CONNECT_FAILS}


class TogetherMachine(RuleBasedStateMachine):
    """What callers, sockets, processes and the engine's handlers may do, in any order."""

    @initialize(number=st.integers(0, 1000))
    def create(self, number: int) -> None:
        self.simulation = Simulation(Scenario.draw(Random(number)))
        self.departures = 0

    @rule(data=st.data())
    def happen(self, data: Any) -> None:
        """The kind is drawn first, or most actions would be of the kind of which most are enabled."""
        enabled = self.simulation.enabled()
        kinds = sorted({action.kind for action in enabled})
        if self.departures >= MAX_DEPARTURES:
            kinds = [kind for kind in kinds if kind not in DEPARTURES] or kinds
        kind = data.draw(st.sampled_from(kinds), label="kind")
        self.departures += kind in DEPARTURES
        actions = [action for action in enabled if action.kind is kind]
        action = data.draw(st.sampled_from(actions), label="action")
        self.simulation.apply(action)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.settle()


TestTogetherMachine = TogetherMachine.TestCase
TestTogetherMachine.settings = settings(stateful_step_count=100)
