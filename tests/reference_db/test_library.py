"""The reference library: folders, unusable files, export and import."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference_db.errors import (
    CatalogError,
    CatalogLocked,
    EncoderMismatch,
    MediaError,
    NotAReference,
    ReferenceExists,
    UnknownReference,
)
from reference_db.library import ReferenceLibrary, find_videos, read_export
from reference_db.store.catalog import Catalog, Reference
from reference_db.store.feature_files import pack
from reference_db.store.references import ReferenceFeatures
from tests.support.media import CENC, write_film, write_numbered, write_sound
from tests.support.onnx_encoders import write_grid


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grid(tmp_path_factory.mktemp("encoder") / "grid.onnx", around_mean=True)


@pytest.fixture(scope="module")
def films(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("films")
    (folder / "more").mkdir()
    write_film(folder / "one.mp4", seed=1, seconds=6)
    write_film(folder / "more" / "two.mkv", seed=2, seconds=5)
    return folder


@pytest.fixture
def library(tmp_path: Path, encoder: Path) -> ReferenceLibrary:
    return ReferenceLibrary(tmp_path / "library", encoder)


def ids(library: ReferenceLibrary) -> list[str]:
    return [reference.id for reference in library.list().references]


# --- add, list, show, rm ---------------------------------------------------------------------------------------------


def test_a_folder_is_registered_recursively(library: ReferenceLibrary, films: Path) -> None:
    (films / "notes.txt").write_text("not a video")
    started: list[Path] = []
    steps: list[tuple[int, int | None]] = []
    added = list(library.add([films], owner="We", on_file=started.append, progress=lambda *step: steps.append(step)))
    assert [one.path for one in added] == started == [films / "one.mp4", films / "more" / "two.mkv"]
    assert [one.registration.outcome for one in added if one.registration] == ["added", "added"]
    assert steps == [(6, 6), (5, 5)]
    assert ids(library) == ["one", "two"]
    again = list(library.add([films]))
    assert [one.registration.outcome for one in again if one.registration] == ["already there"] * 2
    assert find_videos([films]).n_skipped == 1


def test_show_has_the_report_and_rm_removes(library: ReferenceLibrary, films: Path) -> None:
    list(library.add([films]))
    details = library.show("one")
    assert details.reference.n_seconds == details.report.n_seconds == 6
    assert details.has_thumbnails
    library.rm("one")
    assert ids(library) == ["two"]
    for operation in (library.show, library.rm):
        with pytest.raises(UnknownReference):
            operation("one")


def test_an_id_belongs_to_one_video(library: ReferenceLibrary, films: Path) -> None:
    with pytest.raises(CatalogError, match="one by one"):
        list(library.add([films], id="x"))
    assert not library.data_dir.exists()


def test_invalid_texts_are_refused_before_decoding(library: ReferenceLibrary, films: Path) -> None:
    steps: list[tuple[int, int | None]] = []
    (only,) = library.add([films / "one.mp4"], owner="two\nlines", progress=lambda *step: steps.append(step))
    assert only.error is not None
    assert "is invalid: use up to 1000 printable characters" in str(only.error)
    assert steps == []


def test_a_file_name_that_is_not_utf_8_gets_a_printable_title(
    library: ReferenceLibrary, films: Path, tmp_path: Path
) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/ca\xff\nt.mp4"))
    path.write_bytes((films / "one.mp4").read_bytes())
    (only,) = library.add([path])
    assert only.registration is not None
    assert only.registration.reference.title == "ca\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}t"


def test_a_locked_library_is_refused_before_any_file(library: ReferenceLibrary, films: Path) -> None:
    with Catalog.open(library.data_dir, write=True), pytest.raises(CatalogLocked, match="Another process"):
        list(library.add([films]))


@pytest.mark.slow
def test_a_large_folder_with_some_unusable_files(library: ReferenceLibrary, films: Path, tmp_path: Path) -> None:
    """10,000 files: three videos under many names, and one unusable file of each kind."""
    folder = tmp_path / "archive"
    folder.mkdir()
    videos = [films / "one.mp4", films / "more" / "two.mkv", write_film(tmp_path / "three.ts", seed=3, seconds=4)]
    broken: dict[str, Callable[[Path], object]] = {
        "empty": Path.touch,
        "words": lambda path: path.write_text(f"no video, {path.name}"),
        "cut": lambda path: path.write_bytes(videos[0].read_bytes()[:2000]),
        "list": lambda path: path.write_text("#EXTM3U\n#EXTINF:9,\n/etc/passwd\n"),
        "gone": lambda path: path.symlink_to("nowhere"),
        "sound": lambda path: write_sound(path.with_suffix(".wav")).rename(path),
        "pipe": lambda path: os.mkfifo(path),
        "locked": lambda path: write_numbered(path, [n / 10 for n in range(20)], options=CENC),
    }
    for number in range(10_000):
        path = folder / f"{number:05}.mp4"
        kind = list(broken)[number // 1000] if number % 1000 == 500 and number < 8000 else None
        if kind:
            broken[kind](path)
        else:
            os.link(videos[number % 3], path)
    outcomes = list(library.add([folder]))
    assert len(outcomes) == 10_000
    failed = {one.path.stem: str(one.error) for one in outcomes if one.error}
    reasons = (
        "empty",
        "not a video",
        "not a video",
        "not a video",
        "does not exist",
        "no video",
        "not a regular file",
        "encrypted",
    )
    assert sorted(failed) == [f"{1000 * n + 500:05}" for n in range(8)]
    for error, reason in zip((failed[stem] for stem in sorted(failed)), reasons, strict=True):
        assert reason in error
    assert ids(library) == ["00000", "00001", "00002"]


def test_reindex_rebuilds_the_index_and_reports_the_damaged(library: ReferenceLibrary, films: Path) -> None:
    list(library.add([films]))
    result = library.reindex()
    assert (result.n_references, result.n_seconds, result.damaged) == (2, 11, {})
    next((library.data_dir / "features").glob("two.*")).write_bytes(b"damaged")
    result = library.reindex()
    assert (result.n_references, result.n_seconds) == (1, 6)
    assert result.damaged == {"two": "its feature file has changed on disk"}


# --- export, import --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, encoder: Path, films: Path) -> Path:
    """The first film, exported by its owner."""
    home = tmp_path_factory.mktemp("home")
    library = ReferenceLibrary(home / "library", encoder)
    list(library.add([films / "one.mp4"], title="Öne", owner="We", tags={"a": "b"}))
    return library.export("one", home)


def test_a_reference_is_exported_and_imported_without_its_video(
    library: ReferenceLibrary, exported: Path, encoder: Path, films: Path
) -> None:
    done = library.import_(exported)
    assert (done.outcome, done.reference.id, done.reference.title) == ("added", "one", "Öne")
    assert done.reference.imported
    with Catalog.open(library.data_dir) as catalog, Catalog.open(exported.parent / "library") as origin:
        assert np.array_equal(catalog.features(done.reference.id).rows, origin.features(done.reference.id).rows)
        assert catalog.thumbnail(done.reference.id, 0) is None
        assert origin.thumbnail(done.reference.id, 0) is not None
    assert exported.name == "one.copywatch"
    assert exported.stat().st_size < 6 * 1025 + 2000
    assert library.import_(exported).already_there
    assert library.import_(exported, id="other").already_there
    (added,) = library.add([films / "one.mp4"])  # the video itself replaces the import
    assert added.registration is not None
    assert added.registration.outcome == "replaced"
    assert not added.registration.reference.imported
    assert library.show("one").has_thumbnails
    assert library.import_(exported).already_there


def test_an_export_overwrites_nothing(library: ReferenceLibrary, films: Path, tmp_path: Path) -> None:
    list(library.add([films / "one.mp4"]))
    (tmp_path / "x.copywatch").write_text("mine")
    with pytest.raises(CatalogError, match="exists already"):
        library.export("one", tmp_path / "x.copywatch")
    assert (tmp_path / "x.copywatch").read_text() == "mine"
    with pytest.raises(CatalogError, match="cannot be written"):
        library.export("one", tmp_path / "none" / "x")
    with pytest.raises(UnknownReference):
        library.export("unknown", tmp_path)


def test_an_import_can_get_another_id_than_one_that_is_taken(
    library: ReferenceLibrary, exported: Path, films: Path
) -> None:
    list(library.add([films / "more" / "two.mkv"], id="one"))
    with pytest.raises(ReferenceExists, match="--id"):
        library.import_(exported)
    with pytest.raises(CatalogError, match="cannot be an id"):
        library.import_(exported, id="../x")
    assert library.import_(exported, id="first").reference.id == "first"
    assert ids(library) == ["first", "one"]


def test_an_export_of_another_encoder_is_refused_with_the_remedy(exported: Path, tmp_path: Path) -> None:
    write_grid(tmp_path / "newer.onnx", last=0.5, around_mean=True)
    library = ReferenceLibrary(tmp_path / "library", tmp_path / "newer.onnx")
    with pytest.raises(EncoderMismatch, match="copywatch refs add FILE"):
        library.import_(exported)
    assert library.list().references == ()


def test_every_flipped_byte_and_every_truncation_of_an_export_is_refused(
    exported: Path, tmp_path: Path, encoder: Path
) -> None:
    content, chance, broken = exported.read_bytes(), random.Random(3), tmp_path / "broken.copywatch"
    whole = read_export(exported)[0]
    header = 8 + int.from_bytes(content[:8], "little")
    for at in [*chance.sample(range(header), 150), *chance.sample(range(header, len(content)), 50)]:
        broken.write_bytes(content[:at] + bytes([content[at] ^ (1 << chance.randrange(8))]) + content[at + 1 :])
        try:
            found = read_export(broken)[0]
        except NotAReference:
            continue
        assert replace(found, features_sha256="") == replace(whole, features_sha256="")  # spaces of the header
    for length in (0, 1, 7, 8, 9, header - 1, header, len(content) - 1):
        broken.write_bytes(content[:length])
        with pytest.raises(NotAReference, match=r"broken\.copywatch"):
            read_export(broken)


def hostile(reference: Reference, features: ReferenceFeatures) -> dict[str, bytes]:
    """Malicious files; each has valid checksums where possible."""
    wide = ReferenceFeatures(features.rows * np.float16(3), features.informative)
    silent = ReferenceFeatures(features.rows * np.float16(0), features.informative & False)

    def header(value: object, rest: bytes = b"") -> bytes:
        text = json.dumps(value).encode()
        return struct.pack("<Q", len(text)) + text + rest

    def stamped(**values: Any) -> bytes:
        content = pack(reference, features)
        length = int.from_bytes(content[:8], "little")
        start = json.loads(content[8 : 8 + length])
        stamp = json.loads(start["__metadata__"]["copywatch"]) | values
        start["__metadata__"]["copywatch"] = json.dumps(stamp)
        return header(start, content[8 + length :])

    deep: Any = []
    for _ in range(900):
        deep = [deep]
    return {
        "path as id": pack(replace(reference, id="../../etc/cron.d/x"), features),  # type: ignore[arg-type]
        "terminal codes": pack(replace(reference, title="\x1b]0;gotcha\x07"), features),
        "endless owner": pack(replace(reference, owner="x" * 2000), features),
        "path as hash": pack(replace(reference, content_sha256="../../x"), features),
        "wrong length": pack(replace(reference, n_seconds=10**9), features),
        "negative length": pack(replace(reference, n_uninformative=-1), features),
        "rows too long": pack(reference, wide),
        "nothing in it": pack(replace(reference, n_uninformative=reference.n_seconds), silent),
        "tags of numbers": pack(replace(reference, tags={"a": 1}), features),  # type: ignore[dict-item]
        "thousand tags": pack(replace(reference, tags={str(n): "" for n in range(1000)}), features),
        "huge header": struct.pack("<Q", 1 << 62) + b"{}",
        "no header": b"\0" * 100,
        "deep header": header(deep),
        "a list": header([]),
        "no stamp": header({"__metadata__": {}}),
        "wrong stamp": header({"__metadata__": {"copywatch": "[]"}}),
        "other format": stamped(format="copywatch-reference-9"),
        "no text": stamped(record="\ud800"),
        "other record": stamped(record='{"id": "x"}'),
        "pickle": b"\x80\x04cos\nsystem\n(S'touch gotcha'\ntR.",
        "overlapping arrays": header(
            {"rows": {"dtype": "F16", "shape": [1 << 40, 512], "data_offsets": [0, 1 << 50]}}, b"x" * 1000
        ),
    }


def test_hostile_files_are_refused_and_touch_nothing(library: ReferenceLibrary, exported: Path, tmp_path: Path) -> None:
    reference, stored = read_export(exported)
    features = ReferenceFeatures(stored.rows[:], stored.informative)
    Catalog.open(library.data_dir, write=True).close()
    before = sorted(tmp_path.rglob("*"))
    for name, content in hostile(reference, features).items():
        path = tmp_path / "hostile.copywatch"
        path.write_bytes(content)
        with pytest.raises(NotAReference, match=r"^hostile\.copywatch "):
            library.import_(path)
        path.unlink()
        assert sorted(tmp_path.rglob("*")) == before, name
    assert library.list().references == ()
    with pytest.raises(NotAReference, match="cannot be read"):
        library.import_(tmp_path)


def test_an_unreadable_folder_is_reported_and_the_others_are_searched(
    library: ReferenceLibrary, films: Path, tmp_path: Path
) -> None:
    """As another user if we are root, which may read everything."""
    folder = tmp_path / "films"
    (folder / "secret").mkdir(parents=True)
    os.link(films / "one.mp4", folder / "one.mp4")
    (folder / "secret").chmod(0)
    program = (
        "import os, sys, json\nfrom pathlib import Path\n"
        "sys.path[:0] = json.loads(sys.argv[2])\n"
        "from reference_db.library import find_videos\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "found = find_videos([Path(sys.argv[1])])\n"
        "print(len(found.videos), [str(error) for _, error in found.errors])"
    )
    for parent in (folder, *folder.parents):
        if parent.stat().st_uid == os.getuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run([sys.executable, "-c", program, folder, json.dumps(sys.path)], capture_output=True, text=True)
    (folder / "secret").chmod(0o755)
    assert done.stdout == f"1 ['{folder}/secret cannot be read: Permission denied.']\n", done.stderr
    assert isinstance(MediaError("x"), CatalogError)


def test_unreadable_files_are_reported_one_by_one(encoder: Path, films: Path, tmp_path: Path) -> None:
    """As another user if we are root, which may read everything."""
    folder = tmp_path / "films"
    folder.mkdir()
    for name in ("a.mp4", "b.mp4"):
        shutil.copy(films / "one.mp4", folder / name)
        (folder / name).chmod(0)
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o777)
    program = (
        "import os, sys, json\nfrom pathlib import Path\n"
        "sys.path[:0] = json.loads(sys.argv[4])\n"
        "import reference_db.features.encoder, reference_db.search.index, reference_db.registration\n"
        "from reference_db.library import ReferenceLibrary\n"
        "library = ReferenceLibrary(Path(sys.argv[1]), Path(sys.argv[3]))\n"
        "if os.getuid() == 0: os.setuid(65534)\n"
        "print([str(added.error) for added in library.add([Path(sys.argv[2])])], len(library.list().references))"
    )
    for parent in (folder, *folder.parents, *encoder.parents):
        if parent.stat().st_uid == os.getuid() and parent != parent.parent:
            parent.chmod(parent.stat().st_mode | 0o055)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "data", folder, encoder, json.dumps(sys.path)],
        capture_output=True,
        text=True,
    )
    wanted = [f"{name} cannot be read: Permission denied." for name in ("a.mp4", "b.mp4")]
    assert done.stdout == f"{wanted} 0\n", done.stderr
