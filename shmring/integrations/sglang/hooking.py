"""Where the plug-in meets SGLang: what its ``HookRegistry`` is told to replace, and to call the plug-in for.

==================================  ====================================================================================
``ShmPointerMMData``                replaced, in every process (:mod:`~shmring.integrations.sglang.pointer`)
``SchedulerRequestReceiver``        before it is made: the ring is there before SGLang says that the scheduler is ready
``wrap_shm_features``               before it: which scheduler gets the request
``write_data_for_multi_tokenizer``  before it: processes of ``--tokenizer-worker-num`` load no plug-ins, and get this one with
                                    what they are told
==================================  ====================================================================================
"""

from __future__ import annotations

import logging
from typing import Any

from shmring.integrations.environment import SettingError, name_the_run
from shmring.integrations.promises import broken, not_compiled, stay_off
from shmring.integrations.sglang.contract import CHECKS, MODULES, find_hooks
from shmring.integrations.sglang.ends import Ends
from shmring.integrations.sglang.pointer import replacement
from shmring.integrations.sglang.settings import PREFIX, Settings

__all__ = ["switch_on"]

logger = logging.getLogger("sglang.shmring")


def switch_on() -> None:
    """Checks the settings and SGLang, and registers hooks. A second call does nothing.

    Raises:
        SystemExit: a setting can't be used.
    """
    is_first = name_the_run(PREFIX, "sglang")
    try:
        settings = Settings.from_environment()
    except SettingError as error:
        raise SystemExit(str(error)) from error
    reason = not_compiled()
    if not reason and (findings := broken(find_hooks, CHECKS)):
        reason = f"this SGLang is not as it needs it ({'; '.join(findings)})"
    if reason:
        if is_first:  # of all processes of a server
            stay_off(logger, "SGLang", reason)
        return
    hooks = find_hooks()
    if hasattr(hooks.features.ShmPointerMMData, "_named"):
        return  # replaced already
    ends = Ends(settings)
    register, types = hooks.registry.HookRegistry.register, hooks.registry.HookType
    pointer = replacement(hooks.features.ShmPointerMMData, ends)
    register(f"{MODULES['features']}.ShmPointerMMData", pointer, types.REPLACE)

    def before_sending(request: Any) -> None:
        try:
            if ends.sender is None:
                ends.sender = _sender(settings, hooks.context)
            ends.sender.direct(request)
        except Exception:
            logger.exception("shmring: tensors go inline")

    def before_receiving(*_: Any, **__: Any) -> None:
        try:
            _serve_or_join(ends, hooks.context.get_parallel())
        except Exception:
            logger.exception("shmring: a scheduler has no slab, and tensors go inline")

    def before_telling(port_args: Any, server_args: Any, scheduler_info: dict[str, Any]) -> Any:
        return (port_args, server_args, {**scheduler_info, "shmring": _SwitchingOn()}), {}

    register(f"{MODULES['features']}.wrap_shm_features", before_sending, types.BEFORE)
    register(f"{MODULES['receivers']}.SchedulerRequestReceiver.__init__", before_receiving, types.BEFORE)
    register(f"{MODULES['tokenizers']}.write_data_for_multi_tokenizer", before_telling, types.BEFORE)


def _sender(settings: Settings, context: Any) -> Any:
    from shmring.integrations.sglang.tokenizer import Sender

    parallel = context.get_parallel()
    return Sender(
        settings,
        schedulers=parallel.num_dp_ranks,
        tokenizers=context.get_serving().tokenizer_worker_num,
        # Other methods look at what schedulers do, or at what a request says.
        chooses=parallel.load_balance_method == "round_robin" and context.get_disagg().disaggregation_mode == "null",
        public=context.get_observability().enable_metrics,
    )


def _serve_or_join(ends: Ends, parallel: Any) -> None:
    """Gives a rank of a scheduler its half, if it gets messages."""
    if parallel.nnodes > 1 or parallel.pp_rank > 0:
        return  # SGLang sends tensors in its messages; a later stage gets them from the one before it
    if parallel.attn_cp_size > 1:
        stay_off(logger, "SGLang", "ranks of context parallelism (--attn-cp-size) pass messages on to others")
        return
    from shmring.integrations.sglang.scheduler import Owner, Sharer

    if parallel.attn_dp_enabled:
        place, rank, ranks = parallel.attn_dp_rank, parallel.attn_tp_rank, parallel.attn_tp_size
    else:
        place, rank, ranks = parallel.dp_rank or 0, parallel.tp_rank, parallel.tp_size
    if rank:
        ends.sharer = Sharer(ends.settings, place, rank)
    else:
        ends.owner = Owner(ends.settings, place, ranks - 1)


class _SwitchingOn:
    """Unpickled by a process, switches the plug-in on there."""

    def __reduce__(self) -> Any:
        return _switch_on_now, ()


def _switch_on_now() -> None:
    switch_on()
    find_hooks().registry.HookRegistry.apply_hooks()
