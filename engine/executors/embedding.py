"""Embeddings by a language model: a vector of length one for a text, a picture or a clip.

The model reads each input as a prompt (see :mod:`.prompts`). Its last hidden states, those after the final norm, are pooled:

- ``"last"``, the default, takes that of the last token. In a decoder, tokens see only the tokens before them, so the last one
  is the only one that has seen all of the input. Most decoders that were trained to embed, also pictures, use it;
- ``"mean"`` takes the mean of all tokens, those of media included, for models that were trained in that way.

As many texts as a pass takes are computed together; a medium has a pass to itself.

The file of a checkpoint for Sentence Transformers (``modules.json``) is not read; the executor's option ``pooling`` chooses. A
model that was only trained to answer also embeds, but it was not trained to know which inputs are alike.

Source: vLLM's ``as_embedding_model``, which makes an embedding of a generating model by the last token and brings it to length
one unless a pooling configuration says otherwise. Pictures by the last token: Jiang et al., "VLM2Vec: Training
Vision-Language Models for Massive Multimodal Embedding Tasks" (ICLR 2025).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shmring.engine.executors.encoding import Encoded
from shmring.engine.executors.generation import LanguageModel, Prompt
from shmring.engine.executors.interface import ContextLengthError
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.protocol import Medium, Text

__all__ = ["POOLINGS", "Embedder"]

# Tokens of texts that are computed together. With more of them, a token costs hardly less, and answers pause for longer.
_PASS_TOKENS = 512

POOLINGS = ("last", "mean")
"""Which hidden states make an embedding."""


class Embedder:
    """Embeds inputs. Equal inputs get the same embeddings but for the last bits, which depend on what is in the same pass.

    Args:
        prompts: of the model.
        model: one that :attr:`~shmring.engine.executors.generation.LanguageModel.can_read`.
        pooling: one of :data:`POOLINGS`.
        max_model_len: tokens of an input.

    Attributes:
        size: dimensions of an embedding.
    """

    def __init__(self, prompts: PromptBuilder, model: LanguageModel, pooling: str, max_model_len: int) -> None:
        self._prompts = prompts
        self._model = model
        self._pooling = pooling
        self._max_model_len = max_model_len
        # Measured, and not read from the configuration: some architectures project their hidden states before they return
        # them.
        self.size = int(model.read([model.prepare({"input_ids": torch.tensor([[1]])})])[0].shape[1])

    @torch.inference_mode()
    def embed(self, items: Sequence[Text | Medium]) -> list[Encoded | Exception]:
        """Embeds the first of some inputs: as many as a pass takes.

        Returns:
            Of each the embedding, and how many tokens it has, its frame in the chat template included; or why there is none.
            Shape (:attr:`size`,), float32, of length one, in host memory.

            Errors are ``ValueError``: it is not what the model takes; :class:`ContextLengthError`: it is longer than the model
            takes; ``RuntimeError``: what the model computes are no numbers.
        """
        taken: list[Prompt | Exception] = []
        room = _PASS_TOKENS
        for item in items:
            is_whole = not (isinstance(item, Text) and self._model.flat)  # nothing else is in its pass
            if room <= 0 or (is_whole and taken):
                break
            try:
                inputs = self._prompts.build_single(item)
                tokens = int(inputs["input_ids"].shape[1])
                if tokens > self._max_model_len:
                    raise ContextLengthError(tokens, None, self._max_model_len)
                if tokens > room and room < _PASS_TOKENS:
                    break
                taken.append(self._model.prepare(inputs))
            except Exception as error:  # noqa: BLE001 - whatever goes wrong with an input fails its request
                taken.append(error)
            else:
                room -= _PASS_TOKENS if is_whole else tokens
        try:
            return self._read(taken)
        finally:
            del taken  # or an error in it, whose frames hold views, would be in its own frames

    def _read(self, taken: Sequence[Prompt | Exception]) -> list[Encoded | Exception]:
        prompts = [prompt for prompt in taken if isinstance(prompt, Prompt)]
        try:
            states = iter(self._model.read(prompts) if prompts else [])
        except Exception as error:  # noqa: BLE001 - one may be at fault for all
            if len(taken) == 1:
                return [error]
            return [result for prompt in taken for result in self._read([prompt])]
        return [self._pool(next(states)) if isinstance(prompt, Prompt) else prompt for prompt in taken]

    def _pool(self, states: torch.Tensor) -> Encoded | Exception:
        pooled = states[-1].float() if self._pooling == "last" else states.float().mean(dim=0)
        length = torch.linalg.vector_norm(pooled)
        if not torch.isfinite(length) or length == 0:
            return RuntimeError(
                "the model's hidden states hold NaN or infinity, or nothing but noughts: its weights are damaged, or do not "
                "fit its dtype; try dtype float32"
            )
        return (pooled / length).cpu(), len(states)
