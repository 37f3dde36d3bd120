"""The table of guards in docs/guarantees.md, made of the one of faults: ``python docs/make_guarantees.py`` writes it.

A test compares. What is promised is written by hand, in the page.
"""

from __future__ import annotations

from pathlib import Path

from tests.mutants.table import FAULTS

PAGE = Path(__file__).with_name("guarantees.md")

_HEAD = "| in | removed guard | test that must fail |\n|---|---|---|\n"


def make_page() -> str:
    """Returns the page's text; all but that table is as it stands there."""
    before, head, behind = PAGE.read_text().partition(_HEAD)
    _, end, rest = behind.partition("\n\n")
    rows = [f"| `{each.file}` | {each.name} | `{each.test.removeprefix('tests/')}` |" for each in FAULTS if each.is_guard]
    return before + head + "\n".join(rows) + end + rest


if __name__ == "__main__":
    PAGE.write_text(make_page())
