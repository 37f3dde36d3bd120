"""What the compiled core is to others, made from its parts when it is built: a type stub, and declarations for Cython.

The parts (``shmring/core/*.pyx``) are the only place where a name of the core has its type. From them come

- ``shmring/core/compiled.pyi``, for type checkers: what Python sees. A type in C says the type in Python (``uint64_t`` is
  ``int``), unless a parameter has an annotation as well, or a comment that begins with ``type:`` stands behind an attribute, a
  class or a function of C. The comment of a function is that of PEP 484, ``type: (int, str) -> bytes``, or its result's type.
  The first line has a digest of what is compiled: so a wheel says of which sources it is.
- ``build/declarations/shmring/core/compiled.pxd``, for what is compiled beside the core where the sources are used in place: a
  subclass of a book has to know how the book lies in memory. The core itself is compiled without it.

Read are lines, not a grammar: a part is written as the others are. ``tests/core/test_stubs.py`` compares the stub with what was
compiled, and Cython the declarations.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent, indent

CORE = Path("shmring/core")
MAIN = CORE / "compiled.pyx"
STUB = CORE / "compiled.pyi"
DECLARATIONS = Path("build/declarations")

_TOKENS = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|[\[({]|[])}]|\\\n|\n')
_INTEGER = re.compile(r"(unsigned )?(int|long|short|char)|s?size_t|Py_ssize_t|u?int(8|16|32|64|ptr)_t")
_TYPES = {
    "object": "Any",
    "bint": "bool",
    "double": "float",
    "list": "list[Any]",
    "dict": "dict[Any, Any]",
    "set": "set[Any]",
    "tuple": "tuple[Any, ...]",
    "type": "type[Any]",
}
_FUNCTION = re.compile(r"(cpdef (?=\w))?(?:(?:async )?def |(\w+) )(\w+)\((.*)\)(?: noexcept| except\??.*?)?(?: -> (.*))?:")
_SHOWN_DEFAULT = re.compile(r'None|True|False|-?\d+|b?""|\(\)')
_NOT_FOR_PYTHON = {"__dealloc__", "__releasebuffer__"}


@dataclass(frozen=True)
class Line:
    """A line of code; what is in brackets or in a long string is one."""

    indent: int
    code: str
    comment: str
    raw: str

    @property
    def type(self) -> str | None:
        """What its comment says of the type in Python; None: nothing."""
        found = re.match(r"# type: (.*?)(?:  #.*)?$", self.comment)
        return found[1] if found else None


def lines_of(source: str) -> Iterator[Line]:
    """Yields the lines of code in a source, without blank ones and those with only a comment."""
    start, depth, parts, comment, at = 0, 0, [], "", 0
    for token in _TOKENS.finditer(source + "\n"):
        text = token[0]
        depth += (text in "[({") - (text in "])}")
        if text[0] == "#":
            parts.append(source[at : token.start()])
            comment, at = text, token.end()
        elif text == "\n" and not depth:
            parts.append(source[at : token.start()])
            code = "".join(parts)
            if code.strip():
                indent = len(code) - len(code.lstrip())
                yield Line(indent, " ".join(code.split()), comment, source[start : token.start()])
            start, at, parts, comment = token.end(), token.end(), [], ""


def blocks_of(lines: list[Line], indent: int = 0) -> Iterator[tuple[list[str], Line, list[Line]]]:
    """Yields each statement at an indent: its decorators, its first line, and the lines in it."""
    decorators, at = [], 0
    while at < len(lines):
        line, end = lines[at], at + 1
        while end < len(lines) and lines[end].indent > indent:
            end += 1
        if line.code.startswith("@"):
            decorators.append(line.code)
        else:
            yield decorators, line, lines[at + 1 : end]
            decorators = []
        at = end


def parts() -> list[Path]:
    """Returns the files that the core is made from, in their order."""
    return [CORE / name for name in re.findall(r'^include "(.*)"$', MAIN.read_text(), re.MULTILINE)]


def split(text: str) -> list[str]:
    """Parts parameters at their commas."""
    found, depth, start = [], 0, 0
    for at, letter in enumerate(text):
        depth += (letter in "[({") - (letter in "])}")
        if letter == "," and not depth:
            found.append(text[start:at].strip())
            start = at + 1
    return [*found, *filter(None, [text[start:].strip()])]


# -- the stub ----------------------------------------------------------------------------------------------------------------


def python_type(c_type: str) -> str:
    """Returns what Python has where C has this."""
    return "int" if _INTEGER.fullmatch(c_type) else _TYPES.get(c_type, c_type)


def parameter(text: str, said: str | None = None) -> str:
    """Returns a parameter as a stub has it.

    Args:
        text: as it is declared.
        said: its type, if a comment says that.
    """
    declared, _, default = (part.strip() for part in text.partition("="))
    declared, _, annotation = (part.strip() for part in declared.partition(":"))
    if declared in ("self", "cls", "*", "/"):
        return declared
    c_type, _, name = declared.removesuffix(" not None").rpartition(" ")
    kind = said or annotation or (python_type(c_type) if c_type else "object")
    if default == "None" and not said and not annotation and kind != "object":
        kind += " | None"
    shown = f" = {default if _SHOWN_DEFAULT.fullmatch(default) else '...'}" if default else ""
    return f"{name}: {kind}{shown}"


def function(line: Line) -> str:
    """Returns a function as a stub has it."""
    is_c, c_type, name, declared, result = _FUNCTION.fullmatch(line.code).groups()  # type: ignore[union-attr]
    parameters, types = split(declared), []
    if line.type:
        said, _, result = line.type.rpartition("-> ")
        types = split(said.strip()[1:-1])
    elif name in ("__init__", "__cinit__") or (is_c and c_type == "int" and line.code.endswith("except -1:")):
        result = result or "None"
    behind_self = len(parameters) - len(types)
    named = [parameter(text) for text in parameters[:behind_self]]
    named += [parameter(*pair) for pair in zip(parameters[behind_self:], types, strict=True)]
    asynchronous = "async " if line.code.startswith("async") else ""
    shown = name.replace("__cinit__", "__init__")
    return f"{asynchronous}def {shown}({', '.join(named)}) -> {python_type(result or c_type or 'object')}: ..."


def documented(shown: str, body: list[Line]) -> str:
    """Returns what a stub has of a function or class, with its docstring: for editors, and for the reference of the site."""
    if not body or not body[0].code.startswith('"""'):
        return shown
    return f"{shown.removesuffix(' ...')}\n{indent(dedent(body[0].raw), '    ')}"


def attributes(line: Line) -> Iterator[tuple[str, str]]:
    """Yields the names of attributes that are declared in a line, each with how a stub has it."""
    found = re.fullmatch(r"cdef (public|readonly) (\w+) (.*)", line.code)
    assert found, line.code
    kind = line.type or python_type(found[2])
    for name in split(found[3]):
        yield name, f"{name}: {kind}" if found[1] == "public" else f"@property\ndef {name}(self) -> {kind}: ..."


def class_stub(line: Line, body: list[Line]) -> Iterator[str]:
    """Yields a class, line by line."""
    members: dict[str, str] = {}
    for decorators, member, inside in blocks_of(body, 4):
        if member.code.startswith(("cdef public ", "cdef readonly ")):
            members |= attributes(member)
        elif member.code.startswith(("cpdef ", "def ", "async def ")):
            name = re.search(r"(\w+)\(", member.code)[1]  # type: ignore[index]
            if name == "__getbuffer__":
                members[name] = "def __buffer__(self, flags: int, /) -> memoryview: ..."
            elif f"@{name}.setter" in decorators:
                members[name] = f"{name}: {re.search(r' -> (.*?):', members[name])[1]}"  # type: ignore[index]
            elif name not in _NOT_FOR_PYTHON:
                shown = [one for one in decorators if one in ("@property", "@staticmethod")]
                members[name] = "\n".join(
                    [*shown, function(member) if name[0] == "_" else documented(function(member), inside)]
                )
    name, base = re.match(r"cdef class (\w+)(?:\((\w+)\))?:", line.code).groups()  # type: ignore[union-attr]
    bases = line.type or base
    head = documented(f"class {name}({bases}): ..." if bases else f"class {name}: ...", body)
    yield "\n" + head.removesuffix(" ..." * bool(members))
    yield from (f"    {shown}".rstrip() for text in members.values() for shown in text.splitlines())


def stub() -> str:
    """Returns the type stub of the core."""
    imports: dict[str, str] = {}
    beside: list[str] = []  # what only types need, and is no import
    out: list[str] = []
    for path in (MAIN, *parts()):
        for _, line, body in blocks_of([*lines_of(path.read_text())]):
            code = line.code
            imports |= imports_of(code)
            if code == "if TYPE_CHECKING:":
                for inside in body:
                    imports |= imports_of(inside.code)
                    beside += [] if imports_of(inside.code) else [inside.code]
            elif re.match(r"cdef class [^_].*:$", code):  # and not one that is declared, and follows
                out += class_stub(line, body)
            elif code.startswith("def ") and not code.startswith("def _"):
                out.append(f"\n{documented(function(line), body)}")
            elif code == "cpdef enum:":
                out += [f"{member.code.partition(' ')[0]}: int" for member in body]
            elif found := re.match(r"([a-zA-Z]\w*: [^=]+?) = ", code):
                out.append(found[1])
    text = "\n".join([*beside, "", *out])
    used = set(re.findall(r"(?<![.\w])[A-Za-z_]\w*", re.sub(r'""".*?"""', "", text, flags=re.DOTALL)))
    needed: dict[str, str] = {}
    for name in sorted(used & set(imports)):
        begins = f"from {imports[name]} import " if imports[name] else f"import {name}"
        needed[begins] = f"{needed[begins]}, {name}" if begins in needed else name * bool(imports[name])
    head = [begins + names for begins, names in sorted(needed.items())]
    made = f"# Made by {Path(__file__).name} from the parts of the core; {digest()}"
    return "\n".join([made, "", *head, "", text, ""])


def digest() -> str:
    """Returns what names the sources that are compiled, and how: the same exactly where they are the same."""
    patterns = ("shmring/core/*.pyx", "shmring/core/*.h", "shmring/memory/*.[ch]")
    named = hashlib.sha256()
    for path in ["setup.py", *sorted(str(path) for pattern in patterns for path in Path().glob(pattern))]:
        named.update(f"{path}\n".encode() + Path(path).read_bytes())
    return f"sha256 of what was compiled: {named.hexdigest()}"


def imports_of(code: str) -> dict[str, str]:
    """Returns the names that a line imports in Python, each with the module that it is from; "": it is one itself."""
    if found := re.fullmatch(r"from ([\w.]+) import \(?(.*?),? ?\)?", code):
        return {name: found[1] for name in split(found[2]) if " " not in name}
    return {found[1]: ""} if (found := re.fullmatch(r"import (\w+)", code)) else {}


# -- declarations --------------------------------------------------------------------------------------------------------------


def declarations() -> str:
    """Returns what Cython needs for subclasses of the core's classes."""
    out = ["cimport cython", ""]
    for path in parts():
        for decorators, line, body in blocks_of([*lines_of(path.read_text())]):
            if re.match(r"from [\w.]+ cimport ", line.code):
                out.append(line.code)
            elif re.match(r"(cp?def enum|cdef struct|cdef union|cdef extern|ctypedef)\b", line.code):
                out += ["", line.raw.replace("cpdef enum", "cdef enum"), *(inside.raw for inside in body), ""]
            elif re.fullmatch(r"cdef class \w+", line.code):
                out.append(line.code)  # it follows
            elif line.code.startswith("cdef class "):
                out += ["", *(one for one in decorators if one == "@cython.final"), line.code]
                out += [f"    {text}" for text in class_declarations(body)] or ["    pass"]
    return "\n".join(out) + "\n"


def class_declarations(body: list[Line]) -> Iterator[str]:
    """Yields the attributes of a class, and its methods of C."""
    for _, member, _ in blocks_of(body, 4):
        if not re.match(r"cp?def ", member.code):
            continue
        if not member.code.endswith(":"):
            yield member.code
            continue
        before, _, rest = member.code.removesuffix(":").partition("(")
        parameters, _, behind = rest.rpartition(")")
        optional = [re.sub(r"\s*=.*", "=*", re.sub(r": [^=]*(?==|$)", "", part)) for part in split(parameters)]
        yield f"{before}({', '.join(optional)}){behind}"


def write(path: Path, text: str) -> None:
    """Writes a file, unless it says that already: who builds looks at dates."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


if __name__ == "__main__":
    write(STUB, stub())
