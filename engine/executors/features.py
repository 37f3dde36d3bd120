"""The ``features`` executor: pictures into descriptors, on the CPU, without a model.

A descriptor says what a picture looks like (see :mod:`.descriptors`); copies of a picture that were recompressed, scaled,
brightened or cropped a little stay close to it. It makes the whole path testable where there is no accelerator, and is
useful by itself for finding near-duplicates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.executors.descriptors import DESCRIPTOR_SIZE, describe_picture
from engine.protocol import EncodeReply, EncodeRequest, ModelDescription

__all__ = ["FeaturesExecutor"]

_MAX_BATCH_SIZE = 32  # a step of a few milliseconds each; more would only delay the first answer


class FeaturesExecutor:
    """Describes pictures; deterministic, stateless."""

    def describe(self) -> ModelDescription:
        return ModelDescription("features", ["encode"], DESCRIPTOR_SIZE, _MAX_BATCH_SIZE)

    def execute(self, batch: Sequence[EncodeRequest]) -> Sequence[EncodeReply | Exception]:
        return [_encode(request) for request in batch]

    def close(self) -> None:
        """Holds nothing."""


def _encode(request: EncodeRequest) -> EncodeReply | Exception:
    if not request.pictures:
        return ValueError("a request to encode holds at least one picture")
    try:
        return EncodeReply(torch.stack([describe_picture(picture.pixels) for picture in request.pictures]))
    except ValueError as error:
        # Without its traceback, whose frames would keep the pictures' slots.
        return ValueError(str(error))
