"""``bench allocator``: how full the slab gets under which policy of placing slots, what a placement costs, and what reusing
warm memory is worth.

See :mod:`bench.allocation.traces` for what is replayed, :mod:`bench.allocation.policies` for what is compared,
:mod:`bench.allocation.fill`, :mod:`bench.allocation.speed` and :mod:`bench.allocation.bandwidth` for what is measured. What
follows from it is written down in ``docs/decisions/0008-allocation-policy.md``.
"""
