"""References as the API shows them, each with a report of how well it can be recognised."""

from __future__ import annotations

import threading
from collections import OrderedDict
from contextlib import suppress

from pydantic import BaseModel, Field

from monitor.ops.timestamps import rfc3339
from reference_db.errors import DamagedReference
from reference_db.registration import QualityReport, assess_quality
from reference_db.search.index import ReferenceIndex
from reference_db.store.catalog import Catalog, Reference

MAX_REPORTS = 4096  # cached; those least recently used are dropped
NO_OTHERS = ReferenceIndex.from_features([])


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
    """Builds the views; caches quality reports without overlaps by the hash of the features. Usable from any thread."""

    def __init__(self) -> None:
        self._reports: OrderedDict[str, QualityReport | None] = OrderedDict()
        self._lock = threading.Lock()
        self._reading = threading.Lock()  # features are read for one request at a time

    def view(self, reference: Reference, catalog: Catalog, *notes: str) -> ReferenceOut:
        """The reference with what its own features show, and these notes.

        Raises UnknownReference if the reference was removed meanwhile.
        """
        return report_view(reference, self._report(reference, catalog), *notes)

    def _report(self, reference: Reference, catalog: Catalog) -> QualityReport | None:
        """The report without overlaps; None if the features are damaged. Reads them in pieces."""
        key = reference.features_sha256
        with self._lock:
            if key in self._reports:
                self._reports.move_to_end(key)
                return self._reports[key]
        with self._reading:
            if key not in self._reports:  # another request has not read it meanwhile
                report: QualityReport | None = None
                with suppress(DamagedReference):
                    report = assess_quality(catalog.exact_features(reference), NO_OTHERS, itself=reference.id)
                with self._lock:
                    self._reports[key] = report
                    while len(self._reports) > MAX_REPORTS:
                        self._reports.popitem(last=False)
            return self._reports.get(key)


def report_view(reference: Reference, report: QualityReport | None, *notes: str) -> ReferenceOut:
    """The reference with this report and these notes; without a report it is damaged."""
    warnings = ["Its features are damaged: run `copywatch refs verify`."] if report is None else report.warnings
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
        warnings=[*notes, *warnings],
        has_thumbnails=bool(reference.thumbnails_sha256),
    )


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
