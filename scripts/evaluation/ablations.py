"""Ablations: the rows of the evaluation's tables, each a variant of the method, run on recordings.

A row switches parts of the method on and off. `AblationRunner.on_pair` compares two complete recordings; `on_channel`
runs a channel through the streaming matcher, if the row can stream. A row may have a setting that is not part of the
method (a baseline's own threshold); it is run with each value, and the best one is reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from evaluation.alert_statements import copy_of
from evaluation.full_matrix import FullMaps, FullMatrix, compare, read_maps, stitch, walk, walk_by_diagonal
from evaluation.recordings import Recording, apply_sequence_encoder
from evaluation.scoring import FoundCopy
from monitor.alerting.alert_book import AlertBook
from monitor.alerting.alerts import ENDED, Alert
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.confidence import confidence
from monitor.matching.hough import hough_segments
from monitor.matching.mask_step import MaskStepNet, TileReader
from monitor.matching.matcher import Matcher, MatchParameters
from monitor.matching.paths import AlignmentPath, soft_weight
from monitor.matching.refining import refine
from monitor.matching.stitching import SegmentView
from monitor.matching.tiles import HALO, SimilarityTile, TileMaps
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Reference, ReferenceFeatures, ReferenceId

UNREACHABLE = 2.0  # above any cosine similarity
UPDATE_EVERY_S = 10.0  # updates are ignored
SCORE_THRESHOLD = 0.12  # of baselines, which state no confidence
NEAREST = 5  # nearest rows of the background whose mean similarity is used

Correction = Literal["none", "maps", "score"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: which parts of the method are on."""

    name: str
    aligner: Literal["hough", "steps"] = "steps"
    sequence: bool = False  # SE
    soft: bool = True  # SW, else HW
    mask: bool = True  # MM, else similarities alone start and extend paths
    by_diagonal: bool = False  # starts in the paper's order; cannot stream
    joined: bool = False  # paths joined across cuts and breaks, echoes removed
    low_information: bool = False
    evidence: bool = False
    refined: bool = False  # ends by fitted lines
    correction: Correction = "none"  # by the background similarity of live rows: before the network, or in the score
    settings: tuple[float, ...] = (0.0,)  # values of the row's own setting


SIMILARITIES = (0.3, 0.4, 0.5, 0.6, 0.7)
OURS = Row("ours", joined=True, low_information=True, evidence=True, refined=True)
ROWS = (
    Row("HV", "hough", soft=False, settings=SIMILARITIES),
    Row("HV+SE", "hough", sequence=True, soft=False, settings=SIMILARITIES),
    Row("HV+SE+SW", "hough", sequence=True, settings=SIMILARITIES),
    Row("SM+SE+SW", sequence=True, mask=False, settings=SIMILARITIES),
    Row("SM+SE+SW+MM", sequence=True),
    Row("HV+SW", "hough", settings=SIMILARITIES),
    Row("SM+SW", mask=False, settings=SIMILARITIES),
    Row("SM+SW+MM"),
    Row("SM+SW+MM by i+j", by_diagonal=True),
    Row("+joined", joined=True),
    Row("+low-information", joined=True, low_information=True),
    Row("+evidence", joined=True, low_information=True, evidence=True),
    replace(OURS, name="+refined = ours"),
    replace(OURS, name="ours+norm in maps", correction="maps", settings=(0.25, 0.5, 1.0)),
    replace(OURS, name="ours+norm in score", correction="score", settings=(0.25, 0.5, 1.0)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Networks:
    """The Mask-Step CNN, and optionally a sequence encoder and the CNN that was trained with it."""

    net: MaskStepNet
    sequence_encoder: nn.Module | None = None
    sequence_net: MaskStepNet | None = None


class Background:
    """Rows of unrelated videos, by which the usual similarity of a live second is estimated."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._rows = np.concatenate([recording.rows[recording.informative] for recording in recordings])

    def similarity(self, recording: Recording) -> NDArray[np.float32]:
        """For each second the mean similarity to the nearest rows of the background, [seconds]."""
        means = np.empty(len(recording.rows), np.float32)
        for first in range(0, len(means), 256):
            similarity = recording.rows[first : first + 256] @ self._rows.T
            nearest = np.partition(similarity, -NEAREST, axis=1)[:, -NEAREST:]
            means[first : first + 256] = nearest.mean(axis=1)
        return means


class AblationRunner:
    """Runs rows with one set of networks; rows with joined paths alert by confidence, others by score."""

    def __init__(
        self,
        networks: Networks,
        matching: MatchParameters,
        min_confidence: float,
        background: Background | None = None,
        threshold: float = SCORE_THRESHOLD,
    ) -> None:
        self.networks = networks
        self.matching = matching
        self.min_confidence = min_confidence
        self.threshold = threshold
        self.background = background
        self._readers: dict[MaskStepNet, TileReader] = {}

    def threshold_of(self, row: Row) -> float:
        """The threshold of a row's alerts: a minimum confidence or, for a baseline, a minimum score."""
        return self.min_confidence if row.joined else self.threshold

    def missing(self, row: Row) -> str | None:
        """What the row needs and is not available, if anything."""
        if row.sequence and self.networks.sequence_encoder is None:
            return "no SE weights"
        if row.correction != "none" and self.background is None:
            return "no background videos"
        return None

    def on_pair(self, row: Row, setting: float, live: Recording, ref: Recording) -> list[FoundCopy]:
        """The copies of `ref` in `live`, by the full matrix."""
        live, ref = self._input_of(row, live), self._input_of(row, ref)
        if not live.seen.any() or not len(ref.rows):
            return []
        matrix = compare(live, ref)
        if row.aligner == "hough":
            return _hough_copies(live, ref, matrix, setting, self.matching.scoring.gamma if row.soft else None)
        background = self._background_similarity(row, setting, live)
        maps = self._full_maps(row, setting, matrix, background)
        matching = self._matching(row)
        if row.joined:
            views = [_correct(view, row, background) for view in stitch(matrix, maps, matching) if view.echo_of is None]
            if row.refined:
                views = [refine(view, matrix.lives, ref.rows, ref.informative) for view in views]
            return [_segment_copy(live.name, view, by_confidence=True) for view in views]
        paths = (walk_by_diagonal if row.by_diagonal else walk)(matrix, maps, matching)
        return [_path_copy(live.name, ref.name, path, matching.scoring.gamma) for path in paths]

    def on_channel(
        self, row: Row, setting: float, channel: Recording, references: Sequence[Recording]
    ) -> list[FoundCopy]:
        """The copies of all references on a channel: streamed, or pair by pair if the row cannot stream."""
        if row.aligner == "hough" or row.by_diagonal:
            return [copy for ref in references for copy in self.on_pair(row, setting, channel, ref)]
        return self._run(row, setting, channel, references)[0]

    def events(self, channel: Recording, references: Sequence[Recording]) -> list[Alert]:
        """Every event of the product's alerts on a channel."""
        return self._run(OURS, 0.0, channel, references)[1]

    def _run(
        self, row: Row, setting: float, channel: Recording, references: Sequence[Recording]
    ) -> tuple[list[FoundCopy], list[Alert]]:
        """A channel through the live matcher: the copies found, and the events of alerts."""
        channel = self._input_of(row, channel)
        index = index_of([self._input_of(row, ref) for ref in references])
        background = self._background_similarity(row, setting, channel)
        run = _ChannelRun(channel.name, index, self._matching(row), self.threshold_of(row), by_confidence=row.joined)
        read = self._tile_reader(row, setting, background)
        for second in np.flatnonzero(channel.seen).tolist():
            run.push(channel, second, read, row, background)
        return run.finish(row, background), run.events

    def _input_of(self, row: Row, recording: Recording) -> Recording:
        if row.sequence:
            assert self.networks.sequence_encoder is not None
            recording = apply_sequence_encoder(recording, self.networks.sequence_encoder)
        return recording if row.low_information else recording.with_all_informative()

    def _matching(self, row: Row) -> MatchParameters:
        scoring = self.matching.scoring
        if not row.evidence:
            scoring = replace(scoring, novelty_floor=1.0)
        if not row.joined:
            scoring = replace(scoring, join_s=0, echo_similarity=UNREACHABLE)
        return replace(self.matching, refines=row.refined, scoring=scoring)

    def _net(self, row: Row) -> MaskStepNet:
        return self.networks.sequence_net or self.networks.net if row.sequence else self.networks.net

    def _background_similarity(self, row: Row, beta: float, live: Recording) -> NDArray[np.float32] | None:
        """The amount that is subtracted from the similarities of each live second."""
        if row.correction == "none":
            return None
        assert self.background is not None
        return beta * self.background.similarity(live)

    def _full_maps(
        self, row: Row, setting: float, matrix: FullMatrix, background: NDArray[np.float32] | None
    ) -> FullMaps:
        cells = matrix.similarity
        if row.correction == "maps" and background is not None:
            cells = _lower(cells, background[[live.second for live in matrix.lives]])
        maps = read_maps(self._net(row), cells)
        return maps if row.mask else FullMaps(self._unmasked(cells, setting), maps.step)

    def _tile_reader(
        self, row: Row, setting: float, background: NDArray[np.float32] | None
    ) -> Callable[[list[SimilarityTile]], list[TileMaps]]:
        net = self._net(row)
        reader = self._readers[net] = self._readers.get(net) or TileReader(net)

        def read(tiles: list[SimilarityTile]) -> list[TileMaps]:
            if row.correction == "maps" and background is not None:
                seconds = [np.maximum(tile.live_s + np.arange(len(tile.cells)), 0) for tile in tiles]
                tiles = [
                    replace(tile, cells=_lower(tile.cells, background[s]))
                    for tile, s in zip(tiles, seconds, strict=True)
                ]
            maps = reader.read(tiles)
            if not row.mask:
                inner = (tile.cells[HALO:, HALO:-HALO] for tile in tiles)
                maps = [TileMaps(self._unmasked(cells, setting), m.step) for cells, m in zip(inner, maps, strict=True)]
            return maps

        return read

    def _unmasked(self, cells: NDArray[np.float32], start: float) -> NDArray[np.float32]:
        """A mask by similarities only: 1 where a path may start, else just below the start threshold."""
        return np.where(cells > start, np.float32(1), np.float32(self.matching.tau)).astype(np.float32)


class _ChannelRun:
    """One channel through the matcher and the alert book, as in production."""

    def __init__(
        self,
        channel: str,
        index: ReferenceIndex,
        matching: MatchParameters,
        threshold: float,
        *,
        by_confidence: bool,
    ) -> None:
        self._channel = channel
        self._index = index
        self._matcher = Matcher(matching)
        references = {reference.id: reference for reference in index.references}
        epoch = ChannelEpoch(channel, "ablation", None)
        self._strength = confidence if by_confidence else _score_of
        self._book = AlertBook(
            epoch, "ablation", threshold, UPDATE_EVERY_S, references.__getitem__, self._matcher, self._strength
        )
        self._threshold, self._by_confidence = threshold, by_confidence
        self.events: list[Alert] = []
        self._found: list[FoundCopy] = []
        self._newest_s = 0

    def push(
        self,
        channel: Recording,
        second: int,
        read: Callable[[list[SimilarityTile]], list[TileMaps]],
        row: Row,
        background: NDArray[np.float32] | None,
    ) -> None:
        features, informative = channel.rows[second], bool(channel.informative[second])
        held, age_s = channel.is_held(second), channel.age_s(second)
        for live in self._matcher.window.push(second, features, informative, held, age_s):
            is_searched = live.row is not None and live.counts
            hits = self._index.search(features[None], self._matcher.matching.hits) if is_searched else None
            views = self._matcher.apply(read(self._matcher.plan(live, hits, self._index)))
            self._newest_s = live.second
            self._apply([_correct(view, row, background) for view in views])

    def finish(self, row: Row, background: NDArray[np.float32] | None) -> list[FoundCopy]:
        self._apply([_correct(view, row, background) for view in self._matcher.finish()])
        return self._found

    def _apply(self, views: list[SegmentView]) -> None:
        for alert in self._book.apply(self._newest_s, views, []):
            self.events.append(alert)
            if alert.type == ENDED:
                stated = copy_of(alert)
                self._found.append(stated if self._by_confidence else replace(stated, confidence=None))
        for view in views:  # too weak for an alert, but not at a lower threshold
            if (
                not view.is_open
                and view.echo_of is None
                and self._strength(replace(view, change=1.0)) < self._threshold
            ):
                refined = self._matcher.refined(view)
                self._found.append(_segment_copy(self._channel, refined, by_confidence=self._by_confidence))


def index_of(recordings: Sequence[Recording]) -> ReferenceIndex:
    """An index of recordings as references."""
    now = datetime.now(UTC)
    return ReferenceIndex.from_features(
        [
            (
                Reference(
                    id=ReferenceId(recording.name),
                    title=recording.name,
                    owner="",
                    tags={},
                    content_sha256="",
                    n_seconds=len(recording.rows),
                    n_uninformative=int((~recording.informative).sum()),
                    encoder_id="",
                    features_sha256="",
                    added_at=now,
                ),
                ReferenceFeatures(recording.rows.astype(np.float16), recording.informative.copy()),
            )
            for recording in sorted(recordings, key=lambda recording: recording.name)
        ],
        0,
    )


def _lower(cells: NDArray[np.float32], by: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cells [..., live, ref] less an amount for each live second; cells without information stay 0."""
    return np.where(cells != 0, cells - by[..., None], np.float32(0)).astype(np.float32)


def _correct(view: SegmentView, row: Row, background: NDArray[np.float32] | None) -> SegmentView:
    """The view with a score less the background similarity, if the row corrects scores."""
    if row.correction != "score" or background is None:
        return view
    mean = float(background[int(view.live_start_s) : int(view.live_end_s)].mean())
    return replace(view, score=max(0.0, view.score - mean))


def _score_of(view: SegmentView) -> float:
    return view.score


def _segment_copy(channel: str, view: SegmentView, *, by_confidence: bool) -> FoundCopy:
    return FoundCopy(
        channel,
        view.reference,
        view.live_start_s,
        view.live_end_s,
        view.ref_start_s,
        view.ref_end_s,
        view.score,
        confidence=confidence(view) if by_confidence else None,
    )


def _path_copy(channel: str, reference: str, path: AlignmentPath, gamma: float) -> FoundCopy:
    (live, ref), (last_live, last_ref) = path.first, path.last
    score = path.mean_weight * soft_weight(path.shorter_side, gamma)
    return FoundCopy(channel, reference, live, last_live + 1, ref, last_ref + 1, score)


def _hough_copies(
    live: Recording, ref: Recording, matrix: FullMatrix, min_similarity: float, gamma: float | None
) -> list[FoundCopy]:
    first_s = matrix.lives[0].second
    return [
        FoundCopy(
            live.name,
            ref.name,
            segment.live_start + first_s,
            segment.live_end + first_s,
            segment.ref_start,
            segment.ref_end,
            segment.score(gamma),
        )
        for segment in hough_segments(matrix.similarity, matrix.counts, min_similarity)
        if segment.score(gamma) > 0
    ]
