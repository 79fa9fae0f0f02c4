"""Trials on planted features: each switch does what its row says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry

from evaluation.ablations import OURS, ROWS, Background, Networks, Row, Trials, index_of
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
#               foreign   | film 30..50 | foreign
AIR = blurred(channel("ch0", [film("x", 20, 5), cut(FILM, 30, 50), film("y", 20, 6)]), 0.5)
COPY = TrueCopy("ch0", "film", 20, 40, 30, 50)
PLAIN = Row("plain")


def trials(*, sequence: bool = False, background: Background | None = None) -> Trials:
    torch.manual_seed(0)
    networks = Networks(plain_net(), SequenceEncoder().eval() if sequence else None)
    return Trials(networks, MatchParameters(), 0.3, background)


@pytest.mark.parametrize("row", [row for row in ROWS if not row.sequence], ids=lambda row: row.name)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_row_finds_a_clear_copy_and_nothing_else(row: Row, streamed: bool) -> None:
    tried = trials(background=Background([film("background", 50, 9)]))
    knob = 0.5 if len(row.knobs) > 1 else 0.0
    found = tried.on_air(row, knob, AIR, [FILM, OTHER]) if streamed else tried.on_pair(row, knob, AIR, FILM)
    rates = score(found, [COPY], 0.3).own[0.7]
    assert (rates.sp, rates.sr) == (1.0, 1.0)


def test_strangers_share_nothing() -> None:
    assert score(trials().on_pair(OURS, 0.0, AIR, OTHER), [], 0.3).n_found == 0
    assert score(trials().on_air(OURS, 0.0, AIR, [OTHER]), [], 0.3).n_found == 0


def test_streaming_tells_when_the_alert_went_out() -> None:
    (copy,) = trials().on_air(OURS, 0.0, AIR, [FILM, OTHER])
    assert copy.detected_at is not None
    assert 22 <= copy.detected_at <= 32


def test_our_row_is_what_the_pipeline_does() -> None:
    settings = Settings()
    library = ActiveLibrary(index_of([FILM, OTHER]))
    models = Models(Encoder(list, "planted"), plain_net())
    watch = ChannelMonitor(library, models, settings, Metrics(CollectorRegistry()))
    epoch, blank = ChannelEpoch("ch0", "file", None), np.zeros((192, 192, 3), np.uint8)
    now = datetime(2026, 11, 16, tzinfo=UTC)
    samples = [Sample(epoch, second, Frame(second, second, blank), now, "", {}) for second in range(len(AIR.rows))]
    outcomes = outcomes_of(watch, samples, [(row, True) for row in AIR.rows])
    alerts = [alert for outcome in outcomes for alert in outcome.alerts] + watch.finish()
    told = [
        (a.reference, a.channel_start, a.channel_end, a.reference_start, a.reference_end, a.score, a.detected_at)
        for a in alerts
        if a.type == ENDED
    ]
    found = Trials(Networks(plain_net()), match_parameters(settings), settings.alerting.threshold).on_air(
        OURS, 0.0, AIR, [FILM, OTHER]
    )
    assert told == [
        (c.reference, c.channel_start, c.channel_end, c.reference_start, c.reference_end, c.score, c.detected_at)
        for c in found
        if c.detected_at is not None
    ]
    assert len(told) == 1


def test_what_is_too_weak_for_an_alert_is_kept_for_the_best_threshold() -> None:
    strict = Trials(Networks(plain_net()), MatchParameters(), 0.99)
    (copy,) = strict.on_air(OURS, 0.0, AIR, [FILM])
    assert copy.detected_at is None
    assert 0.3 < copy.score < 0.99


def test_hard_weight_drops_a_copy_of_two_seconds_that_soft_weight_keeps() -> None:
    air = channel("ch0", [film("x", 20, 5), cut(FILM, 30, 32), film("y", 20, 6)])
    hard, soft = Row("hard", "hough", soft=False), Row("soft", "hough")
    assert trials().on_pair(hard, 0.5, air, FILM) == []
    (found,) = trials().on_pair(soft, 0.5, air, FILM)
    assert 0 < found.score < 0.1


def test_joining_makes_one_copy_of_a_cut_one() -> None:
    air = channel("ch0", [film("x", 10, 5), cut(FILM, 10, 22), cut(FILM, 26, 38), film("y", 10, 6)])
    for find in (trials().on_pair, lambda row, knob, live, ref: trials().on_air(row, knob, live, [ref])):
        assert len(find(PLAIN, 0.0, air, FILM)) == 2
        assert len(find(replace(PLAIN, joined=True), 0.0, air, FILM)) == 1


def test_refining_reads_the_ends_that_a_path_misses() -> None:
    faint = blurred(cut(FILM, 30, 34), 2.0)  # of similarity 0.45 or so: mostly too weak to begin a path
    air = channel("ch0", [film("x", 20, 5), faint, blurred(cut(FILM, 34, 50), 0.5), film("y", 20, 6)])
    joined = replace(PLAIN, joined=True)
    for find in (trials().on_pair, lambda row, knob, live, ref: trials().on_air(row, knob, live, [ref])):
        (path,), (refined,) = (find(row, 0.0, air, FILM) for row in (joined, replace(joined, refined=True)))
        assert path.channel_start > 21
        assert path.reference_start > 31
        assert refined.channel_start == 20
        assert refined.reference_start == pytest.approx(30, abs=0.5)  # lines begin on half seconds


def test_low_information_seconds_are_masked_only_where_the_row_says_so() -> None:
    black = np.zeros(len(FILM.rows), bool)
    dark_film = Recording("film", FILM.rows, black)
    dark_air = Recording("ch0", AIR.rows, np.zeros(len(AIR.rows), bool))
    masked = replace(PLAIN, low_information=True)
    for find in (trials().on_pair, lambda row, knob, live, ref: trials().on_air(row, knob, live, [ref])):
        assert len(find(PLAIN, 0.0, dark_air, dark_film)) == 1
        assert find(masked, 0.0, dark_air, dark_film) == []


def test_a_still_picture_is_less_evidence() -> None:
    still = Recording("film", np.repeat(FILM.rows[:1], 20, axis=0), np.ones(20, bool))
    air = channel("ch0", [film("x", 10, 5), cut(still, 0, 5), film("y", 10, 6)])
    plain, counted = replace(PLAIN, joined=True), replace(PLAIN, joined=True, evidence=True)
    best = max(copy.score for copy in trials().on_pair(plain, 0.0, air, still))
    assert max(copy.score for copy in trials().on_pair(counted, 0.0, air, still)) < 0.7 * best


def test_the_background_lowers_what_is_like_it() -> None:
    common = replace(OURS, correction="score")
    familiar = trials(background=Background([cut(AIR, 20, 40)] * 5))
    strange = trials(background=Background([film("background", 50, 9)]))
    (low,), (high,) = (t.on_pair(common, 0.5, AIR, FILM) for t in (familiar, strange))
    assert low.score < high.score - 0.05
    in_maps = replace(OURS, correction="maps")
    assert familiar.on_pair(in_maps, 1.0, AIR, FILM) == []
    assert len(strange.on_pair(in_maps, 1.0, AIR, FILM)) == 1


def test_likeness_is_the_mean_of_the_nearest_rows() -> None:
    likeness = Background([film("a", 20, 9), cut(AIR, 0, 1)]).likeness(AIR)
    nearest = np.sort(AIR.rows[:1] @ np.concatenate([film("a", 20, 9).rows, AIR.rows[:1]]).T)[0, -5:]
    assert likeness[0] == pytest.approx(nearest.mean(), abs=1e-5)
    assert likeness.shape == (60,)


def test_a_row_says_what_it_lacks() -> None:
    bare = trials()
    assert bare.missing(Row("HV+SE", "hough", sequence=True)) == "no SE weights"
    assert bare.missing(replace(OURS, correction="maps")) == "no background bank"
    assert bare.missing(OURS) is None
    assert trials(sequence=True).missing(Row("HV+SE", "hough", sequence=True)) is None


def test_sequence_rows_see_both_sides_through_the_sequence_encoder() -> None:
    row = Row("HV+SE", "hough", sequence=True)
    whole = trials(sequence=True).on_pair(row, 0.9, FILM, FILM)
    assert max(copy.channel_end - copy.channel_start for copy in whole) == 80
    assert trials(sequence=True).on_pair(row, 0.9, AIR, FILM) != trials().on_pair(
        replace(row, sequence=False), 0.9, AIR, FILM
    )


def test_an_index_of_recordings_is_sorted_and_leaves_black_out() -> None:
    half_black = Recording("b", OTHER.rows, np.arange(60) < 30)
    index = index_of([half_black, FILM])
    assert [reference.id for reference in index.references] == ["b", "film"]
    assert len(index) == 30 + 80


def test_a_channel_that_was_never_seen_has_nothing() -> None:
    blank = Recording("ch0", np.zeros((30, 512), np.float32), np.zeros(30, bool))
    assert trials().on_pair(OURS, 0.0, blank, FILM) == []
    assert trials().on_air(OURS, 0.0, blank, [FILM]) == []
