"""A message in a worker's hands: what is the same with an event loop and without one."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, TypeVar

from shmring.core.dropped import warn_of
from shmring.core.worker_end import MessageEnd
from shmring.errors import LocalProtocolError

__all__ = ["ReceivedMessage"]

_Self = TypeVar("_Self", bound="ReceivedMessage")


class _Shell(Protocol):
    """Whose message it is."""

    def fail_answer(self, sequence: int, error: BaseException) -> None:
        """No reply to a message that wants one will come. In the thread that left it."""

    def fail_answer_later(self, sequence: int, error: BaseException) -> None:
        """The same, from a finaliser: on any thread, at any moment."""


class ReceivedMessage(MessageEnd):
    """A message of the engine. Use it as ``with message:``; leaving acknowledges it, when the last view of it has died.

    Attributes:
        payload: what the engine has sent, its tensors viewed in place, to be read only. Of a claim that is shared: its payload.
        beside: what goes beside a claim that is shared; else None.
        sequence: its number, the same for all workers that get it.
        wants_reply: whether the engine waits for a reply.
        left: whether it was left.
    """

    __slots__ = ()

    @property
    def _shell(self) -> _Shell:
        shell: _Shell = self.end.shell
        return shell

    def __repr__(self) -> str:
        return f"<Message {self.sequence}{' that wants a reply' if self.wants_reply else ''}{', left' if self.left else ''}>"

    def leave(self) -> None:
        """Leaves it; twice is once. If it wants a reply and had none, the engine is told that it failed."""
        self._leave(None)

    def _leave(self, error: BaseException | None) -> None:
        if self.leave_end() and self.wants_reply and not self.answered:
            self._shell.fail_answer(self.sequence, error or LocalProtocolError("the worker left the message without a reply"))

    def fail_to_open(self, error: BaseException) -> None:
        if self.wants_reply:
            self._shell.fail_answer(self.sequence, error)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._leave(error)

    def __del__(self) -> None:
        if self.is_in_hands and not self.left:
            warn_of(f"message {self.sequence} was dropped before it was left; use `with message:`", self)
            if self.leave_end() and self.wants_reply and not self.answered:
                error = LocalProtocolError("the worker dropped the message without a reply")
                self._shell.fail_answer_later(self.sequence, error)
