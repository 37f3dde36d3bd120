"""Text fingerprints: a text in, a unit vector out, such that nearly the same text stays near it.

A text is taken as the n-grams of its characters, each hashed to one of the fingerprint's places with a sign of its own. What
two texts share adds up; what they do not share meets in a place only by chance, and chance signs cancel out. It knows nothing
of meaning: it finds copies, typing errors, other cases and spacings, and texts with the same words in them.

Invariants:

- a fingerprint is finite and of length one for every text that is not empty: one place holds a constant, and nothing else;
- equal texts give equal bits in every process: the hash is fixed here, and not Python's; for sums see :mod:`.vectors`.
"""

from __future__ import annotations

import unicodedata

import numpy as np
import numpy.typing as npt
import torch

from shmring.engine.fingerprints.vectors import FINGERPRINT_SIZE, length_of, normalise, place_in_space, tensor_from

__all__ = ["count_words", "fingerprint_text"]

# Several times what embedding models read (8192 tokens are about 40 000 characters); takes about 20 ms.
_CHARACTERS_LIMIT = 100_000

# Shorter ones are shared by all texts of a language, and a typing error breaks too many of the longer ones. A text of one
# character has one: it is counted with the blanks around it.
_SHORTEST = 3
_LONGEST = 5

_CONSTANT = 0.1
_PLACES = FINGERPRINT_SIZE - 1

# A text whose n-grams cancel out leaves noughts, which must not be divided by nought.
_LEAST_LENGTH = 1e-12

_WORD = (1 << 64) - 1
_MULTIPLIER = 0x100000001B3  # FNV's prime
_WEYL = 0x9E3779B97F4A7C15  # the golden ratio of 2**64, so that lengths start far apart
_FIRST_MIX, _SECOND_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64's


def fingerprint_text(text: str) -> torch.Tensor:
    """Describes a text by a unit vector; the cosine between two such vectors says how much of their wording two texts share.

    Compatibility forms, case and the amount of white space are ignored.

    Args:
        text: at least one character that is not white space.

    Returns:
        float32 of shape (`FINGERPRINT_SIZE`,) and Euclidean length one.

    Raises:
        ValueError: `text` is empty or too long.

    Source:
        Weinberger et al., "Feature Hashing for Large Scale Multitask Learning" (ICML 2009). N-grams of characters: Cavnar and
        Trenkle, "N-Gram-Based Text Categorization" (1994). The mixing of bits: Steele, Lea and Flood, "Fast Splittable
        Pseudorandom Number Generators" (OOPSLA 2014).
    """
    if len(text) > _CHARACTERS_LIMIT:
        raise ValueError(f"a text has {len(text)} characters; at most {_CHARACTERS_LIMIT} are described: split it")
    normalised = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    if not normalised:
        raise ValueError("expected a text with at least one character that is not white space; got an empty one")
    ngrams, counts = np.unique(_hash_ngrams(f" {normalised} "), return_counts=True)
    signs = np.where(ngrams >> np.uint64(63), 1.0, -1.0)
    # Square roots, so that what is said often does not drown what is said once.
    places = np.bincount((ngrams % np.uint64(_PLACES)).astype(np.int64), signs * np.sqrt(counts), _PLACES).astype(np.float64)
    fingerprint = np.concatenate([[_CONSTANT], places / max(length_of(places), _LEAST_LENGTH)])
    return tensor_from(normalise(place_in_space("text", fingerprint)))


def count_words(text: str) -> int:
    """Returns how many words a text has: what white space keeps apart."""
    return len(text.split())


def _hash_ngrams(text: str) -> npt.NDArray[np.uint64]:
    """Returns a hash of each n-gram of a text, repeated ones as often as they occur."""
    # Lone surrogates are no characters, but Python's strings can hold them.
    characters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    rolling = characters
    hashes = []
    for length in range(2, _LONGEST + 1):
        # Arrays wrap around, as they should; NumPy warns of scalars only.
        rolling = rolling[:-1] * np.uint64(_MULTIPLIER) + characters[length - 1 :]
        if length >= _SHORTEST:
            hashes.append(_mix(rolling + np.uint64(length * _WEYL & _WORD)))
    return np.concatenate(hashes)


def _mix(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads the bits of each hash over all of it."""
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(_FIRST_MIX)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(_SECOND_MIX)
    return hashes ^ (hashes >> np.uint64(31))
