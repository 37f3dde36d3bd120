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
_DECLARATION = re.compile(r" *cdef [^=(\n]*\n")
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
    groups: list[tuple[int, int, list[_Edit]]] = []
    for (first, end), edit in sorted((_place(lines, edit), edit) for edit in (_edit(source, change) for change in changes)):
        if groups and first < groups[-1][1]:
            groups[-1] = (groups[-1][0], max(end, groups[-1][1]), [*groups[-1][2], edit])
        else:
            groups.append((first, end, [edit]))
    out, done, at = [], 0, 0
    for first, end, group in groups:
        out += lines[done:first]
        at += sum(map(len, lines[done:first]))
        text = "".join(lines[first:end])
        out.append(_switch(text, [edit.moved(at) for edit in group]))
        at += len(text)
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
        if old.rstrip().endswith((";", "}")):
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


@dataclasses.dataclass(frozen=True, order=True)
class _Edit:
    """What a change really changes: what stands from ``start`` to ``stop`` is something else with the fault."""

    start: int
    stop: int
    number: int
    new: str

    def moved(self, by: int) -> _Edit:
        """The same in a part of the text that begins there."""
        return dataclasses.replace(self, start=self.start - by, stop=self.stop - by)

    def made_in(self, text: str) -> str:
        """The text with the fault."""
        return text[: self.start] + self.new + text[self.stop :]


def _edit(source: str, change: Change) -> _Edit:
    start = source.index(change.old)
    before = _same(change.old, change.new)
    behind = _same(change.old[before:][::-1], change.new[before:][::-1])
    stop = len(change.old) - behind
    if change.old[before:stop].endswith("\n") and not change.new[: len(change.new) - behind].endswith("\n"):
        behind -= change.old[stop:].find("\n") + 1  # the next line is another one as well: it begins further to the right
    new = change.new[before : len(change.new) - behind]
    return _Edit(start + before, start + len(change.old) - behind, change.number, new)


def _same(one: str, other: str) -> int:
    """How long the beginning is that two texts have in common."""
    return next(
        (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _place(lines: Sequence[str], edit: _Edit) -> tuple[int, int]:
    """Returns the lines that are there twice: those that change, and with them whole blocks, unless only a condition does."""
    at, first, end = 0, 0, len(lines)
    for number, line in enumerate(lines):
        if at <= edit.start:
            first, begins = number, at
        at += len(line)
        if at >= edit.stop and at > edit.start:
            end = number + 1
            break
    if end == first + 1 and _parts(lines[first], edit.moved(begins)):
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


def _parts(line: str, edit: _Edit) -> tuple[str, str, str, str] | None:
    """If only a condition changes, or what a variable begins with: what is before it, it, it with the fault, and the rest."""
    was, becomes = _CONDITION.fullmatch(line), _CONDITION.fullmatch(edit.made_in(line))
    if was and becomes and was[1] == becomes[1]:
        return was[1], was[2], becomes[2], was[3]
    begins = line.rfind("= ", 0, edit.start) + 2
    if not line.lstrip().startswith("cdef ") or begins < 2 or "\n" in line[edit.start : edit.stop] + edit.new:
        return None
    ends = min(place for place in (line.find(", ", edit.stop), len(line) - 1) if place >= 0 and _is_closed(line[begins:place]))
    changed = edit.new + line[edit.stop : ends]
    return line[:begins], line[begins:ends], line[begins : edit.start] + changed, line[ends:]


def _is_closed(text: str) -> bool:
    return all(text.count(opening) == text.count(closing) for opening, closing in ("()", "[]", "{}"))


def _switch(text: str, group: Sequence[_Edit]) -> str:
    parts = {edit.number: part for edit in group if (part := _parts(text, edit)) is not None}
    if len(parts) == len(group) and len(_logical_lines(text)) == 1:
        before, old, _, behind = parts[group[0].number]
        if before.lstrip().startswith("cdef"):
            begins = "".join(f"({new}) if FAULT({number}) else " for number, (_, _, new, _) in parts.items())
            return f"{before}({begins}({old})){behind}"
        # Not `new if FAULT(7) else old`: the two may be of different types, and both are only asked whether they are true.
        are = "".join(f"(FAULT({number}) and ({new})) or " for number, (_, _, new, _) in parts.items())
        none = " and ".join(f"not FAULT({number})" for number in parts)
        return f"{before}{are}({none} and ({old})){behind}"
    others = {edit.number: edit.made_in(text) for edit in group}
    declared = ""
    while (found := _DECLARATION.match(text)) and all(other.startswith(found[0]) for other in others.values()):
        declared += found[0]
        text, others = text[found.end() :], {number: other[found.end() :] for number, other in others.items()}
    if re.search(r"^ *cdef ", text, re.MULTILINE):
        raise ValueError(f"what is declared can't be in a block: {text!r}")
    indent = " " * _indent(text)
    switch = ""
    for number, changed in others.items():
        branch = changed if re.search(r"^\s*[^#\s]", changed, re.MULTILINE) else f"{indent}pass\n"
        switch += f"{indent}{'elif' if switch else 'if'} FAULT({number}):\n" + textwrap.indent(branch, "    ")
    return declared + switch + f"{indent}else:\n" + textwrap.indent(text, "    ")
