"""Nothing imports upward, and nothing in a circle: the layers of docs/architecture.md, read from the sources.

What is compiled is read as well, and so are type stubs. These import nothing when a program runs: they make no circles, and
may say what a subclass above them returns.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OURS = ("shmring", "bench")
LINKED = ("engine", "frontend")  # which are packages of shmring

CORE = ("shmring.core", "shmring.errors", "shmring.config")
WAITING = ("shmring.cancellation", "shmring.line")
ENDS_STAND_ON = ("shmring.gpu", "shmring.memory", "shmring.transport", *CORE, *WAITING, "shmring.statistics")

# What each part may import of this repository beside itself: other parts, or single modules of them. "shmring" is the package
# itself, shmring/__init__.py, which has what everybody may use.
ALLOWED: dict[str, tuple[str, ...]] = {
    "shmring.errors": (),
    "shmring.config": (),
    "shmring.statistics": (),
    "shmring.cancellation": (),
    "shmring.line": (),
    "shmring.core": CORE,
    "shmring.memory": (*CORE, *WAITING),
    "shmring.transport": CORE,
    "shmring.gpu": (*CORE, *WAITING, "shmring.memory"),
    "shmring.ring": ENDS_STAND_ON,
    "shmring.client": ENDS_STAND_ON,
    "shmring.worker": ENDS_STAND_ON,
    "shmring.threads": (*ENDS_STAND_ON, "shmring.ring", "shmring.client", "shmring.worker"),
    "shmring.integrations": ("shmring", "shmring.threads", "shmring.errors", "shmring.config"),
}
PARTS = ("shmring", *ALLOWED)
ALLOWED |= {
    "shmring": PARTS,
    "shmring.engine": PARTS,
    "shmring.frontend": (
        *PARTS,
        *(f"shmring.engine.{name}" for name in ("client", "inputs", "protocol")),
        # of processes, not of requests
        *(f"shmring.engine.{name}" for name in ("settings", "options", "option_types", "supervision", "logs")),
    ),
    "bench": (*PARTS, "shmring.engine", "shmring.frontend"),
}

# Stubs of what callers await, and what that gives them: the core hands through what the shells above it have made.
GIVEN_BY_SUBCLASSES = {
    "shmring.core.client_calls": {"shmring.client.slot", "shmring.client.submission"},
    "shmring.core.engine_calls": {"shmring.ring.claim"},
}

# The core knows no I/O, no clock and no tensors,
FORBIDDEN_IN_CORE = {"asyncio", "os", "mmap", "socket", "time", "torch", "numpy", "threading", "random", "io", "pathlib"}

# but for what these do with the kernel's help: map memory, ring bells, wait for one, look for a moment, hear of forks.
CALLING_THE_SYSTEM = {"forks", "load", "looking", "mapping", "message_ring", "views", "worker_end"}

FILES = sorted(path for part in (*OURS, *LINKED) for path in (ROOT / part).rglob("*.p*"))
SOURCES = [path for path in FILES if path.suffix in {".py", ".pyx", ".pxd"}]
STUBS = [path for path in FILES if path.suffix == ".pyi"]
CORE_SOURCES = [path for path in SOURCES if path.is_relative_to(ROOT / "shmring" / "core")]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(["shmring"] * (parts[0] in LINKED) + [*parts]).removesuffix(".__init__")


def source_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


MODULES = {module_name(path) for path in SOURCES}


def part_of(module: str) -> str:
    return ".".join(module.split(".")[: 2 if module.startswith("shmring.") else 1])


def imports(path: Path, *, types_too: bool = True) -> Iterator[str]:
    """The modules that a source imports or cimports; also those inside of functions.

    Args:
        types_too: also what is imported under ``if TYPE_CHECKING``.
    """
    if path.suffix in {".pyx", ".pxd"}:
        yield from compiled_imports(path.read_text())
        return
    package = module_name(path) if path.name == "__init__.py" else module_name(path).rpartition(".")[0]
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            yield from named(".".join(filter(None, [base, node.module])), [alias.name for alias in node.names])
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types_too:
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def compiled_imports(source: str) -> Iterator[str]:
    code = re.sub(r'"""[\s\S]*?"""|#.*', "", source)
    for module, names in re.findall(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+c?import[ \t]+(\([^)]*\)|.*)", code, re.MULTILINE):
        yield from named(module, re.findall(r"[\w*]+", re.sub(r"\bas\s+\w+", "", names)))
    for modules in re.findall(r"^[ \t]*c?import[ \t]+(.*)", code, re.MULTILINE):
        yield from (module.split()[0] for module in modules.split(","))


def named(module: str, names: list[str]) -> Iterator[str]:
    """What ``from module import names`` imports: a name may be a module."""
    for name in names:
        yield full if (full := f"{module}.{name}") in MODULES else module


def test_there_is_something_to_check() -> None:
    assert {module.split(".")[0] for module in MODULES} == set(OURS)
    assert {path.suffix for path in CORE_SOURCES} == {".py", ".pyx", ".pxd"}
    assert {module_name(path) for path in STUBS} & MODULES
    assert {part_of(module) for module in MODULES} == set(ALLOWED)


def test_imports_of_compiled_sources_are_read() -> None:
    source = '''"""
from a import b
"""
import b, c as d
cimport e.f
from shmring cimport config  # from g cimport h
from shmring.core import (
    states as table,
    unknown,
)
cdef extern from "i.h":
    import_j()
'''
    assert sorted(compiled_imports(source)) == ["b", "c", "e.f", "shmring.config", "shmring.core", "shmring.core.states"]


@pytest.mark.parametrize("path", [*SOURCES, *STUBS], ids=source_name)
def test_nothing_imports_upward(path: Path) -> None:
    part = part_of(module_name(path))
    allowed = {part, *ALLOWED[part]}
    if path in STUBS:
        allowed |= GIVEN_BY_SUBCLASSES.get(module_name(path), set())
    for name in imports(path):
        if name.split(".")[0] in OURS:
            assert part_of(name) in allowed or name in allowed, f"{source_name(path)} imports {name}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Not even later, in functions. Only types may be of modules that need each other."""
    imported: defaultdict[str, set[str]] = defaultdict(set)
    for path in SOURCES:
        module = module_name(path)
        imported[module] |= MODULES.intersection(imports(path, types_too=False)) - {module}
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(reversed(error.args[1])))


@pytest.mark.parametrize("path", CORE_SOURCES, ids=source_name)
def test_the_core_knows_no_io(path: Path) -> None:
    assert not {name.split(".")[0] for name in imports(path)} & FORBIDDEN_IN_CORE


def test_only_some_of_the_compiled_core_call_the_system() -> None:
    calling = {
        path.stem
        for path in CORE_SOURCES
        if path.suffix in {".pyx", ".pxd"}
        and re.search(r"^cdef extern from \"<|#include <|^from posix\.", path.read_text(), re.MULTILINE)
    }
    assert calling == CALLING_THE_SYSTEM
