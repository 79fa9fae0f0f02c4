"""The truth about paired pictures: the partner of each moment under each edit, and the shares of right pairs."""

from __future__ import annotations

import pytest

from evaluation.evidence_pairs import JudgedPair, figures, true_partner
from evaluation.scoring import TrueCopy


def copy(length_s: float, aired_s: float, *edits: str) -> TrueCopy:
    return TrueCopy("ch0", "film", 100.0, 100.0 + aired_s, 30.0, 30.0 + length_s, edits)


@pytest.mark.parametrize(
    ("true", "expected"),
    [
        (copy(20, 20, "logo"), [30, 35, 40, 45]),
        (copy(25, 20, "speed1.25"), [30, 36.25, 42.5, 48.75]),
        (copy(20, 23, "blur", "freeze"), [30, 35, 40, 42]),
        (copy(20, 17, "cut"), [30, 35, 43, 48]),
    ],
)
def test_the_partner_follows_the_edit(true: TrueCopy, expected: list[float]) -> None:
    assert [true_partner(true, 100 + at) for at in (0, 5, 10, 15)] == expected


def pair(ref_s: float, *, true_s: float | None = 40.0, line_s: float = 40.2, ambiguous: bool = False) -> JudgedPair:
    return JudgedPair("ch0", "film", (), 110.0, ref_s, true_s, line_s, ambiguous, looks_right=ref_s == 42.0)


def test_the_shares_count_what_is_right_within_half_a_second() -> None:
    pairs = [pair(40.5), pair(39.4), pair(42.0), pair(50.0, line_s=50.1, ambiguous=True), pair(40.0, true_s=None)]
    found = figures(pairs)
    assert (found["pairs"], found["right"], found["right_by_eye"]) == (5, 0.2, 0.4)
    assert (found["at_the_right_time"], found["right_of_those"]) == (3, 0.3333)
    assert found["right_unless_ambiguous"] == 0.25
    assert figures([])["right"] is None
