"""A short sample of `scripts/chaos.py kafka`: members and the broker fail, and the alerts stay the same."""

from __future__ import annotations

import pytest

from tests.chaos.kafka import Baseline, control, kills, zombie_and_broker
from tests.support.broker import Broker
from tests.support.killed_match import REFUSING


@pytest.fixture(scope="module")
def baseline(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return Baseline.build(tmp_path_factory.mktemp("chaos"), broker, seed=3, channels=3, seconds=60)


def test_the_undisturbed_run_has_enough_alerts_to_compare(baseline: Baseline) -> None:
    types = [alert["type"] for alert in baseline.alerts]
    assert types.count("alert.started") >= 6
    assert types.count("alert.started") == types.count("alert.ended") + types.count("alert.retracted")


def test_killed_matchers_lose_no_alert_and_create_no_id(baseline: Baseline) -> None:
    trial = kills(baseline, seed=1, n_kills=6, soon=True)
    assert trial.difference
    assert trial.deaths.total() >= 6
    assert trial.difference.n_wrong == 0, trial
    assert trial.difference.repeated == 0, trial


def test_a_paused_member_and_a_killed_broker_change_no_alert(baseline: Baseline) -> None:
    trial = zombie_and_broker(baseline, 2)
    assert trial.difference
    assert trial.difference.n_wrong == 0, trial


def test_matchers_that_refuse_every_snapshot_replay_what_they_need(baseline: Baseline) -> None:
    trial = control(baseline, seed=5, broken=REFUSING)
    assert trial.difference
    assert trial.difference.n_wrong == 0, trial
    assert trial.difference.repeated > 0, "a replay emits events again, with the same ids"


def test_the_comparison_detects_a_matcher_without_state(baseline: Baseline) -> None:
    trial = control(baseline, seed=4, broken="stores no state")
    assert trial.difference
    assert trial.difference.n_wrong > 0, trial
