"""What goes over a connection between hosts: the bytes of the contract, and nothing that waits.

A client begins with a preamble (:data:`PREAMBLE`: magic, version, length) and :class:`Hello`, whose token says that it may. The
gateway answers with a frame: :class:`~shmring.core.messages.Welcome` or ``Refused``. From then on, both send frames. A frame is
two lengths (:data:`HEADER`), a head (one of the messages below, in msgpack) and a body: the memory of the tensors of the head's
payload, as their extensions count. So what a frame costs is known from its first twelve bytes, what its tensors are from its
head, and the body can go into memory of just that size.

A client sends ``Request``, ``Abort``, ``Read``, ``Call``; the gateway answers with any number of ``Reply`` and one ``End``,
and with ``Called``, over the connection of what it answers. ``Draining`` comes over the client's first connection, unasked.
Numbers are the client's, whose connections have one session in their hellos: ``Abort`` and ``Read`` may come over another
connection than their request, and do not wait behind a body there. A connection that ends takes its requests with it.

Invariant: a reader has checked both lengths before it takes memory for what they announce.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any

import msgspec

from shmring.core.messages import FailureKind, Refused, ShortText, Unsigned, Welcome
from shmring.errors import RemoteProtocolError

__all__ = [
    "HEADER",
    "HELLO_NBYTES",
    "MAX_HEAD_NBYTES",
    "PREAMBLE",
    "WINDOW_NBYTES",
    "Abort",
    "Call",
    "Called",
    "Draining",
    "End",
    "Hello",
    "Read",
    "Reply",
    "Request",
    "decode_answer",
    "decode_hello",
    "decode_message",
    "frame",
    "hello_bytes",
    "hello_nbytes",
]

#: Magic, version, bytes of the hello.
PREAMBLE = struct.Struct("<8sII")
#: Bytes of a frame's head, and of its body.
HEADER = struct.Struct("<IQ")

_MAGIC = b"\x89shmring"  # begins with no letter: no other protocol's first line
_VERSION = 1

HELLO_NBYTES = 2048
#: Of a head without its payload.
MAX_HEAD_NBYTES = 4096
#: A gateway sends no more replies to a request while so many bytes of them were not read.
WINDOW_NBYTES = 16 << 20


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag_field="t"):
    """A message."""


class Hello(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """Who connects: the token that allows it, the engine that it means, the session that this connection is of, and its name in
    the engine's log."""

    token: Annotated[bytes, msgspec.Meta(max_length=1024)]
    engine: ShortText
    session: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
    description: ShortText = ""


class Request(_Message, frozen=True, tag=1):
    """A request. Its body is the memory of its tensors."""

    number: Unsigned
    request_id: ShortText
    payload: bytes


class Abort(_Message, frozen=True, tag=2):
    """A request is given up."""

    number: Unsigned


class Read(_Message, frozen=True, tag=3):
    """Of the replies to a request, so many bytes more were read."""

    number: Unsigned
    nbytes: Unsigned


class Call(_Message, frozen=True, tag=4):
    """A control call, with its arguments in msgpack."""

    number: Unsigned
    method: ShortText
    arguments: bytes


class Reply(_Message, frozen=True, tag=11):
    """A reply. Its body is the memory of its tensors."""

    number: Unsigned
    payload: bytes


#: Requests of all clients that the engine has, those of them that it has not claimed, and whether it drains.
Load = tuple[Unsigned, Unsigned, bool]


class End(_Message, frozen=True, tag=12):
    """Nothing more comes for a request. ``failed``: how, the error's type and its text; None: it is finished."""

    number: Unsigned
    load: Load
    failed: tuple[FailureKind, ShortText, str] | None = None


class Called(_Message, frozen=True, tag=13):
    """The result of a control call, in msgpack, or its error's type and text."""

    number: Unsigned
    result: bytes
    failed: tuple[ShortText, str] | None = None


class Draining(_Message, frozen=True, tag=14):
    """The engine drains: new requests should go to others. Who is idle hears this of no ``End``."""


_messages = msgspec.msgpack.Decoder(Request | Abort | Read | Call)
_answers = msgspec.msgpack.Decoder(Reply | End | Called | Draining | Welcome | Refused)
_hellos = msgspec.msgpack.Decoder(Hello)


def hello_bytes(hello: Hello) -> bytes:
    """Returns what a client sends first."""
    encoded = msgspec.msgpack.encode(hello)
    return PREAMBLE.pack(_MAGIC, _VERSION, len(encoded)) + encoded


def hello_nbytes(preamble: bytes | bytearray) -> int:
    """Returns how long the hello is that follows a preamble.

    Raises:
        RemoteProtocolError: this is no client of this version.
    """
    magic, version, nbytes = PREAMBLE.unpack(preamble)
    if magic != _MAGIC:
        raise RemoteProtocolError("what connects here speaks another protocol")
    if version != _VERSION:
        raise RemoteProtocolError(f"a client speaks version {version} between hosts, and this engine {_VERSION}")
    if nbytes > HELLO_NBYTES:
        raise RemoteProtocolError(f"a hello of {nbytes} bytes, and {HELLO_NBYTES} are the most")
    return int(nbytes)


def frame(message: _Message | Welcome | Refused, body_nbytes: int = 0) -> bytes:
    """Returns a frame up to its body."""
    head = msgspec.msgpack.encode(message)
    return HEADER.pack(len(head), body_nbytes) + head


def decode_hello(encoded: bytes | bytearray) -> Hello:
    """Returns a hello. Raises as :func:`decode_message`."""
    hello: Hello = _decoded(_hellos, encoded)
    return hello


def decode_message(head: bytes | bytearray) -> Request | Abort | Read | Call:
    """Returns what a client says.

    Raises:
        RemoteProtocolError: it is no such message.
    """
    message: Request | Abort | Read | Call = _decoded(_messages, head)
    return message


def decode_answer(head: bytes | bytearray) -> Reply | End | Called | Draining | Welcome | Refused:
    """Returns what a gateway says. Raises as :func:`decode_message`."""
    answer: Reply | End | Called | Draining | Welcome | Refused = _decoded(_answers, head)
    return answer


def _decoded(decoder: msgspec.msgpack.Decoder[Any], encoded: bytes | bytearray) -> Any:
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteProtocolError(f"what came over a connection is no message: {error}") from error
