"""`/licences`: what may be aired where and when. A licensed play is told as one, never hidden."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path
from pydantic import BaseModel, ConfigDict, Field

from monitor.rights.rules import Licence
from monitor.web.context import AppContext
from monitor.web.requests.paging import Cursor, Limit, Moment, Page, page_of
from monitor.web.requests.problems import MAY_FAIL

LicenceId = Annotated[str, Path(pattern=r"^L[1-9][0-9]{0,17}$")]
Words = Annotated[str | None, Field(max_length=1000)]


class LicenceIn(BaseModel):
    """A permission; of what it names, all must fit."""

    model_config = ConfigDict(populate_by_name=True)

    reference: Words = None
    owner: Words = None
    tag: Words = Field(default=None, description="key=value")
    channel: str = Field(default="*", max_length=64, description="A channel's name, or * for all.")
    from_: Moment | None = Field(default=None, alias="from")
    until: Moment | None = None
    note: str = Field(default="", max_length=1000)


class LicenceOut(BaseModel):
    """The same, kept."""

    id: str
    reference: str | None
    owner: str | None
    tag: str | None
    channel: str
    from_: str | None = Field(alias="from")
    until: str | None
    note: str
    added_at: str


def add_licences(api: FastAPI, station: AppContext) -> None:
    @api.get("/api/v1/licences", responses=MAY_FAIL, tags=["licences"])
    def list_licences(limit: Limit = 50, cursor: Cursor = None) -> Page[LicenceOut]:
        """The licences, the oldest first."""
        part, following = page_of(station.rights.licences(), limit, cursor, lambda one: f"{int(one.id[1:]):020}")
        return Page(items=[_told(one) for one in part], next=following)

    @api.post("/api/v1/licences", status_code=201, responses=MAY_FAIL, tags=["licences"])
    def new_licence(asked: LicenceIn) -> LicenceOut:
        """Permits something; running monitors heed it within seconds."""
        return _told(station.rights.add_licence(**asked.model_dump()))

    @api.delete("/api/v1/licences/{id}", status_code=204, responses=MAY_FAIL, tags=["licences"])
    def drop_licence(id: LicenceId) -> None:
        """Ends a permission; what was told as licensed stays so."""
        station.rights.remove_licence(id)


def _told(licence: Licence) -> LicenceOut:
    values: dict[str, Any] = licence.as_dict()
    return LicenceOut.model_validate(values)
