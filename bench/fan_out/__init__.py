"""``bench fan-out``: a message to each of several workers."""
