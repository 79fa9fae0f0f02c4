"""Feature files: packed deterministically, unpacked only if every check passes. test_library.py tries hostile files."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from reference_db.errors import CatalogError, NotAReference
from reference_db.store.references import (
    MAX_TAGS,
    MAX_TEXT_LENGTH,
    Reference,
    ReferenceFeatures,
    ReferenceId,
    check_texts,
    pack,
    printable,
    record_of,
    reference_from_record,
    unpack,
)

N_SECONDS = 6
REFERENCE = Reference(
    ReferenceId("film-1"),
    *("A Film", "Söhne", {"year": "1999"}, "c" * 64, N_SECONDS, 1, "enc-1", ""),
    datetime(2026, 3, 1, 12, 0, tzinfo=UTC),
)


def features() -> ReferenceFeatures:
    rows = np.random.default_rng(0).standard_normal((N_SECONDS, 512))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return ReferenceFeatures(rows.astype(np.float16), np.arange(N_SECONDS) != 3)


def test_a_record_is_read_back_unchanged() -> None:
    assert reference_from_record(record_of(REFERENCE), "") == REFERENCE


def test_a_packed_reference_is_unpacked_unchanged() -> None:
    content = pack(REFERENCE, features())
    assert pack(REFERENCE, features()) == content
    reference, read = unpack(content)
    assert reference == replace(REFERENCE, features_sha256=hashlib.sha256(content).hexdigest())
    assert np.array_equal(read.rows, features().rows)
    assert np.array_equal(read.informative, features().informative)


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
    changes: dict[str, object], sentence: str
) -> None:
    content = pack(replace(REFERENCE, **changes), features())  # type: ignore[arg-type]
    with pytest.raises(NotAReference, match=sentence):
        unpack(content)


def test_rows_must_have_unit_length() -> None:
    longer = ReferenceFeatures(features().rows * np.float16(1.1), features().informative.copy())
    with pytest.raises(NotAReference, match="has rows that no encoder produces"):
        unpack(pack(REFERENCE, longer))


def test_printable_text_passes_the_check() -> None:
    hostile = "a\x1b[31m\u202eb\ud800" + "x" * 2000
    with pytest.raises(CatalogError, match="is invalid"):
        check_texts(hostile, "", {})
    check_texts(printable(hostile), printable(hostile), {printable(hostile): ""})
    assert len(printable(hostile)) == MAX_TEXT_LENGTH
    with pytest.raises(CatalogError, match="101 tags are too many"):
        check_texts("", "", {str(n): "" for n in range(MAX_TAGS + 1)})


@pytest.mark.parametrize(
    ("rows", "informative"),
    [
        (np.zeros((3, 512), np.float32), np.ones(3, np.bool_)),
        (np.zeros((3, 511), np.float16), np.ones(3, np.bool_)),
        (np.zeros((3, 512), np.float16), np.ones(4, np.bool_)),
        (np.full((3, 512), np.inf, np.float16), np.ones(3, np.bool_)),
    ],
)
def test_features_of_another_shape_or_type_are_refused(rows: np.ndarray, informative: np.ndarray) -> None:
    with pytest.raises(ValueError, match="must be"):
        ReferenceFeatures(rows, informative)
