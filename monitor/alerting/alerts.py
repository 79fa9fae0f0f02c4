"""Alerts: which segment changes are worth telling, each told once.

An alert has one id for its whole life, made of channel, stream epoch, reference and the start cell of its first
path, so a replay mints the same id. It is started when its score passes the threshold, updated at most every
`update_every_s` of stream time, and at the end either ended or retracted. What the desk has decided (`Rules`) says
which alerts are licensed, which spans of a reference never alert, and which alerts a reviewer has called false: those
are retracted at once and told no more while they last, unless the word is taken back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from itertools import pairwise
from typing import Any, Self

from monitor.ingest.clock import ChannelEpoch
from monitor.matching.excluding import Spans, trimmed
from monitor.matching.stitching import Name, SegmentView
from monitor.ops.timestamps import rfc3339
from monitor.rights.rules import NO_RULES, Rules
from reference_db.store.catalog import Reference, ReferenceId

STARTED, UPDATED, ENDED, RETRACTED = "alert.started", "alert.updated", "alert.ended", "alert.retracted"
REVIEWED_FALSE, REVIEWED_TRUE = "reviewed: false positive", "reviewed: no false positive"
EXCLUDED = "reference span excluded"

SAME = 0.5  # of both time lines that two alerts must share to be one copy
REMEMBER_S = 60  # for so long an ended alert keeps others from telling the same
PAUSE_S = 3  # seconds of air within an alert that match nothing are a pause from this length on
BREAK_S = 900  # an alert goes on with what another stopped at, if no longer ago than this: an advert break
SLACK_S = 2  # by which the ends of two alerts may overlap
BREAK_REF_S = 10  # and if it begins within so many seconds of where that one stopped in the reference


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds of a channel that were not seen."""

    at: float
    seconds: float
    reason: str

    def touches(self, start_s: float, end_s: float) -> bool:
        """Whether it falls into this span, or lies just before or after it: there may have been more of it."""
        return self.at <= end_s + 1 and self.at + self.seconds >= start_s - 1


@dataclass(frozen=True, slots=True)
class Pause:
    """Seconds of a channel within an alert that were seen and show something else, such as a short advert."""

    at: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Alert:
    """What is told of one copy at one moment. Times without a zone are seconds of channel or reference."""

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
    detected_at: float  # the newest stream second that had to be seen before the alert went out
    reference_start: float
    reference_end: float
    speed: float
    score: float
    matched_seconds: int
    coverage_channel: float
    coverage_reference: float
    gaps: tuple[Gap, ...]
    licence: str | None
    model: str
    evidence: str | None
    pauses: tuple[Pause, ...] = ()
    continues: str | None = None  # id of the alert that stopped where this one goes on
    reason: str | None = None  # why it ended or was retracted, where it was not the copy's own end

    def as_dict(self) -> dict[str, object]:
        """Plain values, in the order of the fields, ready for JSON."""
        return asdict(self)

    def ended(self, reason: str) -> Alert:
        """Its end, for want of anybody who knows more than was told last."""
        ended_at = None
        if self.started_at is not None:
            seconds = timedelta(seconds=round(self.channel_end - self.channel_start))
            ended_at = rfc3339(datetime.fromisoformat(self.started_at) + seconds)
        return replace(self, type=ENDED, seq=self.seq + 1, ended_at=ended_at, reason=reason)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """The alert of these values; those of a later version that are not known here are left out."""
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        known["gaps"] = tuple(Gap(**gap) for gap in values["gaps"])
        known["pauses"] = tuple(Pause(**pause) for pause in values.get("pauses", ()))
        return cls(**known)


@dataclass(frozen=True, slots=True)
class _OpenAlert:
    """What was said of one alert so far. Its view has no paths: they are not looked at again."""

    reference: Reference
    continues: str | None
    detected_at: float
    seq: int
    last_told_s: float
    last_view: SegmentView
    licence: str | None


@dataclass(frozen=True, slots=True)
class BookState:
    """An alert book as it is stored."""

    told: dict[str, _OpenAlert]
    ended: list[tuple[int, SegmentView]]
    withdrawn: dict[str, _OpenAlert]


def alert_id_of(epoch: ChannelEpoch, view: SegmentView) -> str:
    """The id that a segment has for life, whoever finds it and however often."""
    name = f"{epoch.channel}\n{epoch.name}\n{view.reference}\n{view.start[0]}\n{view.start[1]}"
    return hashlib.sha256(name.encode()).hexdigest()[:24]


def _shared(a_start: float, a_end: float, b_start: float, b_end: float) -> float:
    """The share of the shorter span that both have."""
    return (min(a_end, b_end) - max(a_start, b_start)) / min(a_end - a_start, b_end - b_start)


def _pauses(view: SegmentView, gaps: list[Gap]) -> tuple[Pause, ...]:
    """What lies between the paths of a segment, less what was not seen at all."""
    pauses = []
    for before, after in pairwise(view.paths):
        start, end = before.last[0] + 1, after.first[0]
        unseen = sum(max(0.0, min(end, gap.at + gap.seconds) - max(start, gap.at)) for gap in gaps)
        if end - start - unseen >= PAUSE_S:
            pauses.append(Pause(float(start), end - start - unseen))
    return tuple(pauses)


class AlertBook:
    """The alerts of one channel epoch."""

    def __init__(
        self,
        epoch: ChannelEpoch,
        model: str,
        threshold: float,
        update_every_s: float,
        reference: Callable[[ReferenceId], Reference],
        refined: Callable[[SegmentView], SegmentView] = lambda view: view,
        without: Callable[[SegmentView, Spans], SegmentView] = lambda view, spans: view,
    ) -> None:
        self.epoch = epoch
        self.model = model
        self.threshold = threshold
        self.update_every_s = update_every_s
        self._reference = reference
        self._refined = refined  # asked for what is told only
        self._without = without  # what is left of a view outside excluded spans
        self._rules = NO_RULES
        self._told: dict[str, _OpenAlert] = {}
        self._ended: list[tuple[int, SegmentView]] = []  # when, and what was claimed; kept for a while
        self._withdrawn: dict[str, _OpenAlert] = {}  # retracted by the desk, and still on air
        self._views: dict[str, SegmentView] = {}  # of what was told since they were last taken, with their paths
        self.n_excluded = 0  # copies that were not told, since they lie in excluded spans

    @property
    def open_alerts(self) -> set[str]:
        """Ids of the alerts whose end is still to be told."""
        return set(self._told)

    @property
    def retracted_open(self) -> frozenset[str]:
        """Ids of the alerts that the desk had retracted and whose segments are still open."""
        return frozenset(self._withdrawn)

    def take_views(self) -> dict[str, SegmentView]:
        """What each alert was told by since the last call, where that is known: for evidence."""
        views, self._views = self._views, {}
        return views

    def apply_rules(self, rules: Rules, now_s: int, gaps: list[Gap]) -> list[Alert]:
        """Takes what the desk has decided into force; the news is of open alerts that it now licenses or not."""
        if rules is self._rules:
            return []
        self._rules = rules
        changed = [
            (alert_id, told.last_view)
            for alert_id, told in self._told.items()
            if not rules.is_rejected(alert_id)
            and self._licence(alert_id, told.reference, told.last_view) != told.licence
        ]
        return [self._tell(UPDATED, alert_id, view, now_s, gaps) for alert_id, view in changed]

    @property
    def open_segments(self) -> set[Name]:
        """Names of the segments whose alerts are open."""
        return {told.last_view.name for told in self._told.values()}

    def apply(self, now_s: int, views: list[SegmentView], gaps: list[Gap]) -> list[Alert]:
        """The news of stream second `now_s`. `views` has every open segment and those that closed now."""
        self._ended = [(second, view) for second, view in self._ended if now_s - second <= BREAK_S]
        news = [alert for view in views if (alert := self._news(view, now_s, gaps)) is not None]
        for alert_id in [alert_id for alert_id in self._told if self._rules.is_rejected(alert_id)]:
            news.append(self._withdraw(alert_id, self._told[alert_id].last_view, now_s, gaps, REVIEWED_FALSE))
        return news

    def _news(self, whole: SegmentView, now_s: int, gaps: list[Gap]) -> Alert | None:
        """What there is to tell of one segment, if anything."""
        alert_id, spans = alert_id_of(self.epoch, whole), self._rules.excluded(whole.reference)
        view = self._without(whole, spans) if spans else whole
        if alert_id in self._withdrawn and not self._comes_back(alert_id, view, now_s):
            return None
        told = self._told.get(alert_id)
        if view.score < self.threshold <= whole.score:
            self.n_excluded += told is None and not view.is_open
            return None if told is None else self._withdraw(alert_id, view, now_s, gaps, EXCLUDED)
        type_ = self._type(view, told, now_s)
        if type_ is None:
            return None
        refined = self._refined(view)
        refined = trimmed(refined, spans) if spans else refined
        if type_ in (STARTED, ENDED) and self._is_told_already(alert_id, refined, now_s):
            if told is None:
                return None
            type_ = RETRACTED
        if type_ == ENDED and told is not None and self._rules.is_rejected(alert_id):
            return self._withdraw(alert_id, refined, now_s, gaps, REVIEWED_FALSE)
        return self._tell(type_, alert_id, refined, now_s, gaps)

    def _withdraw(self, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap], reason: str) -> Alert:
        """Retracts an alert by the desk's word; while its segment lasts it is told no more, and can come back."""
        told = self._told[alert_id]
        alert = self._tell(RETRACTED, alert_id, view, now_s, gaps, reason)
        if view.is_open:
            self._withdrawn[alert_id] = replace(told, seq=alert.seq)
        return alert

    def _comes_back(self, alert_id: str, view: SegmentView, now_s: int) -> bool:
        """Whether what was withdrawn is to be told again, since the desk has changed its mind."""
        if not view.is_open:
            del self._withdrawn[alert_id]
            return False
        if self._rules.is_rejected(alert_id) or view.score < self.threshold or view.echo_of is not None:
            return False
        self._told[alert_id] = replace(self._withdrawn.pop(alert_id), last_told_s=now_s - self.update_every_s)
        return True

    def _is_told_already(self, alert_id: str, view: SegmentView, now_s: int) -> bool:
        """Whether a stronger alert that is open or ended just now claims the same seconds of both sides."""
        claims = (self._told | self._withdrawn).items()  # what was withdrawn is not told by another name
        others = [told.last_view for other, told in claims if other != alert_id]
        others += [ended for second, ended in self._ended if now_s - second <= REMEMBER_S]
        return any(
            other.reference == view.reference
            and other.total_weight >= view.total_weight
            and _shared(other.live_start_s, other.live_end_s, view.live_start_s, view.live_end_s) > SAME
            and _shared(other.ref_start_s, other.ref_end_s, view.ref_start_s, view.ref_end_s) > SAME
            for other in others
        )

    def _continued(self, view: SegmentView) -> str | None:
        """The id of the newest alert that ended where this one goes on, after an advert break, say."""
        for _, ended in reversed(self._ended):
            goes_on = abs(view.ref_start_s - ended.ref_end_s) <= BREAK_REF_S
            if ended.reference == view.reference and goes_on and ended.live_end_s <= view.live_start_s + SLACK_S:
                return alert_id_of(self.epoch, ended)
        return None

    def _type(self, view: SegmentView, told: _OpenAlert | None, now_s: int) -> str | None:
        """What there is to tell of a segment, if anything."""
        holds = view.score >= self.threshold and view.echo_of is None
        if not view.is_open:
            if told is None:
                return ENDED if holds else None  # so short that its first word is its last
            return ENDED if holds else RETRACTED
        if told is None:
            return STARTED if holds else None
        due = now_s - told.last_told_s >= self.update_every_s
        return UPDATED if due and view.live_end_s > told.last_view.live_end_s else None

    def end(self, references: Collection[ReferenceId], now_s: int, gaps: list[Gap], reason: str) -> list[Alert]:
        """Ends every open alert of these references as it was last told."""
        ended = [(alert_id, told.last_view) for alert_id, told in self._told.items()]
        self._withdrawn = {
            alert_id: told for alert_id, told in self._withdrawn.items() if told.last_view.reference not in references
        }
        return [
            self._tell(ENDED, alert_id, view, now_s, gaps, reason)
            for alert_id, view in ended
            if view.reference in references
        ]

    def state(self) -> BookState:
        """All that `restore` needs."""
        return BookState(self._told, self._ended, self._withdrawn)

    def restore(self, state: BookState) -> None:
        """Goes on from there."""
        self._told, self._ended, self._withdrawn = state.told, state.ended, state.withdrawn

    def _tell(
        self, type_: str, alert_id: str, view: SegmentView, now_s: int, gaps: list[Gap], reason: str | None = None
    ) -> Alert:
        told = self._told.get(alert_id) or _OpenAlert(
            self._reference(view.reference), self._continued(view), now_s, 0, now_s, view, None
        )
        told = replace(told, licence=self._licence(alert_id, told.reference, view))
        alert = self._alert(type_, alert_id, told, view, gaps, reason)
        if view.paths:
            self._views[alert_id] = view
        claim = replace(view, paths=())  # spans are all that is looked at again
        self._told[alert_id] = replace(told, seq=told.seq + 1, last_told_s=now_s, last_view=claim)
        if type_ in (ENDED, RETRACTED):
            del self._told[alert_id]
        if type_ == ENDED:
            self._ended.append((now_s, claim))
        return alert

    def _licence(self, alert_id: str, reference: Reference, view: SegmentView) -> str | None:
        """What permits the play as it is claimed."""
        began, ended = None, None
        if (second_0 := self.epoch.began_at) is not None:
            began = second_0 + timedelta(seconds=view.live_start_s)
            ended = second_0 + timedelta(seconds=view.live_end_s)
        return self._rules.licence(alert_id, reference, self.epoch.channel, began, ended)

    def _alert(
        self, type_: str, alert_id: str, told: _OpenAlert, view: SegmentView, gaps: list[Gap], reason: str | None
    ) -> Alert:
        reference, seconds = told.reference, view.live_end_s - view.live_start_s
        return Alert(
            id=alert_id,
            type=type_,
            seq=told.seq + 1,
            channel=self.epoch.channel,
            reference=view.reference,
            title=reference.title,
            owner=reference.owner,
            channel_start=float(view.live_start_s),
            channel_end=float(view.live_end_s),
            started_at=self.epoch.wall_time(view.live_start_s),
            ended_at=self.epoch.wall_time(view.live_end_s) if type_ == ENDED else None,
            detected_at=float(told.detected_at),
            reference_start=round(view.ref_start_s, 1),
            reference_end=round(view.ref_end_s, 1),
            speed=round(view.speed, 3),
            score=round(view.score, 4),
            matched_seconds=view.n_live,
            coverage_channel=round(min(1.0, view.n_live / seconds), 3),
            coverage_reference=round((view.ref_end_s - view.ref_start_s) / reference.n_seconds, 3),
            gaps=tuple(gap for gap in gaps if gap.touches(view.live_start_s, view.live_end_s)),
            licence=told.licence,
            model=self.model,
            evidence=None,
            pauses=_pauses(view, gaps),
            continues=told.continues,
            reason=reason,
        )
