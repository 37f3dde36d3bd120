"""docs/operations.md as a runbook: each alert, each warning of the log and each last message of a server has its row."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from shmring.frontend.cli import main as shmring
from shmring.frontend.commands.serve import serve
from shmring.frontend.errors import ErrorCode
from shmring.frontend.operator.metrics import COUNTED
from tests.pages import load_maker
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
MONITORING = load_maker("make_monitoring")
LEVELS = ("warning", "error", "exception", "critical", "log")
# Not those of the plug-ins for other servers, and not the programs that show something and end.
SOURCES = [
    path
    for package in ("shmring", "engine", "frontend")
    for path in (ROOT / package).rglob("*.py")
    if "integrations" not in path.parts
]


def section(title: str) -> str:
    [found] = [part for part in re.split(r"^#{2,3} ", PAGE, flags=re.MULTILINE) if part.startswith(f"{title}\n")]
    return found


def first_cells(title: str) -> list[str]:
    return [line.split(" | ")[0].lstrip("| ") for line in section(title).splitlines() if line.startswith("| ")]


def rows(title: str) -> list[str]:
    """What stands between backticks in the first cells of a section's tables."""
    return [text for cell in first_cells(title) for text in re.findall(r"`([^`]+)`", cell)]


def written_texts() -> Iterator[tuple[str, str]]:
    """The texts of warnings and errors in the sources, as the page has them: with … for what differs."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
                continue
            level = node.func.attr
            if ast.unparse(node.func.value) in ("logger", "_LOG") and level in LEVELS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", as_shown(node.args[1 if level == "log" else 0])


def as_shown(text: ast.expr) -> str:
    if isinstance(text, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in text.values)  # type: ignore[misc]
    assert isinstance(text, ast.Constant), f"a text of the log is a constant: {ast.unparse(text)}"
    return re.sub(r"%[.\w]*?[sdgfr]", "…", text.value).split("\n")[0]  # type: ignore[arg-type]


def test_each_alert_has_a_row_and_the_place_of_it() -> None:
    alerts = [rule[0] for rule in MONITORING.RULES]
    assert rows("Alerts") == alerts
    for alert in alerts:
        assert f'| <a id="{alert.lower()}"></a>`{alert}` |' in PAGE
        assert f'runbook_url: "docs/operations.md#{alert.lower()}"' in MONITORING.ALERTS.read_text()


def test_each_warning_and_error_of_the_log_has_a_row() -> None:
    known = set(rows("Lines of the log"))
    written = dict(map(reversed, written_texts()))  # type: ignore[arg-type]
    assert not {f"{place}: {text}" for text, place in written.items() if text not in known}
    assert not known - written.keys(), "no source writes these"


def test_each_last_message_has_a_row() -> None:
    written = {
        as_shown(node.args[0])
        for node in ast.walk(ast.parse((ROOT / "frontend/processes/supervisor.py").read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "ServeError"
        and isinstance(node.args[0], ast.JoinedStr | ast.Constant)
    }
    assert len(written) >= 5
    assert not written - set(rows("The server's last message"))


def test_each_code_of_an_unavailable_server_has_a_row() -> None:
    expected = {str(code) for code in ErrorCode if code.status >= 500 and code.status != 501} | {"not_installed"}
    assert len(expected) >= 10
    assert not expected - set(rows("What callers get"))


def test_every_option_and_metric_of_the_page_is_there() -> None:
    options = {text for command in (serve, *shmring.commands.values()) for option in command.params for text in option.opts}
    others = {"--shm-size", "--ipc", "--init", "--ulimit"}  # of Docker
    assert not set(re.findall(r"(?<![\w-])--[a-z][\w-]+", PAGE)) - options - others
    names = {each.exposed_name for each in COUNTED}
    used = {re.sub(r"_(bucket|sum|count)$", "", name) for name in re.findall(r"\bshmring_[a-z_]+", PAGE)}
    beginnings = {name for name in used if name.endswith("_") and any(each.startswith(name) for each in names)}
    assert not used - names - beginnings


@for_each("target", sorted(set(re.findall(r"\]\(([^)]+)\)", PAGE))))
def test_every_link_leads_somewhere(target: str) -> None:
    file, _, anchor = target.partition("#")
    path = (ROOT / "docs" / file).resolve() if file else ROOT / "docs/operations.md"
    assert path.exists()
    if anchor:
        text = path.read_text()
        headings = {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        assert anchor in headings | set(re.findall(r'<a id="([^"]+)">', text))
