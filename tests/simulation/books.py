"""Which books a simulation is of: the compiled ones; their models, which tests can break on purpose; or both side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

from shmring.core.client_book import ClientBook
from shmring.core.engine_book import EngineBook
from tests.model import client_book as model_client_book
from tests.model import engine_book as model_engine_book
from tests.model.pairs import PairedClientBook, PairedEngineBook

__all__ = ["COMPILED", "MODELS", "PAIRS", "Books", "chosen"]


@dataclasses.dataclass(slots=True)
class Books:
    """The classes of the books of both ends."""

    engine: type[Any]
    client: type[Any]


COMPILED = Books(EngineBook, ClientBook)
MODELS = Books(model_engine_book.EngineBook, model_client_book.ClientBook)
PAIRS = Books(PairedEngineBook, PairedClientBook)

#: Of the simulations that are made from now on.
chosen = dataclasses.replace(COMPILED)
