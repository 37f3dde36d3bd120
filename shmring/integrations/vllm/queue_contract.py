"""What the plug-in relies on in vLLM's executor, to put rings in the place of its queues: ``CHECKS``, as of ``contract.py``.

Where it is otherwise, only this is left out: tensors go from API servers to engine cores all the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from shmring.integrations.promises import names_in, parameters_differ, uses_are_missing
from shmring.integrations.vllm.queues import Reader, Writer

__all__ = ["CHECKS", "find_executor"]

#: What the executor uses of its queues. (It uses ``recv`` of pipes; vLLM's queues happen to have such a method.)
_METHODS = {"create_from_handle", "export_handle", "wait_until_ready", "enqueue", "dequeue", "shutdown", "recv"}


def find_executor() -> Any:
    """Imports the module whose ``MessageQueue`` is replaced.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    from vllm.v1.executor import multiproc_executor

    return multiproc_executor


def _signatures(executor: Any) -> Iterator[str]:
    """A queue is made and used as the one is that takes its place."""
    theirs = executor.MessageQueue
    yield from parameters_differ(
        [
            (theirs.__init__, ["self", "n_reader", "n_local_reader", "local_reader_ranks"]),
            (theirs.create_from_handle, ["handle", "rank"]),
            *(
                (getattr(theirs, name), list(inspect.signature(getattr(ours, name)).parameters))
                for ours, name in ((Writer, "enqueue"), (Reader, "dequeue"))
            ),
        ]
    )


def _uses(executor: Any) -> Iterator[str]:
    """The executor makes its queues by the name that is replaced, and uses nothing of them that ours do not have."""
    leader, worker = executor.MultiprocExecutor, executor.WorkerProc
    uses = [
        (leader.__base__.__init__, ("vllm_config",)),
        (leader._init_executor, ("MessageQueue", "export_handle", "wait_until_ready", "response_mqs")),
        (leader.collective_rpc, ("rpc_broadcast_mq", "response_mqs", "enqueue", "dequeue")),
        (leader.shutdown, ("rpc_broadcast_mq", "response_mqs", "shutdown")),
        (worker._init_message_queues, ("MessageQueue", "create_from_handle", "nnodes_within_dp")),
        (worker.wait_for_response_handle_ready, ("MessageQueue", "create_from_handle", "local_reader_ranks")),
        (worker.worker_busy_loop, ("rpc_broadcast_mq", "dequeue")),
        (worker.enqueue_output, ("worker_response_mq", "enqueue")),
        (worker.monitor_death_pipe, ("rpc_broadcast_mq", "worker_response_mq", "shutdown")),
    ]
    yield from uses_are_missing(uses)
    used = {name for function, _ in uses for name in names_in(function)}
    public = {name for name in vars(executor.MessageQueue) if not name.startswith("_")}
    if unknown := sorted(used & public - _METHODS):
        yield f"the executor uses {', '.join(unknown)} of its queues"


def _numbers(executor: Any) -> Iterator[str]:
    """An engine core's number is known before it has said it, and so is which process is one."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine.utils import CoreEngineProcManager

    if "data_parallel_index" not in ParallelConfig.__dataclass_fields__:
        yield "ParallelConfig has no data_parallel_index"
    if "EngineCore" not in CoreEngineProcManager.__init__.__code__.co_consts:
        yield "processes of engine cores are called otherwise"


CHECKS = (_signatures, _uses, _numbers)
