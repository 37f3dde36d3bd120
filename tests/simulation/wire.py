"""What is between the two ends: a socket, and the headers of slots in shared memory.

Each direction of a connection keeps its order and nothing else: a message may lie there for any time. What was sent before
an end closed can still be read by the other, or be lost: a write that fails ends a connection before it is read empty.
"""

from __future__ import annotations

import dataclasses
from collections import deque

from shmring.core.messages import EngineMessage, FrontendMessage, encode_message

__all__ = ["Headers", "Wire"]

#: Generation and nbytes, by offset: what writers have put before their slots.
Headers = dict[int, tuple[int, int]]


@dataclasses.dataclass(slots=True, eq=False)
class Wire:
    """One connection. Messages are encoded, so that what arrives is what the wire can say."""

    to_engine: deque[bytes] = dataclasses.field(default_factory=deque)
    to_frontend: deque[bytes] = dataclasses.field(default_factory=deque)
    frontend_open: bool = True
    engine_open: bool = True
    forged: bytes | None = None  # the message that must be refused; the last of its frontend

    def tell_engine(self, message: FrontendMessage) -> None:
        """Sends; where nobody reads any more it goes nowhere."""
        if self.frontend_open and self.engine_open:
            self.to_engine.append(encode_message(message))

    def tell_frontend(self, message: EngineMessage) -> None:
        """Sends; where nobody reads any more it goes nowhere."""
        if self.frontend_open and self.engine_open:
            self.to_frontend.append(encode_message(message))

    def forge(self, message: FrontendMessage) -> None:
        """Sends a message that breaks the rules."""
        self.tell_engine(message)
        if self.engine_open:
            self.forged = self.to_engine[-1]

    def close_frontend(self) -> None:
        """The frontend closes, or its process ends."""
        self.frontend_open = False
        self.to_frontend.clear()

    def close_engine(self) -> None:
        """The engine closes, or its process ends."""
        self.engine_open = False
        self.to_engine.clear()
