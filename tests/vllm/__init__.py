"""The plug-in for vLLM: its parts, and the real thing in an environment of its own."""
