"""``bench far``: what is planned, what its report makes of measurements, and a short run of each kind."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from bench.__main__ import main
from bench.far.command import CASES, PLAN, Near, Rate, Sent, Waits
from bench.far.loads import LOADS
from bench.far.serving import TOKEN
from tests.gateway.test_far_clients import gateway_of, serving
from tests.tables import for_each
from tests.waiting import cancel, eventually

MIB = 1 << 20


def test_every_load_and_size_is_measured_plain_and_with_tls() -> None:
    sent = [case for case in CASES if isinstance(case, Sent)]
    assert {(case.nbytes, case.encrypted) for case in sent} == {
        (nbytes, encrypted) for nbytes in (MIB // 16, MIB, 8 * MIB, 64 * MIB) for encrypted in (False, True)
    }
    assert {case.load for case in CASES if isinstance(case, Near)} == set(LOADS)
    assert {verdict.met for verdict in PLAN.findings({}).targets} == {None}


def test_the_worst_case_decides_a_target() -> None:
    calm, busy = (Near(load) for load in list(LOADS)[:2])
    measured = {
        Sent(8 * MIB, 1, False): {"shmring": [Rate(90.0, 1.0)], "stream": [Rate(100.0, 2.0)]},
        Sent(8 * MIB, 16, False): {"shmring": [Rate(80.0, 1.0)], "stream": [Rate(100.0, 2.0)]},
        calm: {"beside a neutral load": [Waits([1.0] * 100)], "beside far clients": [Waits([1.0] * 100)]},
        busy: {"beside a neutral load": [Waits([1.0] * 100)], "beside far clients": [Waits([1.0] * 97 + [9.0] * 3)]},
    }
    findings = PLAN.findings(measured)
    verdicts = {(verdict.what, verdict.at): (verdict.met, verdict.measured) for verdict in findings.targets}
    assert verdicts["far clients: requests/s of streams of asyncio", "8 MB and more"] == (False, "0.8 x")
    assert verdicts["far clients: CPU of streams of asyncio", "8 MB and more"] == (True, "0.5 x")
    assert verdicts["near clients' p99 beside far clients, of that beside a neutral load", "any load"] == (False, "9 x")
    assert len(findings.tables) == 2


@for_each("number", range(len(LOADS)))
async def test_a_load_does_what_its_name_says(socket_dir: Path, number: int) -> None:
    """It says nothing if the engine refuses it."""
    async with serving(socket_dir, "bench-far", token=TOKEN) as ring:
        gateway = gateway_of(ring)
        is_there: list[Callable[[], bool]] = [
            lambda: gateway._filling.waiting > 0 and ring.statistics().submitted == 0,
            lambda: gateway.refused > 100,
            lambda: ring.statistics().submitted > 100,
        ]
        load = asyncio.create_task(list(LOADS.values())[number](ring.address))
        await eventually(lambda: is_there[number]() or load.done(), 60)
        assert not load.done()
        await cancel(load)


def test_a_run_measures_both_ways_and_stores_them(tmp_path: Path) -> None:
    path = tmp_path / "far.json"
    cases = ["64 KB, 1 in flight", "near, and a flood", "near, and connections"]
    arguments = ["far", *(f"--case={case}" for case in cases), "--repetitions=1", "--seconds=0.1", "--json", str(path)]
    ran = CliRunner().invoke(main, arguments)
    assert ran.exit_code in (0, 1), ran.output
    stored: dict[str, Any] = json.loads(path.read_text())
    assert [len(table["rows"]) for table in stored["tables"]] == [4, 6]
    assert stored["coverage"]["gaps"] == []
