"""Where a frontend listens, its connections, bodies and answers. Nothing here knows what is asked for."""
