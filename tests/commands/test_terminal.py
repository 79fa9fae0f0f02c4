"""Tables of commands: their cells are text of others, never markup or control characters."""

from __future__ import annotations

import pytest

from monitor.commands.terminal import print_table, progress_bar

HOSTILE = [
    "Film [/x]",
    "[link=http://evil.example/x]Film[/link]",
    "[blink red]Film",
    "a\x1b]8;;http://evil.example\x07b",
]


def test_markup_and_control_characters_are_printed_as_they_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setenv("COLUMNS", "200")
    print_table(("TITLE",), [(title,) for title in HOSTILE])
    printed = capsys.readouterr().out
    for title in HOSTILE[:3]:
        assert title in printed
    assert "\x1b]8;" not in printed
    assert "\x1b[5" not in printed
    assert "a\N{REPLACEMENT CHARACTER}]8;;http://evil.example\N{REPLACEMENT CHARACTER}b" in printed


def test_the_name_of_a_file_in_a_progress_bar_is_not_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with progress_bar("Film [/x].mp4") as update:
        update(1, 2)
