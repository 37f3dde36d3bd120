"""Benchmarks of shmring beside what its users would take instead, in one run: ``python -m bench``."""
