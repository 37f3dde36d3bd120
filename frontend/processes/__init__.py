"""The processes of a server: the supervisor, what it starts, and how each of them begins and ends."""
