"""Generated test clips: moving pictures that differ by seed and by second."""

import struct
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from monitor.demo.films import Film

CENC = {  # muxer options for an encrypted MP4
    "encryption_scheme": "cenc-aes-ctr",
    "encryption_key": "00112233445566778899aabbccddeeff",
    "encryption_kid": "00112233445566778899aabbccddeeff",
}


def picture(seed: int, time_s: float, width: int = 320, height: int = 180) -> NDArray[np.uint8]:
    """One picture of the film `seed`: another scene every 2 s, drifting in between."""
    scene = np.random.default_rng([seed, int(time_s // 2)])
    coarse = scene.integers(0, 256, (5, 8, 3)).astype(np.float32)
    rows = np.linspace(0, 4, height, dtype=np.float32)
    columns = np.linspace(0, 7, width, dtype=np.float32) + 0.35 * np.float32(time_s % 2)
    return np.clip(_bilinear(coarse, rows, np.minimum(columns, 6.999)), 0, 255).astype(np.uint8)


def _bilinear(
    grid: NDArray[np.float32], rows: NDArray[np.float32], columns: NDArray[np.float32]
) -> NDArray[np.float32]:
    top, left = np.minimum(rows.astype(int), grid.shape[0] - 2), columns.astype(int)
    down, right = (rows - top)[:, None, None], (columns - left)[None, :, None]
    upper = grid[top][:, left] * (1 - right) + grid[top][:, left + 1] * right
    lower = grid[top + 1][:, left] * (1 - right) + grid[top + 1][:, left + 1] * right
    result: NDArray[np.float32] = upper * (1 - down) + lower * down
    return result


def numbered(second: int, width: int = 96, height: int = 96) -> NDArray[np.uint8]:
    """A picture with its number in binary, as black and white columns (see `number_of`)."""
    bits = [(second >> bit) & 1 for bit in range(12)]
    row = np.repeat(np.array([255 if bit else 0 for bit in bits], np.uint8), -(-width // 12))[:width]
    return np.ascontiguousarray(np.broadcast_to(row[None, :, None], (height, width, 3)))


def number_of(picture: NDArray[np.uint8]) -> int:
    """The number of a `numbered` picture, read from its middle row after any scaling and compression."""
    width = picture.shape[1]
    middles = [int((bit + 0.5) * width / 12) for bit in range(12)]
    return sum((int(picture[picture.shape[0] // 2, x].mean()) > 128) << bit for bit, x in enumerate(middles))


def pieces(fps: int, *parts: tuple[Film, float, int]) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Parts of films (film, start second, length) in sequence: pictures with their times."""
    number = 0
    for film, from_s, length_s in parts:
        for n in range(length_s * fps):
            yield number / fps, film.picture(from_s + n / fps)
            number += 1


def write_clip(
    path: Path,
    pictures: Iterable[tuple[float, NDArray[np.uint8]]],
    *,
    fps: int = 10,
    codec: str = "libx264",
    gop: int = 20,
    b_frames: int = 2,
    sound: bool = False,
    pixel_aspect: Fraction | None = None,
    codec_options: dict[str, str] | None = None,
    options: dict[str, str] | None = None,
    ticks: int = 1000,
) -> Path:
    """Writes (time, picture) pairs, in order of time, as a video; the file extension selects the container."""
    with av.open(str(path), "w", options=options or {}) as container:
        stream = container.add_stream(codec, rate=fps)
        assert isinstance(stream, av.VideoStream)
        tone = container.add_stream("aac", rate=8000) if sound else None
        context = stream.codec_context
        context.time_base = Fraction(1, ticks)
        context.gop_size, context.max_b_frames, context.thread_count = gop, b_frames, 1
        context.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        context.options = {**({"preset": "ultrafast"} if codec == "libx264" else {}), **(codec_options or {})}
        if codec == "libx264" and b_frames:
            context.options = {**context.options, "bf": str(b_frames), "b-adapt": "0"}
        if pixel_aspect:
            context.sample_aspect_ratio = pixel_aspect
        last_s = 0.0
        for number, (time_s, pixels) in enumerate(pictures):
            if number == 0:
                context.height, context.width = pixels.shape[0] // 2 * 2, pixels.shape[1] // 2 * 2
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = round(time_s * ticks), Fraction(1, ticks)
            container.mux(stream.encode(frame))
            last_s = time_s
        container.mux(stream.encode())
        if tone is not None:
            _write_tone(container, tone, last_s)
    return path


def _write_tone(container: av.container.OutputContainer, stream: av.AudioStream, seconds: float) -> None:
    wave = np.sin(np.arange(int((seconds + 0.1) * 8000)) * (2 * np.pi * 440 / 8000)).astype(np.float32)
    frame = av.AudioFrame.from_ndarray(wave[None], format="fltp", layout="mono")
    frame.sample_rate, frame.pts = 8000, 0
    container.mux(stream.encode(frame))
    container.mux(stream.encode())


def write_film(
    path: Path, seed: int, seconds: float, *, fps: int = 5, width: int = 320, height: int = 180, start_s: float = 0.0
) -> Path:
    """Writes `seconds` of the film `seed`, from its second `start_s` on."""
    times = [number / fps for number in range(int(seconds * fps))]
    return write_clip(path, ((t, picture(seed, start_s + t, width, height)) for t in times), fps=fps)


def write_sound(path: Path, seconds: float = 2.0) -> Path:
    """Writes a file with sound and no pictures."""
    with av.open(str(path), "w") as container:
        _write_tone(
            container, container.add_stream("aac" if path.suffix == ".m4a" else "pcm_s16le", rate=8000), seconds
        )
    return path


def write_numbered(path: Path, times_s: Iterable[float], **clip: object) -> Path:
    """Writes `numbered` pictures at these times."""
    write: Callable[..., Path] = write_clip
    return write(path, ((t, numbered(n)) for n, t in enumerate(times_s)), **clip)


def turn_mp4(path: Path, quarter_turns: int) -> None:
    """Sets the rotation of an MP4 file (clockwise), as phones do."""
    cosine, sine = [(1, 0), (0, 1), (-1, 0), (0, -1)][quarter_turns % 4]
    matrix = struct.pack(">9i", *(v << 16 for v in (cosine, sine, 0, -sine, cosine, 0, 0, 0)), 1 << 30)
    content = bytearray(path.read_bytes())
    at = content.index(b"tkhd") + 4 + 40  # past version, times, id, duration, layer and volume
    content[at : at + 36] = matrix
    path.write_bytes(content)
