"""``bench allocator``: how full the slab gets, and what placing a slot costs, of the allocator and of the lease books."""
