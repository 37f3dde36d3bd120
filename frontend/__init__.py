"""The HTTP side: an OpenAI-compatible server whose processes decode media straight into slots of an engine's slab."""
