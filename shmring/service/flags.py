"""Settings are the only place of an option. A field has its name, type and default; the docstring of the class has its help.

Command line, variable, line of a configuration file and page are made from that. Names imply rules: a field that ends in
``_nbytes`` is a size, one that ends in ``_s`` is a number of seconds above 0, another integer is a count of at least 1. A
:class:`Flag` says where an option differs.

In a docstring, the first paragraph about a field is its help; the others, which give reasons, are for pages only. A sentence
"None: ..." or "Empty: ..." says what holds if the option is not given.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any, Final

__all__ = ["NO_OPTION", "Flag", "descriptions"]

_FIELD = re.compile(r"^    (\w+(?:, \w+)*): (.*(?:\n(?: {5}.*)?)*)", re.MULTILINE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Flag:
    """How a field is written on a command line, if its name and type do not say it. For ``Annotated``.

    Attributes:
        names: of the option. Empty: the field's, with dashes and without ``_s``.
        kind: the type of the given value. None: the field's.
        least, most: of a number.
        path: a path that must be there: "file" or "directory".
        parse: makes the field's value from the given one. It, or the settings with this value, raise ``ValueError``, which
            says what is wrong.
        default: as it would be given. None: the field's.
        metavar: what stands for the value in the help.
        text: its help. None: what the docstring says.
    """

    names: tuple[str, ...] = ()
    kind: type | None = None
    least: int | None = None
    most: int | None = None
    path: str | None = None
    parse: Callable[[Any], Any] | None = None
    default: str | None = None
    metavar: str | None = None
    text: str | None = None


#: Marks fields that have no option of their own.
NO_OPTION: Final = "no option"


def descriptions(record: type) -> dict[str, list[str]]:
    """Returns the paragraphs that the docstrings of a class and of those above it have about each attribute."""
    texts: dict[str, list[str]] = {}
    for parent in record.__mro__:
        section = inspect.cleandoc(parent.__doc__ or "").partition("Attributes:\n")[2]
        for names, text in _FIELD.findall(section):
            paragraphs = [" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text.strip())]
            for name in names.split(", "):
                texts.setdefault(name, paragraphs)
    return texts
