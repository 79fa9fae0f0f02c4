"""The one JPEG encoder: RGB pictures in, JPEG bytes out; each user chooses its own quality and size."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image


def encode_jpeg(picture: NDArray[np.uint8], *, quality: int, max_side: int | None = None) -> bytes:
    """The picture [height, width, 3] as a JPEG; scaled down if a side is longer than `max_side` pixels."""
    image = Image.fromarray(picture)
    if max_side is not None:
        image.thumbnail((max_side, max_side))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
