"""Perceptual fingerprints of pictures, sounds, clips and texts, and the executor that makes them.

One file for each kind of thing, what they share (:mod:`.vectors`), and the executor (:mod:`.executor`). What fingerprints find
and what not is measured in docs/fingerprints.md.
"""
