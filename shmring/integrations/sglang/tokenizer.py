"""A tokenizer's half: tensors go into the slab of the scheduler that gets the request.

SGLang encodes and sends a request in its event loop, without an ``await``; so a tensor is placed at once or not at all. What
can't be placed is an ``OSError``: SGLang then sends the tensor in its message, and no segment is made that a crash could leave
behind.

With several schedulers (``--dp``), SGLang's controller gives each request to one of them when it has left the tokenizer, in
turn. A tensor has to be in the right slab before, so the tokenizer takes a turn of its own for requests that have tensors, and
says so in the request.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import shmring
from shmring.config import ClientConfig
from shmring.core.loggers import logger_of
from shmring.errors import ShmringError, WouldBlock
from shmring.integrations.reaching import KeptConnection
from shmring.integrations.sglang.settings import Settings
from shmring.integrations.traffic import Reason, Traffic, engine_gauges, reason_of

if TYPE_CHECKING:
    import torch

    from shmring.integrations.sglang.scheduler import Named

__all__ = ["Sender"]

logger = logger_of("sglang.shmring")

_CONNECT_S = 5.0  # a scheduler has its ring before SGLang says that it is ready, but may answer late; it is tried again
_ANSWER_S = 5.0  # of a scheduler that is busy
_REPORT_S = 5.0  # between two looks at a scheduler's end, for metrics
_REACHED_S = 0.25  # the same while it is not reached


class InlineError(OSError):
    """A tensor goes in SGLang's message. By this type SGLang knows a full ``/dev/shm``, and its warning quotes this text."""


class _Link(KeptConnection):
    """To one scheduler's ring."""

    def __init__(self, place: int, name: str, config: ClientConfig) -> None:
        super().__init__(f"scheduler {place}", logger)
        self._name = name
        self._config = config

    async def _connect(self) -> shmring.Client:
        return await shmring.connect(self._name, self._config, description="SGLang")

    def _connected(self) -> None:
        logger.info("shmring: tensors go through shared memory (%s)", self._name)


class Sender:
    """Of a process that tokenizes requests, for the event loop that its requests are sent in.

    Args:
        settings: the plug-in's.
        schedulers: how many there are (``--dp``).
        tokenizers: how many processes share their slabs.
        chooses: whether requests with tensors may be sent to a scheduler that is chosen here.
        public: whether SGLang's ``/metrics`` has the plug-in's.
    """

    def __init__(self, settings: Settings, *, schedulers: int, tokenizers: int, chooses: bool, public: bool) -> None:
        self._names = [settings.ring_name(place) for place in range(schedulers)]
        # As nothing is waited for, each has most of its part from the beginning.
        lease_nbytes = settings.slab_nbytes // 8 * 7 // tokenizers
        self._config = ClientConfig(lease_nbytes=lease_nbytes, connect_timeout_s=_CONNECT_S)
        self._chooses = chooses
        self._public = public
        self._turns = itertools.cycle(range(schedulers))
        self._place: int | None = 0 if schedulers == 1 else None  # where the request goes that is being sent
        self._traffic = Traffic(public=public)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._links: list[_Link] = []  # in that loop
        self._keeping_house: list[asyncio.Task[None]] = []  # one for each link: a scheduler may keep silent
        atexit.register(self._say_what_was_sent)

    # -- for each request ----------------------------------------------------------------------------------------------

    def direct(self, request: Any) -> None:
        """A request is about to be sent: finds out which scheduler gets it, and says so in it."""
        self.connect()
        if len(self._names) == 1:
            return
        self._place = request.routed_dp_rank
        if self._place is None and self._chooses and request.mm_inputs:
            connected = [place for place in range(len(self._names)) if self.is_connected(place)]
            if connected:
                self._place = next(place for place in self._turns if place in connected)
                request.routed_dp_rank = self._place

    def place(self, tensor: torch.Tensor) -> tuple[Named, Callable[[], None]]:
        """Copies a tensor into the slab.

        Returns:
            Its name for a message, and what gives it up, in any thread.

        Raises:
            InlineError: it can't be there.
        """
        place = self._place
        if place is None or not self._links:
            raise self._inline(tensor, "engine" if self._links else "connecting")
        link = self._links[place]
        if not link.is_connected:
            raise self._inline(tensor, link.reason)
        try:
            submission = link.client.submit_nowait([tensor.detach().contiguous()])
        except WouldBlock:
            raise self._inline(tensor, "space") from None
        except Exception as error:
            raise self._inline(tensor, reason_of(error, logger)) from error
        self._traffic.count("copied", tensor.nbytes)
        named = link.epoch, link.client_id, submission.request_id
        return named, functools.partial(self._give_up, submission)

    def _give_up(self, submission: shmring.Submission) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and the connection with it
            assert self._loop is not None
            self._loop.call_soon_threadsafe(submission.abort)

    def _inline(self, tensor: torch.Tensor, reason: Reason) -> InlineError:
        self._traffic.count("inline", tensor.nbytes, reason)
        return InlineError(f"shmring does not carry it: {reason}")

    # -- the connection --------------------------------------------------------------------------------------------------

    def is_connected(self, place: int) -> bool:
        """Whether tensors can be sent to a scheduler."""
        return bool(self._links) and self._links[place].is_connected

    def connect(self) -> None:
        """Goes on trying to connect, in the loop that runs; requests go before that has happened. For each request."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return
        if loop is not self._loop:
            self._loop = loop
            self._links = [_Link(place, name, self._config) for place, name in enumerate(self._names)]
            links = enumerate(self._links) if self._public else ()
            self._keeping_house = [loop.create_task(_keep_house(place, link), name="shmring") for place, link in links]
        for link in self._links:
            link.keep_trying()

    async def close(self) -> None:
        """Disconnects."""
        for task in self._keeping_house:
            task.cancel()
        await asyncio.gather(*self._keeping_house, return_exceptions=True)
        for link in self._links:
            await link.close()

    def _say_what_was_sent(self) -> None:
        if self._traffic.tensors:
            logger.info("shmring: large tensors sent: %s", self._traffic.summary())


async def _keep_house(place: int, link: _Link) -> None:
    """Shows what a scheduler reports; connects anew also where no request comes."""
    while True:
        link.keep_trying()
        has_reported = await _update_gauges(place, link)
        await asyncio.sleep(_REPORT_S if has_reported else _REACHED_S)


async def _update_gauges(place: int, link: _Link) -> bool:
    """Shows what a scheduler's end counts; returns False if it is busy, has gone, or is not reached yet."""
    try:
        report = await link.client.call("report", timeout=_ANSWER_S)
    except (ShmringError, TimeoutError):
        return False
    for key, gauge in engine_gauges().items():
        if key in report:
            gauge.labels(str(place)).set(report[key])
    return True
