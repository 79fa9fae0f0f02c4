"""References as the API shows them, each with a report of how well it can be recognised."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Any

from pydantic import BaseModel, Field

from monitor.ops.timestamps import rfc3339
from monitor.runtime.active_library import ActiveLibrary
from reference_db.errors import DamagedReference
from reference_db.registration import Findability, FindabilityMeter, QualityReport, assess_quality
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Reference
from reference_db.store.references import Features

MAX_REPORTS = 4096  # cached; those least recently used are dropped


class ReferenceOut(BaseModel):
    """One registered video."""

    id: str
    title: str
    owner: str
    tags: dict[str, str]
    seconds: int
    state: str = Field(description="`ready`, or `quarantined`: damaged and excluded from every search.")
    added_at: str | None
    low_information_share: float | None
    longest_static_s: int | None
    still_share: float | None = Field(description="Of its informative seconds: they look like those around them.")
    repeated_share: float | None = Field(description="Of its content: it returns at another time of the reference.")
    shortest_findable_s: int | None = Field(
        description="Length from which a clean copy is found. Null if no copy is found, and in lists, where it is not "
        "measured."
    )
    warnings: list[str]
    has_thumbnails: bool


class ReferenceViews:
    """Builds the views; caches quality reports by the hash of the features. Usable from any thread."""

    def __init__(self, library: ActiveLibrary, findability: FindabilityMeter) -> None:
        self._library = library
        self._findability = findability
        self._measured: OrderedDict[str, Findability] = OrderedDict()
        self._reports: OrderedDict[tuple[str, bool], QualityReport | None] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, reference: Reference, catalog: Catalog, *, with_overlaps: bool) -> ReferenceOut:
        """The reference; `with_overlaps` adds what takes a while: overlaps with others, and the shortest copy found.

        Raises UnknownReference if the reference was removed meanwhile.
        """
        report = self._report(reference, catalog, with_overlaps)
        return ReferenceOut(
            id=reference.id,
            title=reference.title,
            owner=reference.owner,
            tags=reference.tags,
            seconds=reference.n_seconds,
            state="ready" if report is not None else "quarantined",
            added_at=rfc3339(reference.added_at),
            low_information_share=round(reference.n_uninformative / reference.n_seconds, 4),
            longest_static_s=None if report is None else report.longest_static_s,
            still_share=None if report is None else round(report.still_share, 4),
            repeated_share=None if report is None else round(report.repeated_share, 4),
            shortest_findable_s=None if report is None else report.shortest_findable_s,
            warnings=["Its features are damaged: run `copywatch refs verify`."]
            if report is None
            else list(report.warnings),
            has_thumbnails=bool(reference.thumbnails_sha256),
        )

    def _report(self, reference: Reference, catalog: Catalog, with_overlaps: bool) -> QualityReport | None:
        key = (reference.features_sha256, with_overlaps)
        with self._lock:
            if key in self._reports and not with_overlaps:  # overlaps change with the library
                self._reports.move_to_end(key)
                return self._reports[key]
        try:
            features = catalog.exact_features(reference)
            index = self._library.index if with_overlaps else ReferenceIndex.from_features([])
            meter = partial(self._measure, reference.features_sha256) if with_overlaps else None
            report = assess_quality(features, index, itself=reference.id, findability=meter)
        except DamagedReference:
            report = None
        with self._lock:
            self._reports[key] = report
            _drop_oldest(self._reports)
        return report

    def _measure(self, features_sha256: str, features: Features) -> Findability:
        """How long a copy must be, measured once for the same features."""
        with self._lock:
            if features_sha256 in self._measured:
                self._measured.move_to_end(features_sha256)
                return self._measured[features_sha256]
        measured = self._findability(features)
        with self._lock:
            self._measured[features_sha256] = measured
            _drop_oldest(self._measured)
        return measured


def _drop_oldest(cache: OrderedDict[Any, Any]) -> None:
    while len(cache) > MAX_REPORTS:
        cache.popitem(last=False)


def damaged_view(id: str, problem: str) -> ReferenceOut:
    """A reference that cannot be read."""
    return ReferenceOut(
        id=id,
        title=id,
        owner="",
        tags={},
        seconds=0,
        state="quarantined",
        added_at=None,
        low_information_share=None,
        longest_static_s=None,
        still_share=None,
        repeated_share=None,
        shortest_findable_s=None,
        warnings=[f"It is damaged and is not searched: {problem}."],
        has_thumbnails=False,
    )
