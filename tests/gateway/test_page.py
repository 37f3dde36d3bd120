"""The example of docs/clusters.md that needs no Ray, run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "clusters.md").read_text().split("\n## Without Ray\n")[1]
    [example] = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    [printed] = re.findall(r"It prints `(.*?)`", section)
    program = tmp_path / "example.py"
    program.write_text(example)
    environment = {"PATH": "/usr/bin:/bin", "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=100, env=environment)
    assert done.stdout == printed + "\n", done.stderr[-4000:]
