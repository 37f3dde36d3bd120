"""Type stubs say what is there: each name in them, and each function's parameters, are those of the compiled module.

The core's is made from its parts (``core_interface.py``): so it has all that Python sees, with the types that stand there.

Not mypy's stubtest: of what it says here, some 850 lines, nearly all is about how Cython makes classes, and about types of
msgspec's.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from core_interface import STUB, Line, attributes, declarations, function, lines_of, stub
from tests.tables import for_each

ROOT = Path(__file__).resolve().parents[2]
STUBS = sorted((ROOT / "shmring").rglob("*.pyi"))

# What classes have by other means: Cython's ``__cinit__`` takes the arguments, and a buffer has no method before Python 3.12.
ELSEWHERE = {"__init__", "__buffer__"}


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


@for_each("path", STUBS, ids=lambda path: path.stem)
def test_a_stub_says_what_is_there(path: Path) -> None:
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert list(missing(ast.parse(path.read_text()), module)) == []


def test_the_stub_of_the_core_is_made_from_its_parts_as_they_are() -> None:
    assert (ROOT / STUB).read_text() == stub(), "the core was not built since they changed"


def line(text: str) -> Line:
    [found] = lines_of(text)
    return found


FUNCTIONS = """
def end(self) -> int:  # of it
    def end(self) -> int: ...
def take(self, uint64_t length, bint held=True) -> int | None:
    def take(self, length: int, held: bool = True) -> int | None: ...
def __cinit__(self, Mapping memory not None, work, /, *, limits: Limits):
    def __init__(self, memory: Mapping, work: object, /, *, limits: Limits) -> None: ...
def find(self, Book book=None, int state: State = _FREE) -> list:
    def find(self, book: Book | None = None, state: State = ...) -> list[Any]: ...
cpdef int leave(self, uint64_t address) except -1:
    def leave(self, address: int) -> None: ...
cpdef object send(self, Slot slot, str name):  # type: (Slot | None, str) -> Sent  # or waits
    def send(self, slot: Slot | None, name: str) -> Sent: ...
cpdef Packed pack(self, payload):
    def pack(self, payload: object) -> Packed: ...
async def wait(self) -> Slot:
    async def wait(self) -> Slot: ...
"""


@for_each(("declared", "shown"), re.findall(r"^(\S.*)\n    (.*)$", FUNCTIONS, re.MULTILINE))
def test_a_function_is_shown_as_python_sees_it(declared: str, shown: str) -> None:
    assert function(line(declared)) == shown


def test_a_line_may_be_long() -> None:
    parts = "def find(\n    self,  # in this one\n    text='# no comment',\n) -> int:  # type of what\n    pass\n"
    assert [(one.indent, one.code) for one in lines_of(parts)] == [
        (0, "def find( self, text='# no comment', ) -> int:"),
        (4, "pass"),
    ]


def test_attributes_are_shown_as_python_sees_them() -> None:
    assert dict(attributes(line("cdef public double since, until  # of it"))) == {
        "since": "since: float",
        "until": "until: float",
    }
    assert dict(attributes(line("cdef public dict leases  # type: dict[int, Lease]  # by id"))) == {
        "leases": "leases: dict[int, Lease]"
    }
    assert dict(attributes(line("cdef readonly Book book"))) == {"book": "@property\ndef book(self) -> Book: ..."}


def test_declarations_say_where_attributes_lie_and_in_which_order_methods_are_called() -> None:
    text = declarations()
    _, _, book = text.partition("cdef class KeptBook:\n")
    assert "    cdef public dict by_key\n" in book
    assert "    cdef int add(self, KeptRecord record) except -1\n    cdef int pin(" in book
    assert "def __init__" not in text
    assert (
        "cpdef Packed pack(self, object payload, uint64_t inline_nbytes, uint64_t largest_record_nbytes, HeldSlots held=*)"
        in text
    )


def test_what_is_not_there_is_found() -> None:
    stub = "NUMBER: int\nABSENT: int\ndef parse(text: str) -> int: ...\nclass Path:\n    def there(self) -> int: ...\n"

    class Here:
        NUMBER = 1
        Path = Path

        @staticmethod
        def parse(word: str) -> int:
            return int(word)

    assert list(missing(ast.parse(stub), Here)) == ["ABSENT", "parse(text) is parse(word)", "Path.there"]
