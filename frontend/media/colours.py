"""ICC profiles: how the colours of a picture become sRGB.

What counts is what a profile does. Its name says nothing: there are profiles called sRGB that are linear, or have other
primaries. So the conversion is tried with colours from all over; if it leaves them as they are, it is left out.

Some files say by numbers what their colours are (H.273), and have no profile. Those that would look different are told to the
caller, and used as they are: of high dynamic range there is no agreed way to sRGB.

A profile must be one of the picture's kind of colours. One of red, green and blue also holds for a grey picture, whose samples
are then equal parts of the three, as in browsers. Any other profile is passed over, and so is one that can't be read.
"""

from __future__ import annotations

import io
import re

import numpy as np
from PIL import Image, ImageCms

__all__ = ["Conversion", "conversion_to_srgb", "unconverted_colours"]

_INVISIBLE_CHANGE = 2  # of 255. By so much do profiles of sRGB differ that were rounded in different ways
# Numbers of H.273: of colours and of shades that are visibly others than those of sRGB.
_COLOURS = {9: "BT.2020", 10: "XYZ", 11: "DCI-P3", 12: "Display P3"}
_SHADES = {8: "linear light", 16: "PQ", 18: "HLG"}
_IN_BOX, _IN_CHUNK = (re.compile(text, re.DOTALL) for text in (rb"colrnclx\0(.)\0(.)", rb"\0\0\0\x04cICP(.)(.)"))
_NUMBERS = {"PNG": _IN_CHUNK, "AVIF": _IN_BOX, "HEIF": _IN_BOX}
_MAX_HEAD_NBYTES = 64 << 10
_STEP = 15  # between the shades of each colour that are tried: 18 shades, 5832 colours


class Conversion:
    """How a picture's colours become sRGB.

    Args:
        profile: that the colours are in.
        mode: of the pictures that are converted, as Pillow names it: ``"RGB"``, ``"L"``, ``"I;16"`` or ``"CMYK"``.

    Attributes:
        mode: of the pictures that are converted.

    Raises:
        ImageCms.PyCMSError: the profile is not one of such colours.
    """

    def __init__(self, profile: ImageCms.ImageCmsProfile, mode: str) -> None:
        self.mode = mode
        self._transform = ImageCms.buildTransform(profile, ImageCms.createProfile("sRGB"), mode, "RGB")

    def apply(self, picture: Image.Image) -> Image.Image:
        """Returns a picture in sRGB. One of another mode is brought into the right one before."""
        suitable = picture if picture.mode == self.mode else picture.convert(self.mode)
        converted = ImageCms.applyTransform(suitable, self._transform)
        assert converted is not None
        return converted

    def changes_colours(self) -> bool:
        """Whether any colour looks different afterwards, so far as can be seen."""
        if self.mode == "CMYK":
            return True
        if self.mode == "RGB":
            shades = np.arange(0, 256, _STEP)
            before = np.stack(np.meshgrid(shades, shades, shades), axis=-1).reshape(1, -1, 3)
            samples = before.astype(np.uint8)
        else:
            before = np.repeat(np.arange(256)[np.newaxis, :, np.newaxis], 3, axis=2)
            grey = before[:, :, 0]
            samples = (grey * 0x101).astype(np.uint16) if self.mode == "I;16" else grey.astype(np.uint8)
        after = np.asarray(self.apply(Image.fromarray(samples)))
        return bool(np.abs(after - before).max() > _INVISIBLE_CHANGE)


def conversion_to_srgb(image: Image.Image) -> Conversion | None:
    """Returns how a picture's colours become sRGB; None: they are left as they are."""
    icc = image.info.get("icc_profile")
    if not isinstance(icc, bytes) or not icc:
        return None
    try:
        profile = ImageCms.ImageCmsProfile(io.BytesIO(icc))
        mode = _mode_for(profile.profile.xcolor_space.strip(), image.mode)
        conversion = Conversion(profile, mode) if mode else None
        return conversion if conversion and conversion.changes_colours() else None
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


def unconverted_colours(image: Image.Image, data: bytes) -> str:
    """Returns what the colours of a picture are by the numbers in its file; nothing if it has a profile, or looks like sRGB.

    Args:
        image: the picture, decoded.
        data: its file.
    """
    numbers = _NUMBERS.get(image.format or "")
    match = numbers.search(data[:_MAX_HEAD_NBYTES].partition(b"IDAT")[0]) if numbers else None
    if match is None or image.info.get("icc_profile"):
        return ""
    colours, shades = b"".join(match.groups())
    names = _COLOURS.get(colours), _SHADES.get(shades)
    return " in ".join(name for name in names if name)


def _mode_for(space: str, mode: str) -> str | None:
    """The mode that a picture is converted in, by the colours that its profile is of; None: they have nothing to do with it."""
    if space == "GRAY" and mode.startswith("I;16"):
        return "I;16"
    if space == "GRAY" and mode in ("1", "L", "LA"):
        return "L"
    if (space == "RGB" and mode not in ("CMYK", "LAB")) or (space == "CMYK" and mode == "CMYK"):
        return space
    return None
