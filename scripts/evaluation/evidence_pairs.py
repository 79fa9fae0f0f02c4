"""Paired pictures of alerts against the truth: how far each reference picture is from the true partner.

The references of a broadcast are registered and its channels checked as `copywatch check --evidence` does it, so the
pairs are those that users see. The true partner of a picture follows from the edit: a held picture or a cut moves the
second half of a copy. A pair counts as right within half a second. Where a film stands still, pictures seconds apart
look alike; a pair whose reference picture cannot be distinguished from the partner's by eye is counted separately.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.scoring import TrueCopy
from monitor.config.settings import Settings
from monitor.evidence.pairs import SAME_LEVELS
from monitor.evidence.picture_alignment import mean_difference
from monitor.evidence.pictures import grey_picture
from monitor.runtime.check import check_file
from reference_db.features.encoder import Encoder
from reference_db.registration import register, safe_id
from reference_db.store.catalog import Catalog, ReferenceId

WITHIN_S = 0.5  # of the true partner
FRAME_S = 0.1  # a picture's time is that of the middle of its second; the first picture from then on is shown
LINE_S = 1.0  # an alert whose own line is farther from the truth names another time of the film


@dataclass(frozen=True, slots=True)
class JudgedPair:
    """A pair of an alert, and the truth about it."""

    channel: str
    reference: str
    edits: tuple[str, ...]
    stream_s: float
    ref_s: float
    true_s: float | None  # None if the channel shows no copy of the reference at that time
    line_s: float  # what the alert's own line says
    is_ambiguous: bool  # the alert says that it may be another time
    looks_right: bool  # by eye

    @property
    def is_right(self) -> bool:
        return self.true_s is not None and abs(self.ref_s - self.true_s) <= WITHIN_S

    @property
    def is_at_its_time(self) -> bool:
        """Whether the alert itself names the right time of the film."""
        return self.true_s is not None and abs(self.line_s - self.true_s) <= LINE_S


def true_partner(copy: TrueCopy, channel_s: float) -> float:
    """The second of the reference that the channel shows at a second of a true copy."""
    at = channel_s - copy.channel_start
    aired, length = copy.channel_end - copy.channel_start, copy.reference_end - copy.reference_start
    moved = at
    for edit in copy.edits:
        if edit.startswith("speed"):
            moved = float(edit.removeprefix("speed")) * at
        elif edit == "freeze":  # one picture in the middle is held
            held = round(aired - length)
            moved = min(at, max(length / 2, at - held))
        elif edit == "cut":  # some seconds from the middle on are gone
            moved = at if at < length / 2 else at + round(length - aired)
    return copy.reference_start + moved


def register_references(folder: Path, library: Path, encoder: Encoder, report: Callable[[str], None]) -> None:
    """Registers the references of a broadcast in a library, those that are not there yet."""
    with Catalog.open(library, write=True) as catalog:
        for path in sorted((folder / "references").glob("*.mp4")):
            report(f"{path.name}: {register(path, catalog, encoder).outcome}")


def judged_pairs(
    folder: Path, settings: Settings, evidence: Path, truth: Sequence[TrueCopy], report: Callable[[str], None]
) -> list[JudgedPair]:
    """The pairs of all alerts of a broadcast; their pictures are written to the folder `evidence`."""
    pairs: list[JudgedPair] = []
    for path in sorted(folder.glob("ch*.ts")):
        segments = check_file(path, path.stem, settings=settings, evidence=evidence)
        report(f"{path.name}: {len(segments)} alerts")
        with Catalog.open(settings.data_dir) as catalog:
            for segment in segments:
                content = json.loads((Path(str(segment["evidence"])) / "report.json").read_text())
                pairs += _judge(content, Path(str(segment["evidence"])), truth, catalog)
    return pairs


def figures(pairs: Sequence[JudgedPair]) -> dict[str, Any]:
    """The shares of right pairs: of all, and of alerts that name the right time of the film."""
    at_time = [pair for pair in pairs if pair.is_at_its_time]
    stated = [pair for pair in pairs if not pair.is_ambiguous]
    return {
        "pairs": len(pairs),
        "right": _share(pairs, [pair.is_right for pair in pairs]),
        "right_by_eye": _share(pairs, [pair.is_right or pair.looks_right for pair in pairs]),
        "right_unless_ambiguous": _share(stated, [pair.is_right for pair in stated]),
        "at_the_right_time": len(at_time),
        "right_of_those": _share(at_time, [pair.is_right for pair in at_time]),
        "right_by_eye_of_those": _share(at_time, [pair.is_right or pair.looks_right for pair in at_time]),
    }


def _share(pairs: Sequence[JudgedPair], are_right: Sequence[bool]) -> float | None:
    return round(sum(are_right) / len(pairs), 4) if pairs else None


def _judge(content: dict[str, Any], folder: Path, truth: Sequence[TrueCopy], catalog: Catalog) -> Iterator[JudgedPair]:
    alert = content["alert"]
    speed = (alert["reference_end"] - alert["reference_start"]) / (alert["channel_end"] - alert["channel_start"])
    for frame in content["frames"]:
        if frame["air"] is None or frame["reference"] is None:
            continue
        copy = _copy_at(truth, alert["channel"], alert["reference"], frame["stream_s"])
        true_s = None if copy is None else true_partner(copy, frame["stream_s"])
        yield JudgedPair(
            alert["channel"],
            alert["reference"],
            () if copy is None else copy.edits,
            frame["stream_s"],
            frame["ref_s"],
            true_s,
            alert["reference_start"] + speed * (frame["stream_s"] - alert["channel_start"]),
            bool(alert.get("ambiguous")),
            true_s is not None and _looks_like(catalog, alert["reference"], true_s, folder / frame["reference"]),
        )


def _copy_at(truth: Sequence[TrueCopy], channel: str, reference: str, channel_s: float) -> TrueCopy | None:
    for copy in truth:
        is_aired = copy.channel == channel and copy.channel_start - FRAME_S <= channel_s < copy.channel_end
        if is_aired and safe_id(copy.reference) == reference:
            return copy
    return None


def _looks_like(catalog: Catalog, reference: str, ref_s: float, shown: Path) -> bool:
    """Whether a viewer sees no difference between the shown picture and one that would be right."""
    stored = catalog.thumbnails(ReferenceId(reference), ref_s - WITHIN_S, ref_s + WITHIN_S)
    grey = grey_picture(shown.read_bytes())
    return any(mean_difference(grey, grey_picture(jpeg)) < SAME_LEVELS for _, jpeg in stored)
