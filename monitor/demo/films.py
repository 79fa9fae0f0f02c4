"""Synthetic films: a seed in, detailed moving pictures out, the same on every machine and at any time.

A film is a sequence of scenes of a few seconds. Each scene is one large painting, a camera that moves over it and
shapes that fly past, so that a picture costs about a millisecond. `Film.picture(t)` needs no earlier picture: a copy at
1.25x speed is the film sampled at other times.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 320, 180
# The painting is larger than the picture, so that the camera can move.
_CANVAS_WIDTH, _CANVAS_HEIGHT = 512, 288
_SCENE_S = (3.0, 6.0)

Picture = NDArray[np.uint8]  # [HEIGHT, WIDTH, 3] RGB
Palette = NDArray[np.float64]  # [5, 3], dark to light, 0-255
Painter = Callable[[np.random.Generator, Palette], Image.Image]


@dataclass(frozen=True, slots=True)
class Film:
    """A film with a picture for every time."""

    name: str
    title: str
    seed: int
    painters: tuple[str, ...]
    duration_s: float

    def picture(self, at_s: float) -> Picture:
        """The picture at this second of the film."""
        number, age, length = _scene_at(self.seed, at_s)
        scene = _scene(self.seed, number, self.painters)
        return scene.picture(age / length)


@lru_cache(maxsize=64)
def _cuts(seed: int, n_scenes: int) -> NDArray[np.float64]:
    return np.cumsum(np.random.default_rng([seed, 0]).uniform(*_SCENE_S, n_scenes))


def _scene_at(seed: int, at_s: float) -> tuple[int, float, float]:
    """Number of the scene, seconds since its start, its length."""
    cuts = _cuts(seed, 16 + 16 * int(at_s / (16 * _SCENE_S[0])))
    number = int(np.searchsorted(cuts, at_s, side="right"))
    start = float(cuts[number - 1]) if number else 0.0
    return number, at_s - start, float(cuts[number]) - start


@dataclass(frozen=True, slots=True, eq=False)
class _Scene:
    painting: Image.Image
    camera: NDArray[np.float64]  # [2, 3]: centre x, centre y, share of the canvas seen; at the cut and at the end
    actors: tuple["_Actor", ...]

    def picture(self, progress: float) -> Picture:
        x, y, share = self.camera[0] + (self.camera[1] - self.camera[0]) * progress
        half_width, half_height = share * _CANVAS_WIDTH / 2, share * _CANVAS_HEIGHT / 2
        x = half_width + x * (_CANVAS_WIDTH - 2 * half_width)
        y = half_height + y * (_CANVAS_HEIGHT - 2 * half_height)
        box = (x - half_width, y - half_height, x + half_width, y + half_height)
        image = self.painting.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR, box=box)
        draw = ImageDraw.Draw(image)
        for actor in self.actors:
            actor.draw(draw, progress)
        return np.asarray(image)


@dataclass(frozen=True, slots=True, eq=False)
class _Actor:
    """A polygon that flies over the picture and turns."""

    path: NDArray[np.float64]  # [2, 2]: x, y at the cut and at the end, in picture sizes
    radii: NDArray[np.float64]  # [corners], pixels
    turns: float
    colour: tuple[int, int, int]
    edge: tuple[int, int, int]

    def draw(self, draw: ImageDraw.ImageDraw, progress: float) -> None:
        x, y = (self.path[0] + (self.path[1] - self.path[0]) * progress) * (WIDTH, HEIGHT)
        angles = np.arange(len(self.radii)) * (2 * math.pi / len(self.radii)) + 2 * math.pi * self.turns * progress
        corners = np.stack([x + self.radii * np.cos(angles), y + self.radii * np.sin(angles)], axis=1)
        draw.polygon([(float(px), float(py)) for px, py in corners], fill=self.colour, outline=self.edge, width=2)


@lru_cache(maxsize=8)
def _scene(seed: int, number: int, painters: tuple[str, ...]) -> _Scene:
    rng = np.random.default_rng([seed, 1, number])
    painting = PAINTERS[_order(seed, number, painters)](rng, _palette(rng))
    camera = np.column_stack([rng.random((2, 2)), rng.uniform(0.55, 1.0, 2)])
    return _Scene(painting, camera, tuple(_actor(rng) for _ in range(rng.integers(1, 5))))


def _order(seed: int, number: int, painters: tuple[str, ...]) -> str:
    """The painter of a scene: every painter once per round, in another order each round, so that no film repeats."""
    turn, place = divmod(number, len(painters))
    order = np.random.default_rng([seed, 2, turn]).permutation(len(painters))
    return painters[int(order[place])]


def _actor(rng: np.random.Generator) -> _Actor:
    corners = int(rng.integers(3, 9))
    radii = rng.uniform(8, 30) * np.where(np.arange(corners * 2) % 2, 1.0, rng.uniform(0.4, 1.1))
    colour, edge = (tuple(int(c) for c in rng.integers(0, 256, 3)) for _ in range(2))
    return _Actor(rng.uniform(-0.1, 1.1, (2, 2)), radii, float(rng.uniform(-1, 1)), _rgb(colour), _rgb(edge))


def _rgb(values: object) -> tuple[int, int, int]:
    red, green, blue = (int(v) for v in np.clip(np.asarray(values, dtype=float), 0, 255))
    return red, green, blue


def _palette(rng: np.random.Generator) -> Palette:
    """Five colours from dark to light around one to three hues."""
    hues = rng.random() + rng.choice([0.03, 0.12, 0.33, 0.5]) * np.arange(5)
    saturations = rng.uniform(0.25, 1.0, 5)
    values = np.linspace(rng.uniform(0.05, 0.3), rng.uniform(0.8, 1.0), 5)
    wheel = np.clip(np.abs((hues[:, None] * 6 + np.array([0.0, 4.0, 2.0])) % 6 - 3) - 1, 0, 1)
    colours: Palette = 255 * values[:, None] * (1 - saturations[:, None] * (1 - wheel))
    return colours


def _noise(rng: np.random.Generator, coarsest: int = 3, octaves: int = 5) -> NDArray[np.float64]:
    """Clouds over the canvas, 0-1: random grids, each twice as fine and half as strong as the last."""
    total = np.zeros((_CANVAS_HEIGHT, _CANVAS_WIDTH))
    for octave in range(octaves):
        cells = coarsest * 2**octave
        grid = Image.fromarray(rng.random((cells, cells * 2), dtype=np.float32))
        total += np.asarray(grid.resize((_CANVAS_WIDTH, _CANVAS_HEIGHT), Image.Resampling.BICUBIC)) / 2**octave
    return np.interp(total, (total.min(), total.max()), (0, 1))


def _coloured(values: NDArray[np.float64], palette: Palette) -> Image.Image:
    """A picture of values 0-1 [h, w], each as its colour in the palette."""
    steps = np.linspace(0, 1, len(palette))
    table = np.stack([np.interp(np.linspace(0, 1, 256), steps, palette[:, c]) for c in range(3)], axis=1)
    return Image.fromarray(table.astype(np.uint8)[(np.clip(values, 0, 1) * 255).astype(np.uint8)])


def _grid() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """y and x of every pixel, -1 to 1 down and -16/9 to 16/9 across."""
    ys, xs = np.mgrid[-1 : 1 : _CANVAS_HEIGHT * 1j, -16 / 9 : 16 / 9 : _CANVAS_WIDTH * 1j]
    return ys, xs


def _hills(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Ridges behind ridges under a sky with a sun."""
    ys, xs = _grid()
    sky = _coloured((1 - ys) / 2 * 0.6 + _noise(rng) * 0.4, palette[::-1] if rng.random() < 0.5 else palette)
    sun_x, sun_y, sun_r = rng.uniform(-1.2, 1.2), rng.uniform(-0.8, 0), rng.uniform(0.1, 0.3)
    picture = np.asarray(sky).astype(np.float64)
    picture[np.hypot(xs - sun_x, ys - sun_y) < sun_r] = palette[4] * 0.5 + 127
    texture = _noise(rng, 12, 4)
    layers = int(rng.integers(3, 6))
    for layer in range(layers):
        ridge = _noise(rng, 2, 5)[0] * rng.uniform(0.5, 1.1) - 0.3 + 0.9 * layer / layers
        ground = palette[layer % 5] * (0.4 + 0.8 * texture[..., None])
        picture = np.where((ys > ridge[None, :])[..., None], ground, picture)
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def _city(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Houses with lit windows in front of an evening."""
    picture = _coloured(_noise(rng, 2, 3) * 0.3 + np.linspace(0, 0.7, _CANVAS_HEIGHT)[:, None], palette)
    draw = ImageDraw.Draw(picture)
    left = -10
    while left < _CANVAS_WIDTH:
        width, height = int(rng.integers(24, 80)), int(rng.integers(70, 260))
        wall = palette[rng.integers(0, 3)] * rng.uniform(0.3, 0.9)
        draw.rectangle((left, _CANVAS_HEIGHT - height, left + width, _CANVAS_HEIGHT), fill=_rgb(wall))
        step, pane = int(rng.integers(9, 16)), int(rng.integers(3, 7))
        for x in range(left + 4, left + width - pane, step):
            for y in range(_CANVAS_HEIGHT - height + 6, _CANVAS_HEIGHT, step):
                lit = rng.random() < 0.6
                draw.rectangle((x, y, x + pane, y + pane + 2), fill=_rgb(palette[4] if lit else wall * 0.6))
        left += width + int(rng.integers(-4, 12))
    return picture


def _face(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Heads in front of a wall."""
    picture = _coloured(_noise(rng, 4, 3) * 0.5 + rng.uniform(0, 0.5), palette)
    draw = ImageDraw.Draw(picture)
    for number in range(int(rng.integers(1, 4))):
        x, y, r = 110 + 150 * number + rng.uniform(-30, 30), rng.uniform(120, 180), rng.uniform(55, 85)
        skin, hair = (_rgb(rng.uniform(40, 250, 3)) for _ in range(2))
        draw.ellipse((x - r * 1.6, y + r * 0.9, x + r * 1.6, y + r * 4), fill=_rgb(rng.uniform(0, 255, 3)))
        draw.ellipse((x - r * 1.1, y - r * 1.4, x + r * 1.1, y + r * rng.uniform(0.2, 1.2)), fill=hair)
        draw.ellipse((x - r * 0.85, y - r, x + r * 0.85, y + r * 1.15), fill=skin)
        for side in (-1, 1):
            eye, wide = x + side * r * 0.35, r * rng.uniform(0.1, 0.2)
            draw.ellipse((eye - wide, y - r * 0.25, eye + wide, y + wide), fill=(250, 250, 250))
            draw.ellipse((eye - wide / 2, y - r * 0.15, eye + wide / 2, y + wide / 2), fill=(20, 20, 20))
        draw.arc((x - r * 0.5, y, x + r * 0.5, y + r * 0.8), 20, 160, fill=(150, 20, 30), width=6)
    return picture


def _card(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Lines of words on coloured bands."""
    words = "NORTH RIVER PAPER CLOCK WINTER ENGINE VIOLET HARBOUR COPPER SIGNAL GARDEN MARBLE".split()  # noqa: SIM905
    picture = Image.new("RGB", (_CANVAS_WIDTH, _CANVAS_HEIGHT), _rgb(palette[rng.integers(0, 5)]))
    draw = ImageDraw.Draw(picture)
    top = 0
    while top < _CANVAS_HEIGHT:
        height = int(rng.integers(36, 96))
        draw.rectangle((0, top, _CANVAS_WIDTH, top + height), fill=_rgb(palette[rng.integers(0, 5)]))
        line = " ".join(rng.choice(words, 3))
        draw.text((rng.uniform(-60, 60), top), line, fill=_rgb(rng.uniform(0, 255, 3)), font=_font(int(height * 0.8)))
        top += height
    return picture


@lru_cache(maxsize=128)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _marble(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Veins: noise bent by noise."""
    ys, xs = _grid()
    bent = xs * rng.uniform(-4, 4) + ys * rng.uniform(-4, 4) + 7 * _noise(rng, 2, 5)
    return _coloured(np.abs(np.sin(bent * rng.uniform(1, 2.5))), palette)


def _julia(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """A Julia set, coloured by how near each orbit came to the middle."""
    ys, xs = _grid()
    z = (xs + 1j * ys) * rng.uniform(0.6, 1.1) * np.exp(1j * rng.uniform(0, 6))
    c = 0.7885 * np.exp(1j * rng.uniform(0, 2 * math.pi))
    nearest = np.full(z.shape, np.inf)
    for _ in range(20):
        z = np.where(np.abs(z) < 4, z * z + c, 4)
        nearest = np.minimum(nearest, np.abs(z))
    return _coloured(np.abs(np.sin(np.log(nearest + 0.01) * rng.uniform(1.5, 4))), palette)


def _cells(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Stained glass: every pixel belongs to its nearest point."""
    ys, xs = _grid()
    points = rng.uniform((-1, -1.8), (1, 1.8), (int(rng.integers(12, 45)), 2))
    away = np.stack([(ys - y) ** 2 + (xs - x) ** 2 for y, x in points])
    nearest, owner = np.sqrt(away.min(axis=0)), away.argmin(axis=0)
    shade = 1.1 - nearest * rng.uniform(0.8, 2.5)
    colours = palette[rng.integers(0, 5, len(points))] * rng.uniform(0.5, 1.2, (len(points), 1))
    return Image.fromarray(np.clip(colours[owner] * shade[..., None], 0, 255).astype(np.uint8))


def _flowers(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Blossoms in grass."""
    picture = _coloured(_noise(rng, 16, 4), palette)
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(10, 40))):
        x, y, r = rng.uniform(0, _CANVAS_WIDTH), rng.uniform(0, _CANVAS_HEIGHT), rng.uniform(8, 38)
        petals, colour = int(rng.integers(4, 10)), _rgb(rng.uniform(60, 255, 3))
        for petal in range(petals):
            px, py = (x + r * f(2 * math.pi * petal / petals) for f in (math.cos, math.sin))
            draw.ellipse((px - r * 0.6, py - r * 0.6, px + r * 0.6, py + r * 0.6), fill=colour, outline=(30, 30, 30))
        draw.ellipse((x - r * 0.5, y - r * 0.5, x + r * 0.5, y + r * 0.5), fill=_rgb(palette[4]))
    return picture


def _wheel(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Rings and spokes, folded like a kaleidoscope."""
    ys, xs = _grid()
    radius, angle = np.hypot(xs, ys), np.arctan2(ys, xs)
    spokes = int(rng.integers(3, 14))
    rings = np.sin(radius * rng.uniform(6, 22) + rng.uniform(0, 3) * np.sin(spokes * angle))
    return _coloured(0.5 + 0.3 * rings + 0.2 * np.sign(np.sin(spokes * angle + radius * rng.uniform(-6, 6))), palette)


def _patchwork(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Striped, dotted and plain cloths sewn together."""
    ys, xs = _grid()
    values = np.zeros(ys.shape)
    rows = np.sort(rng.integers(0, _CANVAS_HEIGHT, 4))
    for top, bottom in zip([0, *rows], [*rows, _CANVAS_HEIGHT], strict=True):
        columns = np.sort(rng.integers(0, _CANVAS_WIDTH, 5))
        for left, right in zip([0, *columns], [*columns, _CANVAS_WIDTH], strict=True):
            y, x = ys[top:bottom, left:right], xs[top:bottom, left:right]
            pitch, lean = rng.uniform(15, 60), rng.uniform(-1, 1)
            stripes = np.sin((x + lean * y) * pitch)
            cloth = (np.zeros_like(x), stripes, stripes * np.sin((y - lean * x) * pitch))[rng.integers(0, 3)]
            values[top:bottom, left:right] = rng.uniform(0.15, 0.85) + 0.25 * np.sign(cloth)
    return _coloured(values, palette)


def _lines(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Wires and lamps of a machine."""
    picture = Image.new("RGB", (_CANVAS_WIDTH, _CANVAS_HEIGHT), _rgb(palette[0] * 0.7))
    draw = ImageDraw.Draw(picture)
    for _ in range(int(rng.integers(25, 70))):
        x, y = (16 * int(rng.integers(0, side // 16)) for side in (_CANVAS_WIDTH, _CANVAS_HEIGHT))
        colour, width = _rgb(palette[rng.integers(1, 5)]), int(rng.integers(1, 6))
        for _ in range(int(rng.integers(2, 7))):
            dx, dy = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1))[rng.integers(0, 6)]
            length = int(rng.integers(1, 6)) * 16
            draw.line((x, y, x + dx * length, y + dy * length), fill=colour, width=width)
            x, y = x + dx * length, y + dy * length
        draw.ellipse((x - 7, y - 7, x + 7, y + 7), fill=colour, outline=(255, 255, 255))
    return picture


def _pitch(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """A match: mown grass, white lines, two teams, a crowd."""
    ys, xs = _grid()
    stripes = np.sign(np.sin(xs * rng.uniform(4, 14) + ys * rng.uniform(-6, 6)))
    grass = np.array([60.0, 140.0, 50.0]) * rng.uniform(0.7, 1.2, 3)
    picture = grass * (1 + 0.12 * stripes[..., None])
    stand = int(rng.integers(20, 110))
    picture[:stand] = palette[rng.integers(0, 5, (stand // 4 + 1, 128))].repeat(4, 0).repeat(4, 1)[:stand]
    shown = Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(shown)
    middle = int(rng.integers(100, 400))
    draw.line((middle, stand, middle + int(rng.integers(-150, 150)), _CANVAS_HEIGHT), fill=(240, 240, 240), width=4)
    draw.ellipse((middle - 90, 130, middle + 90, 230), outline=(240, 240, 240), width=4)
    shirts = [_rgb(rng.uniform(0, 255, 3)) for _ in range(2)]
    for number in range(int(rng.integers(6, 20))):
        x, y, size = rng.uniform(0, _CANVAS_WIDTH), rng.uniform(stand, 250), rng.uniform(7, 13)
        draw.rectangle((x - size / 2, y, x + size / 2, y + size * 1.5), fill=shirts[number % 2])
        draw.rectangle((x - size / 2, y + size * 1.5, x + size / 2, y + size * 2.5), fill=(30, 30, 40))
        draw.ellipse((x - size / 2, y - size, x + size / 2, y), fill=(200, 150, 120))
    return shown


def _chart(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """The news: columns, a curve and a headline on a plain wall."""
    picture = _coloured(np.broadcast_to(np.linspace(0.75, 1, _CANVAS_WIDTH), (_CANVAS_HEIGHT, _CANVAS_WIDTH)), palette)
    draw = ImageDraw.Draw(picture)
    for y in range(60, 240, 30):
        draw.line((20, y, 492, y), fill=_rgb(palette[2]), width=1)
    n_bars = int(rng.integers(4, 11))
    heights, colour = rng.uniform(20, 170, n_bars), _rgb(rng.uniform(0, 255, 3))
    width = 460 / n_bars
    for number, height in enumerate(heights):
        draw.rectangle((26 + number * width, 240 - height, 10 + (number + 1) * width, 240), fill=colour)
    points = [(26 + number * width, float(y)) for number, y in enumerate(rng.uniform(60, 230, n_bars))]
    draw.line(points, fill=_rgb(rng.uniform(0, 255, 3)), width=7)
    draw.rectangle((0, 0, _CANVAS_WIDTH, 44), fill=_rgb(palette[0]))
    draw.text((24, 6), f"{rng.integers(10, 99)} % {rng.integers(1950, 2050)}", fill=(255, 255, 255), font=_font(30))
    return picture


def _bubbles(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """Soap bubbles that shine through each other."""
    ys, xs = _grid()
    picture = np.broadcast_to(palette[1] * 0.6, (*ys.shape, 3)).copy()
    for _ in range(int(rng.integers(9, 26))):
        x, y, radius = rng.uniform(-1.7, 1.7), rng.uniform(-1, 1), rng.uniform(0.08, 0.55)
        away = np.hypot(xs - x, ys - y) / radius
        shine = np.where(away < 1, 0.15 + 0.75 * away**6, 0)[..., None]
        picture = picture * (1 - shine) + shine * palette[rng.integers(1, 5)] * 1.1
        picture[np.hypot(xs - x + radius * 0.4, ys - y + radius * 0.4) < radius * 0.12] = 250
    return Image.fromarray(np.clip(picture, 0, 255).astype(np.uint8))


def _map(rng: np.random.Generator, palette: Palette) -> Image.Image:
    """A map: heights in steps, contour lines, roads with towns."""
    heights = _noise(rng, 2, 4) * rng.integers(5, 10)
    picture = _coloured(np.floor(heights) / heights.max() * 0.6 + 0.4, palette)
    pixels = np.asarray(picture).copy()
    pixels[np.abs(heights - np.round(heights)) < 0.04] = (palette[0] * 0.8).astype(np.uint8)
    picture = Image.fromarray(pixels)
    draw = ImageDraw.Draw(picture)
    towns = [(float(x), float(y)) for x, y in rng.uniform((20, 20), (490, 260), (int(rng.integers(4, 9)), 2))]
    draw.line(towns, fill=(230, 60, 40), width=5)
    for x, y in towns:
        draw.rectangle((x - 6, y - 6, x + 6, y + 6), fill=(20, 20, 20), outline=(255, 255, 255), width=2)
    return picture


PAINTERS: dict[str, Painter] = {
    "hills": _hills,
    "city": _city,
    "face": _face,
    "card": _card,
    "marble": _marble,
    "julia": _julia,
    "cells": _cells,
    "flowers": _flowers,
    "wheel": _wheel,
    "patchwork": _patchwork,
    "lines": _lines,
    "pitch": _pitch,
    "chart": _chart,
    "bubbles": _bubbles,
    "map": _map,
}
