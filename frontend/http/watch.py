"""What our server tells an application beside the messages of ASGI: an extension, in the scope of each request.

ASGI has only ``receive()`` to say that a caller has hung up, and somebody would have to wait for it. Another server has no such
extension. There, nobody is called.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.types import Scope

__all__ = ["EXTENSION", "Watch", "watch_of"]

#: Its name among the extensions of a scope.
EXTENSION = "shmring"


class Watch:
    """Of one request. It does not know the connection: the scope would be a part of itself, which only the collector frees.

    Attributes:
        on_hang_up: is called when the caller hangs up before its answer is complete, and must not raise. (If that has happened
            already, ``receive()`` says so.) None: nothing is called.
        has_all: whether all of the body is there, so that ``receive()`` returns the rest of it at once.
    """

    __slots__ = ("has_all", "on_hang_up")

    def __init__(self) -> None:
        self.on_hang_up: Callable[[], None] | None = None
        self.has_all = False

    def hang_up(self) -> None:
        """The caller has gone."""
        on_hang_up, self.on_hang_up = self.on_hang_up, None  # its end may be seen twice
        if on_hang_up is not None:
            on_hang_up()


def watch_of(scope: Scope) -> Watch:
    """Returns the watch of a request; of another server's, one that is told nothing."""
    watch: Watch | None = scope.get("extensions", {}).get(EXTENSION, {}).get("watch")
    return Watch() if watch is None else watch
