"""One index can hold fingerprints of several kinds: each kind has a space of its own."""

from __future__ import annotations

import math

import torch

from engine.executors.fingerprints.vectors import FINGERPRINT_SIZE, place_in_space


def test_within_a_space_cosines_stay_and_between_spaces_they_vanish() -> None:
    vectors = torch.randn(20, FINGERPRINT_SIZE, generator=torch.Generator().manual_seed(1))
    # Also such as have little in them but one number.
    vectors = torch.nn.functional.normalize(torch.cat([vectors, torch.eye(FINGERPRINT_SIZE)[:20]]), dim=1)
    here, there = place_in_space("here", vectors), place_in_space("there", vectors)
    assert torch.allclose(here @ here.T, vectors @ vectors.T, atol=1e-5)
    for one, other in ((here, there), (here, vectors), (there, vectors)):
        assert float((one @ other.T).abs().max()) < 0.25


def test_a_space_is_the_same_for_ever() -> None:
    # Embeddings that somebody stored are compared with those of later versions.
    turned = place_in_space("sound", torch.eye(FINGERPRINT_SIZE)[0]) * math.sqrt(FINGERPRINT_SIZE)
    assert turned[:16].round().tolist() == [-1, -1, -1, 1, 1, -1, 1, -1, 1, 1, -1, 1, -1, 1, -1, -1]
