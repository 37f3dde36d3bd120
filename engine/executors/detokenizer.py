"""Tokens into text, token by token.

A token is not a piece of text by itself: a character may be spread over several tokens, and whether a token begins with a
space can depend on the token before it. ``DecodeStream`` of the library tokenizers takes care of both, and so does
:class:`_PlainStream` for tokenizers that are not of that library. This file adds the text that they hold back when an answer
ends: half a character, or noise that never becomes text.

Invariant: the pieces, joined, are what the tokenizer makes of all tokens at once. (Unless a model writes hundreds of tokens
that are no text.)
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Sequence
from typing import Any

from shmring.engine.protocol import TokenLogprobs

__all__ = ["Detokenizer", "TokenBytes"]

_REPLACEMENT = "\ufffd"
_BEFORE = "a"  # a text before a token

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]  # bytes that are their own letters
_OTHERS = sorted({*range(256)} - {*_PRINTABLE})
_OF_LETTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + place): byte for place, byte in enumerate(_OTHERS)}

# At the end, held-back tokens are decoded together with so many tokens before them: spaces depend on one neighbour.
_CONTEXT = 8

# After so many tokens, a text that never becomes complete is given out as it is: decoding noise would take ever more time.
_MAX_HELD = 256


class Detokenizer:
    """Decodes one answer.

    Args:
        tokenizer: of transformers.
        skip_special_tokens: whether control tokens are no text.
    """

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._step = _make_step(tokenizer, [], self._skip)
        self._context: list[int] = []  # the last tokens whose text was given out
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Takes a token; returns what it completes, often nothing."""
        self._held.append(token)
        try:
            text = self._step(token)
        except Exception:  # noqa: BLE001 - DecodeStream raises nothing narrower: text that was given out turns out to be none
            return self.flush()
        if text:
            self._context, self._held = (self._context + self._held)[-_CONTEXT:], []
        elif len(self._held) >= _MAX_HELD:
            text = self.flush()
        return text or ""

    def flush(self) -> str:
        """Returns what was held back: the answer ends within a character."""
        before = _decode(self._tokenizer, self._context, self._skip)
        text = _decode(self._tokenizer, self._context + self._held, self._skip)[len(before) :]
        last = self._held[-1:]
        is_text = _decode(self._tokenizer, last, self._skip).strip(_REPLACEMENT) != ""
        self._context, self._held = last if is_text else [], []
        self._step = _make_step(self._tokenizer, self._context, self._skip)
        return text


class TokenBytes:
    """What single tokens stand for, which is kept: a token with logprobs has those of 21. They are no more than the vocabulary.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._found: dict[int, bytes] = {}
        # A decoder may take the space from the first token of a text, so that two tokens would have the same one.
        self._before: list[int] = tokenizer(_BEFORE, add_special_tokens=False)["input_ids"]
        self._text_before = self._decode(self._before)

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """Returns the bytes of each token: a text, or a part of a character."""
        for token in tokens:
            if token not in self._found:
                self._found[token] = self._find(token)
        return [self._found[token] for token in tokens]

    def describe(self, token: int, logprob: float, likeliest: Sequence[tuple[int, float]]) -> TokenLogprobs:
        """Says how likely a token was, and the likeliest ones, given by their numbers."""
        content, *others = self.of([token, *(other for other, _ in likeliest)])
        return TokenLogprobs(content, logprob, [(other, of) for other, (_, of) in zip(others, likeliest, strict=True)])

    def _find(self, token: int) -> bytes:
        text = self._decode([*self._before, token])
        text = text.removeprefix(self._text_before) if text.startswith(self._text_before) else self._decode([token])
        content = _bytes_of(self._tokenizer.convert_ids_to_tokens(token) or "") if _REPLACEMENT in text else None
        return text.encode(errors="replace") if content is None else content

    def _decode(self, tokens: list[int]) -> str:
        return _decode(self._tokenizer, tokens, skip=False)


def _bytes_of(piece: str) -> bytes | None:
    """Returns the bytes that a vocabulary's spelling of a token stands for; None if it does not spell bytes.

    Source: SentencePiece's tokens of bytes, and GPT-2's letters, of which each is a byte.
    """
    if single := _BYTE.fullmatch(piece):
        return bytes.fromhex(single[1])
    content = [_OF_LETTERS.get(letter) for letter in piece]
    return bytes(byte for byte in content if byte is not None) if content and None not in content else None


def _make_step(tokenizer: Any, context: list[int], skip: bool) -> Callable[[int], str | None]:
    """Returns what takes a token and returns the text that it completes, after a context that was given out."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _PlainStream(tokenizer, context, skip).step
    stream = importlib.import_module("tokenizers").decoders.DecodeStream(ids=context, skip_special_tokens=skip)
    return functools.partial(stream.step, backend)


class _PlainStream:
    """What ``DecodeStream`` does, by a tokenizer that only decodes whole lists of tokens."""

    def __init__(self, tokenizer: Any, context: list[int], skip: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._tokens = list(context)
        self._given = len(context)  # tokens whose text was given out

    def step(self, token: int) -> str:
        """Takes a token; returns what it completes."""
        self._tokens.append(token)
        before = _decode(self._tokenizer, self._tokens[: self._given], self._skip)
        text = _decode(self._tokenizer, self._tokens, self._skip)
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._tokens = self._tokens[self._given :] if before else self._tokens
        self._given = len(self._tokens)
        return text[len(before) :]


def _decode(tokenizer: Any, tokens: list[int], skip: bool) -> str:
    text: str = tokenizer.decode(tokens, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    return text
