"""Shared memory and its content: the slab, views whose death is noticed, payloads."""
