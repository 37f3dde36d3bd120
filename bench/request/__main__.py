"""``python -m bench.request``: this benchmark alone."""

from bench.request.command import request_command

if __name__ == "__main__":
    request_command(prog_name="python -m bench.request")
