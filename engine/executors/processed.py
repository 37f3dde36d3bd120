"""Pictures that frontends have processed, and which processor that may be.

The expansion of a picture's place to its tokens, and what else a model's processor does around pictures, stays the
architecture's: the processor is called as always, and where it would call its image processor, it is given what that had made
(:class:`GivenFeatures`).

Whether that is right is found out by trying (:func:`find_processor`): two pictures of unlike sizes are processed one by one, by
an image processor that was made anew from its description, as frontends do it. What the whole processor makes of them must be
the same, bit for bit, as what it makes of their pixels. Some pad pictures to a common size, or count them by prompts: then
pictures are processed in the engine.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from shmring.engine.inputs import ITEM_NBYTES, Feature, ProcessorSpec, places_of
from shmring.engine.picture_processor import PictureProcessor, Processed, write
from shmring.engine.protocol import Features, Medium, Picture

__all__ = ["GivenFeatures", "check_features", "find_processor"]

# Height and width of the pictures that are tried: unlike shapes, and one of more than a megapixel, which many scale down.
_SIZES = ((64, 96), (150, 70), (1000, 1200))
_MAX_SPEC_NBYTES = 16 << 10  # of a processor's description: it is part of each job of a decoder


class GivenFeatures:
    """Stands where a processor has its image processor, and returns what it was given.

    Args:
        original: the image processor. Pictures that come as pixels are processed by it.
        dtype: of the model.

    Attributes:
        original, dtype: as given.
        arguments: of the last call, but for the pictures.
    """

    def __init__(self, original: Any, dtype: torch.dtype) -> None:
        self.original = original
        self.dtype = dtype
        self.arguments: dict[str, Any] = {}
        self._given: list[dict[str, torch.Tensor] | None] = []  # of pictures in their order; None: they come as pixels
        self._stood_in: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def giving(self, media: Sequence[Medium]) -> Iterator[None]:
        """Has the pictures among these for the calls in the block."""
        pictures = [medium for medium in media if isinstance(medium, Picture | Features)]
        self._given = [medium.tensors() if isinstance(medium, Features) else None for medium in pictures]
        del pictures
        try:
            yield
        finally:
            self._given = []
            self._stood_in = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def __call__(self, images: Any, *arguments: Any, **options: Any) -> Any:
        """Returns the features of all pictures, or what the original makes of their pixels."""
        self.arguments = options
        if not any(self._given):
            return self.original(images, *arguments, **options)
        flat = importlib.import_module("transformers.image_utils").make_flat_list_of_images(images)
        all_of = [
            dict(self.original([image], *arguments, **options)) if features is None else features
            for image, features in zip(flat, self._given, strict=True)
        ]
        joined = {name: torch.cat([self._cast(features[name]) for features in all_of]) for name in all_of[0]}
        made = importlib.import_module("transformers").BatchFeature(data={})
        for name, value in joined.items():
            made[name] = value
            if value.is_floating_point():  # processors look at shapes only, and some by way of numpy, which has no bfloat16
                made[name] = torch.zeros(()).expand(value.shape)
                self._stood_in[name] = made[name], value
        return made

    def complete(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Puts the features into what the processor has made of them, where others stood for them.

        Raises:
            NotImplementedError: the processor changes them.
        """
        for name, (stand_in, value) in self._stood_in.items():
            if inputs.get(name) is not stand_in:
                raise NotImplementedError(f"the processor changes {name}")
            inputs[name] = value
        return inputs

    def _cast(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self.dtype) if value.is_floating_point() else value


def check_features(features: Features, spec: ProcessorSpec | None) -> None:
    """Checks what a frontend has sent.

    Raises:
        ValueError: a processor does not make this.
    """
    expected = () if spec is None else spec.features
    fits = len(features.layout) == len(expected) > 0 and all(
        min(found.shape, default=0) > 0
        and found == Feature(feature.name, feature.dtype, (feature.shape[0] or found.shape[0], *feature.shape[1:]))
        for found, feature in zip(features.layout, expected, strict=True)
    )
    content = features.content
    fits = fits and content.dtype == torch.uint8 and content.shape == (places_of(features.layout)[1],)
    if fits and any(feature.shape[0] == 0 for feature in expected):  # the others count patches: so many tokens follow
        counts = [tensor.double() for tensor in features.tensors().values() if not tensor.is_floating_point()]
        fits = all(bool((count >= 0).all()) and float(count.clamp(min=1).prod()) <= len(content) for count in counts)
    if not fits:
        raise ValueError("the features of a picture are not those that the model's image processor makes")


def find_processor(given: GivenFeatures, build: Callable[[Sequence[Picture | Features]], dict[str, Any]]) -> ProcessorSpec:
    """Finds out by trying what frontends may run in place of an image processor.

    Args:
        given: stands in its place.
        build: makes inputs of a prompt with these pictures.

    Raises:
        NotImplementedError: why they may not.
    """
    generator = torch.Generator().manual_seed(0)
    pixels = [torch.randint(0, 256, (*size, 3), dtype=torch.uint8, generator=generator) for size in _SIZES]
    expected = build([Picture(picture) for picture in pixels[:2]])
    arguments = {name: value for name, value in given.arguments.items() if name != "return_tensors"}
    spec = _describe(given, arguments)
    processor = PictureProcessor(spec)
    made = [processor.process(picture.numpy()) for picture in pixels]
    patches = [processor.patches(*size) for size in _SIZES]
    spec = msgspec.structs.replace(spec, features=_foreseen([[feature for feature, _ in each] for each in made], patches))
    packed = [_pack(processed) for processed in made]
    for features in packed:
        check_features(features, spec)
    found = build(packed[:2])
    for name in expected.keys() | found.keys():
        left, right = expected.get(name), found.get(name)
        if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
            raise NotImplementedError(f"{name} is not always a tensor")
        if not torch.equal(left.to(right.dtype) if left.is_floating_point() else left, right):
            raise NotImplementedError(f"{name} of two pictures is not that of one and that of the other")
    return spec


def _describe(given: GivenFeatures, arguments: Mapping[str, Any]) -> ProcessorSpec:
    spec = ProcessorSpec(
        importlib.import_module("transformers").__version__,
        type(given.original).__name__,
        msgspec.json.encode(msgspec.json.decode(given.to_json_string()), order="sorted").decode(),
        msgspec.json.encode(arguments, order="sorted").decode(),
        str(given.dtype).removeprefix("torch."),
        needs_torch=getattr(given, "backend", None) != "pil",
    )
    if len(msgspec.json.encode(spec)) > _MAX_SPEC_NBYTES:
        raise NotImplementedError("its description is too long")
    return spec


def _pack(processed: Processed) -> Features:
    """Returns processed tensors as frontends send them."""
    layout = [feature for feature, _ in processed]
    content = torch.zeros(places_of(layout)[1], dtype=torch.uint8)
    write(processed, content.numpy())
    return Features(content, layout)


def _foreseen(layouts: Sequence[Sequence[Feature]], patches: Sequence[int | None]) -> tuple[Feature, ...]:
    """Returns what an image processor makes of any picture, after what it has made of some."""
    features: list[Feature] = []
    for same in zip(*layouts, strict=True):
        name, dtype, shape = same[0].name, same[0].dtype, same[0].shape
        if dtype not in ITEM_NBYTES or not shape or 0 in shape:
            raise NotImplementedError(f"{name} is of {dtype} and shape {shape}")
        if any(feature != same[0] for feature in same):
            counted = [Feature(name, dtype, (count or 0, *shape[1:])) for count in patches]
            if counted != [*same]:
                raise NotImplementedError(f"it does not say how large {name} will be")
            shape = (0, *shape[1:])
        features.append(Feature(name, dtype, shape))
    return tuple(features)
