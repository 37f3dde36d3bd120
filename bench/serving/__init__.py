"""``bench serve``: a load generator for the HTTP server, in the manner of ``vllm bench serve``."""
