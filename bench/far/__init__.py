"""Clients on other hosts: what their connections bring and cost, and what they do to clients beside the engine."""
