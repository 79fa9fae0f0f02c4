"""The JPEG encoder: the bytes that Pillow writes, scaled down only where a longest side is given."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from reference_db.media.jpeg import encode_jpeg

PICTURE = np.random.default_rng(0).integers(0, 256, (192, 341, 3), np.uint8)


@pytest.mark.parametrize("quality", [70, 75, 85, 90])
def test_the_bytes_are_those_of_pillow_at_this_quality(quality: int) -> None:
    expected = io.BytesIO()
    Image.fromarray(PICTURE).save(expected, "JPEG", quality=quality)
    assert encode_jpeg(PICTURE, quality=quality) == expected.getvalue()


@pytest.mark.parametrize(("max_side", "size"), [(160, (160, 90)), (1000, (341, 192))])
def test_a_longest_side_scales_down_and_never_up(max_side: int, size: tuple[int, int]) -> None:
    with Image.open(io.BytesIO(encode_jpeg(PICTURE, quality=70, max_side=max_side))) as image:
        assert image.size == size
