"""docs/architecture.md says of each folder of sources what it has, and names files that are there."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shmring", "engine", "frontend")
ENDINGS = {".py", ".pyx", ".c", ".h"}

PAGE = (ROOT / "docs" / "architecture.md").read_text()
FOLDERS = {
    f"{path.parent.relative_to(ROOT)}/"
    for package in PACKAGES
    for path in (ROOT / package).rglob("*")
    if path.suffix in ENDINGS and path.name != "__init__.py"
}


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows() -> Iterator[tuple[list[str], str]]:
    """The folders of each row, and what it says of them."""
    for cell, text in re.findall(r"^\| (`.*?`) \| (.*) \|$", section("Files"), re.MULTILINE):
        yield re.findall(r"`(.*?)`", cell), text


def test_each_folder_of_sources_has_one_row() -> None:
    named = [folder for folders, _ in rows() for folder in folders]
    assert len(named) == len(set(named))
    assert set(named) - {"bench/", "tests/"} == FOLDERS


def test_each_file_that_a_row_names_is_in_its_folder() -> None:
    for folders, text in rows():
        for name in re.findall(r"`([\w*.]+\.(?:pyx?|c|h))`", text):
            places = [ROOT] if name == "core_interface.py" else [ROOT / folder for folder in folders]
            assert any(list(place.glob(name)) for place in places), (folders, name)


def test_each_file_of_the_way_of_a_message_is_there() -> None:
    files = re.findall(r"`([\w/]+\.pyx?)`", section("The way of a message"))
    assert len(files) > 20
    assert [name for name in files if not (ROOT / "shmring" / name).is_file()] == []
