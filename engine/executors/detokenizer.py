"""Tokens into text, token by token.

A token is not a piece of text by itself: a character may be spread over several tokens, and whether a token begins with a
space can depend on the token before it. So tokens are decoded together with those before them, and what is new is the
difference. A character that is not complete yet decodes to U+FFFD, and is held back until it is.

Invariant: the pieces, joined, are what the tokenizer makes of all tokens at once. (Unless a model writes hundreds of tokens
that are no text.)
"""

from __future__ import annotations

from typing import Any

__all__ = ["Detokenizer"]

_REPLACEMENT = "\ufffd"

# Tokens that are decoded again for each new one. Many cost time; a few are context enough, since spaces depend on one
# neighbour.
_MAX_WINDOW = 32
_CONTEXT = 8

# Tokens after which a text that never becomes complete is let go as it is: noise, which would cost ever more time.
_MAX_HELD = 256


class Detokenizer:
    """Decodes one answer.

    Args:
        tokenizer: of transformers.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = 0  # characters of the window's text that were given out

    def push(self, token: int) -> str:
        """Takes a token; returns what it completes, often nothing."""
        self._window.append(token)
        text = self._decode(self._window)
        # All of them, since tokenizers with a byte fallback give nothing else for a row of bytes that ends within a character.
        complete = len(text.rstrip(_REPLACEMENT)) if len(self._window) < _MAX_HELD else len(text)
        piece = text[self._given : complete]
        self._given = max(self._given, complete)
        if len(self._window) > _MAX_WINDOW and complete == len(text):
            self._move_window()
        if len(self._window) >= _MAX_HELD:
            self._window, self._given = [], 0
        return piece

    def flush(self) -> str:
        """Returns what was held back: the answer ends within a character."""
        text = self._decode(self._window)
        piece = text[self._given :]
        self._given = len(text)
        return piece

    def _move_window(self) -> None:
        context = self._window[-_CONTEXT:]
        text = self._decode(context)
        # Without text the context would not be seen as such, and one that begins within a character is none.
        if text and not text.startswith(_REPLACEMENT):
            self._window, self._given = context, len(text)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
