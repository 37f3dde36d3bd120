"""Puts faults into sources, each behind a switch: with ``SHMRING_FAULT=7`` in its environment, a process has the seventh fault.

A fault is text that stands in the place of other text. In Cython, the lines that it changes are there twice, and an ``if
FAULT(7)`` says which of them are run: whole blocks of them, or the condition alone where only that is another one. In C, text
that ends with a semicolon is statements, and other text is an expression.
"""

from __future__ import annotations

import dataclasses
import re
import textwrap
from collections.abc import Sequence

VARIABLE = "SHMRING_FAULT"

#: For the compiler to read before everything else. Each translation unit reads the variable when it is loaded.
HEADER = f"""\
extern char *getenv(const char *);
extern int atoi(const char *);
static int shmring_fault = 0;
__attribute__((constructor)) static void choose_fault(void)
{{
    const char *chosen = getenv("{VARIABLE}");
    shmring_fault = chosen ? atoi(chosen) : 0;
}}
#define FAULT(number) (shmring_fault == (number))
"""

#: The same for Cython: ``fault.pxd`` beside the sources.
DECLARATION = "cdef extern from *:\n    bint FAULT(int number) noexcept nogil\n"
_CIMPORT = "\n\nfrom shmring.core.fault cimport FAULT"

_CONDITION = re.compile(r"( *(?:if|elif|while) )(.*)(:(?: *#.*)?\n)", re.DOTALL)
_DECLARED = re.compile(r"( *cdef [^=(]*= )(.*\n)", re.DOTALL)
_CONTINUED = re.compile(r" *(elif|else|except|finally)\b")
_TOKENS = re.compile(r'"""(?:.|\n)*?"""|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'|#[^\n]*|[\[({]|[])}]|\\\n|\n')


@dataclasses.dataclass(frozen=True)
class Change:
    """A fault: its number, what stands there, exactly once, and what stands there with the fault."""

    number: int
    old: str
    new: str


def with_switches(source: str, is_cython: bool, changes: Sequence[Change]) -> str:
    """Returns a file's text with faults in it, of which none is there unless it is chosen.

    Raises:
        ValueError: a fault can't be behind a switch.
    """
    if not is_cython:
        return _in_c(source, changes)
    lines = _logical_lines(source)
    places = [(*_place(lines, source, change), change) for change in changes]
    groups: list[tuple[int, int, list[Change]]] = []
    for first, end, change in sorted(places, key=lambda place: place[:2]):
        if groups and first < groups[-1][1]:
            groups[-1] = (groups[-1][0], max(end, groups[-1][1]), [*groups[-1][2], change])
        else:
            groups.append((first, end, [change]))
    out, done = [], 0
    for first, end, group in groups:
        out += [*lines[done:first], _switch("".join(lines[first:end]), group)]
        done = end
    text = "".join([*out, *lines[done:]])
    behind_docstring = text.index('"""', 3) + 3
    return text[:behind_docstring] + _CIMPORT + text[behind_docstring:]


def _in_c(source: str, changes: Sequence[Change]) -> str:
    by_place: dict[tuple[int, str], list[Change]] = {}
    for change in changes:
        by_place.setdefault((source.index(change.old), change.old), []).append(change)
    before = len(source)
    for (start, old), group in sorted(by_place.items(), key=lambda place: place[0], reverse=True):
        if start + len(old) > before:
            raise ValueError(f"two faults lie in each other at {old!r}")
        before = start
        if old.endswith((";", "}")):
            switch = "".join(f"if (FAULT({change.number})) {{ {change.new} }} else " for change in group) + f"{{ {old} }}"
        else:
            switch = "".join(f"(FAULT({change.number}) ? ({change.new}) : " for change in group) + f"({old})" + ")" * len(group)
        source = source[:start] + switch + source[start + len(old) :]
    return source


def _logical_lines(source: str) -> list[str]:
    """Parts a text in lines of code: what is in brackets or in a long string is one."""
    lines, start, depth = [], 0, 0
    for token in _TOKENS.finditer(source):
        text = token[0]
        depth += (text in "[({") - (text in "])}")
        if text == "\n" and not depth:
            lines.append(source[start : token.end()])
            start = token.end()
    return [*lines, source[start:]] if start < len(source) else lines


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _place(lines: Sequence[str], source: str, change: Change) -> tuple[int, int]:
    """Returns the lines that are there twice: those that change, and with them whole blocks, unless only a condition does."""
    start = source.index(change.old)
    stop = start + len(change.old.rstrip("\n"))
    at, first, end = 0, 0, len(lines)
    for number, line in enumerate(lines):
        if at <= start:
            first = number
        at += len(line)
        if at >= stop:
            end = number + 1
            break
    if end == first + 1 and _parts(lines[first], change):
        return first, end
    indent = min(_indent(line) for line in lines[first:end] if line.strip())
    while _indent(lines[first]) > indent or not lines[first].strip() or _CONTINUED.match(lines[first]):
        first -= 1
    while end < len(lines) and (
        not lines[end].strip()
        or _indent(lines[end]) > indent
        or (_indent(lines[end]) == indent and _CONTINUED.match(lines[end]))
    ):
        end += 1
    while not lines[end - 1].strip():
        end -= 1
    return first, end


def _parts(line: str, change: Change) -> tuple[str, str, str, str] | None:
    """If only a condition changes, or what a variable begins with: what is before it, it, it with the fault, and the rest."""
    changed = line.replace(change.old, change.new)
    for pattern in (_CONDITION, _DECLARED):
        was, is_now = pattern.fullmatch(line), pattern.fullmatch(changed)
        if was and is_now and was[1] == is_now[1]:
            behind = was[3] if pattern is _CONDITION else "\n"
            return was[1], was[2].rstrip("\n"), is_now[2].rstrip("\n"), behind
    return None


def _switch(text: str, group: Sequence[Change]) -> str:
    parts = {change.number: part for change in group if (part := _parts(text, change)) is not None}
    if len(parts) == len(group) and len(_logical_lines(text)) == 1:
        before, old, _, behind = parts[group[0].number]
        if before.lstrip().startswith("cdef"):
            others = "".join(f"({new}) if FAULT({number}) else " for number, (_, _, new, _) in parts.items())
            return f"{before}({others}({old})){behind}"
        # Not `new if FAULT(7) else old`: the two may be of different types, and both are only asked whether they are true.
        others = "".join(f"(FAULT({number}) and ({new})) or " for number, (_, _, new, _) in parts.items())
        none = " and ".join(f"not FAULT({number})" for number in parts)
        return f"{before}{others}({none} and ({old})){behind}"
    if re.search(r"^ *cdef ", text, re.MULTILINE):
        raise ValueError(f"what is declared can't be in a block: {group[0].old!r}")
    indent = " " * _indent(text)
    switch = ""
    for change in group:
        changed = text.replace(change.old, change.new)
        branch = changed if re.search(r"^\s*[^#\s]", changed, re.MULTILINE) else f"{indent}pass\n"
        switch += f"{indent}{'elif' if switch else 'if'} FAULT({change.number}):\n" + textwrap.indent(branch, "    ")
    return switch + f"{indent}else:\n" + textwrap.indent(text, "    ")
