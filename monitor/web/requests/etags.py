"""`ETag`: a short name for the state of a resource, by which a caller says which state it has or means."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import Header, Response

from monitor.web.requests.problems import Problem

IfNoneMatch = Annotated[
    str | None, Header(max_length=2000, description="The ETag the caller has: 304 if it is still current.")
]
IfMatch = Annotated[
    str | None, Header(max_length=2000, description="The ETag the caller expects: 412 if it is no longer current.")
]
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "The caller's copy is current."}}


def etag(*parts: object) -> str:
    """The ETag of a resource made of these parts."""
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'


def unchanged(if_none_match: str | None, now: str) -> Response | None:
    """A 304 response if the caller has this state already."""
    if if_none_match is None or not _contains(if_none_match, now):
        return None
    return Response(status_code=304, headers={"ETag": now})


def check_match(if_match: str, now: str) -> None:
    """Raises Problem 412 if the caller expects another state."""
    if not _contains(if_match, now):
        raise Problem(412, "The resource changed since you read it; fetch it again and retry.")


def _contains(tags: str, now: str) -> bool:
    return tags.strip() == "*" or now in (one.strip().removeprefix("W/") for one in tags.split(","))
