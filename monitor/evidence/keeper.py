"""Keeps evidence while alerts are told: pictures and features come in from the channels, folders come out.

All work is done in one thread of its own at a low priority. A channel only hands over what it has at hand and never
waits: where the thread is behind, pictures are let go first. A disk that fails costs evidence, never an alert.
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
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from monitor.alerting.alerts import ENDED, RETRACTED, UPDATED, Alert
from monitor.config.settings import Settings
from monitor.evidence.pictures import Album, PicturePair, Ring, nearest
from monitor.evidence.store import EvidenceStore, StoredEvidence, too_much
from monitor.evidence.tiles import MARGIN_S, TILE_S, Tile, drawn, tile_of, whole_path
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

MAX_WAITING = 256  # pictures and events that may wait for the thread; 50 MB where the disk hangs
TOGETHER = 32  # pictures that are in no hurry: they wait for each other, or for an alert
NEAR_S = 5  # a picture farther than this from the second it stands for is named
LOOK_S = 300.0  # between two walks over all folders: other processes write there too
LOW_PRIORITY = 10  # a nice value
INSIDE_S = 1  # by which the frames of start and end lie within: a copy's ends are known to the second
END_S = 4  # of the path at either end that the lines of its ends stand for
STILL_OPEN = "the alert is still open"
PLACES = ("start", "middle", "end")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a channel has at hand when it tells an alert."""

    alert: Alert
    points: Sequence[tuple[int, int]]  # cells (live_s, ref_s) of its path, thinned
    lives: Sequence[LiveSecond] = ()  # the channel's last seconds, in order
    rows: ReferenceRows | None = None  # the reference's features
    informative: NDArray[np.bool_] | None = None


@dataclass(slots=True, eq=False)
class _Channel:
    epoch: str = ""
    ring: Ring = field(default_factory=Ring)
    albums: dict[str, Album] = field(default_factory=dict)  # of open alerts
    heard_at: float = field(default_factory=time.monotonic)


class EvidenceKeeper:
    """The one who keeps it; `picture` and `told` may be called from any thread and return at once."""

    def __init__(self, settings: Settings, net: MaskStepNet, metrics: Metrics, rules: Callable[[], Rules]) -> None:
        self._settings = settings
        self._store = EvidenceStore(settings.data_dir)
        self._net = net
        self._metrics = metrics
        self._rules = rules  # who says what is confirmed
        self._channels: dict[str, _Channel] = {}
        self._waiting: deque[Callable[[], object]] = deque()
        self._pictures: deque[Callable[[], object]] = deque()  # those of `_waiting` that may be let go
        self._changed = threading.Condition()
        self._ends = False
        self._fails = False
        self._kept: dict[str, StoredEvidence] = {}  # what is on disk, as of `_looked_at` and by what was written since
        self._looked_at: float | None = None
        metrics.evidence_quota.set(settings.evidence.quota_bytes)
        self._thread = threading.Thread(target=self._run, name="evidence", daemon=True)
        self._thread.start()

    def close(self, patience_s: float = 5.0) -> None:
        """Does what still waits, for so long at most."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        self._thread.join(patience_s)

    def flush(self) -> None:
        """Returns when all that was handed over is done."""
        done = threading.Event()
        self._hand_over(done.set)
        done.wait()

    def picture(self, epoch: ChannelEpoch, second: int, picture: NDArray[np.uint8]) -> None:
        """Takes the newest picture of a channel; one pixel stands for a second that came as features."""
        if picture.size > 3:
            self._hand_over(lambda: self._push(epoch, second, picture), is_picture=True)

    def told(self, seen: Seen) -> None:
        """Takes what there is of an alert that is being told."""
        self._hand_over(lambda: self._keep(seen))

    # --- the thread --------------------------------------------------------------------------------------------------

    def _hand_over(self, work: Callable[[], object], *, is_picture: bool = False) -> None:
        with self._changed:
            if len(self._waiting) >= MAX_WAITING:
                self._metrics.evidence_failures.labels("overload").inc()
                if not self._pictures:
                    return
                self._waiting.remove(self._pictures.popleft())
            self._waiting.append(work)
            if is_picture:
                self._pictures.append(work)
            if not is_picture or len(self._pictures) % TOGETHER == 0:
                self._changed.notify_all()

    def _run(self) -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOW_PRIORITY)
        torch.set_num_threads(self._settings.compute.threads)  # a thread begins with all of the machine's
        while (work := self._next()) is not None:
            try:
                work()
                self._fails = False
            except (OSError, CatalogError) as error:
                self._fail("disk", error)
            except Exception as error:  # evidence is beside the point of a monitor: nothing of it may stop one
                self._fail("failed", error)

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            while not self._waiting and not self._ends:
                if not self._changed.wait(LOOK_S):
                    return self._look
            if not self._waiting:
                return None
            work = self._waiting.popleft()
            if self._pictures and self._pictures[0] is work:
                self._pictures.popleft()
            return work

    def _fail(self, reason: str, error: Exception) -> None:
        self._metrics.evidence_failures.labels(reason).inc()
        if not self._fails:
            logger.error(
                "evidence cannot be kept: %s; alerts are told all the same", error, exc_info=reason == "failed"
            )
        self._fails = True

    def _push(self, epoch: ChannelEpoch, second: int, picture: NDArray[np.uint8]) -> None:
        channel = self._channels.setdefault(epoch.channel, _Channel())
        if channel.epoch != epoch.name:
            channel.epoch, channel.ring = epoch.name, Ring()
        channel.heard_at = time.monotonic()
        shown = channel.ring.push(second, picture)
        for album in channel.albums.values():
            album.push(second, shown)

    # --- one alert ---------------------------------------------------------------------------------------------------

    def _keep(self, seen: Seen) -> None:
        alert, is_last = seen.alert, seen.alert.type in (ENDED, RETRACTED)
        channel = self._channels.setdefault(alert.channel, _Channel())
        if alert.type == UPDATED and alert.id in channel.albums and alert.id in self._kept:
            return  # its start is on disk, its album grows, and its end will be drawn: drawing costs more than matching
        before = self._store.stored(alert.id) or {}
        found = seen.points or [(live_s, ref_s) for live_s, ref_s in before.get("path", ())]
        seen = replace(seen, points=_claimed(alert, found))
        album = channel.albums.pop(alert.id, None) or self._album(alert, channel, before)
        if not is_last:
            channel.albums[alert.id] = album
        frames, pictures = self._frames(seen, album, channel.ring)
        tiles = {tile["name"]: tile for tile in before.get("tiles", ())}
        for name, start_s in _tile_starts(alert).items():
            if (tile := self._tile(seen, start_s, tiles.get(name))) is not None:
                tiles[name], pictures[f"{name}.png"] = tile.numbers(name), drawn(tile, self._settings.matching.tau)
        notes = [frame["note"] for frame in frames if frame["note"]]
        if is_last and not tiles:
            notes.append("no similarity was at hand to be drawn")
        report = {
            "alert": alert.as_dict(),
            "made_at": rfc3339(datetime.now(UTC)),
            "time_zone": "UTC",
            "frames": frames,
            "tiles": [tiles[name] for name in sorted(tiles, reverse=True)],  # start, then end
            "path": [list(point) for point in found],
            "numbers": self._numbers(alert),
            "complete": is_last and not notes,
            "note": STILL_OPEN if not is_last else "; ".join(dict.fromkeys(notes)) or None,
        }
        size_bytes = self._store.write(alert.id, report, pictures, last=is_last)
        self._kept[alert.id] = StoredEvidence(alert.id, time.time(), size_bytes)
        self._look()

    def _album(self, alert: Alert, channel: _Channel, before: Mapping[str, Any]) -> Album:
        """A new alert's album: what the ring has of it, or what an earlier life has kept."""
        album = Album()
        for frame in before.get("frames", ()):
            if frame["air"] and (kept := self._store.file(alert.id, frame["air"])) is not None:
                album.first[int(frame["stream_s"])] = PicturePair(kept)
        for second, shown in channel.ring.pictures.items():
            if second >= alert.channel_start:
                album.push(second, shown)
        return album

    def _frames(self, seen: Seen, album: Album, ring: Ring) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
        """The paired frames at start, middle and end, and their pictures by name."""
        alert, path = seen.alert, dict(whole_path(seen.points))
        frames, pictures = [], {}
        first, last = min(path), max(path)
        if last - first >= 4 * INSIDE_S:
            first, last = first + INSIDE_S, last - INSIDE_S
        with Catalog.open(self._settings.data_dir) as catalog:
            for place, wanted in zip(PLACES, (first, (first + last) / 2, last), strict=True):
                found = nearest(wanted, album.first, album.pictures, ring.pictures)
                second = round(wanted) if found is None else found[0]
                ref_s = path[min(max(second, min(path)), max(path))]
                notes = []
                if found is None:
                    notes.append("no picture of the channel was kept")
                elif abs(second - wanted) > NEAR_S:
                    notes.append(f"the nearest picture of the channel is {abs(second - wanted):.0f} s away")
                shown, complaint = _reference_picture(catalog, alert.reference, ref_s)
                if complaint:
                    notes.append(complaint)
                if found is not None:
                    pictures[f"air-{place}.jpg"] = found[1].jpeg()
                    if place == "start" and len(album.first) < 2:
                        album.first = dict([found])
                if shown is not None:
                    pictures[f"ref-{place}.jpg"] = shown
                frames.append(
                    {
                        "at": place,
                        "stream_s": second,
                        "ref_s": ref_s,
                        "air": None if found is None else f"air-{place}.jpg",
                        "reference": None if shown is None else f"ref-{place}.jpg",
                        "note": "; ".join(notes) or None,
                    }
                )
        return frames, pictures

    def _tile(self, seen: Seen, start_s: int, before: Mapping[str, Any] | None) -> Tile | None:
        """The tile; None where the last one is as good, or the seconds that it begins with are no longer at hand."""
        if seen.rows is None or seen.informative is None or not seen.points or not seen.lives:
            return None
        if before is not None and before["live_s"] == start_s and before["rows"] == TILE_S:
            return None
        if max(start_s, int(seen.alert.channel_start)) < seen.lives[0].second:
            return None
        return tile_of(seen.lives, seen.rows, seen.informative, seen.points, start_s, self._net)

    def _numbers(self, alert: Alert) -> dict[str, Any]:
        """What decided, beside what was measured."""
        matching = self._settings.matching
        return {
            "score": alert.score,
            "threshold": self._settings.alerting.threshold,
            "matched_seconds": alert.matched_seconds,
            "coverage_channel": alert.coverage_channel,
            "coverage_reference": alert.coverage_reference,
            "speed": alert.speed,
            "tau": matching.tau,
            "sigma": matching.sigma,
            "gamma": matching.gamma,
        }

    def _look(self) -> None:
        """Makes room where all of it takes too much or has become too old."""
        if self._looked_at is None or time.monotonic() - self._looked_at >= LOOK_S:
            self._looked_at = time.monotonic()
            self._kept = {one.alert_id: one for one in self._store.kept()}
            silent = [name for name, one in self._channels.items() if self._looked_at - one.heard_at > LOOK_S]
            for name in silent:
                del self._channels[name]  # its pictures; should it come back, it begins anew
        asked = self._settings.evidence
        pinned = {alert_id for alert_id, decision in self._rules().verdicts.items() if decision == CONFIRMED}
        leaving = too_much(self._kept.values(), asked.quota_bytes, timedelta(days=asked.keep_days), pinned)
        for alert_id, reason in leaving.items():
            self._store.remove(alert_id)
            del self._kept[alert_id]
            self._metrics.evidence_evicted.labels(reason).inc()
        self._metrics.process.evidence_bytes = sum(one.size_bytes for one in self._kept.values())


def keeper_of(
    settings: Settings, net: MaskStepNet, metrics: Metrics, rules: Callable[[], Rules]
) -> EvidenceKeeper | None:
    """The keeper that the settings ask for, if any."""
    return EvidenceKeeper(settings, net, metrics, rules) if settings.evidence.enabled else None


def _claimed(alert: Alert, points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cells of the path as the alert claims it: its ends, as read off lines, and what was found between them."""
    start_s, end_s = int(alert.channel_start), max(int(alert.channel_start) + 1, int(alert.channel_end))
    first, last = round(alert.reference_start), round(alert.reference_end - alert.speed)
    between = [point for point in points if start_s + END_S <= point[0] < end_s - END_S]
    return [(start_s, first), *between, *([(end_s - 1, max(first, last))] if end_s - 1 > start_s else [])]


def _tile_starts(alert: Alert) -> dict[str, int]:
    """The first rows of the tiles that an alert has: one at its start, and one at its end where the first is full."""
    start_s = int(alert.channel_start) - MARGIN_S
    end_s = int(alert.channel_end) + MARGIN_S
    starts = {"tile-start": start_s}
    if end_s > start_s + TILE_S and alert.type in (ENDED, RETRACTED):
        starts["tile-end"] = end_s - TILE_S
    return starts


def _reference_picture(catalog: Catalog, reference: ReferenceId, second: int) -> tuple[bytes | None, str | None]:
    """The reference's picture of a second, or why there is none."""
    try:
        known = catalog.get(reference)
        if not known.thumbnails_sha256:
            how = "it came as features only" if known.imported else "it was registered without thumbnails"
            return None, f"there are no pictures of the reference: {how}"
        shown = catalog.thumbnail(reference, second)
    except CatalogError as error:
        return None, f"there is no picture of the reference: {error}"
    return shown, None if shown else "there is no picture of this second of the reference"
