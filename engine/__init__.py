"""The engine: claims requests from the ring, executes them in steps off the event loop, answers."""
