"""``bench ray``: requests in a Ray cluster of two nodes, beside calls of an actor with a tensor."""
