"""The example of docs/clusters.md, run as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_the_example_prints_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "clusters.md").read_text()
    example, printed = re.search(r"```python\n(.*?)```\n\nIt prints:\n\n```\n(.*?)```", page, re.DOTALL).groups()  # type: ignore[union-attr]
    program = tmp_path / "example.py"
    program.write_text(example)
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=240)
    assert done.stdout == printed, done.stderr[-4000:]
