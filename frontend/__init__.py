"""The HTTP side: an OpenAI-compatible server whose processes decode media and put them into slots of an engine's slab."""
