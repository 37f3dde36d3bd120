from collections.abc import Callable, Sequence
from typing import Any

from shmring.core.mapping import Mapping
from shmring.core.messages import TensorRef
from shmring.core.views import RegionBytes, Regions, TensorMaker
from shmring.core.wire import Content

def decode_values(encoded: bytes, max_values: int) -> Any: ...

class ContentRegions:
    @property
    def content(self) -> Content: ...
    @property
    def client_id(self) -> int: ...
    def memory(self, number: int) -> RegionBytes: ...

class PayloadDecoder:
    def __init__(
        self,
        payload_type: Any,
        convert: Callable[[Any, Any], Any],
        maker: TensorMaker,
        dtypes: Sequence[tuple[int, int] | None],
        other: Callable[[TensorRef, RegionBytes | None], Any],
    ) -> None: ...
    def decode_again(self, regions: ContentRegions, place: Callable[[TensorRef], Any]) -> Any: ...

def decode_content(
    decoder: PayloadDecoder,
    content: Content,
    client_id: int,
    regions: Regions,
    mapping: Mapping,
    place: Callable[[TensorRef], Any] | None = None,
) -> tuple[Any, list[bool]]: ...
