"""Licences, exclusions and reviews on a channel of planted features: what is told, and what no longer is."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from monitor.alerting.alerts import ENDED, EXCLUDED, RETRACTED, REVIEWED_FALSE, STARTED, UPDATED, Alert
from monitor.config.settings import Settings
from monitor.ops.metrics import Metrics
from monitor.rights.rules import Licence, Rules
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor
from reference_db.store.catalog import ReferenceId
from tests.support.planted_channels import BEGAN, FILMS, Air, Part, aired, library, parts, quick, told

SWIFT = ReferenceId("swift")
#   0 noise 10 swift from its second 20 on 60 noise 80
AIR = aired([Part(10, noise=1.0), Part(50, "swift", 20, noise=0.2), Part(20, noise=1.0)])
OPEN_S, CHANGED_S = 30, 40


def lent(rules: Rules | None = None) -> ActiveLibrary:
    return ActiveLibrary(library(FILMS).index, rules or Rules())


def watch(library: ActiveLibrary, metrics: Metrics | None = None) -> ChannelMonitor:
    return ChannelMonitor(library, quick(), Settings(), metrics or Metrics(CollectorRegistry()))


def all_told(rules: Rules, air: Air = AIR, metrics: Metrics | None = None) -> list[Alert]:
    watching = watch(lent(rules), metrics)
    return told(watching, air) + watching.finish()


def changing(before: Rules, after: Rules, *later: Rules) -> list[list[Alert]]:
    """What is told under each of the rules; the first change is at CHANGED_S, others 5 s apart."""
    library, cuts = lent(before), [0, *(CHANGED_S + 5 * n for n in range(1 + len(later))), None]
    watching, heard = watch(library), []
    for rules, begin, end in zip((before, after, *later), cuts, cuts[1:], strict=False):
        library.rules = rules
        heard.append(told(watching, AIR, begin or 0, end))
    heard[-1] += watching.finish()
    return heard


def types(alerts: list[Alert]) -> list[str]:
    return [alert.type for alert in alerts]


def licence(until: datetime | None = None) -> Licence:
    return Licence("L7", "swift", None, None, "ch5", BEGAN - timedelta(hours=1), until, "", BEGAN)


def in_order(alerts: list[Alert]) -> None:
    assert len({alert.id for alert in alerts}) == 1
    assert [alert.seq for alert in alerts] == list(range(1, len(alerts) + 1))


@pytest.fixture(scope="module")
def free() -> list[Alert]:
    """What is told without a desk."""
    alerts = all_told(Rules())
    assert types(alerts)[0] == STARTED
    assert types(alerts)[-1] == ENDED
    in_order(alerts)
    return alerts


def test_a_licensed_play_is_told_as_such_and_else_as_ever(free: list[Alert]) -> None:
    assert all_told(Rules([licence()])) == [replace(alert, licence="L7") for alert in free]
    elsewhere = replace(licence(), channel="ch6")
    assert all_told(Rules([elsewhere])) == free


def test_a_play_that_outlasts_its_licence_is_licensed_until_then(free: list[Alert]) -> None:
    # The window, with its slack of a minute, closes at second 35.
    alerts = all_told(Rules([licence(BEGAN + timedelta(seconds=35 - 60))]))
    assert [alert.licence for alert in alerts] == ["L7" if alert.channel_end <= 35 else None for alert in free]
    assert {alert.licence for alert in alerts} == {"L7", None}


def test_a_licence_given_on_air_is_told_at_once_and_so_is_its_end() -> None:
    before, given, taken = changing(Rules(), Rules([licence()]), Rules())
    assert {alert.licence for alert in before} == {None}
    assert (given[0].type, given[0].licence, given[0].channel_end <= CHANGED_S) == (UPDATED, "L7", True)
    assert (taken[0].type, taken[0].licence) == (UPDATED, None)
    in_order(before + given + taken)


def test_an_excluded_span_never_alerts_and_is_counted() -> None:
    metrics = Metrics(CollectorRegistry())
    assert all_told(Rules([], {SWIFT: [(15.0, 75.0)]}), AIR, metrics) == []
    counted = metrics.registry.get_sample_value(
        "copywatch_alerts_suppressed_total", {"channel": "ch5", "reason": "exclusion"}
    )
    assert counted == 1


def test_what_lies_beside_an_excluded_span_is_told_without_it(free: list[Alert]) -> None:
    #   the film's 20-40 are excluded: on air 10-30
    alerts = all_told(Rules([], {SWIFT: [(0.0, 40.0)]}))
    assert (types(alerts)[0], types(alerts)[-1]) == (STARTED, ENDED)
    assert alerts[0].id == free[0].id
    assert alerts[0].detected_at >= 30 > free[0].detected_at
    last = alerts[-1]
    assert last.reference_start == 40
    assert last.channel_start == pytest.approx(30, abs=1)
    assert (last.channel_end, last.reference_end) == (free[-1].channel_end, free[-1].reference_end)
    assert last.matched_seconds == pytest.approx(30, abs=2)


def test_a_span_excluded_on_air_retracts_and_included_again_comes_back() -> None:
    excluded = Rules([], {SWIFT: [(0.0, 90.0)]})
    before, within, after = changing(Rules(), excluded, Rules())
    assert types(before)[0] == STARTED
    (retracted,) = within
    assert (retracted.type, retracted.reason) == (RETRACTED, EXCLUDED)
    assert (types(after)[0], types(after)[-1]) == (UPDATED, ENDED)
    in_order(before + within + after)


def test_a_false_alert_is_retracted_on_air_and_told_no_more(free: list[Alert]) -> None:
    before, after = changing(Rules(), Rules([], {}, {free[0].id: "false"}))
    (retracted,) = after
    assert (retracted.type, retracted.reason) == (RETRACTED, REVIEWED_FALSE)
    in_order(before + after)


def test_a_reviewer_who_takes_it_back_has_the_alert_back(free: list[Alert]) -> None:
    false, confirmed = Rules([], {}, {free[0].id: "false"}), Rules([], {}, {free[0].id: "confirmed"})
    before, within, after = changing(Rules(), false, confirmed)
    assert types(within) == [RETRACTED]
    assert (types(after)[0], types(after)[-1]) == (UPDATED, ENDED)
    in_order(before + within + after)
    assert replace(after[-1], seq=0) == replace(free[-1], seq=0)


def test_heard_again_from_the_beginning_a_false_alert_ends_as_it_did(free: list[Alert]) -> None:
    """A replay that lost its state says again what was said, with the same id and numbers, and what became of it."""
    alerts = all_told(Rules([], {}, {free[0].id: "false"}))
    assert types(alerts) == [STARTED, RETRACTED]
    assert alerts[0] == free[0]


def test_a_false_alert_whose_stream_ends_at_once_is_retracted_not_ended(free: list[Alert]) -> None:
    library = lent()
    watching = watch(library)
    before = told(watching, AIR, 0, CHANGED_S)
    library.rules = Rules([], {}, {free[0].id: "false"})
    (last,) = watching.finish()
    assert (last.type, last.reason) == (RETRACTED, REVIEWED_FALSE)
    in_order([*before, last])


@settings(max_examples=12, deadline=None)
@given(parts(), st.sampled_from(FILMS))
def test_a_reference_that_is_excluded_whole_never_alerts_and_no_other_notices(drawn: list[Part], film: str) -> None:
    air = aired(drawn)

    def heard(rules: Rules) -> list[Alert]:
        watching = ChannelMonitor(lent(rules), quick(), Settings(), Metrics(CollectorRegistry()))
        return told(watching, air) + watching.finish()

    excluded = Rules([], {ReferenceId(film): [(0.0, 1e6)]})
    assert heard(excluded) == [alert for alert in heard(Rules()) if alert.reference != film]


@pytest.mark.parametrize("cut", [OPEN_S, CHANGED_S + 1, CHANGED_S + 4, CHANGED_S + 8])
def test_going_on_from_a_snapshot_tells_what_never_stopping_tells(cut: int, free: list[Alert]) -> None:
    first = Rules([licence()], {SWIFT: [(0.0, 25.0)]})
    second = replace(first, verdicts={free[0].id: "false"})
    third = Rules([licence()])

    def at(second_s: int) -> Rules:
        return first if second_s < CHANGED_S else second if second_s < CHANGED_S + 5 else third

    def heard(broken_at: int | None) -> list[Alert]:
        library = lent()
        watching, alerts = watch(library), []
        for n in range(len(AIR)):
            library.rules = at(n)
            if n == broken_at:
                kept, watching = watching.snapshot({"n": n}), watch(library)
                alerts += watching.restore(kept).alerts
            alerts += told(watching, AIR, n, n + 1)
        return alerts + watching.finish()

    unbroken = heard(None)
    assert {STARTED, RETRACTED, UPDATED, ENDED} == set(types(unbroken))
    assert heard(cut) == unbroken
