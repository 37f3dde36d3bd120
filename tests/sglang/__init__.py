"""The plug-in for SGLang: its parts, and the real thing in an environment of its own."""
