"""A look at a channel: whether it can be opened, and what it is."""

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
    """What some seconds of the channel showed, and its first picture. Raises Unreachable with the reason in words."""
    url = channel.url if "://" in channel.url else f"file://{os.path.abspath(channel.url)}"
    began = time.monotonic()
    first: tuple[float, float] | None = None  # its arrival and its own time
    last, picture = (0.0, 0.0), np.zeros((0, 0, 3), np.uint8)
    try:
        with DecodingChild(url, live=True, mode="exact", allow=channel.allow) as child:
            for frame in child.frames():
                last = (time.monotonic(), frame.pts_s)
                if first is None:
                    first, picture = last, frame.picture
                if last[0] - first[0] >= seconds or last[1] - first[1] >= 2 * seconds:
                    break
            info, keys = child.info(), list(child.key_times_s)
    except MediaError as error:
        raise Unreachable(str(error)) from error
    assert first is not None
    gaps = [b - a for a, b in pairwise(keys) if b > a]
    found = {
        "address": display_name(channel.url),
        "container": info.format,
        "codec": info.codec,
        "size": f"{info.width}x{info.height}",
        "fps": None if info.fps is None else round(info.fps, 2),
        "key_frame_every_s": round(sum(gaps) / len(gaps), 2) if gaps else None,
        "first_picture_s": round(first[0] - began, 1),
        "lag_s": round(max(0.0, (last[0] - first[0]) - (last[1] - first[1])), 1),
        "watched_s": round(last[1] - first[1], 1),
    }
    return found, picture
