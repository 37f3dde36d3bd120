"""One index can hold fingerprints of several kinds: each kind has a space of its own."""

from __future__ import annotations

import math

import numpy as np

from shmring.engine.fingerprints.vectors import FINGERPRINT_SIZE, place_in_space


def test_within_a_space_cosines_stay_and_between_spaces_they_vanish() -> None:
    vectors = np.random.default_rng(1).standard_normal((20, FINGERPRINT_SIZE))
    # Also such as have little in them but one number.
    vectors = np.concatenate([vectors / np.linalg.norm(vectors, axis=1, keepdims=True), np.eye(FINGERPRINT_SIZE)[:20]])
    here, there = (np.stack([place_in_space(space, vector) for vector in vectors]) for space in ("here", "there"))
    assert np.allclose(here @ here.T, vectors @ vectors.T)
    for space, other in ((here, there), (here, vectors), (there, vectors)):
        assert np.abs(space @ other.T).max() < 0.25


def test_a_space_is_the_same_for_ever() -> None:
    # Embeddings that somebody stored are compared with those of later versions.
    turned = place_in_space("sound", np.eye(FINGERPRINT_SIZE)[0]) * math.sqrt(FINGERPRINT_SIZE)
    assert turned[:16].round().tolist() == [-1, -1, -1, 1, 1, -1, 1, -1, 1, 1, -1, 1, -1, 1, -1, -1]
