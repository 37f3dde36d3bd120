"""What a simulation is of: the compiled books, or those with their models beside, or some that tests break on purpose."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from shmring.core.compiled import ClientBook, EngineBook
from tests.model import client_book as model_client_book
from tests.model import engine_book as model_engine_book
from tests.model.pairs import PairedClientBook, PairedEngineBook


@dataclasses.dataclass(slots=True)
class Books:
    """The classes of the books of both ends."""

    engine: type[Any]
    client: type[Any]


COMPILED = Books(EngineBook, ClientBook)
PAIRS = Books(PairedEngineBook, PairedClientBook)
#: Not for simulations: compiled ends take compiled books.
MODELS = Books(model_engine_book.EngineBook, model_client_book.ClientBook)
#: Of the simulations that are made from now on.
chosen = dataclasses.replace(COMPILED)


@contextlib.contextmanager
def choosing(others: Books) -> Iterator[None]:
    """Simulations that are made inside are of these."""
    global chosen
    before, chosen = chosen, others
    try:
        yield
    finally:
        chosen = before
