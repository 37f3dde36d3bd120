"""Tables of docs/metrics.md (``GET /metrics``, the engine, its ring), made of the code: ``python docs/make_metrics.py``.

A test compares. A row that is there and that the code does not make is an error, which says what to do: somebody has written
it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path

from shmring.frontend.operator.counted import COUNTED

PAGE = Path(__file__).with_name("metrics.md")

_EPOCH = "| `epoch` | identity | identity | of this engine's life; not a quantity, and not in `GET /metrics` |\n"


def make_page() -> str:
    """Returns the page's text; all but those tables is as it stands there.

    Raises:
        LookupError: one of the tables has a row that no number makes.
    """
    listed = [each for each in COUNTED if not each.name.startswith("shmring_engine_") or each.labels or not each.source]
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
            if whose == source and not each.labels
        )
        page = _with_table(page, heading, (first, *rows))
    return page


def _with_table(page: str, heading: str, rows: Iterable[str]) -> str:
    """Returns the page with other rows in the first table of a section."""
    before, title, section = re.split(rf"(^## .*{re.escape(heading)}\n)", page, maxsplit=1, flags=re.MULTILINE)
    intro, head, rest = re.split(r"(^\| name .*\n\|[-|]+\n)", section, maxsplit=1, flags=re.MULTILINE)
    old, _, rest = rest.partition("\n\n")
    new = "".join(rows)
    if unknown := [name for name in _names(old) if name not in _names(new)]:
        raise LookupError(
            f"{PAGE.name}, {heading}: no number is called {', '.join(unknown)}. Describe it by Counted(...) in "
            "engine/counted.py (an engine's) or frontend/operator/counted.py (a frontend's), and run this again; if it has "
            "gone, delete the row"
        )
    return f"{before}{title}{intro}{head}{new}\n{rest}"


def _names(table: str) -> list[str]:
    return re.findall(r"^\| `(\w+)` ", table, re.MULTILINE)


if __name__ == "__main__":
    try:
        PAGE.write_text(make_page())
    except LookupError as error:
        sys.exit(str(error))
