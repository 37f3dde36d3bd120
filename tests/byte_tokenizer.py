"""The tokenizer of models that are small enough for a test: its tokens are bytes, and the commonest pairs of a few texts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers


def make_tokenizer(
    texts: Iterable[str], special: Iterable[str], *, end: str, padding: str, least: int = 2, **options: Any
) -> transformers.PreTrainedTokenizerFast:
    """Makes a byte-level BPE tokenizer.

    Args:
        texts: whose pairs of tokens are tokens.
        special: tokens that are in no text, ``end`` and ``padding`` among them.
        end: of an answer.
        padding: what fills a batch.
        least: how often a pair has to occur.
        **options: of the class.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False, min_frequency=least)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, pad_token=padding, clean_up_tokenization_spaces=False, **options
    )
