"""``bench serve``: a load generator for the HTTP server, in the manner of ``vllm bench serve``.

Importing this imports none of what it needs: the command does when it is run.
"""

from bench.serving.command import serve_command

__all__ = ["serve_command"]
