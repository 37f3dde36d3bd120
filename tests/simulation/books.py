"""Which books a simulation is of: the compiled ones; their models, which tests can break on purpose; or both side by side."""

from __future__ import annotations

import dataclasses
from typing import Any

from shmring.core.engine_book import EngineBook
from tests.model import engine_book as model_engine_book
from tests.model.pairs import PairedEngineBook

__all__ = ["COMPILED", "MODELS", "PAIRS", "Books", "chosen"]


@dataclasses.dataclass(slots=True)
class Books:
    """The classes of the books of both ends."""

    engine: type[Any]


COMPILED = Books(EngineBook)
MODELS = Books(model_engine_book.EngineBook)
PAIRS = Books(PairedEngineBook)

#: Of the simulations that are made from now on.
chosen = dataclasses.replace(COMPILED)
