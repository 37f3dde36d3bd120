"""What becomes of a run of ``bench gpu``: tables, targets, its page, and exit codes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from click.testing import CliRunner

from bench.__main__ import main
from bench.children import BenchError
from bench.gpu import command, device
from bench.gpu.command import PLAN, TARGETS
from bench.gpu.device import Gpu, Numbers
from bench.plan import Runs
from bench.report import Budget, pages
from bench.results import Verdict
from shmring.gpu.cuda import TorchCuda

KB, MB = 1 << 10, 1 << 20
GPU = "NVIDIA H100, 80 GiB, PCIe 5 x16 to the host; driver 570.1, torch 2.9 for CUDA 12.8."


#: The name of a way or a route, a size, and what was measured in each repetition.
Part = tuple[str, int, list[Numbers]]


def transferred(way: str, nbytes: int, rates: list[float]) -> Part:
    return way, nbytes, [{"gb_per_s": [rate]} for rate in rates]


def beside_ceiling(nbytes: int, of_ceiling: float) -> list[Part]:
    """A pinned slot, and what it reaches so much of."""
    return [transferred("slot-pinned", nbytes, [of_ceiling * 50.0]), transferred("pin-memory", nbytes, [50.0])]


def handed_over(route: str, nbytes: int, p50_us: float) -> Part:
    return route, nbytes, [{"us": [p50_us / 2, p50_us, p50_us * 2]}] * 3


HAND_OVERS = [handed_over("device-slab", 64 * KB, 90.0), handed_over("device-slab", 64 * MB, 99.0)]


def brought(way: str, nbytes: int, usable_us: float, held_us: float) -> Part:
    held = [held_us - 1, held_us, held_us + 10]
    return way, nbytes, [{"usable_us": [usable_us] * 3, "held_us": held}] * 3


def measured(*changes: Part) -> dict[int, dict[str, list[Numbers]]]:
    """A run that meets everything; or this one."""
    whole = [
        *beside_ceiling(64 * KB, 0.1),
        *beside_ceiling(1 * MB, 0.8),
        *beside_ceiling(8 * MB, 0.97),
        brought("slot-pinned", 64 * KB, 30.0, 12.0),
        brought("pin-memory-to", 64 * KB, 30.0, 9.0),
        brought("slot-pinned", 64 * MB, 1500.0, 29.0),
        transferred("slot-pinned", 64 * MB, [45.0, 50.0, 55.0]),
        transferred("pin-memory", 64 * MB, [50.0, 50.0, 50.0]),
        transferred("clone", 64 * MB, [4.5, 5.0, 5.5]),
        *HAND_OVERS,
    ]
    found: dict[int, dict[str, list[Numbers]]] = {}
    for name, nbytes, runs in changes or whole:
        of_size = found.setdefault(nbytes, {})
        before = of_size.get(name, [])
        of_size[name] = [one | other for one, other in itertools.zip_longest(before, runs, fillvalue=Numbers())]
    return found


def verdicts(*changes: Part) -> dict[str, Verdict]:
    return {one.what + (", small" if one.at == "1 MB" else ""): one for one in PLAN.findings(measured(*changes)).targets}


# -- targets -----------------------------------------------------------------------------------------------------------


def test_a_run_that_reaches_everything_meets_all_targets() -> None:
    found = verdicts()
    assert [one.met for one in found.values()] == [True] * 7
    assert [one.what for one in found.values()] == [target.what for target in TARGETS]


def test_the_worst_size_decides() -> None:
    slots = [*beside_ceiling(8 * MB, 0.94), *beside_ceiling(64 * MB, 0.99)]
    found = verdicts(*slots)["pinned slot: GB/s of pin_memory() memory"]
    assert (found.met, found.measured, found.detail) == (False, "0.94 x", "8 MB: 0.94, 64 MB: 0.99")


def test_ratios_are_taken_within_repetitions() -> None:
    ours = transferred("slot-pinned", 64 * MB, [10.0, 60.0, 28.0])
    clone = transferred("clone", 64 * MB, [10.0, 10.0, 5.0])
    found = verdicts(ours, clone)["pinned slot: GB/s of cloning, then copying"]
    assert (found.met, found.measured) == (True, "5.6 x")  # medians would say 28 over 10


def test_hand_overs_are_short_and_do_not_grow() -> None:
    slow = [handed_over("device-slab", 64 * KB, 90.0), handed_over("device-slab", 64 * MB, 110.0)]
    assert verdicts(*slow)["device slab: p50 of a hand-over"].measured == "110 us"
    assert verdicts(*slow)["device slab: p50 of a hand-over"].met is False
    grows = [handed_over("device-slab", 64 * KB, 50.0), handed_over("device-slab", 64 * MB, 70.0)]
    found = verdicts(*grows)["device slab: p50 over that of the smallest size"]
    assert (found.met, found.measured, found.detail) == (False, "1.4 x", "64 MB: 1.4")


def test_a_small_copy_is_not_slower_than_torchs_and_holds_nobody_up() -> None:
    found = verdicts(brought("slot-pinned", 64 * KB, 33.0, 31.0), brought("pin-memory-to", 64 * KB, 30.0, 9.0))
    latency = found["pinned slot: latency over that of torch's tensor.to from pin_memory() memory"]
    assert (latency.met, latency.measured) == (False, "1.1 x")
    held = found["pinned slot: how long claim.to holds the loop, p50"]
    assert (held.met, held.measured) == (False, "31 us")


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    found = verdicts(handed_over("cuda-ipc", 64 * KB, 500.0))
    assert {one.met for one in found.values()} == {None}
    one_size = verdicts(handed_over("device-slab", 64 * KB, 100.0))
    assert one_size["device slab: p50 over that of the smallest size"].met is None


# -- what is shown and kept ----------------------------------------------------------------------------------------------


def test_tables_say_what_was_measured() -> None:
    copies, hand_overs = PLAN.findings(measured()).tables
    rows = {(row[0], row[1]): row[2:] for row in copies.rows}
    assert rows["64 MB", "slot, pinned slab"] == ["50.00", "-10% +10%", "1.00 x", "1,500", "29", "39"]
    assert rows["64 MB", "cloned, then copied"] == ["5.00", "-10% +10%", "0.10 x", *[""] * 3]
    assert hand_overs.rows[0] == ["64 KB", "device slab", "90", "+0% +0%", "180", "9"]
    assert all(len(row) == len(table.columns) for table in (copies, hand_overs) for row in table.rows)


def test_a_report_has_a_page() -> None:
    text = pages({"gpu": PLAN.findings(measured(), notes=[GPU])}, Budget("abc", {}))["benchmarks/gpu.md"]
    assert f"- {GPU}" in text
    assert "| 64 MB | slot, pinned slab | 50.00 |" in text


# -- the command -------------------------------------------------------------------------------------------------------------


def test_without_a_gpu_it_ends_with_2_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchCuda, "unavailable", lambda self: "torch finds no CUDA device")
    done = CliRunner().invoke(main, ["gpu"])
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"Error: no GPU can be measured here: torch finds no CUDA device (torch {torch.__version__}); it needs"
    )


@pytest.mark.parametrize(
    ("found", "code", "message"),
    [
        (measured(handed_over("device-slab", 64 * KB, 151.0)), 1, "1 target missed"),
        (None, 3, "measurements failed"),
        (BenchError("the copies have died"), 3, "the copies have died"),
    ],
)
def test_it_shows_and_keeps_what_was_found_and_fails_if_a_target_is_missed_or_something_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, found: Any, code: int, message: str
) -> None:
    def run(runs: Runs, gpu: object) -> None:
        if isinstance(found, BaseException):
            raise found
        runs.notes.append(GPU)
        if found is not None:
            runs.measured = found
            monkeypatch.setattr(runs, "coverage", lambda: None)

    monkeypatch.setattr(device, "missing", lambda: None)
    monkeypatch.setattr(command, "Gpu", lambda: None)
    monkeypatch.setattr(command, "run", run)
    path = tmp_path / "gpu.json"
    done = CliRunner().invoke(main, ["gpu", "--json", str(path)])
    assert done.exit_code == code
    assert message in done.stderr
    if code == 1:
        assert "device slab: p50 of a hand-over" in done.stdout
        assert msgspec.json.decode(path.read_bytes())["notes"][-1] == GPU


# -- the GPU -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """``smi(text)``: an nvidia-smi that says so, and nothing else on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(text: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
        (tmp_path / "nvidia-smi").chmod(0o700)

    return make


def test_the_driver_and_the_link_come_from_nvidia_smi(smi: Callable[[str], None]) -> None:
    smi("570.1, 5, 16\n")
    assert device._driver("abc") == ("570.1", "PCIe 5 x16")


def test_a_gpu_says_what_it_is(smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    smi("570.1, 5, 16\n")
    properties = SimpleNamespace(name="NVIDIA H100", total_memory=80 << 30, uuid="abc")
    monkeypatch.setattr(device, "_cuda", SimpleNamespace(get_device_properties=lambda _: properties))
    monkeypatch.setattr(torch, "__version__", "2.9")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    gpu = Gpu.__new__(Gpu)  # whose constructor wants one
    gpu.device = torch.device("cpu")
    assert gpu.describe() == GPU


@pytest.mark.parametrize("text", ["", "NVIDIA-SMI has failed\n"])
def test_without_an_answer_of_nvidia_smi_the_driver_is_unknown(smi: Callable[[str], None], text: str) -> None:
    if text:
        smi(text)
    assert device._driver("") == ("unknown", "unknown")
