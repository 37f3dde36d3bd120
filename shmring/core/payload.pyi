from collections.abc import Callable
from typing import Any

from shmring.core.held_slots import HeldSlots
from shmring.core.message_ring import RecordWriter
from shmring.core.messages import SlotRef

class Part:
    @property
    def source(self) -> Any: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def region(self) -> int: ...
    @property
    def is_in_place(self) -> bool: ...
    def __init__(
        self, source: object, dtype: str, shape: tuple[int, ...], nbytes: int, *, address: int, is_on_host: bool
    ) -> None: ...

class Packed:
    slots: list[Any]
    @property
    def payload(self) -> bytes: ...
    @property
    def parts(self) -> list[Part]: ...
    @property
    def copied(self) -> int: ...
    @property
    def copied_nbytes(self) -> int: ...
    @property
    def in_place(self) -> int: ...
    @property
    def in_place_nbytes(self) -> int: ...
    @property
    def region_nbytes(self) -> int: ...
    @property
    def slot_nbytes(self) -> int: ...
    @property
    def payload_offset(self) -> int: ...
    @property
    def is_payload_in_slot(self) -> bool: ...
    def copy_into(self, address: int) -> None: ...

class Packer:
    def __init__(
        self,
        max_tensors: int,
        max_payload_nbytes: int,
        max_values: int,
        tensor_types: tuple[type, ...],
        table: object,
        tensor_memory: tuple[int, int, int, int] | None,
        is_negative: Callable[[Any], bool],
        describe: Callable[[object], object],
        copy_strided: Callable[[Part, int], object],
        copy_past_cache: Callable[[int, int, int], object],
        copy_into_cache: Callable[[int, int, int], object],
        explain: Callable[[object, Exception], Exception],
    ) -> None: ...
    def pack(
        self,
        payload: object,
        inline_nbytes: int,
        largest_record_nbytes: int,
        held: HeldSlots | None = None,
    ) -> Packed: ...
    def encode(self, payload: object) -> bytes: ...

def write_submit(
    writer: RecordWriter, packed: Packed, epoch: int, request_id: int, name: str, fence: bytes, slots: tuple[SlotRef, ...]
) -> bool: ...
def write_reply(writer: RecordWriter, packed: Packed, request_id: int, slot: SlotRef | None) -> bool: ...
def write_done(
    writer: RecordWriter, request_id: int, released: tuple[int, ...], reply: Packed | None = None, slot: SlotRef | None = None
) -> bool: ...
