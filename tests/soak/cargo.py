"""What is sent: tensors that carry the number of their request at both ends, and how they are to be answered."""

from __future__ import annotations

import msgspec
import torch

__all__ = ["Answer", "MixedUpError", "Order", "check", "stamp"]

_STAMP_NBYTES = 8


class MixedUpError(Exception):
    """A tensor is not that of its request."""


class Order(msgspec.Struct, kw_only=True):
    """A request.

    Attributes:
        number: of the request; also stands at both ends of its tensor.
        tensor: uint8, one-dimensional.
        replies: how many there will be.
        reply_nbytes: of each reply's tensor.
        work_s: how long the engine keeps it before it answers.
    """

    number: int
    tensor: torch.Tensor
    replies: int = 1
    reply_nbytes: int = _STAMP_NBYTES
    work_s: float = 0.0


class Answer(msgspec.Struct):
    """A reply to the request of this number."""

    number: int
    tensor: torch.Tensor


def stamp(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Writes a number to both ends of a tensor of at least 8 bytes, and returns it."""
    value = torch.tensor([number]).view(torch.uint8)
    tensor[:_STAMP_NBYTES] = value
    tensor[-_STAMP_NBYTES:] = value
    return tensor


def check(tensor: torch.Tensor, number: int) -> None:
    """Raises :class:`MixedUpError` if a tensor does not carry a number."""
    found = (tensor[:_STAMP_NBYTES].clone().view(torch.int64), tensor[-_STAMP_NBYTES:].clone().view(torch.int64))
    numbers = [int(one.item()) for one in found]
    if numbers != [number, number]:
        raise MixedUpError(f"the tensor of request {number} carries {numbers[0]} and {numbers[1]}")
