"""Sentences, altered and paraphrased."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from shmring.engine.fingerprints.texts import fingerprint_text
from tests.fingerprints.scores import Kind, score

#: Each with a paraphrase, and with a sentence that means the opposite in nearly the same words.
_SENTENCES = (
    ("The film was wonderful from beginning to end.", "I enjoyed every minute of that movie.", "terrible", "wonderful"),
    ("How do I reset the password of my account?", "I forgot my login secret, what now?", "keep", "reset"),
    (
        "The train to Berlin leaves at nine in the morning.",
        "At 9 am one departs for the German capital.",
        "arrives",
        "leaves",
    ),
    ("Prices of houses rose sharply last year.", "Homes became far more expensive in 2023.", "fell", "rose"),
    ("She always takes the dog along when she travels.", "Her pet accompanies her on every journey.", "never", "always"),
    ("The engine releases the memory after each request.", "Once answered, a query's buffers are freed.", "before", "after"),
    ("Please send the signed contract by Friday.", "We need your signature before the weekend.", "burn", "send"),
    ("Heavy rain is expected in the north tomorrow.", "The forecast says that it will pour up there.", "Little", "Heavy"),
)


def score_texts() -> Iterator[Kind]:
    """Scores what is done to the letters of sentences, and what is done to their meaning."""
    sentences = [sentence for sentence, *_ in _SENTENCES]
    copies = {title: [fingerprint_text(alter(sentence)) for sentence in sentences] for title, alter in _ALTERATIONS.items()}
    copies["the opposite, by another word"] = [
        fingerprint_text(sentence.replace(word, opposite)) for sentence, _, opposite, word in _SENTENCES
    ]
    copies["paraphrased"] = [fingerprint_text(paraphrase) for _, paraphrase, *_ in _SENTENCES]
    yield score("Texts", [fingerprint_text(sentence) for sentence in sentences], copies)


def _middle(text: str) -> int:
    return len(text) // 2


_ALTERATIONS: dict[str, Callable[[str], str]] = {
    "upper case, twice the blanks": lambda text: text.upper().replace(" ", "  "),
    "a letter lost": lambda text: text[: _middle(text)] + text[_middle(text) + 1 :],
    "two letters swapped": lambda text: text[:6] + text[7] + text[6] + text[8:],
    "three letters lost": lambda text: text[:5] + text[6:15] + text[16:25] + text[26:],
    "the last word lost": lambda text: text.rpartition(" ")[0],
    "“Re: ” before it": lambda text: f"Re: {text}",
    "words in reverse order": lambda text: " ".join(reversed(text.split())),
}
