"""A seeded sample of what `scripts/chaos.py storage` runs in full: killed writers, failing disks, faulty writers."""

import pytest

from reference_db.store import sqlite
from tests.chaos import power, random_kills, storage
from tests.chaos.operations import INCORRECT, OPERATIONS, Operation

pytestmark = pytest.mark.system  # strace

SYNCS = ("fsync", "fdatasync", "rename", "unlink", "pwrite64")  # a kill between any two of these reveals a wrong order


def test_a_writer_killed_at_any_system_call_leaves_the_library_whole() -> None:
    tally = storage.kill_points(OPERATIONS, sample=9, seed=1)
    assert tally.failures == []
    assert tally.n_hit == tally.n_trials == 9 * len(OPERATIONS)


@pytest.mark.parametrize("operation", INCORRECT, ids=lambda operation: operation.name)
def test_writers_that_break_the_order_are_caught(operation: Operation) -> None:
    tally = storage.kill_points([operation], sample=14, seed=1, calls=SYNCS)
    assert tally.failures


def test_a_failing_disk_is_reported_and_damages_nothing() -> None:
    tally = storage.disk_faults(OPERATIONS, sample=10, seed=1)
    assert tally.failures == []
    assert tally.n_hit >= 30


@pytest.mark.parametrize("name", ["add", "remove"])
def test_nothing_is_written_to_the_catalogue_after_a_sync_of_it_failed(name: str) -> None:
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    wrote = storage.writes_after_failed_syncs(operation)
    assert len(wrote) >= 4
    assert not any(wrote.values()), wrote


def test_a_writer_killed_at_any_moment_loses_nothing_that_it_acknowledged() -> None:
    tally = random_kills.random_kills(25, seed=1)
    assert tally.failures == []
    assert tally.n_acknowledged >= 10


@pytest.mark.parametrize("with_writer", [False, True], ids=["alone", "with a writer in between"])
@pytest.mark.parametrize("name", ["add", "remove", "replace"])
def test_a_change_that_a_killed_writer_left_in_the_log_appears_whole_or_not_at_all(
    name: str, with_writer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_TIMEOUT_MS", 50)  # the reader that blocks the checkpoint stays
    operation = next(operation for operation in OPERATIONS if operation.name == name)
    pairs = storage.hidden_changes(operation, with_writer)  # every reference is read to its last byte
    states = [state for pair in pairs for state in pair]
    before, after = states[0], states[-1]
    assert before != after
    assert {(seen == after, later == after) for seen, later in pairs} >= {(False, False), (True, True)}
    assert all(later == after or seen == before == later for seen, later in pairs)
    if not with_writer:
        assert (before, after) in pairs, "no kill fell between the write to the log and its commit"


def test_a_second_writing_process_is_refused_with_a_sentence() -> None:
    assert "Another process is changing the library" in storage.two_writers()


def test_a_power_cut_at_any_moment_loses_nothing_that_was_acknowledged() -> None:
    tally = power.cuts(OPERATIONS, 15, seed=1)
    assert tally.failures == []
    assert tally.n_acknowledged >= 10


@pytest.mark.parametrize("forgotten", power.FORGOTTEN)
def test_a_forgotten_sync_is_caught(forgotten: str) -> None:
    operations = [operation for operation in OPERATIONS if operation.name in ("first", "add", "remove")]
    assert power.cuts(operations, 30, seed=1, forgotten=forgotten).failures
