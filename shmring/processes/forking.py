"""A program of ours that forks a process for each message, as the process that has started it sees it.

Importing takes seconds, and a fork milliseconds: so the program imports once. Its messages, and descriptors with them, come on
a socket whose descriptor is its first argument. It ends when that is closed, and so does what it has forked
(:func:`shmring.processes.child.end_with_parent`).
"""

from __future__ import annotations

import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from shmring.processes.process import Process

__all__ = ["ForkingProgram"]


class ForkingProgram:
    """The program: started when it is first needed, and again if it has ended. One thread at a time may use this.

    Args:
        module: of the program.

    Attributes:
        process: that was started last; None: none was, or it was closed.
    """

    def __init__(self, module: str) -> None:
        self.process: Process | None = None
        self._module = module
        self._control: socket.socket | None = None

    @property
    def lives(self) -> bool:
        """Whether the other end of its socket is open. The kernel closes that before it reports the death of the process."""
        if self._control is None:
            return False
        poll = select.poll()
        poll.register(self._control, 0)  # POLLHUP and POLLERR are always reported
        return not poll.poll(0)

    def start(self, *arguments: str, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None) -> None:
        """Starts it; one that was started before ends.

        Args:
            arguments: behind the descriptor of its socket.
            pass_fds: further descriptors that it inherits.
            environment: its own; None: as ours.
        """
        self.close()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self.process = Process.start(
                # -P: nothing is imported from the working directory.
                [sys.executable, "-P", "-m", self._module, str(theirs.fileno()), *arguments],
                pass_fds=[theirs.fileno(), *pass_fds],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=environment,
            )

    def send(self, message: bytes, *fds: int) -> None:
        """Sends it a message, and descriptors with it.

        Raises:
            ConnectionError: it has just ended.
        """
        assert self._control is not None, "it was started"
        socket.send_fds(self._control, [message], fds)

    def close(self) -> None:
        """Ends it, and what it has forked. A second call does nothing."""
        if self._control is not None:
            self._control.close()
        if self.process is not None:
            self.process.kill()
        self._control = self.process = None
