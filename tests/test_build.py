"""Building from source: what is said where it can't be done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_without_a_compiler_the_install_says_what_to_install(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CC"} | {"PATH": str(tmp_path)}
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(tmp_path), "--build-temp", str(tmp_path)]
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=60)
    assert build.returncode == 1
    message = build.stderr.splitlines()[-1]
    assert message.startswith("shmring builds its core from C, and the compiler '")
    assert message.endswith("(Debian: apt install gcc python3-dev), or install a wheel, which needs neither")
