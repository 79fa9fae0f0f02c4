"""One stream from source to sink. Read this file first.

    source -> encode -> FeatureWindow -> search -> Matcher (candidates, tiles, network, paths, segments)
           -> AlertBook -> outbox -> sinks

`check` and `serve` run this same pipeline; a file merely does not wait. Everything that decides is in
`ChannelMonitor`, plain code over seconds that pauses only where the network must read its tiles; only `run_stream`
awaits.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from monitor.alerting.alerts import STARTED, Alert, AlertBook, BookState, Gap
from monitor.alerting.outbox import OutboxEntry
from monitor.config.settings import Settings
from monitor.errors import MonitorError, SnapshotRefused
from monitor.evidence.keeper import EvidenceKeeper, Seen
from monitor.ingest.clock import MAX_SILENCE_S, ChannelEpoch
from monitor.ingest.feature_windows import LiveSecond
from monitor.ingest.frame_counts import FrameCounts
from monitor.ingest.sources import Position, Sample, Source
from monitor.matching.matcher import Matcher, MatcherState, MatchParameters
from monitor.matching.stitching import Scoring, SegmentView
from monitor.ops.metrics import Metrics
from monitor.rights.rules import NO_RULES, Rules
from monitor.runtime.batcher import Batcher, MatchStep, Models, run_step
from monitor.runtime.snapshots import pack, unpack
from reference_db.errors import CatalogError
from reference_db.search.index import Hits, ReferenceIndex
from reference_db.store.catalog import Reference, ReferenceId

KEEP_EVERY_S = 2.0  # between two snapshots of a channel that tells nothing
SILENCE_S = MAX_SILENCE_S + 1.0  # after which what was on air is over: the clock begins a new epoch
OUTCOME_SLACK = 64  # outcomes that may wait for their sinks before matching waits for them
# why an alert ended that was still on air
REMOVED, REPLACED, QUARANTINED = "reference removed", "reference replaced", "reference quarantined"
GAPS_KEPT = 256  # of a channel, for the alerts they fall into


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one second led to."""

    second: int
    alerts: list[Alert]
    arrived_at: datetime
    snapshot: bytes | None = None  # of the thinking that told them, with the position of its newest sample


class Deliveries(Protocol):
    """Where outcomes go."""

    keeps_state: bool  # whether snapshots are of any use there

    async def put(self, entry: OutboxEntry) -> None:
        """Returns when the entry is safe."""
        ...


class ActiveLibrary:
    """The index in use and the desk's rules; each is replaced as a whole when it changes."""

    def __init__(self, index: ReferenceIndex, rules: Rules = NO_RULES) -> None:
        self.rules = rules
        self.retracted_open: dict[str, frozenset[str]] = {}  # by channel, alerts that are retracted and still on air
        self._known: dict[ReferenceId, Reference] = {}
        self.replace(index)

    def replace(self, index: ReferenceIndex) -> None:
        """Takes a new generation into use; alerts that are open may still name a reference that went."""
        self.index = index
        self._known |= {reference.id: reference for reference in index.references}

    def reference(self, reference: ReferenceId) -> Reference:
        return self._known[reference]


def matching_of(settings: Settings) -> MatchParameters:
    """What the settings say about matching."""
    asked = settings.matching
    return MatchParameters(tau=asked.tau, sigma=asked.sigma, scoring=Scoring(gamma=asked.gamma))


@dataclass(frozen=True, slots=True, eq=False)
class ChannelState:
    """One channel's thinking between two seconds, as it is stored."""

    epoch: ChannelEpoch | None
    book: BookState | None
    gaps: list[Gap]
    matcher: MatcherState
    seen_at: datetime | None


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of restoring: where its source goes on, and what there is to tell at once."""

    position: Position
    alerts: list[Alert]


class ChannelMonitor:
    """One channel's thinking: seconds in, alerts out.

    `snapshot` and `restore` move it between processes: going on from a snapshot tells what never stopping would tell.
    """

    def __init__(
        self,
        library: ActiveLibrary,
        models: Models,
        settings: Settings,
        metrics: Metrics,
        evidence: EvidenceKeeper | None = None,
    ) -> None:
        self._library = library
        self._models = models
        self._evidence = evidence
        self._settings = settings
        self._metrics = metrics
        self._matcher = self._new_matcher()
        self._index = library.index  # the generation that the last second was matched with
        self._searched: tuple[ReferenceIndex, NDArray[np.float32], Hits] | None = None  # a held second finds the same
        self._book: AlertBook | None = None
        self._gaps: deque[Gap] = deque(maxlen=GAPS_KEPT)
        self.seen_at: datetime | None = None  # when the newest sample arrived, here or in an earlier life
        self._forgotten: tuple[str, int] | None = None  # epoch and second up to which an earlier life saw the air

    def snapshot(self, position: Position) -> bytes:
        """All of it, with the position of the newest sample pushed; some 0.2 MB. Not while `push` runs."""
        epoch, newest_s = self._book.epoch if self._book else None, self._matcher.window.newest_s
        book = self._book.state() if self._book else None
        state = ChannelState(epoch, book, list(self._gaps), self._matcher.state(), self.seen_at)
        notes = {"position": dict(position), "epoch": epoch.name if epoch else None, "newest_s": newest_s}
        return pack(state, {"model": self._models.name}, notes)

    def restore(self, content: bytes) -> Restored:
        """Goes on from a snapshot, in a watch that saw nothing yet.

        Raises SnapshotRefused where that cannot be: the watch then begins anew and knows at most up to where the air
        was seen, so that what was missed since is listed as a gap. Its `notes`, if any, have the position.
        """
        try:
            state, notes = unpack(ChannelState, content, {"model": self._models.name})
        except SnapshotRefused as refused:
            if refused.notes and refused.notes.get("epoch") is not None and refused.notes.get("newest_s") is not None:
                self._forgotten = (refused.notes["epoch"], refused.notes["newest_s"])
            raise
        matcher, alerts = self._new_matcher(), []
        try:
            gone = matcher.restore(state.matcher, self._library.index)
        except (ValueError, IndexError, KeyError) as error:
            raise SnapshotRefused(f"its parts do not fit together ({error})", notes) from error
        self._matcher = matcher
        self.seen_at = state.seen_at
        self._gaps.extend(state.gaps)
        if state.epoch is not None and state.book is not None:
            self._book = self._new_book(state.epoch)
            self._book.restore(state.book)
            alerts = self._shown(self._end(gone, self._library.index, self._matcher.window.newest_s or 0))
        return Restored(notes["position"], alerts)

    @property
    def open_alerts(self) -> set[str]:
        """Ids of the alerts whose end is still to be told."""
        return self._book.open_alerts if self._book is not None else set()

    def spans(self) -> list[range]:
        """Stream seconds of every path that is open, or was until lately."""
        return self._matcher.spans()

    def second(self, sample: Sample, row: NDArray[np.float32], informative: bool) -> MatchStep[Outcome]:
        """What one sample led to. Gives tiles and takes their maps, so that channels can share the network's calls."""
        alerts = self._enter(sample)
        if self._evidence is not None:
            self._evidence.picture(sample.epoch, sample.second, sample.frame.picture)
        alerts += yield from self._second(sample, row, informative)
        self.seen_at = sample.arrived_at
        return Outcome(sample.second, alerts, sample.arrived_at)

    def push(self, samples: list[Sample], rows: list[tuple[NDArray[np.float32], bool]]) -> list[Outcome]:
        """What each sample led to, in order, without company."""
        return [
            run_step(self._models, self.second(sample, row, informative))
            for sample, (row, informative) in zip(samples, rows, strict=True)
        ]

    def finish(self, silent_s: int = 0, reason: str = "reconnect") -> list[Alert]:
        """The last word on every open alert, when the stream or its epoch ends.

        Where it ends because nothing more came for so long, that is a gap of those that were on air to the last.
        """
        if self._book is None:
            return []
        newest = self._matcher.window.newest_s or 0
        if silent_s:
            self._gaps.append(Gap(newest + 1, silent_s, reason))
        alerts = self._book.apply_rules(self._library.rules, newest, list(self._gaps))
        alerts = self._shown(alerts + self._told(newest, self._matcher.finish()))  # asks the old matcher to refine
        self._matcher = self._new_matcher()
        self._gaps.clear()
        self._book = None
        return alerts

    def _new_matcher(self) -> Matcher:
        return Matcher(matching_of(self._settings), told_from=self._settings.alerting.threshold)

    def _enter(self, sample: Sample) -> list[Alert]:
        if self._book is not None and self._book.epoch == sample.epoch:
            self._book.epoch = sample.epoch  # its wall time may be known better by now
            return []
        silent_s = self._silent_s(sample)
        alerts = self.finish(silent_s, sample.gap_reason)
        self._book = self._new_book(sample.epoch)
        if silent_s:
            self._add_gap(Gap(sample.second - silent_s, silent_s, sample.gap_reason))
        return alerts

    def _silent_s(self, sample: Sample) -> int:
        """Seconds of air that were missed between two epochs; a clock that jumps in mid-stream misses none."""
        if self.seen_at is None or sample.gap_reason == "unseen":
            return 0
        return max(0, round((sample.arrived_at - self.seen_at).total_seconds()) - 1)

    def _new_book(self, epoch: ChannelEpoch) -> AlertBook:
        alerting = self._settings.alerting
        return AlertBook(
            epoch,
            self._models.name,
            alerting.threshold,
            alerting.update_every_s,
            self._library.reference,
            self._matcher.refined,
            self._matcher.without,
        )

    def _second(self, sample: Sample, row: NDArray[np.float32], informative: bool) -> MatchStep[list[Alert]]:
        assert self._book is not None
        channel = self._book.epoch.channel
        alerts: list[Alert] = []
        frame = sample.frame
        added = self._matcher.window.push(sample.second, row, informative, frame.held, frame.age_s)
        self._note_gap(sample, added[0].second)
        if not informative:
            self._metrics.low_information_seconds.labels(channel).inc()
        for live in added:
            alerts += yield from self._match(live)
        self._metrics.open_paths.labels(channel).set(self._matcher.n_open_paths)
        return alerts

    def _note_gap(self, sample: Sample, first_s: int) -> None:
        """Keeps what was not seen before this sample, in this life or since an earlier one that left no state."""
        assert self._book is not None
        if self._forgotten is not None:
            epoch, until_s = self._forgotten
            self._forgotten = None
            if epoch == self._book.epoch.name:
                first_s = min(first_s, until_s + 1)
        if first_s < sample.second:
            self._add_gap(Gap(first_s, sample.second - first_s, sample.gap_reason))

    def _add_gap(self, gap: Gap) -> None:
        assert self._book is not None
        self._gaps.append(gap)
        self._metrics.gap_seconds.labels(self._book.epoch.channel).inc(gap.seconds)

    def _match(self, live: LiveSecond) -> MatchStep[list[Alert]]:
        assert self._book is not None
        index, matcher = self._library.index, self._matcher  # one generation for all of this second
        alerts: list[Alert] = []
        if index is not self._index:
            self._index = index
            alerts = self._end(matcher.drop_gone(index), index, live.second)
        alerts += self._book.apply_rules(self._library.rules, live.second, list(self._gaps))
        hits = self._hits(index, live.row) if live.counts and live.row is not None else None
        maps = yield matcher.plan(live, hits, index)
        return self._shown(alerts + self._told(live.second, matcher.apply(maps, self._book.open_segments)))

    def _end(self, gone: set[ReferenceId], index: ReferenceIndex, now_s: int) -> list[Alert]:
        """Ends the open alerts of references that this index has no more, each with its reason."""
        assert self._book is not None
        damaged = gone & index.damaged.keys()
        replaced = {reference for reference in gone - damaged if index.place(reference) is not None}
        return [
            *self._book.end(damaged, now_s, list(self._gaps), QUARANTINED),
            *self._book.end(replaced, now_s, list(self._gaps), REPLACED),
            *self._book.end(gone - damaged - replaced, now_s, list(self._gaps), REMOVED),
        ]

    def _shown(self, alerts: list[Alert]) -> list[Alert]:
        """Hands over what there is of each alert as evidence; the alerts then say where it is."""
        assert self._book is not None
        views = self._book.take_views()
        if self._evidence is None or not alerts:
            return alerts
        lives = list(self._matcher.window)
        alerts = [replace(alert, evidence=f"/api/v1/alerts/{alert.id}/evidence") for alert in alerts]
        for alert in alerts:
            points = views[alert.id].points if alert.id in views else []
            self._evidence.told(Seen(alert, points, lives, *self._matcher.features(alert.reference)))
        return alerts

    def _told(self, second: int, views: list[SegmentView]) -> list[Alert]:
        """The book's news of this second."""
        assert self._book is not None
        alerts = self._book.apply(second, views, list(self._gaps))
        self._metrics.suppressed.labels(self._book.epoch.channel, "exclusion").inc(self._book.n_excluded)
        self._book.n_excluded = 0
        self._library.retracted_open[self._book.epoch.channel] = self._book.retracted_open
        return alerts

    def _hits(self, index: ReferenceIndex, row: NDArray[np.float32]) -> Hits:
        if self._searched is not None:
            searched, before, hits = self._searched
            if searched is index and np.array_equal(before, row):
                return hits
        hits = index.search(row[None], self._matcher.matching.hits)
        self._searched = index, row, hits
        return hits


async def run_stream(
    source: Source,
    watch: ChannelMonitor,
    deliveries: Deliveries,
    compute: Batcher,
    metrics: Metrics,
    is_paused: Callable[[], bool] = lambda: False,
) -> None:
    """Returns when the source ends, with every segment closed and every alert delivered; then raises what broke it.

    Where `is_paused` says so, the end of the source is not that of the stream: nothing is closed, and the last
    snapshot has it all.
    """
    outcomes: asyncio.Queue[Outcome | None] = asyncio.Queue(maxsize=OUTCOME_SLACK)  # when full, matching waits
    async with asyncio.TaskGroup() as stages:
        matching = stages.create_task(
            _SourceRunner(source, watch, compute, outcomes, metrics, is_paused, deliveries.keeps_state).run()
        )
        stages.create_task(_deliver(source.channel, outcomes, deliveries, metrics))
    if error := matching.result():
        raise error


class _SourceRunner:
    """One source's samples on their way to outcomes."""

    def __init__(
        self,
        source: Source,
        watch: ChannelMonitor,
        compute: Batcher,
        outcomes: asyncio.Queue[Outcome | None],
        metrics: Metrics,
        is_paused: Callable[[], bool],
        keeps_state: bool,
    ) -> None:
        self._source = source
        self._watch = watch
        self._compute = compute
        self._outcomes = outcomes
        self._lane = compute.lane()
        self._ledger = FrameCounts(source.channel, metrics)
        self._lag = metrics.lag.labels(source.channel)
        self._is_paused = is_paused
        self._keeps_state = keeps_state
        self._position: Position = {}
        self._kept_at = time.monotonic()
        self._newest_s = 0
        self._heard_at: float | None = time.monotonic()  # the newest sample; None where silence ends nothing (more)
        self._at_work = asyncio.Lock()  # a sample, or the end of an epoch

    async def run(self) -> MonitorError | CatalogError | None:
        """What broke the source, if anything did; what was seen until then is matched to its end all the same."""
        error = None
        async with asyncio.TaskGroup() as tasks:
            listening = tasks.create_task(self._end_silent())
            try:
                # Closed in turn: the source's thread has ended when it is opened again.
                async with aclosing(self._source.samples()) as samples:
                    async for sample in samples:
                        async with self._at_work:
                            await self._take(sample)
            except (MonitorError, CatalogError) as broken:
                error = broken
            async with self._at_work:
                listening.cancel()
        if not self._is_paused():
            await self._end_epoch(self._position if error else {**self._position, "ended": True})
        elif self._position:
            await self._put(await self._with_snapshot(Outcome(self._newest_s, [], datetime.now(UTC))))
        await self._outcomes.put(None)
        return error

    async def _take(self, sample: Sample) -> None:
        keep = partial(self._kept, sample.position) if self._keeps_state else None
        try:
            outcome = await self._lane.second(sample.frame, partial(self._watch.second, sample), keep)
        except BaseException as failed:
            self._ledger.dropped("stopped" if isinstance(failed, asyncio.CancelledError) else "failed")
            raise
        self._ledger.processed()
        self._lag.set((datetime.now(UTC) - sample.arrived_at).total_seconds())
        self._newest_s, self._position = outcome.second, sample.position
        await self._put(outcome)
        self._heard_at = None if sample.epoch.began_at is None else time.monotonic()

    async def _end_silent(self) -> None:
        """Ends what was on air once a stream with a clock of its own has been silent for too long. Never returns."""
        while True:
            heard_at = time.monotonic() if self._heard_at is None else self._heard_at
            await asyncio.sleep(heard_at + SILENCE_S - time.monotonic())
            async with self._at_work:
                if self._heard_at is not None and time.monotonic() - self._heard_at >= SILENCE_S:
                    self._heard_at = None  # once is enough
                    await self._end_epoch(self._position, round(SILENCE_S))

    async def _end_epoch(self, position: Position, silent_s: int = 0) -> None:
        last = await self._compute.run("match", self._watch.finish, silent_s)
        self._position = position
        await self._put(await self._with_snapshot(Outcome(self._newest_s, last, datetime.now(UTC))))

    def _kept(self, position: Position, outcome: Outcome) -> Outcome:
        """The outcome with a snapshot where it tells something, or where it is time for one; in the worker thread."""
        if not outcome.alerts and time.monotonic() - self._kept_at < KEEP_EVERY_S:
            return outcome
        self._kept_at = time.monotonic()
        return replace(outcome, snapshot=self._watch.snapshot(position))

    async def _with_snapshot(self, outcome: Outcome) -> Outcome:
        if not self._keeps_state:
            return outcome
        self._kept_at = time.monotonic()
        content = await self._compute.run("snapshot", self._watch.snapshot, self._position)
        return replace(outcome, snapshot=content)

    async def _put(self, outcome: Outcome) -> None:
        """Hands the outcome on, if there is anything in it."""
        if outcome.alerts or outcome.snapshot is not None:
            await self._outcomes.put(outcome)


async def _deliver(
    channel: str, outcomes: asyncio.Queue[Outcome | None], deliveries: Deliveries, metrics: Metrics
) -> None:
    while (outcome := await outcomes.get()) is not None:
        count_news(channel, outcome, metrics)
        await deliveries.put(OutboxEntry(channel, outcome.alerts, outcome.snapshot))
        delay_s = (datetime.now(UTC) - outcome.arrived_at).total_seconds()
        for _ in outcome.alerts:
            metrics.alert_delay.observe(delay_s)


def count_news(channel: str, outcome: Outcome, metrics: Metrics) -> None:
    """Counts the alerts of an outcome, just before they are told."""
    for alert in outcome.alerts:
        metrics.alert_told(channel, alert.type, alert.licence)
        if alert.type == STARTED:
            waited_s = (datetime.now(UTC) - outcome.arrived_at).total_seconds()
            metrics.detection_latency.observe(alert.detected_at - alert.channel_start + waited_s)
