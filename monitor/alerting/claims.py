"""Claims: which alert of a channel stands for which copy, so that one copy is one alert.

Segments of one reference at one time are rivals, of which the first alerts and the others stay silent; when its segment
closes, the alert follows a rival that is still open. Segments of several references at one time are versions of one
film if the references show the same pictures there (one alert, which names the best and lists the others), look-alikes
if one matches far better than the other (it alone alerts), and otherwise copies of their own.

`Claims` holds the open, retracted and recently ended alerts and compares segments with them; `AlertBook` emits events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from monitor.matching.excluding import Spans
from monitor.matching.stitching import Seconds, SegmentName, SegmentView
from reference_db.store.catalog import Reference, ReferenceId

SAME = 0.5  # two alerts are the same copy if they share more than this of both time lines
REMEMBER_S = 60  # an ended alert suppresses duplicates for this long
BREAK_S = 900  # an alert may continue one that ended up to this long ago: an advert break
BREAK_REF_S = 10  # an alert continues another only if it starts this close to where that one stopped in the reference
SLACK_S = 2  # the ends of two alerts may overlap by this much
MIRRORS = 0.25  # similarity of two places of a reference from which one may stand for the other
VERSION = 0.7  # similarity of the pictures of two references from which they are versions of one film
LOOK_ALIKE = 0.5  # of another reference's strength over the same seconds: a weaker segment is only a look-alike
OVERTAKES = 1.25  # times as much weight as the version that an alert names must another have to be named instead
AS_HEAVY = 0.9  # of the heaviest version's weight: of such versions, the final alert names the one covered most


@dataclass(frozen=True, slots=True)
class OpenAlert:
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
class EndedAlert:
    """An alert that ended in this stream second, with its final view."""

    second: int
    alert_id: str
    view: SegmentView


@dataclass(frozen=True, slots=True)
class BookState:
    """The state of an `AlertBook`, for snapshots."""

    open_alerts: dict[str, OpenAlert]
    ended: list[EndedAlert]
    retracted: dict[str, OpenAlert]


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


def _without_paths(view: SegmentView) -> SegmentView:
    """The view for later comparison of spans and weight, small enough to store."""
    return replace(view, paths=())


@dataclass(frozen=True, slots=True)
class Rank:
    """A segment among the alerts of other references over the same seconds."""

    version_of: str | None = None  # the alert that names a version of the same film
    is_look_alike: bool = False  # another alert matches far better
    weaker: list[str] = field(default_factory=list)  # open alerts that match far worse


class Claims:
    """The alerts of one channel epoch and the copies that they stand for.

    `may_be_sure` says whether a segment that is not refined yet may become an alert.
    """

    def __init__(
        self,
        reference: Callable[[ReferenceId], Reference],
        matcher: SegmentRefiner,
        may_be_sure: Callable[[SegmentView], bool],
    ) -> None:
        self._reference, self._matcher, self._may_be_sure = reference, matcher, may_be_sure
        self.open: dict[str, OpenAlert] = {}
        self.ended: list[EndedAlert] = []  # for BREAK_S
        self.retracted: dict[str, OpenAlert] = {}  # with segments that are still open
        self._segments: dict[SegmentName, SegmentView] = {}  # the segments of this second

    @property
    def open_segments(self) -> set[SegmentName]:
        """Names of the segments whose alerts are open."""
        return {alert.last_view.name for alert in self.open.values()}

    def forget(self, now_s: int) -> None:
        """Drops alerts that ended so long ago that nothing can continue them."""
        self.ended = [ended for ended in self.ended if now_s - ended.second <= BREAK_S]

    def rank(self, view: SegmentView, now_s: int) -> Rank:
        """How a refined segment compares with the alerts of other references over the same seconds."""
        weaker = []
        for other_id, other in self._at_once(view, now_s):
            if self._matcher.likeness(other, view) >= VERSION:
                return Rank(version_of=other_id)
            strength, others = self._matcher.strength(view, other), self._matcher.strength(other, view)
            if strength < LOOK_ALIKE * others:
                return Rank(is_look_alike=True)
            if others < LOOK_ALIKE * strength and other_id in self.open:
                weaker.append(other_id)
        return Rank(weaker=weaker)

    def _at_once(self, view: SegmentView, now_s: int) -> list[tuple[str, SegmentView]]:
        """The alerts of other references in the same seconds, open or ended within REMEMBER_S, with their claims."""
        alerts = [(other_id, self._claim(alert)) for other_id, alert in self.open.items()]
        alerts += [(ended.alert_id, ended.view) for ended in self.ended if now_s - ended.second <= REMEMBER_S]
        return [(id_, other) for id_, other in alerts if other.reference != view.reference and _is_at_once(other, view)]

    def precedence(self, view: SegmentView) -> tuple[object, ...]:
        """Sorts views so that of versions that match alike the longest comes first; open alerts before all."""
        heavy = -round(math.log(max(view.total_weight, 1e-6), OVERTAKES))
        length = self._reference(view.reference).n_seconds
        return view.name not in self.open_segments, heavy, -length, view.start, view.reference

    def follow_rivals(self, views: list[SegmentView]) -> None:
        """Lets each alert whose segment closes follow the heaviest rival or version that is still open and goes on."""
        self._segments = {view.name: view for view in views}
        names = self.open_segments
        for alert_id, alert in list(self.open.items()):
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
        alert = self.open[alert_id]
        if view.reference == alert.last_view.reference:
            self.open[alert_id] = replace(alert, last_view=replace(alert.last_view, start=view.start))
            return
        versions = {**alert.versions, alert.last_view.reference: _without_paths(alert.last_view)}
        versions.pop(view.reference, None)
        reference = self._reference(view.reference)
        self.open[alert_id] = replace(alert, reference=reference, versions=versions, last_view=view)

    def _claim(self, alert: OpenAlert) -> SegmentView:
        """What an alert claims by now: its last view, continued as far as its segment has come since."""
        last, now = alert.last_view, self._segments.get(alert.last_view.name)
        if now is None or now.live_end_s <= last.live_end_s:
            return last
        ref_end_s = max(last.ref_end_s, now.ref_end_s)
        return replace(now, live_start_s=last.live_start_s, ref_start_s=last.ref_start_s, ref_end_s=ref_end_s)

    def is_claimed(self, view: SegmentView, now_s: int) -> bool:
        """Whether an alert of the same reference, open or ended within REMEMBER_S, stands for these seconds.

        It does not where two places of the reference are on air beside each other: they look different, and both match.
        """
        others = [self._claim(alert) for alert in (self.open | self.retracted).values()]
        others += [ended.view for ended in self.ended if now_s - ended.second <= REMEMBER_S]
        rivals = [other for other in others if other.reference == view.reference and _is_at_once(other, view)]
        return any(
            _is_same_copy(other, view)
            or self._matcher.likeness(other, view) >= MIRRORS
            or self._matcher.strength(view, other) < LOOK_ALIKE * self._matcher.strength(other, view)
            for other in rivals
        )

    def explained_by(self, alert_id: str, view: SegmentView, now_s: int) -> str | None:
        """The id of another alert that explains this one better: its segment is an echo, or claims the same copy."""
        alerts = [(other, alert.last_view) for other, alert in self.open.items() if other != alert_id]
        alerts += [(one.alert_id, one.view) for one in self.ended if now_s - one.second <= REMEMBER_S]
        for other_id, other in alerts:
            if other.reference == view.reference and other.start == view.echo_of:
                return other_id
            if other.total_weight >= view.total_weight and _is_same_copy(other, view):
                return other_id
        return None

    def add_version(self, alert_id: str, view: SegmentView) -> bool:
        """Lists a version beside the one that an open alert names; True if it matches far more and is named instead."""
        alert = self.open[alert_id]
        if view.is_open and view.total_weight > OVERTAKES * self._claim(alert).total_weight:
            self._follow(alert_id, view)
            return True
        versions = {**alert.versions, view.reference: _without_paths(view)}
        self.open[alert_id] = replace(alert, versions=versions)
        return False

    def best_version(self, alert_id: str, view: SegmentView) -> SegmentView:
        """Of the versions that match about as much as any, the one of whose reference most was aired."""
        alert = self.open[alert_id]
        claims = [view, *alert.versions.values()]
        heavy = AS_HEAVY * max(claim.total_weight for claim in claims)

        def coverage(claim: SegmentView) -> float:
            return (claim.ref_end_s - claim.ref_start_s) / self._reference(claim.reference).n_seconds

        best = max((claim for claim in claims if claim.total_weight >= heavy), key=coverage)
        if best is not view:
            versions = {**alert.versions, view.reference: _without_paths(view)}
            del versions[best.reference]
            self.open[alert_id] = replace(alert, reference=self._reference(best.reference), versions=versions)
        return best

    def continued(self, view: SegmentView) -> str | None:
        """The id of the newest ended alert that this segment continues, for example after an advert break."""
        for ended in reversed(self.ended):
            old = ended.view
            is_next = abs(view.ref_start_s - old.ref_end_s) <= BREAK_REF_S
            if old.reference == view.reference and is_next and old.live_end_s <= view.live_start_s + SLACK_S:
                return ended.alert_id
        return None
