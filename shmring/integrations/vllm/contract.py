"""What the plug-in relies on in vLLM: ``CHECKS`` for :mod:`~shmring.integrations.promises`.

It has been the same in vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from shmring.integrations.promises import parameters_differ, uses_are_missing

__all__ = ["CHECKS", "COPY_CHECKS", "GPU_CHECKS", "Hooks", "find_copies", "find_gpu_hooks", "find_hooks"]


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What of vLLM is wrapped, or used.

    Attributes:
        clients: ``vllm.v1.engine.core_client``.
        cores: ``vllm.v1.engine.core``.
        inputs: ``vllm.multimodal.inputs``.
        serialization: ``vllm.v1.serial_utils``.
        request_types: ``vllm.v1.engine.EngineCoreRequestType``.
        request: ``vllm.v1.engine.EngineCoreRequest``.
    """

    clients: Any
    cores: Any
    inputs: Any
    serialization: Any
    request_types: Any
    request: Any


def find_hooks() -> Hooks:
    """Imports what is wrapped.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    from vllm.multimodal import inputs
    from vllm.v1 import engine, serial_utils
    from vllm.v1.engine import core, core_client

    return Hooks(
        clients=core_client,
        cores=core,
        inputs=inputs,
        serialization=serial_utils,
        request_types=engine.EngineCoreRequestType,
        request=engine.EngineCoreRequest,
    )


def _methods(hooks: Hooks) -> Iterator[str]:
    """What is wrapped or called takes what the wrapping passes."""
    clients, core = hooks.clients, hooks.cores.EngineCoreProc
    yield from parameters_differ(
        [
            (clients.MPClient.__init__, ["self"]),
            (clients.MPClient.shutdown, ["self"]),
            (clients.AsyncMPClient._send_input, ["self", "request_type", "request", "engine"]),
            (clients.AsyncMPClient._call_utility_async, ["self", "method", "args", "engine"]),
            (clients.SyncMPClient._send_input, ["self", "request_type", "request"]),
            (core.process_input_sockets, ["self"]),
            (core.preprocess_add_request, ["self", "request"]),
            (core.shutdown, ["self"]),
            (hooks.inputs._nested_tensors_h2d, ["tensors", "device"]),
        ]
    )


def _attributes(hooks: Hooks) -> Iterator[str]:
    """Code that is not wrapped goes through what is."""
    clients, core = hooks.clients, hooks.cores.EngineCoreProc
    yield from uses_are_missing(
        [
            (clients.MPClient.__init__, ("encoder", "core_engines", "core_engine", "vllm_config")),
            (clients.AsyncMPClient._send_input, ("encoder", "encode")),
            (clients.SyncMPClient._send_input, ("encoder", "encode", "core_engine")),
            (clients.AsyncMPClient.add_request_async, ("_send_input", "ADD")),
            (clients.SyncMPClient.add_request, ("_send_input", "ADD")),
            (clients.SyncMPClient.call_utility, ("utility_results", "_send_input", "UTILITY", "Future")),
            (core.__init__, ("tensor_ipc_receiver", "engine_index", "process_input_sockets")),
            (core.process_input_sockets, ("tensor_ipc_receiver", "preprocess_add_request", "_handle_request_preproc_error")),
            (core._handle_client_request, ("UTILITY", "ADD")),
            (hooks.cores.EngineCore.__init__, ("mm_receiver_cache",)),
        ]
    )


def _request_fields(hooks: Hooks) -> Iterator[str]:
    """A request's tensors are where they are looked for."""
    missing = {"mm_features", "prompt_embeds"} - set(hooks.request.__struct_fields__)
    if missing:
        yield f"EngineCoreRequest has no {', '.join(sorted(missing))}"
    if hooks.request.__struct_config__.frozen:
        yield "EngineCoreRequest can't be changed"
    if not hasattr(hooks.request_types, "ADD"):
        yield "EngineCoreRequestType has no ADD"


def _round_trip(hooks: Hooks) -> Iterator[str]:
    """A tensor that the consumer takes is replaced by what it returns, and the provider is asked for it."""
    import torch

    class Consumer:
        def new_message(self) -> None:
            pass

        def __call__(self, tensor: torch.Tensor) -> dict[str, Any]:
            return {"shmring": [1, 2, True]}

    sent = torch.zeros(64, 16)
    provided = []

    def provide(dtype: str, shape: Any, reference: dict[str, Any]) -> torch.Tensor:
        provided.append((dtype, list(shape), reference))
        return sent

    encoder = hooks.serialization.MsgpackEncoder(oob_tensor_consumer=Consumer())
    decoder = hooks.serialization.MsgpackDecoder(dict[str, torch.Tensor], oob_tensor_provider=provide)
    came = decoder.decode(encoder.encode({"tensor": sent}))["tensor"]
    if came is not sent or provided != [("float32", [64, 16], {"shmring": [1, 2, True]})]:
        yield f"a tensor went through the encoder and the decoder as {provided}"
    encoder.oob_tensor_consumer = None  # as it is set on a client's encoder later
    if len(encoder.encode({"tensor": sent})) != 2:
        yield "an encoder does not ask its oob_tensor_consumer"


def _handing_over(hooks: Hooks) -> Iterator[str]:
    """What a wrapped ``preprocess_add_request`` returns reaches the engine core, which unpacks it once."""
    from shmring.integrations.vllm.engine import HandedOver

    came: list[tuple[Any, ...]] = []

    class Core:
        """An engine core that rejects nothing."""

        def add_request(self, *parts: Any) -> None:
            came.append(parts)

        def __getattr__(self, name: str) -> Callable[..., bool]:
            return lambda *_: False

    hooks.cores.EngineCoreProc._handle_client_request(Core(), hooks.request_types.ADD, HandedOver(("a request", 3)))
    if came != [("a request", 3)]:
        yield f"a request reaches the engine core as {came}"


CHECKS = (_methods, _attributes, _request_fields, _round_trip, _handing_over)


# -- for a device slab; where it is otherwise, only that is left out -------------------------------------------------------


def find_gpu_hooks() -> Any:
    """Imports the module with what vLLM does first with processed media: it puts those of several requests together.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    from vllm.multimodal import utils

    return utils


def _putting_together(utils: Any) -> Iterator[str]:
    """Whoever reads media goes through the function that is wrapped, and nothing reads them before."""
    yield from parameters_differ([(utils.group_and_batch_mm_items, ["items"])])
    yield from uses_are_missing([(utils.group_and_batch_mm_kwargs, ("group_and_batch_mm_items",))])


def _runners(_: Any) -> Iterator[str]:
    """Both of vLLM's runners go that way."""
    from vllm.v1.worker.gpu.mm.encoder_runner import EncoderRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    yield from uses_are_missing(
        [
            (GPUModelRunner._execute_mm_encoder, ("group_and_batch_mm_kwargs",)),
            (EncoderRunner.execute_mm_encoder, ("group_and_batch_mm_kwargs",)),
        ]
    )


GPU_CHECKS = (_putting_together, _runners)


# -- for a slab that is registered with CUDA; where it is otherwise, it is not registered ----------------------------------


def find_copies() -> Any:
    """Imports the modules that copy embeddings of prompts to a GPU.

    Raises:
        ImportError: this vLLM has no such thing.
    """
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu.mm import encoder_runner
    from vllm.v1.worker.gpu.model_states import prompt_embeds

    return gpu_model_runner, encoder_runner, prompt_embeds


def _copying(modules: Any) -> Iterator[str]:
    """Each does so by a function of a name of its own, which can be wrapped."""
    yield from parameters_differ([(module.async_tensor_h2d, ["data", "device"]) for module in modules])
    runner, encoder, embeddings = modules
    copying = (
        runner.GPUModelRunner._execute_mm_encoder,
        encoder.EncoderRunner.prepare_mm_inputs,
        embeddings.PromptEmbedsState.add_request,
    )
    yield from uses_are_missing([(function, ("async_tensor_h2d",)) for function in copying])


COPY_CHECKS = (_copying,)
