"""Samples of alerts of planted channels: started and ended, right and wrong."""

from __future__ import annotations

from evaluation.ablations import index_of
from evaluation.alert_samples import AlertSample, SampledChannel
from evaluation.scoring import TrueCopy
from monitor.alerting.alerts import ENDED, STARTED
from monitor.matching.confidence import confidence
from monitor.matching.mask_step import TileReader
from monitor.matching.matcher import MatchParameters
from tests.support.planted_features import channel, cut, film, plain_net

FILM = film("film", 60, 1)
# ch0, seconds   0......20.....40......60
#                other  | film 10-30 | other
CHANNEL = channel("ch0", [film("x", 20, 5), cut(FILM, 10, 30), film("y", 20, 6)])
TRUTH = TrueCopy("ch0", "film", 20, 40, 10, 30)


def samples_of(truth: list[TrueCopy], thresholds: list[float]) -> list[AlertSample]:
    read = TileReader(plain_net()).read
    return SampledChannel(
        CHANNEL, index_of([FILM]), read, MatchParameters(), lambda view: view.score, thresholds
    ).samples(truth)


def test_a_copy_gives_a_started_and_an_ended_alert() -> None:
    started, ended = samples_of([TRUTH], [0.12])
    assert (started.stage, ended.stage) == (STARTED, ENDED)
    assert started.is_right
    assert ended.is_right
    assert 0.12 <= started.score < ended.score
    assert started.change is None  # random rows change too quickly to compare
    assert ended.confidence == ended.found.confidence == confidence(ended)
    assert started.confidence <= ended.confidence


def test_each_threshold_has_its_own_start_and_all_have_one_end() -> None:
    samples = samples_of([TRUTH], [0.05, 0.9])
    early, late = (sample.score for sample in samples if sample.stage == STARTED)
    assert 0.05 <= early < 0.9 <= late
    assert len([sample for sample in samples if sample.stage == ENDED]) == 1


def test_an_alert_without_a_true_copy_is_wrong() -> None:
    elsewhere = TrueCopy("ch0", "film", 20, 40, 40, 60)
    assert not any(sample.is_right for sample in samples_of([elsewhere], [0.12]))
