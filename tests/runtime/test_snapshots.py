"""Snapshots: a restored channel emits what an unbroken one emits, and values come back exactly or are refused."""

from __future__ import annotations

import hashlib
import math
import sqlite3
import struct
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.alerting.alerts import ENDED, STARTED, UPDATED, Alert, Gap
from monitor.errors import SnapshotRefused
from monitor.matching.candidates import VoterState
from monitor.matching.stitching import Seconds
from monitor.runtime import snapshots
from monitor.runtime.models import Models
from monitor.runtime.snapshots import MAGIC, MAX_BYTES, SMALL_BYTES, pack, unpack
from reference_db.features.encoder import Encoder
from tests.support.planted_channels import Part, PlantedStream, alerts_of, new_monitor, parts, plant, trained_models
from tests.support.planted_features import plain_net

COPY = [Part(10, noise=1.0), Part(30, "swift", 20), Part(30, noise=1.0)]
OLD_DATA_DIR = Path(__file__).parents[1] / "data" / "data_dir_0.1.0.tar.gz"


def unbroken(stream: PlantedStream) -> list[Alert]:
    monitor = new_monitor()
    return alerts_of(monitor, stream) + monitor.finish()


@settings(max_examples=30, deadline=None)
@given(parts=parts(), seed=st.integers(0, 3), data=st.data())
def test_any_number_of_restarts_anywhere_changes_nothing(parts: list[Part], seed: int, data: st.DataObject) -> None:
    stream = plant(parts, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(stream)), max_size=5)))
    monitor, alerts = new_monitor(), []
    for begin, end in pairwise([0, *cuts, len(stream)]):
        alerts += alerts_of(monitor, stream, begin, end)
        position = {"second": end}
        content = monitor.snapshot(position)
        monitor = new_monitor()
        restored = monitor.restore(content)
        assert (restored.position, restored.alerts) == (position, [])
        assert monitor.snapshot(position) == content
    assert alerts + monitor.finish() == unbroken(stream)


def test_an_alert_continues_under_its_id_over_a_restart() -> None:
    stream = plant(COPY)
    first = new_monitor(by=trained_models())
    before = alerts_of(first, stream, 0, 25)
    second = new_monitor(by=trained_models())
    second.restore(first.snapshot({}))
    after = alerts_of(second, stream, 25) + second.finish()
    assert [alert.type for alert in before + after if alert.type != UPDATED] == [STARTED, ENDED]
    assert before[0].type == STARTED
    assert len({alert.id for alert in before + after}) == 1
    assert after[-1].seq == len(before) + len(after)


def test_a_snapshot_stays_small_whatever_airs() -> None:
    loop = [Part(20, film, start) for start in (0, 20) for film in ("swift", "slow", "long", "other")]
    stream = plant(loop * 3)
    monitor = new_monitor()
    sizes = []
    for begin in range(0, len(stream), 40):
        alerts_of(monitor, stream, begin, begin + 40)
        sizes.append(len(monitor.snapshot({})))
    assert max(sizes) < 600_000
    assert max(sizes[-4:]) < 1.5 * max(sizes[4:8])


def test_seconds_missed_during_a_restart_are_a_gap() -> None:
    stream = plant(COPY)
    first = new_monitor()
    alerts_of(first, stream, 0, 25)
    second = new_monitor()
    second.restore(first.snapshot({}))
    rest = PlantedStream([replace(stream.samples[30], gap_reason="restart"), *stream.samples[31:]], stream.rows[30:])
    alerts = alerts_of(second, rest) + second.finish()
    assert alerts[-1].gaps == (Gap(25, 5, "restart"),)


def test_after_a_change_of_model_the_channel_starts_fresh_with_a_gap() -> None:
    stream = plant(COPY)
    first = new_monitor()
    alerts_of(first, stream, 0, 20)
    second = new_monitor(by=Models(Encoder(list, "another"), plain_net()))
    with pytest.raises(SnapshotRefused, match="model") as refused:
        second.restore(first.snapshot({"second": 19}))
    assert refused.value.notes is not None
    assert refused.value.notes["position"] == {"second": 19}
    rest = PlantedStream([replace(stream.samples[24], gap_reason="restart"), *stream.samples[25:]], stream.rows[24:])
    alerts = alerts_of(second, rest) + second.finish()
    assert alerts[-1].gaps == (Gap(20, 4, "restart"),)


def test_the_alert_of_a_reference_removed_during_a_restart_ends_with_the_reason() -> None:
    stream = plant(COPY)
    first = new_monitor()
    started = alerts_of(first, stream, 0, 25)[-1]
    second = new_monitor(("other", "slow"))
    (ended,) = second.restore(first.snapshot({})).alerts
    assert (ended.id, ended.type, ended.reason) == (started.id, ENDED, "reference removed")
    assert (ended.title, ended.channel_start) == ("Swift", started.channel_start)
    assert alerts_of(second, stream, 25) + second.finish() == []


# --- the encoding ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    number: int
    rows: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    number: float
    seconds: Seconds
    when: datetime | None
    span: range
    pairs: dict[int, list[tuple[int, float]]]
    small: NDArray[np.float64]
    large: NDArray[np.float16]


def values(number: float, seconds: Seconds, when: datetime | None = None) -> _Values:
    payloads = np.array([0x7FF8000000000001, 0xFFF0000000000000, 0x8000000000000000], np.uint64).view(np.float64)
    large = np.arange(SMALL_BYTES, dtype=np.uint16).view(np.float16).reshape(-1, 8)
    return _Values(number, seconds, when, range(3, 9), {7: [(1, 0.1)], -2: []}, payloads, large)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -0.0, 5e-324, 0.1, 1.7976931348623157e308])
def test_floats_come_back_to_the_last_bit(number: float) -> None:
    restored, _ = unpack(_Values, pack(values(number, number), {}, {}), {})
    assert struct.pack("<d", restored.number) == struct.pack("<d", number)
    assert isinstance(restored.seconds, float)


@pytest.mark.parametrize("seconds", [12, 12.0, -1, 2**53 + 1])
def test_whole_seconds_stay_whole_and_fractions_stay_floats(seconds: Seconds) -> None:
    restored, _ = unpack(_Values, pack(values(1.0, seconds), {}, {}), {})
    assert (restored.seconds, type(restored.seconds)) == (seconds, type(seconds))


@pytest.mark.parametrize(
    "when", [None, datetime(2026, 11, 16, 8, 0, 0, 123457, UTC), datetime(1969, 12, 31, tzinfo=UTC)]
)
def test_times_ranges_containers_and_arrays_come_back_exactly(when: datetime | None) -> None:
    before = values(1.0, 1, when)
    restored, _ = unpack(_Values, pack(before, {}, {}), {})
    assert (restored.when, restored.span, restored.pairs) == (when, range(3, 9), before.pairs)
    assert list(restored.pairs) == [7, -2]  # in their order
    for one, other in ((restored.small, before.small), (restored.large, before.large)):
        assert (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
        assert not one.flags.writeable


@pytest.mark.parametrize("shape", [(0,), (0, 512), (1,), (3, 0, 2)])
def test_arrays_of_any_shape_come_back(shape: tuple[int, ...]) -> None:
    restored, _ = unpack(_One, pack(_One(1, np.zeros(shape, np.float32)), {}, {}), {})
    assert restored.rows.shape == shape


def test_numbers_of_numpy_are_stored_as_plain_ones_and_other_objects_are_an_error() -> None:
    content = pack(_One(np.int64(7), np.zeros(1, np.float32)), {}, {})  # type: ignore[arg-type]
    assert type(unpack(_One, content, {})[0].number) is int
    with pytest.raises(NotImplementedError, match="cannot hold object"):
        pack(_One(object(), np.zeros(1, np.float32)), {}, {})  # type: ignore[arg-type]


def test_a_state_of_another_process_is_restored() -> None:
    """The stamp must not depend on the process: hash seed, addresses, order of imports."""
    script = (
        "import sys\nfrom monitor.matching.candidates import VoterState, _Vote\n"
        "from monitor.runtime.snapshots import pack\n"
        "sys.stdout.buffer.write(pack(VoterState([(5, [_Vote('film', -3, 9, 0.1)])]), {}, {'a': 1}))"
    )
    content = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout
    state, notes = unpack(VoterState, content, {})
    assert [(second, votes[0].reference, votes[0].similarity) for second, votes in state.seconds] == [(5, "film", 0.1)]
    assert notes == {"a": 1}


# --- what is refused -------------------------------------------------------------------------------------------------


def test_a_flipped_byte_is_never_read() -> None:
    content = pack(_One(7, np.arange(120, dtype=np.float32).reshape(30, 4)), {}, {"note": 1})
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        with pytest.raises(SnapshotRefused):
            unpack(_One, bytes(damaged), {})
        with pytest.raises(SnapshotRefused):
            unpack(_One, content[:place], {})
    one, notes = unpack(_One, content, {})
    assert (one.number, one.rows.tolist(), notes) == (7, np.arange(120).reshape(30, 4).tolist(), {"note": 1})


@given(body=st.binary(max_size=200))
def test_foreign_bytes_are_refused_and_nothing_else_happens(body: bytes) -> None:
    for magic in (MAGIC, snapshots.MAGIC_1):
        for content in (body, magic + body, magic + hashlib.sha256(body).digest() + body):
            with pytest.raises(SnapshotRefused):
                unpack(_One, content, {})


def test_another_shape_or_stamp_is_refused_and_its_notes_can_still_be_read() -> None:
    @dataclass(frozen=True, slots=True, eq=False)
    class _Other:
        number: float
        rows: NDArray[np.float32]

    content = pack(_One(7, np.zeros(3, np.float32)), {"model": "a"}, {"position": {"offset": 5}})
    for kind, stamp in ((_Other, {"model": "a"}), (_One, {"model": "b"})):
        with pytest.raises(SnapshotRefused) as refused:
            unpack(kind, content, stamp)
        assert refused.value.notes == {"position": {"offset": 5}}
    with pytest.raises(SnapshotRefused, match="more than the limit"):
        unpack(_One, content + bytes(MAX_BYTES), {"model": "a"})


@pytest.mark.parametrize(
    "rows",
    [
        np.zeros(3, np.float64),
        [1, 2, 3],
        ("<f4", (3,), b"12"),
        ("<f4", (-3,), 0),
        ("<f4", (2**62, 2), 0),
        range(3),
        None,
    ],
)
def test_an_array_that_does_not_fit_its_type_is_refused_with_the_notes(rows: object) -> None:
    content = pack(_One(7, rows), {}, {"position": {}})  # type: ignore[arg-type]
    with pytest.raises(SnapshotRefused, match="its state is invalid") as refused:
        unpack(_One, content, {})
    assert refused.value.notes == {"position": {}}


def test_a_snapshot_of_a_newer_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshots, "__version__", "99.0")
        content = pack(_One(7, np.zeros(3, np.float32)), {"model": "a"}, {"position": {"offset": 5}})
    with pytest.raises(SnapshotRefused, match=r"its version is 99\.0, not ") as refused:
        unpack(_One, content, {"model": "a"})
    assert refused.value.notes == {"position": {"offset": 5}}


def test_a_real_snapshot_of_version_0_1_0_is_refused_by_name_and_its_notes_are_read(tmp_path: Path) -> None:
    with tarfile.open(OLD_DATA_DIR) as archive:
        archive.extractall(tmp_path, filter="data")
    with sqlite3.connect(tmp_path / "v0" / "alerts.sqlite") as database:
        ((content,),) = database.execute("SELECT content FROM snapshot WHERE channel = 'ch8'").fetchall()
    monitor = new_monitor()
    with pytest.raises(SnapshotRefused, match=r"its format is an old one, written by version 0\.1\.0") as refused:
        monitor.restore(content)
    assert refused.value.notes is not None
    assert refused.value.notes.keys() == {"position", "epoch", "newest_s"}
    damaged = content[:-1] + bytes([content[-1] ^ 1])
    with pytest.raises(SnapshotRefused, match="its bytes are damaged"):
        new_monitor().restore(damaged)
