"""The frame record: one second of a channel as it travels through Kafka, written by us or by anybody.

    key      the channel's name
    value    a JPEG, PNG or WebP picture; or a feature row, 512 numbers of 16 or 32 bits, little-endian
    headers  pts_ms        stream time of the picture (required)
             content-type  image/jpeg, image/png, image/webp, application/x-copywatch-f16 or -f32; that of an empty
                           record, application/x-copywatch-end, says that the stream has ended
             ts_ms         when it was seen, in milliseconds since 1970; the record's own time when left out
             epoch         UTC of stream time 0 (RFC 3339), or any other word that names an unbroken clock; left out,
                           the reader tells by pts_ms and ts_ms when a clock is broken
             encoder       of a feature row: who made it; informative: 0 where the picture showed nothing
             held          1 where the picture is that of the second before (key pictures only are decoded)
             age_ms        how long before the middle of its second such a key picture was on air
             gap           why seconds before this one are missing; began_ms: stream time 0 as it is known by now

What comes is not trusted: whatever cannot be used raises BadRecord, with a word to count it by and a sentence.
"""

from __future__ import annotations

import io
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

if TYPE_CHECKING:  # commands that list channels need no decoder
    from monitor.ingest.sources import Sample

MAX_VALUE_BYTES = 8 << 20  # a picture of a second is some 10 kB
JPEG_QUALITY = 90
CHANNEL = re.compile(CHANNEL_NAME)
F16, F32, END = "application/x-copywatch-f16", "application/x-copywatch-f32", "application/x-copywatch-end"
FORMATS = {"image/jpeg": "JPEG", "image/png": "PNG", "image/webp": "WEBP"}
MAX_AHEAD_S = 600.0  # of its own wall clock that a stream second may be: beyond, one record would silence a channel
MS = 1000

Headers = list[tuple[str, bytes]]


class KafkaRecord(Protocol):
    """What aiokafka hands over."""

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
    """A record that cannot be used; `reason` is the word to count it by."""

    def __init__(self, reason: str, words: str) -> None:
        super().__init__(words)
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
    """One second of a channel, read and checked. Neither picture nor row: the stream has ended."""

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


Shown = dict[str, tuple[bytes, NDArray[np.uint8]]]  # the last picture of each channel, and its bytes


def read(record: KafkaRecord, encoder_id: str, shown: Shown) -> FrameRecord:
    """The second that a record shows; `encoder_id` is the only one whose rows are taken. Raises BadRecord.

    A picture that is the same as the channel's last in `shown` is that very object, so that it is encoded once.
    """
    channel = _channel(record.key)
    value = record.value or b""
    if len(value) > MAX_VALUE_BYTES:
        raise BadRecord("too_large", f"the value has {len(value)} bytes, and {MAX_VALUE_BYTES} are the most")
    headers = _headers(record.headers)
    seen_at = datetime.fromtimestamp((headers.ts_ms if headers.ts_ms is not None else record.timestamp) / MS, UTC)
    began_at = _began_at(headers, seen_at)
    picture: NDArray[np.uint8] | None = None
    encoded: EncodedFrame | None = None
    if headers.content_type in FORMATS:
        before, picture = shown.get(channel, (b"", None))
        if picture is None or before != value:
            picture = decode(value, FORMATS[headers.content_type])
            shown[channel] = value, picture
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
        raise BadRecord("bad_key", f"the key {name[:80]!r} names no channel: letters, digits, dot, dash, underscore")
    return name


def _headers(headers: Iterable[tuple[str, bytes]]) -> _Headers:
    try:
        return _Headers.model_validate({name: value.decode() for name, value in headers if value is not None})
    except UnicodeDecodeError:
        raise BadRecord("headers", "a header is no UTF-8 text") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise BadRecord("headers", f"the headers are wrong: {wrong}") from None


def _began_at(headers: _Headers, seen_at: datetime) -> datetime | None:
    """The wall time of stream time 0, where it is told."""
    began_at = None
    if headers.began_ms is not None:
        began_at = datetime.fromtimestamp(headers.began_ms / MS, UTC)
    elif headers.epoch is not None:
        began_at = epoch_time(headers.epoch)
    if began_at is not None and began_at.timestamp() + headers.pts_ms / MS > seen_at.timestamp() + MAX_AHEAD_S:
        raise BadRecord("clock", "epoch and pts_ms lie in the future of ts_ms")
    return began_at


def epoch_time(epoch: str) -> datetime | None:
    """The moment that an epoch is named by; None where its name is another word."""
    try:
        moment = datetime.fromisoformat(epoch)
    except ValueError:
        return None
    return moment.astimezone(UTC) if moment.tzinfo is not None else None


def _row(value: bytes, headers: _Headers, encoder_id: str) -> NDArray[np.float32]:
    if headers.encoder != encoder_id:
        raise BadRecord("encoder", f"the row was made by {headers.encoder}, and {encoder_id} is in use here")
    dtype = np.dtype("<f2") if headers.content_type == F16 else np.dtype("<f4")
    if len(value) != FEATURE_SIZE * dtype.itemsize:
        raise BadRecord("features", f"a row has {FEATURE_SIZE * dtype.itemsize} bytes, not {len(value)}")
    row = np.frombuffer(value, dtype).astype(np.float32)
    if not np.isfinite(row).all() or not 0.9 < float(np.linalg.norm(row)) < 1.1:
        raise BadRecord("features", "the row is not of unit length")
    return row


def decode(value: bytes, format: str) -> NDArray[np.uint8]:
    """The picture, RGB, no larger than the encoder looks at. Its size is checked before anything is unpacked."""
    try:
        with Image.open(io.BytesIO(value), formats=[format]) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise BadRecord("too_many_pixels", f"the picture claims {width}x{height}; 8192x4352 are the most")
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
        raise BadRecord("too_many_pixels", "the picture claims too many pixels; 8192x4352 are the most") from error
    except (OSError, UnidentifiedImageError, ValueError, SyntaxError, struct.error) as e:
        raise BadRecord("not_a_picture", f"the value is no whole {format} picture ({type(e).__name__})") from e


def _scaled(side: int, scale: float) -> int:
    return min(MAX_LONG_SIDE, max(1, round(side * scale)))


ImageFile.LOAD_TRUNCATED_IMAGES = False  # the default; a torn picture is a bad record


def dead_letter(record: KafkaRecord, bad: BadRecord) -> dict[str, Any]:
    """What is sent to the topic of dead letters: the record as it came, and why."""
    about = {
        "topic": record.topic,
        "partition": str(record.partition),
        "offset": str(record.offset),
        "stage": "read",
        "reason": bad.reason,
        "exception.class.name": type(bad).__name__,
        "exception.message": str(bad),
    }
    headers = [*record.headers, *((f"copywatch.errors.{name}", text.encode()) for name, text in about.items())]
    return {"key": record.key, "value": record.value if record.value is not None else b"", "headers": headers}


def record_of(sample: Sample, encoded: EncodedFrame | None = None, encoder_id: str = "") -> dict[str, Any]:
    """Key, value, headers and time of a sample's record: its picture, or its feature row where one is given."""
    epoch, ts_ms = sample.epoch, round(sample.arrived_at.timestamp() * MS)
    # The middle of the second, as the picture stands for it; its own time may be raw.
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
        value = row.astype("<f2").tobytes()  # as precise as rows are compared
        headers += [("content-type", F16.encode()), ("encoder", encoder_id.encode())]
        headers.append(("informative", str(int(informative)).encode()))
    return {"key": sample.epoch.channel.encode(), "value": value, "headers": headers, "timestamp_ms": ts_ms}


def end_of(channel: str, pts_ms: int, epoch: str, at: datetime) -> dict[str, Any]:
    """The record that says that a stream has ended, after its last second."""
    ts_ms = round(at.timestamp() * MS)
    headers = [("pts_ms", str(pts_ms).encode()), ("ts_ms", str(ts_ms).encode()), ("epoch", epoch.encode())]
    headers.append(("content-type", END.encode()))
    return {"key": channel.encode(), "value": b"", "headers": headers, "timestamp_ms": ts_ms}
