"""The messages between the two sides, apart from payloads: msgspec tagged Structs, one protocol version.

Every message is a msgpack array whose first element is its tag; unknown tags, missing and extra fields are refused by the
decoder. Numbers a peer sends are bounded by their types here (never negative, never beyond 62 bits), so that sums of them can't
overflow. The books check what they *mean*.

Submissions, replies and ends of requests have payloads, descriptors and tags 2, 103 and 104. They are read and written in C
(:mod:`.wire`), which calls a descriptor by the names here, and spells its dtype as :func:`item_nbytes` knows it.

A message is one record of a message ring, so it has a largest size. Long lists of ids are split over several messages:
``MAX_LISTED`` bounds what one of them can ask for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated, Final, Literal, TypeVar

import msgspec

from shmring.errors import RemoteProtocolError

__all__ = [
    "COPY_OUT",
    "PROTOCOL_VERSION",
    "SLOT_HEADER_NBYTES",
    "SLOT_MAGIC",
    "TENSOR_ALIGNMENT",
    "TENSOR_EXTENSION",
    "TORCH_ITEM_NBYTES",
    "Abort",
    "AnswerFailed",
    "AnswerPart",
    "Call",
    "CallResult",
    "DEVICE_MEMORY",
    "DLPACK_CODES",
    "DeviceHandle",
    "EngineMessage",
    "Failed",
    "Find",
    "Found",
    "FrontendMessage",
    "Goodbye",
    "HOST_MEMORY",
    "Hello",
    "KEPT_LEASE_ID",
    "KEY_NBYTES",
    "Keep",
    "KeptKey",
    "Inspect",
    "Join",
    "LeaseGrant",
    "LeaseRecall",
    "LeaseRequest",
    "LeaseReturn",
    "MAX_LISTED",
    "MAX_FINDS",
    "MAX_KEPT_PAYLOAD_NBYTES",
    "MAX_WAITS",
    "MAX_WITHDRAWN",
    "Memory",
    "NotKept",
    "NotKeptReason",
    "RankTaken",
    "Refused",
    "Release",
    "ReplyRead",
    "ReplyRelease",
    "SlotRef",
    "StopWaiting",
    "TensorRef",
    "Unpin",
    "Welcome",
    "Withdraw",
    "WorkerMessage",
    "WorkerWelcome",
    "align",
    "decode_first_message",
    "decode_worker_message",
    "decode_engine_message",
    "decode_frontend_message",
    "encode_message",
    "item_nbytes",
]

PROTOCOL_VERSION = 8

#: Ids in one message. Looking up that many takes a fraction of a millisecond, and they fit a record of 16 KiB.
MAX_LISTED = 1024

#: Each slot starts with {magic, generation, nbytes}, padded to one cache line.
SLOT_HEADER_NBYTES = 64

#: Lease id of a reply's slot if the frontend holds its share of the reserve: it copies the content out when the record comes,
#: and gives the slot back at once. Otherwise it is 0.
COPY_OUT = 1
SLOT_MAGIC = b"shmrslot"

#: Lease id of a slot that is kept content. Leases are numbered from 1 on.
KEPT_LEASE_ID = 0
#: Of the key of kept content: of SHA-256, for one.
KEY_NBYTES = 32
#: The most bytes of a kept payload beside its tensors: the engine has this much private memory for each content.
MAX_KEPT_PAYLOAD_NBYTES = 4096
#: Requests for kept content that a client may have in flight. Their answers always have room in a backlog.
MAX_FINDS = 64
#: Keys that a client may wait for, beside these: as many as it may have requests in flight. Their answers have room, too.
MAX_WAITS = 1024

#: Names of deliveries that one message takes back: they fit the smallest record.
MAX_WITHDRAWN = 64
#: Tensors start on cache lines: a copy whose ends differ modulo 4096 by 1 to 15 bytes is many times slower.
TENSOR_ALIGNMENT = 64
#: The msgpack extension code that stands for a tensor in a payload.
TENSOR_EXTENSION = 83

#: torch's dtypes that travel: the bytes of an item, and DLPack's code. Their number on the wire is their place here, from 1 on.
_TORCH_DTYPES = {
    "bool": (1, 6), "uint8": (1, 1), "int8": (1, 0), "uint16": (2, 1), "int16": (2, 0), "uint32": (4, 1), "int32": (4, 0),
    "uint64": (8, 1), "int64": (8, 0), "float16": (2, 2), "bfloat16": (2, 4), "float32": (4, 2), "float64": (8, 2),
    "complex32": (4, 5), "complex64": (8, 5), "complex128": (16, 5), "float8_e4m3fn": (1, 10), "float8_e5m2": (1, 12),
    "float8_e4m3fnuz": (1, 11), "float8_e5m2fnuz": (1, 13), "float8_e8m0fnu": (1, 14),
}  # fmt: skip
TORCH_ITEM_NBYTES = {name: nbytes for name, (nbytes, _) in _TORCH_DTYPES.items()}
DLPACK_CODES = {name: code for name, (_, code) in _TORCH_DTYPES.items()}

# A numpy dtype as its array interface spells it: byte order, kind, item size (never 0: numpy views no empty items), and a
# unit for times. Whatever matches, numpy takes.
_NUMPY_DTYPE = re.compile(
    r"\|b(1)|\|[iu](1)|[<>][iu]([248])|[<>]f(2|4|8|16)|[<>]c(8|16|32)|\|S([1-9][0-9]{0,6})"
    r"|[<>][mM](8)\[(?:[1-9][0-9]{0,5})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\]"
)
_NUMPY_TEXT = re.compile(r"[<>]U([1-9][0-9]{0,6})")

Unsigned = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Generation = Annotated[int, msgspec.Meta(ge=0)]
LeaseIds = Annotated[tuple[Unsigned, ...], msgspec.Meta(max_length=MAX_LISTED)]
Generations = Annotated[tuple[Generation, ...], msgspec.Meta(max_length=MAX_LISTED)]
#: The largest rank: far more than there are workers.
Rank = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
ShortText = Annotated[str, msgspec.Meta(max_length=256)]

KeptKey = Annotated[bytes, msgspec.Meta(min_length=KEY_NBYTES, max_length=KEY_NBYTES)]
KeptPayload = Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEPT_PAYLOAD_NBYTES)]

#: The memory in which a lease is wanted. Its offset says where it was granted: device memory begins where the slab ends.
Memory = Literal[0, 1]
HOST_MEMORY: Final = 0
DEVICE_MEMORY: Final = 1

#: CUDA's handle of memory is a structure of 64 bytes.
MemoryHandle = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]


def align(nbytes: int) -> int:
    """Rounds up to where the next tensor may start."""
    return (nbytes + TENSOR_ALIGNMENT - 1) & -TENSOR_ALIGNMENT


def item_nbytes(dtype: str) -> int | None:
    """Returns the item size of a dtype as the wire spells it (torch's name, or numpy's ``<f4``); ``None`` if unknown."""
    if (known := TORCH_ITEM_NBYTES.get(dtype)) is not None:
        return known
    if (match := _NUMPY_DTYPE.fullmatch(dtype)) is not None:
        return int(match[match.lastindex or 0])
    if (match := _NUMPY_TEXT.fullmatch(dtype)) is not None:
        return int(match[1]) * 4
    return None


class SlotRef(msgspec.Struct, frozen=True, gc=False):
    """A slot, as its holder describes it: ``nbytes`` of content follow the header at ``offset``.

    In device memory there is room for a header, and none is written.
    """

    lease_id: int
    offset: int
    nbytes: int
    generation: int


class TensorRef(msgspec.Struct, frozen=True, gc=False):
    """A tensor in a region: contiguous, in C order, at ``offset`` behind the region's start (a slot's header excluded)."""

    region: int
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


class _Part(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False):
    """A part of a message."""


class DeviceHandle(_Part, frozen=True):
    """Lets a frontend attach to a device slab: the GPU's UUID, CUDA's handle of the memory, and its size."""

    uuid: ShortText
    memory: MemoryHandle
    nbytes: Unsigned


class _Message(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True, gc=False, tag_field="t"):
    """A message."""


# frontend to engine


class Hello(_Message, frozen=True, tag=1):
    """The first message of a connection."""

    version: int
    lease_nbytes: Unsigned
    name: ShortText = ""


class Inspect(_Message, frozen=True, tag=9):
    """The first and only message of a connection that wants to know what the engine is doing."""

    version: int


class Abort(_Message, frozen=True, tag=3):
    """Gives up a request. Its slots stay the engine's until it releases them."""

    request_id: Unsigned


class LeaseRequest(_Message, frozen=True, tag=4):
    """Asks for a lease of at least ``nbytes``, ``preferred_nbytes`` if that is free now.

    A client has one request outstanding in each memory: a further one replaces it (and keeps its turn), and ``nbytes`` 0
    withdraws it. If no caller ``waits`` for the lease, no range is kept for it, and only leases that are not in use are
    recalled.
    """

    token: Unsigned
    nbytes: Unsigned
    preferred_nbytes: Unsigned = 0
    memory: Memory = HOST_MEMORY
    waits: bool = True


class LeaseReturn(_Message, frozen=True, tag=5):
    """Gives leases back in which no slot is in use."""

    lease_ids: LeaseIds


class ReplyRelease(_Message, frozen=True, tag=6):
    """Gives reply slots back whose last view has died."""

    generations: Generations


class ReplyRead(_Message, frozen=True, tag=15):
    """Callers have read a reply that was copied out of its slot, of each of these requests; others may follow it."""

    request_ids: Generations


class Call(_Message, frozen=True, tag=7):
    """A control call: a named method, msgpack arguments."""

    call_id: Unsigned
    method: ShortText
    arguments: bytes


class Goodbye(_Message, frozen=True, tag=8):
    """The last message of an orderly end: from now on, this frontend only writes in ``kept_lease_ids``.

    ``maps_device_slab``: it could not unmap the device slab, so that must not be freed before this process is dead.
    ``more``: another goodbye follows, which names the rest. ``pinned_generations``: kept content that it still views.
    ``lingers``: it keeps the socket open exactly as long as it uses any of the memory that it named.
    """

    kept_lease_ids: LeaseIds = ()
    kept_reply_generations: Generations = ()
    maps_device_slab: bool = False
    more: bool = False
    pinned_generations: Generations = ()
    lingers: bool = False


class Find(_Message, frozen=True, tag=12):
    """Looks for kept content, and pins it if it is there: :class:`Found` or :class:`NotKept` with this token answers.

    ``waits``: if it is not there, the answer comes when it is, or after a :class:`StopWaiting`. ``for_one``: it looks for a
    delivery of this name, and takes it.
    """

    token: Unsigned
    key: KeptKey
    waits: bool = False
    for_one: bool = False


class Keep(_Message, frozen=True, tag=13):
    """Gives the engine a slot to keep under a key, with a payload whose tensors are in it. Answered as :class:`Find` is.

    The slot is the engine's. It is :class:`Found` under its own generation if it is kept now. Otherwise it comes back with
    :class:`Release`, and what is found is another slot that is kept under this key already.

    ``for_one``: it is a delivery of this name, for the first client that finds it so. It is not pinned for this client, and
    replaces one that nobody has taken.
    """

    token: Unsigned
    key: KeptKey
    lease_id: Unsigned
    offset: Unsigned
    nbytes: Unsigned
    generation: Generation
    is_copied: bool
    payload: KeptPayload
    for_one: bool = False


class Withdraw(_Message, frozen=True, tag=17):
    """Takes deliveries back that this client has made and nobody has taken: those of these names; without any, all of them."""

    names: Annotated[tuple[KeptKey, ...], msgspec.Meta(max_length=MAX_WITHDRAWN)]


class StopWaiting(_Message, frozen=True, tag=16):
    """Waits for these answers no more. Each question that was not answered meanwhile is answered now."""

    tokens: Generations


class Unpin(_Message, frozen=True, tag=14):
    """Gives pins of kept content back, one for each time that a generation is in the list."""

    generations: Generations


# worker to engine


class Join(_Message, frozen=True, tag=31):
    """The first message of a worker's connection."""

    version: int
    rank: Rank
    name: ShortText = ""


class AnswerFailed(_Message, frozen=True, tag=33):
    """The worker has no reply to a message that wants one. The error's type and text say why."""

    sequence: Unsigned
    type_name: ShortText
    message: str


class AnswerPart(_Message, frozen=True, tag=34):
    """A part of a record that is longer than a record may be: the parts, joined, are that record. ``more``: another follows."""

    data: bytes
    more: bool


# engine to frontend


class LeaseGrant(_Message, frozen=True, tag=101):
    """Lends ``[offset, offset + nbytes)``. ``token`` names the request it answers, 0 for the base lease.

    The address space is the slab, and behind it the device slab. A lease is in one of them.
    """

    token: Unsigned
    lease_id: Unsigned
    offset: Unsigned
    nbytes: Unsigned


class Welcome(_Message, frozen=True, tag=102):
    """The answer to :class:`Hello`. ``device_slab`` is None if there is none.

    Five descriptors travel beside it: of the slab up to its reply reserve, of that reserve, which a frontend can only read, of
    the message ring to the frontend, of the one to the engine, and of the engine's load page. Both rings carry
    ``message_ring_nbytes``, in records of at most ``max_record_nbytes``.
    """

    version: int
    epoch: Generation
    client_id: Unsigned
    slab_nbytes: Unsigned
    block_nbytes: Unsigned
    leasable_nbytes: Unsigned
    max_inflight: Unsigned
    max_calls: Unsigned
    max_leases: Unsigned
    message_ring_nbytes: Unsigned
    max_record_nbytes: Unsigned
    inline_nbytes: Unsigned
    max_payload_nbytes: Unsigned
    max_tensors: Unsigned
    max_values: Unsigned
    base_lease: LeaseGrant | None
    device_slab: DeviceHandle | None = None
    kept_nbytes: Unsigned = 0
    client_pinned_nbytes: Unsigned = 0
    engine_name: ShortText = ""


FailureKind = Literal["error", "aborted", "timed_out", "invalid"]


class Failed(_Message, frozen=True, tag=105):
    """The request ended without being finished."""

    request_id: Unsigned
    kind: FailureKind
    type_name: ShortText
    message: str


class Release(_Message, frozen=True, tag=106):
    """Hands slots back, by generation."""

    generations: Generations


class LeaseRecall(_Message, frozen=True, tag=107):
    """Asks for leases back: allocate nothing more in them, return each as soon as it is empty."""

    lease_ids: LeaseIds


class CallResult(_Message, frozen=True, tag=108):
    """The answer to a :class:`Call`; on failure ``error`` is (type, message)."""

    call_id: Unsigned
    result: bytes
    error: tuple[str, str] | None = None


class Found(_Message, frozen=True, tag=112):
    """Kept content, which is pinned once more for the client that asked. The slot at ``offset`` has ``nbytes`` of content.

    ``is_copied``: whether the tensors of ``payload`` are in region 0, or in region 1.
    """

    token: Unsigned
    generation: Generation
    offset: Unsigned
    nbytes: Unsigned
    is_copied: bool
    payload: KeptPayload


#: ``absent``: nothing is kept under the key. ``large``: larger than all kept content may be, or than what one client may have
#: pinned. ``full``: all kept content is pinned, or a client waits for this memory. ``pins``: the client has pinned as much as
#: it may. ``ends``: the engine is about to end.
NotKeptReason = Literal["absent", "large", "full", "pins", "ends"]


class NotKept(_Message, frozen=True, tag=113):
    """Answers :class:`Find` and :class:`Keep` where nothing is found or kept."""

    token: Unsigned
    reason: NotKeptReason


class Refused(_Message, frozen=True, tag=109):
    """The engine refuses this connection, and closes it."""

    reason: str


# engine to worker


class WorkerWelcome(_Message, frozen=True, tag=121):
    """The answer to :class:`Join`.

    Six descriptors travel beside it: of the slab up to its reply reserve, opened to be read; of that reserve; of the memory of
    broadcasts, which like the reserve only the engine can write; of the message ring to the worker, and of the one to the
    engine; and of the worker's page.
    """

    version: int
    epoch: Generation
    slab_nbytes: Unsigned
    leased_nbytes: Unsigned
    broadcast_nbytes: Unsigned
    message_ring_nbytes: Unsigned
    inline_nbytes: Unsigned
    max_payload_nbytes: Unsigned
    max_tensors: Unsigned
    max_values: Unsigned
    engine_name: ShortText = ""


class RankTaken(_Message, frozen=True, tag=122):
    """The answer to :class:`Join` if a worker of that rank lives; ``pid`` is its process."""

    rank: Rank
    pid: int
    engine_name: ShortText = ""


FrontendMessage = (
    Hello
    | Abort
    | LeaseRequest
    | LeaseReturn
    | ReplyRelease
    | ReplyRead
    | Call
    | Goodbye
    | Find
    | Keep
    | Unpin
    | StopWaiting
    | Withdraw
)
WorkerMessage = Join | AnswerFailed | AnswerPart
EngineMessage = (
    Welcome | Failed | Release | LeaseGrant | LeaseRecall | CallResult | Refused | Found | NotKept | WorkerWelcome | RankTaken
)

_Decoded = TypeVar("_Decoded")

#: Returns a message as a record of bytes.
encode_message: Callable[[FrontendMessage | Inspect | WorkerMessage | EngineMessage], bytes] = msgspec.msgpack.Encoder().encode


def _by(decoder: msgspec.msgpack.Decoder[_Decoded]) -> Callable[[bytes], _Decoded]:
    def decode(body: bytes) -> _Decoded:
        """Returns the message in a record.

        Raises:
            RemoteProtocolError: it is not a message of this protocol, or not one of this sender.
        """
        try:
            return decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise RemoteProtocolError(f"not a message of protocol version {PROTOCOL_VERSION}: {error}") from error

    return decode


#: The first message of a connection: :class:`Hello`, :class:`Join` or :class:`Inspect`, if the peer keeps to the rules.
decode_first_message: Callable[[bytes], FrontendMessage | Join | Inspect] = _by(
    msgspec.msgpack.Decoder(FrontendMessage | Join | Inspect)
)

#: Read messages of a frontend, a worker (except for replies) and an engine.
decode_frontend_message: Callable[[bytes], FrontendMessage] = _by(msgspec.msgpack.Decoder(FrontendMessage))
decode_worker_message: Callable[[bytes], WorkerMessage] = _by(msgspec.msgpack.Decoder(WorkerMessage))
decode_engine_message: Callable[[bytes], EngineMessage] = _by(msgspec.msgpack.Decoder(EngineMessage))
