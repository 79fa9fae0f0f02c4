"""Alerts: segments in, alert events out, each event emitted once.

An alert has one id for life, derived from channel, stream epoch, reference and the start cell of its first path, so
a replay derives the same id. It starts when its confidence reaches the minimum, is updated at most every
`update_every_s` of stream time, and is finally either ended or retracted. `Rules` hold what people decided: which
alerts are licensed, which spans of a reference never alert, and which alerts a reviewer called false. A false alert is
retracted at once and stays silent while its segment lasts, unless the review is reversed. Everything that builds a
retraction stands in this file: `AlertBook` does so for open alerts, `after_review` for ended ones.

One copy is one alert. Segments of one reference at one time are rivals, of which the first alerts and the others stay
silent; when its segment closes, the alert follows a rival that is still open. Segments of several references at one
time are versions of one film if the references show the same pictures there (one alert, which names the best and lists
the others), look-alikes if one matches far better than the other (it alone alerts), and otherwise copies of their own.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Protocol, Self

from monitor.ingest.clock import ChannelEpoch
from monitor.matching.changes import MIN_START, min_change
from monitor.matching.confidence import confidence
from monitor.matching.excluding import Spans, trimmed
from monitor.matching.stitching import Seconds, SegmentName, SegmentView
from monitor.ops.timestamps import rfc3339
from monitor.rights.rules import CONFIRMED, FALSE, LICENSED, NO_RULES, REVIEWED, Rules
from reference_db.store.catalog import Reference, ReferenceId

STARTED, UPDATED, ENDED, RETRACTED = "alert.started", "alert.updated", "alert.ended", "alert.retracted"
REVIEWED_FALSE, REVIEWED_TRUE = "reviewed: false positive", "reviewed: not a false positive"
EXCLUDED = "reference span excluded"
TOO_WEAK = "too weak: the final confidence is below the minimum"
OTHER_CHANGES = "a look-alike: what changes in the pictures does not match"
EXPLAINED = "better explained by {}"

SAME = 0.5  # two alerts are the same copy if they share more than this of both time lines
REMEMBER_S = 60  # an ended alert suppresses duplicates for this long
PAUSE_S = 3  # seconds without a match within an alert are listed as a pause from this length on
BREAK_S = 900  # an alert may continue one that ended up to this long ago: an advert break
SLACK_S = 2  # the ends of two alerts may overlap by this much
MIN_SPEED_S = 15  # of a copy; the ends of a shorter one are not exact enough to tell its speed
MIRRORS = 0.25  # similarity of two places of a reference from which one may stand for the other
VERSION = 0.7  # similarity of the pictures of two references from which they are versions of one film
LOOK_ALIKE = 0.5  # of another reference's strength over the same seconds: a weaker segment is only a look-alike
OVERTAKES = 1.25  # times as much weight as the version that an alert names must another have to be named instead
AS_HEAVY = 0.9  # of the heaviest version's weight: of such versions, the final alert names the one covered most
SOON_S, LATER_S = 20, 80  # a segment that does not alert yet is examined every second, every 4 s, then every 16 s
BREAK_REF_S = 10  # an alert continues another only if it starts this close to where that one stopped in the reference


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds of a channel that were not seen."""

    at: Seconds
    seconds: Seconds
    reason: str

    def touches(self, start_s: float, end_s: float) -> bool:
        """Whether it overlaps or adjoins this span; a copy may reach into an adjoining gap."""
        return self.at <= end_s + 1 and self.at + self.seconds >= start_s - 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds of a channel within an alert that were seen and show something else, such as a short advert."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Version:
    """Another reference that shows the same pictures, such as a shorter cut of a spot, and where it matches."""

    reference: ReferenceId
    reference_start: float
    reference_end: float
    score: float


@dataclass(frozen=True, slots=True)
class Alert:
    """One event of an alert: the copy as known by then. Times without a zone are channel or reference seconds."""

    id: str
    type: str
    seq: int
    channel: str
    reference: ReferenceId
    title: str
    owner: str
    channel_start: float
    channel_end: float
    started_at: str | None  # RFC 3339 UTC; None where the channel is a file and has no wall clock
    ended_at: str | None
    detected_at: float  # the newest stream second that had to be seen before the alert could be emitted
    reference_start: float
    reference_end: float
    speed: float | None  # reference seconds per channel second; None for a short copy or an uncertain place
    confidence: float | None  # the chance that it is right; None for an alert of a version that did not state it
    score: float
    matched_seconds: int
    coverage_channel: float
    coverage_reference: float
    gaps: tuple[Gap, ...]
    licence: str | None
    model: str
    evidence: str | None
    pauses: tuple[Pause, ...] = ()
    continues: str | None = None  # id of the alert that this one resumes after a break
    reason: str | None = None  # why it ended or was retracted, if the copy did not simply end
    ambiguous: bool = False  # whether the reference shows the same in several places, listed in `alternatives`
    alternatives: tuple[tuple[float, float], ...] = ()  # further [reference_start, reference_end] that fit as well
    versions: tuple[Version, ...] = ()  # other references that show the same pictures

    def as_dict(self) -> dict[str, object]:
        """Plain values, in the order of the fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The alert of these values; fields of a later version are ignored."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known.setdefault("confidence", None)
        known["gaps"] = tuple(Gap(**gap) for gap in values["gaps"])
        known["pauses"] = tuple(Pause(**pause) for pause in values.get("pauses", ()))
        known["alternatives"] = tuple((start, end) for start, end in values.get("alternatives", ()))
        known["versions"] = tuple(Version(**version) for version in values.get("versions", ()))
        return cls(**known)

    def ended(self, reason: str) -> Alert:
        """The final event of an alert whose channel or segment is gone, built from the last one emitted."""
        ended_at = None
        if self.started_at is not None:
            seconds = timedelta(seconds=round(self.channel_end - self.channel_start))
            ended_at = rfc3339(datetime.fromisoformat(self.started_at) + seconds)
        return replace(self, type=ENDED, seq=self.seq + 1, ended_at=ended_at, reason=reason)

    def retracted(self, reason: str) -> Alert:
        """The event after this one that withdraws the alert."""
        return replace(self, type=RETRACTED, seq=self.seq + 1, reason=reason)


def after_review(last: Alert, decision: str) -> Alert | None:
    """The event that a review leads to, given the last one of an alert that is over; None if nothing changes."""
    if decision == FALSE:
        return last.retracted(REVIEWED_FALSE) if last.type == ENDED else None
    licence = REVIEWED if decision == LICENSED else last.licence
    if decision == CONFIRMED and last.licence == REVIEWED:
        licence = None
    if last.type == RETRACTED and last.reason == REVIEWED_FALSE:
        return replace(last.ended(REVIEWED_TRUE), licence=licence)
    if last.type == ENDED and licence != last.licence and last.licence in (None, REVIEWED):
        return replace(last, seq=last.seq + 1, licence=licence)
    return None


@dataclass(frozen=True, slots=True)
class _OpenAlert:
    """State of one alert between its events."""

    reference: Reference
    continues: str | None
    detected_at: Seconds
    seq: int  # of the last event
    emitted_s: Seconds  # stream second of the last event
    last_view: SegmentView  # refined; its name is that of the segment that the alert follows
    licence: str | None
    versions: dict[ReferenceId, SegmentView]  # refined, of other references
    is_explained: bool = False  # retracted for good, since another alert explains it better


@dataclass(frozen=True, slots=True)
class _EndedAlert:
    """An alert that ended in this stream second, with its final view."""

    second: int
    alert_id: str
    view: SegmentView


@dataclass(frozen=True, slots=True)
class BookState:
    """The state of an `AlertBook`, for snapshots."""

    open_alerts: dict[str, _OpenAlert]
    ended: list[_EndedAlert]
    retracted: dict[str, _OpenAlert]


def alert_id_of(epoch: ChannelEpoch, view: SegmentView) -> str:
    """The alert id of a segment: the same in every process and every replay."""
    name = f"{epoch.channel}\n{epoch.name}\n{view.reference}\n{view.start[0]}\n{view.start[1]}"
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _overlap(a_start: float, a_end: float, b_start: float, b_end: float) -> float:
    """The share of the shorter span that both spans cover."""
    return (min(a_end, b_end) - max(a_start, b_start)) / min(a_end - a_start, b_end - b_start)


def _is_at_once(one: SegmentView, other: SegmentView) -> bool:
    """Whether two segments lie in the same seconds of the stream."""
    return _overlap(one.live_start_s, one.live_end_s, other.live_start_s, other.live_end_s) > SAME


def _is_same_copy(one: SegmentView, other: SegmentView) -> bool:
    return (
        one.reference == other.reference
        and _is_at_once(one, other)
        and _overlap(one.ref_start_s, one.ref_end_s, other.ref_start_s, other.ref_end_s) > SAME
    )


def _matches_change(view: SegmentView, least: float) -> bool:
    """Whether the changes of a refined view match; a still reference has none that could."""
    return view.change is None or view.change >= least


def _is_examined(view: SegmentView, now_s: int) -> bool:
    """Whether a segment that does not alert yet is refined in this second: less and less often, since it is costly."""
    age_s = now_s - view.start[0]
    every_s = 1 if age_s <= SOON_S or not view.is_open else 4 if age_s <= LATER_S else 16
    return age_s % every_s == 0


def _without_paths(view: SegmentView) -> SegmentView:
    """The view for later comparison of spans and weight, small enough to store."""
    return replace(view, paths=())


def _speed(alert: Alert) -> float | None:
    """Reference seconds per channel second by the spans that the alert states; None if they are not exact enough."""
    seconds = alert.channel_end - alert.channel_start
    if seconds < MIN_SPEED_S or alert.ambiguous:
        return None
    return round((alert.reference_end - alert.reference_start) / seconds, 3)


def _pauses(view: SegmentView, gaps: list[Gap]) -> tuple[Pause, ...]:
    """The seconds between the paths of a segment, less those that were not seen at all."""
    pauses = []
    for before, after in pairwise(view.paths):
        start, end = before.last[0] + 1, after.first[0]
        unseen = sum(max(0.0, min(end, gap.at + gap.seconds) - max(start, gap.at)) for gap in gaps)
        if end - start - unseen >= PAUSE_S:
            pauses.append(Pause(float(start), end - start - unseen))
    return tuple(pauses)


class SegmentRefiner(Protocol):
    """What an alert book asks of the matcher that found its segments."""

    def refined(self, view: SegmentView) -> SegmentView:
        """The view with exact ends. Called only for views that are emitted: it costs more than matching a second."""
        ...

    def without(self, view: SegmentView, spans: Spans) -> SegmentView:
        """The view without the evidence within excluded spans of its reference."""
        ...

    def alternatives(self, view: SegmentView) -> tuple[tuple[float, float], ...]:
        """Other spans of its reference that explain a refined view as well. Called for emitted views only."""
        ...

    def likeness(self, one: SegmentView, other: SegmentView) -> float:
        """How alike the pictures are that two references show in the stream seconds that both views cover."""
        ...

    def strength(self, view: SegmentView, beside: SegmentView) -> float:
        """How well a refined view matches in the stream seconds that it shares with another."""
        ...


class AlertBook:
    """The alerts of one channel epoch, whose segments `matcher` finds."""

    def __init__(
        self,
        epoch: ChannelEpoch,
        model: str,
        min_confidence: float,
        update_every_s: float,
        reference: Callable[[ReferenceId], Reference],
        matcher: SegmentRefiner,
        confidence: Callable[[SegmentView], float] = confidence,
    ) -> None:
        self.epoch = epoch
        self.model = model
        self.min_confidence = min_confidence
        self.update_every_s = update_every_s
        self._reference = reference
        self._matcher = matcher
        self._confidence = confidence
        self._rules = NO_RULES
        self._open: dict[str, _OpenAlert] = {}
        self._ended: list[_EndedAlert] = []  # for BREAK_S
        self._retracted: dict[str, _OpenAlert] = {}  # by a review or an exclusion, with segments that are still open
        self._segments: dict[SegmentName, SegmentView] = {}  # the segments of this second
        self._views: dict[str, SegmentView] = {}  # of events since `take_views`, with their paths
        self.n_excluded = 0  # copies that did not alert because they lie in excluded spans

    @property
    def open_alerts(self) -> set[str]:
        """Ids of the alerts that have neither ended nor been retracted."""
        return set(self._open)

    @property
    def open_segments(self) -> set[SegmentName]:
        """Names of the segments whose alerts are open."""
        return {alert.last_view.name for alert in self._open.values()}

    @property
    def retracted_open(self) -> frozenset[str]:
        """Ids of the alerts that a review or an exclusion retracted while their segments are still open."""
        return frozenset(self._retracted)

    def take_views(self) -> dict[str, SegmentView]:
        """By alert id, the views of the events since the last call, if they had paths: for evidence."""
        views, self._views = self._views, {}
        return views

    def apply_rules(self, rules: Rules, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """Puts new rules into force; returns an update for each open alert whose licence changed."""
        if rules is self._rules:
            return []
        self._rules = rules
        changed = [
            (alert_id, alert.last_view)
            for alert_id, alert in self._open.items()
            if not rules.is_rejected(alert_id)
            and self._licence(alert_id, alert.reference, alert.last_view) != alert.licence
        ]
        return [self._emit(UPDATED, alert_id, view, now_s, gaps) for alert_id, view in changed]

    def apply(self, now_s: int, views: list[SegmentView], gaps: list[Gap]) -> list[Alert]:
        """The events of stream second `now_s`. `views` has every open segment and those that closed in it."""
        self._ended = [ended for ended in self._ended if now_s - ended.second <= BREAK_S]
        self._follow_rivals(views)
        events = []
        for view in sorted(views, key=self._precedence):
            events += self._apply_view(view, now_s, gaps)
        for alert_id in [alert_id for alert_id in self._open if self._rules.is_rejected(alert_id)]:
            events.append(self._retract(alert_id, self._open[alert_id].last_view, now_s, gaps, REVIEWED_FALSE))
        return events

    def end(self, references: Collection[ReferenceId], now_s: int, gaps: list[Gap], reason: str) -> list[Alert]:
        """Ends every open alert of these references with its last view."""
        self._retracted = {
            alert_id: alert
            for alert_id, alert in self._retracted.items()
            if alert.last_view.reference not in references
        }
        views = {alert_id: alert.last_view for alert_id, alert in self._open.items()}
        return [
            self._emit(ENDED, alert_id, view, now_s, gaps, reason)
            for alert_id, view in views.items()
            if view.reference in references
        ]

    def state(self) -> BookState:
        """All that `restore` needs."""
        return BookState(self._open, self._ended, self._retracted)

    def restore(self, state: BookState) -> None:
        """Resumes from a stored state."""
        self._open, self._ended, self._retracted = state.open_alerts, state.ended, state.retracted

    # --- what happens to one segment ---------------------------------------------------------------------------------

    def _apply_view(self, whole: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """The events of one segment in this second."""
        alert_id, spans = self._alert_id(whole), self._rules.excluded(whole.reference)
        view = self._matcher.without(whole, spans) if spans else whole
        if alert_id in self._retracted and not self._resumes(alert_id, view, now_s):
            return []
        if not self._may_be_sure(view) and self._may_be_sure(whole):
            return self._apply_exclusion(alert_id, view, now_s, gaps)
        type_ = self._type(view, alert_id, now_s)
        if type_ is None or (alert_id not in self._open and not _is_examined(view, now_s)):
            return []
        refined = self._matcher.refined(view)
        refined = trimmed(refined, spans) if spans else refined
        if alert_id is None or alert_id not in self._open:
            return self._begin(type_, alert_id, refined, now_s, gaps)
        if type_ in (ENDED, RETRACTED):
            return [self._finish(alert_id, refined, now_s, gaps)]
        return [self._emit(type_, alert_id, refined, now_s, gaps)]

    def _alert_id(self, view: SegmentView) -> str | None:
        """The id of the alert that follows this segment, or that it would start; None if that alert left it."""
        alerts = self._open | self._retracted
        for alert_id, alert in alerts.items():
            if alert.last_view.name == view.name:
                return alert_id
        own_id = alert_id_of(self.epoch, view)
        is_taken = own_id in alerts or any(ended.alert_id == own_id for ended in self._ended)
        return None if is_taken else own_id

    def _type(self, view: SegmentView, alert_id: str | None, now_s: int) -> str | None:
        """The type of a segment's next event, if one is due; rivals and reviews aside."""
        alert = None if alert_id is None else self._open.get(alert_id)
        if alert is None:
            if not self._may_be_sure(view) or view.echo_of is not None:
                return None
            return STARTED if view.is_open else ENDED  # so short that its first event is its last
        if not view.is_open:
            return ENDED
        is_due = now_s - alert.emitted_s >= self.update_every_s
        return UPDATED if is_due and view.live_end_s > alert.last_view.live_end_s else None

    def _begin(self, type_: str, alert_id: str | None, view: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """The first event of a segment, unless it only looks alike or another alert stands for it."""
        least = MIN_START if view.is_open else min_change(view.live_end_s - view.live_start_s)
        if not _matches_change(view, least) or not self._is_sure(view) or self._is_claimed(view, now_s):
            return []
        weaker = []
        for other_id, other in self._at_once(view, now_s):
            if self._matcher.likeness(other, view) >= VERSION:
                return self._add_version(other_id, view, now_s, gaps) if other_id in self._open else []
            strength, others = self._matcher.strength(view, other), self._matcher.strength(other, view)
            if strength < LOOK_ALIKE * others:
                return []
            if others < LOOK_ALIKE * strength and other_id in self._open:
                weaker.append(other_id)
        if alert_id is None:
            return []
        events = []
        for other_id in weaker:
            view_of_other = self._open[other_id].last_view
            events.append(self._retract(other_id, view_of_other, now_s, gaps, EXPLAINED.format(alert_id)))
            self._retracted[other_id] = replace(self._retracted[other_id], is_explained=True)
        return [*events, self._emit(type_, alert_id, view, now_s, gaps)]

    def _at_once(self, view: SegmentView, now_s: int) -> list[tuple[str, SegmentView]]:
        """The alerts of other references in the same seconds, open or ended within REMEMBER_S, with their claims."""
        alerts = [(other_id, self._claim(alert)) for other_id, alert in self._open.items()]
        alerts += [(ended.alert_id, ended.view) for ended in self._ended if now_s - ended.second <= REMEMBER_S]
        return [(id_, other) for id_, other in alerts if other.reference != view.reference and _is_at_once(other, view)]

    def _finish(self, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap]) -> Alert:
        """The last event of an open alert whose segment closed: it ends, or is retracted with a reason."""
        reason = None
        explained_by = self._explained_by(alert_id, view, now_s)
        if explained_by is not None:
            reason = EXPLAINED.format(explained_by)
        elif self._rules.is_rejected(alert_id):
            reason = REVIEWED_FALSE
        elif not _matches_change(view, min_change(view.live_end_s - view.live_start_s)):
            reason = OTHER_CHANGES
        elif not self._is_sure(view):
            reason = TOO_WEAK
        if reason is not None:
            return self._retract(alert_id, view, now_s, gaps, reason)
        return self._emit(ENDED, alert_id, self._best_version(alert_id, view), now_s, gaps)

    def _apply_exclusion(self, alert_id: str | None, view: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """Handles a segment that reaches the minimum confidence only by its excluded seconds."""
        if alert_id is not None and alert_id in self._open:
            return [self._retract(alert_id, view, now_s, gaps, EXCLUDED)]
        self.n_excluded += not view.is_open
        return []

    def _may_be_sure(self, view: SegmentView) -> bool:
        """Whether a segment that is not refined yet may have the confidence of an alert."""
        return self._confidence(replace(view, change=1.0)) >= self.min_confidence

    def _is_sure(self, view: SegmentView) -> bool:
        """Whether a refined segment has the confidence of an alert."""
        return self._confidence(view) >= self.min_confidence

    def _resumes(self, alert_id: str, view: SegmentView, now_s: int) -> bool:
        """Reopens a retracted alert if what retracted it no longer holds; forgets it once its segment closes."""
        if not view.is_open:
            del self._retracted[alert_id]
            return False
        alert = self._retracted[alert_id]
        if alert.is_explained or self._rules.is_rejected(alert_id):
            return False
        if not self._may_be_sure(view) or view.echo_of is not None:
            return False
        self._open[alert_id] = replace(self._retracted.pop(alert_id), emitted_s=now_s - self.update_every_s)
        return True

    # --- rivals and versions -----------------------------------------------------------------------------------------

    def _precedence(self, view: SegmentView) -> tuple[object, ...]:
        """Sorts views so that of versions that match alike the longest comes first; open alerts before all."""
        heavy = -round(math.log(max(view.total_weight, 1e-6), OVERTAKES))
        length = self._reference(view.reference).n_seconds
        return view.name not in self.open_segments, heavy, -length, view.start, view.reference

    def _follow_rivals(self, views: list[SegmentView]) -> None:
        """Lets each alert whose segment closes follow the heaviest rival or version that is still open and goes on."""
        self._segments = {view.name: view for view in views}
        names = self.open_segments
        for alert_id, alert in list(self._open.items()):
            closing = next((v for v in views if v.name == alert.last_view.name and not v.is_open), None)
            if closing is None:
                continue
            rivals = [
                view
                for view in views
                if view.is_open and view.name not in names
                if view.reference == closing.reference or view.reference in alert.versions
                if self._may_be_sure(view) and view.live_end_s > closing.live_end_s
                if _is_at_once(view, closing)
            ]
            if rivals:
                heaviest = max(rivals, key=lambda view: (view.total_weight, view.start, view.reference))
                self._follow(alert_id, heaviest)

    def _follow(self, alert_id: str, view: SegmentView) -> None:
        """Lets an alert follow another segment: of the same reference, or of a version that it names from now on."""
        alert = self._open[alert_id]
        if view.reference == alert.last_view.reference:
            self._open[alert_id] = replace(alert, last_view=replace(alert.last_view, start=view.start))
            return
        versions = {**alert.versions, alert.last_view.reference: _without_paths(alert.last_view)}
        versions.pop(view.reference, None)
        reference = self._reference(view.reference)
        self._open[alert_id] = replace(alert, reference=reference, versions=versions, last_view=view)

    def _claim(self, alert: _OpenAlert) -> SegmentView:
        """What an alert claims by now: its last view, continued as far as its segment has come since."""
        last, now = alert.last_view, self._segments.get(alert.last_view.name)
        if now is None or now.live_end_s <= last.live_end_s:
            return last
        ref_end_s = max(last.ref_end_s, now.ref_end_s)
        return replace(now, live_start_s=last.live_start_s, ref_start_s=last.ref_start_s, ref_end_s=ref_end_s)

    def _is_claimed(self, view: SegmentView, now_s: int) -> bool:
        """Whether an alert of the same reference, open or ended within REMEMBER_S, stands for these seconds.

        It does not where two places of the reference are on air beside each other: they look different, and both match.
        """
        others = [self._claim(alert) for alert in (self._open | self._retracted).values()]
        others += [ended.view for ended in self._ended if now_s - ended.second <= REMEMBER_S]
        rivals = [other for other in others if other.reference == view.reference and _is_at_once(other, view)]
        return any(
            _is_same_copy(other, view)
            or self._matcher.likeness(other, view) >= MIRRORS
            or self._matcher.strength(view, other) < LOOK_ALIKE * self._matcher.strength(other, view)
            for other in rivals
        )

    def _explained_by(self, alert_id: str, view: SegmentView, now_s: int) -> str | None:
        """The id of another alert that explains this one better: its segment is an echo, or claims the same copy."""
        alerts = [(other, alert.last_view) for other, alert in self._open.items() if other != alert_id]
        alerts += [(one.alert_id, one.view) for one in self._ended if now_s - one.second <= REMEMBER_S]
        for other_id, other in alerts:
            if other.reference == view.reference and other.start == view.echo_of:
                return other_id
            if other.total_weight >= view.total_weight and _is_same_copy(other, view):
                return other_id
        return None

    def _add_version(self, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """Lists a version beside the one that the alert names, or names it instead if it matches far more."""
        alert = self._open[alert_id]
        if view.is_open and view.total_weight > OVERTAKES * self._claim(alert).total_weight:
            self._follow(alert_id, view)
            return [self._emit(UPDATED, alert_id, view, now_s, gaps)]
        versions = {**alert.versions, view.reference: _without_paths(view)}
        self._open[alert_id] = replace(alert, versions=versions)
        return []

    def _best_version(self, alert_id: str, view: SegmentView) -> SegmentView:
        """Of the versions that match about as much as any, the one of whose reference most was aired."""
        alert = self._open[alert_id]
        claims = [view, *alert.versions.values()]
        heavy = AS_HEAVY * max(claim.total_weight for claim in claims)

        def coverage(claim: SegmentView) -> float:
            return (claim.ref_end_s - claim.ref_start_s) / self._reference(claim.reference).n_seconds

        best = max((claim for claim in claims if claim.total_weight >= heavy), key=coverage)
        if best is not view:
            versions = {**alert.versions, view.reference: _without_paths(view)}
            del versions[best.reference]
            self._open[alert_id] = replace(alert, reference=self._reference(best.reference), versions=versions)
        return best

    def _continued(self, view: SegmentView) -> str | None:
        """The id of the newest ended alert that this segment continues, for example after an advert break."""
        for ended in reversed(self._ended):
            old = ended.view
            is_next = abs(view.ref_start_s - old.ref_end_s) <= BREAK_REF_S
            if old.reference == view.reference and is_next and old.live_end_s <= view.live_start_s + SLACK_S:
                return ended.alert_id
        return None

    def _licence(self, alert_id: str, reference: Reference, view: SegmentView) -> str | None:
        """The id of the licence that covers the play as claimed, if there is one."""
        began, ended = None, None
        if (second_0 := self.epoch.began_at) is not None:
            began = second_0 + timedelta(seconds=view.live_start_s)
            ended = second_0 + timedelta(seconds=view.live_end_s)
        return self._rules.licence(alert_id, reference, self.epoch.channel, began, ended)

    # --- events ------------------------------------------------------------------------------------------------------

    def _retract(self, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap], reason: str) -> Alert:
        """Retracts an open alert; while its segment is open it stays silent and can resume."""
        alert = self._open[alert_id]
        event = self._emit(RETRACTED, alert_id, view, now_s, gaps, reason)
        if view.is_open:
            self._retracted[alert_id] = replace(alert, seq=event.seq)
        return event

    def _emit(
        self, type_: str, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap], reason: str | None = None
    ) -> Alert:
        """The next event of an alert, new or open; notes that it was emitted."""
        alert = self._open.get(alert_id) or self._new_alert(view, now_s)
        alert = replace(alert, licence=self._licence(alert_id, alert.reference, view))
        current = self._current(alert_id, alert, view, gaps)
        if type_ == RETRACTED:
            assert reason is not None, "a retraction says why"
            event = current.retracted(reason)
        else:
            ended_at = self.epoch.wall_time(view.live_end_s) if type_ == ENDED else None
            event = replace(current, type=type_, seq=current.seq + 1, ended_at=ended_at, reason=reason)
        if view.paths:
            self._views[alert_id] = view
        if type_ in (STARTED, UPDATED):
            self._open[alert_id] = replace(alert, seq=event.seq, emitted_s=now_s, last_view=view)
        else:
            self._open.pop(alert_id, None)
        if type_ == ENDED:
            self._ended.append(_EndedAlert(now_s, alert_id, view))
        return event

    def _new_alert(self, view: SegmentView, now_s: int) -> _OpenAlert:
        reference = self._reference(view.reference)
        return _OpenAlert(reference, self._continued(view), now_s, 0, now_s, view, None, {})

    def _current(self, alert_id: str, alert: _OpenAlert, view: SegmentView, gaps: list[Gap]) -> Alert:
        """The alert as of this view, with the type and number of an event still to be chosen."""
        reference, seconds = alert.reference, view.live_end_s - view.live_start_s
        others = self._matcher.alternatives(view) if view.paths else ()
        current = Alert(
            id=alert_id,
            type=UPDATED,
            seq=alert.seq,
            channel=self.epoch.channel,
            reference=view.reference,
            title=reference.title,
            owner=reference.owner,
            channel_start=float(view.live_start_s),
            channel_end=float(view.live_end_s),
            started_at=self.epoch.wall_time(view.live_start_s),
            ended_at=None,
            detected_at=float(alert.detected_at),
            reference_start=round(view.ref_start_s, 1),
            reference_end=round(view.ref_end_s, 1),
            speed=None,
            confidence=self._confidence(view),
            score=round(view.score, 4),
            matched_seconds=view.n_live,
            coverage_channel=round(min(1.0, view.n_live / seconds), 3),
            coverage_reference=round((view.ref_end_s - view.ref_start_s) / reference.n_seconds, 3),
            gaps=tuple(gap for gap in gaps if gap.touches(view.live_start_s, view.live_end_s)),
            licence=alert.licence,
            model=self.model,
            evidence=None,
            pauses=_pauses(view, gaps),
            continues=alert.continues,
            ambiguous=bool(others),
            alternatives=others,
            versions=tuple(
                Version(claim.reference, round(claim.ref_start_s, 1), round(claim.ref_end_s, 1), round(claim.score, 4))
                for claim in sorted(alert.versions.values(), key=lambda claim: (-claim.total_weight, claim.reference))
            ),
        )
        return replace(current, speed=_speed(current))
