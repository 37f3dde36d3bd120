"""Running a language model token by token, for several requests at a time.

A prompt is computed once (:meth:`LanguageModel.prefill`), by itself, and leaves a :class:`Context`: keys and values of every
layer, and how positions go on after it. From then on each step computes one token of each request
(:meth:`LanguageModel.decode`).

Contexts of different length are decoded together by padding them on the left, where the attention mask hides the padding. That
reads the model's weights once for all of them, which is what decoding mostly costs; copying the contexts side by side costs
one pass over them. It is done only where it is known to be right: all layers keep plain keys and values (no sliding windows,
no recurrent states), and the model was seen to understand the positions that it is then given
(:meth:`LanguageModel.check_batching`). Everything else is decoded one by one.

Sums in another order round differently, so logits of a batch differ from those alone in the last bits. Whoever needs the
same bits again decodes alone.

A prompt can also be read for its hidden states only (:meth:`LanguageModel.read`); then there is no context.

Invariants:

- between calls the model holds nothing of a request: what architectures with three-dimensional positions remember of their last
  prompt (``rope_deltas``) is kept in the contexts and put back before each use;
- decoding together changes no context unless it succeeds, so that it can be tried again one by one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

__all__ = ["Context", "LanguageModel"]

# Logits of a batch may differ from those alone by rounding: bfloat16 has 8 bits, and errors add up over the layers.
# A wrong mask or position is far beyond it.
_BATCHING_TOLERANCE = 0.1


@dataclasses.dataclass(slots=True, eq=False)
class Context:
    """What a model knows of a request.

    Attributes:
        cache: a ``transformers.DynamicCache`` of one sequence. length: tokens in it. rope_deltas: by how much its next
        position differs from its length, shape (1, 1), where the architecture has such a thing.
    """

    cache: Any
    length: int
    rope_deltas: torch.Tensor | None


class LanguageModel:
    """A causal language model of transformers, with or without eyes.

    Args:
        model: a ``PreTrainedModel`` in evaluation mode, on its device.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache_utils = importlib.import_module("transformers.cache_utils")
        accepted = set(inspect.signature(model.forward).parameters)
        self._last_logits_only = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._backbone = _find_backbone(model, accepted)
        self._with_deltas = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self.batching = False

    @property
    def can_read(self) -> bool:
        """Whether :meth:`read` works: the architecture has its language head apart from everything else."""
        return self._backbone is not None

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        device: torch.device = self._model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """What it computes with."""
        dtype: torch.dtype = self._model.dtype
        return dtype

    @torch.inference_mode()
    def prefill(self, inputs: Mapping[str, Any]) -> tuple[Context, torch.Tensor]:
        """Computes a prompt.

        Args:
            inputs: what the processor made of it: ``input_ids`` of shape (1, tokens), pixels and so on.

        Returns:
            Its context, and the logits of the first token: shape (vocabulary,), float32.
        """
        cache = self._cache_utils.DynamicCache(config=self._model.config)
        with self._positions(None):
            logits = self._forward(self._move(inputs), cache)[0]
            deltas = self._with_deltas[0].rope_deltas if self._with_deltas else None
        return Context(cache, int(inputs["input_ids"].shape[1]), deltas), logits

    @torch.inference_mode()
    def read(self, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Computes a prompt without a word to follow: neither keys and values are kept, nor logits made.

        Args:
            inputs: as of :meth:`prefill`.

        Returns:
            The last hidden states, those after the final norm: shape (tokens, hidden size), on the model's device and of its
            dtype.
        """
        assert self._backbone is not None, "can_read says so"
        with self._positions(None):
            output = self._backbone(**self._move(inputs), use_cache=False, return_dict=True)
        states: torch.Tensor = output.last_hidden_state[0]
        return states

    @torch.inference_mode()
    def decode_alone(self, context: Context, token: int) -> torch.Tensor:
        """Adds a token to a context, and computes the logits of the next: shape (vocabulary,), float32."""
        with self._positions(context.rope_deltas):
            logits = self._forward({"input_ids": self._column([token])}, context.cache)[0]
        context.length += 1
        return logits

    @torch.inference_mode()
    def decode(self, contexts: Sequence[Context], tokens: Sequence[int]) -> torch.Tensor:
        """Adds a token to each context, all in one pass; :meth:`can_batch` must hold for each.

        Returns:
            Logits of the next tokens: shape (contexts, vocabulary), float32.
        """
        lengths = torch.tensor([context.length for context in contexts], device=self.device)
        longest = int(lengths.max())
        columns = torch.arange(longest + 1, device=self.device)
        inputs = {
            "input_ids": self._column(tokens),
            "attention_mask": (columns >= (longest - lengths).unsqueeze(1)).long(),
            "position_ids": torch.tensor([[_next_position(context)] for context in contexts], device=self.device),
        }
        merged = self._merge([context.cache for context in contexts], longest)
        with self._positions(None):
            logits = self._forward(inputs, merged)
        for row, context in enumerate(contexts):
            self._take_row(merged, row, longest - context.length, context.cache)
            context.length += 1
        return logits

    def can_batch(self, context: Context) -> bool:
        """Whether a context can be decoded together with others."""
        return self.batching and all(type(layer) is self._cache_utils.DynamicLayer for layer in context.cache.layers)

    @torch.inference_mode()
    def check_batching(self) -> bool:
        """Finds out whether the model decodes batches rightly, by trying; sets and returns :attr:`batching`.

        Two short contexts are decoded alone, with positions given, and together. Given positions must not change a bit, or
        the model counts them in a way of its own; and together must be as alone, but for rounding.
        """
        self.batching = True
        prompts = [self._column(range(1, 1 + length)).T for length in (3, 7)]
        tokens = [1, 2]
        contexts = [self._try(prompt) for prompt in prompts]
        takes_positions = "position_ids" in inspect.signature(self._model.forward).parameters
        self.batching = takes_positions and all(map(self.can_batch, contexts))
        if self.batching:
            alone = [self.decode_alone(self._try(prompt), token) for prompt, token in zip(prompts, tokens, strict=True)]
            placed = [self._decode_placed(self._try(prompt), token) for prompt, token in zip(prompts, tokens, strict=True)]
            apart = (torch.stack(alone) - self.decode(contexts, tokens)).abs().max()
            tolerance = _BATCHING_TOLERANCE * torch.stack(alone).abs().max()
            self.batching = all(map(torch.equal, alone, placed)) and bool(apart <= tolerance)
        return self.batching

    # -- underneath ----------------------------------------------------------------------------------------------------

    def _try(self, prompt: torch.Tensor) -> Context:
        return self.prefill({"input_ids": prompt})[0]

    def _decode_placed(self, context: Context, token: int) -> torch.Tensor:
        positions = torch.tensor([[_next_position(context)]], device=self.device)
        return self._forward({"input_ids": self._column([token]), "position_ids": positions}, context.cache)[0]

    def _forward(self, inputs: Mapping[str, Any], cache: Any) -> torch.Tensor:
        """Returns the last logits of each sequence: shape (sequences, vocabulary), float32."""
        output = self._model(**inputs, past_key_values=cache, use_cache=True, return_dict=True, **self._last_logits_only)
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _move(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Brings a prompt's inputs to the model's device, and numbers with a point to its dtype."""
        moved = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
        return moved

    def _column(self, tokens: Sequence[int]) -> torch.Tensor:
        return torch.tensor([[token] for token in tokens], device=self.device)

    @contextlib.contextmanager
    def _positions(self, rope_deltas: torch.Tensor | None) -> Iterator[None]:
        """Has the model count positions as for one context, and forget it again."""
        for module in self._with_deltas:
            module.rope_deltas = rope_deltas
        try:
            yield
        finally:
            for module in self._with_deltas:
                module.rope_deltas = None

    def _merge(self, caches: Sequence[Any], longest: int) -> Any:
        """Returns one cache of all sequences, padded on the left to the longest."""
        merged = self._cache_utils.DynamicCache(config=self._model.config)
        merged.layers = [
            self._make_layer(
                _stack_padded([layer.keys for layer in layers], longest),
                _stack_padded([layer.values for layer in layers], longest),
            )
            for layers in zip(*(cache.layers for cache in caches), strict=True)
        ]
        return merged

    def _take_row(self, merged: Any, row: int, padding: int, cache: Any) -> None:
        """Puts a sequence of a merged cache into its own, as views."""
        cache.layers = [
            self._make_layer(layer.keys[row : row + 1, :, padding:], layer.values[row : row + 1, :, padding:])
            for layer in merged.layers
        ]

    def _make_layer(self, keys: torch.Tensor, values: torch.Tensor) -> Any:
        """Returns a layer's cache that holds these, of shape (sequences, heads, tokens, head size), without copying them."""
        layer = self._cache_utils.DynamicLayer()
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
        return layer


def _find_backbone(model: Any, accepted: set[str]) -> Any | None:
    """Returns the part of a model that does everything but the logits; None if there is none, or it is blind to pixels."""
    backbone = model.base_model
    if backbone is model:
        return None
    pixels = {name for name in accepted if name.startswith("pixel_values")}
    return backbone if pixels <= set(inspect.signature(backbone.forward).parameters) else None


def _next_position(context: Context) -> int:
    return context.length + (0 if context.rope_deltas is None else int(context.rope_deltas))


def _stack_padded(parts: Sequence[torch.Tensor], longest: int) -> torch.Tensor:
    first = parts[0]
    stacked = first.new_zeros((len(parts), first.shape[1], longest, first.shape[3]))
    for row, part in enumerate(parts):
        stacked[row, :, longest - part.shape[2] :] = part[0]
    return stacked
