"""How the colours of a picture or a clip become sRGB: by an ICC profile, or by numbers.

What counts is what a profile does. Its name says nothing: there are profiles called sRGB that are linear, or have other
primaries. So the conversion is tried with colours from all over; if it leaves them as they are, it is left out. A profile must
be one of the picture's kind of colours. One of red, green and blue also holds for a grey picture, whose samples are then equal
parts of the three, as in browsers. Any other profile is passed over, and so is one that can't be read.

Other files say by numbers what their colours are: clips, AVIF, HEIC and PNG by those of H.273; PNG also by a power (``gAMA``)
and by the places of its primaries (``cHRM``). Shades that are nearly those of sRGB count as these, as in browsers; so what is
grey stays as it is. Shades of a high dynamic range (PQ and HLG) say how bright something is on the standard's display: 203
cd/m2, which is white in usual light (ITU-R BT.2408, 2.2), becomes the white of sRGB. So does all that is brighter, and callers
are told.

Where a file says both, a PNG's ``cICP`` goes before a profile (PNG, 3rd edition, 4.3), and a profile before all other numbers.
"""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageCms

from shmring.frontend.media.damage import Shortfall

__all__ = ["Conversion", "conversion_by_numbers", "conversion_to_srgb"]

_INVISIBLE_CHANGE = 2  # of 255. By so much do profiles of sRGB differ that were rounded in different ways
_STEP = 15  # between the shades of each colour that are tried: 18 shades, 5832 colours
_BAND_PIXELS = 1 << 16  # that are converted by numbers at a time, in floating point

_Colours = NDArray[Any]  # in floating point

# x and y of red, green, blue and white.
_D65 = (0.3127, 0.329)
_SRGB = (0.64, 0.33, 0.3, 0.6, 0.15, 0.06, *_D65)
# By numbers of H.273: colours and shades that are visibly others than those of sRGB.
_COLOURS = {
    9: ("BT.2020", (0.708, 0.292, 0.17, 0.797, 0.131, 0.046, *_D65)),
    11: ("DCI-P3", (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, 0.314, 0.351)),
    12: ("Display P3", (0.68, 0.32, 0.265, 0.69, 0.15, 0.06, *_D65)),
}
_LINEAR, _PQ, _HLG = 8, 16, 18
_HIGH_DYNAMIC_RANGE = {_PQ: "PQ", _HLG: "HLG"}
_IN_BOX, _IN_CHUNK = (re.compile(text, re.DOTALL) for text in (rb"colrnclx\0(.)\0(.)", rb"\0\0\0\x04cICP(.)(.)"))
_MAX_HEAD_NBYTES = 64 << 10
_GAMMA_OF_SRGB, _NEARLY = 1 / 2.2, 0.05  # and by which share a power may be another one: libpng's, and that of browsers
_WHITE, _LARGEST_OF_PQ, _LARGEST_OF_HLG = 203, 10_000, 1000  # cd/m2

# From a light's X, Y and Z to what an eye that adapts makes of it (Bradford, as ICC profiles use it).
_SEEN = np.array([[0.8951, 0.2664, -0.1614], [-0.7502, 1.7135, 0.0367], [0.0389, -0.0685, 1.0296]])


class Conversion(Protocol):
    """How colours become sRGB.

    Attributes:
        mode: of the pictures that are converted, as Pillow names it: ``"RGB"``, ``"L"``, ``"I;16"`` or ``"CMYK"``.
        losses: what sRGB does not have of them.
    """

    mode: str
    losses: tuple[Shortfall, ...]

    def apply(self, picture: Image.Image) -> Image.Image:
        """Returns a picture in sRGB. One of another mode is brought into the right one before."""


class _ByProfile:
    """Converts as an ICC profile says.

    Raises:
        ImageCms.PyCMSError: the profile is not one of such colours.
    """

    losses: tuple[Shortfall, ...] = ()

    def __init__(self, profile: ImageCms.ImageCmsProfile, mode: str) -> None:
        self.mode = mode
        self._transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")

    def apply(self, picture: Image.Image) -> Image.Image:
        suitable = picture if picture.mode == self.mode else picture.convert(self.mode)
        converted = ImageCms.applyTransform(suitable, self._transform)
        assert converted is not None
        return converted


class _ByNumbers:
    """Converts as numbers say.

    Args:
        colours: x and y of red, green, blue and white.
        light: of shades of 0 to 1: how much light they stand for, the white of sRGB being 1.
        shows_luminance: the light that is shown depends on the luminance of all three, as in HLG.
        losses: what sRGB does not have of them.
    """

    mode = "RGB"

    def __init__(
        self,
        colours: tuple[float, ...],
        light: Callable[[_Colours], _Colours],
        *,
        shows_luminance: bool = False,
        losses: tuple[Shortfall, ...] = (),
    ) -> None:
        self.losses = losses
        self._light_of = light(np.arange(256) / 255).astype(np.float32)
        to_xyz = _to_xyz(colours)
        self._luminance = to_xyz[1].astype(np.float32) if shows_luminance else None
        self._to_srgb = (np.linalg.inv(_to_xyz(_SRGB)) @ to_xyz).astype(np.float32)

    def apply(self, picture: Image.Image) -> Image.Image:
        samples = np.asarray(picture.convert("RGB"))
        converted = np.empty_like(samples)
        rows = max(1, _BAND_PIXELS // samples.shape[1])
        for top in range(0, len(samples), rows):
            light = self._light_of[samples[top : top + rows]]
            if self._luminance is not None:
                light *= _LARGEST_OF_HLG / _WHITE * (light @ self._luminance)[..., np.newaxis] ** 0.2
            linear = (light @ self._to_srgb.T).clip(0, 1)
            converted[top : top + rows] = _shades_of_srgb()[(linear * 0xFFFF + 0.5).astype(np.uint16)]
        return Image.fromarray(converted)


def conversion_to_srgb(image: Image.Image, data: bytes) -> Conversion | None:
    """Returns how a picture's colours become sRGB; None: they are left as they are.

    Args:
        image: the picture.
        data: its file.
    """
    if image.mode == "CMYK" or image.format not in ("PNG", "AVIF", "HEIF"):
        return _by_profile(image)
    numbers = _IN_CHUNK if image.format == "PNG" else _IN_BOX
    match = numbers.search(data[:_MAX_HEAD_NBYTES].partition(b"IDAT")[0])
    if match is not None and (image.format == "PNG" or not image.info.get("icc_profile")):
        return conversion_by_numbers(match[1][0], match[2][0])
    if image.format != "PNG" or image.info.get("icc_profile"):
        return _by_profile(image)
    return None if "srgb" in image.info else _by_power_and_places(image.info.get("gamma"), image.info.get("chromaticity"))


@functools.lru_cache(maxsize=64)
def conversion_by_numbers(colours: int, shades: int) -> Conversion | None:
    """Returns how colours become sRGB that two numbers of H.273 stand for; None: they are nearly those of sRGB.

    Args:
        colours: which red, green and blue there are ("colour primaries").
        shades: which number stands for how much light ("transfer characteristics").
    """
    name, places = _COLOURS.get(colours, ("", _SRGB))
    if shades in _HIGH_DYNAMIC_RANGE:
        name = " in ".join(part for part in (name, _HIGH_DYNAMIC_RANGE[shades]) if part)
        cause = f"its colours are {name} (HDR); in sRGB, which they were converted to, all that is brighter than white is white"
        losses = (Shortfall(missing=0, promised=0, unit="", cause=cause, is_damage=False),)
        light = _light_of_pq if shades == _PQ else _light_of_hlg
        return _ByNumbers(places, light, shows_luminance=shades == _HLG, losses=losses)
    if shades == _LINEAR:
        return _ByNumbers(places, lambda shade: shade)
    return _ByNumbers(places, _light_of_srgb) if name else None


def _by_power_and_places(gamma: object, chromaticity: object) -> Conversion | None:
    """Returns how colours become sRGB that a PNG says by a power and by places; None: as they are, or that makes no sense."""
    if gamma is None and chromaticity is None:
        return None
    light: Callable[[_Colours], _Colours] = _light_of_srgb
    places: tuple[float, ...] = _SRGB
    if isinstance(chromaticity, tuple) and len(chromaticity) == 8:
        places = (*map(float, chromaticity[2:]), *map(float, chromaticity[:2]))
    if isinstance(gamma, float) and 0 < gamma <= 10 and abs(gamma - _GAMMA_OF_SRGB) > _NEARLY * _GAMMA_OF_SRGB:
        light = functools.partial(_light_of_power, 1 / gamma)
    try:
        conversion = _ByNumbers(places, light)
    except (np.linalg.LinAlgError, ZeroDivisionError):
        return None
    return conversion if _changes_colours(conversion) else None


def _by_profile(image: Image.Image) -> Conversion | None:
    icc = image.info.get("icc_profile")
    if not isinstance(icc, bytes) or not icc:
        return None
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        mode = _mode_for(profile.profile.xcolor_space.strip(), image.mode)
        conversion = _ByProfile(profile, mode) if mode else None
        return conversion if conversion and _changes_colours(conversion) else None
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


def _mode_for(space: str, mode: str) -> str | None:
    """The mode that a picture is converted in, by the colours that its profile is of; None: they have nothing to do with it."""
    if space == "GRAY" and mode.startswith("I;16"):
        return "I;16"
    if space == "GRAY" and mode in ("1", "L", "LA"):
        return "L"
    if (space == "RGB" and mode not in ("CMYK", "LAB")) or (space == "CMYK" and mode == "CMYK"):
        return space
    return None


def _changes_colours(conversion: Conversion) -> bool:
    """Whether any colour looks different afterwards, so far as can be seen."""
    if conversion.mode == "CMYK":
        return True
    if conversion.mode == "RGB":
        shades = np.arange(0, 256, _STEP)
        before = np.stack(np.meshgrid(shades, shades, shades), axis=-1).reshape(1, -1, 3)
        samples = before.astype(np.uint8)
    else:
        before = np.repeat(np.arange(256)[np.newaxis, :, np.newaxis], 3, axis=2)
        grey = before[:, :, 0]
        samples = (grey * 0x101).astype(np.uint16) if conversion.mode == "I;16" else grey.astype(np.uint8)
    after = np.asarray(conversion.apply(Image.fromarray(samples)))
    return bool(np.abs(after - before).max() > _INVISIBLE_CHANGE)


def _to_xyz(places: tuple[float, ...]) -> _Colours:
    """From light of three colours to X, Y and Z, as an eye sees them that takes their white for that of sRGB.

    Raises:
        numpy.linalg.LinAlgError: these are no three colours.
        ZeroDivisionError: the white is none.
    """
    x, y = np.reshape(places[:6], (3, 2)).T
    primaries = np.stack([x, y, 1 - x - y])
    white = _white(*places[6:])
    seen = np.diag((_SEEN @ _white(*_D65)) / (_SEEN @ white))
    to_xyz: _Colours = np.linalg.inv(_SEEN) @ seen @ _SEEN @ (primaries * np.linalg.solve(primaries, white))
    return to_xyz


def _white(x: float, y: float) -> _Colours:
    return np.array([x / y, 1, (1 - x - y) / y])


def _light_of_srgb(shade: _Colours) -> _Colours:
    return np.where(shade <= 0.04045, shade / 12.92, ((shade + 0.055) / 1.055) ** 2.4)


def _light_of_power(power: float, shade: _Colours) -> _Colours:
    light: _Colours = shade**power
    return light


def _light_of_pq(shade: _Colours) -> _Colours:
    """ITU-R BT.2100, table 4."""
    root = shade ** (32 / 2523)
    light: _Colours = _LARGEST_OF_PQ / _WHITE * ((root - 0.8359375).clip(0) / (18.8515625 - 18.6875 * root)) ** (8192 / 1305)
    return light


def _light_of_hlg(shade: _Colours) -> _Colours:
    """Light of the scene, not of the display; ITU-R BT.2100, table 5."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    return np.where(shade <= 0.5, shade**2 / 3, (np.exp((shade - c) / a) + b) / 12)


@functools.cache
def _shades_of_srgb() -> NDArray[np.uint8]:
    """Of 65536 steps of light."""
    light = np.arange(1 << 16) / 0xFFFF
    shades = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
    samples: NDArray[np.uint8] = np.rint(255 * shades).astype(np.uint8)
    return samples
