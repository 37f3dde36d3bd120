"""Sizes and directions of pictures and frames."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from shmring.frontend.media.errors import MediaError
from shmring.frontend.media.geometry import as_stored, check_size, scaled_size
from tests.tables import for_each


@given(width=st.integers(1, 20_000), height=st.integers(1, 20_000), max_pixels=st.integers(1, 10_000_000))
def test_scaled_sizes_fit_and_keep_their_shape(width: int, height: int, max_pixels: int) -> None:
    found_width, found_height = scaled_size(width, height, max_pixels)
    assert 1 <= found_width <= width
    assert 1 <= found_height <= height
    assert found_width * found_height <= max_pixels
    if width * height <= max_pixels:
        assert (found_width, found_height) == (width, height)
    elif min(found_width, found_height) > 1:
        assert (found_width + 1) * (found_height + 1) > max_pixels * 0.99
        assert (found_width - 1) / (found_height + 1) < width / height < (found_width + 1) / (found_height - 1)


def test_without_a_limit_nothing_is_scaled() -> None:
    assert scaled_size(5000, 3000, None) == (5000, 3000)


@for_each("orientation", range(1, 9))
def test_what_is_written_as_stored_is_shown_turned(orientation: int) -> None:
    stored = np.random.default_rng(0).integers(0, 256, (5, 7, 3), np.uint8)
    picture = Image.fromarray(stored)
    picture.getexif()[0x0112] = orientation
    turned = np.asarray(ImageOps.exif_transpose(picture))
    target = np.zeros_like(turned)
    as_stored(target, orientation)[:] = stored
    np.testing.assert_array_equal(target, turned)


@for_each(("width", "height", "reason"), [(0, 5, "which is none"), (101, 100, "more than the 10000"), (1, 201, "200 to 1")])
def test_sizes_that_are_refused(width: int, height: int, reason: str) -> None:
    with pytest.raises(MediaError, match=f"the clip has {width} x {height} pixels.*{reason}"):
        check_size("the clip", width, height, 10_000, 200)


def test_limits_themselves_are_accepted() -> None:
    check_size("the clip", 100, 100, 10_000, 200)
    check_size("the clip", 200, 1, 10_000, 200)
