"""References: records that are read back unchanged, texts that can be printed, features of the right shape."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from reference_db.errors import CatalogError
from reference_db.store.references import (
    MAX_TAGS,
    MAX_TEXT_LENGTH,
    Reference,
    ReferenceFeatures,
    ReferenceId,
    check_texts,
    printable,
    record_of,
    reference_from_record,
)

N_SECONDS = 6
REFERENCE = Reference(
    ReferenceId("film-1"),
    *("A Film", "Söhne", {"year": "1999"}, "c" * 64, N_SECONDS, 1, "enc-1", ""),
    datetime(2026, 3, 1, 12, 0, tzinfo=UTC),
)


def test_a_record_is_read_back_unchanged() -> None:
    assert reference_from_record(record_of(REFERENCE), "") == REFERENCE


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
