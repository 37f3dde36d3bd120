"""Makes .venv-sglang: an SGLang that runs on a CPU beside this package, and a tiny model.

``make test-sglang`` runs it once, with the Python that the environment is to have: ``python -m tests.sglang.install
.venv-sglang``. It takes two to three minutes and 2 GB. SGLang itself wants some 70 packages, of which half are kernels for
CUDA. It is installed without any, and gets the ones that a server on a CPU imports.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from tests.installing_servers import ROOT, Environment, say

SGLANG = "0.5.23"
TRANSFORMERS = "5.19.0"  # the one that this SGLang wants
IMPORTED = (
    *("aiohttp", "apache-tvm-ffi", "compressed-tensors", "dill", "einops", "fastapi", "gguf", "IPython", "jsonschema"),
    *("msgspec", "openai", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil", "pybase64"),
    *("python-multipart", "pyzmq", "requests", "scipy", "sentencepiece", "setproctitle", "soundfile", "torchvision"),
    *("triton", "uvicorn", "uvloop", "xgrammar"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an environment with SGLang for the tests of the plug-in.")
    parser.add_argument("directory", type=Path)
    environment = Environment(parser.parse_args().directory)
    say("1 of 4: torch ...")
    environment.install_torch()
    say("2 of 4: SGLang, and what it imports on a CPU ...")
    environment.install(f"transformers=={TRANSFORMERS}", *IMPORTED)
    environment.pip("install", "--no-deps", f"sglang=={SGLANG}")
    environment.mend_torchvision()
    put_kernels_in_place(environment)
    say("3 of 4: this package, and what tests need ...")
    environment.install_this_package()
    say("4 of 4: a tiny model ...")
    environment.run(ROOT / "tests" / "sglang" / "tiny_model.py", environment.directory / "model")


def put_kernels_in_place(environment: Environment) -> None:
    """SGLang imports its compiled kernels, and their wheels need CUDA; see ``kernels_stand_in.py``."""
    package = environment.packages / "sgl_kernel"
    package.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "sglang" / "kernels_stand_in.py", package / "__init__.py")


if __name__ == "__main__":
    main()
