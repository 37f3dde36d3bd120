"""docs/reference.md names every public exception with all its attributes, and no other."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import shmring
from shmring import errors
from shmring.frontend.errors import ErrorCode

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference.md").read_text()
_SECTION = PAGE.partition("\n### Errors of shmring\n")[2].partition("\n### ")[0]
_CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in _SECTION.splitlines() if line.startswith("| `")]
ROWS = {cells[0].split("`")[1]: cells[1:] for cells in _CELLS}


def attributes_of(name: str) -> set[str]:
    """What an instance has beside its text."""
    kind: type[Exception] = getattr(errors, name)
    parameters = list(inspect.signature(kind).parameters.values()) if kind.__init__ is not Exception.__init__ else []
    positional = ["text"] * sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    required = [
        parameter.name
        for parameter in parameters
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.default is parameter.empty
    ]
    return set(vars(kind(*positional, **dict.fromkeys(required, 1))))


def test_every_public_error_has_one_row() -> None:
    assert len(_CELLS) == len(ROWS)
    assert ROWS.keys() == set(errors.__all__) - {"fresh"}
    assert ROWS.keys() == {name for name in shmring.__all__ if hasattr(errors, name)}


def test_every_row_has_the_attributes_of_its_error_and_no_others() -> None:
    for name, (_, attributes, _) in ROWS.items():
        named = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", attributes))  # what is in parentheses is a type
        assert len(named) == len(set(named))
        assert set(named) == attributes_of(name), name


def test_every_row_says_what_raises_it_and_what_to_do() -> None:
    assert [name for name, (raised, _, advice) in ROWS.items() if not (raised and advice)] == []


def test_the_tree_is_that_of_the_classes() -> None:
    path = ["Exception"]
    drawn = {}
    tree = PAGE.partition("\n## Errors\n")[2].split("```")[1]
    for indent, name in re.findall(r"^( *)(\w+)(?: +\(.*\))?$", tree, re.MULTILINE):
        path[len(indent) // 2 + 1 :] = [name]
        drawn[name] = path[-2]
    bases = {name: getattr(errors, name).__base__.__name__ for name in ROWS}
    assert drawn == bases | {"TimeoutError": "Exception"}


def test_every_code_is_given_somewhere() -> None:
    sources = "".join(path.read_text() for path in (ROOT / "frontend").rglob("*.py"))
    kinds = {f"INVALID_{kind}" for kind in ("IMAGE", "AUDIO", "VIDEO")}  # made of the kind of a medium
    assert [code.name for code in ErrorCode if f"ErrorCode.{code.name}" not in sources and code.name not in kinds] == []
