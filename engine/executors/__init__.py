"""Executors: what the engine runs on the tensors of a request."""
