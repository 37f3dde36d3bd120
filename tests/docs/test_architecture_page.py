"""docs/architecture.md says of each source where it belongs: in one row of its tables of files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shmring", "engine", "frontend")
ENDINGS = {".py", ".pyx", ".c", ".h"}

FILES = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Files\n")[2].partition("\n## ")[0]
SOURCES = {
    str(path.relative_to(ROOT))
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.suffix in ENDINGS and path.name != "__init__.py"
}


def named_files() -> Iterator[str]:
    """The files in the first columns; a name without a folder lies in that of the name before it."""
    for cell in re.findall(r"^\| (`.*?`) \| ", FILES, re.MULTILINE):
        folder = ""
        for name in re.findall(r"`(.*?)`", cell):
            folder = name.rpartition("/")[0] or folder
            yield f"{folder}/{name.rpartition('/')[2]}"


def test_each_source_is_in_one_row() -> None:
    named = Counter(named_files())
    assert SOURCES - named.keys() == set()
    assert {name for name, count in named.items() if count > 1} == set()


def test_each_file_in_a_row_is_there() -> None:
    named = set(named_files())
    assert {name.partition("/")[0] for name in named} == set(PACKAGES)
    assert named - SOURCES == set()
