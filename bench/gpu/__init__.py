"""``bench gpu``: what lies between a request and the GPU that computes on it.

:mod:`bench.gpu.copies`: bandwidth from a slot, and how long the engine's loop is held up; :mod:`bench.gpu.handovers`: from a
submission in one process until its data is usable in the other. The parent process makes no CUDA context.
"""
