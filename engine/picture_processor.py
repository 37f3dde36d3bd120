"""An image processor of Hugging Face transformers, made anew from what an engine says of it.

An engine names the processor of its model (:class:`~shmring.engine.inputs.ProcessorSpec`), and the decoders of frontends run
it. It is made of the settings that are in the message. So nothing is read from a disk or a hub, and all settings are part of
the key of kept content.

Nothing here imports torch. Making a processor imports transformers, which takes seconds, and imports torch if there is one.
"""

from __future__ import annotations

import importlib
import mmap
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmring.engine.inputs import Feature, ProcessorSpec, places_of

__all__ = ["PictureProcessor", "Processed", "write"]

#: What a processor has made of a picture: tensors, those of bfloat16 as the bits of uint16.
Processed: TypeAlias = list[tuple[Feature, NDArray[Any]]]


class PictureProcessor:
    """Processes a picture at a time.

    Args:
        spec: which one.

    Raises:
        ImportError: transformers is not installed, or is another version, or lacks what this processor needs.
        ValueError: it has no such image processor.
    """

    def __init__(self, spec: ProcessorSpec) -> None:
        transformers: Any = importlib.import_module("transformers")
        if transformers.__version__ != spec.version:
            raise ImportError(f"transformers is version {transformers.__version__} here, and {spec.version} in the engine")
        made = getattr(transformers, spec.name, None)
        base = importlib.import_module("transformers.image_processing_utils").BaseImageProcessor
        if not (isinstance(made, type) and issubclass(made, base)):
            raise ValueError(f"transformers has no image processor {spec.name!r}")
        self._processor: Any = made(**msgspec.json.decode(spec.settings))
        self._arguments: dict[str, Any] = msgspec.json.decode(spec.arguments)
        self._dtype = spec.dtype
        self._features = spec.features

    def process(self, pixels: NDArray[np.uint8]) -> Processed:
        """Makes of a picture of shape (height, width, 3), RGB, what the model takes.

        Raises:
            ValueError: the processor does not take it.
        """
        made = self._processor([pixels], return_tensors="np", **self._arguments)
        processed = []
        for name, value in made.items():
            if not isinstance(value, np.ndarray):
                raise TypeError(f"it makes no tensor of {name}")
            dtype, array = _cast(np.ascontiguousarray(value), self._dtype)
            processed.append((Feature(name, dtype, value.shape), array))
        return processed

    def process_into(self, pixels: NDArray[np.uint8], memory: mmap.mmap | bytes) -> list[Feature]:
        """Writes what the model takes of a picture, as :class:`shmring.engine.protocol.Features` have it.

        Args:
            pixels: as of :meth:`process`.
            memory: as large as :meth:`foresee` says, or larger.

        Returns:
            The layout; empty if it is not what was foreseen, and nothing was written.

        Raises:
            ValueError: the processor does not take it.
        """
        processed = self.process(pixels)
        layout = [feature for feature, _ in processed]
        if layout != self.foresee(*pixels.shape[:2]):
            return []
        write(processed, np.frombuffer(memory, np.uint8))
        return layout

    def patches(self, height: int, width: int) -> int | None:
        """Returns how many patches such a picture becomes; None if the processor does not say.

        Raises:
            ValueError: the processor does not take it.
        """
        count = getattr(self._processor, "get_number_of_image_patches", None)
        return None if count is None else int(count(height, width, dict(self._arguments)))

    def foresee(self, height: int, width: int) -> list[Feature]:
        """Returns what such a picture becomes, without processing one.

        Raises:
            ValueError: the processor does not take it.
        """
        return [
            msgspec.structs.replace(feature, shape=(self.patches(height, width) or 0, *feature.shape[1:]))
            if feature.shape[0] == 0
            else feature
            for feature in self._features
        ]


def write(processed: Processed, memory: NDArray[np.uint8]) -> None:
    """Writes tensors, each to its place."""
    starts, _ = places_of([feature for feature, _ in processed])
    for start, (_, array) in zip(starts, processed, strict=True):
        memory[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)


def _cast(array: NDArray[Any], dtype: str) -> tuple[str, NDArray[Any]]:
    """Brings numbers with a point to a dtype, which is returned; rounds as torch does, to the nearest even."""
    if array.dtype.kind != "f":
        return array.dtype.name, array
    if array.dtype != np.float32:
        raise TypeError(f"it makes {array.dtype}, which is not float32")
    if dtype == "bfloat16":
        bits = array.view(np.uint32)
        return dtype, ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return dtype, array.astype(dtype, copy=False)
