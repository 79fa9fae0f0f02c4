"""A short sample of `scripts/chaos.py kafka`: members and the broker are broken, and what is told stays the same."""

from __future__ import annotations

import pytest

from tests.chaos.kafka import Stage, control, kills, zombie_and_broker
from tests.support.broker import Broker
from tests.support.killed_match import REFUSING


@pytest.fixture(scope="module")
def stage(broker: Broker, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return Stage.build(tmp_path_factory.mktemp("chaos"), broker, seed=3, channels=3, seconds=60)


def test_what_is_told_is_worth_comparing(stage: Stage) -> None:
    types = [alert["type"] for alert in stage.unbroken]
    assert types.count("alert.started") >= 6
    assert types.count("alert.started") == types.count("alert.ended") + types.count("alert.retracted")


def test_killed_matchers_lose_no_alert_and_mint_no_id(stage: Stage) -> None:
    trial = kills(stage, seed=1, n_kills=6, soon=True)
    assert trial.difference
    assert trial.deaths.total() >= 6
    assert trial.difference.wrong == 0, trial
    assert trial.difference.repeated == 0, trial


def test_a_zombie_and_a_broker_killed_under_their_members_change_nothing(stage: Stage) -> None:
    trial = zombie_and_broker(stage, 2)
    assert trial.difference
    assert trial.difference.wrong == 0, trial


def test_matchers_that_can_go_on_from_no_snapshot_read_again_what_they_need(stage: Stage) -> None:
    trial = control(stage, seed=5, wrong=REFUSING)
    assert trial.difference
    assert trial.difference.wrong == 0, trial
    assert trial.difference.repeated > 0, "what was read again was told again, under the same ids"


def test_a_matcher_that_keeps_no_state_is_noticed(stage: Stage) -> None:
    trial = control(stage, seed=4, wrong="keeps no state")
    assert trial.difference
    assert trial.difference.wrong > 0, trial
