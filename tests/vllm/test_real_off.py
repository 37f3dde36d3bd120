"""With the plug-in installed and switched off, vLLM's processes import its entry point and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.servers import picture
from bench.vllm.server import serve
from tests.waiting import until

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ENTRY_POINTS = ["shmring", "shmring.integrations", "shmring.integrations.omni", "shmring.integrations.vllm"]


def test_nothing_is_imported_but_the_entry_points(runtime_directory: Path) -> None:
    observed = runtime_directory / "observed"
    observed.mkdir()
    environment = {"PYTHONPATH": str(Path(__file__).parent / "observer"), "OBSERVED": str(observed)}
    with serve(runtime_directory, side=416, api_servers=2, environment=environment) as server:
        server.ask(picture(416, 0))
        pids = [process.pid for kind in ("EngineCore", "APIServer") for process in server.processes(kind)]
        assert len(pids) == 3
        for pid in [server.process.pid, *pids]:
            imported = until(lambda path=observed / f"{pid}.txt": path.read_text().split(" -- ")[0].split())
            assert imported == ENTRY_POINTS
        assert server.metrics() == {}


def test_beside_torch_shm_it_stays_off_and_says_so(runtime_directory: Path) -> None:
    options = ["--mm-tensor-ipc", "torch_shm"]
    with serve(runtime_directory, side=416, environment={"SHMRING_VLLM": "1"}, options=options) as server:
        assert server.ask(picture(416, 0))
        assert server.tensors() == {}
        assert server.log.count("shmring stays off between API servers and engine cores: --mm-tensor-ipc torch_shm is on") == 1
        assert "has a slab" not in server.log
