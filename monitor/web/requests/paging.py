"""Lists in pages: `?limit=50&cursor=...` in, items and the next page's cursor out.

A cursor says where the last page ended, so no item is repeated or skipped while the list grows. It is opaque: its
content may change.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Annotated, Generic, TypeVar

from fastapi import Query
from pydantic import AfterValidator, AwareDatetime, BaseModel

from monitor.web.requests.problems import Problem

T = TypeVar("T")


def _storable(moment: datetime) -> datetime:
    if not 1970 <= moment.year <= 9998:  # so that it is valid in every time zone
        raise ValueError("expected a year between 1970 and 9998")
    return moment


Moment = Annotated[AwareDatetime, AfterValidator(_storable)]
Limit = Annotated[int, Query(ge=1, le=500, description="Maximum number of items.")]
Cursor = Annotated[str | None, Query(max_length=400, description="`next` of the previous page.")]


class Page(BaseModel, Generic[T]):
    """One page of a list."""

    items: list[T]
    next: str | None  # the cursor of the next page; null at the end


def cursor_of(place: str | int) -> str:
    return base64.urlsafe_b64encode(str(place).encode()).decode().rstrip("=")


def place_of(cursor: str | None) -> str | None:
    """The argument of `cursor_of`; Problem for an invalid cursor."""
    if cursor is None:
        return None
    try:
        return base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        raise Problem(400, "Invalid cursor; leave it out to start with the first page.") from None


def number_of(cursor: str | None) -> int | None:
    """Like `place_of`, for a cursor made of a number."""
    place = place_of(cursor)
    if place is None:
        return None
    if not (place.isascii() and place.isdigit() and len(place) < 19):
        raise Problem(400, "Invalid cursor; leave it out to start with the first page.")
    return int(place)


def page_of(
    items: Sequence[T], limit: int, cursor: str | None, key: Callable[[T], str]
) -> tuple[Sequence[T], str | None]:
    """The part of a sorted list that follows the cursor, and the next cursor."""
    after = place_of(cursor)
    rest = [one for one in items if after is None or key(one) > after][: limit + 1]
    return rest[:limit], cursor_of(key(rest[limit - 1])) if len(rest) > limit else None
