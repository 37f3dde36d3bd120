"""Where the plug-in meets vLLM: which methods are wrapped, and what each wrapper adds.

=========================================  =============================================================================
``MPClient.__init__``, ``shutdown``        the API server's half comes and goes with vLLM's client of its engine cores
``AsyncMPClient._send_input``              requests go by way of it, as do those of ``SyncMPClient``
``EngineCoreProc.process_input_sockets``   the engine core's half is there before vLLM says that the engine core is ready
``EngineCoreProc.preprocess_add_request``  a request whose tensors are not there fails
``EngineCoreProc.shutdown``                the engine core's half ends
``MultiprocExecutor._init_executor``       an executor knows what its engine core's ring is called
``MessageQueue`` in its module             queues between an engine core and its workers are rings
``_nested_tensors_h2d``                    what a copy to a GPU reads stays until it is over
``async_tensor_h2d`` in three modules      likewise, of embeddings of prompts
``group_and_batch_mm_items``               the stream that reads tensors in a device slab waits for who writes them
``EngineCoreProc.shmring_ring``            new: what an API server calls to learn which ring is its engine core's
``EngineCoreProc.shmring_drop``            new: what an API server calls to have kept tensors dropped
=========================================  =============================================================================

Each wrapper calls what it wraps, whatever else happens. A failure to start either half is logged, and tensors go inline.
"""

from __future__ import annotations

import asyncio
import functools
import os
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from shmring.core.loggers import logger_of
from shmring.integrations.environment import name_the_run
from shmring.integrations.promises import broken, not_compiled, stay_off
from shmring.integrations.vllm.contract import (
    CHECKS,
    COPY_CHECKS,
    GPU_CHECKS,
    Hooks,
    find_copies,
    find_gpu_hooks,
    find_hooks,
)
from shmring.integrations.vllm.engine_ring import NOT_SET, EngineRing
from shmring.integrations.vllm.settings import PREFIX, Settings

__all__ = ["switch_on"]

logger = logger_of("vllm.shmring")  # below vLLM's own logger, whose handlers and level apply

_MARK = "_shmring"  # an attribute of vLLM's objects: their half of the plug-in


def switch_on() -> None:
    """Checks the settings and vLLM, and wraps. A second call does nothing.

    Raises:
        SettingError: a setting can't be used. vLLM does not start then.
    """
    is_first = name_the_run(PREFIX, "vllm")
    settings = Settings.from_environment()
    if reason := _reason_to_stay_off():
        if is_first:  # of all processes of a server
            stay_off(logger, "vLLM", reason)
        return
    logger_of("shmring.waiting").setLevel("ERROR")  # ranks wait for each other, as ever
    hooks = find_hooks()
    if not hasattr(hooks.cores.EngineCoreProc, "shmring_drop"):
        engine_ring = EngineRing(settings)
        _wrap_clients(hooks, settings)
        _wrap_cores(hooks, settings, engine_ring)
        if settings.workers:
            _replace_queues(hooks, settings, engine_ring, is_first=is_first)


def _reason_to_stay_off() -> str | None:
    if os.environ.get("VLLM_USE_RUST_FRONTEND", "0") not in ("", "0"):
        return "VLLM_USE_RUST_FRONTEND is set, and vLLM's frontend in Rust loads no plug-ins"
    if reason := not_compiled():
        return reason
    findings = broken(find_hooks, CHECKS)
    return f"this vLLM is not as it needs it ({'; '.join(findings)})" if findings else None


# -- the API server's half ---------------------------------------------------------------------------------------------


def _wrap_clients(hooks: Hooks, settings: Settings) -> None:
    clients = hooks.clients
    add = hooks.request_types.ADD
    initialize, shut_down = clients.MPClient.__init__, clients.MPClient.shutdown

    @functools.wraps(initialize)
    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        initialize(self, *arguments, **named)
        try:
            _attach(self, settings, is_async=isinstance(self, clients.AsyncMPClient))
        except Exception:
            logger.exception("shmring stays off in this process, and tensors go inline")

    @functools.wraps(shut_down)
    def shutdown(self: Any, *arguments: Any, **named: Any) -> Any:
        if (detach := getattr(self, _MARK + "_detach", None)) is not None:
            detach()
        return shut_down(self, *arguments, **named)

    def wrap_sending(send: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(send)
        def _send_input(self: Any, request_type: Any, request: Any, *engine: Any, **named: Any) -> Any:
            frontend = getattr(self, _MARK, None)
            if frontend is None or request_type is not add:
                return send(self, request_type, request, *engine, **named)
            target = (engine[0] if engine else named.get("engine")) or self.core_engine
            return frontend.divert(request, target, lambda: send(self, request_type, request, *engine, **named))

        return _send_input

    clients.MPClient.__init__ = __init__
    clients.MPClient.shutdown = shutdown
    clients.AsyncMPClient._send_input = wrap_sending(clients.AsyncMPClient._send_input)
    clients.SyncMPClient._send_input = wrap_sending(clients.SyncMPClient._send_input)


def _attach(client: Any, settings: Settings, *, is_async: bool) -> None:
    """Gives one of vLLM's clients its half."""
    from shmring.integrations.vllm.frontend import SyncFrontend

    own = client.encoder.oob_tensor_consumer  # of torch_shm
    if own is not None and not settings.device_slab_nbytes:
        logger.warning(
            "shmring stays off between API servers and engine cores: --mm-tensor-ipc torch_shm is on, which takes the same "
            "place; leave one of them out"
        )
        return
    engines = list(client.core_engines)
    if is_async:
        frontend = _async_frontend(client, settings, engines, own)
    else:  # which has one engine core
        frontend = SyncFrontend(settings, engines[:1], own, _question_of(client))
    client.encoder.oob_tensor_consumer = frontend
    setattr(client, _MARK, frontend)
    setattr(client, _MARK + "_detach", weakref.finalize(client, frontend.close))


def _question_of(client: Any) -> Callable[[bytes], Future[Any]]:
    """Returns what asks the engine core of a client without a loop what its ring is, and does not wait for the answer."""
    reference = weakref.ref(client)

    def ask_ring(_: bytes) -> Future[Any]:
        from vllm.v1.engine import EngineCoreRequestType

        client = reference()
        answer: Future[Any] = Future()
        if client is None:
            answer.set_exception(RuntimeError("vLLM's client has gone"))
        else:  # as call_utility does
            call_id = uuid.uuid1().int >> 64
            client.utility_results[call_id] = answer
            client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, "shmring_ring", ()))
        return answer

    return ask_ring


def _async_frontend(client: Any, settings: Settings, engines: list[bytes], own: Any) -> Any:
    from shmring.integrations.vllm.frontend import AsyncFrontend
    from shmring.integrations.vllm.link import Where

    reference = weakref.ref(client)

    async def tell_drops(engine: bytes, client_id: int, request_ids: list[int]) -> bool:
        client = reference()
        if client is None:
            return False
        calling = client._call_utility_async("shmring_drop", client_id, request_ids, engine=engine)
        del client  # or this frame would keep it while it waits
        await calling
        return True

    async def find_ring(engine: bytes) -> Where:
        client = reference()
        if client is None:
            raise RuntimeError("vLLM's client has gone")
        asking = client._call_utility_async("shmring_ring", engine=engine)
        del client
        return Where.of(await asking)

    parallel = client.vllm_config.parallel_config
    api_servers = max(1, getattr(parallel, "_api_process_count", 1))
    keeps = _has_processor_cache(client.vllm_config)
    frontend = AsyncFrontend(settings, engines, api_servers, tell_drops, keeps=keeps, own=own, find_ring=find_ring)
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass  # it begins with the first request
    else:
        frontend.start()
    return frontend


def _has_processor_cache(config: Any) -> bool:
    """Whether vLLM may send the same tensor again. (Whether the engine core has it in a cache of its own then, that says.)"""
    multimodal = getattr(getattr(config, "model_config", None), "multimodal_config", None)
    return multimodal is not None and multimodal.mm_processor_cache_gb > 0


# -- the engine core's half --------------------------------------------------------------------------------------------


def _wrap_cores(hooks: Hooks, settings: Settings, engine_ring: EngineRing) -> None:
    core = hooks.cores.EngineCoreProc
    listen, prepare, shut_down = core.process_input_sockets, core.preprocess_add_request, core.shutdown

    @functools.wraps(listen)
    def process_input_sockets(self: Any, *arguments: Any, **named: Any) -> Any:
        if self.tensor_ipc_receiver is None or settings.device_slab_nbytes:  # else torch_shm is on, and the plug-in off
            _serve(self, hooks, settings, engine_ring)
        return listen(self, *arguments, **named)

    @functools.wraps(prepare)
    def preprocess_add_request(self: Any, request: Any) -> Any:
        receiver = getattr(self, _MARK, None)
        if receiver is None:
            return prepare(self, request)
        from shmring.integrations.vllm.engine import HandedOver

        try:
            if error := receiver.take_losses():
                _own_up(error, request, has_cache=self.mm_receiver_cache is not None)
            return HandedOver(prepare(self, request))
        finally:  # the input thread holds this object until its next message; the tensors are the new one's now
            request.mm_features = None
            request.prompt_embeds = None

    @functools.wraps(shut_down)
    def shutdown(self: Any, *arguments: Any, **named: Any) -> Any:
        try:
            return shut_down(self, *arguments, **named)
        finally:
            if (receiver := getattr(self, _MARK, None)) is not None:
                receiver.close()

    def shmring_ring(self: Any) -> tuple[str, int] | str:
        """Called by API servers: the name and the epoch of this engine core's ring, or why there is none."""
        receiver = getattr(self, _MARK, None)
        where: tuple[str, int] | str = "shmring is off in it" if receiver is None else receiver.where()
        return where

    def shmring_drop(self: Any, client_id: int, request_ids: list[int]) -> None:
        """Called by API servers, in the order of their messages: drops kept tensors."""
        if (receiver := getattr(self, _MARK, None)) is not None:
            receiver.drop(client_id, request_ids)

    core.process_input_sockets = process_input_sockets
    core.preprocess_add_request = preprocess_add_request
    core.shutdown = shutdown
    core.shmring_ring = shmring_ring
    core.shmring_drop = shmring_drop


def _own_up(error: Exception, request: Any, *, has_cache: bool) -> None:
    """Makes vLLM fail a request whose tensors are not there.

    Where vLLM has a cache of media in the engine core, the API server believes from now on that they are in it. So they are
    sent on as such, and vLLM finds itself that they are not: it fails the request, and tells the API server to send them
    again the next time.
    """
    embeddings = request.prompt_embeds
    is_told = has_cache and request.mm_features and (embeddings is None or embeddings.numel())
    if is_told:
        for feature in request.mm_features:
            feature.data = None
    logger.error("%s", error)
    if not is_told:
        raise error


def _serve(core: Any, hooks: Hooks, settings: Settings, engine_ring: EngineRing) -> None:
    """Gives an engine core its half."""
    try:
        import torch

        from shmring.integrations.vllm.engine import Receiver

        has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call] # then the model runs in this process
        pin = settings.pin
        if pin == "auto" and not (has_gpu and torch.cuda.device_count() == 1):
            pin = "off"  # registering takes a context of the first GPU, which would only cost memory there
        if pin != "off" and (findings := broken(find_copies, COPY_CHECKS)):
            logger.warning(
                "shmring: the slab is not registered with CUDA: this vLLM is not as it needs it (%s)", "; ".join(findings)
            )
            pin = "off"
        if engine_ring.index not in (None, core.engine_index):
            engine_ring = EngineRing(settings)  # then tensors are copied for workers
        copies = core.mm_receiver_cache is not None
        gpu = _gpu_of(core, settings, copies=copies)
        own = core.tensor_ipc_receiver
        receiver = Receiver(settings, core.engine_index, copies=copies, pin=pin, engine_ring=engine_ring, gpu=gpu, own=own)
        core.tensor_ipc_receiver = receiver  # also without a ring: a reference to another one's fails its request
        setattr(core, _MARK, receiver)
        if isinstance(gpu, int):
            _order_what_gpus_read(receiver)
        if has_gpu:
            _hold_what_copies_read(hooks, settings)
    except Exception:
        logger.exception("shmring stays off in engine core %d, and tensors go inline", core.engine_index)


def _gpu_of(core: Any, settings: Settings, *, copies: bool) -> int | str:
    """Returns the index of the GPU on which an engine core's own process runs the model, or why there is no device slab."""
    if not settings.device_slab_nbytes:
        return NOT_SET
    if copies:
        return "vLLM keeps tensors in its cache in the engine core (--mm-processor-cache-gb 0 turns that off)"
    if findings := broken(find_gpu_hooks, GPU_CHECKS):
        return f"this vLLM is not as it needs it ({'; '.join(findings)})"
    device = getattr(getattr(core.model_executor, "driver_worker", None), "device", None)
    if device is None or device.type != "cuda":
        return "the model is on no GPU of the engine core's process"
    return int(device.index or 0)


def _order_what_gpus_read(receiver: Any) -> None:
    """Has the stream that the model is computed on wait for what API servers have queued, before it reads tensors of theirs."""
    from shmring.integrations.vllm.payloads import tensors_in

    utils = find_gpu_hooks()
    group = utils.group_and_batch_mm_items

    @functools.wraps(group)
    def group_and_batch_mm_items(items: Any, **named: Any) -> Any:
        items = list(items)
        receiver.before_use(tensor for item in items for element in item.values() for tensor in tensors_in(element.data))
        return group(items, **named)

    utils.group_and_batch_mm_items = group_and_batch_mm_items


# -- between an engine core and its workers ----------------------------------------------------------------------------


def _replace_queues(hooks: Hooks, settings: Settings, engine_ring: EngineRing, *, is_first: bool) -> None:
    """Has vLLM's executor make rings where it makes queues; where that can't be, says so once."""
    from shmring.integrations.vllm import queue_contract
    from shmring.integrations.vllm.workers import Queues, is_engine_core

    if findings := broken(queue_contract.find_executor, queue_contract.CHECKS):
        if is_first:
            logger.warning(
                "shmring stays off between engine cores and workers: this vLLM is not as it needs it (%s)", "; ".join(findings)
            )
        return
    executor = queue_contract.find_executor()

    def worker_has_joined() -> None:
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            _hold_what_copies_read(hooks, settings)

    initialize = executor.MultiprocExecutor._init_executor

    @functools.wraps(initialize)
    def _init_executor(self: Any) -> None:
        multimodal = getattr(self.vllm_config.model_config, "multimodal_config", None)
        if getattr(multimodal, "mm_tensor_ipc", None) != "torch_shm" and is_engine_core():
            engine_ring.expect(self.vllm_config.parallel_config.data_parallel_index)  # as its engine_index will be
        initialize(self)

    executor.MultiprocExecutor._init_executor = _init_executor
    executor.MessageQueue = Queues(executor.MessageQueue, settings, engine_ring, worker_has_joined)


def _hold_what_copies_read(hooks: Hooks, settings: Settings) -> None:
    import torch

    from shmring.integrations.vllm.queued_copies import QueuedCopies

    def record() -> torch.cuda.Event:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    queued_copies = QueuedCopies(record)
    copy = hooks.inputs._nested_tensors_h2d

    @functools.wraps(copy)
    def _nested_tensors_h2d(tensors: Any, device: Any, **named: Any) -> Any:
        copied = copy(tensors, device, **named)
        if device is not None and torch.device(device).type == "cuda":
            queued_copies.started(tensors)
        return copied

    hooks.inputs._nested_tensors_h2d = _nested_tensors_h2d
    if not broken(find_copies, COPY_CHECKS):
        for module in find_copies():
            module.async_tensor_h2d = queued_copies.around(module.async_tensor_h2d, settings.min_nbytes)
