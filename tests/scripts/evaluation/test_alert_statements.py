"""What alerts state: counts and errors against a known truth."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from evaluation.alert_statements import MIN_HALF_S, Statements, first_and_second_halves
from evaluation.recordings import Recording
from evaluation.scoring import TrueCopy
from monitor.alerting.alerts import ENDED, RETRACTED, STARTED, Alert
from tests.support.sample_alert import sample_alert

TRUE = TrueCopy("ch0", "film", 100.0, 130.0, 10.0, 40.0, ())


def alert() -> Alert:
    """An alert that states the truth."""
    base = sample_alert(channel="ch0", reference="film", channel_start=100.0, channel_end=130.0)
    return replace(base, reference_start=10.0, reference_end=40.0, speed=1.0, type=ENDED)


def test_a_copy_at_its_place_is_found_and_another_is_wrong_unless_it_names_the_place() -> None:
    wrong = replace(alert(), id="wrong", reference_start=60.0, reference_end=90.0)
    hedged = replace(wrong, id="hedged", ambiguous=True, alternatives=((12.0, 42.0),))
    assert (Statements.of([alert()], [TRUE]).n_found, Statements.of([alert()], [TRUE]).n_wrong) == (1, 0)
    assert (Statements.of([wrong], [TRUE]).n_found, Statements.of([wrong], [TRUE]).n_wrong) == (0, 1)
    found = Statements.of([hedged], [TRUE])
    assert (found.n_found, found.n_wrong, found.n_ambiguous) == (1, 0, 1)


def test_every_alert_counts_once_and_retractions_need_a_reason() -> None:
    events = [
        replace(alert(), type=STARTED),
        alert(),
        replace(alert(), id="other", type=STARTED),
        replace(alert(), id="other", type=RETRACTED, reason=None),
    ]
    counted = Statements.of(events, [TRUE])
    assert (counted.n_started, counted.n_ended, counted.n_retracted, counted.n_without_reason) == (2, 1, 1, 1)
    assert counted.started_per_found == 2.0


def test_speeds_are_compared_with_the_truth_and_with_the_spans() -> None:
    counted = Statements.of([replace(alert(), speed=1.05)], [TRUE])
    assert (counted.n_speeds, counted.speed_error_median, counted.n_speeds_unlike_spans) == (1, 0.05, 1)
    assert Statements.of([replace(alert(), speed=None)], [TRUE]).n_speeds == 0


def test_halves_are_cut_in_the_middle_and_short_films_left_out() -> None:
    films = [
        Recording(name, np.eye(n, 512, dtype=np.float32), np.ones(n, np.bool_))
        for name, n in (("long", 2 * MIN_HALF_S + 1), ("short", MIN_HALF_S))
    ]
    first, second = first_and_second_halves(films)
    assert [half.name for half in first + second] == ["long", "long"]
    assert np.array_equal(np.concatenate([first[0].rows, second[0].rows]), films[0].rows)
