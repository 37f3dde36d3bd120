"""A process's way to the store of encoder outputs: there when the store is, and in nobody's way when it is not.

Theory of operation. A thread of its own connects, starts the store first if that is asked for, and does so again when the
store has gone. So no call waits for a store that is not there: it says at once that nothing was found, or that nothing was
kept, and vLLM encodes as it would without a connector. A store that is there and does not answer, or has no room, costs its
caller one bounded wait; for a second after that, nobody waits for it.

Whatever goes wrong is said in the log once, until it is well again.

Outputs are kept as ``{"ec": tensor}``. What is found is pinned until it is closed and its last view has died.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

import shmring
import shmring.threads
from shmring.client.starting import store_name
from shmring.core.loggers import logger_of
from shmring.errors import CapacityError, RemoteError, ShmringError, WouldBlock
from shmring.integrations.vllm.encoder_settings import EncoderSettings
from shmring.threads import Client, Keeping, Kept, Slot

__all__ = ["EncoderStore", "Use"]

logger = logger_of("vllm.shmring")

_CONNECT_S = 1.5  # in one attempt; at the start of vLLM, which takes longer anyway, for a store that is about to be there
_STARTING_S = 60.0  # for one that is started: its slab is reserved first
_LOOK_S = 1.0  # between two looks whether the store is there
_PAUSE_S = 1.0  # in which nobody waits for a store that has kept a caller waiting in vain
_LEASE, _SMALL_LEASE = 16 << 20, 4096  # of who writes outputs, and of who does not: its part of the slab is for others
_NAME = "ec"  # of the tensor, in what is kept

#: ``look``: it looks outputs up, and reads none; ``load``: it reads them; ``keep``: it writes some, and may read others.
Use = Literal["look", "load", "keep"]

#: What may be wrong. ``absent``: no store is there; ``silent``: it does not answer; ``full``: it has no room; ``size``: an
#: output can never fit; ``pins``: this process uses as much as it may; ``kind``: the content is of another kind.
Trouble = Literal["absent", "silent", "full", "size", "pins", "kind"]


class EncoderStore:
    """See the head of this file. Its calls are for one thread, beside the one that connects.

    Args:
        settings: the connector's.
        description: what the store's log calls this process.
        use: what this process does there.
        now: seconds of a clock.

    Attributes:
        name: of the store.
        counts: of outputs, by what became of them, for the log's summary.
    """

    def __init__(
        self, settings: EncoderSettings, description: str, *, use: Use, now: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = settings.store or store_name()
        self.counts: collections.Counter[str] = collections.Counter()
        self._settings = settings
        self._description = description
        self._use = use
        self._now = now
        self._client: Client | None = None
        self._why_absent = "it was not looked for yet"
        self._tried = threading.Event()
        self._closing = threading.Event()
        self._lock = threading.Lock()  # of the client, for who makes and who closes it
        self._said: set[Trouble] = set()
        self._ask_again_s = self._wait_again_s = 0.0
        self._handed: collections.deque[tuple[int, Keeping]] = collections.deque()
        self._thread = threading.Thread(target=self._stay_connected, name="shmring encoder store", daemon=True)

    @classmethod
    def create(cls, settings: EncoderSettings, description: str, *, use: Use) -> EncoderStore:
        """Returns one that has tried to connect. Waits for a store that is being started, and not long for another one."""
        store = cls(settings, description, use=use)
        store._thread.start()
        store._tried.wait(2 * _CONNECT_S + (_STARTING_S if settings.start else 0.0))
        return store

    # -- being there ---------------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the store is there."""
        client = self._client
        return client is not None and client.connected

    def _stay_connected(self) -> None:
        while not self._closing.is_set():
            try:
                if not self.connected:
                    self._connect()
            except (ShmringError, OSError, TimeoutError, ValueError) as error:
                self._why_absent = str(error)
                self._say_absent(error)
            finally:
                self._tried.set()
            self._closing.wait(_LOOK_S)

    def _connect(self) -> None:
        directory = self._settings.socket_dir or None
        if self._settings.start:
            slab_nbytes = self._settings.slab
            shmring.threads.start_store(self.name, slab_nbytes=slab_nbytes, socket_dir=directory, timeout=_STARTING_S)
        if self._client is not None:  # which attaches by itself, as soon as there is one
            return
        client = shmring.threads.connect(
            self.name,
            reconnect=True,
            description=self._description,
            connect_timeout_s=_CONNECT_S,
            socket_dir=directory,
            lease_nbytes=_LEASE if self._use == "keep" else _SMALL_LEASE,
            prefault=self._use != "look",
        )
        with self._lock:
            if not self._closing.is_set():
                self._client = client
                self._said.discard("absent")
                logger.info("shmring: encoder outputs go through the store %r", self.name)
                return
        client.close()

    def _reached(self) -> Client | None:
        """Returns the client if the store is there; otherwise says that it is not."""
        client = self._client
        if client is not None and client.connected:
            return client
        self._say_absent(self._why_absent if client is None else client.lost_error)
        return None

    def _say_absent(self, why: object) -> None:
        self._say("absent", "shmring: the store %r is not there, so encoders work as without it: %s", self.name, why)

    def _say(self, trouble: Trouble, text: str, *arguments: object) -> None:
        """Says in the log what is wrong, unless it says so already."""
        if trouble not in self._said:
            self._said.add(trouble)
            logger.warning(text, *map(_shown, arguments))

    # -- finding -------------------------------------------------------------------------------------------------------

    def find(self, keys: Sequence[bytes | None], timeout_s: float) -> list[Kept[Any] | None]:
        """Looks for outputs, with one round trip for all of them.

        Args:
            keys: of them, each another one; None for what has no key, and is not there.
            timeout_s: how long the caller may be kept waiting.

        Returns:
            For each key, the content, pinned, or None: it is not there, or the store is not.
        """
        client = self._reached() if self._now() >= self._ask_again_s else None
        if client is None:
            return [None] * len(keys)
        try:
            found = iter(client.find_many([key for key in keys if key is not None], timeout=timeout_s))
        except TimeoutError as error:
            self._ask_again_s = self._now() + _PAUSE_S
            self._say("silent", "shmring: the store %r does not answer, so encoders work as without it: %s", self.name, error)
        except WouldBlock as error:
            self._say("pins", "shmring: some encoder outputs of the store %r are not used: %s", self.name, error)
        except (ShmringError, OSError) as error:
            self._say_absent(error)
        else:
            self._said -= {"absent", "silent", "pins"}
            return [None if key is None else next(found) for key in keys]
        return [None] * len(keys)

    def view(self, content: Kept[Any]) -> torch.Tensor | None:
        """Returns an output where it lies, and leaves its content: the view keeps it. Write to none of these.

        Returns:
            None: it is no output, or the store has gone since it was found.
        """
        with content:
            try:
                tensor = content.payload[_NAME]
            except (LookupError, TypeError, RemoteError):
                tensor = None
            except (ShmringError, OSError):
                return None
        if isinstance(tensor, torch.Tensor):
            return tensor
        self._say("kind", "shmring: the store %r keeps something under an encoder output's key that is none", self.name)
        return None

    # -- keeping -------------------------------------------------------------------------------------------------------

    def keep(self, key: bytes, tensor: torch.Tensor) -> bool:
        """Copies an output into the store, once. On a GPU, the copy is queued on the current stream, and it can be found when
        that is over; otherwise, as soon as the store has read of it.

        Args:
            key: of it.
            tensor: the output.

        Returns:
            Whether it was given to the store, which may still refuse it.
        """
        self._settle()
        client = self._reached()
        if client is None:
            self.counts["not kept"] += 1
            return False
        shape, on_gpu = tuple(tensor.shape), tensor.is_cuda
        nbytes = shmring.nbytes_for((shape, tensor.dtype))
        try:
            with self._room(client, nbytes) as slot:
                view = slot.tensor(shape, tensor.dtype)
                view.copy_(tensor, non_blocking=on_gpu)
                stream = torch.cuda.current_stream(tensor.device) if on_gpu else None
                self._handed.append((nbytes, client.keep_nowait(key, {_NAME: view}, slot, stream=stream)))
                return True
        except (TimeoutError, WouldBlock) as error:
            self._wait_again_s = self._now() + _PAUSE_S
            self._say("full", "shmring: an encoder output of %d bytes is not kept: %s", nbytes, error)
        except CapacityError as error:
            self._say("size", "shmring: an encoder output of %d bytes is not kept: %s", nbytes, error)
        except (ShmringError, OSError) as error:
            self._say("absent", "shmring: an encoder output of %d bytes is not kept: %s", nbytes, error)
        self.counts["not kept"] += 1
        return False

    def _room(self, client: Client, nbytes: int) -> Slot:
        """Returns a slot. Where the last caller has waited in vain just now, this one does not wait.

        Raises:
            TimeoutError, WouldBlock, CapacityError, ShmringError: there is none.
        """
        if self._now() < self._wait_again_s:
            return client.slot_nowait(nbytes)
        return client.slot(nbytes, timeout=self._settings.wait_s)

    def _settle(self) -> None:
        """Looks what has become of the outputs that were handed over, in their order."""
        while self._handed and self._handed[0][1].ended:
            nbytes, keeping = self._handed.popleft()
            error = keeping.error
            if error is None:
                self.counts["kept"] += 1
                self._said -= {"absent", "full"}
            else:
                self.counts["not kept"] += 1
                trouble: Trouble = "full" if isinstance(error, WouldBlock) else "absent"
                self._say(trouble, "shmring: an encoder output of %d bytes is not kept: %s", nbytes, error)

    # -- leaving -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves the store. What is on its way to be kept has a moment for it; views stay good. Twice is once."""
        with self._lock:
            self._closing.set()
            client, self._client = self._client, None
        if client is None:
            return
        while self._handed:
            with contextlib.suppress(ShmringError, OSError, TimeoutError):
                self._handed[0][1].wait(timeout=_LOOK_S)
            if not self._handed[0][1].ended:
                break
            self._settle()
        client.close()
        counts = ", ".join(f"{count} {what}" for what, count in sorted(self.counts.items())) or "none"
        logger.info("shmring: encoder outputs (%s): %s", self.name, counts)


def _shown(argument: object) -> object:
    """Returns what a line of the log has of it: a handler that keeps an error would keep its frames, and what they view."""
    return str(argument) if isinstance(argument, BaseException) else argument
