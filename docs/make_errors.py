"""The table of docs/errors.md of what callers of the server get, made of the codes: ``python docs/make_errors.py``."""

from __future__ import annotations

import re
from pathlib import Path

from shmring.frontend.errors import ErrorCode

PAGE = Path(__file__).with_name("errors.md")


def make_page() -> str:
    """Returns the page's text; all but that table is as it stands there."""
    rows = "".join(
        f"| {code.status} | `{code}` | {code.meaning} |\n" for code in sorted(ErrorCode, key=lambda code: code.status)
    )
    return re.sub(
        r"(?<=^\| status \| code \| when \|\n\|---:\|---\|---\|\n)(\|.*\n)*", rows, PAGE.read_text(), flags=re.MULTILINE
    )


if __name__ == "__main__":
    PAGE.write_text(make_page())
