"""Evidence tiles: the similarity of both sides around a path, drawn as PNG."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from monitor.evidence.tiles import MARGIN_S, MAX_COLUMNS, TILE_S, cut_tile, draw_tile, full_path
from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.tiles import GRAIN
from tests.support.planted_channels import film_rows, trained_models

REF_S = 30  # second of the film that airs at stream second 0
FILM = film_rows("swift")
INFORMATIVE = np.ones(len(FILM), np.bool_)
LIVES = [LiveSecond(second, FILM[REF_S + second], second != 7, 1.0) for second in range(40)]
PATH = [(0, REF_S), (39, REF_S + 39)]


def test_a_full_path_has_every_second_between_its_points() -> None:
    assert full_path([(10, 100), (14, 108), (10, 100)]) == [(10, 100), (11, 102), (12, 104), (13, 106), (14, 108)]
    assert full_path([]) == []


def test_a_tile_has_the_similarity_of_both_sides_around_the_path() -> None:
    tile = cut_tile(LIVES, FILM, INFORMATIVE, PATH, 5, trained_models().net)
    assert tile is not None
    assert (tile.live_s, tile.ref_s) == (5, REF_S + 5 - MARGIN_S)
    assert tile.similarity.shape == tile.mask.shape == (35, min(35 + 2 * MARGIN_S, len(FILM) - tile.ref_s))
    assert tile.path == tuple((n, n + MARGIN_S) for n in range(35))
    expected = FILM[12 + REF_S] @ FILM[tile.ref_s : tile.ref_s + tile.similarity.shape[1]].T
    assert tile.similarity[12 - 5] == pytest.approx(expected, abs=1 / GRAIN)
    assert not tile.similarity[7 - 5].any()  # an uninformative second
    assert tile.mask[[row for row, _ in tile.path], [column for _, column in tile.path]].mean() > 0.5


def test_a_tile_is_bounded_and_needs_seconds_on_the_path() -> None:
    net = trained_models().net
    fast = cut_tile(LIVES, film_rows("long"), np.ones(700, np.bool_), [(0, 0), (39, 600)], 0, net)
    assert fast is not None
    assert fast.similarity.shape[0] <= TILE_S
    assert fast.similarity.shape[1] == MAX_COLUMNS
    assert cut_tile(LIVES, FILM, INFORMATIVE, PATH, 50, net) is None
    assert cut_tile(LIVES, FILM, INFORMATIVE, [], 5, net) is None


def test_a_drawn_tile_is_a_png_with_path_and_mask_in_their_colours() -> None:
    tile = cut_tile(LIVES, FILM, INFORMATIVE, PATH, 5, trained_models().net)
    assert tile is not None
    picture = Image.open(io.BytesIO(draw_tile(tile, 0.3)))
    assert picture.format == "PNG"
    colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20) or ()}
    assert {(40, 255, 120), (90, 235, 255)} <= colours
