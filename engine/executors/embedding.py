"""Embeddings by a language model: a vector of length one for a text, a picture or a clip.

The model reads each input as a prompt (see :mod:`.prompts`). Its last hidden states, those after the final norm, are pooled:

- ``"last"``, the default, takes that of the last token. In a decoder, tokens see only the tokens before them, so the last one
  is the only one that has seen all of the input. Most decoders that were trained to embed, also pictures, use it;
- ``"mean"`` takes the mean of all tokens, those of media included, for models that were trained in that way.

The file of a checkpoint for Sentence Transformers (``modules.json``) is not read; the executor's option ``pooling`` chooses. A
model that was only trained to answer also embeds, but it was not trained to know which inputs are alike.

Source: vLLM's ``as_embedding_model``, which makes an embedding of a generating model by the last token and brings it to length
one unless a pooling configuration says otherwise. Pictures by the last token: Jiang et al., "VLM2Vec: Training
Vision-Language Models for Massive Multimodal Embedding Tasks" (ICLR 2025).
"""

from __future__ import annotations

import torch

from shmring.engine.executors.generation import LanguageModel
from shmring.engine.executors.interface import ContextLengthError
from shmring.engine.executors.prompts import PromptBuilder
from shmring.engine.protocol import Medium, Text

__all__ = ["POOLINGS", "Embedder"]

POOLINGS = ("last", "mean")
"""Which hidden states make an embedding."""


class Embedder:
    """Embeds one input at a time; equal inputs get equal bits, since nothing else is ever in the same pass.

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
        self.size = int(model.read({"input_ids": torch.tensor([[1]])}).shape[1])

    @torch.inference_mode()
    def embed(self, item: Text | Medium) -> tuple[torch.Tensor, int]:
        """Embeds an input.

        Returns:
            Its embedding, and how many tokens it has, its frame in the chat template included: shape (:attr:`size`,), float32,
            of length one, in host memory.

        Raises:
            ValueError: it is not what the model takes.
            ContextLengthError: it is longer than the model takes.
            RuntimeError: what the model computes are no numbers.
        """
        inputs = self._prompts.build_single(item)
        tokens = int(inputs["input_ids"].shape[1])
        if tokens > self._max_model_len:
            raise ContextLengthError(tokens, None, self._max_model_len)
        states = self._model.read(inputs)
        pooled = states[-1].float() if self._pooling == "last" else states.float().mean(dim=0)
        length = torch.linalg.vector_norm(pooled)
        if not torch.isfinite(length) or length == 0:
            raise RuntimeError(
                "the model's hidden states hold NaN or infinity, or nothing but noughts: its weights are damaged, or do not "
                "fit its dtype; try dtype float32"
            )
        return (pooled / length).cpu(), tokens
