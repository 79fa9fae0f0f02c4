"""`ETag`: the state of a thing in one word, by which a caller says which state it knows or means."""

from __future__ import annotations

import hashlib
from typing import Annotated, Any

from fastapi import Header, Response

from monitor.web.requests.problems import Problem

IfNoneMatch = Annotated[
    str | None, Header(max_length=2000, description="The ETag that the caller has: 304 if it still is so.")
]
IfMatch = Annotated[
    str | None, Header(max_length=2000, description="The ETag that the caller means: 412 if it is another now.")
]
UNCHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "It is as the caller has it."}}


def etag(*parts: object) -> str:
    """The state that these make up."""
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'


def unchanged(known: str | None, now: str) -> Response | None:
    """The answer 304 where the caller has this state already."""
    return Response(status_code=304, headers={"ETag": now}) if known is not None and _has(known, now) else None


def check_meant(meant: str, now: str) -> None:
    """Raises Problem 412 where the caller means another state."""
    if not _has(meant, now):
        raise Problem(412, "It has changed since; look at it again.")


def _has(tags: str, now: str) -> bool:
    return tags.strip() == "*" or now in (one.strip().removeprefix("W/") for one in tags.split(","))
