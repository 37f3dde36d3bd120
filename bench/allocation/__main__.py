"""``python -m bench.allocation``: the same as ``python -m bench allocator``."""

from bench.allocation.command import allocator_command

if __name__ == "__main__":
    allocator_command(prog_name="python -m bench.allocation")
