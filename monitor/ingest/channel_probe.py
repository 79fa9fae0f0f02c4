"""Probe of a channel: whether it can be opened, and what it delivers."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from monitor.config.settings import ChannelSettings
from monitor.errors import Unreachable
from reference_db.errors import MediaError
from reference_db.media.addresses import display_name
from reference_db.media.decoding import DecodingChild


def probe_channel(channel: ChannelSettings, seconds: float) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Facts about the channel from so many seconds of it, and its first picture. Raises Unreachable. Blocks."""
    url = channel.url if "://" in channel.url else f"file://{os.path.abspath(channel.url)}"
    started_s = time.monotonic()
    first: tuple[float, float] | None = None  # arrival and presentation time of the first frame
    last, picture = (0.0, 0.0), np.zeros((0, 0, 3), np.uint8)
    try:
        with DecodingChild(url, live=True, mode="exact", allow=channel.allow, private=channel.private) as child:
            for frame in child.frames():
                last = (time.monotonic(), frame.pts_s)
                if first is None:
                    first, picture = last, frame.picture
                if last[0] - first[0] >= seconds or last[1] - first[1] >= 2 * seconds:
                    break
            info, keys = child.info(), [key.pts_s for key in child.keys]
    except MediaError as error:
        raise Unreachable(str(error)) from error
    assert first is not None
    distances_s = [b - a for a, b in pairwise(keys) if b > a]
    facts = {
        "address": display_name(channel.url),
        "container": info.format,
        "codec": info.codec,
        "size": f"{info.width}x{info.height}",
        "fps": None if info.fps is None else round(info.fps, 2),
        "key_frame_every_s": round(sum(distances_s) / len(distances_s), 2) if distances_s else None,
        "first_picture_s": round(first[0] - started_s, 1),
        "lag_s": round(max(0.0, (last[0] - first[0]) - (last[1] - first[1])), 1),
        "watched_s": round(last[1] - first[1], 1),
    }
    return facts, picture
