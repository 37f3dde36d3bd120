"""What says what a tensor's bytes are: it travels before them, around them, or with the name of where they lie."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import torch

from bench.messages import DTYPES, Header

__all__ = ["Description", "encode"]

#: Packs a description as msgpack.
encode = msgspec.msgpack.Encoder().encode


class Description(msgspec.Struct, array_like=True):
    """A message but for its bytes; a subclass adds them, or where they are."""

    header: Header
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tensor(self, content: Any) -> torch.Tensor:
        """Returns a view of a buffer, which may be longer."""
        return torch.frombuffer(content, dtype=DTYPES[self.dtype], count=math.prod(self.shape)).view(self.shape)
