"""The demo's media: three reference films, a broadcast with edited copies of parts of them, and the list of copies.

All of it is rendered by films.py and encoded with PyAV: nothing is downloaded and no ffmpeg is needed. Rendered media
are used again until VERSION changes, which is in the folder's name.
"""

import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

from monitor.demo.films import HEIGHT, WIDTH, Film, Picture

VERSION = 3  # raise it when the films or the broadcast change
FPS = 10
REFERENCE_S = 66.0
REFERENCES = (
    Film("harbour-nights", "Harbour Nights", 101, ("hills", "face", "city", "card"), REFERENCE_S),
    Film("clockwork-garden", "The Clockwork Garden", 202, ("flowers", "cells", "julia", "lines"), REFERENCE_S),
    Film("paper-planets", "Paper Planets", 303, ("wheel", "patchwork", "marble"), REFERENCE_S),
)
PROGRAMME = Film("programme", "Everything else on air", 909, ("pitch", "chart", "bubbles", "map"), 3600.0)
BROADCAST = "broadcast.ts"
_COPIES_FILE = "aired.json"

Progress = Callable[[int, int], None]  # seconds of video rendered, and their total


@dataclass(frozen=True, slots=True)
class PlantedCopy:
    """One copy in the broadcast: its seconds there, and in the reference."""

    reference: str
    edit: str
    channel_start: float
    channel_end: float
    reference_start: float
    speed: float = 1.0

    @property
    def reference_end(self) -> float:
        return self.reference_start + self.speed * (self.channel_end - self.channel_start)


# No copy starts on a whole second, as real ones are not in phase with their references. The last alert must be able to
# end before the broadcast does, so programme follows the last copy.
BROADCAST_S = 180.0
COPIES = (
    PlantedCopy("harbour-nights", "logo", 8.4, 28.4, 20.1),
    PlantedCopy("clockwork-garden", "crop", 50.7, 70.2, 10.6),
    PlantedCopy("paper-planets", "low quality", 93.2, 115.7, 31.3),
    PlantedCopy("harbour-nights", "1.25x speed", 137.9, 155.9, 41.8, speed=1.25),
)


@dataclass(frozen=True, slots=True)
class Media:
    """The folder of rendered media."""

    folder: Path

    @property
    def broadcast(self) -> Path:
        return self.folder / BROADCAST

    def reference(self, film: Film) -> Path:
        return self.folder / f"{film.name}.mp4"

    def copies(self) -> list[PlantedCopy]:
        return [PlantedCopy(**entry) for entry in json.loads((self.folder / _COPIES_FILE).read_text())]


def render_media(parent: Path, progress: Progress | None = None) -> Media:
    """The media in a folder of `parent`; rendered now unless a previous run did."""
    media = Media(parent / f"media-{VERSION}")
    if media.folder.is_dir():  # it is created by a rename, so it is complete
        return media
    unfinished = Media(parent / f"media-{VERSION}.{os.getpid()}.tmp")
    for old in parent.glob("media-*"):
        shutil.rmtree(old)
    unfinished.folder.mkdir(parents=True)
    try:
        _render_all(unfinished, progress)
        (unfinished.folder / _COPIES_FILE).write_text(json.dumps([asdict(one) for one in COPIES], indent=1))
        unfinished.folder.rename(media.folder)
    except BaseException:
        shutil.rmtree(unfinished.folder, ignore_errors=True)
        raise
    return media


def _render_all(media: Media, progress: Progress | None) -> None:
    """Renders the films and the broadcast in parallel."""
    total = int(BROADCAST_S + REFERENCE_S * len(REFERENCES))
    rendered = 0
    # spawn: a fork would copy the caller's threads.
    with ProcessPoolExecutor(min(4, os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(render_broadcast, media.broadcast): BROADCAST_S}
        jobs |= {pool.submit(render_reference, film, media.reference(film)): film.duration_s for film in REFERENCES}
        for job in as_completed(jobs):
            job.result()
            rendered += int(jobs[job])
            if progress is not None:
                progress(rendered, total)


def render_reference(film: Film, path: Path) -> None:
    """Writes the film as an MP4."""
    with path.open("wb") as file:
        _encode(file, "mp4", _span(film, 0.0, film.duration_s), crf=23)


def render_broadcast(path: Path) -> None:
    """Writes the broadcast as an MPEG-TS whose first picture is at second 0 of the stream."""
    with path.open("wb") as file:
        _encode(file, "mpegts", _broadcast_pictures(), crf=23)


def _broadcast_pictures() -> Iterator[Picture]:
    """The broadcast's pictures in order: programme with the copies in between."""
    at_s = 0.0
    for copy in COPIES:
        yield from _span(PROGRAMME, at_s, copy.channel_start - at_s)
        yield from _edited(copy)
        at_s = copy.channel_end
    yield from _span(PROGRAMME, at_s, BROADCAST_S - at_s)


def _edited(copy: PlantedCopy) -> Iterator[Picture]:
    film = next(film for film in REFERENCES if film.name == copy.reference)
    pictures = _span(film, copy.reference_start, copy.channel_end - copy.channel_start, copy.speed)
    match copy.edit:
        case "logo":
            return (_with_logo(picture) for picture in pictures)
        case "crop":
            return (_cropped(picture) for picture in pictures)
        case "low quality":
            return _re_encoded(pictures)
        case _:
            return pictures


def _span(film: Film, start_s: float, length_s: float, speed: float = 1.0) -> Iterator[Picture]:
    return (film.picture(start_s + speed * number / FPS) for number in range(round(length_s * FPS)))


def _with_logo(picture: Picture) -> Picture:
    """The picture with a station logo and a ticker."""
    image = Image.fromarray(picture)
    draw = ImageDraw.Draw(image, "RGBA")
    draw.rounded_rectangle((WIDTH - 62, 10, WIDTH - 12, 34), 5, fill=(200, 20, 40, 200))
    draw.text((WIDTH - 54, 12), "TV 5", fill=(255, 255, 255, 255), font_size=16)
    draw.rectangle((0, HEIGHT - 20, WIDTH, HEIGHT), fill=(10, 20, 70, 180))
    draw.text((12, HEIGHT - 17), "LIVE  weather: rain later, sun after that", fill=(255, 255, 255, 230), font_size=11)
    return np.asarray(image)


def _cropped(picture: Picture) -> Picture:
    """The middle 76 % of each side, scaled to full size."""
    box = (WIDTH * 0.12, HEIGHT * 0.12, WIDTH * 0.88, HEIGHT * 0.88)
    return np.asarray(Image.fromarray(picture).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, box=box))


def _re_encoded(pictures: Iterable[Picture]) -> Iterator[Picture]:
    """The pictures after an encoder with far too few bits."""
    encoded = io.BytesIO()
    _encode(encoded, "mp4", pictures, crf=42)
    encoded.seek(0)
    with av.open(encoded, "r") as container:
        for frame in container.decode(video=0):
            yield frame.to_ndarray(format="rgb24").astype(np.uint8, copy=False)


def _encode(file: io.IOBase, kind: str, pictures: Iterable[Picture], *, crf: int) -> None:
    # No delay before the first picture, so that stream time is the time of COPIES.
    options = {"max_delay": "0"} if kind == "mpegts" else {}
    with av.open(file, "w", format=kind, options=options) as container:
        stream = container.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        stream.thread_count = 1
        # A key frame every second, as in broadcasts; no B-frames, so pictures stay in order.
        stream.options = {"preset": "ultrafast", "crf": str(crf), "g": str(FPS), "bf": "0"}
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
