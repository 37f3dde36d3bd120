"""A store as a process, vLLM-Omni's connector layer where its files are, and connectors that are closed again."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.omni import layer
from shmring.integrations.environment import run_variable
from shmring.integrations.omni import CONNECTOR, register
from tests.nursery import Forked, Nursery
from tests.waiting import until

_STORE = "import runpy; runpy.run_module('shmring.engine.store', run_name='__main__', alter_sys=True)"
NAME = "stages"


@pytest.fixture(scope="module")
def omni() -> Iterator[SimpleNamespace]:
    """Modules of the layer, in which the connector is known."""
    directory = layer.sources()
    if directory is None:
        pytest.skip(layer.WHY_NOT)
    variable = run_variable("SHMRING_OMNI")
    with layer.loaded(directory):
        register()
        register()
        within = "vllm_omni.distributed.omni_connectors"
        yield SimpleNamespace(
            factory=importlib.import_module(f"{within}.factory").OmniConnectorFactory,
            spec=importlib.import_module(f"{within}.utils.config").ConnectorSpec,
            configuring=importlib.import_module(f"{within}.utils.initialization"),
            serializer=importlib.import_module(f"{within}.utils.serialization").OmniSerializer,
            shared_memory=importlib.import_module(f"{within}.connectors.shm_connector").SharedMemoryConnector,
            adapter=importlib.import_module(f"{within}.transfer_adapter.chunk_transfer_adapter").OmniChunkTransferAdapter,
            loops=importlib.import_module(f"{within}.transfer_adapter.base").OmniTransferAdapterBase,
        )
    os.environ.pop(variable, None)


@pytest.fixture
def start_store(nursery: Nursery, socket_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Forked]]:
    """``start_store("--slab=8MiB")``: a store that is ready; killed when the test ends."""
    started: list[Forked] = []

    def start(*options: str) -> Forked:
        output = tmp_path / f"store-{len(started)}"
        forked = nursery.start_text(output, _STORE, NAME, f"--socket-dir={socket_dir}", *(options or ("--slab=16MiB",)))
        started.append(forked)
        until(lambda: forked.is_dead or any("is ready" in line for line in forked.lines))
        assert not forked.is_dead, output.read_text()
        return forked

    yield start
    for forked in started:
        forked.process.kill()


@pytest.fixture
def store(start_store: Callable[..., Forked]) -> Forked:
    """One of 16 MiB."""
    return start_store()


@pytest.fixture
def settings(socket_dir: Path) -> dict[str, Any]:
    """What a connector needs to find that store."""
    return {"shmring_store": NAME, "shmring_socket_dir": str(socket_dir), "shmring_start": False, "shmring_namespace": "test"}


@pytest.fixture
def connector(omni: SimpleNamespace, settings: dict[str, Any]) -> Iterator[Callable[..., Any]]:
    """``connector(stage, **extra)``: made by vLLM-Omni's factory, closed when the test ends."""
    made: list[Any] = []

    def make(stage: int, **extra: Any) -> Any:
        one = omni.factory.create_connector(omni.spec(CONNECTOR, {**settings, "stage_id": stage, **extra}))
        made.append(one)
        return one

    yield make
    for each in made:
        each.close()
