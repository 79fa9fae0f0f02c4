"""`/channels`: the broadcasts that are watched, and how each one is."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Path

from monitor.web.board import Board, ChannelOut
from monitor.web.paging import Cursor, Limit, Page, page_of
from monitor.web.problems import MAY_FAIL, not_found
from monitor.web.station import Station

ChannelName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


def add_channels(api: FastAPI, station: Station, board: Board) -> None:
    @api.get("/api/v1/channels", responses=MAY_FAIL, tags=["channels"])
    def list_channels(limit: Limit = 50, cursor: Cursor = None) -> Page[ChannelOut]:
        """The channels, by name."""
        items, following = page_of(board.channels(), limit, cursor, lambda one: one.name)
        return Page(items=list(items), next=following)

    @api.get("/api/v1/channels/{name}", responses=MAY_FAIL, tags=["channels"])
    def show_channel(name: ChannelName) -> ChannelOut:
        """One channel."""
        for one in board.channels():
            if one.name == name:
                return one
        raise not_found(f"channel {name}")
