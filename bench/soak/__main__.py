"""``python -m bench.soak``: the same as ``python -m bench soak``."""

from bench.soak.command import soak_command

if __name__ == "__main__":
    soak_command(prog_name="python -m bench.soak")
