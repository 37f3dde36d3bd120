"""Where the plug-in meets SGLang: what its ``HookRegistry`` is told to replace, and to call the plug-in for.

==================================  ====================================================================================
``ShmPointerMMData``                replaced, in every process (:mod:`~shmring.integrations.sglang.pointer`)
``SchedulerRequestReceiver``        before it is made: the ring is there before SGLang says that the scheduler is ready
``wrap_shm_features``               before it: which scheduler gets the request
``write_data_for_multi_tokenizer``  before it: processes of ``--tokenizer-worker-num`` load no plug-ins, and get this one with
                                    what they are told
``SchedulerIpcChannels.create``     before it: which server a scheduler belongs to, by ``PortArgs.instance_id``. All processes
                                    of one server know it, and those of no other: so rings are called
``init_ipc_channels``               of ``TokenizerManager``, before it: the same for a tokenizer
``_send_one_request``               of ``TokenizerManager``, before it: which of several servers of this process sends
==================================  ====================================================================================
"""

from __future__ import annotations

import contextvars
import weakref
from typing import TYPE_CHECKING, Any

from shmring.core.loggers import logger_of
from shmring.integrations.environment import SettingError, name_the_run
from shmring.integrations.promises import broken, not_compiled, stay_off
from shmring.integrations.sglang.contract import CHECKS, MODULES, find_hooks
from shmring.integrations.sglang.ends import Ends
from shmring.integrations.sglang.pointer import replacement
from shmring.integrations.sglang.settings import PREFIX, Settings

if TYPE_CHECKING:
    from shmring.integrations.sglang.tokenizer import Sender

__all__ = ["switch_on"]

logger = logger_of("sglang.shmring")


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
    logger_of("shmring.waiting").setLevel("ERROR")  # ranks wait for each other, as ever
    ends = Ends(settings)
    servers = _Servers(ends, hooks.context)
    register, types = hooks.registry.HookRegistry.register, hooks.registry.HookType
    pointer = replacement(hooks.features.ShmPointerMMData, ends)
    register(f"{MODULES['features']}.ShmPointerMMData", pointer, types.REPLACE)

    def before_sending(request: Any) -> None:
        ends.sender = None
        try:
            if (sender := servers.sender()) is not None:
                sender.direct(request)
                ends.sender = sender
        except Exception:
            logger.exception("shmring: tensors go inline")

    def before_receiving(*_: Any, **__: Any) -> None:
        try:
            _serve_or_join(ends, hooks.context.get_parallel())
        except Exception:
            logger.exception("shmring: a scheduler has no slab, and tensors go inline")

    def before_opening(*_: Any, port_args: Any, **__: Any) -> None:
        try:
            ends.settings = settings.of_server(port_args.instance_id)
        except ValueError:
            logger.exception("shmring: tensors go inline")

    def before_telling(port_args: Any, server_args: Any, scheduler_info: dict[str, Any]) -> Any:
        return (port_args, server_args, {**scheduler_info, "shmring": _SwitchingOn()}), {}

    register(f"{MODULES['features']}.wrap_shm_features", before_sending, types.BEFORE)
    register(f"{MODULES['receivers']}.SchedulerRequestReceiver.__init__", before_receiving, types.BEFORE)
    register(f"{MODULES['channels']}.SchedulerIpcChannels.create", before_opening, types.BEFORE)
    register(f"{MODULES['managers']}.TokenizerManager.init_ipc_channels", servers.note_made, types.BEFORE)
    register(f"{MODULES['managers']}.TokenizerManager._send_one_request", servers.sends, types.BEFORE)
    register(f"{MODULES['tokenizers']}.write_data_for_multi_tokenizer", before_telling, types.BEFORE)


class _Servers:
    """The servers whose tokenizers are in this process: several, if it has made several of SGLang's ``Engine``.

    Args:
        ends: of this process.
        context: SGLang's runtime context.
    """

    def __init__(self, ends: Ends, context: Any) -> None:
        self._settings = ends.settings
        self._context = context
        self._instances: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()  # by SGLang's TokenizerManager
        self._senders: weakref.WeakKeyDictionary[Any, Sender] = weakref.WeakKeyDictionary()
        self._sending: contextvars.ContextVar[Any] = contextvars.ContextVar("shmring sending")

    def note_made(self, manager: Any, port_args: Any) -> None:
        """A tokenizer is being made."""
        self._instances[manager] = port_args.instance_id

    def sends(self, manager: Any, *_: Any, **__: Any) -> None:
        """A tokenizer is about to send a request, in this task."""
        self._sending.set(weakref.ref(manager))

    def sender(self) -> Sender | None:
        """Returns the half of the tokenizer that sends a request in this task; None: it is not known which one that is."""
        manager = self._sending.get(lambda: None)()
        if manager is None or manager not in self._instances:
            return None
        sender = self._senders.get(manager)
        if sender is None:
            sender = self._senders[manager] = _sender(self._settings.of_server(self._instances[manager]), self._context)
        return sender


def _sender(settings: Settings, context: Any) -> Sender:
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
