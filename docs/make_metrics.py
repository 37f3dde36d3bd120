"""Tables of docs/metrics.md (``GET /metrics``, the engine, its ring), made of the code: ``python docs/make_metrics.py``.

A test compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from shmring.frontend.counted import COUNTED

PAGE = Path(__file__).with_name("metrics.md")

_EPOCH = "| `epoch` | identity | identity | of this engine's life; not a quantity, and not in `GET /metrics` |\n"


def make_page() -> str:
    """Returns the page's text; all but those tables is as it stands there."""
    listed = [each for each in COUNTED if not each.name.startswith("shmring_engine_") or not each.source]
    page = _with_table(
        PAGE.read_text(),
        "`GET /metrics`",
        (f"| `{each.exposed_name}` | {each.kind} | {each.unit} | {each.text} |\n" for each in listed),
    )
    for heading, source, first in (("`EngineClient.statistics()`", "engine", ""), ("`ring.statistics()`", "ring", _EPOCH)):
        fields = ((each, each.source.partition(".")) for each in COUNTED)
        rows = (
            f"| `{field}` | {each.kind} | {each.unit} | {each.text} |\n"
            for each, (whose, _, field) in fields
            if whose == source
        )
        page = _with_table(page, heading, (first, *rows))
    return page


def _with_table(page: str, heading: str, rows: Iterable[str]) -> str:
    """Returns the page with other rows in the first table of a section."""
    before, title, section = re.split(rf"(^## .*{re.escape(heading)}\n)", page, maxsplit=1, flags=re.MULTILINE)
    intro, head, rest = re.split(r"(^\| name .*\n\|[-|]+\n)", section, maxsplit=1, flags=re.MULTILINE)
    return f"{before}{title}{intro}{head}{''.join(rows)}\n{rest.partition(f'{chr(10)}{chr(10)}')[2]}"


if __name__ == "__main__":
    PAGE.write_text(make_page())
