"""`/alerts/ID/evidence`: the pictures and numbers behind an alert; `/alerts/ID/export`: all of it in one archive."""

from __future__ import annotations

import logging
from typing import Annotated, Any
from zoneinfo import ZoneInfo

from fastapi import APIRouter, Path, Query, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from monitor.evidence.store import find_time_zone
from monitor.web.context import Context
from monitor.web.requests.problems import ERROR_RESPONSES, Problem, not_found
from monitor.web.routes.alerts import AlertId

logger = logging.getLogger(__name__)

FileName = Annotated[str, Path(pattern=r"^((air|ref)-(start|middle|end)\.jpg|tile-(start|end)\.png)$")]
BINARY = {"schema": {"type": "string", "format": "binary"}}
PICTURE: dict[int | str, dict[str, Any]] = {200: {"content": {"image/jpeg": BINARY, "image/png": BINARY}}}
ARCHIVE: dict[int | str, dict[str, Any]] = {200: {"content": {"application/zip": BINARY}}}

router = APIRouter(tags=["evidence"], responses=ERROR_RESPONSES)


class PairOut(BaseModel):
    """Channel and reference at one moment of the copy."""

    model_config = ConfigDict(extra="allow")

    at: str
    stream_s: float
    aired_at: str | None = None
    ref_s: float
    air: str | None
    reference: str | None
    note: str | None


class TileOut(BaseModel):
    """A part of the similarity matrix, with the network's output for it."""

    model_config = ConfigDict(extra="allow")

    name: str
    live_s: float
    ref_s: float
    rows: int
    columns: int
    similarity: list[list[float]]
    mask: list[list[float]]
    path: list[list[float]]


class EvidenceReportOut(BaseModel):
    """The evidence of an alert, with the names of its pictures."""

    model_config = ConfigDict(extra="allow")

    alert: dict[str, Any]
    frames: list[PairOut]
    tiles: list[TileOut]
    complete: bool
    note: str | None


@router.get("/api/v1/alerts/{id}/evidence")
def show_evidence(context: Context, id: AlertId) -> EvidenceReportOut:
    """The report: frames, tiles with their numbers, notes."""
    report = context.evidence.report(id)
    if report is None:
        raise not_found(f"evidence of alert {id}")
    try:
        return EvidenceReportOut.model_validate(report)
    except ValidationError as error:
        logger.error("the evidence of alert %s is damaged", id)
        raise Problem(404, f"The evidence of alert {id} is damaged.") from error


@router.get("/api/v1/alerts/{id}/evidence/{file}", responses=PICTURE, response_class=Response)
def show_file(context: Context, id: AlertId, file: FileName) -> Response:
    """One of its pictures."""
    content = context.evidence.file(id, file)
    if content is None:
        raise not_found(f"picture {file} of alert {id}")
    return Response(content, media_type="image/png" if file.endswith(".png") else "image/jpeg")


@router.get("/api/v1/alerts/{id}/export", responses=ARCHIVE, response_class=Response)
def export_alert(
    context: Context,
    id: AlertId,
    time_zone: Annotated[str | None, Query(max_length=64, description="The viewer's time zone.")] = None,
) -> Response:
    """One archive with all evidence and the SHA-256 of each file."""
    content = context.evidence.zip(id, None if time_zone is None else _zone(time_zone))
    if content is None:
        raise not_found(f"alert {id}")
    headers = {"Content-Disposition": f'attachment; filename="{id}.zip"'}
    return Response(content, media_type="application/zip", headers=headers)


def _zone(name: str) -> ZoneInfo:
    zone = find_time_zone(name)
    if zone is None:
        raise Problem(400, "Unknown time zone; use a name like `Europe/Berlin`.")
    return zone
