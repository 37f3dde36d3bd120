"""Processes as whoever starts or watches them sees them (``process``), and what a process does for its parent (``child``)."""
