"""Text of users: one rule for every place that prints it."""

from __future__ import annotations

import pytest

from reference_db.text import is_printable, printable


@pytest.mark.parametrize("character", ["\x00", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u202e", "\u2066", "\ud800"])
def test_characters_that_control_a_terminal_or_the_direction_of_text(character: str) -> None:
    assert not is_printable(f"a{character}b")
    assert printable(f"a{character}b") == "a\N{REPLACEMENT CHARACTER}b"


@pytest.mark.parametrize("text", ["", "Film [/x]", "Ночной дозор", "映画", "עברית", "🎬 \u00a0\u200d"])
def test_ordinary_text_stays(text: str) -> None:
    assert is_printable(text)
    assert printable(text) == text
