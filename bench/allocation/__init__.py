"""``bench allocator``: how full the slab gets, and what placing a slot costs.

Measured are the allocator by itself, and the books that lease ranges of the slab and place slots in them
(:mod:`bench.allocation.leased`). Which other policies it was chosen from, and what they reached, is written down in
``docs/decisions/0008-allocation-policy.md``.
"""
