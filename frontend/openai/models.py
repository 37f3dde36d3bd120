"""The list of models, the server's version, and its load."""

from __future__ import annotations

import msgspec

__all__ = ["Load", "Model", "ModelList", "Version"]


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
