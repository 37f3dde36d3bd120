"""A store: an engine process that keeps content for others, and answers no requests."""
