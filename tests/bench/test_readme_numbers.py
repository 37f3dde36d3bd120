"""The README's table of ratios is that of the stored run, as ``bench report`` rounds them."""

from __future__ import annotations

from pathlib import Path

import msgspec

from bench.messages import Case
from bench.results import Findings, format_nbytes, format_times
from bench.transport import Stored

ROOT = Path(__file__).resolve().parents[2]
PEERS = ("inline-msgpack", "pyzmq", "torch-queue", "shared-memory", "spinning-arena", "iceoryx2")
KB = 1 << 10


def test_the_readmes_ratios_are_those_that_are_stored() -> None:
    stored = msgspec.json.decode((ROOT / "bench" / "results" / "transport.json").read_bytes(), type=Findings)
    assert stored.machine is not None
    ratios = {(one.case, one.peer): one.shmring_ratio for one in msgspec.convert(stored.results, list[Stored])}
    readme = (ROOT / "README.md").read_text()
    for nbytes in (4 * KB, 64 * KB, KB * KB, 8 * KB * KB, 64 * KB * KB):
        found = [format_times(ratios[Case(nbytes), peer]).removesuffix(" x") for peer in PEERS]
        assert f"| {format_nbytes(nbytes)} | {' | '.join(found)} |" in readme
    assert f"{stored.machine.cpu}, {stored.machine.cores} cores" in readme
