"""Running a language model for several requests at a time.

A prompt is prepared (:meth:`LanguageModel.prepare`), which is where a model looks at pictures, and becomes a :class:`Context`.
From then on :meth:`LanguageModel.advance` reads tokens of some contexts: pieces of prompts, and in each step one token of every
answer that is being written.

All tokens of a step go through the model as one flat sequence (see :mod:`.attention`), so its weights are read once for all of
them. That is done only where it is right, which is found out by trying (:meth:`LanguageModel.check`). In some architectures,
tokens see less than all tokens before them (sliding windows), or more (pictures that see themselves whole). Others keep states
in place of keys and values, give their layers more than a sequence (DeepStack), or turn positions by how long the longest
context is. Their requests are read one by one, a prompt whole, with the cache that transformers gives them.

Looking at pictures needs no code for any architecture: the model's own forward is entered with pixels, and left at the door of
its decoder. What the decoder would have been given, embeddings and positions, is the prompt. Another thread may do that
meanwhile.

Sums in another order round differently, so logits of a step differ from those alone in the last bits. Whoever needs the same
bits again reads alone, in pieces of the same lengths.

Invariants:

- between calls the model holds nothing of a request: what architectures with three-dimensional positions remember of their last
  prompt (``rope_deltas``) is kept in the contexts and put back before each use;
- a step changes no context unless it succeeds, so that it can be tried again one by one.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shmring.engine.executors.attention import ATTENTION, ContextCache, FlatStep, Row, attend, refuse_mask

__all__ = ["Context", "LanguageModel", "Prompt"]

# Logits of a step may differ from those alone by rounding, and errors add up over the layers: bfloat16 has 8 bits. A wrong mask
# or position is far beyond it.
_TOLERANCES = {torch.float32: 1e-3}
_TOLERANCE = 0.1

# What a processor makes of a text. Everything else is of media.
_OF_TEXTS = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
# What a decoder can be given that is taken care of here.
_OF_DECODERS = frozenset({"inputs_embeds", "position_ids", "attention_mask", "past_key_values", "use_cache", "return_dict"})
# These turn all tokens of a forward by how long the longest context is.
_ROPES_OF_LENGTH = frozenset({"dynamic", "longrope"})


@dataclasses.dataclass(slots=True, eq=False)
class Prompt:
    """A prompt that is ready to be read.

    Attributes:
        tokens: shape (tokens,).
        positions: shape (1, tokens), or (3, tokens).
        embeddings: what the decoder is given for the tokens, shape (tokens, hidden size); None without media.
        inputs: what the processor made, where the model reads prompts whole.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    embeddings: torch.Tensor | None = None
    inputs: Mapping[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(slots=True, eq=False)
class Context:
    """What a model knows of a request.

    Attributes:
        prompt: None when all of it was read.
        length: tokens that were read.
        token: the next one to read, after the prompt.
        delta: by how much its position differs from its place in the context.
        row: its keys and values, in flat steps. cache, rope_deltas: what the architecture keeps instead, where it reads alone.
    """

    prompt: Prompt | None
    delta: int = 0
    length: int = 0
    token: int = -1
    row: Row | None = None
    cache: Any = None
    rope_deltas: torch.Tensor | None = None

    @property
    def unread(self) -> int:
        """How many tokens there are to read."""
        return 1 if self.prompt is None else len(self.prompt) - self.length


class _AtTheDoor(Exception):
    """Raised where a decoder would begin; holds what it was given."""


class LanguageModel:
    """A causal language model of transformers, with or without eyes.

    Args:
        model: a ``PreTrainedModel`` in evaluation mode, on its device.

    Attributes:
        device, dtype: where it computes, and with what.
        flat: whether it takes flat steps; see :meth:`check`.
        contexts: the keys and values of those.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.device: torch.device = model.device  # which a model looks for among its parameters
        self.dtype: torch.dtype = model.dtype
        self._cache_utils = importlib.import_module("transformers.cache_utils")
        self._accepted = set(inspect.signature(model.forward).parameters)
        self._backbone = _find_backbone(model, self._accepted)
        self._with_deltas = [module for module in model.modules() if hasattr(module, "rope_deltas")]
        self._seeing = threading.local()  # in the thread whose pixels are on their way to the door
        self.flat = False
        self.contexts = ContextCache(self.device)

    @property
    def can_read(self) -> bool:
        """Whether :meth:`read` works: the architecture has its language head apart from everything else."""
        return self._backbone is not None

    # -- what a request passes ---------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def prepare(self, inputs: Mapping[str, Any]) -> Prompt:
        """Makes a prompt ready; looks at its media, if the model takes flat steps. May run beside everything else.

        Args:
            inputs: what the processor made of it: ``input_ids`` of shape (1, tokens), pixels and so on.

        Raises:
            NotImplementedError: a decoder is given what flat steps can't give it.
        """
        inputs = self._move(inputs)
        tokens = inputs["input_ids"][0]
        positions = torch.arange(len(tokens), device=self.device).unsqueeze(0)
        if not self.flat:
            return Prompt(tokens, positions, inputs=inputs)
        if set(inputs) <= _OF_TEXTS:
            return Prompt(tokens, positions)
        given = self._look(inputs)
        if given.get("position_ids") is not None:
            positions = given["position_ids"].reshape(-1, len(tokens))
        return Prompt(tokens, positions, given["inputs_embeds"][0])

    def open(self, prompt: Prompt) -> Context:
        """Begins with a prompt."""
        if not self.flat:
            return Context(prompt, cache=self._cache_utils.DynamicCache(config=self._model.config))
        # As the architectures say it of their own: the next position, less the length.
        delta = int(prompt.positions.max()) + 1 - len(prompt)
        return Context(prompt, delta, row=self.contexts.open(len(prompt) + 1))

    @torch.inference_mode()
    def advance(self, pieces: Sequence[tuple[Context, int]]) -> list[torch.Tensor | None]:
        """Reads so many tokens of each context, all in one pass.

        A model that takes no flat steps reads one context, and a prompt whole.

        Returns:
            Of each context that has nothing more to read, the logits of the next token: shape (vocabulary,), float32.
        """
        if self.flat:
            logits = self._advance_flat(pieces)
        else:
            ((context, count),) = pieces
            assert count == context.unread, "it is read whole"
            logits = [self._advance_alone(context)]
        for (context, count), found in zip(pieces, logits, strict=True):
            context.length += count
            if context.row is not None:
                context.row.length = context.length
            if found is not None:
                context.prompt = None
        return logits

    def fork(self, context: Context) -> Context:
        """Returns a context that goes on from the same tokens in a way of its own. The prompt was read."""
        assert context.prompt is None, "it was read"
        row = None if context.row is None else self.contexts.copy(context.row, context.length + 1)
        return dataclasses.replace(context, row=row, cache=copy.deepcopy(context.cache))

    def close(self, context: Context) -> None:
        """Lets go of a context."""
        if context.row is not None:
            self.contexts.close(context.row)
            context.row = None
        context.cache = None

    @torch.inference_mode()
    def read(self, prompts: Sequence[Prompt]) -> list[torch.Tensor]:
        """Computes prompts without a word to follow: neither keys and values are kept, nor logits made.

        Returns:
            The last hidden states of each, those after the final norm: shape (tokens, hidden size), on the model's device and
            of its dtype.
        """
        assert self._backbone is not None, "can_read says so"
        if not self.flat:
            with self._positions(None):
                outputs = [self._backbone(**prompt.inputs or {}, use_cache=False, return_dict=True) for prompt in prompts]
            return [output.last_hidden_state[0] for output in outputs]
        step = FlatStep([(None, len(prompt)) for prompt in prompts], self.device)
        inputs = self._flatten([(prompt, 0, len(prompt)) for prompt in prompts])
        states: torch.Tensor = self._backbone(**inputs, flat=step).last_hidden_state[0]
        return list(torch.split(states, [len(prompt) for prompt in prompts]))

    # -- flat steps --------------------------------------------------------------------------------------------------------

    def _advance_flat(self, pieces: Sequence[tuple[Context, int]]) -> list[torch.Tensor | None]:
        for context, count in pieces:
            assert context.row is not None, "it is open"
            self.contexts.reserve(context.row, context.length + count)
        places = {id(shelf): place for place, shelf in enumerate(self.contexts.shelves)}
        order = sorted(range(len(pieces)), key=lambda number: _place(*pieces[number], places))
        flat = [pieces[number] for number in order]
        step = FlatStep([(context.row, count) for context, count in flat], self.device)
        kept: list[int] = []  # whose logits are wanted, and where their last tokens stand
        last: list[int] = []
        end = 0
        for number, (context, count) in zip(order, flat, strict=True):
            end += count
            if count == context.unread:
                kept.append(number)
                last.append(end - 1)
        inputs = self._flatten([(context.prompt or context, context.length, count) for context, count in flat])
        wanted = torch.tensor(last, dtype=torch.long, device=self.device)
        found = self._model(**inputs, flat=step, logits_to_keep=wanted).logits[0].float()
        logits: list[torch.Tensor | None] = [None] * len(pieces)
        for number, row in zip(kept, found, strict=True):
            logits[number] = row
        return logits

    def _flatten(self, pieces: Sequence[tuple[Prompt | Context, int, int]]) -> dict[str, Any]:
        """Returns what a model is given for pieces: of each the prompt, where it begins, and how many tokens it has."""
        dimensions = max(len(piece.positions) if isinstance(piece, Prompt) else 1 for piece, _, _ in pieces)
        tokens: list[torch.Tensor] = []
        positions: list[torch.Tensor] = []
        single = [(piece.token, piece.length + piece.delta) for piece, _, _ in pieces if isinstance(piece, Context)]
        if single:  # they come first
            both = torch.tensor(single, device=self.device).T
            tokens.append(both[0])
            positions.append(both[1].expand(dimensions, -1))
        for piece, start, count in pieces[len(single) :]:
            assert isinstance(piece, Prompt), "contexts without a prompt come first"
            tokens.append(piece.tokens[start : start + count])
            positions.append(piece.positions[:, start : start + count].expand(dimensions, -1))
        embeddings = self._model.get_input_embeddings()(torch.cat(tokens))
        end = len(single)
        for piece, start, count in pieces[len(single) :]:
            if isinstance(piece, Prompt) and piece.embeddings is not None:
                embeddings[end : end + count] = piece.embeddings[start : start + count]
            end += count
        placed = torch.cat(positions, dim=1)
        return {
            "inputs_embeds": embeddings.unsqueeze(0),
            "position_ids": placed.unsqueeze(1) if dimensions > 1 else placed,
            "attention_mask": placed.new_zeros((1, 1, 1, 1)),  # a mask that is there is not made; nobody looks at it
            "use_cache": False,
            "return_dict": True,
        }

    def _look(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Returns what the decoder would be given for a prompt with media."""
        self._seeing.now = True
        try:
            self._model(**inputs, use_cache=False)
        except _AtTheDoor as stopped:
            (given,) = stopped.args
        else:
            raise NotImplementedError("its decoder is never called")
        finally:
            self._seeing.now = False
            self._forget_positions()
        unknown = [name for name, value in given.items() if value is not None and name not in _OF_DECODERS]
        mask = given.get("attention_mask")
        if unknown or not (mask is None or (isinstance(mask, torch.Tensor) and mask.ndim == 2)):
            raise NotImplementedError(f"its decoder is given {unknown[0] if unknown else 'a mask'}")
        return dict(given)

    def _stop_at_the_door(self, _: object, __: object, given: dict[str, Any]) -> None:
        if getattr(self._seeing, "now", False):
            raise _AtTheDoor(given)

    # -- one by one --------------------------------------------------------------------------------------------------------

    def _advance_alone(self, context: Context) -> torch.Tensor:
        if context.prompt is None:
            inputs: Mapping[str, Any] = {"input_ids": torch.tensor([[context.token]], device=self.device)}
        else:
            inputs = context.prompt.inputs or {}
        kept = {"logits_to_keep": 1} if "logits_to_keep" in self._accepted else {}
        with self._positions(context.rope_deltas):
            output = self._model(**inputs, past_key_values=context.cache, use_cache=True, return_dict=True, **kept)
            context.rope_deltas = self._with_deltas[0].rope_deltas if self._with_deltas else None
        logits: torch.Tensor = output.logits[0, -1]
        return logits.float()

    @contextlib.contextmanager
    def _positions(self, rope_deltas: torch.Tensor | None) -> Iterator[None]:
        """Has the model count positions as for one context, and forget it again."""
        for module in self._with_deltas:
            module.rope_deltas = rope_deltas
        try:
            yield
        finally:
            self._forget_positions()

    def _forget_positions(self) -> None:
        for module in self._with_deltas:
            module.rope_deltas = None

    def _move(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Brings a prompt's inputs to the model's device, and numbers with a point to its dtype."""
        moved = dict(inputs)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor):
                moved[name] = value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)
        return moved

    # -- which of the two --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def check(self, make_examples: Callable[[], Sequence[Mapping[str, Any]]] = list) -> str | None:
        """Finds out whether the model takes flat steps, by trying; sets :attr:`flat`.

        Short prompts are read alone, as the architecture does it, and then flat, in pieces and beside each other. Logits and
        hidden states must be the same, but for rounding.

        Args:
            make_examples: makes prompts to try beside two of text, as of :meth:`prepare`: one with a picture, if the model
                takes any.

        Returns:
            Why it takes no flat steps; None if it does.
        """
        self.flat = False
        texts = [{"input_ids": torch.arange(1, 1 + length, device=self.device).unsqueeze(0)} for length in (3, 7)]
        try:
            if (reason := self._foreseen(texts)) is not None:
                return reason
            examples = [*texts, *make_examples()]
            expected = self._try(examples, [])
            decoder = self._model.get_decoder()
            before = decoder.config._attn_implementation
        except Exception as error:  # noqa: BLE001 - a picture that its template does not take, for example
            return f"it can't be tried: {type(error).__name__}: {error}"
        transformers = importlib.import_module("transformers")
        transformers.AttentionInterface.register(ATTENTION, attend)
        transformers.AttentionMaskInterface.register(ATTENTION, refuse_mask)
        decoder.config._attn_implementation = ATTENTION
        door = decoder.register_forward_pre_hook(self._stop_at_the_door, with_kwargs=True)
        self.flat = True
        if (reason := self._try_flat(examples, expected)) is not None:
            self.flat = False
            self.contexts = ContextCache(self.device)
            decoder.config._attn_implementation = before
            door.remove()
        return reason

    def _try_flat(self, examples: Sequence[Mapping[str, Any]], expected: Sequence[torch.Tensor]) -> str | None:
        try:
            found = self._try(examples, [2, 3])
            return None if self._are_alike(expected, found) else "it computes something else in flat steps"
        except Exception as error:  # noqa: BLE001 - whatever an architecture does not understand
            return str(error) if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {error}"

    def _foreseen(self, texts: Sequence[Mapping[str, Any]]) -> str | None:
        """Returns what short prompts do not show."""
        layers = self._cache_utils.DynamicCache(config=self._model.config).layers
        if not all(type(layer) is self._cache_utils.DynamicLayer for layer in layers):
            return "not all of its layers keep all keys and values"
        ropes = getattr(self._model.config.get_text_config(), "rope_parameters", None) or {}
        if any(rope.get("rope_type") in _ROPES_OF_LENGTH for rope in (ropes, *ropes.values()) if isinstance(rope, Mapping)):
            return "its positions depend on the longest context"
        if "position_ids" not in self._accepted:
            return "it takes no positions"
        for text in texts:
            positions = torch.arange(text["input_ids"].shape[1], device=self.device).unsqueeze(0)
            plain, placed = (self._model(**text, **given).logits for given in ({}, {"position_ids": positions}))
            if not torch.equal(plain, placed):
                return "it counts positions in a way of its own"
        return None

    def _try(self, examples: Sequence[Mapping[str, Any]], cuts: Sequence[int]) -> list[torch.Tensor]:
        """Returns logits of the first two tokens after each prompt, and hidden states. Pieces are cut at the first numbers."""
        prompts = [self.prepare(example) for example in examples]
        contexts = [self.open(prompt) for prompt in prompts]
        results: list[torch.Tensor] = []
        try:
            for cut in cuts:
                self.advance([(context, min(cut, context.unread - 1)) for context in contexts if context.unread > 1])
            for _ in range(2):
                pieces = [(context, context.unread) for context in contexts]
                together = [pieces] if self.flat else [[piece] for piece in pieces]
                results += [logits for part in together for logits in self.advance(part) if logits is not None]
                for context in contexts:
                    context.token = 1
        finally:
            for context in contexts:
                self.close(context)
        return results + ([states.float() for states in self.read(prompts)] if self.can_read else [])

    def _are_alike(self, expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
        tolerance = _TOLERANCES.get(self.dtype, _TOLERANCE)
        return all(
            right.shape == left.shape and bool((right - left).abs().max() <= tolerance * left.abs().max())
            for left, right in zip(expected, found, strict=True)
        )


def _place(context: Context, count: int, places: Mapping[int, int]) -> tuple[bool, int, int]:
    """Where a context stands in a flat sequence: single tokens first, those on one shelf side by side."""
    assert context.row is not None, "it is open"
    return context.prompt is not None, places[id(context.row.shelf)], context.row.index


def _find_backbone(model: Any, accepted: set[str]) -> Any | None:
    """Returns the part of a model that does everything but the logits; None if there is none, or it is blind to pixels."""
    backbone = model.base_model
    if backbone is model:
        return None
    pixels = {name for name in accepted if name.startswith("pixel_values")}
    return backbone if pixels <= set(inspect.signature(backbone.forward).parameters) else None
