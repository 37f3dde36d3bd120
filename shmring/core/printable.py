"""Text that another process has sent, made fit for a log, an error and a terminal.

A terminal that shows the log would carry out an escape sequence in a name, and text after a line feed would look like a line of
ours. So characters that can't be printed are written as in a Python string.
"""

from __future__ import annotations

__all__ = ["printable", "printable_lines"]

_MOST_CHARACTERS = 4096  # as much of an exception's text travels, and names and labels are far shorter


def printable(text: str) -> str:
    """Returns a peer's text as one line of bounded length, all of which can be printed."""
    return _escaped(text[:_MOST_CHARACTERS])


def printable_lines(text: str) -> str:
    """Returns a peer's text of any length, such as a traceback, with its lines and tabs. All the rest of it can be printed."""
    return "\n".join("\t".join(map(_escaped, line.split("\t"))) for line in text.split("\n"))


def _escaped(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
