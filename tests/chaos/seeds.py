"""Small intact clips of every supported codec and container, for `corpus` to damage."""

from __future__ import annotations

import os
import zlib
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

from tests.support.media import turn_mp4

SECONDS, FPS, SOUND_RATE = 2, 5, 16_000
os.environ.setdefault("SVT_LOG", "1")  # errors only; the AV1 encoder logs a lot


@dataclass(frozen=True)
class Seed:
    """One intact clip."""

    codec: str
    ending: str
    options: dict[str, str] = field(default_factory=dict)
    pixels: str = "yuv420p"
    size: tuple[int, int] = (64, 64)
    sound: str = ""  # audio codec
    varies: bool = False  # variable frame rate
    quarter_turns: int = 0


FAST = {"preset": "ultrafast"}
X265 = {**FAST, "x265-params": "log-level=none"}
VPX = {"cpu-used": "8", "deadline": "realtime"}
SVT = {"preset": "12", "svtav1-params": "lp=1"}
ODD = (65, 49)
SEEDS = {
    "h264-mp4": Seed("libx264", "mp4", {**FAST, "bf": "2"}, sound="aac"),
    "h264-varies-mp4": Seed("libx264", "mp4", FAST, varies=True),
    "h264-turned-mp4": Seed("libx264", "mp4", FAST, size=(64, 48), quarter_turns=1),
    "h264-ts": Seed("libx264", "ts", FAST),
    "h264-flv": Seed("libx264", "flv", FAST, sound="aac"),
    "h264-odd-mkv": Seed("libx264", "mkv", FAST, "yuv444p", ODD),
    "hevc-mp4": Seed("libx265", "mp4", X265),
    "hevc-ts": Seed("libx265", "ts", X265, sound="mp2"),
    "hevc-10-bit-mkv": Seed("libx265", "mkv", X265, "yuv420p10le"),
    "mpeg2-ts": Seed("mpeg2video", "ts", {"bf": "2"}, sound="mp2"),
    "mpeg2-avi": Seed("mpeg2video", "avi"),
    "mpeg4-avi": Seed("mpeg4", "avi"),
    "mpeg4-ts": Seed("mpeg4", "ts"),
    "vp9-webm": Seed("libvpx-vp9", "webm", VPX, sound="libopus"),
    "vp9-odd-webm": Seed("libvpx-vp9", "webm", VPX, size=ODD, varies=True),
    "vp8-webm": Seed("libvpx", "webm", VPX),
    "av1-mp4": Seed("libsvtav1", "mp4", SVT),
    "av1-10-bit-webm": Seed("libsvtav1", "webm", SVT, "yuv420p10le"),
    "mjpeg-avi": Seed("mjpeg", "avi", pixels="yuvj420p", sound="pcm_s16le"),
    "mjpeg-odd-mkv": Seed("mjpeg", "mkv", pixels="yuvj420p", size=ODD),
}


def seed_file(name: str, folder: Path) -> Path:
    """Writes one of the intact clips."""
    seed, path = SEEDS[name], folder / f"{name}.{SEEDS[name].ending}"
    luck, ticks = np.random.default_rng(zlib.crc32(name.encode())), 20 * FPS
    with av.open(str(path), "w") as container:
        stream = container.add_stream(seed.codec, rate=FPS)
        assert isinstance(stream, av.VideoStream)
        tone = container.add_stream(seed.sound, rate=SOUND_RATE, layout="mono") if seed.sound else None
        context = stream.codec_context
        context.width, context.height = seed.size
        context.gop_size, context.thread_count, context.pix_fmt = FPS, 1, seed.pixels
        context.time_base, context.options = Fraction(1, ticks if seed.varies else FPS), seed.options
        for n in range(SECONDS * FPS):
            coarse = luck.integers(0, 255, (7, 9, 3), dtype=np.uint8)
            picture = coarse.repeat(10, 0).repeat(10, 1)[: seed.size[1], : seed.size[0]]
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts, frame.time_base = n, Fraction(1, FPS)
            if seed.varies:
                frame.pts, frame.time_base = 20 * n + int(luck.integers(20)), Fraction(1, ticks)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
        if isinstance(tone, av.AudioStream):
            tone.codec_context.bit_rate = 32_000
            _add_tone(container, tone)
    if seed.quarter_turns:
        turn_mp4(path, seed.quarter_turns)
    return path


def _add_tone(container: av.container.OutputContainer, stream: av.AudioStream) -> None:
    wave = np.sin(np.arange(SECONDS * SOUND_RATE) / 9) * 8000
    frame = av.AudioFrame.from_ndarray(wave.astype(np.int16)[None], format="s16", layout="mono")
    frame.sample_rate, frame.pts = SOUND_RATE, 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode())
