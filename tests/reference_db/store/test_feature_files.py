"""Feature files: written deterministically, read in pieces, accepted only if every check passes.

test_library.py tries hostile files.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from reference_db.errors import NotAReference
from reference_db.store.feature_files import StoredFeatures, check_header, features_id, pack, read_untrusted
from reference_db.store.references import BLOCK_ROWS, MAX_SECONDS, Reference, ReferenceFeatures, ReferenceId

N_SECONDS = 6
REFERENCE = Reference(
    ReferenceId("film-1"),
    *("A Film", "Söhne", {"year": "1999"}, "c" * 64, N_SECONDS, 1, "enc-1", ""),
    datetime(2026, 3, 1, 12, 0, tzinfo=UTC),
)


def features(n_seconds: int = N_SECONDS) -> ReferenceFeatures:
    rows = np.random.default_rng(0).standard_normal((n_seconds, 512))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return ReferenceFeatures(rows.astype(np.float16), np.arange(n_seconds) != 3)


def test_the_identity_of_features_depends_on_rows_flags_and_encoder_only() -> None:
    one = features()
    rows, flags = one.rows.copy(), one.informative.copy()
    rows[0, 0] += np.float16(0.25)
    flags[0] = False
    others = [
        features_id("enc-2", one),
        features_id("enc-1", ReferenceFeatures(rows, one.informative)),
        features_id("enc-1", ReferenceFeatures(one.rows, flags)),
        features_id("enc-1", features(N_SECONDS + 1)),
    ]
    assert features_id("enc-1", features()) == features_id("enc-1", one)
    assert len({*others, features_id("enc-1", one)}) == 5


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "film.copywatch"


def test_a_file_is_what_safetensors_writes() -> None:
    content, both = pack(REFERENCE, features()), features()
    length = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + length])["__metadata__"]
    assert save({"rows": both.rows, "informative": both.informative}, metadata=metadata) == content


@pytest.mark.parametrize("n_seconds", [N_SECONDS, BLOCK_ROWS, BLOCK_ROWS + 1])
def test_a_packed_reference_is_read_unchanged(path: Path, n_seconds: int) -> None:
    expected = features(n_seconds)
    content = pack(replace(REFERENCE, n_seconds=n_seconds), expected)
    path.write_bytes(content)
    reference, read = read_untrusted(path)
    sha256 = hashlib.sha256(content).hexdigest()
    identity = features_id(REFERENCE.encoder_id, expected)
    assert reference == replace(REFERENCE, n_seconds=n_seconds, features_sha256=sha256, features_id=identity)
    assert read.sha256() == sha256
    assert check_header(path) == replace(reference, features_sha256="", features_id="")
    assert np.array_equal(read.rows[:], expected.rows)
    assert np.array_equal(read.rows[2:5], expected.rows[2:5])
    assert np.array_equal(read.informative, expected.informative)
    assert pack(replace(REFERENCE, n_seconds=n_seconds), read) == content


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"n_seconds": 7}, "is inconsistent"),
        ({"n_uninformative": 2}, "is inconsistent"),
        ({"id": "../up"}, "has an invalid record"),
        ({"content_sha256": "x"}, "has an invalid record"),
        ({"title": "two\nlines"}, "has an invalid record"),
    ],
)
def test_a_record_that_is_invalid_or_does_not_match_its_arrays_is_refused(
    path: Path, changes: dict[str, object], sentence: str
) -> None:
    path.write_bytes(pack(replace(REFERENCE, **changes), features()))  # type: ignore[arg-type]
    for check in (check_header, read_untrusted):
        with pytest.raises(NotAReference, match=sentence):
            check(path)


def test_rows_must_have_unit_length(path: Path) -> None:
    path.write_bytes(pack(REFERENCE, ReferenceFeatures(features().rows * np.float16(1.1), features().informative)))
    with pytest.raises(NotAReference, match="has rows that no encoder produces"):
        read_untrusted(path)


def test_a_file_that_changes_while_it_is_open_gives_zeros(path: Path) -> None:
    path.write_bytes(pack(REFERENCE, features()))
    stored = StoredFeatures(path)
    path.write_bytes(b"")
    assert not stored.rows[:].any()
    assert stored.sha256() == hashlib.sha256(b"").hexdigest()


def test_an_endless_file_is_refused_by_its_header(path: Path) -> None:
    n_seconds = 10**12
    header = {
        "rows": {"dtype": "F16", "shape": [n_seconds, 512], "data_offsets": [0, n_seconds * 1024]},
        "informative": {"dtype": "BOOL", "shape": [n_seconds], "data_offsets": [n_seconds * 1024, n_seconds * 1025]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(NotAReference, match=f"longer than the {MAX_SECONDS // 3600} hours"):
        read_untrusted(path)
