"""What clients ask, what the engine answers, and the check of both.

A question is a message (:mod:`bench.messages`) that has a reply: a tensor of float32 with the same stamps, under the question's
header. The engine checks each as the consumer of a stream does, but that a client's questions may come in another order, and
none twice. What is lost ends a run by the limit of time.

A client has as many tasks as requests in flight; each asks, waits for its reply, checks it, and asks again, as the handlers of
a server do.

Invariants: a question's memory is not written between its sending and its reply, so that a transport may send from it at
any time in between; and each reply is memory of its own, as the results of a model are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from bench import messages
from bench.messages import Answer, Ask, Cell, Header, Moments, Phase, Sink, Source
from bench.results import format_nbytes
from bench.stamps import ITEM_NBYTES, CheckError, Stamps


class Case(messages.Case, frozen=True, kw_only=True):
    """A kind of request, of a tensor of float32, whose ``producers`` are clients; the reply's size is a multiple of 4, too."""

    reply_nbytes: int

    @property
    def title(self) -> str:
        return f"{format_nbytes(self.nbytes)}, {self.window} in flight of {self.producers} client{'s' * (self.producers > 1)}"

    def cell(self, **timing: Any) -> Cell:
        """Returns what processes need to run the case: as many in flight as it says, or it does not fit, and that is said."""
        return Cell(**msgspec.structs.asdict(self), **timing)


class Client:
    """The requests of one client.

    Attributes:
        source: of its questions.
        latencies_ns: round trips of those of the timed phase, from before the request was handed to the transport until
            its reply was in the hands of whoever asked.
    """

    def __init__(self, cell: Cell, number: int, moments: Moments | None = None) -> None:
        self.source = Source(cell, number, moments)
        self._tensors = [self.source.tensor.clone() for _ in range(cell.window)]
        self._reply_stamps = Stamps(cell.reply_nbytes)
        self.latencies_ns: list[int] = []

    async def ask_all(self, ask: Ask) -> None:
        """Asks until the last question of the last phase has its reply; a request that fails ends them all."""
        async with asyncio.TaskGroup() as tasks:
            for tensor in self._tensors:
                tasks.create_task(self._ask(tensor, ask))

    async def _ask(self, tensor: torch.Tensor, ask: Ask) -> None:
        while not self.source.finished:
            header = self.source.stamp(tensor)
            answer = await ask(header, tensor)
            answered_ns = time.perf_counter_ns()
            self.check(header, answer)
            del answer  # it may be a view of the transport's memory
            if header.phase == Phase.TIMED:
                self.latencies_ns.append(answered_ns - header.sent_ns)

    def check(self, header: Header, answer: Answer) -> None:
        """Compares an answer with the header of its question; raises CheckError if it is another's, or not what was sent."""
        sequence, _, _, client = header
        if answer.header != header:
            raise CheckError(f"request {sequence} of client {client} got the reply of {tuple(answer.header)}")
        self._reply_stamps.check("reply", answer.tensor, client, sequence, f" (of client {client})")


class Desk(Sink):
    """The engine's answers, and its check of every question, on one thread at a time; says when the last one was answered."""

    def __init__(self, cell: Cell, moments: Moments | None = None, finished: Callable[[], object] = lambda: None) -> None:
        super().__init__(cell, moments)
        self._finished = finished
        self._reply_stamps, self._reply_length = Stamps(cell.reply_nbytes), cell.reply_nbytes // ITEM_NBYTES
        self._early: list[set[int]] = [set() for _ in range(cell.producers)]  # questions that came before their turn

    def answer(self, header: Header, tensor: torch.Tensor) -> torch.Tensor:
        """Checks a question, and returns the content of its reply, of which only the stamps are initialised.

        Raises CheckError if it is not what was sent, or came before.
        """
        last = self.take(header, tensor)
        sequence, _, _, client = header
        while self._sequences[client] in self._early[client]:
            self._early[client].remove(self._sequences[client])
            self._sequences[client] += 1
        reply = torch.empty(self._reply_length)
        words = self._reply_stamps.words(reply)
        self._reply_stamps.write(words, client, sequence)
        if last:
            self._finished()
        return reply

    def _out_of_turn(self, sequence: int, producer: int) -> None:
        if sequence < self._sequences[producer] or sequence in self._early[producer]:
            raise CheckError(f"message {sequence} came twice{self._whose[producer]}")
        self._early[producer].add(sequence)
