"""What a simulation is of: the compiled books and ends; their models, which tests can break on purpose; or pairs of books."""

from __future__ import annotations

import dataclasses
from typing import Any

from shmring.core import client_end, engine_end
from shmring.core.client_book import ClientBook
from shmring.core.engine_book import EngineBook
from tests.model import client_book as model_client_book
from tests.model import engine_book as model_engine_book
from tests.model.pairs import PairedClientBook, PairedEngineBook
from tests.simulation import ends

__all__ = ["COMPILED", "MODELS", "PAIRS", "Books", "chosen"]


@dataclasses.dataclass(slots=True)
class Books:
    """The classes of the books of both ends, and of the ends."""

    engine: type[Any]
    client: type[Any]
    engine_end: type[Any] = ends.EngineEnd
    client_end: type[Any] = ends.ClientEnd

    @property
    def are_ends_compiled(self) -> bool:
        """Whether the ends are those of the product; they take compiled books only."""
        return self.engine_end is engine_end.EngineEnd


COMPILED = Books(EngineBook, ClientBook, engine_end.EngineEnd, client_end.ClientEnd)
MODELS = Books(model_engine_book.EngineBook, model_client_book.ClientBook)
PAIRS = Books(PairedEngineBook, PairedClientBook)

#: Of the simulations that are made from now on.
chosen = dataclasses.replace(COMPILED)
