"""Objects that are one thing in one process: they refuse ``pickle``, ``copy.copy`` and ``copy.deepcopy``.

A copy of a client would be a second owner of one connection, and closing the copy would close the original. What an object
holds (a socket, memory, a place in a book) does not travel either. So each such class says what to do instead, in the place
where Python asks how to take it apart.
"""

from __future__ import annotations

from typing import Any, NoReturn

__all__ = ["uncopied"]


def uncopied(instead: str) -> Any:
    """Returns what a class has as its ``__reduce_ex__``, which raises a ``TypeError``.

    Args:
        instead: why, and what to do.
    """

    def __reduce_ex__(self: Any, protocol: Any) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} can't be pickled or copied: {instead}")

    return __reduce_ex__
