"""How long a copy must be to be found: planted references of four kinds, matched with a plain network."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.matching.findability import LONGEST_S, MAX_PLACES, measure_findability
from monitor.matching.mask_step import TileReader
from monitor.matching.matcher import MatchParameters
from monitor.matching.tiles import SimilarityTile, TileMaps
from reference_db.registration import Findability
from reference_db.store.catalog import ReferenceFeatures
from tests.support.planted_features import film, plain_net, unit

THRESHOLD = 0.12


@pytest.fixture(scope="module")
def reader() -> TileReader:
    return TileReader(plain_net())


def features_of(rows: NDArray[np.float32]) -> ReferenceFeatures:
    return ReferenceFeatures(rows.astype(np.float16), np.ones(len(rows), np.bool_))


def near_still(n_seconds: int) -> NDArray[np.float32]:
    """One picture with a little noise: two seconds have a similarity of 0.99."""
    noise = 0.1 * film("noise", n_seconds, seed=5).rows.astype(np.float64)
    return unit(film("picture", 1, seed=4).rows.astype(np.float64) + noise)


def measure(features: ReferenceFeatures, reader: TileReader) -> Findability:
    return measure_findability(features, reader.read, MatchParameters(), lambda view: view.score >= THRESHOLD)


def test_an_ordinary_reference_is_found_from_a_few_seconds_on(reader: TileReader) -> None:
    found = measure(features_of(film("film", 120, seed=1).rows), reader)
    assert found.shortest_s is not None
    assert 3 <= found.shortest_s <= 6
    assert (found.longest_tried_s, found.n_places, found.n_not_found) == (LONGEST_S, MAX_PLACES, 0)


def test_a_reference_of_two_seconds_is_not_found(reader: TileReader) -> None:
    assert measure(features_of(film("film", 2, seed=1).rows), reader) == Findability(None, 2, 1, 1)


def test_a_reference_of_three_seconds_is_found_only_as_a_whole(reader: TileReader) -> None:
    found = measure(features_of(film("film", 3, seed=1).rows), reader)
    assert found.shortest_s in (None, 3)
    assert found.longest_tried_s == 3


def test_a_near_still_reference_needs_a_longer_copy(reader: TileReader) -> None:
    ordinary, still = (
        measure(features_of(film("film", 60, seed=1).rows), reader),
        measure(features_of(near_still(60)), reader),
    )
    assert ordinary.shortest_s is not None
    assert still.shortest_s is None or still.shortest_s >= ordinary.shortest_s + 3


def test_a_repeating_reference_is_found_at_each_of_its_repeats(reader: TileReader) -> None:
    found = measure(features_of(np.tile(film("spot", 12, seed=2).rows, (5, 1))), reader)
    assert found.shortest_s is not None
    assert found.n_not_found == 0


def test_a_higher_threshold_needs_a_longer_copy(reader: TileReader) -> None:
    features = features_of(film("film", 60, seed=1).rows)
    strict = measure_findability(features, reader.read, MatchParameters(), lambda view: view.score >= 0.6)
    assert strict.shortest_s is not None
    assert strict.shortest_s > (measure(features, reader).shortest_s or 0)


def test_what_cannot_be_an_alert_is_never_found(reader: TileReader) -> None:
    features = features_of(film("film", 60, seed=1).rows)
    found = measure_findability(features, reader.read, MatchParameters(), lambda view: False)
    assert found == Findability(None, LONGEST_S, MAX_PLACES, MAX_PLACES)


def test_the_work_does_not_grow_with_the_reference(reader: TileReader) -> None:
    n_tiles: list[int] = []

    def counting(tiles: list[SimilarityTile]) -> list[TileMaps]:
        n_tiles[-1] += len(tiles)
        return reader.read(tiles)

    for n_seconds in (400, 1600):
        n_tiles.append(0)
        rows = film("film", n_seconds, seed=3).rows
        measure_findability(features_of(rows), counting, MatchParameters(), lambda view: view.score >= THRESHOLD)
    assert n_tiles[1] <= 1.5 * n_tiles[0]
    assert n_tiles[1] <= 250


def test_uninformative_seconds_are_no_place_to_start(reader: TileReader) -> None:
    informative = np.arange(60) >= 30
    features = ReferenceFeatures(film("film", 60, seed=1).rows.astype(np.float16), informative)
    found = measure(features, reader)
    assert found.shortest_s is not None
    assert found.n_not_found == 0
