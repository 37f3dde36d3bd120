"""The engine's end of the transport: its ring, claims, replies, and what it reserves when it starts."""
