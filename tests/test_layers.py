"""Nothing imports upward: the layers of docs/architecture.md, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each part may import of this repository; the longest matching prefix decides.
ALLOWED = {
    "shmring.errors": [],
    "shmring.cancellation": [],
    "shmring.forks": ["shmring.errors"],
    "shmring.config": ["shmring.errors"],
    "shmring.statistics": [],
    "shmring.core": ["shmring.core", "shmring.errors", "shmring.config"],
    "shmring.memory": ["shmring.memory", "shmring.core", "shmring.errors", "shmring.config", "shmring.cancellation"],
    "shmring.gpu": [
        "shmring.gpu",
        "shmring.memory",
        "shmring.core",
        "shmring.errors",
        "shmring.config",
        "shmring.cancellation",
    ],
    "shmring.transport": ["shmring.transport", "shmring.core", "shmring.errors", "shmring.config", "shmring.forks"],
    "shmring": ["shmring"],
    "engine": ["engine", "shmring"],
    "frontend": [
        *("frontend", "shmring", "engine.client", "engine.inputs", "engine.protocol"),
        *(
            "engine.settings",
            "engine.options",
            "engine.option_types",
            "engine.supervision",
            "engine.logs",
        ),  # of processes, not of requests
    ],
    "bench": ["bench", "frontend", "engine", "shmring"],
}
OURS = ("shmring", "engine", "frontend", "bench")

# The core knows no I/O, no clock and no tensors.
FORBIDDEN_IN_CORE = {"asyncio", "os", "mmap", "socket", "time", "torch", "numpy", "threading", "random", "io", "pathlib"}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            yield ".".join(filter(None, [base, node.module]))


def allowed_for(module: str) -> list[str]:
    prefix = max((part for part in ALLOWED if module == part or module.startswith(part + ".")), key=len)
    return ALLOWED[prefix]


SOURCES = sorted(path for part in OURS for path in (ROOT / part).rglob("*.py"))


def test_there_is_something_to_check() -> None:
    assert {module_name(path).split(".")[0] for path in SOURCES} == set(OURS)


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_nothing_imports_upward(path: Path) -> None:
    module = module_name(path)
    allowed = allowed_for(module)
    for name in imports(path):
        if name.split(".")[0] in OURS:
            assert any(name == part or name.startswith(part + ".") for part in allowed), f"{module} imports {name}"


@pytest.mark.parametrize("path", sorted((ROOT / "shmring" / "core").glob("*.py")), ids=module_name)
def test_the_core_knows_no_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IN_CORE
