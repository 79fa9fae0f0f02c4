"""Frame records: what is read of them, and that nothing else is."""

from __future__ import annotations

import io
import struct
import zlib
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
    F32,
    MAX_VALUE_BYTES,
    BadRecord,
    FrameRecord,
    Headers,
    dead_letter,
    end_of,
    read,
    record_of,
)
from monitor.kafka.timeline import Place, Timeline
from reference_db.media.frames import Frame
from reference_db.store.references import FEATURE_SIZE

BEGAN = datetime(2026, 11, 16, 8, tzinfo=UTC)
TS_MS = 1_794_816_500_000  # after it
ENCODER = "enc-1"


@dataclass(frozen=True)
class Given:
    """A record as aiokafka hands it over."""

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
    named = {"pts_ms": pts_ms, "content-type": content_type, **more}
    return [(name, str(value).encode()) for name, value in named.items()]


def told(record: Given) -> FrameRecord | str:
    try:
        return read(record, ENCODER, {})
    except BadRecord as bad:
        return bad.reason


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_a_picture_of_each_kind_is_read(format: str) -> None:
    found = told(Given(value=image(format), headers=headers(f"image/{format.lower()}", ts_ms=TS_MS)))
    assert isinstance(found, FrameRecord)
    assert found.picture is not None
    assert found.picture.shape == (192, 336, 3)
    assert (found.channel, found.pts_ms, found.seen_at.timestamp() * 1000) == ("ch5", 12_500, TS_MS)


def test_a_large_picture_is_made_small_before_it_is_handed_on() -> None:
    found = told(Given(value=image("JPEG", picture(1080, 1920)), headers=headers()))
    assert isinstance(found, FrameRecord)
    assert found.picture is not None
    assert found.picture.shape == (192, 341, 3)


def test_a_sample_comes_back_as_it_was_sent() -> None:
    epoch = ChannelEpoch("ch5", "2026-11-16T08:00:00Z", BEGAN, 3)
    sample = Sample(epoch, 12, Frame(12, 11.25, picture(), held=True, age_s=1.25), BEGAN, "reconnect", {})
    record = record_of(sample)
    found = told(Given(record["key"], record["value"], record["headers"]))
    assert isinstance(found, FrameRecord)
    assert found.picture is not None
    assert np.abs(found.picture.astype(int) - sample.frame.picture).mean() < 5
    assert (found.pts_ms // 1000, found.epoch, found.began_at) == (12, epoch.name, BEGAN)
    assert (found.held, found.age_ms, found.gap, found.seen_at) == (True, 1250, "reconnect", BEGAN)
    assert Timeline("ch5").place(found) == Place(ChannelEpoch("ch5", epoch.name, BEGAN, 12), 12)


@pytest.mark.parametrize("kind", [F16, F32])
def test_a_feature_row_comes_back_as_precise_as_rows_are_compared(kind: str) -> None:
    row = np.random.default_rng(6).standard_normal(FEATURE_SIZE).astype(np.float32)
    row /= np.linalg.norm(row)
    if kind == F16:
        sample = Sample(ChannelEpoch("ch5", "file-x", None), 12, Frame(12, 12.5, picture()), BEGAN, "unseen", {})
        record = record_of(sample, (row, False), ENCODER)
        found = told(Given(record["key"], record["value"], record["headers"]))
    else:
        found = told(Given(value=row.tobytes(), headers=headers(kind, encoder=ENCODER, informative=0, epoch="file-x")))
    assert isinstance(found, FrameRecord)
    assert found.encoded is not None
    assert not found.encoded[1]
    assert (found.encoded[0].astype(np.float16) == row.astype(np.float16)).all()


def bomb() -> bytes:
    """A PNG of 80 bytes that says it is 60,000 x 60,000."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    )


ROW = (np.ones(FEATURE_SIZE, np.float16) / np.float16(FEATURE_SIZE**0.5)).tobytes()

BAD = {
    "no_key": Given(key=None, value=image("JPEG"), headers=headers()),
    "bad_key": Given(key=b"../etc", value=image("JPEG"), headers=headers()),
    "too_large": Given(value=b"\0" * (MAX_VALUE_BYTES + 1), headers=headers()),
    "too_many_pixels": Given(value=bomb(), headers=headers("image/png")),
    "not_a_picture": Given(value=b"GIF89a not a picture", headers=headers()),
    "not_a_picture, torn": Given(value=image("JPEG")[:-400], headers=headers()),
    "not_a_picture, another": Given(value=image("PNG"), headers=headers()),
    "not_a_picture, none": Given(value=None, headers=headers()),
    "headers, no time": Given(value=image("JPEG"), headers=[("content-type", b"image/jpeg")]),
    "headers, no kind": Given(value=image("JPEG"), headers=[("pts_ms", b"1")]),
    "headers, words": Given(value=image("JPEG"), headers=headers(pts_ms="soon")),
    "headers, endless": Given(value=image("JPEG"), headers=headers(pts_ms=10**30)),
    "headers, bytes": Given(value=image("JPEG"), headers=[*headers(), ("epoch", b"\xff\xfe")]),
    "headers, control": Given(value=image("JPEG"), headers=headers(gap="\x1b[2J")),
    "clock": Given(value=image("JPEG"), headers=headers(epoch="2026-11-17T08:00:00Z", ts_ms=TS_MS)),
    "encoder": Given(value=ROW, headers=headers(F16, encoder="another")),
    "encoder, none": Given(value=ROW, headers=headers(F16)),
    "features": Given(value=ROW[:-2], headers=headers(F16, encoder=ENCODER)),
    "features, nan": Given(value=b"\xff" * len(ROW), headers=headers(F16, encoder=ENCODER)),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_used_is_told_by_reason_and_kept_as_it_came(name: str) -> None:
    record = BAD[name]
    with pytest.raises(BadRecord) as caught:
        read(record, ENCODER, {})
    assert caught.value.reason == name.partition(",")[0]
    letter = dead_letter(record, caught.value)
    about = dict(letter["headers"])
    assert (letter["key"], letter["value"]) == (record.key, record.value or b"")
    assert letter["headers"][: len(record.headers)] == list(record.headers)
    assert about["copywatch.errors.reason"].decode() == caught.value.reason
    assert (about["copywatch.errors.partition"], about["copywatch.errors.offset"]) == (b"3", b"17")


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
def test_whatever_comes_is_read_or_bad_and_nothing_else(
    key: bytes | None, value: bytes | None, given_headers: Headers
) -> None:
    told(Given(key, value, given_headers))


def test_the_same_bytes_again_are_the_same_picture_so_that_they_are_encoded_once() -> None:
    shown: dict[str, tuple[bytes, NDArray[np.uint8]]] = {}
    one, other = image("JPEG"), image("JPEG", picture()[::-1])
    pictures = [read(Given(value=value, headers=headers()), ENCODER, shown).picture for value in (one, one, other, one)]
    assert pictures[0] is pictures[1]
    assert pictures[1] is not pictures[2]


def test_an_end_is_neither_picture_nor_row() -> None:
    record = end_of("ch5", 1999, "file-x", BEGAN)
    found = told(Given(record["key"], record["value"], record["headers"]))
    assert isinstance(found, FrameRecord)
    assert found.is_end
