"""The connector for vLLM-Omni: its parts, and vLLM-Omni's own connector layer around it."""
