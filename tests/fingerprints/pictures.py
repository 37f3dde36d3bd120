"""The sample pictures and their quarters, altered."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from PIL import Image, ImageEnhance

from shmring.engine.fingerprints.pictures import fingerprint_picture
from tests.fingerprints.scores import Kind, sample_files, score

Alteration = Callable[[Image.Image], Image.Image]


def score_pictures() -> Iterator[Kind]:
    """Scores whole pictures, and their quarters: four of a picture are alike in colour and texture."""
    pictures = load_pictures()
    quarters = [quarter for picture in pictures for quarter in _quarters(picture)]
    for name, originals in (("Pictures", pictures), ("Quarters of pictures", quarters)):
        copies = {title: [_fingerprint(alter(picture)) for picture in originals] for title, alter in _ALTERATIONS.items()}
        yield score(name, [_fingerprint(picture) for picture in originals], copies)


def load_pictures() -> list[Image.Image]:
    """Returns the sample pictures, by name."""
    return [Image.open(io.BytesIO(file)).convert("RGB") for file in sample_files(".jpg")]


def _fingerprint(picture: Image.Image) -> torch.Tensor:
    return fingerprint_picture(torch.from_numpy(np.array(picture)))


def _quarters(picture: Image.Image) -> list[Image.Image]:
    middle_x, middle_y = picture.width // 2, picture.height // 2
    corners = [(0, 0), (middle_x, 0), (0, middle_y), (middle_x, middle_y)]
    return [picture.crop((left, top, left + middle_x, top + middle_y)) for left, top in corners]


def _jpeg(picture: Image.Image, quality: int) -> Image.Image:
    encoded = io.BytesIO()
    picture.save(encoded, "JPEG", quality=quality)
    return Image.open(encoded).convert("RGB")


def _scale(picture: Image.Image, width_factor: float, height_factor: float) -> Image.Image:
    return picture.resize((round(picture.width * width_factor), round(picture.height * height_factor)))


def _crop(picture: Image.Image, left: float, top: float, right: float, bottom: float) -> Image.Image:
    width, height = picture.size
    return picture.crop((round(width * left), round(height * top), round(width * (1 - right)), round(height * (1 - bottom))))


def _turn(picture: Image.Image, degrees: float) -> Image.Image:
    """Turns a picture in its frame: corners get lost, and black comes in."""
    return picture.rotate(degrees, Image.Resampling.BICUBIC)


def _turn_and_crop(picture: Image.Image, degrees: float) -> Image.Image:
    """Turns a picture and takes the largest part of its shape without black."""
    angle = math.radians(degrees)
    share = 1 / (math.cos(angle) + max(picture.width / picture.height, picture.height / picture.width) * math.sin(angle))
    margin = (1 - share) / 2
    return _crop(_turn(picture, degrees), margin, margin, margin, margin)


def _noisy(picture: Image.Image, deviation: float) -> Image.Image:
    noise = np.random.default_rng(1).normal(0, deviation, (picture.height, picture.width, 3))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).astype(np.uint8))


def _mirror(picture: Image.Image) -> Image.Image:
    return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


_ALTERATIONS: dict[str, Alteration] = {
    "JPEG, quality 30": lambda picture: _jpeg(picture, 30),
    "half size": lambda picture: _scale(picture, 0.5, 0.5),
    "squeezed to 3/4 of its width": lambda picture: _scale(picture, 0.75, 1),
    "30 % brighter": lambda picture: ImageEnhance.Brightness(picture).enhance(1.3),
    "30 % darker": lambda picture: ImageEnhance.Brightness(picture).enhance(0.7),
    "30 % more contrast": lambda picture: ImageEnhance.Contrast(picture).enhance(1.3),
    "grey": lambda picture: picture.convert("L").convert("RGB"),
    "noise, 20 grey levels": lambda picture: _noisy(picture, 20),
    "cropped: 10 % of width and height": lambda picture: _crop(picture, 0.05, 0.05, 0.05, 0.05),
    "cropped: 10 % on the left": lambda picture: _crop(picture, 0.1, 0, 0, 0),
    "cropped: 25 % of width and height": lambda picture: _crop(picture, 0.125, 0.125, 0.125, 0.125),
    "turned by 1 degree": lambda picture: _turn(picture, 1),
    "turned by 2 degrees": lambda picture: _turn(picture, 2),
    "turned by 5 degrees": lambda picture: _turn(picture, 5),
    "turned by 10 degrees": lambda picture: _turn(picture, 10),
    "turned by 5 degrees, black cropped": lambda picture: _turn_and_crop(picture, 5),
    "turned by 10 degrees, black cropped": lambda picture: _turn_and_crop(picture, 10),
    "turned by 90 degrees": lambda picture: picture.transpose(Image.Transpose.ROTATE_90),
    "turned by 180 degrees": lambda picture: picture.transpose(Image.Transpose.ROTATE_180),
    "flipped, left to right": _mirror,
    "flipped, upside down": lambda picture: picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    "flipped, cropped by 10 %, JPEG quality 50": lambda picture: _jpeg(_crop(_mirror(picture), 0.05, 0.05, 0.05, 0.05), 50),
    "colours inverted": lambda picture: Image.eval(picture, lambda value: 255 - value),
}
