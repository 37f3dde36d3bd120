"""A request in the engine's hands: the claim, and how it is answered."""

from __future__ import annotations

import dataclasses

import shmring
from engine.protocol import EncodeReply, EncodeRequest

__all__ = ["EngineRequest"]


@dataclasses.dataclass(slots=True, eq=False)
class EngineRequest:
    """A claimed request.

    Attributes:
        claim: the ring's claim; its slots are released when the request is answered.
        claimed_at: the loop's time at which it was claimed, in seconds.
    """

    claim: shmring.Claim
    claimed_at: float

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.claim.nbytes

    @property
    def payload(self) -> EncodeRequest:
        """What is asked; its tensors are views of the slab."""
        payload: EncodeRequest = self.claim.payload
        return payload

    def answer_nowait(self, output: EncodeReply | Exception) -> None:
        """Answers and ends the request; an aborted one has ended already. Its slots are released in any case.

        Raises:
            shmring.WouldBlock: the reply has to wait, so nothing was sent; call :meth:`answer`.
        """
        self.claim.release()
        if isinstance(output, Exception):
            self.claim.fail(output)
        elif not self.claim.aborted:
            self.claim.reply_nowait(output)
            self.claim.done()

    async def answer(self, output: EncodeReply) -> None:
        """Answers and ends the request, waiting for reply space. An aborted request has ended already."""
        with self.claim:
            await self.claim.reply(output)
