"""A worker's end: reads what an engine hands out, in place, and replies."""
