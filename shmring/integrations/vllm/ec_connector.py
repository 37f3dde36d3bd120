"""Encoder outputs between instances of vLLM on one machine, through a store: vLLM's ``ECConnector``.

Theory of operation. vLLM loads this file by its own option, and nothing of it is wrapped or patched::

    --ec-transfer-config '{"ec_connector": "ShmringECConnector", "ec_role": "ec_producer",
        "ec_connector_module_path": "shmring.integrations.vllm.ec_connector"}'

An instance that encodes (``ec_producer``) keeps what its encoder has made in a store (:func:`shmring.start_store`), under a key
of everything that makes these bytes what they are (:mod:`~shmring.integrations.vllm.encoder_keys`). One that computes text
(``ec_consumer``) finds it there; ``ec_both`` does both. vLLM makes one connector in its scheduler
(:mod:`~shmring.integrations.vllm.encoder_scheduler`) and one in each worker
(:mod:`~shmring.integrations.vllm.encoder_worker`); each is a client of the store
(:mod:`~shmring.integrations.vllm.encoder_store`). This file is what vLLM calls. See docs/stages.md.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
    ECConnectorWorkerMetadata,
)
from vllm.distributed.ec_transfer.ec_connector.utils import PlaceholderMetadataResolver, collect_ec_item_metadata
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.platforms import current_platform
from vllm.version import __version__ as vllm_version

from shmring.integrations.vllm.encoder_keys import EncoderKeys, check_configuration
from shmring.integrations.vllm.encoder_scheduler import SchedulerHalf, Step
from shmring.integrations.vllm.encoder_settings import EncoderSettings
from shmring.integrations.vllm.encoder_store import EncoderStore
from shmring.integrations.vllm.encoder_worker import WorkerHalf
from shmring.integrations.vllm.queued_copies import QueuedCopies
from shmring.threads import Kept

__all__ = ["Answer", "Message", "ShmringECConnector"]


@dataclasses.dataclass
class Message(ECConnectorMetadata):  # type: ignore[misc] # vLLM is not in every environment
    """What the scheduler's half tells the workers' halves, with each step."""

    step: Step


@dataclasses.dataclass
class Answer(ECConnectorWorkerMetadata):  # type: ignore[misc] # vLLM is not in every environment
    """What a worker's half says when it has loaded what a step's message named.

    Attributes:
        number: of the step.
    """

    number: int

    def aggregate(self, other: Any) -> Answer:
        """The answers of all workers to one step are one: vLLM puts them together when it has all of them."""
        return self


class ShmringECConnector(ECConnectorBase):  # type: ignore[misc] # vLLM is not in every environment
    """See the head of this file.

    Args:
        vllm_config: vLLM's configuration; ``ec_connector_extra_config`` has the settings
            (:class:`~shmring.integrations.vllm.encoder_settings.EncoderSettings`).
        role: whether this is the scheduler's half or a worker's.

    Raises:
        ValueError: a setting can't be used, or media can't be told apart as vLLM is configured. The text says what to do.
    """

    def __init__(self, vllm_config: Any, role: ECConnectorRole) -> None:
        super().__init__(vllm_config=vllm_config, role=role)
        settings = EncoderSettings.of(vllm_config.ec_transfer_config.ec_connector_extra_config)
        check_configuration(vllm_config, settings)
        self._settings = settings
        self._keys = EncoderKeys(vllm_config, settings, vllm_version)
        self._media = PlaceholderMetadataResolver(vllm_config.model_config)
        self._store: EncoderStore | None = None
        self._answer: Answer | None = None
        self._worker: WorkerHalf | None = None
        self._scheduler: SchedulerHalf | None = None
        if role == ECConnectorRole.WORKER:
            self._worker = self._make_worker()
        else:
            self._scheduler = self._make_scheduler()

    def _make_worker(self) -> WorkerHalf | None:
        """Returns this worker's half; None: it neither loads nor keeps anything."""
        group = get_tp_group()
        keeps = self.is_producer and group.rank_in_group == 0  # each of a group has the whole output
        if not get_pp_group().is_first_rank or not (keeps or self.is_consumer):  # vLLM uses the connectors of the first stage
            return None
        self._store = EncoderStore.create(self._settings, f"vLLM worker {group.rank_in_group}", use="keep" if keeps else "load")
        device = torch.device(current_platform.device_type)
        hold = QueuedCopies(_recorded).started if device.type == "cuda" else None
        agree = functools.partial(_of_all, group.cpu_group) if group.world_size > 1 else None
        return WorkerHalf(self._store, self._keys, device=device, keep=keeps, hold=hold, agree=agree)

    def _make_scheduler(self) -> SchedulerHalf:
        if self.is_consumer:
            self._store = EncoderStore.create(self._settings, "vLLM scheduler", use="look")
        find = self._find if self.is_consumer else None
        return SchedulerHalf(find, keeps=self.is_producer, has_input=self._has_input)

    def _find(self, identifiers: Sequence[str]) -> list[Kept[Any] | None]:
        """Looks outputs up for the scheduler."""
        assert self._store is not None
        contents = self._store.find([self._keys.of(identifier) for identifier in identifiers], self._settings.look_s)
        self._store.counts["looked for, and found"] += sum(content is not None for content in contents)
        self._store.counts["looked for, and not found"] += contents.count(None)
        return contents

    def _has_input(self, feature: Any) -> bool:
        """Whether a medium comes with more than what says how many tokens it has."""
        if not feature.data:
            return False
        said = self._media.fields_for(feature.modality)
        return any(value.data is not None for name, value in feature.data.items() if name not in said)

    def shutdown(self) -> None:
        """vLLM ends: leaves the store."""
        if self._scheduler is not None:
            self._scheduler.close()
        if self._store is not None:
            self._store.close()

    # -- in a worker -----------------------------------------------------------------------------------------------------

    def _step(self) -> Step:
        message = self._get_connector_metadata()
        assert isinstance(message, Message)
        return message.step

    def start_save_caches(self, **arguments: Any) -> None:
        """A step begins: keeps outputs of earlier steps that requests need now, and that the store has lost."""
        cache = arguments.get("encoder_cache")
        if self._worker is not None and cache is not None:
            self._worker.save_again(cache, self._step())

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **_: Any) -> None:
        """A step begins: puts what its message names into vLLM's cache."""
        number = None if self._worker is None else self._worker.load(encoder_cache, self._step())
        self._answer = None if number is None else Answer(number)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **_: Any) -> None:
        """An output was encoded: keeps it."""
        if self._worker is not None:
            self._worker.save(encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> Answer | None:
        """A step is over: says what was loaded."""
        answer, self._answer = self._answer, None
        return answer

    # -- in the scheduler ------------------------------------------------------------------------------------------------

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "vLLM calls this in the scheduler"
        return self._scheduler

    def has_cache_item(self, identifier: str) -> bool:
        """Whether an output need not be encoded."""
        return self._half.has(identifier)

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        """Looks a request's media up; False if an output of it is nowhere."""
        return self._half.is_ready(request, num_computed_tokens)

    def take_unavailable_requests(self) -> set[str]:
        """Returns the requests of which an output is nowhere, once: vLLM fails them."""
        return self._half.unavailable()

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        """vLLM's cache has a place for an output."""
        self._half.allocated(request, index)

    def build_connector_meta(self, scheduler_output: Any) -> Message:
        """A step is complete: returns what the workers are told."""
        return Message(self._half.next_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """The workers have answered."""
        answer = connector_output.ec_connector_worker_meta
        if isinstance(answer, Answer):
            self._half.answered(answer.number)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. An instance that encodes says what its answer has of each medium, so that the next instance need
        not prepare it."""
        self._half.ended(request)
        items = collect_ec_item_metadata(request.mm_features, self._media) if self.is_producer else None
        return False, items or None


def _of_all(group: Any, have: Sequence[bool]) -> list[bool]:
    """Returns what all workers of a group have. Each of them calls this, with so many."""
    flags = torch.tensor(have, dtype=torch.uint8, device="cpu")
    torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MIN, group)
    return flags.bool().tolist()


def _recorded() -> torch.cuda.Event:
    """Records an event on the current stream."""
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
