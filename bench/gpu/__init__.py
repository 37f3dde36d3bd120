"""``bench gpu``: what lies between a request and the GPU that computes on it.

See :mod:`bench.gpu.copies` for bandwidth from a slot and for how long the engine's loop is held up,
:mod:`bench.gpu.handovers` for how long it takes from a submission in one process until its data is usable in the other;
:mod:`bench.gpu.ways` and :mod:`bench.gpu.routes` for what is compared, and :mod:`bench.gpu.device` for what is asked of the GPU
itself. The parent process makes no CUDA context.
"""
