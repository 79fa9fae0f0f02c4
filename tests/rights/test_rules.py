"""Rules: which plays a licence covers, and what licences, exclusions and reviews do to the alerts of a channel."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from monitor.alerting.alert_book import EXCLUDED
from monitor.alerting.alerts import ENDED, RETRACTED, REVIEWED_FALSE, STARTED, UPDATED, Alert
from monitor.config.settings import Settings
from monitor.ops.metrics import Metrics
from monitor.rights.rules import Licence, Rules
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.store.catalog import Reference, ReferenceId
from tests.support.planted_channels import (
    BEGAN,
    FILMS,
    Part,
    PlantedStream,
    alerts_of,
    library,
    parts,
    plant,
    quick_models,
)

SWIFT = ReferenceId("swift")
#   0 noise 10 swift from its second 20 on 60 noise 80
AIR = plant([Part(10, noise=1.0), Part(50, "swift", 20, noise=0.2), Part(20, noise=1.0)])
OPEN_S, CHANGED_S = 30, 40
ALERT, OTHER = "a" * 24, "b" * 24
NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)


def film(owner: str = "ACME", **tags: str) -> Reference:
    return Reference(ReferenceId("film"), "Film", owner, tags, "0" * 64, 100, 0, "enc", "0" * 64, NOON)


def licence_for(**named: object) -> Licence:
    values = dict.fromkeys(("reference", "owner", "tag", "from_", "until")) | {"channel": "*"} | named
    return Licence("L1", note="", added_at=NOON, **values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("licence", "covers"),
    [
        (licence_for(reference="film"), True),
        (licence_for(reference="other"), False),
        (licence_for(owner="ACME"), True),
        (licence_for(owner="acme"), False),
        (licence_for(tag="territory=EU"), True),
        (licence_for(tag="territory=US"), False),
        (licence_for(owner="ACME", tag="territory=US"), False),
        (licence_for(reference="film", channel="ch5"), True),
        (licence_for(reference="film", channel="ch6"), False),
        (licence_for(reference="film", from_=NOON), True),
        (licence_for(reference="film", from_=NOON + HOUR), False),
        (licence_for(reference="film", until=NOON + HOUR), True),
        (licence_for(reference="film", from_=NOON - HOUR, until=NOON + HOUR / 4), False),  # the play outlasts it
        (licence_for(reference="film", until=NOON - HOUR), False),
        (
            licence_for(reference="film", from_=NOON + timedelta(seconds=40)),
            True,
        ),  # within the slack
    ],
)
def test_a_licence_covers_what_it_names(licence: Licence, covers: bool) -> None:
    assert licence.covers(film(territory="EU"), "ch5", NOON, NOON + HOUR / 2) is covers


def test_a_play_without_a_wall_clock_is_in_no_time_window_and_the_oldest_licence_counts() -> None:
    assert not licence_for(reference="film", from_=NOON).covers(film(), "ch5", None, None)
    both = Rules([licence_for(owner="ACME"), licence_for(reference="film")], {}, {ALERT: "licensed", OTHER: "false"})
    assert both.licence(ALERT, film(), "ch5", None, None) == "L1"
    assert both.licence(ALERT, film("Other"), "ch5", None, None) == "L1"
    assert Rules([], {}, both.verdicts).licence(ALERT, film(), "ch5", None, None) == "reviewed"
    assert Rules([], {}, both.verdicts).licence(OTHER, film(), "ch5", None, None) is None


# --- on a channel of planted features ---------------------------------------------------------------------------------


def active_library(rules: Rules | None = None) -> ActiveLibrary:
    return ActiveLibrary(library(FILMS).index, rules or Rules())


def new_monitor(library: ActiveLibrary, metrics: Metrics | None = None) -> ChannelMonitor:
    return ChannelMonitor(library, quick_models(), Settings(), metrics or Metrics(CollectorRegistry()))


def all_alerts(rules: Rules, air: PlantedStream = AIR, metrics: Metrics | None = None) -> list[Alert]:
    monitor = new_monitor(active_library(rules), metrics)
    return alerts_of(monitor, air) + monitor.finish()


def alerts_by_rules(before: Rules, after: Rules, *later: Rules) -> list[list[Alert]]:
    """The alerts under each of the rules; the first change is at CHANGED_S, others 5 s apart."""
    library, cuts = active_library(before), [0, *(CHANGED_S + 5 * n for n in range(1 + len(later))), None]
    monitor, alerts = new_monitor(library), []
    for rules, begin, end in zip((before, after, *later), cuts, cuts[1:], strict=False):
        library.rules = rules
        alerts.append(alerts_of(monitor, AIR, begin or 0, end))
    alerts[-1] += monitor.finish()
    return alerts


def types(alerts: list[Alert]) -> list[str]:
    return [alert.type for alert in alerts]


def licence(until: datetime | None = None) -> Licence:
    return Licence("L7", "swift", None, None, "ch5", BEGAN - timedelta(hours=1), until, "", BEGAN)


def assert_one_alert_in_order(alerts: list[Alert]) -> None:
    assert len({alert.id for alert in alerts}) == 1
    assert [alert.seq for alert in alerts] == list(range(1, len(alerts) + 1))


@pytest.fixture(scope="module")
def unruled() -> list[Alert]:
    """The alerts without any rules."""
    alerts = all_alerts(Rules())
    assert types(alerts)[0] == STARTED
    assert types(alerts)[-1] == ENDED
    assert_one_alert_in_order(alerts)
    return alerts


def test_a_licensed_play_alerts_with_its_licence_and_is_otherwise_unchanged(unruled: list[Alert]) -> None:
    assert all_alerts(Rules([licence()])) == [replace(alert, licence="L7") for alert in unruled]
    elsewhere = replace(licence(), channel="ch6")
    assert all_alerts(Rules([elsewhere])) == unruled


def test_a_play_that_outlasts_its_licence_is_licensed_until_then(unruled: list[Alert]) -> None:
    # The window, with its slack of a minute, closes at second 35.
    alerts = all_alerts(Rules([licence(BEGAN + timedelta(seconds=35 - 60))]))
    assert [alert.licence for alert in alerts] == ["L7" if alert.channel_end <= 35 else None for alert in unruled]
    assert {alert.licence for alert in alerts} == {"L7", None}


def test_a_licence_added_or_removed_on_air_updates_the_alert_at_once() -> None:
    before, added, removed = alerts_by_rules(Rules(), Rules([licence()]), Rules())
    assert {alert.licence for alert in before} == {None}
    assert (added[0].type, added[0].licence, added[0].channel_end <= CHANGED_S) == (UPDATED, "L7", True)
    assert (removed[0].type, removed[0].licence) == (UPDATED, None)
    assert_one_alert_in_order(before + added + removed)


def test_an_excluded_span_never_alerts_and_is_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    assert all_alerts(Rules([], {SWIFT: [(15.0, 75.0)]}), AIR, metrics) == []
    counted = metrics.registry.get_sample_value(
        "copywatch_alerts_suppressed_total", {"channel": "ch5", "reason": "exclusion"}
    )
    assert counted == 1


def test_a_copy_that_reaches_beyond_an_excluded_span_alerts_without_the_span(unruled: list[Alert]) -> None:
    #   the film's 20-40 are excluded: on air 10-30
    alerts = all_alerts(Rules([], {SWIFT: [(0.0, 40.0)]}))
    assert (types(alerts)[0], types(alerts)[-1]) == (STARTED, ENDED)
    assert alerts[0].id == unruled[0].id
    assert alerts[0].detected_at >= 30 > unruled[0].detected_at
    last = alerts[-1]
    assert last.reference_start == 40
    assert last.channel_start == pytest.approx(30, abs=1)
    assert (last.channel_end, last.reference_end) == (unruled[-1].channel_end, unruled[-1].reference_end)
    assert last.matched_seconds == pytest.approx(30, abs=2)


def test_excluding_a_span_on_air_retracts_the_alert_and_including_it_resumes_it() -> None:
    excluded = Rules([], {SWIFT: [(0.0, 90.0)]})
    before, within, after = alerts_by_rules(Rules(), excluded, Rules())
    assert types(before)[0] == STARTED
    (retracted,) = within
    assert (retracted.type, retracted.reason) == (RETRACTED, EXCLUDED)
    assert (types(after)[0], types(after)[-1]) == (UPDATED, ENDED)
    assert_one_alert_in_order(before + within + after)


def test_a_false_alert_is_retracted_on_air_and_stays_silent(unruled: list[Alert]) -> None:
    before, after = alerts_by_rules(Rules(), Rules([], {}, {unruled[0].id: "false"}))
    (retracted,) = after
    assert (retracted.type, retracted.reason) == (RETRACTED, REVIEWED_FALSE)
    assert_one_alert_in_order(before + after)


def test_reversing_a_false_review_resumes_the_alert(unruled: list[Alert]) -> None:
    false, confirmed = Rules([], {}, {unruled[0].id: "false"}), Rules([], {}, {unruled[0].id: "confirmed"})
    before, within, after = alerts_by_rules(Rules(), false, confirmed)
    assert types(within) == [RETRACTED]
    assert (types(after)[0], types(after)[-1]) == (UPDATED, ENDED)
    assert_one_alert_in_order(before + within + after)
    assert replace(after[-1], seq=0) == replace(unruled[-1], seq=0)


def test_a_replay_from_the_start_retracts_a_false_alert_again(unruled: list[Alert]) -> None:
    """A replay without a snapshot emits the same events again, with the same ids and numbers."""
    alerts = all_alerts(Rules([], {}, {unruled[0].id: "false"}))
    assert types(alerts) == [STARTED, RETRACTED]
    assert alerts[0] == unruled[0]


def test_a_false_alert_whose_stream_ends_at_once_is_retracted_not_ended(unruled: list[Alert]) -> None:
    library = active_library()
    monitor = new_monitor(library)
    before = alerts_of(monitor, AIR, 0, CHANGED_S)
    library.rules = Rules([], {}, {unruled[0].id: "false"})
    (last,) = monitor.finish()
    assert (last.type, last.reason) == (RETRACTED, REVIEWED_FALSE)
    assert_one_alert_in_order([*before, last])


@settings(max_examples=12, deadline=None)
@given(parts(), st.sampled_from(FILMS))
def test_a_reference_that_is_excluded_whole_never_alerts_and_others_do(drawn: list[Part], film: str) -> None:
    air = plant(drawn)

    def alerts_under(rules: Rules) -> list[Alert]:
        monitor = ChannelMonitor(active_library(rules), quick_models(), Settings(), Metrics(CollectorRegistry()))
        return alerts_of(monitor, air) + monitor.finish()

    excluded = Rules([], {ReferenceId(film): [(0.0, 1e6)]})
    assert alerts_under(excluded) == [alert for alert in alerts_under(Rules()) if alert.reference != film]


@pytest.mark.parametrize("restart_at", [OPEN_S, CHANGED_S + 1, CHANGED_S + 4, CHANGED_S + 8])
def test_a_restored_monitor_emits_what_an_unbroken_one_does(restart_at: int, unruled: list[Alert]) -> None:
    first = Rules([licence()], {SWIFT: [(0.0, 25.0)]})
    second = replace(first, verdicts={unruled[0].id: "false"})
    third = Rules([licence()])

    def rules_at(second_s: int) -> Rules:
        return first if second_s < CHANGED_S else second if second_s < CHANGED_S + 5 else third

    def alerts_with_restart(restart_at: int | None) -> list[Alert]:
        library = active_library()
        monitor, alerts = new_monitor(library), []
        for n in range(len(AIR)):
            library.rules = rules_at(n)
            if n == restart_at:
                snapshot, monitor = monitor.snapshot({"n": n}), new_monitor(library)
                alerts += monitor.restore(snapshot).alerts
            alerts += alerts_of(monitor, AIR, n, n + 1)
        return alerts + monitor.finish()

    unbroken = alerts_with_restart(None)
    assert {STARTED, RETRACTED, UPDATED, ENDED} == set(types(unbroken))
    assert alerts_with_restart(restart_at) == unbroken
