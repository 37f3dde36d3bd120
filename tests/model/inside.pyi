from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from shmring.core.compiled import (
    ClientBook,
    ClientSlotRecord,
    Content,
    ContentRegions,
    EngineBook,
    Lending,
    LinkReader,
    Mapping,
    Packed,
    PayloadDecoder,
    Placement,
    RecordHandler,
    RecordWriter,
    Regions,
    RunAllocator,
    Submit,
    TensorMaker,
)
from shmring.core.messages import SlotRef

class Reply(NamedTuple):
    request_id: int
    content: Content

class Done(NamedTuple):
    request_id: int
    released: tuple[int, ...]
    content: Content | None

def read_record(
    record: bytes, max_tensors: int, max_values: int = ..., *, from_engine: bool
) -> Submit | Reply | Done | None: ...
def take_payload(content: Content, payload: bytes, max_tensors: int, max_values: int = ...) -> None: ...
def open_content(content: Content, client_id: int, regions: Regions, mapping: Mapping) -> ContentRegions: ...
def leave_content(opened: ContentRegions) -> list[bool]: ...
def decode_content(
    decoder: PayloadDecoder,
    content: Content,
    client_id: int,
    regions: Regions,
    mapping: Mapping,
    placement: Placement | None = None,
) -> tuple[Any, list[bool]]: ...
def write_submit(
    writer: RecordWriter, packed: Packed, epoch: int, request_id: int, name: str, fence: bytes, slots: tuple[SlotRef, ...]
) -> bool: ...
def write_reply(writer: RecordWriter, packed: Packed, request_id: int, slot: SlotRef | None) -> bool: ...
def write_done(
    writer: RecordWriter, request_id: int, released: Sequence[int], reply: Packed | None = None, slot: SlotRef | None = None
) -> bool: ...

class ColdTaker(RecordHandler):
    @property
    def asked(self) -> int: ...

def deliver(reader: LinkReader, take: Callable[[bytes], object]) -> int: ...
def say_awake(reader: LinkReader) -> None: ...
def hear(reader: LinkReader, taker: RecordHandler) -> bool: ...
def hold_reader(reader: LinkReader) -> None: ...
def let_read(reader: LinkReader) -> None: ...

class LinkInPython(LinkReader):
    def has_turn(self, now_s: float) -> bool: ...
    def may_sleep(self, now_s: float, at_once: bool) -> bool: ...

class ToldAfterTurns(LinkReader):
    told: Any

def largest_run(allocator: RunAllocator) -> int: ...
def uses_table(maker: TensorMaker) -> bool: ...
def slots_with_engine(book: ClientBook) -> dict[int, ClientSlotRecord]: ...
def slots_here(book: ClientBook) -> set[ClientSlotRecord]: ...
def counts_of(book: ClientBook | EngineBook | Lending) -> tuple[Any, ...]: ...
def miscount(book: ClientBook | EngineBook | Lending, states: Sequence[int], *others: int) -> None: ...
