"""The alert book: segments of one channel in, alert events out, each event emitted once.

The id of an alert is derived from channel, stream epoch, reference and the start cell of its first path, so a replay
derives the same id. An alert starts when its confidence reaches the minimum, is updated at most every `update_every_s`
of stream time, and is finally either ended or retracted. `Rules` hold what people decided: which alerts are licensed,
which spans of a reference never alert, and which alerts a reviewer called false. A false alert is retracted at once and
stays silent while its segment lasts, unless the review is reversed. `Claims` decides which segments are one copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

from monitor.alerting.alerts import (
    ENDED,
    RETRACTED,
    REVIEWED_FALSE,
    STARTED,
    UPDATED,
    Alert,
    Gap,
    Pause,
    Version,
)
from monitor.alerting.claims import BookState, Claims, EndedAlert, OpenAlert, SegmentRefiner
from monitor.ingest.clock import ChannelEpoch
from monitor.matching.changes import MIN_START, min_change
from monitor.matching.confidence import confidence
from monitor.matching.excluding import trimmed
from monitor.matching.stitching import SegmentName, SegmentView
from monitor.rights.rules import NO_RULES, Rules
from reference_db.store.catalog import Reference, ReferenceId

EXCLUDED = "reference span excluded"
TOO_WEAK = "too weak: the final confidence is below the minimum"
OTHER_CHANGES = "a look-alike: what changes in the pictures does not match"
EXPLAINED = "better explained by {}"

PAUSE_S = 3  # seconds without a match within an alert are listed as a pause from this length on
MIN_SPEED_S = 15  # of a copy; the ends of a shorter one are not exact enough to measure its speed
SOON_S, LATER_S = 20, 80  # a segment that does not alert yet is examined every second, every 4 s, then every 16 s


def alert_id_of(epoch: ChannelEpoch, view: SegmentView) -> str:
    """The alert id of a segment: the same in every process and every replay."""
    name = f"{epoch.channel}\n{epoch.name}\n{view.reference}\n{view.start[0]}\n{view.start[1]}"
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _matches_change(view: SegmentView, least: float) -> bool:
    """Whether the changes of a refined view match; a still reference has none that could."""
    return view.change is None or view.change >= least


def _is_examined(view: SegmentView, now_s: int) -> bool:
    """Whether a segment that does not alert yet is refined in this second: less and less often, since it is costly."""
    age_s = now_s - view.start[0]
    every_s = 1 if age_s <= SOON_S or not view.is_open else 4 if age_s <= LATER_S else 16
    return age_s % every_s == 0


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
        self._claims = Claims(reference, matcher, self._may_be_sure)
        self._views: dict[str, SegmentView] = {}  # of events since `take_views`, with their paths
        self.n_excluded = 0  # copies that did not alert because they lie in excluded spans

    @property
    def open_alerts(self) -> set[str]:
        """Ids of the alerts that have neither ended nor been retracted."""
        return set(self._claims.open)

    @property
    def open_segments(self) -> set[SegmentName]:
        """Names of the segments whose alerts are open."""
        return self._claims.open_segments

    @property
    def retracted_open(self) -> frozenset[str]:
        """Ids of the alerts that a review or an exclusion retracted while their segments are still open."""
        return frozenset(self._claims.retracted)

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
            for alert_id, alert in self._claims.open.items()
            if not rules.is_rejected(alert_id)
            and self._licence(alert_id, alert.reference, alert.last_view) != alert.licence
        ]
        return [self._emit(UPDATED, alert_id, view, now_s, gaps) for alert_id, view in changed]

    def apply(self, now_s: int, views: list[SegmentView], gaps: list[Gap]) -> list[Alert]:
        """The events of stream second `now_s`. `views` has every open segment and those that closed in it."""
        self._claims.forget(now_s)
        self._claims.follow_rivals(views)
        events = []
        for view in sorted(views, key=self._claims.precedence):
            events += self._apply_view(view, now_s, gaps)
        for alert_id in [alert_id for alert_id in self._claims.open if self._rules.is_rejected(alert_id)]:
            events.append(self._retract(alert_id, self._claims.open[alert_id].last_view, now_s, gaps, REVIEWED_FALSE))
        return events

    def end(self, references: Collection[ReferenceId], now_s: int, gaps: list[Gap], reason: str) -> list[Alert]:
        """Ends every open alert of these references with its last view."""
        self._claims.retracted = {
            alert_id: alert
            for alert_id, alert in self._claims.retracted.items()
            if alert.last_view.reference not in references
        }
        views = {alert_id: alert.last_view for alert_id, alert in self._claims.open.items()}
        return [
            self._emit(ENDED, alert_id, view, now_s, gaps, reason)
            for alert_id, view in views.items()
            if view.reference in references
        ]

    def state(self) -> BookState:
        """All that `restore` needs."""
        return BookState(self._claims.open, self._claims.ended, self._claims.retracted)

    def restore(self, state: BookState) -> None:
        """Resumes from a stored state."""
        self._claims.open, self._claims.ended, self._claims.retracted = state.open_alerts, state.ended, state.retracted

    # --- what happens to one segment ---------------------------------------------------------------------------------

    def _apply_view(self, whole: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """The events of one segment in this second."""
        alert_id, spans = self._alert_id(whole), self._rules.excluded(whole.reference)
        view = self._matcher.without(whole, spans) if spans else whole
        if alert_id in self._claims.retracted and not self._resumes(alert_id, view, now_s):
            return []
        if not self._may_be_sure(view) and self._may_be_sure(whole):
            return self._apply_exclusion(alert_id, view, now_s, gaps)
        type_ = self._type(view, alert_id, now_s)
        if type_ is None or (alert_id not in self._claims.open and not _is_examined(view, now_s)):
            return []
        refined = self._matcher.refined(view)
        refined = trimmed(refined, spans) if spans else refined
        if alert_id is None or alert_id not in self._claims.open:
            return self._begin(type_, alert_id, refined, now_s, gaps)
        if type_ in (ENDED, RETRACTED):
            return [self._finish(alert_id, refined, now_s, gaps)]
        return [self._emit(type_, alert_id, refined, now_s, gaps)]

    def _alert_id(self, view: SegmentView) -> str | None:
        """The id of the alert that follows this segment, or that it would start; None if that alert left it."""
        alerts = self._claims.open | self._claims.retracted
        for alert_id, alert in alerts.items():
            if alert.last_view.name == view.name:
                return alert_id
        own_id = alert_id_of(self.epoch, view)
        is_taken = own_id in alerts or any(ended.alert_id == own_id for ended in self._claims.ended)
        return None if is_taken else own_id

    def _type(self, view: SegmentView, alert_id: str | None, now_s: int) -> str | None:
        """The type of a segment's next event, if one is due; rivals and reviews aside."""
        alert = None if alert_id is None else self._claims.open.get(alert_id)
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
        if not _matches_change(view, least) or not self._is_sure(view) or self._claims.is_claimed(view, now_s):
            return []
        rank = self._claims.rank(view, now_s)
        if rank.version_of is not None:
            is_named = rank.version_of in self._claims.open and self._claims.add_version(rank.version_of, view)
            return [self._emit(UPDATED, rank.version_of, view, now_s, gaps)] if is_named else []
        if rank.is_look_alike:
            return []
        if alert_id is None:
            return []
        events = []
        for other_id in rank.weaker:
            view_of_other = self._claims.open[other_id].last_view
            events.append(self._retract(other_id, view_of_other, now_s, gaps, EXPLAINED.format(alert_id)))
            self._claims.retracted[other_id] = replace(self._claims.retracted[other_id], is_explained=True)
        return [*events, self._emit(type_, alert_id, view, now_s, gaps)]

    def _finish(self, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap]) -> Alert:
        """The last event of an open alert whose segment closed: it ends, or is retracted with a reason."""
        reason = None
        explained_by = self._claims.explained_by(alert_id, view, now_s)
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
        return self._emit(ENDED, alert_id, self._claims.best_version(alert_id, view), now_s, gaps)

    def _apply_exclusion(self, alert_id: str | None, view: SegmentView, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """Handles a segment that reaches the minimum confidence only by its excluded seconds."""
        if alert_id is not None and alert_id in self._claims.open:
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
            del self._claims.retracted[alert_id]
            return False
        alert = self._claims.retracted[alert_id]
        if alert.is_explained or self._rules.is_rejected(alert_id):
            return False
        if not self._may_be_sure(view) or view.echo_of is not None:
            return False
        self._claims.open[alert_id] = replace(
            self._claims.retracted.pop(alert_id), emitted_s=now_s - self.update_every_s
        )
        return True

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
        alert = self._claims.open[alert_id]
        event = self._emit(RETRACTED, alert_id, view, now_s, gaps, reason)
        if view.is_open:
            self._claims.retracted[alert_id] = replace(alert, seq=event.seq)
        return event

    def _emit(
        self, type_: str, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap], reason: str | None = None
    ) -> Alert:
        """The next event of an alert, new or open; notes that it was emitted."""
        alert = self._claims.open.get(alert_id) or self._new_alert(view, now_s)
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
            self._claims.open[alert_id] = replace(alert, seq=event.seq, emitted_s=now_s, last_view=view)
        else:
            self._claims.open.pop(alert_id, None)
        if type_ == ENDED:
            self._claims.ended.append(EndedAlert(now_s, alert_id, view))
        return event

    def _new_alert(self, view: SegmentView, now_s: int) -> OpenAlert:
        reference = self._reference(view.reference)
        return OpenAlert(reference, self._claims.continued(view), now_s, 0, now_s, view, None, {})

    def _current(self, alert_id: str, alert: OpenAlert, view: SegmentView, gaps: list[Gap]) -> Alert:
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
