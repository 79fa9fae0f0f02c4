"""`/channels`: the monitored broadcasts and their state; add, remove and test channels.

The list is that of the configuration file, which `serve` watches for changes. Over the network a channel is never a
local file, and only an administrator may name private addresses, since naming one permits connections to it.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Response
from pydantic import BaseModel, Field, ValidationError

from monitor.config.config_file import add_channel, remove_channel
from monitor.config.settings import CHANNEL_NAME, ChannelSettings
from monitor.ingest.channel_probe import probe_channel
from monitor.ops.timestamps import rfc3339
from monitor.web.auth.gatekeeper import Caller
from monitor.web.channel_views import ChannelOut
from monitor.web.context import AppContext, Context, CurrentCaller, CurrentTrail
from monitor.web.requests.paging import Cursor, Limit, Page, page_of
from monitor.web.requests.problems import ERROR_RESPONSES, JPEG, Problem, not_found
from reference_db.media.addresses import AddressRefused, ReachPolicy, host_and_port, is_fixed, redact_url

ChannelName = Annotated[str, Path(pattern=f"^{CHANNEL_NAME}$")]
PROBE_S = 5.0  # long enough for some key frames

router = APIRouter(tags=["channels"], responses=ERROR_RESPONSES)


class ChannelIn(BaseModel):
    """A channel to monitor."""

    name: str = Field(pattern=f"^{CHANNEL_NAME}$")
    url: str = Field(min_length=1, max_length=4096, description="http(s), rtmp(s), rtsp(s), udp or rtp.")
    mode: Literal["auto", "exact", "economy"] = "auto"
    allow: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(
        default=[], max_length=64, description="Private hosts or networks that it may connect to."
    )
    private: bool = Field(default=False, description="Its own host name may have a private address; admin only.")


class ProbeIn(BaseModel):
    """An address to test."""

    url: str = Field(min_length=1, max_length=4096)
    allow: list[Annotated[str, Field(min_length=1, max_length=255)]] = Field(default=[], max_length=64)
    private: bool = False


class ProbeOut(BaseModel):
    """The result of a test."""

    address: str
    container: str
    codec: str
    size: str
    fps: float | None
    key_frame_every_s: float | None
    first_picture_s: float
    lag_s: float
    watched_s: float


@router.get("/api/v1/channels")
def list_channels(context: Context, limit: Limit = 50, cursor: Cursor = None) -> Page[ChannelOut]:
    """The channels, by name."""
    items, following = page_of(context.channel_views.channels(), limit, cursor, lambda one: one.name)
    return Page(items=list(items), next=following)


@router.post("/api/v1/channels", status_code=201)
def new_channel(
    context: Context, caller: CurrentCaller, trail: CurrentTrail, body: ChannelIn, response: Response
) -> ChannelOut:
    """Adds a channel to the configuration; monitoring starts within seconds."""
    trail.object, trail.details = body.name, {"url": redact_url(body.url)}
    config, channel = _config(context), _checked(body.model_dump(), caller)
    context.limits.new_channels.take()
    try:
        add_channel(config, channel, at_most=context.settings.web.max_channels)
    except OSError as error:
        raise Problem(409, f"The configuration cannot be written: {error.strerror}.") from error
    response.headers["Location"] = f"/api/v1/channels/{channel.name}"
    return ChannelOut(
        name=channel.name,
        url=redact_url(channel.url),
        mode=channel.mode,
        state="starting",
        reason=None,
        cause=None,
        since=rfc3339(datetime.now(UTC)),
        lag_s=None,
        last_second_at=None,
        last_new_at=None,
        reconnects=0,
        gap_seconds=0.0,
        dropped=0,
        current=[],
    )


@router.post("/api/v1/channels/test")
def try_channel(context: Context, caller: CurrentCaller, trail: CurrentTrail, body: ProbeIn) -> ProbeOut:
    """Reads an address for some seconds and describes the stream."""
    trail.details = {"url": redact_url(body.url)}
    channel = _checked({"name": "test", **body.model_dump()}, caller)
    with context.limits.probes.take():
        return ProbeOut.model_validate(probe_channel(channel, PROBE_S)[0])


@router.get("/api/v1/channels/{name}")
def show_channel(context: Context, name: ChannelName) -> ChannelOut:
    """One channel."""
    for one in context.channel_views.channels():
        if one.name == name:
            return one
    raise not_found(f"channel {name}")


@router.delete("/api/v1/channels/{name}", status_code=204)
def drop_channel(context: Context, name: ChannelName) -> None:
    """Removes a channel from the configuration; its open alerts end."""
    config = _config(context)
    if name not in [channel.name for channel in context.channels()]:
        raise not_found(f"channel {name}")
    try:
        remove_channel(config, name)
    except OSError as error:
        raise Problem(409, f"The configuration cannot be written: {error.strerror}.") from error


@router.get("/api/v1/channels/{name}/thumbnail", responses=JPEG, response_class=Response)
def show_picture(context: Context, name: ChannelName) -> Response:
    """Its latest frame."""
    jpeg = context.latest_frames.jpeg(name) if name in [channel.name for channel in context.channels()] else None
    if jpeg is None:
        raise not_found(f"picture of channel {name} yet")
    return Response(jpeg, media_type="image/jpeg")


def _config(context: AppContext) -> FilePath:
    if context.config is None:
        raise Problem(409, "This server runs without a configuration file; start it with --config to change channels.")
    return context.config


def _checked(values: dict[str, Any], caller: Caller) -> ChannelSettings:
    """The channel, if it is valid and this caller may name it. Raises Problem."""
    try:
        channel = ChannelSettings.model_validate(values)
    except ValidationError as error:
        problems = [f"{one['loc'][0]}: {one['msg'].removeprefix('Value error, ')}" for one in error.errors()]
        raise Problem(422, "; ".join(problems) + ".") from None  # pydantic's own text may show the address
    scheme = channel.url.partition("://")[0].lower() if "://" in channel.url else "file"
    if scheme == "file":
        raise Problem(422, "Local files can be added as channels only in the configuration file, not through the API.")
    if not caller.may("admin") and (channel.allow or channel.private or scheme in ("udp", "rtp")):
        raise Problem(403, "Only a token with the scope admin may set `allow`, `private`, udp or rtp.")
    if scheme not in ("udp", "rtp"):
        _check_host(channel, caller)
    return channel


def _check_host(channel: ChannelSettings, caller: Caller) -> None:
    """Raises Problem for a host that is private now. The answer of a DNS server may change: the decoder checks the
    address again at every connection."""
    host, port = host_and_port(channel.url)
    try:
        ReachPolicy("", 0).resolve(host, port)
    except AddressRefused:
        if not caller.may("admin"):
            raise Problem(403, "Only a token with the scope admin may name a private address.") from None
        if not channel.private and not is_fixed(host):
            raise Problem(422, f"{host} has a private address; set `private` if this is intended.") from None
    except (OSError, UnicodeError):
        if not caller.may("admin"):
            raise Problem(403, "Only a token with the scope admin may name a host that cannot be resolved.") from None
