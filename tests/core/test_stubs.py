"""Type stubs say what is there: each name in them, and each function's parameters, are those of the compiled module.

Not mypy's stubtest: of what it says here, some 850 lines, nearly all is about how Cython makes classes, and about types of
msgspec's. It also reports what a stub leaves out, which is meant: a stub has what Python calls.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
STUBS = sorted((ROOT / "shmring").rglob("*.pyi"))

# What classes have by other means: Cython's ``__cinit__`` takes the arguments, and a buffer has no method before Python 3.12.
ELSEWHERE = {"__init__", "__buffer__"}

OF_SUBCLASSES = {"FrontendEnd.link"}  # has no place in the class itself


def missing(stub: ast.Module | ast.ClassDef, of: Any) -> Iterator[str]:
    """Yields what a stub says of a module or a class and is not so."""
    for node in stub.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            if not hasattr(of, node.target.id):
                yield node.target.id
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name not in ELSEWHERE:
            if not hasattr(of, node.name):
                yield node.name
            elif isinstance(node, ast.ClassDef):
                yield from (f"{node.name}.{name}" for name in missing(node, getattr(of, node.name)))
            elif not node.name.startswith("__") and (known := parameters(getattr(of, node.name))) not in (None, stubbed(node)):
                yield f"{node.name}({', '.join(stubbed(node))}) is {node.name}({', '.join(known)})"


def stubbed(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    parts = function.args
    named = [*parts.posonlyargs, *parts.args, *filter(None, [parts.vararg]), *parts.kwonlyargs, *filter(None, [parts.kwarg])]
    return [one.arg for one in named if one.arg not in ("self", "cls")]


def parameters(function: Any) -> list[str] | None:
    """Returns the names of a function's parameters; None of what is no function, or does not say."""
    try:
        return [name for name in inspect.signature(function).parameters if name not in ("self", "cls")]
    except (TypeError, ValueError):
        return None


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_says_what_is_there(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert set(missing(ast.parse(path.read_text()), module)) <= OF_SUBCLASSES


def test_each_compiled_module_that_python_uses_has_a_stub() -> None:
    compiled = {path.stem for path in (ROOT / "shmring" / "core").glob("*.pyx")}
    assert compiled - {path.stem for path in STUBS} == {"sorted_keys"}, "sorted_keys is used by compiled code only"


def test_what_is_not_there_is_found() -> None:
    stub = "NUMBER: int\nABSENT: int\ndef parse(text: str) -> int: ...\nclass Path:\n    def there(self) -> int: ...\n"

    class Here:
        NUMBER = 1
        Path = Path

        @staticmethod
        def parse(word: str) -> int:
            return int(word)

    assert list(missing(ast.parse(stub), Here)) == ["ABSENT", "parse(text) is parse(word)", "Path.there"]
