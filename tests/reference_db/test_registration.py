"""Registration of generated films by a small encoder: what is stored, what is refused, what is reported."""

import io
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from reference_db.errors import CatalogError, EncoderMismatch, MediaError, ReferenceExists
from reference_db.features.encoder import Encoder, load_encoder
from reference_db.media.decoding import decode_file
from reference_db.registration import (
    Findability,
    FindabilityMeter,
    QualityReport,
    assess_quality,
    quality_report,
    register,
    safe_id,
)
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, ReferenceFeatures, ReferenceId
from tests.support.media import picture, write_clip, write_film, write_sound
from tests.support.onnx_encoders import write_grid


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return load_encoder(write_grid(tmp_path_factory.mktemp("encoder") / "grid.onnx", around_mean=True))


@pytest.fixture(scope="module")
def film(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_film(tmp_path_factory.mktemp("films") / "Mein Film (2).mp4", seed=1, seconds=12)


def difference(shown: Image.Image, time_s: float) -> float:
    """Between a thumbnail and the film at this time, in levels."""
    return float(np.abs(np.asarray(shown, np.float32) - picture(1, time_s)).mean())


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 360), (320, 180)), ((360, 640), (320, 569)), ((480, 360), (320, 240)), ((176, 144), (176, 144))],
)
def test_thumbnails_are_320_pixels_wide_whatever_their_shape(
    size: tuple[int, int], expected: tuple[int, int], tmp_path: Path, encoder: Encoder
) -> None:
    pictures = [(n / 5, picture(1, n / 5, *size)) for n in range(10)]
    path = write_clip(tmp_path / "film.mp4", pictures, fps=5)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        thumbnails = catalog.thumbnails(register(path, catalog, encoder).reference.id, 0, 2)
    assert [Image.open(io.BytesIO(jpeg)).size for _, jpeg in thumbnails] == 4 * [expected]


def still(grey: int) -> np.typing.NDArray[np.uint8]:
    return np.full((180, 320, 3), grey, np.uint8)


def test_a_film_becomes_a_reference(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    with Catalog.open(tmp_path, write=True) as catalog:
        done = register(film, catalog, encoder, owner="We", tags={"a": "b"}, progress=lambda *step: steps.append(step))
        assert not done.already_there
        assert catalog.references() == (done.reference,)
        features = catalog.features(done.reference.id)
        thumbnails = catalog.thumbnails(done.reference.id, 0, 12)
    reference = done.reference
    assert (reference.id, reference.title, reference.owner) == ("Mein-Film-2", "Mein Film (2)", "We")
    assert (reference.n_seconds, reference.n_uninformative, reference.tags) == (12, 0, {"a": "b"})
    assert reference.encoder_id == encoder.encoder_id
    assert reference.added_at.utcoffset() is not None
    assert steps == [(8, 12), (12, 12)]
    expected = encoder.encode([frame.picture for frame in decode_file(film)])
    assert np.array_equal(features.rows, expected.astype(np.float16))
    assert [time_s for time_s, _ in thumbnails] == [number / 2 for number in range(24)]
    for time_s, thumbnail in thumbnails:
        shown = Image.open(io.BytesIO(thumbnail))
        assert shown.size == (320, 180)
        assert difference(shown, time_s) < difference(shown, time_s + 0.5), time_s
    assert done.report is not None
    assert done.report.warnings == ()


def test_a_registered_film_is_found_by_its_pictures(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    other = write_film(tmp_path / "other.mkv", seed=2, seconds=6)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        register(film, catalog, encoder, id="film")
        register(other, catalog, encoder, id="other")
        index = ReferenceIndex.build(catalog, encoder.encoder_id)
    aired = write_film(tmp_path / "aired.ts", seed=1, seconds=4, start_s=6, width=256, height=144)
    rows = encoder.encode([frame.picture for frame in decode_file(aired)])
    hits = index.search(rows, 1)
    assert [index.references[i].id for i in hits.reference[:, 0]] == ["film"] * 4
    assert hits.second[:, 0].tolist() == [6, 7, 8, 9]


def test_the_same_file_is_registered_once(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    copy = tmp_path / "another name.mp4"
    copy.write_bytes(film.read_bytes())
    with Catalog.open(tmp_path, write=True) as catalog:
        first = register(film, catalog, encoder)
        again = register(copy, catalog, encoder, id="other")
        assert again.already_there
        assert again.reference == first.reference
        assert again.report is None
        assert quality_report(first.reference.id, catalog) == first.report
        assert catalog.generation() == 1


def test_ids_come_from_the_file_name_and_never_clash(tmp_path: Path, encoder: Encoder) -> None:
    ids = []
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        for seed in (1, 2, 3):
            (tmp_path / str(seed)).mkdir()
            path = write_film(tmp_path / str(seed) / "news.mp4", seed=seed, seconds=3)
            ids.append(register(path, catalog, encoder).reference.id)
        with pytest.raises(ReferenceExists, match="Another video has the id news-2"):
            register(write_film(tmp_path / "x.mp4", seed=4, seconds=3), catalog, encoder, id="news-2")
        with pytest.raises(CatalogError, match="cannot be an id"):
            register(tmp_path / "x.mp4", catalog, encoder, id="a/b")
        assert len(catalog.references()) == 3
    assert ids == ["news", "news-2", "news-3"]


@pytest.mark.parametrize(
    ("stem", "id"),
    [
        ("Amélie, 2001", "Amelie-2001"),
        ("..", "reference"),
        ("日本", "reference"),
        ("x" * 300, "x" * 120),
        ("-a_b.c-", "a_b.c"),
    ],
)
def test_stems_become_valid_ids(stem: str, id: str) -> None:
    assert safe_id(stem) == id


def test_a_file_registered_with_another_encoder_is_replaced(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    newer = load_encoder(write_grid(tmp_path / "newer.onnx", last=0.5, around_mean=True))
    assert newer.encoder_id != encoder.encoder_id
    other = write_film(tmp_path / "other.mp4", seed=2, seconds=4)
    with Catalog.open(tmp_path, write=True) as catalog:
        old = register(film, catalog, encoder, id="film", title="Film", owner="We", tags={"a": "b"}).reference
        register(other, catalog, encoder, id="other")
        with pytest.raises(EncoderMismatch, match="copywatch refs add FILE"):
            ReferenceIndex.build(catalog, newer.encoder_id)
        done = register(film, catalog, newer)
        assert done.outcome == "replaced"
        assert done.reference == replace(
            old,
            encoder_id=newer.encoder_id,
            features_sha256=done.reference.features_sha256,
            features_id=done.reference.features_id,
            thumbnails_sha256=done.reference.thumbnails_sha256,
        )
        assert done.report is not None
        assert "Overlaps were not searched" in done.report.warnings[0]
        assert register(film, catalog, newer).already_there
        register(other, catalog, newer)
        index = ReferenceIndex.build(catalog, newer.encoder_id)
        assert [reference.id for reference in index.references] == ["film", "other"]


def test_registering_a_damaged_reference_s_video_again_repairs_it(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        stored = register(film, catalog, encoder, id="film").reference
        path = catalog.features_path(stored)
        path.write_bytes(path.read_bytes()[:-1])
        catalog.quarantine({stored.id: "its feature file has changed on disk"})
        done = register(film, catalog, encoder)
        assert (done.outcome, done.reference) == ("replaced", stored)
        assert len(catalog.features(stored.id).rows) == 12
        assert catalog.contents().damaged == {}


def test_a_file_that_cannot_be_used_leaves_nothing(tmp_path: Path, encoder: Encoder) -> None:
    (tmp_path / "words.mp4").write_text("no video " * 100)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty.mp4").touch()
    for ending in ("mp4", "mkv"):
        whole = write_film(tmp_path / f"whole.{ending}", seed=3, seconds=12).read_bytes()
        (tmp_path / f"cut.{ending}").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "list.mp4").write_text("#EXTM3U\n#EXTINF:9,\nwhole.mp4\n#EXT-X-ENDLIST\n")
    write_clip(tmp_path / "huge.mp4", [(0.0, np.full((8000, 8000, 3), 90, np.uint8))], codec="mjpeg", b_frames=0)
    black = write_clip(tmp_path / "black.mp4", [(n / 5, still(0)) for n in range(20)])
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        for path, reason in [
            (tmp_path / "missing.mp4", "does not exist"),
            (tmp_path / "words.mp4", "not a video"),
            (write_sound(tmp_path / "sound.wav"), "no video"),
            (black, "could never be recognised"),
            (tmp_path, "not a regular file"),
            (tmp_path / "pipe", "not a regular file"),
            (tmp_path / "empty.mp4", "is empty"),
            (tmp_path / "cut.mp4", "not a video in a supported format, or it is damaged"),
            (tmp_path / "cut.mkv", r"ends after \d of 12 s|too many damaged pictures"),
            (tmp_path / "list.mp4", "not a video in a supported format"),
            (tmp_path / "huge.mp4", "8192x4352"),
        ]:
            with pytest.raises(MediaError, match=reason):
                register(path, catalog, encoder)
        assert catalog.references() == ()
        assert catalog.generation() == 0


@pytest.mark.parametrize(
    ("last_s", "sentence"),
    [
        (400_000, "has a picture at second 399999; a reference may last 69 hours at most"),
        (200_000, "has a picture in only 6 of its 200001 seconds"),
    ],
)
def test_a_tiny_video_with_a_far_time_stamp_is_refused(
    tmp_path: Path, encoder: Encoder, last_s: int, sentence: str
) -> None:
    times = [0.0, 1.0, 2.0, 3.0, last_s - 1.0, float(last_s)]
    path = write_clip(tmp_path / "bomb.mkv", [(t, picture(1, t % 9, 64, 64)) for t in times], b_frames=0)
    assert path.stat().st_size < 30_000
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        with pytest.raises(MediaError, match=f"^bomb.mkv {sentence}"):
            register(path, catalog, encoder)
        assert catalog.references() == ()
    assert sum(one.stat().st_size for one in (tmp_path / "library").rglob("*") if one.is_file()) < 1_000_000


def test_slides_that_stand_for_some_seconds_each_are_registered(tmp_path: Path, encoder: Encoder) -> None:
    path = write_clip(tmp_path / "slides.mkv", [(8.0 * n, picture(1, 2.0 * n)) for n in range(8)], b_frames=0)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        done = register(path, catalog, encoder)
    assert (done.reference.n_seconds, done.reference.n_uninformative) == (57, 49)


def test_holes_and_black_seconds_are_uninformative(tmp_path: Path, encoder: Encoder) -> None:
    # film in 0-3, black in 3-6, nothing in 6-8, film in 8-10
    times = [t / 5 for t in (*range(30), *range(40, 50))]
    clip = [(t, still(0) if 3 <= t < 6 else picture(1, t)) for t in times]
    path = write_clip(tmp_path / "holes.mkv", clip)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        done = register(path, catalog, encoder)
        features = catalog.features(done.reference.id)
        has_thumbnail = [catalog.thumbnail(done.reference.id, s) is not None for s in range(10)]
    assert features.informative.tolist() == [s < 3 or s >= 8 for s in range(10)]
    assert has_thumbnail == [s not in (6, 7) for s in range(10)]
    assert not features.rows[6:8].any()
    assert done.reference.n_uninformative == 5
    assert done.report is not None
    assert done.report.uninformative_share == pytest.approx(0.5)
    assert done.report.warnings == ("50% of its seconds are black, flat or missing and cannot be recognised.",)


def test_thumbnails_are_optional(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    with Catalog.open(tmp_path, write=True) as catalog:
        done = register(film, catalog, encoder, thumbnails=False)
        assert catalog.thumbnail(done.reference.id, 0) is None
    assert not any((tmp_path / "thumbnails").iterdir())


def report_of(path: Path, catalog: Catalog, encoder: Encoder) -> QualityReport:
    report = register(path, catalog, encoder).report
    assert report is not None
    return report


def test_the_report_has_overlaps_static_runs_and_short_videos(tmp_path: Path, encoder: Encoder, film: Path) -> None:
    # 6 s of the registered film, then one picture for 34 s
    clip = [(n / 2, picture(1, n / 2) if n < 12 else picture(9, 0)) for n in range(80)]
    mixed = write_clip(tmp_path / "mixed.mp4", clip)
    short = write_film(tmp_path / "short.mp4", seed=5, seconds=2)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        register(film, catalog, encoder, id="film")
        report = report_of(mixed, catalog, encoder)
        assert report.longest_static_s == 34
        ((other, share),) = report.overlaps
        assert other == ReferenceId("film")
        assert share == pytest.approx(6 / 40)
        overlap, static, still = report.warnings
        assert overlap.startswith("15% of its seconds look like film")
        assert static.startswith("One picture stands still for 34 s")
        assert still.startswith("It is nearly still")
        assert "only 2 s long" in report_of(short, catalog, encoder).warnings[-1]


def rows_of(n_seconds: int, seed: int) -> np.typing.NDArray[np.float64]:
    rows = np.random.default_rng(seed).standard_normal((n_seconds, 512))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


def report_on(rows: np.typing.NDArray[np.float64], findability: FindabilityMeter | None = None) -> QualityReport:
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    features = ReferenceFeatures(unit.astype(np.float16), np.ones(len(rows), np.bool_))
    return assess_quality(features, ReferenceIndex.from_features([]), findability=findability)


def test_an_ordinary_reference_has_no_warnings() -> None:
    report = report_on(rows_of(60, seed=1))
    assert (report.warnings, report.still_share, report.repeated_share) == ((), 0.0, 0.0)
    assert report.shortest_findable_s is None  # not measured


@pytest.mark.parametrize(("n_seconds", "is_short"), [(3, True), (7, True), (8, False)])
def test_a_reference_below_eight_seconds_is_reported(n_seconds: int, is_short: bool) -> None:
    warnings = report_on(rows_of(n_seconds, seed=2)).warnings
    expected = f"It is only {n_seconds} s long; copies this short are easily missed."
    assert warnings == ((expected,) if is_short else ())


def test_a_near_still_reference_is_reported() -> None:
    report = report_on(rows_of(1, seed=3) + 0.5 * rows_of(40, seed=4))  # a similarity of 0.8, as of a lake
    assert report.still_share == 1.0
    assert report.repeated_share == 0.0
    (warning,) = report.warnings
    assert warning.startswith("It is nearly still: 100% of its seconds look like those around them.")


def test_a_reference_that_repeats_itself_is_reported() -> None:
    report = report_on(np.tile(rows_of(12, seed=5), (5, 1)))
    assert report.repeated_share == 1.0
    assert report.still_share == 0.0
    (warning,) = report.warnings
    assert warning.startswith("It repeats itself: 100% of it returns at another time.")


def test_an_ident_that_returns_once_is_no_repeating_reference() -> None:
    rows = rows_of(300, seed=6)
    rows[280:290] = rows[10:20]
    report = report_on(rows)
    assert 0 < report.repeated_share < 0.1
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("measured", "shortest_s", "warnings"),
    [
        (Findability(4, 30, 5, 0), 4, ()),
        (Findability(11, 30, 5, 0), 11, ("Only copies of 11 s and more are found everywhere in it",)),
        (Findability(5, 30, 5, 2), 5, ("A clean copy of 30 s was not found at 2 of 5 places that were tried.",)),
        (Findability(None, 30, 5, 5), None, ("Even a clean copy of 30 s of it is not found.",)),
    ],
)
def test_the_shortest_copy_that_is_found_is_reported(
    measured: Findability, shortest_s: int | None, warnings: tuple[str, ...]
) -> None:
    report = report_on(rows_of(60, seed=1), lambda features: measured)
    assert report.shortest_findable_s == shortest_s
    assert [said.startswith(expected) for said, expected in zip(report.warnings, warnings, strict=True)] == [
        True
    ] * len(warnings)


def test_a_damaged_reference_is_reported_but_does_not_stop_another_registration(
    tmp_path: Path, encoder: Encoder, film: Path
) -> None:
    other = write_film(tmp_path / "other.mp4", seed=2, seconds=8)
    with Catalog.open(tmp_path / "library", write=True) as catalog:
        register(film, catalog, encoder, id="film")
        next((tmp_path / "library" / "features").iterdir()).write_bytes(b"damaged")
        report = report_of(other, catalog, encoder)
    assert "Reference film is damaged" in report.warnings[0]
    assert len(report.warnings) == 1
