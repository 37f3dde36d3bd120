"""What comes from another host, over a connection: each side's reading of it, up to the tensors in a body."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from shmring.errors import RemoteProtocolError
from shmring.memory.bundles import Bundle, bundle, check_bundle
from shmring.transport.far_wire import (
    HEADER,
    PREAMBLE,
    Abort,
    Call,
    Called,
    End,
    Hello,
    Read,
    Reply,
    Request,
    decode_answer,
    decode_hello,
    decode_message,
    frame,
    hello_bytes,
    hello_nbytes,
)

__all__ = ["SEEDS", "frames"]

_BOUNDS = {"max_tensors": 16, "max_payload_nbytes": 1 << 16, "max_values": 1 << 12}
_MAX_BODY_NBYTES = 1 << 20


def frames(data: bytes) -> None:
    """Bytes are refused with RemoteProtocolError, or are messages; and tensors lie in the body that was announced."""
    with contextlib.suppress(RemoteProtocolError):
        if len(data) >= PREAMBLE.size:
            nbytes = hello_nbytes(data[: PREAMBLE.size])
            hello = decode_hello(data[PREAMBLE.size : PREAMBLE.size + nbytes])
            assert len(hello.session) == 16
    for head, body in _framed(data):
        for decode in (decode_message, decode_answer):
            with contextlib.suppress(RemoteProtocolError):
                message = decode(head)
                if isinstance(message, Request | Reply):
                    check_bundle(message.payload, len(body), **_BOUNDS)
                    _check_lies_in(Bundle(message.payload, (0,), body).open(), body.ctypes.data, len(body))


def _framed(data: bytes) -> Iterator[tuple[bytes, np.ndarray[tuple[int], np.dtype[np.uint8]]]]:
    at = 0
    while at + HEADER.size <= len(data):
        head_nbytes, body_nbytes = HEADER.unpack_from(data, at)
        at += HEADER.size
        if head_nbytes > len(data) or body_nbytes > _MAX_BODY_NBYTES:
            return
        body = np.zeros(body_nbytes, np.uint8)
        sent = np.frombuffer(data[at + head_nbytes : at + head_nbytes + body_nbytes], np.uint8)
        body[: len(sent)] = sent
        yield data[at : at + head_nbytes], body
        at += head_nbytes + body_nbytes


def _check_lies_in(value: object, start: int, nbytes: int) -> None:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for child in value:
            _check_lies_in(child, start, nbytes)
    elif isinstance(value, torch.Tensor | np.ndarray) and value.nbytes:
        at = value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data
        assert start <= at <= start + nbytes - value.nbytes


def _sent(make: Callable[[bytes], Request | Reply], payload: object) -> bytes:
    packed = bundle(payload, **_BOUNDS)
    nbytes, parts = packed.laid_out()
    return frame(make(packed.payload), nbytes) + b"".join(map(bytes, parts))


_PAYLOAD = {"x": torch.arange(10), "y": [np.ones((2, 3), "<f4"), "text"], "z": torch.ones(70, dtype=torch.bfloat16)}

SEEDS: dict[str, list[bytes]] = {
    "frames": [
        hello_bytes(Hello(b"a secret of sixteen bytes", "vision", bytes(16), "me")),
        _sent(lambda payload: Request(1, "a", payload), _PAYLOAD) + frame(Abort(1)) + frame(Read(1, 100)),
        _sent(lambda payload: Reply(1, payload), _PAYLOAD) + frame(End(1, (3, 2, False), ("error", "ValueError", "no"))),
        frame(Call(7, "pause", b"\x91\x01")) + frame(Called(7, b"\x01")) + frame(Called(8, b"", ("KeyError", "x"))),
    ]
}
