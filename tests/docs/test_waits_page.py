"""The table of waits in ``docs/architecture.md``: it has each function of the transport that waits, and no other.

A *wait* is a place where a task or thread stands until something happens: a future, a line, a semaphore, a lock, a thread, a
process, a socket, a pause. A coroutine that only awaits another one is none, nor is a call that looks and goes on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"

#: Calls that always wait, by name.
_WAITING = {
    "stay",
    "to_thread",
    "run_in_executor",
    "sock_accept",
    "sock_connect",
    "sock_recv",
    "sock_sendall",
    "communicate",
    "readline",
}
#: Calls that wait in compiled code.
_COMPILED = re.compile(r"\b(?:poll|PyThread_acquire_lock|cuEventSynchronize|sleep_on)\((?!\))|class \w+\(Awaited\)")


def waits_in(source: str) -> Iterator[str]:
    """Yields the qualified names of the functions that wait."""

    def visit(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from visit(child, (*names, child.name))
                continue
            if _is_wait(child):
                yield ".".join(names)
            yield from visit(child, names)

    yield from visit(ast.parse(source), ())


def _is_wait(node: ast.AST) -> bool:
    if isinstance(node, ast.Await) and isinstance(node.value, ast.Name | ast.Attribute):
        return True  # a future, or a task
    if isinstance(node, ast.With | ast.AsyncWith):
        return any(ast.unparse(item.context_expr).endswith("_lock") for item in node.items)
    if not isinstance(node, ast.Call):
        return False
    called, arguments = ast.unparse(node.func), [ast.unparse(argument) for argument in node.args]
    match called.rpartition(".")[2]:
        case "wait_for" | "gather" | "shield":
            return called.startswith("asyncio.")
        case "wait":
            return len(arguments) < 2
        case "sleep":
            return arguments not in ([], ["0"])
        case "acquire":
            return not arguments and "blocking=False" not in ast.unparse(node)
        case "flock":
            return "LOCK_NB" not in arguments[1]
        case "join":
            return isinstance(node.func, ast.Attribute) and (not arguments or arguments[0].isupper())
        case "select" | "poll":
            return bool(arguments) and arguments != ["0"]
        case "get":  # of a queue
            return called.endswith(("_held.get", "_calls.get"))
        case name:
            return name in _WAITING


def table() -> dict[str, set[str]]:
    """Returns the functions of each file that the page names."""
    section = PAGE.read_text().split("\n## Who waits for whom\n")[1].split("\n## ")[0]
    named: dict[str, set[str]] = {}
    for row in re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE):
        for word in re.findall(r"`([^`]+)`", row):
            if word.endswith((".py", ".pyx", ".c")):
                functions = named.setdefault(word, set())
            else:
                assert word not in functions, f"{word} stands in two rows"
                functions.add(word)
    return named


def test_each_wait_of_the_transport_is_in_the_table_and_each_row_is_one() -> None:
    found = {}
    for path in sorted((ROOT / "shmring").rglob("*.py")):
        if path.is_relative_to(ROOT / "shmring" / "service"):
            continue  # it is the server's
        if functions := set(waits_in(path.read_text())):
            found[str(path.relative_to(ROOT / "shmring"))] = functions
    for path in (*sorted((ROOT / "shmring").rglob("*.pyx")), *sorted((ROOT / "shmring").rglob("*.c"))):
        if path.name != "_copying.c" and _COMPILED.search(_code_of(path)):
            found[str(path.relative_to(ROOT / "shmring"))] = set()
    named = {file: functions for file, functions in table().items() if not file.startswith(("engine/", "frontend/"))}
    assert {file: functions - named.get(file, set()) for file, functions in found.items()} == {file: set() for file in found}
    assert {file: functions - found.get(file, set()) for file, functions in named.items()} == {file: set() for file in named}
    assert named.keys() == found.keys()


def _code_of(path: Path) -> str:
    """Returns a compiled source without its comments and declarations."""
    lines = path.read_text().splitlines()
    return "\n".join(line.partition("#")[0] for line in lines if "extern" not in line and not line.strip().startswith("int "))


def test_rows_of_the_server_are_in_the_code() -> None:
    for file, functions in table().items():
        if file.startswith(("engine/", "frontend/")):
            assert functions <= set(waits_in((ROOT / file).read_text())), file
