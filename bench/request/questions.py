"""What clients ask, what the engine answers, and the check of both.

A question is a float32 tensor with stamps (:mod:`bench.stamps`) under a header: the client's index and a sequence number of
that client. The engine checks them, and that no question comes twice; it answers with a tensor that holds the same stamp at
both ends, and the client checks those. What is lost ends a run by the limit of time.

Invariants: a question's memory is not written between its sending and its reply, so that a transport may send from it at
any time in between; and each reply is memory of its own, as the results of a model are.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from bench import stamps
from bench.results import format_nbytes
from bench.stamps import ITEM_NBYTES, CheckError

__all__ = ["MAX_CLIENTS", "Answer", "Case", "Cell", "Desk", "Header", "Question", "checks_us"]

MAX_CLIENTS = 64

_CHECKS = 2000  # rounds over which the cost of the checks alone is taken: some ten milliseconds


class Case(msgspec.Struct, frozen=True):
    """A kind of request.

    Attributes:
        nbytes: size of a question's tensor, a multiple of 4.
        in_flight: requests that each client has in flight.
        clients: processes that ask.
        reply_nbytes: size of a reply's tensor, a multiple of 4.
    """

    nbytes: int
    in_flight: int
    clients: int
    reply_nbytes: int

    @property
    def title(self) -> str:
        """The case in words."""
        several = "s" * (self.clients > 1)
        return f"{format_nbytes(self.nbytes)}, {self.in_flight} in flight of {self.clients} client{several}"

    @property
    def ends(self) -> int:
        """How many processes ask."""
        return self.clients

    @property
    def total_nbytes(self) -> int:
        """Bytes of questions in flight, of all clients."""
        return self.nbytes * self.in_flight * self.clients

    def cell(self, **timing: Any) -> Cell:
        """Returns what processes need to run the case."""
        return Cell(**msgspec.structs.asdict(self), **timing)


class Cell(Case, frozen=True, kw_only=True):
    """One measurement: what to ask, how much at a time, for how long.

    Attributes:
        warm_up_s, timed_s: how long they do; all at the same time.
        limit_s: after which the whole measurement has failed.
        directory: for sockets; private to this run.
        corrupt_question, corrupt_answer: for tests of the checks: the sequence number of what is spoiled.
    """

    warm_up_s: float
    timed_s: float
    limit_s: float
    directory: str
    corrupt_question: int | None = None
    corrupt_answer: int | None = None


class Header(NamedTuple):
    """Which question this is; its answer carries the same."""

    client: int
    sequence: int


class Answer(NamedTuple):
    """A reply, as it came out of a transport."""

    header: Header
    tensor: torch.Tensor


def _check(what: str, header: Header, tensor: torch.Tensor, length: int, places: tuple[int, ...]) -> None:
    """Raises CheckError if a tensor is not so many float32, or does not hold the header's stamp."""
    wrong = stamps.wrong_form(tensor, torch.float32, (length,))
    wrong = wrong or stamps.wrong_content(tensor.numpy().view(np.int32), header.client, header.sequence, places)
    if wrong is not None:
        raise CheckError(f"{what} {header.sequence} of client {header.client} {wrong}")


class Question:
    """The memory of one request at a time: as many of them as a client has in flight.

    Attributes:
        tensor: float32, one-dimensional; what is sent.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._reply_length = cell.reply_nbytes // ITEM_NBYTES
        array = np.ones(cell.nbytes // ITEM_NBYTES, np.float32)
        self.tensor = torch.from_numpy(array)
        self._words: Any = array.view(np.int32).data

    def stamp(self, header: Header) -> None:
        """Makes it the question of a header."""
        spoiled = header.sequence == self._cell.corrupt_question
        stamps.write(self._words, header.client, header.sequence, spoiled=spoiled)

    def check(self, header: Header, answer: Answer) -> None:
        """Compares an answer with the question's header.

        Raises:
            CheckError: it is another's, or not what the engine sent.
        """
        if answer.header != header:
            raise CheckError(f"request {tuple(header)} (client, sequence) got the reply of {tuple(answer.header)}")
        _check("reply", header, answer.tensor, self._reply_length, (0, self._reply_length - 1))


class _Seen:
    """Which sequence numbers of a client have come: all below one, and the few that came before their turn."""

    def __init__(self) -> None:
        self._below = 0
        self._early: set[int] = set()

    def add(self, header: Header) -> None:
        sequence = header.sequence
        if sequence < self._below or sequence in self._early:
            raise CheckError(f"request {sequence} of client {header.client} came twice")
        if sequence != self._below:
            self._early.add(sequence)
            return
        self._below += 1
        while self._early and self._below in self._early:
            self._early.remove(self._below)
            self._below += 1


class Desk:
    """The engine's answers. Used by one thread at a time.

    Attributes:
        answered: how many questions it has checked and answered.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self._length = cell.nbytes // ITEM_NBYTES
        self._reply_length = cell.reply_nbytes // ITEM_NBYTES
        self._seen = [_Seen() for _ in range(cell.clients)]
        self.answered = 0

    def answer(self, header: Header, tensor: torch.Tensor) -> torch.Tensor:
        """Checks a question, and returns the content of its reply.

        Returns:
            float32, one-dimensional, of ``reply_nbytes``, in memory that nobody else has; what is between its first and its
            last item is not initialised.

        Raises:
            CheckError: it is not what was sent, or came before.
        """
        self._seen[header.client].add(header)
        _check("request", header, tensor, self._length, stamps.places(header.sequence, self._length))
        reply = np.empty(self._reply_length, np.int32)
        reply[0] = reply[-1] = stamps.value(header.client, header.sequence)
        if header.sequence == self._cell.corrupt_answer:
            reply[-1] += 1
        self.answered += 1
        return torch.from_numpy(reply.view(np.float32))


def checks_us(cell: Cell) -> tuple[float, float]:
    """Returns microseconds of CPU that stamping and checking take by themselves: a client's, the engine's; per request."""
    question, desk = Question(cell), Desk(cell)
    headers = [Header(0, sequence) for sequence in range(_CHECKS)]
    started = time.thread_time()
    answers = []
    for header in headers:
        question.stamp(header)
        answers.append(Answer(header, desk.answer(header, question.tensor)))
        question.check(header, answers[-1])
    both_s = time.thread_time() - started
    started = time.thread_time()
    for header, answer in zip(headers, answers, strict=True):
        question.stamp(header)
        question.check(header, answer)
    client_s = time.thread_time() - started
    return client_s / _CHECKS * 1e6, max(0.0, both_s - client_s) / _CHECKS * 1e6
