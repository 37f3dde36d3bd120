"""``make docs`` builds the site without a warning, and what it says of the code is there."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

import shmring

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "site"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    """Builds it once; --strict makes an error of each warning."""
    make = ["make", "--no-print-directory", "-C", str(ROOT)]
    if subprocess.run([*make, ".venv-docs/.installed"], capture_output=True, check=False).returncode != 0:
        pytest.skip("the package index can't be reached, or has no mkdocs-material")
    finished = subprocess.run([*make, "docs"], capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    assert "WARNING" not in finished.stderr


class Loaded(HTMLParser):
    """What a page loads, and where its anchors are."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.loads: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        said = dict(attributes)
        self.anchors |= {said["id"] or ""} if "id" in said else set()
        if tag in ("script", "img", "iframe") or said.get("rel") in ("stylesheet", "icon"):
            self.loads |= {said.get("src") or said.get("href") or ""}


def pages() -> Iterator[Path]:
    return SITE.rglob("*.html")


def test_each_public_name_is_in_the_reference() -> None:
    anchors = {anchor for page in SITE.glob("reference/*/index.html") for anchor in Loaded(page).anchors}
    named = {f"shmring.{name}" for name in shmring.__all__} - {"shmring.threads", "shmring.__version__"}
    assert named <= anchors
    # Of the asyncio classes, and of what they have from the compiled core.
    for call in (
        "Client.request",
        "Client.slot",
        "Ring.run_batches",
        "Claim.on_abort",
        "Claim.payload",
        "Slot.tensor",
        "Worker.receive",
    ):
        assert f"shmring.{call}" in anchors


def test_no_docstring_is_shown_as_it_is_written() -> None:
    """Roles are links, and arguments that stand in one line are shown in one row."""
    text = "".join(page.read_text() for page in SITE.glob("reference/*/index.html"))
    assert re.findall(r":(?:meth|class|func|mod|attr):", text) == []
    assert "<code>nbytes, drain, device, key, engine</code>" in text


def test_it_loads_nothing_from_elsewhere() -> None:
    for page in pages():
        assert [address for address in Loaded(page).loads if re.match(r"(https?:)?//", address)] == [], page


def test_the_search_finds_calls_and_pages() -> None:
    found = json.loads((SITE / "search" / "search_index.json").read_text())["docs"]
    places = {one["location"] for one in found}
    assert {"reference/frontend/#shmring.Client.request", "operations/", "examples/"} <= places


def test_no_markdown_is_left_in_what_is_shown() -> None:
    """GitHub reads lists and tables that Python-Markdown does not, unless the site's hooks help."""
    for page in pages():
        article = re.sub(r"<pre.*?</pre>", "", page.read_text().partition("<article")[2], flags=re.DOTALL)
        for paragraph in re.findall(r"<p>(.*?)</p>", article, re.DOTALL):
            assert not re.search(r"\n\s*(- |\d+\. )|\|---|```|\]\(", re.sub(r"<[^>]+>", "", paragraph)), (page, paragraph[:200])
