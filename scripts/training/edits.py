"""Random spatial edits, as copiers make them: training teaches the networks to ignore them.

`draw_edit` fixes all parameters in an `Edit`, which then does the same to every picture of a clip; only noise differs
from picture to picture. An edit does not change the size of a picture. All lengths are shares of the sides of the
picture, so one edit applies to any size.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Picture = NDArray[np.uint8]  # [h, w, 3] RGB
Colour = tuple[int, int, int]
Box = tuple[float, float, float, float]  # left, top, right, bottom as shares of the sides
Corners = tuple[tuple[float, float], ...]  # top left, top right, bottom right, bottom left, as shares of the sides

SQUARE: Corners = ((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0))
BILINEAR = Image.Resampling.BILINEAR
LETTERS = "ABCDEFGHIJKLMNOPRSTUVWZ abcdefghiklmnoprstuvwz 0123456789 .,:!-"


class EditStep(Protocol):
    """One operation on a picture; it does not change its size."""

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image: ...


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """Steps with all parameters fixed, so that all pictures of a clip are edited alike."""

    steps: tuple[EditStep, ...]

    def __call__(self, picture: Picture, rng: np.random.Generator) -> Picture:
        """The edited picture, of the same shape; rng is used for noise only."""
        image = Image.fromarray(picture)
        for step in self.steps:
            image = step(image, rng)
        return np.array(image, dtype=np.uint8)


# --- geometry ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Crop:
    """The box alone, stretched over the full picture."""

    box: Box

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        return picture.resize(picture.size, BILINEAR, box=_to_pixels(self.box, picture.size))


@dataclass(frozen=True, slots=True, eq=False)
class Inset:
    """The picture squeezed into a box: borders, letterbox, picture-in-picture and split screen, by box and backdrop."""

    box: Box
    backdrop: Picture | Colour | None  # None: the picture itself, blurred and enlarged, as players of upright videos do

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        canvas = _canvas(picture, self.backdrop)
        left, top, right, bottom = (round(x) for x in _to_pixels(self.box, picture.size))
        canvas.paste(picture.resize((max(8, right - left), max(8, bottom - top)), BILINEAR), (left, top))
        return canvas


@dataclass(frozen=True, slots=True)
class Warp:
    """The four corners moved (top left, top right, bottom right, bottom left); the outside has one colour."""

    corners: Corners  # where the output's corners lie in the input, as shares
    outside: Colour

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        coefficients = _perspective(SQUARE, self.corners, picture.size)
        return picture.transform(
            picture.size, Image.Transform.PERSPECTIVE, coefficients, BILINEAR, fillcolor=self.outside
        )


@dataclass(frozen=True, slots=True, eq=False)
class FilmedScreen:
    """The picture on a screen that a camera films at an angle, in front of a backdrop."""

    corners: Corners  # where the corners of the picture lie in the output, as shares
    backdrop: Picture | Colour | None  # as of Inset

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        canvas = _canvas(picture, self.backdrop)
        coefficients = _perspective(self.corners, SQUARE, picture.size)
        opaque = picture.copy()
        opaque.putalpha(255)
        shown = opaque.transform(picture.size, Image.Transform.PERSPECTIVE, coefficients, BILINEAR)
        canvas.paste(shown, (0, 0), shown)
        return canvas


def _canvas(picture: Image.Image, backdrop: Picture | Colour | None) -> Image.Image:
    """A canvas of the picture's size: another picture, one colour, or the picture itself, blurred and enlarged."""
    if backdrop is None:
        tiny = picture.resize((12, 12), BILINEAR, box=_to_pixels((0.2, 0.2, 0.8, 0.8), picture.size))
        return tiny.resize(picture.size, BILINEAR)
    if isinstance(backdrop, tuple):
        return Image.new("RGB", picture.size, backdrop)
    return Image.fromarray(backdrop).resize(picture.size, BILINEAR)


def _perspective(start: Corners, end: Corners, size: tuple[int, int]) -> tuple[float, ...]:
    """Coefficients, in pixels, of the perspective that maps the start corners to the end corners, given as shares."""
    w, h = size
    rows, values = [], []
    for (x, y), (u, v) in zip(start, end, strict=True):
        rows += [[x, y, 1, 0, 0, 0, -u * x, -u * y], [0, 0, 0, x, y, 1, -v * x, -v * y]]
        values += [u, v]
    a, b, c, d, e, f, g, k = np.linalg.solve(np.array(rows, np.float64), np.array(values))
    # In pixels: x = column / w and so on, both before and after.
    return (a, b * w / h, c * w, d * h / w, e, f * h, g / w, k / h)


@dataclass(frozen=True, slots=True)
class Flip:
    """Left and right exchanged."""

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)


# --- colour -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recolour:
    """A linear map of RGB and a gamma after it."""

    matrix: tuple[float, ...]  # 3 x 4, row by row; the last column in grey levels
    gamma: float

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        mapped = picture.convert("RGB", self.matrix)
        if self.gamma == 1.0:
            return mapped
        return mapped.point([round(255 * (i / 255) ** self.gamma) for i in range(256)] * 3)


@dataclass(frozen=True, slots=True, eq=False)
class Blend:
    """Another picture blended in, as in a cross-fade or a large watermark."""

    other: Picture
    share: float

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        return Image.blend(picture, Image.fromarray(self.other).resize(picture.size, BILINEAR), self.share)


# --- overlays ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TextBox:
    """A box with text in it; without a fill, text alone."""

    box: Box
    words: str
    fill: tuple[int, int, int, int] | None
    ink: tuple[int, int, int, int]
    round_shape: bool = False


@dataclass(frozen=True, slots=True)
class Overlay:
    """Text boxes drawn over the picture: logos, tickers, subtitles, banners."""

    boxes: tuple[TextBox, ...]

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        layer = _draw_layer(self.boxes, picture.size)
        out = picture.copy()
        out.paste(layer, (0, 0), layer)
        return out


@lru_cache(maxsize=8)
def _draw_layer(boxes: tuple[TextBox, ...], size: tuple[int, int]) -> Image.Image:
    layer = Image.new("RGBA", size)
    draw = ImageDraw.Draw(layer)
    for one in boxes:
        left, top, right, bottom = _to_pixels(one.box, size)
        if one.fill is not None:
            (draw.ellipse if one.round_shape else draw.rectangle)((left, top, right, bottom), fill=one.fill)
        if one.words:
            font = _font(max(6, int((bottom - top) * 0.8)))
            edge = 1 if one.fill is None else 0
            draw.text((left, top), one.words, one.ink, font, stroke_width=edge, stroke_fill=(0, 0, 0, one.ink[3]))
    return layer


@lru_cache(maxsize=64)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


# --- quality ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blur:
    """Out of focus; the radius is a share of the shorter side."""

    radius: float

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        return picture.filter(ImageFilter.GaussianBlur(self.radius * min(picture.size)))


@dataclass(frozen=True, slots=True)
class Rescale:
    """Reduced and enlarged again."""

    factor: float
    blocky: bool

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        w, h = picture.size
        method = Image.Resampling.NEAREST if self.blocky else BILINEAR
        return picture.resize((max(8, int(w * self.factor)), max(8, int(h * self.factor))), method).resize(
            (w, h), method
        )


@dataclass(frozen=True, slots=True)
class Noise:
    """Grain: different in every picture."""

    sigma: float
    grey: bool

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        pixels = np.asarray(picture, dtype=np.float32)
        shape = (*pixels.shape[:2], 1) if self.grey else pixels.shape
        pixels = pixels + self.sigma * rng.standard_normal(shape, dtype=np.float32)
        return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@dataclass(frozen=True, slots=True)
class Jpeg:
    """Compressed strongly."""

    quality: int

    def __call__(self, picture: Image.Image, rng: np.random.Generator) -> Image.Image:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=self.quality)
        return Image.open(buffer).convert("RGB")


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw_edit(
    rng: np.random.Generator, strength: float = 1.0, backdrop: Picture | None = None, inside: float = 0.0
) -> Edit:
    """A random edit; strength 0 changes pictures hardly at all, 1 is the strongest that copiers do.

    backdrop, if given, is another picture: behind a picture-in-picture, beside a split screen, or blended in.
    inside: share of edits drawn by `draw_inside`; the others may have an inset or a split too, but rarely do.
    """
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be within 0 and 1, got {strength}")
    if inside and rng.random() < inside:
        return draw_inside(rng, strength, backdrop)
    groups: list[tuple[float, Callable[[np.random.Generator, float, Picture | None], list[EditStep]]]] = [
        (0.85, draw_geometry),
        (0.65, draw_colour),
        (0.55, draw_overlays),
        (0.65, draw_quality),
    ]
    if rng.random() < 0.3:  # a copy of a copy: any order
        groups = [groups[i] for i in rng.permutation(len(groups))]
    frequency = 0.4 + 0.6 * strength
    steps: list[EditStep] = []
    for chance, draw in groups:
        if rng.random() < chance * frequency:
            steps += draw(rng, strength, backdrop)
    return Edit(tuple(steps))


def draw_inside(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> Edit:
    """The picture inside another one: an inset, one side of a split screen, or a filmed screen.

    The picture is small there, so what is done to it before and to the full picture after is mild.
    """
    steps: list[EditStep] = [Flip()] if rng.random() < 0.15 * strength else []
    for chance, draw in ((0.25, _crop), (0.4, draw_colour)):
        if rng.random() < chance:
            steps += draw(rng, 0.6 * strength, backdrop)
    behind = _random_backdrop(rng, backdrop, 0.85)
    kind = rng.choice(["inset", "split", "screen"], p=[0.45, 0.3, 0.25])
    steps += {"inset": _framed_inset, "split": _split_beside, "screen": _filmed_screen}[str(kind)](
        rng, strength, behind
    )
    for chance, draw in ((0.3, draw_overlays), (0.2, draw_colour), (0.5, draw_quality)):
        if rng.random() < chance:
            steps += draw(rng, 0.4 * strength, None)
    return Edit(tuple(steps))


def _framed_inset(rng: np.random.Generator, strength: float, behind: Picture | Colour | None) -> list[EditStep]:
    """An inset, some with a frame around it or a webcam in front of a corner."""
    steps: list[EditStep] = []
    if rng.random() < 0.25:
        w, h = rng.uniform(0.15, 0.35, 2)
        x, y = rng.choice([0.0, 1 - w]), rng.choice([0.0, 1 - h])
        steps.append(Overlay((TextBox((x, y, x + w, y + h), "", (*_random_ink(rng)[:3], 255), (0, 0, 0, 0)),)))
    if rng.random() < 0.3:
        edge = rng.uniform(0.01, 0.04)
        steps.append(Inset((edge, edge, 1 - edge, 1 - edge), _random_colour(rng)))
    w, h = np.clip((1 - strength * rng.uniform(0.2, 0.67)) * np.exp(rng.normal(0, 0.1, 2)), 0.28, 0.97)
    x, y = rng.random() * (1 - w), rng.random() * (1 - h)
    return [*steps, Inset((x, y, x + w, y + h), behind)]


def _filmed_screen(rng: np.random.Generator, strength: float, behind: Picture | Colour | None) -> list[EditStep]:
    """A screen seen at an angle; it fills most of the picture, and its corners may lie outside."""
    size = 1.05 - strength * rng.uniform(0, 0.5)
    angle = math.radians(strength * rng.uniform(-8, 8))
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    corners = size * (np.array(SQUARE) - 0.5) @ turn.T + strength * size * rng.uniform(-0.1, 0.1, (4, 2))
    corners += 0.5 + max(0.0, 1 - size) * rng.uniform(-0.5, 0.5, 2)
    return [FilmedScreen(tuple((float(x), float(y)) for x, y in corners), behind)]


def draw_geometry(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    """Flip, and one or two of: crop, borders, bars, picture-in-picture, split screen, warp."""
    steps: list[EditStep] = [Flip()] if rng.random() < 0.3 * strength else []
    kinds = ["crop", "zoom", "borders", "bars", "inset", "split", "warp"]
    chances = np.array([0.22, 0.1, 0.1, 0.14, 0.18 * strength, 0.12 * strength, 0.18])
    for kind in rng.choice(kinds, size=1 if rng.random() < 0.7 else 2, p=chances / chances.sum()):
        steps += _GEOMETRY[kind](rng, strength, backdrop)
    return steps


def _crop(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    keep_x, keep_y = 1 - strength * 0.5 * rng.random(2) ** 1.3
    x, y = rng.random() * (1 - keep_x), rng.random() * (1 - keep_y)
    return [Crop((x, y, x + keep_x, y + keep_y))]


def _zoom(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    edge = strength * 0.22 * rng.random()
    return [Crop((edge, edge, 1 - edge, 1 - edge))]


def _borders(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    left, top, right, bottom = strength * 0.2 * rng.random(4)
    return [Inset((left, top, 1 - right, 1 - bottom), _random_backdrop(rng, None))]


def _bars(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    bar = (0.04 + 0.2 * rng.random()) * (0.3 + 0.7 * strength)
    wide = rng.random() < 0.5
    steps: list[EditStep] = []
    if rng.random() < 0.4:  # the aspect is retained, so the long side loses its ends
        steps.append(Crop((bar, 0, 1 - bar, 1) if wide else (0, bar, 1, 1 - bar)))
    black = (0, 0, 0)
    behind = black if rng.random() < 0.7 else _random_backdrop(rng, None)
    return [*steps, Inset((0, bar, 1, 1 - bar) if wide else (bar, 0, 1 - bar, 1), behind)]


def _inset(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    size = 1 - strength * (0.12 + 0.56 * rng.random())
    w, h = np.clip(size * np.exp(rng.normal(0, 0.08, 2)), 0.3, 0.97)
    x, y = rng.random() * (1 - w), rng.random() * (1 - h)
    return [Inset((x, y, x + w, y + h), _random_backdrop(rng, backdrop))]


def _split(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    return _split_beside(rng, strength, _random_backdrop(rng, backdrop))


def _split_beside(rng: np.random.Generator, strength: float, behind: Picture | Colour | None) -> list[EditStep]:
    share = rng.uniform(0.42, 0.7)
    across, first, squeezed = rng.random(3) < (0.65, 0.5, 0.4)
    start, end = (0.0, share) if first else (1 - share, 1.0)
    middle = (1 - share) * rng.random()
    cut = (middle, 0.0, middle + share, 1.0) if across else (0.0, middle, 1.0, middle + share)
    box = (start, 0.0, end, 1.0) if across else (0.0, start, 1.0, end)
    steps: list[EditStep] = [] if squeezed else [Crop(cut)]
    return [*steps, Inset(box, behind)]


def _warp(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    angle = math.radians(strength * rng.uniform(-15, 15)) if rng.random() < 0.6 else 0.0
    jitter = strength * rng.uniform(-0.1, 0.1, (4, 2)) if rng.random() < 0.6 else np.zeros((4, 2))
    zoom = 1 - strength * rng.uniform(-0.05, 0.25)
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)]) * zoom
    turn = np.array([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    moved = corners @ turn.T + 0.5 + jitter
    return [Warp(tuple((float(x), float(y)) for x, y in moved), _random_colour(rng))]


_GEOMETRY: dict[str, Callable[[np.random.Generator, float, Picture | None], list[EditStep]]] = {
    "crop": _crop,
    "zoom": _zoom,
    "borders": _borders,
    "bars": _bars,
    "inset": _inset,
    "split": _split,
    "warp": _warp,
}


def draw_colour(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    """One linear map for grey, hue, saturation, tint, contrast and brightness, and a gamma."""
    saturation = 0.0 if rng.random() < 0.25 * strength else float(np.exp(strength * rng.normal(0, 0.5)))
    spread = math.pi if rng.random() < 0.3 * strength else 0.4 * strength
    hue = rng.uniform(-spread, spread) if rng.random() < 0.5 else 0.0
    contrast = float(np.exp(strength * rng.uniform(-0.6, 0.5)))
    brightness = strength * rng.uniform(-50, 50)
    tint = np.exp(strength * rng.normal(0, 0.12, 3))
    luma = np.array([0.299, 0.587, 0.114])
    grey = np.ones((3, 1)) * luma
    third, root = (1 - math.cos(hue)) / 3, math.sin(hue) / math.sqrt(3)
    circle = np.array([[0, -1, 1], [1, 0, -1], [-1, 1, 0]])  # a turn about the grey axis
    turn = math.cos(hue) * np.eye(3) + third * np.ones((3, 3)) + root * circle
    mix = tint[:, None] * (contrast * (grey + saturation * (turn - grey)))
    offset = np.full(3, 127.5 * (1 - contrast) + brightness)
    matrix = tuple(float(x) for x in np.hstack([mix, offset[:, None]]).ravel())
    gamma = float(np.exp(strength * rng.uniform(-0.7, 0.7))) if rng.random() < 0.5 else 1.0
    steps: list[EditStep] = [Recolour(matrix, gamma)]
    if backdrop is not None and rng.random() < 0.08 * strength:
        steps.append(Blend(backdrop, rng.uniform(0.1, 0.35)))
    return steps


def draw_overlays(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    """One to three of: logo, ticker, subtitles, banner, box."""
    boxes: list[TextBox] = []
    for kind in rng.choice(["logo", "ticker", "subtitles", "banner", "box"], size=rng.integers(1, 4)):
        boxes += _TEXT_BOXES[kind](rng, strength)
    return [Overlay(tuple(boxes))]


def _logo(rng: np.random.Generator, strength: float) -> list[TextBox]:
    w, h = (0.08 + 0.2 * strength * rng.random(2)) * (1.0, 0.8)
    x = 0.04 if rng.random() < 0.5 else 0.96 - w
    y = 0.04 if rng.random() < 0.6 else 0.96 - h
    fill = _random_ink(rng) if rng.random() < 0.7 else None
    return [TextBox((x, y, x + w, y + h), _random_words(rng, 2, 6), fill, _random_ink(rng), bool(rng.random() < 0.4))]


def _ticker(rng: np.random.Generator, strength: float) -> list[TextBox]:
    h = 0.05 + 0.1 * strength * rng.random()
    y = (1 - h) if rng.random() < 0.8 else rng.uniform(0, 0.06)
    return [TextBox((0, y, 1, y + h), _random_words(rng, 30, 60), _random_ink(rng), _random_ink(rng))]


def _subtitles(rng: np.random.Generator, strength: float) -> list[TextBox]:
    h = 0.05 + 0.05 * strength * rng.random()
    y = rng.uniform(0.65, 0.92) if rng.random() < 0.85 else rng.uniform(0.02, 0.2)
    white = (255, 255, rng.choice([255, 80]).item(), 255)
    boxes = []
    for line in range(rng.integers(1, 3)):
        x = rng.uniform(0.05, 0.35)
        fill = (0, 0, 0, 150) if rng.random() < 0.25 else None
        boxes.append(TextBox((x, y - line * h, 1 - x, y - line * h + h), _random_words(rng, 8, 32), fill, white))
    return boxes


def _banner(rng: np.random.Generator, strength: float) -> list[TextBox]:
    h = 0.12 + 0.2 * strength * rng.random()
    x, w = rng.uniform(0, 0.15), rng.uniform(0.5, 1.0)
    y = rng.uniform(0.6, 1 - h) if rng.random() < 0.8 else 0.0
    upper = TextBox((x, y, x + w, y + h / 2), _random_words(rng, 8, 20), _random_ink(rng), _random_ink(rng))
    return [
        upper,
        TextBox((x, y + h / 2, x + w, y + h), _random_words(rng, 10, 30), _random_ink(rng), _random_ink(rng)),
    ]


def _box(rng: np.random.Generator, strength: float) -> list[TextBox]:
    w, h = 0.1 + 0.35 * strength * rng.random(2)
    x, y = rng.random() * (1 - w), rng.random() * (1 - h)
    return [
        TextBox(
            (x, y, x + w, y + h), _random_words(rng, 0, 8), _random_ink(rng), _random_ink(rng), bool(rng.random() < 0.3)
        )
    ]


_TEXT_BOXES: dict[str, Callable[[np.random.Generator, float], list[TextBox]]] = {
    "logo": _logo,
    "ticker": _ticker,
    "subtitles": _subtitles,
    "banner": _banner,
    "box": _box,
}


def draw_quality(rng: np.random.Generator, strength: float, backdrop: Picture | None) -> list[EditStep]:
    """One to three of: blur, down and up, noise, JPEG."""
    steps: list[EditStep] = []
    for kind in rng.permutation(["blur", "rescale", "noise", "jpeg"])[: rng.integers(1, 4)]:
        if kind == "blur":
            steps.append(Blur(strength * rng.uniform(0.002, 0.018)))
        elif kind == "rescale":
            steps.append(Rescale(1 - strength * rng.uniform(0.2, 0.78), bool(rng.random() < 0.35)))
        elif kind == "noise":
            steps.append(Noise(strength * rng.uniform(3, 32), bool(rng.random() < 0.4)))
        else:
            steps.append(Jpeg(int(95 - strength * rng.uniform(30, 90))))
    return steps


def _random_backdrop(
    rng: np.random.Generator, backdrop: Picture | None, chance: float = 0.6
) -> Picture | Colour | None:
    if backdrop is not None and rng.random() < chance:
        return backdrop
    return None if rng.random() < 0.35 else _random_colour(rng)


def _random_colour(rng: np.random.Generator) -> Colour:
    if rng.random() < 0.5:
        return (0, 0, 0)
    r, g, b = (int(x) for x in rng.integers(0, 256, 3))
    return (r, g, b)


def _random_ink(rng: np.random.Generator) -> tuple[int, int, int, int]:
    r, g, b = (int(x) for x in rng.integers(0, 256, 3))
    alpha = 255 if rng.random() < 0.6 else int(rng.integers(90, 255))
    return (r, g, b, alpha)


def _random_words(rng: np.random.Generator, least: int, most: int) -> str:
    return "".join(LETTERS[i] for i in rng.integers(0, len(LETTERS), rng.integers(least, most + 1)))


def _to_pixels(box: Box, size: tuple[int, int]) -> Box:
    w, h = size
    left, top, right, bottom = box
    return (max(0.0, left) * w, max(0.0, top) * h, min(1.0, right) * w, min(1.0, bottom) * h)
