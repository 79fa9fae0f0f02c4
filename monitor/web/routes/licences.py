"""`/licences`: what may be broadcast where and when. A licensed play is reported as licensed, never hidden."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path
from pydantic import BaseModel, ConfigDict, Field

from monitor.rights.rules import Licence
from monitor.web.context import Context, CurrentTrail
from monitor.web.requests.paging import Cursor, Limit, Moment, Page, page_of
from monitor.web.requests.problems import ERROR_RESPONSES

LicenceId = Annotated[str, Path(pattern=r"^L[1-9][0-9]{0,17}$")]
OptionalText = Annotated[str | None, Field(max_length=1000)]

router = APIRouter(tags=["licences"], responses=ERROR_RESPONSES)


class LicenceIn(BaseModel):
    """A permission. It covers what fits all of the given fields."""

    model_config = ConfigDict(populate_by_name=True)

    reference: OptionalText = None
    owner: OptionalText = None
    tag: OptionalText = Field(default=None, description="key=value")
    channel: str = Field(default="*", max_length=64, description="A channel's name, or * for all.")
    from_: Moment | None = Field(default=None, alias="from")
    until: Moment | None = None
    note: str = Field(default="", max_length=1000)


class LicenceOut(BaseModel):
    """A stored permission."""

    id: str
    reference: str | None
    owner: str | None
    tag: str | None
    channel: str
    from_: str | None = Field(alias="from")
    until: str | None
    note: str
    added_at: str


@router.get("/api/v1/licences")
def list_licences(context: Context, limit: Limit = 50, cursor: Cursor = None) -> Page[LicenceOut]:
    """The licences, oldest first."""
    part, following = page_of(context.rights.licences(), limit, cursor, lambda one: f"{int(one.id[1:]):020}")
    return Page(items=[_view(one) for one in part], next=following)


@router.post("/api/v1/licences", status_code=201)
def new_licence(context: Context, trail: CurrentTrail, body: LicenceIn) -> LicenceOut:
    """Adds a permission; running monitors apply it within seconds."""
    licence = context.rights.add_licence(**body.model_dump())
    trail.object, trail.details = licence.id, {**licence.terms}
    return _view(licence)


@router.delete("/api/v1/licences/{id}", status_code=204)
def drop_licence(context: Context, id: LicenceId) -> None:
    """Removes a permission; alerts already emitted as licensed stay licensed."""
    context.rights.remove_licence(id)


def _view(licence: Licence) -> LicenceOut:
    values: dict[str, Any] = licence.as_dict()
    return LicenceOut.model_validate(values)
