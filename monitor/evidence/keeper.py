"""Stores evidence of alerts: pictures and features come in from the channels, one folder per alert goes out.

One background thread of low priority does all the work. A channel only enqueues what it has in memory and never waits:
if the thread falls behind, pictures are dropped first. A disk failure costs evidence, never an alert. `check` has time:
its keeper writes into a folder of the user, waits instead of dropping pictures, and deletes nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monitor.alerting.alerts import ENDED, RETRACTED, UPDATED, Alert
from monitor.config.settings import Settings
from monitor.evidence.pairs import (
    PLACES,
    ClaimedLine,
    Pair,
    ReferenceMoments,
    choose_pairs,
    with_stored_pairs,
)
from monitor.evidence.pictures import AirPicture, AlertPictures, LazyJpeg, RecentPictures
from monitor.evidence.store import EvidenceStore, StoredEvidence, evidence_to_evict
from monitor.evidence.tiles import MARGIN_S, TILE_S, EvidenceTile, cut_tile, draw_tile
from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.feature_windows import LiveSecond
from monitor.matching.mask_step import MaskStepNet
from monitor.ops.metrics import Metrics
from monitor.ops.timestamps import rfc3339
from monitor.rights.rules import CONFIRMED, Rules
from reference_db.errors import CatalogError
from reference_db.search.feature_rows import ReferenceRows
from reference_db.store.catalog import Catalog, ReferenceId

logger = logging.getLogger(__name__)

MAX_WAITING = 256  # pictures and events that may wait for the thread; 50 MB if the disk hangs
WAKE_EVERY = 32  # pictures: they are not urgent and wait for each other, or for an alert
RESCAN_S = 300.0  # between two scans of all folders: other processes write there too
LOW_PRIORITY = 10  # a nice value
END_S = 4  # of the path at either end that the refined ends replace
STILL_OPEN = "the alert is still open"
NO_AIR_PICTURE = "there is no picture of the channel"
NO_REFERENCE_PICTURE = "there is no picture of this second of the reference"


@dataclass(frozen=True, slots=True, eq=False)
class AlertMaterial:
    """What a channel has in memory when it emits an alert."""

    alert: Alert
    points: Sequence[tuple[int, int]]  # cells (live_s, ref_s) of its path, thinned
    lives: Sequence[LiveSecond] = ()  # the channel's last seconds, in order
    rows: ReferenceRows | None = None  # the reference's features
    informative: NDArray[np.bool_] | None = None

    @property
    def is_final(self) -> bool:
        return self.alert.type in (ENDED, RETRACTED)


class _AlertPictures(AlertPictures):
    """Pictures of one alert, and the pairs that the previous run stored."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: list[Pair] = []


@dataclass(slots=True, eq=False)
class _Channel:
    epoch: str = ""
    recent: RecentPictures = field(default_factory=RecentPictures)
    open_alerts: dict[str, _AlertPictures] = field(default_factory=dict)
    picture_at: float = field(default_factory=time.monotonic)  # when the newest picture arrived


@dataclass(frozen=True, slots=True, eq=False)
class _FramePair:
    """The pictures of both sides at one place of a copy, as they are stored."""

    name: str  # in file names: the first pair is always `start`, so that a list can show it without the report
    place: str
    stream_s: float  # when each picture was on air, and what the reference shows then
    ref_s: float
    aired_at: str | None  # by the wall clock; a file has none
    live: LazyJpeg | None
    reference: bytes | None
    note: str | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "at": self.place,
            "stream_s": round(self.stream_s, 3),
            "aired_at": self.aired_at,
            "ref_s": round(self.ref_s, 3),
            "air": None if self.live is None else f"air-{self.name}.jpg",
            "reference": None if self.reference is None else f"ref-{self.name}.jpg",
            "note": self.note,
        }

    def files(self) -> dict[str, bytes]:
        files = {} if self.live is None else {f"air-{self.name}.jpg": self.live.jpeg()}
        return files if self.reference is None else files | {f"ref-{self.name}.jpg": self.reference}


class EvidenceKeeper:
    """Stores evidence in a thread of its own; `add_picture` and `add_alert` return at once, from any thread."""

    def __init__(
        self,
        settings: Settings,
        net: MaskStepNet,
        metrics: Metrics,
        rules: Callable[[], Rules],
        case_dir: Path | None = None,
    ) -> None:
        """With `case_dir`, evidence goes into that folder, without a limit, and `add_picture` may wait."""
        self.store = EvidenceStore(settings.data_dir, case_dir)
        self._settings = settings
        self._net = net
        self._metrics = metrics
        self._rules = rules  # for the alerts that a reviewer confirmed
        self._channels: dict[str, _Channel] = {}
        self._waiting: deque[Callable[[], object]] = deque()
        self._pictures: deque[Callable[[], object]] = deque()  # those of `_waiting` that may be dropped
        self._changed = threading.Condition()
        self._is_closing = False
        self._is_failing = False
        self._working_for: str | None = None  # the channel whose alert the thread is writing, for the log
        self._stored: dict[str, StoredEvidence] = {}  # on disk as of `_scanned_at`, and written since
        self._scanned_at: float | None = None
        metrics.evidence_quota.set(settings.evidence.quota_bytes)
        self._thread = threading.Thread(target=self._run, name="evidence", daemon=True)
        self._thread.start()

    def close(self, patience_s: float = 5.0) -> None:
        """Finishes the waiting work, within this time."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(patience_s)

    def flush(self) -> None:
        """Returns when all work enqueued so far is done."""
        done = threading.Event()
        self._enqueue(done.set)
        done.wait()

    def add_picture(
        self,
        epoch: ChannelEpoch,
        second: int,
        picture: NDArray[np.uint8],
        row: NDArray[np.float32] | None = None,
        age_s: float = 0.0,
    ) -> None:
        """Adds the newest picture of a channel; one of a single pixel stands for a feature row and is ignored.

        `row` are its features, and `age_s` is how long before the middle of the second it was on air.
        """
        if picture.size > 3:
            self._enqueue(lambda: self._store_picture(epoch, second, picture, row, age_s), is_picture=True)

    def add_alert(self, material: AlertMaterial) -> None:
        """Adds an alert that is being emitted."""
        self._enqueue(lambda: self._write_evidence(material))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _enqueue(self, work: Callable[[], object], *, is_picture: bool = False) -> None:
        with self._changed:
            if self.store.case_dir is not None:
                self._changed.wait_for(lambda: len(self._waiting) < MAX_WAITING)
            if len(self._waiting) >= MAX_WAITING:
                self._metrics.evidence_failures.labels("overload").inc()
                if not self._pictures:
                    return
                self._waiting.remove(self._pictures.popleft())
            self._waiting.append(work)
            if is_picture:
                self._pictures.append(work)
            if not is_picture or len(self._pictures) % WAKE_EVERY == 0:
                self._changed.notify_all()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        torch.set_num_threads(self._settings.compute.threads)  # a new thread would use every core
        while (work := self._next()) is not None:
            self._working_for = None
            try:
                work()
                self._is_failing = False
            except (OSError, CatalogError) as error:
                self._fail("disk", error)
            except Exception as error:  # evidence must never stop the monitor
                self._fail("failed", error)

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._waiting and not self._is_closing:
                if not self._changed.wait(RESCAN_S):
                    return self._enforce_limits
            if not self._waiting:
                return None
            work = self._waiting.popleft()
            self._changed.notify_all()
            if self._pictures and self._pictures[0] is work:
                self._pictures.popleft()
            return work

    def _fail(self, reason: str, error: Exception) -> None:
        self._metrics.evidence_failures.labels(reason).inc()
        if not self._is_failing:
            logger.error(
                "evidence cannot be stored: %s; alerts are emitted all the same",
                error,
                exc_info=reason == "failed",
                extra={"channel": self._working_for} if self._working_for else None,
            )
        self._is_failing = True

    def _store_picture(
        self,
        epoch: ChannelEpoch,
        second: int,
        picture: NDArray[np.uint8],
        row: NDArray[np.float32] | None,
        age_s: float,
    ) -> None:
        channel = self._channels.setdefault(epoch.channel, _Channel())
        if channel.epoch != epoch.name:
            channel.epoch, channel.recent = epoch.name, RecentPictures()
        channel.picture_at = time.monotonic()
        air = channel.recent.push(second, picture, row, age_s)
        for alert_pictures in channel.open_alerts.values():
            alert_pictures.push(air)

    # --- one alert ---------------------------------------------------------------------------------------------------

    def _write_evidence(self, material: AlertMaterial) -> None:
        alert = material.alert
        self._working_for = alert.channel
        channel = self._channels.setdefault(alert.channel, _Channel())
        if alert.type == UPDATED and alert.id in channel.open_alerts and alert.id in self._stored:
            return  # its start is on disk, its end will be drawn: drawing costs more than matching
        is_old_case = self.store.case_dir is not None and alert.id not in self._stored  # of an earlier check
        stored = {} if is_old_case else self.store.stored_report(alert.id) or {}
        path = material.points or [(live_s, ref_s) for live_s, ref_s in stored.get("path", ())]
        material = replace(material, points=_claimed_path(alert, path))
        pairs = self._frame_pairs(material, self._alert_pictures(material, channel, stored), channel.recent)
        tiles, drawings = self._tiles(material, stored)
        files = {name: content for pair in pairs for name, content in pair.files().items()} | drawings
        report = self._report(material, pairs, tiles, path)
        size_bytes = self.store.write(alert.id, report, files, last=material.is_final)
        self._stored[alert.id] = StoredEvidence(alert.id, time.time(), size_bytes)
        self._enforce_limits()

    def _alert_pictures(self, material: AlertMaterial, channel: _Channel, stored: Mapping[str, Any]) -> _AlertPictures:
        """The pictures collected so far: of a new alert the recent ones, and those that the previous run stored."""
        alert = material.alert
        pictures = channel.open_alerts.pop(alert.id, None)
        if pictures is None:
            pictures = _AlertPictures()
            for frame in stored.get("frames", ()):
                pictures.stored += self._stored_pairs(alert.id, frame)
            for second, air in channel.recent.pictures.items():
                if second >= alert.channel_start:
                    pictures.push(air)
        if not material.is_final:
            channel.open_alerts[alert.id] = pictures
        return pictures

    def _stored_pairs(self, alert_id: str, frame: Mapping[str, Any]) -> list[Pair]:
        """The pair that the previous run stored, if its picture of the channel is there."""
        content = self.store.file(alert_id, frame["air"]) if frame["air"] else None
        if content is None:
            return []
        # earlier versions stored whole seconds
        times = [time_s + 0.5 if isinstance(time_s, int) else time_s for time_s in (frame["stream_s"], frame["ref_s"])]
        second = int(times[0])
        air = AirPicture(second, LazyJpeg(content), None, second + 0.5 - times[0])
        reference = self.store.file(alert_id, frame["reference"]) if frame["reference"] else None
        return [Pair(frame["at"], air, times[1], reference, is_certain=True)]

    def _frame_pairs(
        self, material: AlertMaterial, pictures: _AlertPictures, recent: RecentPictures
    ) -> list[_FramePair]:
        """The paired frames, up to three."""
        alert = material.alert
        line = ClaimedLine(alert.channel_start, alert.channel_end, alert.reference_start, alert.reference_end)
        airs = list((pictures.pictures | recent.pictures).values())
        with Catalog.open(self._settings.data_dir) as catalog:
            problem = _missing_pictures(catalog, alert.reference)
            moments = ReferenceMoments(
                material.rows,
                material.informative,
                lambda start_s, end_s: [] if problem else catalog.thumbnails(alert.reference, start_s, end_s),
            )
            pairs = with_stored_pairs(line, choose_pairs(line, airs, moments), pictures.stored)
            if not pairs:
                return _pairs_without_air(alert, line, moments, problem)
        return [
            _FramePair(
                name,
                pair.place,
                pair.air.time_s,
                pair.ref_s,
                _wall_time(alert, pair.air.time_s),
                pair.air.jpeg,
                pair.reference,
                problem or (None if pair.reference else NO_REFERENCE_PICTURE),
            )
            for name, pair in zip(PLACES, pairs, strict=False)
        ]

    def _tiles(
        self, material: AlertMaterial, stored: Mapping[str, Any]
    ) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """The numbers of the tiles, those on disk included, and the drawings of the new ones by file name."""
        tiles = {tile["name"]: tile for tile in stored.get("tiles", ())}
        drawings = {}
        for name, start_s in _tile_starts(material.alert).items():
            if (tile := self._new_tile(material, start_s, tiles.get(name))) is not None:
                tiles[name] = tile.as_dict(name)
                drawings[f"{name}.png"] = draw_tile(tile, self._settings.matching.tau)
        return [tiles[name] for name in sorted(tiles, reverse=True)], drawings  # start, then end

    def _new_tile(self, material: AlertMaterial, start_s: int, stored: Mapping[str, Any] | None) -> EvidenceTile | None:
        """The tile; None if the stored one is as good, or its first seconds are no longer in memory."""
        if material.rows is None or material.informative is None or not material.points or not material.lives:
            return None
        if stored is not None and stored["live_s"] == start_s and stored["rows"] == TILE_S:
            return None
        if max(start_s, int(material.alert.channel_start)) < material.lives[0].second:
            return None
        return cut_tile(material.lives, material.rows, material.informative, material.points, start_s, self._net)

    def _report(
        self,
        material: AlertMaterial,
        pairs: list[_FramePair],
        tiles: list[dict[str, Any]],
        path: Sequence[tuple[int, int]],
    ) -> dict[str, Any]:
        notes = [pair.note for pair in pairs if pair.note]
        if material.is_final and not tiles:
            notes.append("no similarity was in memory for a tile")
        return {
            "alert": material.alert.as_dict(),
            "made_at": rfc3339(datetime.now(UTC)),
            "time_zone": "UTC",
            "frames": [pair.as_dict() for pair in pairs],
            "tiles": tiles,
            "path": [list(point) for point in path],
            "numbers": self._numbers(material.alert),
            "complete": material.is_final and not notes,
            "note": STILL_OPEN if not material.is_final else "; ".join(dict.fromkeys(notes)) or None,
        }

    def _numbers(self, alert: Alert) -> dict[str, Any]:
        """The measured numbers and the thresholds that they passed."""
        matching = self._settings.matching
        return {
            "confidence": alert.confidence,
            "min_confidence": self._settings.alerting.min_confidence,
            "score": alert.score,
            "matched_seconds": alert.matched_seconds,
            "coverage_channel": alert.coverage_channel,
            "coverage_reference": alert.coverage_reference,
            "speed": alert.speed,
            "tau": matching.tau,
            "sigma": matching.sigma,
            "gamma": matching.gamma,
        }

    def _enforce_limits(self) -> None:
        """Deletes evidence beyond the quota or the maximum age; rescans the folders now and then."""
        if self.store.case_dir is not None:
            return
        if self._scanned_at is None or time.monotonic() - self._scanned_at >= RESCAN_S:
            self._scanned_at = time.monotonic()
            self._stored = {one.alert_id: one for one in self.store.entries()}
            silent = [name for name, one in self._channels.items() if self._scanned_at - one.picture_at > RESCAN_S]
            for name in silent:
                del self._channels[name]  # its pictures; if it comes back, it starts fresh
        limits = self._settings.evidence
        pinned = {alert_id for alert_id, decision in self._rules().verdicts.items() if decision == CONFIRMED}
        max_age = timedelta(days=limits.keep_days)
        for alert_id, reason in evidence_to_evict(self._stored.values(), limits.quota_bytes, max_age, pinned).items():
            self.store.remove(alert_id)
            del self._stored[alert_id]
            self._metrics.evidence_evicted.labels(reason).inc()
        self._metrics.process.evidence_bytes = sum(one.size_bytes for one in self._stored.values())


def create_keeper(
    settings: Settings, net: MaskStepNet, metrics: Metrics, rules: Callable[[], Rules]
) -> EvidenceKeeper | None:
    """An evidence keeper, if the settings enable evidence."""
    return EvidenceKeeper(settings, net, metrics, rules) if settings.evidence.enabled else None


def _claimed_path(alert: Alert, points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cells of the path as the alert claims it: its refined ends, and the points found between them."""
    start_s, end_s = int(alert.channel_start), max(int(alert.channel_start) + 1, int(alert.channel_end))
    speed = (alert.reference_end - alert.reference_start) / (alert.channel_end - alert.channel_start)
    first, last = round(alert.reference_start), round(alert.reference_end - speed)
    between = [point for point in points if start_s + END_S <= point[0] < end_s - END_S]
    return [(start_s, first), *between, *([(end_s - 1, max(first, last))] if end_s - 1 > start_s else [])]


def _tile_starts(alert: Alert) -> dict[str, int]:
    """The first rows of an alert's tiles: one at its start, and one at its end if the first does not reach it."""
    start_s = int(alert.channel_start) - MARGIN_S
    end_s = int(alert.channel_end) + MARGIN_S
    starts = {"tile-start": start_s}
    if end_s > start_s + TILE_S and alert.type in (ENDED, RETRACTED):
        starts["tile-end"] = end_s - TILE_S
    return starts


def _wall_time(alert: Alert, stream_s: float) -> str | None:
    """When this stream time of an alert was on air."""
    if alert.started_at is None:
        return None
    began = datetime.fromisoformat(alert.started_at)
    return rfc3339(began + timedelta(seconds=stream_s - alert.channel_start))


def _pairs_without_air(
    alert: Alert, line: ClaimedLine, reference: ReferenceMoments, problem: str | None
) -> list[_FramePair]:
    """The reference's pictures at the thirds of the copy, where the channel sent features and no pictures."""
    pairs = []
    for number, place in enumerate(PLACES):
        live_s = line.live_start_s + (line.live_end_s - line.live_start_s) * (2 * number + 1) / 6
        found = reference.pictures(line.at(live_s) - 0.5, line.at(live_s) + 0.5)
        ref_s, jpeg = min(found, key=lambda one: abs(one[0] - line.at(live_s)), default=(line.at(live_s), None))
        notes = [NO_AIR_PICTURE, *([problem] if problem else [] if jpeg else [NO_REFERENCE_PICTURE])]
        pairs.append(_FramePair(place, place, live_s, ref_s, _wall_time(alert, live_s), None, jpeg, "; ".join(notes)))
    return pairs


def _missing_pictures(catalog: Catalog, reference: ReferenceId) -> str | None:
    """Why the reference has no pictures; None if it has some."""
    try:
        known = catalog.get(reference)
        if not known.thumbnails_sha256:
            how = "it was imported as features only" if known.imported else "it was registered without thumbnails"
            return f"there are no pictures of the reference: {how}"
        catalog.thumbnails(reference, 0, 1)
    except CatalogError as error:
        return f"there is no picture of the reference: {error}"
    return None
