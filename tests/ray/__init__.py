"""Engines and clients in a Ray cluster: their parts, and the real thing in an environment of its own."""
