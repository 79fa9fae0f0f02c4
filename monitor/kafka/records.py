"""The records of the topics of frames, dead letters and alerts. A frame record is one second of a channel:

    key      the channel's name
    value    a JPEG, PNG or WebP picture; or a feature row, 512 numbers of 16 or 32 bits, little-endian
    headers  pts_ms        stream time of the picture (required)
             content-type  image/jpeg, image/png, image/webp, application/x-copywatch-f16 or -f32; an empty record
                           with application/x-copywatch-end marks the end of the stream (required)
             ts_ms         arrival time in milliseconds since 1970; default: the record's own time
             epoch         UTC of stream time 0 (RFC 3339), or any other name of a continuous clock; without it,
                           the reader detects clock breaks from pts_ms and ts_ms
             encoder       of a feature row: the id of its encoder; informative: 0 for a blank picture
             held          1 if the picture is that of the previous second (only key frames are decoded)
             age_ms        time from such a key frame to the middle of its second
             gap           why the seconds before this one are missing; began_ms: the best estimate of stream time 0

Any producer may write frame records, so nothing in them is trusted: an unusable one raises BadRecord.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from monitor.config.settings import CHANNEL_NAME
from monitor.errors import MonitorError
from monitor.ingest.feature_windows import EncodedFrame
from reference_db.media.frames import MAX_HOLD_S, MAX_LONG_SIDE, MAX_PIXELS, PICTURE_SHORT_SIDE
from reference_db.media.jpeg import encode_jpeg
from reference_db.store.references import FEATURE_SIZE

if TYPE_CHECKING:  # commands that list channels need neither alerts nor a decoder
    from monitor.alerting.alerts import Alert
    from monitor.ingest.sources import Sample

MAX_VALUE_BYTES = 8 << 20  # a usual picture has 10 kB
JPEG_QUALITY = 90
CHANNEL = re.compile(CHANNEL_NAME)
F16, END = "application/x-copywatch-f16", "application/x-copywatch-end"
FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}
MAX_AHEAD_S = 600.0  # of a stream second before its wall clock: one record further ahead would block a channel
MS = 1000

Headers = list[tuple[str, bytes]]


class KafkaRecord(Protocol):
    """A record as aiokafka returns it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Iterable[tuple[str, bytes]]: ...


class BadRecord(MonitorError):
    """An unusable record; `reason` is its label in metrics."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Headers(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True, hide_input_in_errors=True)

    pts_ms: int = Field(ge=-(1 << 40), le=1 << 47)
    ts_ms: int | None = Field(default=None, ge=0, le=1 << 42)
    began_ms: int | None = Field(default=None, ge=-(1 << 47), le=1 << 42)
    epoch: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9.:+_-]{0,63}$")
    content_type: Literal[
        "image/jpeg",
        "image/png",
        "image/webp",
        "application/x-copywatch-f16",
        "application/x-copywatch-f32",
        "application/x-copywatch-end",
    ] = Field(alias="content-type")
    encoder: str | None = None
    informative: bool = True
    held: bool = False
    age_ms: int = Field(default=0, ge=0, le=(MAX_HOLD_S + 1) * MS)
    gap: str = Field(default="unseen", pattern=r"^[a-z][a-z ]{0,31}$")


@dataclass(frozen=True, slots=True, eq=False)
class FrameRecord:
    """One second of a channel, parsed and checked. Without picture and row it is the end of the stream."""

    channel: str
    pts_ms: int
    seen_at: datetime
    epoch: str | None
    began_at: datetime | None
    gap: str
    offset: int = 0  # in its partition
    held: bool = False
    age_ms: int = 0
    picture: NDArray[np.uint8] | None = None
    encoded: EncodedFrame | None = None

    @property
    def is_end(self) -> bool:
        return self.picture is None and self.encoded is None


LastPictures = dict[str, tuple[bytes, NDArray[np.uint8]]]  # by channel: the bytes of the last picture, and the picture


def parse_record(record: KafkaRecord, encoder_id: str, last_pictures: LastPictures) -> FrameRecord:
    """The second in a record. Feature rows are accepted from encoder `encoder_id` only. Raises BadRecord.

    A picture equal to the channel's last is returned as the same object, so that it is encoded once.
    """
    channel = _channel(record.key)
    value = record.value or b""
    if len(value) > MAX_VALUE_BYTES:
        raise BadRecord("too_large", f"the value has {len(value)} bytes; the limit is {MAX_VALUE_BYTES}")
    headers = _headers(record.headers)
    seen_at = datetime.fromtimestamp((headers.ts_ms if headers.ts_ms is not None else record.timestamp) / MS, UTC)
    began_at = _began_at(headers, seen_at)
    picture: NDArray[np.uint8] | None = None
    encoded: EncodedFrame | None = None
    if headers.content_type in FORMATS:
        last_value, picture = last_pictures.get(channel, (b"", None))
        if picture is None or last_value != value:
            picture = decode_picture(value, FORMATS[headers.content_type])
            last_pictures[channel] = value, picture
    elif headers.content_type != END:
        encoded = _row(value, headers, encoder_id), headers.informative
    return FrameRecord(
        channel,
        headers.pts_ms,
        seen_at,
        headers.epoch,
        began_at,
        headers.gap,
        record.offset,
        headers.held,
        headers.age_ms,
        picture,
        encoded,
    )


def _channel(key: bytes | None) -> str:
    if key is None:
        raise BadRecord("no_key", "the record has no key; it must be the channel's name")
    name = key.decode("utf-8", "replace")
    if not CHANNEL.fullmatch(name):
        raise BadRecord("bad_key", f"the key {name[:80]!r} is no channel name: letters, digits, dot, dash, underscore")
    return name


def _headers(headers: Iterable[tuple[str, bytes]]) -> _Headers:
    try:
        return _Headers.model_validate({name: value.decode() for name, value in headers if value is not None})
    except UnicodeDecodeError:
        raise BadRecord("headers", "a header is not UTF-8 text") from None
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise BadRecord("headers", f"invalid headers: {problems}") from None


def _began_at(headers: _Headers, seen_at: datetime) -> datetime | None:
    """The wall time of stream time 0, if the headers have it."""
    began_at = None
    if headers.began_ms is not None:
        began_at = datetime.fromtimestamp(headers.began_ms / MS, UTC)
    elif headers.epoch is not None:
        began_at = epoch_time(headers.epoch)
    if began_at is not None and began_at.timestamp() + headers.pts_ms / MS > seen_at.timestamp() + MAX_AHEAD_S:
        raise BadRecord("clock", "epoch and pts_ms are after ts_ms")
    return began_at


def epoch_time(epoch: str) -> datetime | None:
    """The time that an epoch is named after; None for any other name."""
    try:
        moment = datetime.fromisoformat(epoch)
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo is not None else None


def _row(value: bytes, headers: _Headers, encoder_id: str) -> NDArray[np.float32]:
    if headers.encoder != encoder_id:
        raise BadRecord("encoder", f"the row is from encoder {headers.encoder}; {encoder_id} is in use")
    dtype = np.dtype("<f2") if headers.content_type == F16 else np.dtype("<f4")
    if len(value) != FEATURE_SIZE * dtype.itemsize:
        raise BadRecord("features", f"a row has {FEATURE_SIZE * dtype.itemsize} bytes, not {len(value)}")
    row = np.frombuffer(value, dtype).astype(np.float32)
    if not np.isfinite(row).all() or not 0.9 < float(np.linalg.norm(row)) < 1.1:
        raise BadRecord("features", "the row is not of unit length")
    return row


def decode_picture(value: bytes, format: str) -> NDArray[np.uint8]:
    """The picture as RGB, no larger than the encoder needs. Its size is checked before it is decoded."""
    try:
        with Image.open(io.BytesIO(value), formats=[format]) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadRecord("too_many_pixels", f"the picture claims {width}x{height}; the limit is 8192x4352")
            if min(width, height) < 1:
                raise BadRecord("not_a_picture", "the picture is empty")
            scale = min(1.0, PICTURE_SHORT_SIDE / min(width, height))
            size = _scaled(width, scale), _scaled(height, scale)
            if format == "JPEG":
                image.draft("RGB", (2 * size[0], 2 * size[1]))  # decoded at a half, a quarter or an eighth
            picture = image.convert("RGB")
            if picture.size != size:
                picture = picture.resize(size, Image.Resampling.BOX)
            return np.array(picture, np.uint8)
    except Image.DecompressionBombError as error:  # Pillow's own limit, far above ours
        raise BadRecord("too_many_pixels", "the picture claims too many pixels; the limit is 8192x4352") from error
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, struct.error) as e:
        raise BadRecord("not_a_picture", f"the value is not a complete {format} picture ({type(e).__name__})") from e


def _scaled(side: int, scale: float) -> int:
    return min(MAX_LONG_SIDE, max(1, round(side * scale)))


ImageFile.LOAD_TRUNCATED_IMAGES = False  # the default; a truncated picture is a bad record


def dead_letter(record: KafkaRecord, bad: BadRecord) -> dict[str, Any]:
    """The record for the topic of dead letters: the original with the reason in its headers."""
    fields = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "stage": "parse_record",
        "reason": bad.reason,
        "exception.class.name": type(bad).__name__,
        "exception.message": str(bad),
    }
    headers = [*record.headers, *((f"copywatch.errors.{name}", text.encode()) for name, text in fields.items())]
    return {"key": record.key, "value": record.value if record.value is not None else b"", "headers": headers}


def sample_record(sample: Sample, encoded: EncodedFrame | None = None, encoder_id: str = "") -> dict[str, Any]:
    """The frame record of a sample: with its picture, or with its feature row if given."""
    epoch, ts_ms = sample.epoch, round(sample.arrived_at.timestamp() * MS)
    # The middle of the second, which the picture represents; the frame's own time may be raw.
    headers: Headers = [("pts_ms", str(sample.second * MS + MS // 2).encode()), ("ts_ms", str(ts_ms).encode())]
    headers.append(("epoch", epoch.name.encode()))
    if epoch.began_at is not None:
        headers.append(("began_ms", str(round(epoch.began_at.timestamp() * MS)).encode()))
    headers.append(("gap", sample.gap_reason.encode()))
    if sample.frame.held:
        headers.append(("held", b"1"))
    if age_ms := round(sample.frame.age_s * MS):
        headers.append(("age_ms", str(age_ms).encode()))
    if encoded is None:
        value = encode_jpeg(sample.frame.picture, quality=JPEG_QUALITY)
        headers.append(("content-type", b"image/jpeg"))
    else:
        row, informative = encoded
        value = row.astype("<f2").tobytes()  # the precision at which rows are compared
        headers += [("content-type", F16.encode()), ("encoder", encoder_id.encode())]
        headers.append(("informative", str(int(informative)).encode()))
    return {"key": sample.epoch.channel.encode(), "value": value, "headers": headers, "timestamp_ms": ts_ms}


def end_record(channel: str, pts_ms: int, epoch: str, at: datetime) -> dict[str, Any]:
    """The frame record that ends a stream, after its last second."""
    ts_ms = round(at.timestamp() * MS)
    headers = [("pts_ms", str(pts_ms).encode()), ("ts_ms", str(ts_ms).encode()), ("epoch", epoch.encode())]
    headers.append(("content-type", END.encode()))
    return {"key": channel.encode(), "value": b"", "headers": headers, "timestamp_ms": ts_ms}


def alert_record(alert: Alert) -> dict[str, Any]:
    """The record of one event of an alert."""
    return {
        "key": alert.channel.encode(),
        "value": json.dumps(alert.as_dict(), ensure_ascii=False).encode(),
        "headers": [("id", alert.id.encode()), ("type", alert.type.encode())],
    }
