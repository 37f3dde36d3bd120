"""The table of ``GET /metrics`` in docs/metrics.md, made of the code: ``python docs/make_metrics.py``. A test compares."""

from __future__ import annotations

from pathlib import Path

from shmring.frontend.counted import COUNTED

PAGE = Path(__file__).with_name("metrics.md")

_HEAD = "| name | type | unit | meaning |\n|---|---|---|---|\n"


def make_page() -> str:
    """Returns the page's text; all but that table is as it stands there."""
    before, _, rest = PAGE.read_text().partition(_HEAD)
    rows = (f"| `{each.exposed_name}` | {each.kind} | {each.unit} | {each.text} |\n" for each in COUNTED)
    return before + _HEAD + "".join(rows) + "\n" + rest.partition("\n\n")[2]


if __name__ == "__main__":
    PAGE.write_text(make_page())
