"""Snapshots: thinking that stopped and went on tells what unbroken thinking tells."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from monitor.alerting.alerts import ENDED, STARTED, UPDATED, Alert, Gap
from monitor.errors import SnapshotRefused
from monitor.runtime import snapshots
from monitor.runtime.models import Models
from monitor.runtime.snapshots import MAGIC, MAX_BYTES, pack, unpack
from reference_db.features.encoder import Encoder
from tests.support.planted_channels import Part, PlantedStream, alerts_of, new_monitor, parts, plant, trained_models
from tests.support.planted_features import plain_net

COPY = [Part(10, noise=1.0), Part(30, "swift", 20), Part(30, noise=1.0)]


def whole(air: PlantedStream) -> list[Alert]:
    watch = new_monitor()
    return alerts_of(watch, air) + watch.finish()


@settings(max_examples=30, deadline=None)
@given(parts=parts(), seed=st.integers(0, 3), data=st.data())
def test_any_number_of_restarts_anywhere_changes_nothing(parts: list[Part], seed: int, data: st.DataObject) -> None:
    air = plant(parts, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(air)), max_size=5)))
    watch, alerts = new_monitor(), []
    for begin, end in pairwise([0, *cuts, len(air)]):
        alerts += alerts_of(watch, air, begin, end)
        position = {"second": end}
        content = watch.snapshot(position)
        watch = new_monitor()
        resumed = watch.restore(content)
        assert (resumed.position, resumed.alerts) == (position, [])
        assert watch.snapshot(position) == content
    assert alerts + watch.finish() == whole(air)


def test_a_copy_goes_on_under_its_id_over_a_restart() -> None:
    air = plant(COPY)
    first = new_monitor(by=trained_models())
    before = alerts_of(first, air, 0, 25)
    second = new_monitor(by=trained_models())
    second.restore(first.snapshot({}))
    after = alerts_of(second, air, 25) + second.finish()
    assert [alert.type for alert in before + after if alert.type != UPDATED] == [STARTED, ENDED]
    assert before[0].type == STARTED
    assert len({alert.id for alert in before + after}) == 1
    assert after[-1].seq == len(before) + len(after)


def test_a_snapshot_stays_small_whatever_airs() -> None:
    loop = [Part(20, film, start) for start in (0, 20) for film in ("swift", "slow", "long", "other")]
    air = plant(loop * 3)
    watch = new_monitor()
    sizes = []
    for begin in range(0, len(air), 40):
        alerts_of(watch, air, begin, begin + 40)
        sizes.append(len(watch.snapshot({})))
    assert max(sizes) < 600_000
    assert max(sizes[-4:]) < 1.5 * max(sizes[4:8])


def test_what_was_not_seen_between_two_lives_is_a_gap() -> None:
    air = plant(COPY)
    first = new_monitor()
    alerts_of(first, air, 0, 25)
    second = new_monitor()
    second.restore(first.snapshot({}))
    missed = PlantedStream([replace(air.samples[30], gap_reason="restart"), *air.samples[31:]], air.rows[30:])
    alerts = alerts_of(second, missed) + second.finish()
    assert alerts[-1].gaps == (Gap(25, 5, "restart"),)


def test_another_model_begins_anew_with_an_honest_gap() -> None:
    air = plant(COPY)
    first = new_monitor()
    alerts_of(first, air, 0, 20)
    second = new_monitor(by=Models(Encoder(list, "another"), plain_net()))
    with pytest.raises(SnapshotRefused, match="model") as refused:
        second.restore(first.snapshot({"second": 19}))
    assert refused.value.notes is not None
    assert refused.value.notes["position"] == {"second": 19}
    later = PlantedStream([replace(air.samples[24], gap_reason="restart"), *air.samples[25:]], air.rows[24:])
    alerts = alerts_of(second, later) + second.finish()
    assert alerts[-1].gaps == (Gap(20, 4, "restart"),)


def test_a_reference_that_went_while_nobody_watched_ends_its_alert_with_the_reason() -> None:
    air = plant(COPY)
    first = new_monitor()
    started = alerts_of(first, air, 0, 25)[-1]
    second = new_monitor(("other", "slow"))
    (ended,) = second.restore(first.snapshot({})).alerts
    assert (ended.id, ended.type, ended.reason) == (started.id, ENDED, "reference removed")
    assert (ended.title, ended.channel_start) == ("Swift", started.channel_start)
    assert alerts_of(second, air, 25) + second.finish() == []


@dataclass(frozen=True, slots=True, eq=False)
class _One:
    number: int
    rows: NDArray[np.float32]


def test_a_flipped_byte_is_never_read() -> None:
    content = pack(_One(7, np.arange(12, dtype=np.float32).reshape(3, 4)), {}, {"note": 1})
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 0x40
        with pytest.raises(SnapshotRefused):
            unpack(_One, bytes(damaged), {})
        with pytest.raises(SnapshotRefused):
            unpack(_One, content[:place], {})
    one, notes = unpack(_One, content, {})
    assert (one.number, one.rows.tolist(), notes) == (7, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]], {"note": 1})


@given(body=st.binary(max_size=200))
def test_bytes_of_others_are_refused_and_nothing_else_happens(body: bytes) -> None:
    for content in (body, MAGIC + body, MAGIC + hashlib.sha256(body).digest() + body):
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


def test_a_snapshot_of_a_newer_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshots, "__version__", "99.0")
        content = pack(_One(7, np.zeros(3, np.float32)), {"model": "a"}, {"position": {"offset": 5}})
    with pytest.raises(SnapshotRefused, match=r"its version is 99\.0, not ") as refused:
        unpack(_One, content, {"model": "a"})
    assert refused.value.notes == {"position": {"offset": 5}}
