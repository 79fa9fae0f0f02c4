"""`/channels`: the broadcasts that are watched, how each one is, and which are to be.

The list is that of the configuration file, which `serve` follows. Over the network a channel is never a file of this
machine, and only an administrator names private addresses, since naming one permits to connect to it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Path, Request, Response
from pydantic import BaseModel, Field, ValidationError

from monitor.config.config_file import add_channel, remove_channel
from monitor.config.settings import CHANNEL_NAME, ChannelSettings
from monitor.ingest.channel_probe import look_at
from monitor.ops.timestamps import rfc3339
from monitor.web.auth.gatekeeper import Caller
from monitor.web.channel_board import ChannelBoard, ChannelOut
from monitor.web.context import AppContext
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import JPEG, MAY_FAIL, Problem, not_found
from reference_db.media.addresses import AddressRefused, ReachPolicy, place_of, redact_url

ChannelName = Annotated[str, Path(pattern=f"^{CHANNEL_NAME}$")]
TRIAL_S = 5.0  # some key pictures come in that time
A_MINUTE = 60  # channels that may be added by the API


class ChannelIn(BaseModel):
    """A channel to watch."""

    name: str = Field(pattern=f"^{CHANNEL_NAME}$")
    url: str = Field(min_length=1, max_length=4096, description="http(s), rtmp(s), rtsp(s), udp or rtp.")
    mode: Literal["auto", "exact", "economy"] = "auto"
    allow: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(
        default=[], max_length=64, description="Private hosts or networks that it may lead to."
    )


class ProbeIn(BaseModel):
    """An address to look at."""

    url: str = Field(min_length=1, max_length=4096)
    allow: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(default=[], max_length=64)


class ProbeOut(BaseModel):
    """What a look at an address showed."""

    address: str
    container: str
    codec: str
    size: str
    fps: float | None
    key_frame_every_s: float | None
    first_picture_s: float
    lag_s: float
    watched_s: float


def add_channels(api: FastAPI, station: AppContext, board: ChannelBoard) -> None:
    trying, allowance = threading.Lock(), _Allowance(A_MINUTE)

    @api.get("/api/v1/channels", responses=MAY_FAIL, tags=["channels"])
    def list_channels(limit: Limit = 50, cursor: Cursor = None) -> Page[ChannelOut]:
        """The channels, by name."""
        items, following = page_of(board.channels(), limit, cursor, lambda one: one.name)
        return Page(items=list(items), next=following)

    @api.post("/api/v1/channels", status_code=201, responses=MAY_FAIL, tags=["channels"])
    def new_channel(asked: ChannelIn, request: Request, response: Response) -> ChannelOut:
        """Adds a channel to the configuration; it is watched within seconds."""
        config, channel = _config(station), _checked(asked.model_dump(), request.state.caller)
        allowance.take()
        try:
            add_channel(config, channel)
        except OSError as error:
            raise Problem(409, f"The configuration cannot be written: {error.strerror}.") from error
        response.headers["Location"] = f"/api/v1/channels/{channel.name}"
        return ChannelOut(
            name=channel.name,
            url=redact_url(channel.url),
            mode=channel.mode,
            state="starting",
            since=rfc3339(datetime.now(UTC)),
            lag_s=None,
            last_second_at=None,
            reconnects=0,
            gap_seconds=0.0,
            dropped=0,
            current=[],
        )

    @api.post("/api/v1/channels/test", responses=MAY_FAIL, tags=["channels"])
    def try_channel(asked: ProbeIn, request: Request) -> ProbeOut:
        """Watches an address for some seconds and says what it is."""
        channel = _checked({"name": "test", **asked.model_dump()}, request.state.caller)
        if not trying.acquire(blocking=False):
            raise Problem(429, "Another address is being tried; one at a time.", {"Retry-After": "10"})
        try:
            return ProbeOut.model_validate(look_at(channel, TRIAL_S)[0])
        finally:
            trying.release()

    @api.get("/api/v1/channels/{name}", responses=MAY_FAIL, tags=["channels"])
    def show_channel(name: ChannelName) -> ChannelOut:
        """One channel."""
        for one in board.channels():
            if one.name == name:
                return one
        raise not_found(f"channel {name}")

    @api.delete("/api/v1/channels/{name}", status_code=204, responses=MAY_FAIL, tags=["channels"])
    def drop_channel(name: ChannelName) -> None:
        """Takes a channel out of the configuration; it is ended, with the last word on its alerts."""
        config = _config(station)
        if name not in [channel.name for channel, _ in station.channels()]:
            raise not_found(f"channel {name}")
        try:
            remove_channel(config, name)
        except OSError as error:
            raise Problem(409, f"The configuration cannot be written: {error.strerror}.") from error

    @api.get(
        "/api/v1/channels/{name}/thumbnail",
        responses=MAY_FAIL | JPEG,
        response_class=Response,
        tags=["channels"],
    )
    def show_picture(name: ChannelName) -> Response:
        """Its newest picture."""
        jpeg = station.glimpses.jpeg(name) if name in [one.name for one, _ in station.channels()] else None
        if jpeg is None:
            raise not_found(f"picture of channel {name} yet")
        return Response(jpeg, media_type="image/jpeg")


def _config(station: AppContext) -> FilePath:
    if station.config is None:
        raise Problem(409, "This server runs without a configuration file; start it with --config to change channels.")
    return station.config


def _checked(values: dict[str, Any], caller: Caller) -> ChannelSettings:
    """The channel, if this caller may name it."""
    try:
        channel = ChannelSettings.model_validate(values)
    except ValidationError as error:
        wrong = [f"{one['loc'][0]}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()]
        raise Problem(422, "; ".join(wrong) + ".") from None  # pydantic's own text may show the address
    scheme = channel.url.partition("://")[0].lower() if "://" in channel.url else "file"
    if scheme == "file":
        raise Problem(422, "A file of this machine is made a channel in its configuration file only.")
    if not caller.may("admin") and (channel.allow or scheme in ("udp", "rtp") or _is_private(channel.url)):
        raise Problem(403, "Only a token with the scope admin may name a private address, udp, rtp or `allow`.")
    return channel


def _is_private(url: str) -> bool:
    try:
        ReachPolicy("", 0).places(*place_of(url))
    except (AddressRefused, OSError, UnicodeError):
        return True  # a name that nobody knows may be anybody's tomorrow
    return False


class _Allowance:
    """So many a minute."""

    def __init__(self, most: int) -> None:
        self._taken: deque[float] = deque(maxlen=most)
        self._lock = threading.Lock()

    def take(self) -> None:
        """Raises Problem 429 where there were too many."""
        with self._lock:
            now = time.monotonic()
            if len(self._taken) == self._taken.maxlen and now - self._taken[0] < 60:
                raise Problem(429, f"{self._taken.maxlen} a minute are the most.", {"Retry-After": "60"})
            self._taken.append(now)
