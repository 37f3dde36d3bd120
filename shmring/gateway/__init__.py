"""The engine's side of connections between hosts: a client of its own ring, which takes slots for far senders."""
