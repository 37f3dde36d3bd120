"""What the plug-in relies on in SGLang: ``CHECKS`` for :mod:`~shmring.integrations.promises`.

The entry points and the ``HookRegistry`` are SGLang's interface for plug-ins. What they are used on is no public interface; it
is as SGLang 0.5.23 has it.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

from shmring.integrations.promises import parameters_differ, uses_are_missing

__all__ = ["CHECKS", "MODULES", "Hooks", "find_hooks"]

#: Where it is, by the name of a field of :class:`Hooks`.
MODULES = {
    "registry": "sglang.srt.plugins.hook_registry",
    "features": "sglang.srt.managers.mm_utils",
    "wire": "sglang.srt.utils.msgpack_utils",
    "receivers": "sglang.srt.managers.scheduler_components.request_receiver",
    "tokenizers": "sglang.srt.managers.multi_tokenizer_mixin",
    "managers": "sglang.srt.managers.tokenizer_manager",
    "channels": "sglang.srt.managers.scheduler_components.ipc_channels",
    "ports": "sglang.srt.server_args",
    "controllers": "sglang.srt.managers.data_parallel_controller",
    "requests": "sglang.srt.managers.io_struct",
    "context": "sglang.srt.runtime_context",
}


@dataclasses.dataclass(frozen=True)
class Hooks:
    """SGLang's modules, by what they have: see ``MODULES``."""

    registry: Any
    features: Any
    wire: Any
    receivers: Any
    tokenizers: Any
    managers: Any
    channels: Any
    ports: Any
    controllers: Any
    requests: Any
    context: Any


def find_hooks() -> Hooks:
    """Imports what is replaced or used.

    Raises:
        ImportError: this SGLang has no such thing.
    """
    return Hooks(**{field: importlib.import_module(name) for field, name in MODULES.items()})


def _functions(hooks: Hooks) -> Iterator[str]:
    """What is replaced, or called before, takes what SGLang passes."""
    pointer = hooks.features.ShmPointerMMData
    return parameters_differ(
        [
            (pointer.__init__, ["self", "tensor", "precomputed_hash"]),
            (pointer.__getstate__, ["self"]),
            (pointer.__setstate__, ["self", "state"]),
            (pointer.materialize, ["self"]),
            (pointer.close_and_unlink, ["self"]),
            (hooks.features.wrap_shm_features, ["obj"]),
            (hooks.tokenizers.write_data_for_multi_tokenizer, ["port_args", "server_args", "scheduler_info"]),
            (hooks.registry.HookRegistry.register, ["target", "hook", "hook_type"]),
            (hooks.channels.SchedulerIpcChannels.create, ["port_args"]),
            (hooks.managers.TokenizerManager.init_ipc_channels, ["self", "port_args"]),
            (hooks.managers.TokenizerManager._send_one_request, ["self", "tokenized_obj"]),
        ]
    )


def _uses(hooks: Hooks) -> Iterator[str]:
    """Each tensor goes through what is replaced, and ``OSError`` has it sent in the message."""
    features, receiver = hooks.features, hooks.receivers.SchedulerRequestReceiver
    manager, controller = hooks.managers.TokenizerManager, hooks.controllers.DataParallelController
    return uses_are_missing(
        [
            (features._wrap_shm_or_inline, ("ShmPointerMMData", "OSError")),
            (features._wrap_tensor_or_list, ("_wrap_shm_or_inline",)),
            (features.wrap_shm_features, ("mm_inputs", "feature", "precomputed_embeddings", "_wrap_tensor_or_list")),
            (features._unwrap_tensor_or_list, ("materialize",)),
            (features._discard_tensor_or_list, ("close_and_unlink",)),
            (hooks.wire._decode_shm_pointer_mm_data, ("ShmPointerMMData", "__setstate__")),
            (receiver.recv_requests, ("_pull_raw_reqs", "_broadcast_reqs_across_ranks", "_finalize_shm_features")),
            (receiver._pull_raw_reqs, ("pp_rank", "attn_tp_rank", "attn_cp_rank", "sock_recv")),
            (receiver._broadcast_reqs_across_ranks, ("attn_dp_enabled", "attn_cp_tp_broadcast_pyobj", "broadcast_pyobj")),
            (receiver._finalize_shm_features, ("barrier", "unwrap_shm_features", "discard_shm_features")),
            (manager.__init__, ("init_ipc_channels",)),
            (manager._send_one_request, ("wrap_shm_features",)),
            (hooks.ports.PortArgs.init_new, ("uuid4",)),
            (controller.launch_dp_schedulers, ("instance_id",)),
            (controller.launch_tensor_parallel_group, ("instance_id",)),
        ]
    )


def _fields(hooks: Hooks) -> Iterator[str]:
    """A request says which scheduler gets it, and what it has; ports say which server a process belongs to."""
    if "instance_id" not in hooks.ports.PortArgs.__dataclass_fields__:
        yield "PortArgs has no instance_id"
    for kind in (hooks.requests.TokenizedGenerateReqInput, hooks.requests.TokenizedEmbeddingReqInput):
        if missing := {"mm_inputs", "routed_dp_rank"} - set(kind.__struct_fields__):
            yield f"{kind.__name__} has no {', '.join(sorted(missing))}"


def _wire(hooks: Hooks) -> Iterator[str]:
    """What a pointer says of itself comes as it was sent, whoever made its class."""
    import torch

    state = {"shape": torch.Size([2, 3]), "dtype": torch.float32, "shmring": [0, 1, 2]}
    theirs = hooks.features.ShmPointerMMData
    ours = type(theirs.__name__, (), {"__module__": theirs.__module__, "__getstate__": lambda _: state})()
    if not hooks.wire._is_shm_pointer_mm_data(ours):
        yield "SGLang's encoder does not know the class that replaces ShmPointerMMData"
    came = hooks.wire._from_msgpack_state(hooks.wire._encode_shm_pointer_mm_data(ours))
    if came != state:
        yield f"what a pointer says of itself comes as {came}"


CHECKS = (_functions, _uses, _fields, _wire)
