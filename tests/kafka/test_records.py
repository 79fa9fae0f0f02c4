"""Frame records: what is parsed from them, and what is refused."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from monitor.ingest.clock import ChannelEpoch
from monitor.ingest.sources import Sample
from monitor.kafka.records import (
    F16,
    MAX_VALUE_BYTES,
    BadRecord,
    FrameRecord,
    Headers,
    dead_letter,
    end_record,
    parse_record,
    sample_record,
)
from monitor.kafka.timeline import Place, Timeline
from reference_db.media.frames import Frame
from reference_db.store.references import FEATURE_SIZE
from tests.support.kafka_fleet import png_bomb

BEGAN = datetime(2026, 11, 16, 8, tzinfo=UTC)
TS_MS = 1_794_816_500_000  # after it
ENCODER = "enc-1"
F32 = "application/x-copywatch-f32"


@dataclass(frozen=True)
class InputRecord:
    """A record as aiokafka returns it."""

    key: bytes | None = b"ch5"
    value: bytes | None = b""
    headers: Headers = field(default_factory=list)
    topic: str = "copywatch.frames"
    partition: int = 3
    offset: int = 17
    timestamp: int = TS_MS


def picture(height: int = 192, width: int = 336) -> NDArray[np.uint8]:
    coarse = np.random.default_rng(5).integers(0, 255, (6, 10, 3), np.uint8)
    return np.array(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC))


def image(format: str, pixels: NDArray[np.uint8] | None = None) -> bytes:
    out = io.BytesIO()
    Image.fromarray(picture() if pixels is None else pixels).save(out, format)
    return out.getvalue()


def headers(content_type: str = "image/jpeg", pts_ms: object = 12_500, **more: object) -> Headers:
    values = {"pts_ms": pts_ms, "content-type": content_type, **more}
    return [(name, str(value).encode()) for name, value in values.items()]


def parse(record: InputRecord) -> FrameRecord | str:
    try:
        return parse_record(record, ENCODER, {})
    except BadRecord as bad:
        return bad.reason


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_pictures_of_each_format_are_parsed(format: str) -> None:
    parsed = parse(InputRecord(value=image(format), headers=headers(f"image/{format.lower()}", ts_ms=TS_MS)))
    assert isinstance(parsed, FrameRecord)
    assert parsed.picture is not None
    assert parsed.picture.shape == (192, 336, 3)
    assert (parsed.channel, parsed.pts_ms, parsed.seen_at.timestamp() * 1000) == ("ch5", 12_500, TS_MS)


def test_a_large_picture_is_scaled_down() -> None:
    parsed = parse(InputRecord(value=image("JPEG", picture(1080, 1920)), headers=headers()))
    assert isinstance(parsed, FrameRecord)
    assert parsed.picture is not None
    assert parsed.picture.shape == (192, 341, 3)


def test_a_sample_survives_the_round_trip() -> None:
    epoch = ChannelEpoch("ch5", "2026-11-16T08:00:00Z", BEGAN, 3)
    sample = Sample(epoch, 12, Frame(12, 11.25, picture(), held=True, age_s=1.25), BEGAN, "reconnect", {})
    record = sample_record(sample)
    parsed = parse(InputRecord(record["key"], record["value"], record["headers"]))
    assert isinstance(parsed, FrameRecord)
    assert parsed.picture is not None
    assert np.abs(parsed.picture.astype(int) - sample.frame.picture).mean() < 5
    assert (parsed.pts_ms // 1000, parsed.epoch, parsed.began_at) == (12, epoch.name, BEGAN)
    assert (parsed.held, parsed.age_ms, parsed.gap, parsed.seen_at) == (True, 1250, "reconnect", BEGAN)
    assert Timeline("ch5").place(parsed) == Place(ChannelEpoch("ch5", epoch.name, BEGAN, 12), 12)


@pytest.mark.parametrize("kind", [F16, F32])
def test_a_feature_row_survives_the_round_trip_at_half_precision(kind: str) -> None:
    row = np.random.default_rng(6).standard_normal(FEATURE_SIZE).astype(np.float32)
    row /= np.linalg.norm(row)
    if kind == F16:
        sample = Sample(ChannelEpoch("ch5", "file-x", None), 12, Frame(12, 12.5, picture()), BEGAN, "unseen", {})
        record = sample_record(sample, (row, False), ENCODER)
        parsed = parse(InputRecord(record["key"], record["value"], record["headers"]))
    else:
        parsed = parse(
            InputRecord(value=row.tobytes(), headers=headers(kind, encoder=ENCODER, informative=0, epoch="file-x"))
        )
    assert isinstance(parsed, FrameRecord)
    assert parsed.encoded is not None
    assert not parsed.encoded[1]
    assert (parsed.encoded[0].astype(np.float16) == row.astype(np.float16)).all()


ROW = (np.ones(FEATURE_SIZE, np.float16) / np.float16(FEATURE_SIZE**0.5)).tobytes()

BAD = {
    "no_key": InputRecord(key=None, value=image("JPEG"), headers=headers()),
    "bad_key": InputRecord(key=b"../etc", value=image("JPEG"), headers=headers()),
    "too_large": InputRecord(value=b"\0" * (MAX_VALUE_BYTES + 1), headers=headers()),
    "too_many_pixels": InputRecord(value=png_bomb(), headers=headers("image/png")),
    "not_a_picture": InputRecord(value=b"GIF89a not a picture", headers=headers()),
    "not_a_picture, truncated": InputRecord(value=image("JPEG")[:-400], headers=headers()),
    "not_a_picture, other format": InputRecord(value=image("PNG"), headers=headers()),
    "not_a_picture, none": InputRecord(value=None, headers=headers()),
    "headers, no time": InputRecord(value=image("JPEG"), headers=[("content-type", b"image/jpeg")]),
    "headers, no kind": InputRecord(value=image("JPEG"), headers=[("pts_ms", b"1")]),
    "headers, text": InputRecord(value=image("JPEG"), headers=headers(pts_ms="soon")),
    "headers, huge": InputRecord(value=image("JPEG"), headers=headers(pts_ms=10**30)),
    "headers, bytes": InputRecord(value=image("JPEG"), headers=[*headers(), ("epoch", b"\xff\xfe")]),
    "headers, control": InputRecord(value=image("JPEG"), headers=headers(gap="\x1b[2J")),
    "clock": InputRecord(value=image("JPEG"), headers=headers(epoch="2026-11-17T08:00:00Z", ts_ms=TS_MS)),
    "encoder": InputRecord(value=ROW, headers=headers(F16, encoder="another")),
    "encoder, none": InputRecord(value=ROW, headers=headers(F16)),
    "features": InputRecord(value=ROW[:-2], headers=headers(F16, encoder=ENCODER)),
    "features, nan": InputRecord(value=b"\xff" * len(ROW), headers=headers(F16, encoder=ENCODER)),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_record_has_a_reason_and_its_dead_letter_has_the_original(name: str) -> None:
    record = BAD[name]
    with pytest.raises(BadRecord) as caught:
        parse_record(record, ENCODER, {})
    assert caught.value.reason == name.partition(",")[0]
    letter = dead_letter(record, caught.value)
    fields = dict(letter["headers"])
    assert (letter["key"], letter["value"]) == (record.key, record.value or b"")
    assert letter["headers"][: len(record.headers)] == list(record.headers)
    assert fields["copywatch.errors.reason"].decode() == caught.value.reason
    assert (fields["copywatch.errors.partition"], fields["copywatch.errors.offset"]) == (b"3", b"17")


@given(
    key=st.none() | st.binary(max_size=80),
    value=st.none() | st.binary(max_size=300),
    given_headers=st.lists(
        st.tuples(
            st.sampled_from(
                ["pts_ms", "ts_ms", "epoch", "content-type", "encoder", "held", "age_ms", "gap", "began_ms", "x"]
            ),
            st.one_of(st.binary(max_size=40), st.sampled_from([b"1", b"-1", b"image/png", F16.encode(), b"99" * 20])),
        )
    ),
)
def test_any_input_is_parsed_or_raises_bad_record(
    key: bytes | None, value: bytes | None, given_headers: Headers
) -> None:
    parse(InputRecord(key, value, given_headers))


def test_a_repeated_picture_is_the_same_object() -> None:
    last_pictures: dict[str, tuple[bytes, NDArray[np.uint8]]] = {}
    one, other = image("JPEG"), image("JPEG", picture()[::-1])
    pictures = [
        parse_record(InputRecord(value=value, headers=headers()), ENCODER, last_pictures).picture
        for value in (one, one, other, one)
    ]
    assert pictures[0] is pictures[1]
    assert pictures[1] is not pictures[2]


def test_the_end_record_has_neither_picture_nor_row() -> None:
    record = end_record("ch5", 1999, "file-x", BEGAN)
    parsed = parse(InputRecord(record["key"], record["value"], record["headers"]))
    assert isinstance(parsed, FrameRecord)
    assert parsed.is_end
