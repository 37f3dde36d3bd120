"""A request in flight, for its caller: its replies, and its end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, overload

from shmring.core.compiled import Awaited, BaseSubmission
from shmring.errors import AbortedError
from shmring.uncopied import uncopied

__all__ = ["Submission"]

_Reply = TypeVar("_Reply")


class Submission(BaseSubmission):
    """A request that was sent: its replies, and its end. From :meth:`~shmring.Client.submit`.

    Its caller must wait until it ends, or abort it; ``request`` and ``stream`` do that by themselves.
    If it is dropped, the request goes on, since perhaps only the engine's work was wanted. Its memory comes back when the
    request ends, with a ``ResourceWarning`` if a reply or an error was not seen. With unread replies in slots it is aborted a
    moment later.

    Attributes:
        request_id: its number on this connection.
        name: the caller's own name for it; may be empty.
        ended: whether nothing more will come.
    """

    __slots__ = ()

    __reduce_ex__ = uncopied("its replies come to the client that has sent it; hand on copies of its replies")

    @property
    def engine(self) -> str:
        """The name of the engine that has it."""
        session: Any = self._end.shell
        name: str = session.engine_name
        return name

    def _why_no_reply(self) -> str:
        """For the client: says for what this request is waiting."""
        session: Any = self._end.shell
        return f"at {self.engine!r}: {session.why_no_reply()}"

    if TYPE_CHECKING:

        @overload
        def next(self, reply_type: type[_Reply]) -> Awaited[_Reply]: ...

        @overload
        def next(self, reply_type: Any = ...) -> Awaited[Any]: ...

        def next(self, reply_type: Any = Any) -> Awaited[Any]:
            """See :class:`~shmring.core.compiled.BaseSubmission`, which has it."""

        @overload
        def result(self, reply_type: type[_Reply]) -> Awaited[_Reply]: ...

        @overload
        def result(self, reply_type: Any = ...) -> Awaited[Any]: ...

        def result(self, reply_type: Any = Any) -> Awaited[Any]:
            """See :class:`~shmring.core.compiled.BaseSubmission`, which has it."""

    def abort(self) -> None:
        """Gives the request up; a task that waits for it gets :class:`AbortedError`. A second call does nothing."""
        self._was_left = True
        if not self.ended:
            error = AbortedError(f"request {self.request_id} was aborted", request_id=self.name or self.request_id)
            self._end.shell.abort(self, error)
        self._drop_replies()
