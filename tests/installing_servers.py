"""Environments of their own, in which other people's servers run on a CPU beside this package.

Servers want other versions of some packages than this repository's other tests. What is odd about torch and torchvision for
CPUs is put right here, each oddity in a function.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

__all__ = ["ROOT", "Environment", "say"]

ROOT = Path(__file__).resolve().parents[1]
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
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.directory], check=True)
        self.packages = Path(self.run("-c", "import sysconfig; print(sysconfig.get_path('purelib'))", captured=True).strip())
        torch = re.search(r"^torch==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
        assert torch is not None
        self._torch = torch[0]

    def run(self, *arguments: object, captured: bool = False) -> str:
        """Runs its Python."""
        done = subprocess.run(
            [self.python, *map(str, arguments)], check=True, text=True, stdout=subprocess.PIPE if captured else None
        )
        return done.stdout or ""

    def pip(self, *arguments: object) -> None:
        self.run("-m", "pip", *arguments, "--quiet", "--disable-pip-version-check")

    def install_torch(self) -> None:
        """First and alone: whatever else depends on it then takes this one."""
        self.pip("install", self._torch)

    def install(self, *requirements: object) -> None:
        """Installs something, and leaves torch as it is."""
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
            constraints.write(self._torch + "\n")
            constraints.flush()
            self.pip("install", "--prefer-binary", "--constraint", constraints.name, *requirements)

    def mend_torchvision(self) -> None:
        """It may be linked with CUDA; beside a torch without, only its Python half works. Servers need no more."""
        path = self.packages / "torchvision" / "_meta_registrations.py"
        registered = re.compile(r'^@torch\.library\.register_fake\(("torchvision::\w+")\)', re.MULTILINE)
        guarded = r"@(torch.library.register_fake(\1) if torchvision.extension._has_ops() else (lambda function: function))"
        path.write_text(registered.sub(guarded, path.read_text()))

    def install_this_package(self, extra: str = "") -> None:
        self.install("--editable", f"{ROOT}{extra}", *TOOLS)

    def unpack_sources(self, package: str, version: str) -> None:
        """Gets the Python sources of a package, as ``sources/VERSION`` in the environment, without what is compiled."""
        target = self.directory / "sources" / version
        with tempfile.TemporaryDirectory() as downloads:
            self.pip("download", "--no-deps", "--only-binary", ":all:", "--dest", downloads, f"{package}=={version}")
            (wheel,) = Path(downloads).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(target, [name for name in archive.namelist() if not name.endswith(".so")])


def say(text: str) -> None:
    print("  " + text, flush=True)
