"""Nearly the same text must stay nearer to its original than to any other text."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from shmring.engine.fingerprints.texts import count_words, fingerprint_text
from tests.tables import for_each

TEXTS = [
    "The quick brown fox jumps over the lazy dog.",
    "A fast auburn fox leapt across a sleeping hound.",
    "The engine claims what waits, executes it on a thread, releases the slots and answers.",
    "How do I reset the password of my account?",
    "How do I change the battery of my phone?",
    "What is the capital of France, and how many people live there?",
    "Der schnelle braune Fuchs springt über den faulen Hund.",
    "Le renard brun et rapide saute par-dessus le chien paresseux.",
    "敏捷的棕色狐狸跳过了懒狗。今天天气很好。",
    "Быстрая коричневая лиса прыгает через ленивую собаку.",
]

ALTERATIONS: dict[str, Callable[[str], str]] = {
    "character-lost": lambda text: text[: len(text) // 2] + text[len(text) // 2 + 1 :],
    "characters-swapped": lambda text: text[:6] + text[7] + text[6] + text[8:],
    "no-full-stop": lambda text: text[:-1],
    "quoted": lambda text: f"“{text}”",
    "begun-anew": lambda text: f"Re: {text}",
}

# The worst margin measured is 0.54.
MARGIN = 0.4


def cosine(text: str, other: str) -> float:
    return float(fingerprint_text(text) @ fingerprint_text(other))


@for_each("text", TEXTS)
@for_each("alteration", ALTERATIONS.values(), ids=ALTERATIONS.keys())
def test_altered_text_is_nearest_to_its_original(alteration: Callable[[str], str], text: str) -> None:
    altered = alteration(text)
    assert cosine(altered, text) - max(cosine(altered, other) for other in TEXTS if other != text) > MARGIN


@for_each("same", ["ﬁne  Straße\n\uff11\uff12\uff13", "FINE STRASSE 123", "\tfine strasse 123 "])
def test_case_white_space_and_compatibility_forms_do_not_matter(same: str) -> None:
    assert torch.equal(fingerprint_text(same), fingerprint_text("fine strasse 123"))


def test_unrelated_texts_are_far_apart() -> None:
    strangers = itertools.combinations([TEXTS[index] for index in (0, 2, 3, 6, 8, 9)], 2)
    assert max(cosine(text, other) for text, other in strangers) < 0.25


def test_long_texts_without_a_word_in_common_are_far_apart() -> None:
    # Thousands of n-grams share 511 places: only that their signs cancel out keeps them apart.
    letters = torch.randint(97, 123, (6, 3000), generator=torch.Generator().manual_seed(1))
    texts = [bytes(row).decode() for row in letters.tolist()]
    assert max(abs(cosine(text, other)) for text, other in itertools.combinations(texts, 2)) < 0.25


def test_how_often_something_is_said_counts_but_does_not_drown_the_rest() -> None:
    assert cosine("yes " * 20 + "no " * 2, "yes " * 2 + "no " * 20) < 0.9
    assert cosine(TEXTS[0] + " again" * 30, TEXTS[0]) > 0.4


def test_order_of_words_matters_a_little() -> None:
    assert 0.5 < cosine("the dog bites the man", "the man bites the dog") < 0.97


def test_short_texts_are_told_apart() -> None:
    assert max(cosine(letter, other) for letter, other in itertools.combinations("abcdefghij", 2)) < 0.5


@for_each("text", ["", " ", "\n\t\u3000"])
def test_a_text_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a text with at least one character"):
        fingerprint_text(text)


def test_a_text_too_long_is_refused_with_its_length_and_not_its_words() -> None:
    with pytest.raises(ValueError, match=r"^a text has 100001 characters; at most 100000 are described: split it$"):
        fingerprint_text("secret" * 16_666 + "words")


def test_words_are_what_white_space_keeps_apart() -> None:
    assert [count_words(text) for text in ("", "one", " two\twords\n", "it's three, really")] == [0, 1, 2, 3]
