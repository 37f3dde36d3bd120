"""``python -m bench.gpu``: the same as ``python -m bench gpu``."""

from bench.gpu.command import gpu_command

if __name__ == "__main__":
    gpu_command(prog_name="python -m bench.gpu")
