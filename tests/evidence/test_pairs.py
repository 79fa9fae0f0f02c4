"""Which pictures are shown side by side: the right moments of both sides, or none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from monitor.evidence.pairs import ClaimedLine, Pair, ReferenceMoments, choose_pairs, with_stored_pairs
from monitor.evidence.pictures import QUALITY, AirPicture, LazyJpeg
from reference_db.media.jpeg import encode_jpeg
from tests.support.media import picture

FILM_S = 60
SEED = 5
ROWS = np.random.default_rng(1).normal(size=(FILM_S, 512)).astype(np.float32)
ROWS /= np.linalg.norm(ROWS, axis=1, keepdims=True)
INFORMATIVE = np.ones(FILM_S, np.bool_)


def row_at(ref_s: float) -> NDArray[np.float32]:
    """Features between those of the two nearest seconds."""
    place = min(max(ref_s - 0.5, 0.0), FILM_S - 1.001)
    left = int(place)
    row = (1 - place + left) * ROWS[left] + (place - left) * ROWS[left + 1]
    return np.asarray(row / np.linalg.norm(row), np.float32)


def jpeg_at(ref_s: float) -> bytes:
    return encode_jpeg(picture(SEED, ref_s), quality=QUALITY)


def film(*, per_second: int = 2, pictures: Callable[[float], bytes] = jpeg_at) -> ReferenceMoments:
    first_s = 0.0 if per_second == 2 else 0.5
    times = [first_s + number / per_second for number in range(FILM_S * per_second)]
    return ReferenceMoments(
        ROWS, INFORMATIVE, lambda start_s, end_s: [(s, pictures(s)) for s in times if start_s <= s < end_s]
    )


def aired(partner: Callable[[float], float], n_seconds: int, first: int = 100) -> list[AirPicture]:
    """The pictures of a copy on air from second 100 on, which shows the film's second `partner` at each moment."""
    airs = []
    for second in range(first, first + n_seconds):
        ref_s = partner(second + 0.5)
        airs.append(AirPicture(second, LazyJpeg(picture(SEED, ref_s)), row_at(ref_s)))
    return airs


def straight(offset_s: float, speed: float = 1.0) -> Callable[[float], float]:
    return lambda live_s: offset_s + speed * (live_s - 100)


@pytest.mark.parametrize(("offset_s", "speed"), [(10.0, 1.0), (10.25, 1.0), (10.5, 1.0), (12.3, 1.25), (20.1, 0.8)])
def test_each_third_has_a_pair_within_a_quarter_second(offset_s: float, speed: float) -> None:
    true, line = straight(offset_s, speed), ClaimedLine(100, 124, offset_s - 0.6, offset_s + 24 * speed + 0.5)
    pairs = choose_pairs(line, aired(true, 24), film())
    assert [pair.place for pair in pairs] == ["start", "middle", "end"]
    for number, pair in enumerate(pairs):
        assert 100 + 8 * number <= pair.air.time_s <= 108 + 8 * number
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.3
        assert pair.reference == jpeg_at(pair.ref_s)


@pytest.mark.parametrize("held_s", [2, -3])
def test_pairs_of_a_copy_with_a_held_picture_or_a_cut_follow_it(held_s: int) -> None:
    def true(live_s: float) -> float:
        at = live_s - 100
        return 10 + (at if at < 12 else max(12, at - held_s) if held_s > 0 else at - held_s)

    line = ClaimedLine(100, 124, 10, 34 - held_s)
    pairs = choose_pairs(line, aired(true, 24), film())
    assert len(pairs) >= 2
    for pair in pairs:
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.3, pair.air.second


def test_one_picture_per_second_of_an_earlier_library_is_used() -> None:
    true = straight(10.2)
    pairs = choose_pairs(ClaimedLine(100, 120, 10.2, 30.2), aired(true, 20), film(per_second=1))
    assert len(pairs) == 3
    for pair in pairs:
        assert pair.ref_s % 1 == 0.5
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.5


def test_a_reference_without_pictures_is_aligned_by_its_features() -> None:
    true = straight(10.0)
    nothing = ReferenceMoments(ROWS, INFORMATIVE, lambda start_s, end_s: [])
    pairs = choose_pairs(ClaimedLine(100, 120, 10.6, 30.4), aired(true, 20), nothing)
    assert len(pairs) == 3
    for pair in pairs:
        assert pair.reference is None
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.5


def test_pictures_without_features_are_aligned_by_their_pixels() -> None:
    true = straight(10.2)
    airs = [AirPicture(air.second, air.jpeg) for air in aired(true, 12)]
    for pair in choose_pairs(ClaimedLine(100, 112, 10, 22), airs, film()):
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.3


def test_where_nothing_is_certain_one_pair_is_shown_and_a_still_film_has_all() -> None:
    noise = np.random.default_rng(2).integers(0, 255, (24, 90, 160, 3)).astype(np.uint8)
    unlike = [AirPicture(100 + n, LazyJpeg(noise[n]), ROWS[0]) for n in range(24)]
    doubtful = choose_pairs(ClaimedLine(100, 124, 10, 34), unlike, film())
    assert [pair.is_certain for pair in doubtful] in ([False], [True])
    still = film(pictures=lambda ref_s: jpeg_at(7.0))
    airs = [AirPicture(100 + n, LazyJpeg(picture(SEED, 7.0)), ROWS[7]) for n in range(24)]
    assert len(choose_pairs(ClaimedLine(100, 124, 10, 34), airs, still)) == 3


def test_a_picture_of_the_programme_before_the_copy_is_not_paired() -> None:
    true = straight(10.0)
    airs = [AirPicture(n, LazyJpeg(picture(9, float(n))), ROWS[n - 60]) for n in range(96, 104)] + aired(true, 8, 104)
    pairs = choose_pairs(ClaimedLine(96, 112, 6, 22), airs, film())
    assert [pair.place for pair in pairs][-1] == "end"
    for pair in pairs:
        assert pair.air.second >= 104


def test_a_held_key_picture_counts_at_its_own_time() -> None:
    true, airs = straight(10.0), []
    for second in range(100, 124):
        age_s = 0.5 + second % 2
        shown = true(second + 0.5 - age_s)
        airs.append(AirPicture(second, LazyJpeg(picture(SEED, shown)), row_at(shown), age_s))
    pairs = choose_pairs(ClaimedLine(100, 124, 10, 34), airs, film())
    assert len(pairs) == 3
    for pair in pairs:
        assert abs(pair.ref_s - true(pair.air.time_s)) <= 0.3


def test_without_pictures_of_the_channel_there_is_no_pair() -> None:
    assert choose_pairs(ClaimedLine(100, 124, 10, 34), [], film()) == []
    assert choose_pairs(ClaimedLine(100, 124, 10, 34), aired(straight(10.0), 5, first=300), film()) == []


def test_pairs_of_the_previous_run_fill_thirds_without_one_if_they_are_on_the_line() -> None:
    def pair(second: int, ref_s: float) -> Pair:
        return Pair("end", AirPicture(second, LazyJpeg(b"")), ref_s, None, is_certain=True)

    line, new = ClaimedLine(100, 130, 10, 40), Pair("end", AirPicture(128, LazyJpeg(b"")), 38.5, None, is_certain=True)
    pairs = with_stored_pairs(line, [new], [pair(102, 12.5), pair(115, 35.0), pair(127, 37.5)])
    assert [(one.place, one.air.second) for one in pairs] == [("start", 102), ("end", 128)]
