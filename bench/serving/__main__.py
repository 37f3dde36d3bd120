"""``python -m bench.serving``: the load generator alone."""

from bench.serving.command import serve_command

if __name__ == "__main__":
    serve_command(prog_name="python -m bench.serving")
