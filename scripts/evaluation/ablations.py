"""Trials: the rows of the evaluation's tables, each one way to find copies, tried on recordings.

A row switches parts of the method on and off. `Trials.on_pair` compares two recordings as a whole; `Trials.on_air` runs
a channel through the streaming matcher, where the row is one that can stream. A row may have a knob that is not part
of the method (a baseline's own threshold); it is tried at each setting, and the setting that suits it best is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import nn

from evaluation.full_matrix import WholeMaps, WholeMatrix, compare, join, read_maps, walk, walk_by_diagonal
from evaluation.recordings import Recording, sequenced
from evaluation.scoring import FoundCopy
from monitor.alerting.alerts import ENDED, AlertBook
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.hough import hough_segments
from monitor.matching.mask_step import MaskStepNet, TileReader
from monitor.matching.matcher import Matcher, MatchParameters
from monitor.matching.paths import AlignmentPath, soft_weight
from monitor.matching.refining import refine
from monitor.matching.stitching import SegmentView
from monitor.matching.tiles import HALO, SimilarityTile, TileMaps
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Reference, ReferenceFeatures, ReferenceId

OFF = 2.0  # of a cosine similarity: never reached
UPDATE_EVERY_S = 10.0  # updates are not looked at
NEAREST = 5  # rows of the background that a live row is compared with

Correction = Literal["none", "maps", "score"]


@dataclass(frozen=True, slots=True)
class Row:
    """One row of a table: which parts of the method are on."""

    name: str
    aligner: Literal["hough", "steps"] = "steps"
    sequence: bool = False  # SE
    soft: bool = True  # SW, else HW
    mask: bool = True  # MM, else similarities alone begin and feed paths
    by_diagonal: bool = False  # starts in the paper's order; cannot stream
    joined: bool = False  # paths over cuts and breaks made one, echoes left out
    low_information: bool = False
    evidence: bool = False
    refined: bool = False  # ends read off lines
    correction: Correction = "none"  # of live rows by the background: before the network, or in the score
    knobs: tuple[float, ...] = (0.0,)  # settings to try of what the row has to choose


SIMILARITIES = (0.3, 0.4, 0.5, 0.6, 0.7)
OURS = Row("ours", joined=True, low_information=True, evidence=True, refined=True)
ROWS = (
    Row("HV", "hough", soft=False, knobs=SIMILARITIES),
    Row("HV+SE", "hough", sequence=True, soft=False, knobs=SIMILARITIES),
    Row("HV+SE+SW", "hough", sequence=True, knobs=SIMILARITIES),
    Row("SM+SE+SW", sequence=True, mask=False, knobs=SIMILARITIES),
    Row("SM+SE+SW+MM", sequence=True),
    Row("HV+SW", "hough", knobs=SIMILARITIES),
    Row("SM+SW", mask=False, knobs=SIMILARITIES),
    Row("SM+SW+MM"),
    Row("SM+SW+MM by i+j", by_diagonal=True),
    Row("+joined", joined=True),
    Row("+low-information", joined=True, low_information=True),
    Row("+evidence", joined=True, low_information=True, evidence=True),
    replace(OURS, name="+refined = ours"),
    replace(OURS, name="ours+norm in maps", correction="maps", knobs=(0.25, 0.5, 1.0)),
    replace(OURS, name="ours+norm in score", correction="score", knobs=(0.25, 0.5, 1.0)),
)


@dataclass(frozen=True, slots=True, eq=False)
class Networks:
    """The Mask-Step CNN, and where they are there a sequence encoder and the CNN that was trained with it."""

    net: MaskStepNet
    sequence_encoder: nn.Module | None = None
    sequence_net: MaskStepNet | None = None


class Background:
    """Rows of videos that nobody looks for: what a live second is like anyway."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._rows = np.concatenate([recording.rows[recording.informative] for recording in recordings])

    def likeness(self, recording: Recording) -> NDArray[np.float32]:
        """For each second the mean similarity to the nearest rows of the background, [seconds]."""
        likeness = np.empty(len(recording.rows), np.float32)
        for first in range(0, len(likeness), 256):
            similarity = recording.rows[first : first + 256] @ self._rows.T
            nearest = np.partition(similarity, -NEAREST, axis=1)[:, -NEAREST:]
            likeness[first : first + 256] = nearest.mean(axis=1)
        return likeness


class Trials:
    """Rows tried with one set of networks; what is told of an alert depends on `threshold`."""

    def __init__(
        self, networks: Networks, matching: MatchParameters, threshold: float, background: Background | None = None
    ) -> None:
        self.networks = networks
        self.matching = matching
        self.threshold = threshold
        self.background = background
        self._readers: dict[MaskStepNet, TileReader] = {}

    def missing(self, row: Row) -> str | None:
        """What the row cannot be tried without, if it is not there."""
        if row.sequence and self.networks.sequence_encoder is None:
            return "no SE weights"
        if row.correction != "none" and self.background is None:
            return "no background bank"
        return None

    def on_pair(self, row: Row, knob: float, live: Recording, ref: Recording) -> list[FoundCopy]:
        """The copies of `ref` in `live`, the two compared as a whole."""
        live, ref = self._seen_by(row, live), self._seen_by(row, ref)
        if not live.seen.any() or not len(ref.rows):
            return []
        matrix = compare(live, ref)
        if row.aligner == "hough":
            return _voted(live, ref, matrix, knob, self.matching.scoring.gamma if row.soft else None)
        likeness = self._likeness(row, knob, live)
        maps = self._whole_maps(row, knob, matrix, likeness)
        matching = self._matching(row)
        if row.joined:
            views = [_corrected(view, row, likeness) for view in join(matrix, maps, matching) if view.echo_of is None]
            if row.refined:
                views = [refine(view, matrix.lives, ref.rows, ref.informative) for view in views]
            return [_found(live.name, view) for view in views]
        paths = (walk_by_diagonal if row.by_diagonal else walk)(matrix, maps, matching)
        return [_walked(live.name, ref.name, path, matching.scoring.gamma) for path in paths]

    def on_air(self, row: Row, knob: float, channel: Recording, references: Sequence[Recording]) -> list[FoundCopy]:
        """The copies of all references on a channel: streamed, or pair by pair where the row cannot stream."""
        if row.aligner == "hough" or row.by_diagonal:
            return [copy for ref in references for copy in self.on_pair(row, knob, channel, ref)]
        channel = self._seen_by(row, channel)
        index = index_of([self._seen_by(row, ref) for ref in references])
        likeness = self._likeness(row, knob, channel)
        airing = _Airing(channel.name, index, self._matching(row), self.threshold)
        read = self._tile_reader(row, knob, likeness)
        for second in np.flatnonzero(channel.seen).tolist():
            airing.push(channel, second, read, row, likeness)
        return airing.finish(row, likeness)

    def _seen_by(self, row: Row, recording: Recording) -> Recording:
        if row.sequence:
            assert self.networks.sequence_encoder is not None
            recording = sequenced(recording, self.networks.sequence_encoder)
        return recording if row.low_information else recording.with_all_informative()

    def _matching(self, row: Row) -> MatchParameters:
        scoring = self.matching.scoring
        if not row.evidence:
            scoring = replace(scoring, novelty_floor=1.0)
        if not row.joined:
            scoring = replace(scoring, join_s=0, echo_similarity=OFF)
        return replace(self.matching, refines=row.refined, scoring=scoring)

    def _net(self, row: Row) -> MaskStepNet:
        return self.networks.sequence_net or self.networks.net if row.sequence else self.networks.net

    def _likeness(self, row: Row, beta: float, live: Recording) -> NDArray[np.float32] | None:
        """What is taken off each live second's similarities."""
        if row.correction == "none":
            return None
        assert self.background is not None
        return beta * self.background.likeness(live)

    def _whole_maps(
        self, row: Row, knob: float, matrix: WholeMatrix, likeness: NDArray[np.float32] | None
    ) -> WholeMaps:
        cells = matrix.similarity
        if row.correction == "maps" and likeness is not None:
            cells = _lowered(cells, likeness[[live.second for live in matrix.lives]])
        maps = read_maps(self._net(row), cells)
        return maps if row.mask else WholeMaps(self._unmasked(cells, knob), maps.step)

    def _tile_reader(
        self, row: Row, knob: float, likeness: NDArray[np.float32] | None
    ) -> Callable[[list[SimilarityTile]], list[TileMaps]]:
        net = self._net(row)
        reader = self._readers[net] = self._readers.get(net) or TileReader(net)

        def read(tiles: list[SimilarityTile]) -> list[TileMaps]:
            if row.correction == "maps" and likeness is not None:
                seconds = [np.maximum(tile.live_s + np.arange(len(tile.cells)), 0) for tile in tiles]
                tiles = [
                    replace(tile, cells=_lowered(tile.cells, likeness[s]))
                    for tile, s in zip(tiles, seconds, strict=True)
                ]
            maps = reader.read(tiles)
            if not row.mask:
                inner = (tile.cells[HALO:, HALO:-HALO] for tile in tiles)
                maps = [TileMaps(self._unmasked(cells, knob), m.step) for cells, m in zip(inner, maps, strict=True)]
            return maps

        return read

    def _unmasked(self, cells: NDArray[np.float32], start: float) -> NDArray[np.float32]:
        """A mask that knows similarities only: 1 where a path may begin, else just not enough to begin one."""
        return np.where(cells > start, np.float32(1), np.float32(self.matching.tau)).astype(np.float32)


class _Airing:
    """One channel on its way through the matcher; alerts are told as the pipeline tells them."""

    def __init__(self, channel: str, index: ReferenceIndex, matching: MatchParameters, threshold: float) -> None:
        self._channel = channel
        self._index = index
        self._matcher = Matcher(matching)
        references = {reference.id: reference for reference in index.references}
        epoch = ChannelEpoch(channel, "trial", None)
        self._book = AlertBook(epoch, "trial", threshold, UPDATE_EVERY_S, references.__getitem__, self._matcher)
        self._threshold = threshold
        self._found: list[FoundCopy] = []
        self._newest_s = 0

    def push(
        self,
        channel: Recording,
        second: int,
        read: Callable[[list[SimilarityTile]], list[TileMaps]],
        row: Row,
        likeness: NDArray[np.float32] | None,
    ) -> None:
        features, informative = channel.rows[second], bool(channel.informative[second])
        held, age_s = channel.is_held(second), channel.age_s(second)
        for live in self._matcher.window.push(second, features, informative, held, age_s):
            searched = live.row is not None and live.counts
            hits = self._index.search(features[None], self._matcher.matching.hits) if searched else None
            views = self._matcher.apply(read(self._matcher.plan(live, hits, self._index)))
            self._newest_s = live.second
            self._tell([_corrected(view, row, likeness) for view in views])

    def finish(self, row: Row, likeness: NDArray[np.float32] | None) -> list[FoundCopy]:
        self._tell([_corrected(view, row, likeness) for view in self._matcher.finish()])
        return self._found

    def _tell(self, views: list[SegmentView]) -> None:
        for alert in self._book.apply(self._newest_s, views, []):
            if alert.type == ENDED:
                self._found.append(
                    FoundCopy(
                        alert.channel,
                        alert.reference,
                        alert.channel_start,
                        alert.channel_end,
                        alert.reference_start,
                        alert.reference_end,
                        alert.score,
                        alert.detected_at,
                    )
                )
        for view in views:  # too weak for an alert, but a lower threshold would have told it
            if not view.is_open and view.echo_of is None and view.score < self._threshold:
                self._found.append(_found(self._channel, self._matcher.refined(view)))


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


def _lowered(cells: NDArray[np.float32], by: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cells [..., live, ref] less an amount for each live second; what carries no information stays 0."""
    return np.where(cells != 0, cells - by[..., None], np.float32(0)).astype(np.float32)


def _corrected(view: SegmentView, row: Row, likeness: NDArray[np.float32] | None) -> SegmentView:
    """The view with the background taken off its score, where the row does so."""
    if row.correction != "score" or likeness is None:
        return view
    mean = float(likeness[int(view.live_start_s) : int(view.live_end_s)].mean())
    return replace(view, score=max(0.0, view.score - mean))


def _found(channel: str, view: SegmentView) -> FoundCopy:
    return FoundCopy(
        channel, view.reference, view.live_start_s, view.live_end_s, view.ref_start_s, view.ref_end_s, view.score
    )


def _walked(channel: str, reference: str, path: AlignmentPath, gamma: float) -> FoundCopy:
    (live, ref), (last_live, last_ref) = path.first, path.last
    score = path.mean_weight * soft_weight(path.shorter_side, gamma)
    return FoundCopy(channel, reference, live, last_live + 1, ref, last_ref + 1, score)


def _voted(
    live: Recording, ref: Recording, matrix: WholeMatrix, min_similarity: float, gamma: float | None
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
