"""The connector that vLLM-Omni makes: what a stage puts lies in a store until the next stage gets it.

Theory of operation: it keeps to the interface of vLLM-Omni's ``SharedMemoryConnector``, and is derived from it, since
vLLM-Omni tells connectors of that class, and no others, which keys an aborted request has left. All of its methods are
replaced. Keys are vLLM-Omni's; a name at the store stands for one key of one edge between stages of one server.

``put`` copies tensors once, into the store's memory. ``get`` takes what is there, and returns views of it, or copies
(:mod:`~shmring.integrations.omni.views`). Where vLLM-Omni has an answer to a failure (a put that was not possible is tried
again, or fails its request; what is not there is asked for again), it gets that answer, and the log says why, once. What can
never be sent is an error, which becomes the request's.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

from vllm_omni.distributed.omni_connectors.connectors.shm_connector import SharedMemoryConnector
from vllm_omni.distributed.omni_connectors.utils.serialization import OmniSerializer

from shmring.core.loggers import logger_of
from shmring.errors import ClosedError, PeerLostError, ShmringError, WouldBlock
from shmring.integrations.omni.contract import CHECKS, find_hooks
from shmring.integrations.omni.exchange import Exchange
from shmring.integrations.omni.frames import pack, unpack
from shmring.integrations.omni.settings import Settings
from shmring.integrations.omni.views import Views
from shmring.integrations.promises import broken, not_compiled

__all__ = ["ShmringOmniConnector"]

logger = logger_of("vllm_omni.shmring")

_THERE_S = 5.0  # for what another stage says it has put, on a busy machine
_VIEWED_PART = 4  # a quarter of the store's content may be in use by one stage; the rest of what it gets is copied

_Edge = tuple[str, str]


class ShmringOmniConnector(SharedMemoryConnector):  # type: ignore[misc]  # vLLM-Omni has no types here
    """Passes payloads from stage to stage through a store.

    Args:
        config: ``extra`` of the YAML (:class:`~shmring.integrations.omni.settings.Settings`), and what vLLM-Omni adds to it.

    Raises:
        RuntimeError: this vLLM-Omni is not as the connector needs it, or shmring is not compiled.
        ValueError, TypeError: a setting can't be used.
        EngineDeadError, TimeoutError, PermissionError, SlabError, OSError: the store can't be reached or started.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self._exchange: Exchange | None = None  # first: vLLM-Omni closes what was not made, too
        self.config = config
        self.stage_id = config.get("stage_id", -1)
        if reason := not_compiled():
            raise RuntimeError(f"shmring can't be used: {reason}")
        if findings := broken(find_hooks, CHECKS):
            raise RuntimeError(f"this vLLM-Omni is not as the connector needs it: {'; '.join(findings)}")
        self._settings = Settings.of(config)
        self._views = Views()
        self._put_edges: set[_Edge] = set()  # a server has a few; cleanup names a key, and no edge
        self._get_edges: set[_Edge] = set()
        self._puts = self._gets = self._nbytes = self._failures = 0
        self._is_failing = False
        self._exchange = Exchange(self._settings, f"stage {self.stage_id} of vLLM-Omni")
        logger.info(
            "shmring: stage %s passes tensors through the store %s, for stages of %s",
            self.stage_id,
            self._settings.store,
            self._settings.namespace or "any server",
        )

    def put(self, from_stage: str, to_stage: str, put_key: str, data: Any) -> tuple[bool, int, dict[str, Any] | None]:
        """Passes data on. What another stage gets is as if it had come by vLLM-Omni's own serializer.

        Returns:
            Whether it can be got now, which it can't if there was no room or no store; its bytes; what ``get`` may be given
            as ``metadata``.

        Raises:
            TypeError: there is something in it that can't be sent.
            CapacityError: it is larger than what the store may have.
        """
        frame = pack(data, OmniSerializer.encoder._enc_hook)
        edge = str(from_stage), str(to_stage)
        self._put_edges.add(edge)
        name = self._name(edge, put_key)
        try:
            self._opened().put(name, frame)
        except (TimeoutError, WouldBlock, PeerLostError, ClosedError) as error:
            self._failed(f"{frame.nbytes} bytes for stage {to_stage} were not passed on", error)
            return False, 0, None
        self._is_failing = False
        self._puts += 1
        self._nbytes += frame.nbytes
        return True, frame.nbytes, {"shmring": name.hex(), "size": frame.nbytes}

    def get(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None
    ) -> tuple[Any, int] | None:
        """Takes data that was passed on, and its bytes; None: it is not there yet.

        If nothing was there in a whole round of calls, one call waits for some milliseconds until anything comes.

        Args:
            from_stage, to_stage, get_key: as it was put.
            metadata: what ``put`` has returned, if that is known: then it is waited for.

        Raises:
            ValueError: another version of the connector has put it.
        """
        handle = metadata.get(get_key, metadata) if isinstance(metadata, dict) else None
        is_put = isinstance(handle, dict) and "shmring" in handle
        return self._take(from_stage, to_stage, get_key, time.monotonic() + _THERE_S if is_put else None)

    def get_with_deadline(
        self, from_stage: str, to_stage: str, get_key: str, metadata: dict[str, Any] | None = None, *, deadline: float
    ) -> tuple[Any, int] | None:
        """Waits for data until a time of ``time.monotonic``, and is woken when it comes; otherwise as :meth:`get`."""
        return self._take(from_stage, to_stage, get_key, deadline)

    def _take(self, from_stage: str, to_stage: str, key: str, until_s: float | None) -> tuple[Any, int] | None:
        edge = str(from_stage), str(to_stage)
        self._get_edges.add(edge)
        exchange = self._exchange
        if exchange is None:
            return None
        try:
            frame = exchange.get(self._name(edge, key), until_s)
        except (ShmringError, TimeoutError, OSError) as error:
            self._failed(f"what stage {from_stage} passes on is not got", error)
            return None
        if frame is None:
            return None
        self._gets += 1
        nbytes = frame.nbytes
        viewed = self._views.hand_out(frame, exchange.kept_nbytes // _VIEWED_PART)
        del frame
        return unpack(viewed, OmniSerializer.decoder._post_process), nbytes

    def abandon_get(self, get_key: str) -> None:
        """Nobody waits for this key any more."""
        if self._exchange is not None:
            self._exchange.abandon([self._name(edge, get_key) for edge in self._get_edges])

    def reap_consumed(self) -> None:
        """Does nothing: the store says what was taken."""

    def cleanup(self, request_id: str) -> None:
        """Gives back what was put under a key and not got, and waits for this key no more."""
        self.abandon_get(request_id)
        if self._exchange is None:
            return
        try:
            self._exchange.withdraw([self._name(edge, request_id) for edge in self._put_edges])
        except (ShmringError, TimeoutError) as error:
            self._failed("what nobody will get is not taken back now", error)

    def health(self) -> dict[str, Any]:
        """Returns whether the store is reached, and what was passed on."""
        exchange = self._exchange
        return {
            "status": "healthy" if exchange is not None and exchange.is_connected else "unhealthy",
            "puts": self._puts,
            "gets": self._gets,
            "bytes_transferred": self._nbytes,
            "failures": self._failures,
            "copied": self._views.copied,
            "viewed_bytes": self._views.nbytes,
            "waiting": 0 if exchange is None else exchange.waiting,
            "store": self._settings.store,
        }

    def close(self) -> None:
        """Gives back what nobody has got, and disconnects. What was got stays as long as its tensors live. Twice is once."""
        exchange, self._exchange = getattr(self, "_exchange", None), None
        if exchange is not None:
            exchange.close()

    def _opened(self) -> Exchange:
        if self._exchange is None:
            raise ClosedError("this connector is closed")
        return self._exchange

    def _name(self, edge: _Edge, key: str) -> bytes:
        parts = repr((self._settings.namespace, *edge, str(key)))
        return hashlib.sha256(parts.encode("utf-8", "backslashreplace")).digest()

    def _failed(self, what: str, error: Exception) -> None:
        """Says so once, until something succeeds."""
        self._failures += 1
        was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            why = f"{type(error).__name__}: {error}"  # and not the error: its traceback has the store's memory
            logger.warning("shmring: %s (store %s): %s", what, self._settings.store, why)
