"""References as the API shows them, each with a report of how well it can be recognised."""

from __future__ import annotations

import threading
from collections import OrderedDict

from pydantic import BaseModel, Field

from monitor.ops.timestamps import rfc3339
from monitor.runtime.active_library import ActiveLibrary
from reference_db.errors import DamagedReference
from reference_db.registration import QualityReport, assess_quality
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Reference

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
    warnings: list[str]
    has_thumbnails: bool


class ReferenceViews:
    """Builds the views; caches quality reports by the hash of the features. Usable from any thread."""

    def __init__(self, library: ActiveLibrary) -> None:
        self._library = library
        self._reports: OrderedDict[tuple[str, bool], QualityReport | None] = OrderedDict()
        self._lock = threading.Lock()

    def view(self, reference: Reference, catalog: Catalog, *, with_overlaps: bool) -> ReferenceOut:
        """The reference; overlaps with other references take a while in a large library.

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
            report = assess_quality(features, index, itself=reference.id)
        except DamagedReference:
            report = None
        with self._lock:
            self._reports[key] = report
            while len(self._reports) > MAX_REPORTS:
                self._reports.popitem(last=False)
        return report


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
        warnings=[f"It is damaged and is not searched: {problem}."],
        has_thumbnails=False,
    )
