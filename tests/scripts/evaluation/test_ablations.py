"""Ablations on planted features: each switch has the effect that its row claims."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from evaluation.ablations import OURS, ROWS, AblationRunner, Background, Networks, Row, index_of
from evaluation.recordings import Recording
from evaluation.scoring import TrueCopy, score
from monitor.alerting.alerts import ENDED
from monitor.config.settings import Settings
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.matching.matcher import MatchParameters
from monitor.ops.metrics import Metrics
from monitor.runtime.active_library import ActiveLibrary
from monitor.runtime.channel_monitor import ChannelMonitor, match_parameters
from monitor.runtime.models import Models
from reference_db.features.encoder import Encoder
from reference_db.media.frames import Frame
from tests.support.planted_channels import outcomes_of
from tests.support.planted_features import blurred, channel, cut, film, plain_net
from training.sequence_encoder import SequenceEncoder

torch.set_num_threads(1)
FILM, OTHER = film("film", 80, 1), film("other", 60, 2)

# ch0, seconds  0........20........40........60
#               other     | film 30..50 | other
CHANNEL = blurred(channel("ch0", [film("x", 20, 5), cut(FILM, 30, 50), film("y", 20, 6)]), 0.5)
COPY = TrueCopy("ch0", "film", 20, 40, 30, 50)
PLAIN = Row("plain")


def make_runner(*, sequence: bool = False, background: Background | None = None) -> AblationRunner:
    torch.manual_seed(0)
    networks = Networks(plain_net(), SequenceEncoder().eval() if sequence else None)
    return AblationRunner(networks, MatchParameters(), 0.3, background)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.sequence], ids=lambda row: row.name)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_row_finds_a_clear_copy_and_nothing_else(row: Row, streamed: bool) -> None:
    runner = make_runner(background=Background([film("background", 50, 9)]))
    setting = 0.5 if len(row.settings) > 1 else 0.0
    found = (
        runner.on_channel(row, setting, CHANNEL, [FILM, OTHER])
        if streamed
        else runner.on_pair(row, setting, CHANNEL, FILM)
    )
    rates = score(found, [COPY], 0.3).own[0.7]
    assert (rates.sp, rates.sr) == (1.0, 1.0)


def test_unrelated_recordings_share_nothing() -> None:
    assert score(make_runner().on_pair(OURS, 0.0, CHANNEL, OTHER), [], 0.3).n_found == 0
    assert score(make_runner().on_channel(OURS, 0.0, CHANNEL, [OTHER]), [], 0.3).n_found == 0


def test_a_streamed_copy_has_the_time_of_its_alert() -> None:
    (copy,) = make_runner().on_channel(OURS, 0.0, CHANNEL, [FILM, OTHER])
    assert copy.detected_at is not None
    assert 22 <= copy.detected_at <= 32


def test_our_row_equals_the_channel_monitor() -> None:
    settings = Settings()
    library = ActiveLibrary(index_of([FILM, OTHER]))
    models = Models(Encoder(list, "planted"), plain_net())
    watch = ChannelMonitor(library, models, settings, Metrics(CollectorRegistry()))
    epoch, blank = ChannelEpoch("ch0", "file", None), np.zeros((192, 192, 3), np.uint8)
    now = datetime(2026, 11, 16, tzinfo=UTC)
    samples = [Sample(epoch, second, Frame(second, second, blank), now, "", {}) for second in range(len(CHANNEL.rows))]
    outcomes = outcomes_of(watch, samples, [(row, True) for row in CHANNEL.rows])
    alerts = [alert for outcome in outcomes for alert in outcome.alerts] + watch.finish()
    alerted = [
        (a.reference, a.channel_start, a.channel_end, a.reference_start, a.reference_end, a.score, a.detected_at)
        for a in alerts
        if a.type == ENDED
    ]
    found = AblationRunner(
        Networks(plain_net()), match_parameters(settings), settings.alerting.min_confidence
    ).on_channel(OURS, 0.0, CHANNEL, [FILM, OTHER])
    assert alerted == [
        (c.reference, c.channel_start, c.channel_end, c.reference_start, c.reference_end, c.score, c.detected_at)
        for c in found
        if c.detected_at is not None
    ]
    assert len(alerted) == 1


def test_copies_too_weak_for_an_alert_count_for_the_best_threshold() -> None:
    strict = AblationRunner(Networks(plain_net()), MatchParameters(), 1.0)
    (copy,) = strict.on_channel(OURS, 0.0, CHANNEL, [FILM])
    assert copy.detected_at is None
    assert copy.score > 0.3
    assert copy.strength < 1.0


def test_hard_weight_drops_a_copy_of_two_seconds_and_soft_weight_does_not() -> None:
    live = channel("ch0", [film("x", 20, 5), cut(FILM, 30, 32), film("y", 20, 6)])
    hard, soft = Row("hard", "hough", soft=False), Row("soft", "hough")
    assert make_runner().on_pair(hard, 0.5, live, FILM) == []
    (found,) = make_runner().on_pair(soft, 0.5, live, FILM)
    assert 0 < found.score < 0.1


def test_joining_makes_one_copy_of_a_cut_one() -> None:
    live = channel("ch0", [film("x", 10, 5), cut(FILM, 10, 22), cut(FILM, 26, 38), film("y", 10, 6)])
    for find in (
        make_runner().on_pair,
        lambda row, setting, live, ref: make_runner().on_channel(row, setting, live, [ref]),
    ):
        assert len(find(PLAIN, 0.0, live, FILM)) == 2
        assert len(find(replace(PLAIN, joined=True), 0.0, live, FILM)) == 1


def test_refining_finds_the_ends_that_a_path_misses() -> None:
    faint = blurred(cut(FILM, 30, 34), 2.0)  # of similarity 0.45 or so: mostly too weak to start a path
    live = channel("ch0", [film("x", 20, 5), faint, blurred(cut(FILM, 34, 50), 0.5), film("y", 20, 6)])
    joined = replace(PLAIN, joined=True)
    for find in (
        make_runner().on_pair,
        lambda row, setting, live, ref: make_runner().on_channel(row, setting, live, [ref]),
    ):
        (path,), (refined,) = (find(row, 0.0, live, FILM) for row in (joined, replace(joined, refined=True)))
        assert path.channel_start > 21
        assert path.reference_start > 31
        assert refined.channel_start == 20
        assert refined.reference_start == pytest.approx(30, abs=0.5)  # lines begin on half seconds


def test_low_information_seconds_are_masked_only_where_the_row_says_so() -> None:
    black = np.zeros(len(FILM.rows), bool)
    dark_film = Recording("film", FILM.rows, black)
    dark_channel = Recording("ch0", CHANNEL.rows, np.zeros(len(CHANNEL.rows), bool))
    masked = replace(PLAIN, low_information=True)
    for find in (
        make_runner().on_pair,
        lambda row, setting, live, ref: make_runner().on_channel(row, setting, live, [ref]),
    ):
        assert len(find(PLAIN, 0.0, dark_channel, dark_film)) == 1
        assert find(masked, 0.0, dark_channel, dark_film) == []


def test_a_still_picture_is_less_evidence() -> None:
    still = Recording("film", np.repeat(FILM.rows[:1], 20, axis=0), np.ones(20, bool))
    live = channel("ch0", [film("x", 10, 5), cut(still, 0, 5), film("y", 10, 6)])
    plain, counted = replace(PLAIN, joined=True), replace(PLAIN, joined=True, evidence=True)
    best = max(copy.score for copy in make_runner().on_pair(plain, 0.0, live, still))
    assert max(copy.score for copy in make_runner().on_pair(counted, 0.0, live, still)) < 0.7 * best


def test_the_background_lowers_the_score_of_what_is_similar_to_it() -> None:
    common = replace(OURS, correction="score")
    familiar = make_runner(background=Background([cut(CHANNEL, 20, 40)] * 5))
    strange = make_runner(background=Background([film("background", 50, 9)]))
    (low,), (high,) = (t.on_pair(common, 0.5, CHANNEL, FILM) for t in (familiar, strange))
    assert low.score < high.score - 0.05
    in_maps = replace(OURS, correction="maps")
    assert familiar.on_pair(in_maps, 1.0, CHANNEL, FILM) == []
    assert len(strange.on_pair(in_maps, 1.0, CHANNEL, FILM)) == 1


def test_background_similarity_is_the_mean_of_the_nearest_rows() -> None:
    similarity = Background([film("a", 20, 9), cut(CHANNEL, 0, 1)]).similarity(CHANNEL)
    nearest = np.sort(CHANNEL.rows[:1] @ np.concatenate([film("a", 20, 9).rows, CHANNEL.rows[:1]]).T)[0, -5:]
    assert similarity[0] == pytest.approx(nearest.mean(), abs=1e-5)
    assert similarity.shape == (60,)


def test_a_row_reports_what_is_missing() -> None:
    runner = make_runner()
    assert runner.missing(Row("HV+SE", "hough", sequence=True)) == "no SE weights"
    assert runner.missing(replace(OURS, correction="maps")) == "no background videos"
    assert runner.missing(OURS) is None
    assert make_runner(sequence=True).missing(Row("HV+SE", "hough", sequence=True)) is None


def test_sequence_rows_apply_the_sequence_encoder_to_both_sides() -> None:
    row = Row("HV+SE", "hough", sequence=True)
    copies = make_runner(sequence=True).on_pair(row, 0.9, FILM, FILM)
    assert max(copy.channel_end - copy.channel_start for copy in copies) == 80
    assert make_runner(sequence=True).on_pair(row, 0.9, CHANNEL, FILM) != make_runner().on_pair(
        replace(row, sequence=False), 0.9, CHANNEL, FILM
    )


def test_an_index_of_recordings_is_sorted_and_excludes_black() -> None:
    half_black = Recording("b", OTHER.rows, np.arange(60) < 30)
    index = index_of([half_black, FILM])
    assert [reference.id for reference in index.references] == ["b", "film"]
    assert len(index) == 30 + 80


def test_a_channel_without_pictures_has_no_copies() -> None:
    blank = Recording("ch0", np.zeros((30, 512), np.float32), np.zeros(30, bool))
    assert make_runner().on_pair(OURS, 0.0, blank, FILM) == []
    assert make_runner().on_channel(OURS, 0.0, blank, [FILM]) == []
