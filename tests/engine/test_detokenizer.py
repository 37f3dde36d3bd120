"""The pieces of an answer, joined, are what the tokenizer makes of the whole; and no piece holds half a character."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from shmring.engine.executors.detokenizer import Detokenizer, TokenBytes
from tests.tables import for_each

TEXT = "Größe 日本語のテキスト, 🙂🚀 naïve señor: привет!  Two  spaces, a\ttab\nand a line. 👩\u200d👩\u200d👧"


class PlainTokenizer:
    """One that is not of the library tokenizers: all that it can do is to decode a list."""

    def __init__(self, tokenizer: Any) -> None:
        self.encode = tokenizer.encode
        self.convert_tokens_to_ids = tokenizer.convert_tokens_to_ids
        self.decode = tokenizer.decode
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens
        self._length = len(tokenizer)

    def __len__(self) -> int:
        return self._length

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}


@pytest.fixture(scope="module", params=["fast", "plain"])
def kind(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    """Both kinds of tokenizers, for each test."""
    return PlainTokenizer if request.param == "plain" else lambda tokenizer: tokenizer


@pytest.fixture(scope="module")
def byte_tokenizer(tiny_model: Callable[..., Path], kind: Callable[[Any], Any]) -> Any:
    """Bytes and common pairs of them: most characters beyond ASCII are spread over several tokens."""
    transformers = pytest.importorskip("transformers")
    return kind(transformers.AutoTokenizer.from_pretrained(tiny_model("llama"), local_files_only=True))


@pytest.fixture(scope="module")
def word_tokenizer(kind: Callable[[Any], Any]) -> Any:
    """Words, each with the space before it, as SentencePiece's: the first word of a text loses its space."""
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁cat", "s", "▁sat", ".", "▁on"]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({word: number for number, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return kind(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>"))


def pieces(tokenizer: Any, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


def whole(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_characters_come_whole(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer.encode(TEXT, add_special_tokens=False)
    assert len(tokens) > len(TEXT)
    texts = pieces(byte_tokenizer, tokens)
    assert "".join(texts) == TEXT
    assert "\ufffd" not in "".join(texts)
    assert texts[-1] == ""


def test_text_is_given_as_soon_as_it_is_complete(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer.encode("a🙂b", add_special_tokens=False)
    assert [piece for piece in pieces(byte_tokenizer, tokens) if piece] == ["a", "🙂", "b"]
    assert pieces(byte_tokenizer, tokens)[0] == "a"


@for_each("seed", range(20))
def test_any_tokens_join_to_what_the_tokenizer_makes_of_them(byte_tokenizer: Any, seed: int) -> None:
    tokens = torch.randint(0, len(byte_tokenizer), (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    assert "".join(pieces(byte_tokenizer, tokens)) == whole(byte_tokenizer, tokens)


@for_each("seed", range(20))
def test_bytes_that_are_no_characters_spoil_nothing_that_follows(word_tokenizer: Any, seed: int) -> None:
    """A byte that was a character by itself can turn out to be part of none, when its text was given out already."""
    noise = torch.randint(1, len(word_tokenizer), (200,), generator=torch.Generator().manual_seed(seed)).tolist()
    words = [word_tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁cat", "s", "▁sat", ".")]
    assert "".join(pieces(word_tokenizer, noise + words)).endswith(" cats sat.")


def test_an_answer_that_ends_within_a_character_says_so_at_the_end(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer.encode("ok 🙂", add_special_tokens=False)[:-1]
    texts = pieces(byte_tokenizer, tokens)
    assert "\ufffd" not in "".join(texts[:-1])
    assert texts[-1] == "\ufffd"


@for_each("repeats", [1, 20])
def test_spaces_between_words_are_kept(word_tokenizer: Any, repeats: int) -> None:
    sentence = [word_tokenizer.convert_tokens_to_ids(word) for word in ("▁the", "▁cat", "s", "▁sat", "▁on", "▁", "▁the", ".")]
    tokens = sentence * repeats
    assert "".join(pieces(word_tokenizer, tokens)) == whole(word_tokenizer, tokens)
    assert whole(word_tokenizer, sentence) == "the cats sat on  the."


def test_a_special_token_at_the_beginning_costs_no_space(word_tokenizer: Any) -> None:
    words = ["<s>", *["▁cat", "<s>", "▁sat"] * 20]
    tokens = [word_tokenizer.convert_tokens_to_ids(word) for word in words]
    assert "".join(pieces(word_tokenizer, tokens)) == whole(word_tokenizer, tokens)


def test_characters_spelled_in_bytes_come_whole(word_tokenizer: Any) -> None:
    tokens = [word_tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "é🙂日".encode()]
    texts = pieces(word_tokenizer, tokens)
    assert "".join(texts) == "é🙂日"
    assert "\ufffd" not in "".join(texts)


def test_long_answers_are_not_decoded_all_over_again(byte_tokenizer: Any) -> None:
    decoded = 0

    class Counting:
        def decode(self, tokens: list[int], **options: Any) -> str:
            nonlocal decoded
            decoded += len(tokens)
            return byte_tokenizer.decode(tokens, **options)

    tokens = byte_tokenizer.encode("All is well. " * 100, add_special_tokens=False)
    pieces(Counting(), tokens)
    assert decoded < 40 * len(tokens)


def test_noise_that_is_no_text_is_let_go_some_time(byte_tokenizer: Any) -> None:
    byte = byte_tokenizer.encode("é", add_special_tokens=False)[-1]
    texts = pieces(byte_tokenizer, [byte] * 600)
    assert any(texts[:300])
    assert set("".join(texts)) == {"\ufffd"}


def test_what_tokens_stand_for_is_all_of_the_text(byte_tokenizer: Any) -> None:
    tokens = byte_tokenizer.encode(TEXT, add_special_tokens=False)
    found = TokenBytes(byte_tokenizer).of(tokens)
    assert b"".join(found).decode() == TEXT
    assert any("\ufffd" in content.decode(errors="replace") for content in found)


def test_a_word_that_begins_with_a_space_is_not_the_one_without_it(word_tokenizer: Any) -> None:
    names = ["▁the", "s", "<0xE5>", "<0x41>", "▁", "<s>"]
    tokens = [word_tokenizer.convert_tokens_to_ids(name) for name in names]
    assert TokenBytes(word_tokenizer).of(tokens) == [b" the", b"s", b"\xe5", b"A", b" ", b"<s>"]


def test_the_bytes_of_a_token_are_found_once(byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = byte_tokenizer.encode(TEXT, add_special_tokens=False)
    contents = TokenBytes(byte_tokenizer)
    once = contents.of(tokens)
    monkeypatch.setattr(contents, "_find", None)
    assert contents.of(tokens) == once
