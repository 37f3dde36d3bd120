"""Opening the engine's end of a ring: ``shmring.serve``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Mapping
from types import TracebackType
from typing import Any, Unpack

from shmring.config import RingConfig, RingOptions, configured
from shmring.ring.frontend import CallHandler
from shmring.ring.ring import Ring

__all__ = ["Serving", "serve"]


class Serving:
    """What :func:`serve` returns: await it, or use it with ``async with``."""

    def __init__(self, create: Callable[[], Awaitable[Ring]]) -> None:
        self._create = create
        self._ring: Ring | None = None

    def __await__(self) -> Generator[Any, None, Ring]:
        return self._create().__await__()

    async def __aenter__(self) -> Ring:
        self._ring = await self._create()
        return self._ring

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        assert self._ring is not None
        await self._ring.close()


def serve(
    name: str,
    config: RingConfig | None = None,
    *,
    payload_type: Any = Any,
    calls: Mapping[str, CallHandler] | None = None,
    **overrides: Unpack[RingOptions],
) -> Serving:
    """Opens the engine's end of a ring: ``async with shmring.serve("vision", slab_nbytes="1GiB") as ring``.

    Args:
        name: what frontends connect to; one living engine of a user may have it.
        config: limits and sizes; ``overrides`` are fields of it.
        payload_type: a msgspec type that payloads are decoded into; plain objects if not given.
        calls: control calls that frontends may make, by name: coroutine functions of msgpack values.

    Raises:
        SlabError: there is no memory for the slab, or no space in ``/dev/shm``; or (``CudaError``) it can't be pinned with
            ``pin="on"``, or a GPU can't hold the device slab.
        LocalProtocolError: a living engine has this name.
        PermissionError: the socket's directory is not safe.
        ValueError, TypeError: a name, size or option is not valid.

    Source: objects that can be awaited or used with ``async with`` are how ``websockets`` does it.
    """
    settled = configured(RingConfig, config, overrides)
    return Serving(lambda: Ring.create(name, settled, payload_type=payload_type, calls=calls))
