"""The list of models, the server's version, and its load."""

from __future__ import annotations

import msgspec

from shmring.frontend.served_model import Served

__all__ = ["Load", "Model", "ModelList", "Version", "models_of"]


class Model(msgspec.Struct):
    """A model that is served. `max_model_len` are tokens of prompt and answer together, if there is such a limit."""

    id: str
    created: int
    object: str = "model"
    owned_by: str = "shmring"
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The answer to `GET /v1/models`."""

    data: list[Model]
    object: str = "list"


class Version(msgspec.Struct):
    """The answer to `GET /version`."""

    version: str


class Load(msgspec.Struct):
    """The answer to `GET /load`: requests that wait or run in the engines, those of all frontends."""

    server_load: int


def models_of(served: Served) -> list[Model]:
    """Returns the models that requests may name: one model under each of its names."""
    owner = "shmring (synthetic: answers are made up)" if served.description.synthetic else "shmring"
    limit = served.description.max_model_len
    return [Model(name, served.created, owned_by=owner, max_model_len=limit) for name in served.names]
