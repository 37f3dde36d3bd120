"""Shared memory and what lies in it: the slab, views whose death is observable, payloads."""
