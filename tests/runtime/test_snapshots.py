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
from tests.support.planted_channels import Air, Part, aired, new_watch, parts, told, trained
from tests.support.planted_features import plain_net

COPY = [Part(10, noise=1.0), Part(30, "swift", 20), Part(30, noise=1.0)]


def whole(air: Air) -> list[Alert]:
    watch = new_watch()
    return told(watch, air) + watch.finish()


@settings(max_examples=30, deadline=None)
@given(parts=parts(), seed=st.integers(0, 3), data=st.data())
def test_any_number_of_restarts_anywhere_changes_nothing(parts: list[Part], seed: int, data: st.DataObject) -> None:
    air = aired(parts, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(air)), max_size=5)))
    watch, alerts = new_watch(), []
    for begin, end in pairwise([0, *cuts, len(air)]):
        alerts += told(watch, air, begin, end)
        position = {"second": end}
        content = watch.snapshot(position)
        watch = new_watch()
        resumed = watch.restore(content)
        assert (resumed.position, resumed.alerts) == (position, [])
        assert watch.snapshot(position) == content
    assert alerts + watch.finish() == whole(air)


def test_a_copy_goes_on_under_its_id_over_a_restart() -> None:
    air = aired(COPY)
    first = new_watch(by=trained())
    before = told(first, air, 0, 25)
    second = new_watch(by=trained())
    second.restore(first.snapshot({}))
    after = told(second, air, 25) + second.finish()
    assert [alert.type for alert in before + after if alert.type != UPDATED] == [STARTED, ENDED]
    assert before[0].type == STARTED
    assert len({alert.id for alert in before + after}) == 1
    assert after[-1].seq == len(before) + len(after)


def test_a_snapshot_stays_small_whatever_airs() -> None:
    loop = [Part(20, film, start) for start in (0, 20) for film in ("swift", "slow", "long", "other")]
    air = aired(loop * 3)
    watch = new_watch()
    sizes = []
    for begin in range(0, len(air), 40):
        told(watch, air, begin, begin + 40)
        sizes.append(len(watch.snapshot({})))
    assert max(sizes) < 600_000
    assert max(sizes[-4:]) < 1.5 * max(sizes[4:8])


def test_what_was_not_seen_between_two_lives_is_a_gap() -> None:
    air = aired(COPY)
    first = new_watch()
    told(first, air, 0, 25)
    second = new_watch()
    second.restore(first.snapshot({}))
    missed = Air([replace(air.samples[30], gap_reason="restart"), *air.samples[31:]], air.rows[30:])
    alerts = told(second, missed) + second.finish()
    assert alerts[-1].gaps == (Gap(25, 5, "restart"),)


def test_another_model_begins_anew_with_an_honest_gap() -> None:
    air = aired(COPY)
    first = new_watch()
    told(first, air, 0, 20)
    second = new_watch(by=Models(Encoder(list, "another"), plain_net()))
    with pytest.raises(SnapshotRefused, match="model") as refused:
        second.restore(first.snapshot({"second": 19}))
    assert refused.value.notes is not None
    assert refused.value.notes["position"] == {"second": 19}
    later = Air([replace(air.samples[24], gap_reason="restart"), *air.samples[25:]], air.rows[24:])
    alerts = told(second, later) + second.finish()
    assert alerts[-1].gaps == (Gap(20, 4, "restart"),)


def test_a_reference_that_went_while_nobody_watched_ends_its_alert_with_the_reason() -> None:
    air = aired(COPY)
    first = new_watch()
    started = told(first, air, 0, 25)[-1]
    second = new_watch(("other", "slow"))
    (ended,) = second.restore(first.snapshot({})).alerts
    assert (ended.id, ended.type, ended.reason) == (started.id, ENDED, "reference removed")
    assert (ended.title, ended.channel_start) == ("Swift", started.channel_start)
    assert told(second, air, 25) + second.finish() == []


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
    with pytest.raises(SnapshotRefused, match="the most"):
        unpack(_One, content + bytes(MAX_BYTES), {"model": "a"})


def test_a_snapshot_of_a_newer_version_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as newer:
        newer.setattr(snapshots, "__version__", "99.0")
        content = pack(_One(7, np.zeros(3, np.float32)), {"model": "a"}, {"position": {"offset": 5}})
    with pytest.raises(SnapshotRefused, match=r"its version is 99\.0, not ") as refused:
        unpack(_One, content, {"model": "a"})
    assert refused.value.notes == {"position": {"offset": 5}}
