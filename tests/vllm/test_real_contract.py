"""What the plug-in relies on, in each vLLM whose sources are here; and that a wrong setting stops vLLM with a word."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

from tests.plug_ins import changed_servers

pytestmark = pytest.mark.timeout(1800)  # only what hangs takes so long

ROOT = Path(__file__).resolve().parents[2]
SOURCES = Path(sys.prefix) / "sources"
VERSIONS = ["installed", *sorted(path.name for path in SOURCES.iterdir())]
run = functools.partial(changed_servers.run, "SHMRING_VLLM")

PROGRAM = """
import vllm, vllm.version
from shmring.integrations.promises import broken
from shmring.engine.executors import vllm_engine as executor
from shmring.integrations.vllm import contract, queue_contract
print(vllm.__file__)
print(broken(executor.find_engine, executor.CHECKS))
print(broken(contract.find_hooks, contract.CHECKS), broken(queue_contract.find_executor, queue_contract.CHECKS))
print(broken(contract.find_gpu_hooks, contract.GPU_CHECKS), broken(contract.find_copies, contract.COPY_CHECKS))
"""


def test_there_is_another_version_than_the_installed_one() -> None:
    assert len(VERSIONS) >= 2


@pytest.mark.parametrize("version", VERSIONS)
def test_vllm_is_as_the_plug_in_needs_it(version: str) -> None:
    paths = [str(ROOT), *([] if version == "installed" else [str(SOURCES / version)])]
    environment = {"PYTHONPATH": os.pathsep.join(paths)}
    done = run(PROGRAM, **environment)
    assert done.returncode == 0, done.stderr
    file, broken_for_executor, broken, broken_on_gpus = done.stdout.splitlines()[-4:]
    assert file.startswith(str(Path(sys.prefix) / ("lib" if version == "installed" else f"sources/{version}")))
    assert broken_for_executor == "[]"
    assert broken == "[] []"
    assert broken_on_gpus == "[] []"


CHANGES = {
    "takes self, and not self, request": "hooks.cores.EngineCoreProc.preprocess_add_request = lambda self: 1",
    "<lambda> does not use encoder, encode": "hooks.clients.AsyncMPClient._send_input = "
    "lambda self, request_type, request, engine=None: None",
    "AttributeError": "del hooks.clients.MPClient.shutdown, hooks.clients.EngineCoreClient.shutdown",
    "a request reaches the engine core as []": "core = hooks.cores.EngineCoreProc; handle = core._handle_client_request; "
    "core._handle_client_request = lambda self, kind, request: len(tuple(request)) == 3 and handle(self, kind, request)",
    "round_trip: ": "hooks.serialization.MsgpackEncoder._encode_tensor = lambda self, tensor: ('float32', tensor.shape, 1)",
}

QUEUE_CHANGES = {
    "<lambda> takes handle, and not handle, rank": "hooks.MessageQueue.create_from_handle = lambda handle: 1",
    "<lambda> does not use rpc_broadcast_mq, dequeue": "hooks.WorkerProc.worker_busy_loop = lambda self: 1",
    "the executor uses drain of its queues": "hooks.MessageQueue.drain = 1; "
    "hooks.WorkerProc.enqueue_output = lambda self, output: (self.worker_response_mq.enqueue, self.worker_response_mq.drain)",
    "AttributeError": "del hooks.MessageQueue",
}


@pytest.mark.parametrize(
    ("contract", "find", "changes"),
    [("contract", "find_hooks", CHANGES), ("queue_contract", "find_executor", QUEUE_CHANGES)],
    ids=["tensors of requests", "queues"],
)
def test_it_notices_what_has_changed(contract: str, find: str, changes: dict[str, str]) -> None:
    for finding, line in zip(changes, changed_servers.said_of(changes.values(), f"vllm.{contract}", find), strict=True):
        assert finding in line


STARTING = "from vllm.plugins import load_general_plugins\nload_general_plugins()\nprint('started')"


def test_a_wrong_setting_stops_vllm_and_says_what_to_do() -> None:
    done = run(STARTING, SHMRING_VLLM="1", SHMRING_VLLM_SLAB="lots")
    assert done.returncode != 0
    assert "SHMRING_VLLM_SLAB='lots' can't be used: it has to be a size of 16MiB or more, such as 4GiB." in done.stderr


def test_the_frontend_in_rust_gets_a_line_in_the_log() -> None:
    done = run(STARTING, SHMRING_VLLM="1", VLLM_USE_RUST_FRONTEND="1")
    assert done.stdout.endswith("started\n")
    assert (done.stdout + done.stderr).count(
        "shmring stays off, and vLLM runs as without it: VLLM_USE_RUST_FRONTEND is set"
    ) == 1
