"""Picking one picture per second: the pickers against slow oracles. test_sampling.py samples whole files."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from reference_db.media.frames import MAX_HOLD_S, HeldOneFps, OneFps

# Times on a grid of 1/8 s meet the borders s and s+0.5 often.
times = st.lists(st.integers(0, 200), min_size=1, max_size=60).map(lambda ticks: sorted(tick / 8 for tick in ticks))


def picked(pts: list[float]) -> list[tuple[int, float, int]]:
    """What OneFps picks of the pictures at these times, numbered in order."""
    picker: OneFps[int] = OneFps()
    return [pick for number, t in enumerate(pts) for pick in picker.push(t, number)] + picker.finish()


def picked_slowly(pts: list[float]) -> list[tuple[int, float, int]]:
    picks = []
    for second in range(math.floor(pts[-1]) + 1):
        late = [(second, t, n) for n, t in enumerate(pts) if second + 0.5 <= t < second + 1]
        early = [(second, t, n) for n, t in enumerate(pts) if second <= t < second + 0.5]
        picks += late[:1] or early[-1:]
    return picks


@settings(deadline=None)
@given(pts=times)
def test_one_fps_shows_each_second_by_the_picture_at_its_middle(pts: list[float]) -> None:
    assert picked(pts) == picked_slowly(pts)


@settings(deadline=None)
@given(pts=times, start=st.integers(0, 59))
def test_one_fps_does_not_depend_on_where_reading_starts(pts: list[float], start: int) -> None:
    start = min(start, len(pts) - 1)
    first = math.floor(pts[start])  # this second's pick may have been missed
    whole = [(second, t) for second, t, _ in picked(pts) if second > first]
    assert [(second, t) for second, t, _ in picked(pts[start:]) if second > first] == whole


def test_one_fps_returns_a_pick_as_soon_as_it_is_certain() -> None:
    picker: OneFps[str] = OneFps()
    assert picker.push(7.4, "a") == []
    assert picker.push(7.5, "b") == [(7, 7.5, "b")]
    assert picker.push(7.6, "c") == []
    assert picker.push(8.1, "d") == []
    assert picker.push(10.0, "e") == [(8, 8.1, "d")]
    assert picker.finish() == [(10, 10.0, "e")]
    assert picker.finish() == []


def test_one_fps_drops_late_pictures_but_follows_a_clock_reset() -> None:
    picker: OneFps[str] = OneFps()
    assert picker.push(95_443.7, "a") == [(95_443, 95_443.7, "a")]
    assert picker.push(95_440.6, "late") == []
    assert picker.push(0.1, "b") == []
    assert picker.push(0.6, "c") == [(0, 0.6, "c")]


@settings(deadline=None)
@given(keys=times, more_s=st.integers(0, 40))
def test_held_pictures_show_the_last_key_at_each_middle(keys: list[float], more_s: int) -> None:
    keys = sorted(set(keys))
    end_s = keys[-1] + more_s / 4
    picker: HeldOneFps[float] = HeldOneFps()
    picks = [pick for key in keys for pick in picker.push(key, key)] + picker.finish(end_s)
    expected: list[tuple[int, float, float, bool]] = []
    for second in range(math.floor(end_s) + 1):
        before = [key for key in keys if key <= second + 0.5]
        if before and second - before[-1] <= MAX_HOLD_S:
            expected.append((second, before[-1], before[-1], bool(expected) and expected[-1][1] == before[-1]))
    assert picks == expected


@settings(deadline=None)
@given(keys=times, marks=times)
def test_held_pictures_do_not_depend_on_how_often_time_is_reported(keys: list[float], marks: list[float]) -> None:
    keys = sorted(set(keys))
    end_s = max(keys[-1], marks[-1])
    often: HeldOneFps[float] = HeldOneFps()
    picks = []
    for t, is_key in sorted([(key, True) for key in keys] + [(mark, False) for mark in marks]):
        picks += often.push(t, t) if is_key else often.reach(t)
    never: HeldOneFps[float] = HeldOneFps()
    assert picks + often.finish(end_s) == [p for key in keys for p in never.push(key, key)] + never.finish(end_s)
