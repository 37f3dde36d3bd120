"""Perceptual fingerprints of pictures, sounds, clips and texts. They know nothing of engines: numbers in, vectors out.

One file for each kind of thing, and what they share (:mod:`.vectors`). The executor that makes them for requests is
:mod:`shmring.engine.executors.fingerprints`. What fingerprints find and what not is measured in docs/fingerprints.md.
"""
