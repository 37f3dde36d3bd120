"""What says what a tensor's bytes are: it travels before them, around them, or with the name of where they lie."""

from __future__ import annotations

import math
from typing import Any, Generic, TypeVar

import msgspec
import torch

from bench import messages
from bench.messages import DTYPES
from bench.request import questions

__all__ = ["Description", "HeaderType", "encode"]

HeaderType = TypeVar("HeaderType", messages.Header, questions.Header)

#: Packs a description as msgpack.
encode = msgspec.msgpack.Encoder().encode


class Description(msgspec.Struct, Generic[HeaderType], array_like=True):
    """A message but for its bytes; a subclass adds them, or where they are."""

    header: HeaderType
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize

    def tensor(self, content: Any) -> torch.Tensor:
        """Returns a view of a buffer, which may be longer."""
        return torch.frombuffer(content, dtype=DTYPES[self.dtype], count=math.prod(self.shape)).view(self.shape)
