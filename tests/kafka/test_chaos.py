"""A short sample of `scripts/chaos.py kafka`: members and the broker are broken, and what is told stays the same."""

from __future__ import annotations

import pytest

from tests.chaos.kafka import Baseline, control, kills, zombie_and_broker
from tests.support.broker import Broker
from tests.support.killed_match import REFUSING


@pytest.fixture(scope="module")
def baseline(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    return Baseline.build(tmp_path_factory.mktemp("chaos"), broker, seed=3, channels=3, seconds=60)


def test_what_is_told_is_worth_comparing(baseline: Baseline) -> None:
    types = [alert["type"] for alert in baseline.alerts]
    assert types.count("alert.started") >= 6
    assert types.count("alert.started") == types.count("alert.ended") + types.count("alert.retracted")


def test_killed_matchers_lose_no_alert_and_mint_no_id(baseline: Baseline) -> None:
    trial = kills(baseline, seed=1, n_kills=6, soon=True)
    assert trial.difference
    assert trial.deaths.total() >= 6
    assert trial.difference.wrong == 0, trial
    assert trial.difference.repeated == 0, trial


def test_a_zombie_and_a_broker_killed_under_their_members_change_nothing(baseline: Baseline) -> None:
    trial = zombie_and_broker(baseline, 2)
    assert trial.difference
    assert trial.difference.wrong == 0, trial


def test_matchers_that_can_go_on_from_no_snapshot_read_again_what_they_need(baseline: Baseline) -> None:
    trial = control(baseline, seed=5, wrong=REFUSING)
    assert trial.difference
    assert trial.difference.wrong == 0, trial
    assert trial.difference.repeated > 0, "what was read again was told again, under the same ids"


def test_a_matcher_that_keeps_no_state_is_noticed(baseline: Baseline) -> None:
    trial = control(baseline, seed=4, wrong="keeps no state")
    assert trial.difference
    assert trial.difference.wrong > 0, trial
