"""``bench serve``: a load generator for the HTTP server, in the manner of ``vllm bench serve``.

See :mod:`bench.serving.plan` for what can be asked for, :mod:`bench.serving.load` for how requests are sent and timed,
:mod:`bench.serving.measurement` for what is counted, and :mod:`bench.serving.run` for servers and their comparison.
Importing this imports none of it: the command loads what it needs when it is run.
"""

from bench.serving.command import serve_command

__all__ = ["serve_command"]
