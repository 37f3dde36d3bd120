"""What is sent: tensors that can be told from all others, and requests and replies that carry them.

A content is cut from a pool of random bytes at a place that follows from its number, starts with that number, and travels
beside its checksum, which is taken from the source and never from the slab. So a byte that anybody else writes into its
slot, at any time between the copy and the last look at it, is seen; and so is a slot that holds another request's content.

Where throughput is to be high, a content is a kept buffer with its request's number at both ends (:func:`stamp`): a tensor of
another request is seen, a wrong byte in its middle is not.

Layouts of the messages are msgspec types; a request is an :class:`Order`, and each of its replies an :class:`Answer`.
"""

from __future__ import annotations

import asyncio
import random
import zlib

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from shmring.cancellation import uninterrupted

_POOL_NBYTES = 8 << 20  # the largest content, and then some places to cut it from
_NUMBER_NBYTES = 8
_CHECK_INLINE_NBYTES = 256 << 10  # takes some 70 us; what is larger would keep the loop from hearing of an abort

Fate = str  # "done", "fail" or "time out": how the engine ends a request that nobody aborts


class CorruptedError(Exception):
    """A content is not what was sent."""


class Order(msgspec.Struct, kw_only=True):
    """A request.

    Attributes:
        number: of the request; no other of its process has it.
        tensor: uint8, one-dimensional.
        sender: the process that sent it, by pid.
        checksum: CRC-32 of the tensor's bytes, where every byte is checked.
        work_s: how long the engine works on it.
        on_thread: whether it does so on a thread, which an abort does not stop.
        keep_s: how long the engine keeps a view after it has left the claim; 0: it does not.
        fate: how it ends.
        replies: how many there will be.
        reply_nbytes: of each reply's tensor.
        sends: how often it may be sent: again over another connection, if that of before has ended.
    """

    number: int
    tensor: torch.Tensor
    sender: int = 0
    checksum: int = 0
    work_s: float = 0.0
    on_thread: bool = False
    keep_s: float = 0.0
    fate: Fate = "done"
    replies: int = 1
    reply_nbytes: int = _NUMBER_NBYTES
    sends: int = 1


class Answer(msgspec.Struct, kw_only=True):
    """A reply to the request of this number; ``index`` counts the replies from 0."""

    number: int
    tensor: torch.Tensor
    index: int = 0
    checksum: int = 0


class Source:
    """Where contents come from.

    Args:
        chance: of the process; draws the pool.
    """

    def __init__(self, chance: random.Random) -> None:
        self._pool: NDArray[np.uint8] = np.frombuffer(chance.randbytes(_POOL_NBYTES), np.uint8)

    def content(self, number: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """Returns a content of a number and its checksum.

        Args:
            number: becomes part of it.
            nbytes: its size; at most 4 MiB.
        """
        start = number * 4099 % (_POOL_NBYTES - nbytes)
        content = self._pool[start : start + nbytes].copy()
        stamp = number.to_bytes(_NUMBER_NBYTES, "little")[:nbytes]
        content[: len(stamp)] = np.frombuffer(stamp, np.uint8)
        return torch.from_numpy(content), zlib.crc32(content.data)


def check(tensor: torch.Tensor, number: int, checksum: int, when: str) -> None:
    """Compares a content with what was sent.

    Raises:
        CorruptedError: it is something else.
    """
    array: NDArray[np.uint8] = tensor.numpy()
    actual = zlib.crc32(array.data)
    if actual == checksum:
        return
    held = int.from_bytes(array[:_NUMBER_NBYTES].tobytes(), "little")
    raise CorruptedError(
        f"content {number} of {array.size} bytes has checksum {actual:08x} instead of {checksum:08x} {when}; it starts with "
        f"the number {held}"
    )


async def check_aside(tensor: torch.Tensor, number: int, checksum: int, when: str) -> None:
    """Does the same, for large contents on a thread; a cancellation comes when the thread has ended.

    Raises:
        CorruptedError: it is something else.
    """
    if tensor.numel() <= _CHECK_INLINE_NBYTES:
        check(tensor, number, checksum, when)
    else:
        await uninterrupted(asyncio.ensure_future(asyncio.to_thread(check, tensor, number, checksum, when)))


def stamp(tensor: torch.Tensor, number: int) -> torch.Tensor:
    """Writes a number to both ends of a tensor of at least 8 bytes, and returns it."""
    value = torch.tensor([number]).view(torch.uint8)
    tensor[:_NUMBER_NBYTES] = value
    tensor[-_NUMBER_NBYTES:] = value
    return tensor


def check_stamp(tensor: torch.Tensor, number: int) -> None:
    """Looks for the number at both ends of a tensor.

    Raises:
        CorruptedError: it carries another.
    """
    ends = (tensor[:_NUMBER_NBYTES], tensor[-_NUMBER_NBYTES:])
    numbers = [int(end.clone().view(torch.int64).item()) for end in ends]
    if numbers != [number, number]:
        raise CorruptedError(f"the tensor of request {number} carries {numbers[0]} and {numbers[1]}")
