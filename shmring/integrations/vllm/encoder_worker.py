"""A worker's half of the connector for encoder outputs: loads into vLLM's cache, and keeps what was encoded.

Theory of operation. Before a step, what its message names is looked up, with one round trip. On a CPU, vLLM's cache gets a view
of the store's memory, which is pinned for as long as the view lives. On a GPU, one copy is queued, and what it reads is held
until it is over. The scheduler has pinned all of it, so it is there. If it is not (the store has ended in this moment), the
worker adds the medium to what is encoded in this step. Workers that compute an encoder together do so together: what one of
them can't load, all encode. One that did it alone would wait for the others for ever.

What was encoded is copied into the store once, by one of the workers that have it. If a request comes with a medium whose
output this worker has from an earlier step, and the store has lost it, it is kept again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shmring.core.loggers import logger_of
from shmring.integrations.vllm.encoder_keys import EncoderKeys
from shmring.integrations.vllm.encoder_scheduler import Load, Step
from shmring.integrations.vllm.encoder_store import EncoderStore

__all__ = ["WorkerHalf"]

logger = logger_of("vllm.shmring")

_LOAD_S = 1.0  # for the answer of a store that had the output a moment ago; then it is encoded


class WorkerHalf:
    """See the head of this file. Called by the thread that runs the model.

    Args:
        store: this process's way to it.
        keys: of this engine.
        device: that outputs are on.
        keep: whether this worker keeps what is encoded.
        hold: holds a tensor until the copies are over that were queued on the current stream; None: copies are not queued.
        agree: says of each output whether all workers that encode together have it, and waits for them; None: there is one.
    """

    def __init__(
        self,
        store: EncoderStore,
        keys: EncoderKeys,
        *,
        device: torch.device,
        keep: bool,
        hold: Callable[[torch.Tensor], object] | None = None,
        agree: Callable[[Sequence[bool]], Sequence[bool]] | None = None,
    ) -> None:
        self._store = store
        self._keys = keys
        self._device = device
        self._keep = keep
        self._hold = hold
        self._agree = agree
        self._has_said = False

    def load(self, cache: dict[str, torch.Tensor], step: Step) -> int | None:
        """Puts what a step's message names into vLLM's cache; what can't be loaded, is encoded with this step.

        Args:
            cache: vLLM's, by what it calls the media.
            step: the message.

        Returns:
            The step's number, for the scheduler's half; None: the message named nothing.

        Raises:
            RuntimeError: something can be neither loaded nor encoded.
        """
        if not step.loads:
            return None
        wanted = [load for load in step.loads if load.identifier not in cache]
        views = self._views(wanted)
        have = [view is not None for view in views]
        for load, view, all_have in zip(wanted, views, have if self._agree is None else self._agree(have), strict=True):
            if view is None or not all_have:
                self._encode(load, step)
            else:
                cache[load.identifier] = self._on_device(view)
                self._store.counts["loaded"] += 1
        return step.number

    def _views(self, loads: Sequence[Load]) -> list[torch.Tensor | None]:
        """Returns outputs where they lie in the store; None for what is not there as it should be."""
        contents = self._store.find([self._keys.of(load.identifier) for load in loads], _LOAD_S) if loads else []
        views = [None if content is None else self._store.view(content) for content in contents]
        return [view if self._fits(view, load) else None for view, load in zip(views, loads, strict=True)]

    def _on_device(self, view: torch.Tensor) -> torch.Tensor:
        """Returns an output where the model needs it: the view itself, or a copy."""
        if self._device.type == "cpu":
            return view
        copy = view.to(self._device, non_blocking=self._hold is not None)
        if self._hold is not None:
            self._hold(view)
        return copy

    def _fits(self, view: torch.Tensor | None, load: Load) -> bool:
        if view is None:
            return False
        fits = view.dim() == 2 and view.shape[0] == load.rows
        if not fits and not self._has_said:
            self._has_said = True
            logger.warning(
                "shmring: an encoder output of the store %r has the shape %s, and not %d rows: such ones are encoded here",
                self._store.name,
                tuple(view.shape),
                load.rows,
            )
        return fits

    def _encode(self, load: Load, step: Step) -> None:
        """Has an output encoded that could not be loaded."""
        if not load.has_input or step.encoded is None:
            raise RuntimeError(
                f"shmring: the encoder output of {load.identifier} has gone from the store {self._store.name!r} in the moment "
                f"in which it was needed, and request {load.request_id} came without the medium itself"
            )
        indices = step.encoded.setdefault(load.request_id, [])
        if load.index not in indices:
            indices.append(load.index)
        self._store.counts["encoded after all"] += 1

    def save(self, cache: dict[str, torch.Tensor], identifier: str) -> None:
        """Keeps an output that was encoded.

        Args:
            cache: vLLM's, which has it.
            identifier: what vLLM calls the medium.
        """
        key = self._keys.of(identifier) if self._keep else None
        if key is not None:
            self._store.keep(key, cache[identifier].detach())

    def save_again(self, cache: dict[str, torch.Tensor], step: Step) -> None:
        """Keeps outputs of an earlier step, for which requests have come now, if the store has lost them.

        Args:
            cache: vLLM's.
            step: the message.
        """
        keys = {} if not self._keep else {each: self._keys.of(each) for each in step.seen if each in cache}
        kept = {identifier: key for identifier, key in keys.items() if key is not None}
        if not kept or not self._store.connected:
            return
        found = self._store.find(list(kept.values()), _LOAD_S)
        for content in found:
            if content is not None:
                content.close()
        for identifier, content in zip(kept, found, strict=True):
            if content is None:
                self.save(cache, identifier)
