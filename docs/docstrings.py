"""Docstrings as the reference of the site shows them: an extension of griffe, which reads them for mkdocstrings.

They are written for people who read the source. Two of their habits no reader of docstrings knows:

- Arguments that need the same words stand in one line (``shape, dtype: of the tensor.``). griffe gets a line for each of them,
  so that it finds them among the function's; what it reads is joined again.
- References are Sphinx's roles. They become links to what is in the reference; other names are code.
"""

from __future__ import annotations

import re
from typing import Any

import griffe
from make_site import REFERENCE

_SECTION = re.compile(r"(\s*)(Args|Attributes|Raises):$")
_GROUP = re.compile(r"(\s+)(\*{0,2}\w+(?:, \*{0,2}\w+)+): (.*)")
_ROLE = re.compile(r":(?:\w+):`(~?)([\w.]+)`")

#: What the reference shows, by its last name.
SHOWN = {name: f"{module}.{name}" for _, module, names in REFERENCE.values() for name in names.split()}


class HouseDocstrings(griffe.Extension):
    """Makes of each docstring of the package what griffe and Markdown understand."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Goes through the whole package."""
        classes = {name: target for name in SHOWN if (target := _class(pkg, name))}
        for shown in classes.values():
            _inherit(shown)
        self._look(pkg, classes)

    def _look(self, found: griffe.Object, classes: dict[str, griffe.Class]) -> None:
        if found.docstring is not None:
            _rewrite(found.docstring, classes)
        if found.is_function:
            found.overloads = None  # they say for type checkers what the docstring says
        for member in found.members.values():
            if not member.is_alias:
                self._look(member, classes)


def _class(pkg: griffe.Module, name: str) -> griffe.Class | None:
    found = pkg[SHOWN[name].removeprefix("shmring.")]
    found = found.final_target if found.is_alias else found
    return found if found.is_class else None


def _inherit(shown: griffe.Class) -> None:
    """Gives a member that is only declared again, for its types, the docstring of what it is."""
    for name, member in shown.members.items():
        if (member.is_function or member.is_attribute) and member.docstring is None:
            inherited = [base.members[name].docstring for base in shown.mro() if name in base.members]
            member.docstring = next(filter(None, inherited), None)


def _rewrite(docstring: griffe.Docstring, classes: dict[str, griffe.Class]) -> None:
    groups: dict[str, list[str]] = {}  # by the first name in a line: all of its names
    lines: list[str] = []
    text = _ROLE.sub(lambda role: _link(role, docstring, classes), docstring.value)
    at = 0
    source = text.split("\n")
    while at < len(source):
        group = _GROUP.fullmatch(source[at])
        end = at + 1
        heading = _section_of(source, at, group[1]) if group else ""
        if group and heading == "Raises":
            groups[group[2]] = group[2].split(", ")
        if group and heading in ("Args", "Attributes"):
            while end < len(source) and source[end].startswith(f"{group[1]} "):
                end += 1
            names = group[2].split(", ")
            groups[names[0].lstrip("*")] = [name.lstrip("*") for name in names]
            for name in names:
                lines += [f"{group[1]}{name}: {group[3]}", *source[at + 1 : end]]
        else:
            lines += source[at:end]
        at = end
    docstring.value = "\n".join(lines)
    if groups:
        docstring.parsed = [_joined(section, groups) for section in docstring.parse("google", **OPTIONS)]


#: As in mkdocs.yml.
OPTIONS = {"returns_named_value": False, "returns_multiple_items": False}


def _section_of(source: list[str], at: int, indent: str) -> str:
    """Returns the heading over a line; empty: none."""
    for line in reversed(source[:at]):
        if line.strip() and len(line) - len(line.lstrip()) < len(indent):
            heading = _SECTION.fullmatch(line)
            return heading[2] if heading else ""
    return ""


def _joined(section: Any, groups: dict[str, list[str]]) -> Any:
    """Joins what stood in one line. (griffe joins errors itself, as a tuple, which needs no brackets here.)"""
    for error in section.value if section.kind.value == "raises" else ():
        if isinstance(error.annotation, griffe.ExprTuple):
            error.annotation.implicit = True
    if section.kind.value not in ("parameters", "attributes"):
        return section
    items, joined = list(section.value), []
    while items:
        item = items.pop(0)
        names = groups.get(item.name.lstrip("*"), [item.name])
        rest = [items.pop(0) for _ in names[1:]]
        if rest:
            item.name = ", ".join(names)
            item.value = None
            if any(str(other.annotation) != str(item.annotation) for other in rest):
                item.annotation = None
        joined.append(item)
    section.value = joined
    return section


def _link(role: re.Match[str], docstring: griffe.Docstring, classes: dict[str, griffe.Class]) -> str:
    """Returns a link to what a role names, or its name as code if the reference does not have it."""
    names = role[2].removeprefix("shmring.").split(".")
    shown = names[-1] if role[1] else ".".join(names)
    here = docstring.parent if docstring.parent is None or docstring.parent.is_class else docstring.parent.parent
    if names[0] not in SHOWN and here is not None and here.name in classes:
        names.insert(0, here.name)
    if names[0] not in SHOWN:
        return f"`{shown}`"
    if len(names) == 1:
        return f"[`{shown}`][{SHOWN[names[0]]}]"
    member = classes[names[0]].all_members.get(names[1])
    if member is None or names[1][0] == "_":
        return f"`{shown}`"
    # An attribute without a docstring of its own is described in that of its class.
    return f"[`{shown}`][{'.'.join([SHOWN[names[0]], names[1]]) if member.docstring else SHOWN[names[0]]}]"
