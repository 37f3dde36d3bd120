"""Each field of a message is read by somebody: one that is written and never read is a mistake, or waste in each message.

Read are the sources of the transport: a pattern that names the field by its place, or an attribute of that name where the
message's class is named, or that is taken from a variable called like the class. So an attribute of another object in the same
file can hide a field that nobody reads. A new field usually has a new name.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shmring.core import messages

ROOT = Path(__file__).resolve().parents[2]
OF_MESSAGES = ("shmring/core/messages.py",)
SOURCES = {
    str(path.relative_to(ROOT)): path.read_text()
    for ending in ("py", "pyx")
    for path in sorted((ROOT / "shmring").rglob(f"*.{ending}"))
    if path.relative_to(ROOT).parts[1] not in ("engine", "frontend", "service")
}

Field = tuple[str, str]


def fields() -> Iterator[Field]:
    for name, kind in vars(messages).items():
        if isinstance(kind, type) and issubclass(kind, messages._Message | messages._Part) and not name.startswith("_"):
            yield from ((name, field.name) for field in msgspec.structs.fields(kind))


@functools.cache
def in_patterns(source: str) -> frozenset[Field]:
    """The fields that ``case Message(one, another)`` gives a name."""
    return frozenset(_in_patterns(source)) if "case " in source else frozenset()


def _in_patterns(source: str) -> Iterator[Field]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.MatchClass) and isinstance(node.cls, ast.Name):
            kind = getattr(messages, node.cls.id, None)
            names = getattr(kind, "__match_args__", ())
            for name, pattern in zip(names, node.patterns, strict=False):
                if not (isinstance(pattern, ast.MatchAs) and pattern.name is None):
                    yield node.cls.id, name
            yield from ((node.cls.id, name) for name in node.kwd_attrs)


def is_an_attribute(message: str, field: str, source: str) -> bool:
    if f".{field}" not in source:
        return False  # which is found out in no time
    owner = r"[\w\])]" if re.search(rf"\b{message}\b", source) else rf"\b{message.lower()}"
    return re.search(rf"{owner}\.{field}\b(?!\s*=[^=])", source) is not None


def unread(fields: Iterator[Field], sources: dict[str, str]) -> list[Field]:
    others = {name: source for name, source in sources.items() if name not in OF_MESSAGES}
    named = {field for name, source in others.items() if name.endswith(".py") for field in in_patterns(source)}
    return [
        field for field in fields if field not in named and not any(is_an_attribute(*field, each) for each in others.values())
    ]


def test_each_field_of_a_message_is_read() -> None:
    remedy = "read it where the message is handled (CONTRIBUTING.md, how to add a field), or take it out"
    assert unread(fields(), SOURCES) == [], remedy


def test_a_field_that_is_only_written_is_noticed() -> None:
    writes = "Hello(version=1, colour=red); hello.colour = 2"
    assert unread(iter([("Hello", "colour")]), {**SOURCES, "shmring/x.py": writes}) == [("Hello", "colour")]
    for reads in ("def f(hello): return hello.colour", "match m:\n    case Hello(colour=c):\n        pass"):
        assert unread(iter([("Hello", "colour")]), {**SOURCES, "shmring/x.py": reads}) == []
