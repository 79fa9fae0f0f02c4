"""Whether a picture carries information. It does if it changes in both directions at once; bars and fades do not."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

DETAIL_SIDE = 64  # the picture is resized to 64 x 64 cells, which averages out noise
DETAIL_LEVELS = 3  # levels by which neighbouring cells differ, at any contrast
DETAIL_SHARE = 0.02  # of cells with detail, at least; films have 0.3, empty slates and black with a logo less than this


def is_informative(picture: NDArray[np.uint8]) -> bool:
    """Whether the picture has enough detail to be recognised: it is not black, flat, a plain fade or colour bars."""
    small = Image.fromarray(picture).resize((DETAIL_SIDE, DETAIL_SIDE), Image.Resampling.BOX)
    cells = np.asarray(small, np.int16)
    across = np.abs(cells[:-1, 1:] - cells[:-1, :-1]) > DETAIL_LEVELS
    down = np.abs(cells[1:, :-1] - cells[:-1, :-1]) > DETAIL_LEVELS
    detailed = (across[..., 0] | across[..., 1] | across[..., 2]) & (down[..., 0] | down[..., 1] | down[..., 2])
    return bool(detailed.mean() >= DETAIL_SHARE)
