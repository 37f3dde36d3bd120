"""What replaces SGLang's ``ShmPointerMMData``: it stands for a tensor on its way, and says where in a slab that is.

Theory of operation: its life has up to four parts, in as many processes.

====================  ================================================================================================
a tokenizer           makes it: the tensor is placed in the slab of a scheduler's ring, or ``OSError`` says that it can't
                      be. Then SGLang's own caller sends the tensor in its message.
the data-parallel     decodes it and encodes it again; it only carries the name.
controller
rank 0                decodes it, and takes the claim. It encodes it once more for the other ranks, if there are any: then
                      it shares the claim with them.
another rank          decodes it, and receives what was shared. SGLang encodes and decodes in the same order, so that is
                      the next message; one that is older belongs to a broadcast that has failed.
====================  ================================================================================================

Decoding never raises, as all ranks have to come to the end of a broadcast. What is not there is an error of ``materialize``,
which SGLang turns into the end of that one request.

What SGLang's own class made (its tokenizer in Rust does), this one decodes as that does.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from shmring.integrations.sglang.ends import Ends

__all__ = ["replacement"]

_KEY = "shmring"  # in a message: the epoch of the ring, the ids of the client there and of its request


def replacement(theirs: Any, ends: Ends) -> Any:
    """Makes the class that takes the place of SGLang's.

    Args:
        theirs: SGLang's ``ShmPointerMMData``.
        ends: those of this process.
    """

    process_ends = ends

    class ShmPointerMMData(theirs):  # type: ignore[misc]
        ends = process_ends
        _named: tuple[int, int, int] | None = None  # None: SGLang's own
        _claim: Any = None
        _give_up: weakref.finalize[..., Any] | None = None
        _is_shared = False
        # SGLang's finaliser asks for these, also of an object that was not made.
        _shm_handle: Any = None
        _materialization_error: str | None = None
        tensor: Any = None

        def __init__(self, tensor: torch.Tensor, precomputed_hash: int | None = None) -> None:
            if ends.sender is None:
                raise OSError("shmring does not know its way")
            self._named, give_up = ends.sender.place(tensor)
            self._give_up = weakref.finalize(self, give_up)
            self._give_up.atexit = False
            self.shm_name = ""
            self.shape = tensor.shape
            self.dtype = tensor.dtype
            self.precomputed_hash = precomputed_hash

        def __getstate__(self) -> dict[str, Any]:
            state: dict[str, Any] = super().__getstate__()
            if self._named is None:
                return state
            state[_KEY] = list(self._named)
            if self._give_up is not None:  # a tokenizer's: it is sent now
                self._give_up.detach()
            elif self._claim is not None and ends.owner is not None:
                self._is_shared = self._is_shared or ends.owner.share(self._claim, self._named)
                if not self._is_shared:
                    state["tensor"] = self.tensor
            return state

        def __setstate__(self, state: dict[str, Any]) -> None:
            if (named := state.get(_KEY)) is None:
                super().__setstate__(state)
                return
            self._named = (*named,)
            self.shm_name = ""
            self.shape = state["shape"]
            self.dtype = state["dtype"]
            self.precomputed_hash = state.get("precomputed_hash")
            try:
                if (sent := state.get("tensor")) is not None:
                    self.tensor = sent
                elif ends.owner is not None:
                    self._claim, self.tensor = ends.owner.take(self._named)
                elif ends.sharer is not None:
                    self.tensor = ends.sharer.receive(self._named)
                else:  # it is only carried on
                    return
                if self.tensor.shape != self.shape or self.tensor.dtype != self.dtype:
                    raise TypeError(f"what is there is {self.tensor.dtype} of {list(self.tensor.shape)}")
            except Exception as error:  # noqa: BLE001 - see the head of this file
                self.close_and_unlink()
                self._materialization_error = f"{type(error).__name__}: {error}"

        def materialize(self) -> torch.Tensor:
            if self._named is None:
                return super().materialize()  # type: ignore[no-any-return]
            tensor, error = self.tensor, self._materialization_error
            self.close_and_unlink()
            if tensor is None:
                raise RuntimeError(f"shmring: a tensor is not in the slab: {error}")
            return tensor.clone() if ends.settings.copies else tensor  # type: ignore[no-any-return]

        def close_and_unlink(self) -> None:
            if self._named is None:
                super().close_and_unlink()
                return
            self.tensor = None
            claim, self._claim = self._claim, None
            if claim is not None:
                claim.done()  # the slot goes back when the last view of it has died

    # By these two, SGLang's msgpack encoder knows the class.
    ShmPointerMMData.__module__ = theirs.__module__
    ShmPointerMMData.__qualname__ = theirs.__qualname__
    return ShmPointerMMData
