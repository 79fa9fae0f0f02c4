"""Small clips, generated."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np


def write_clip(path: Path, *, seconds: int, seed: int, fps: int = 10) -> None:
    """A clip in which a random texture slides past and changes every three seconds."""
    rng = np.random.default_rng(seed)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        stream.time_base = Fraction(1, fps)
        texture = rng.integers(0, 256, (8, 24, 3), dtype=np.uint8)
        for k in range(seconds * fps):
            if k % (3 * fps) == 0:
                texture = rng.integers(0, 256, (8, 24, 3), dtype=np.uint8)
            moved = np.roll(texture.repeat(8, 0).repeat(8, 1), -k, axis=1)[:, :96]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(moved), format="rgb24")))
        container.mux(stream.encode())
