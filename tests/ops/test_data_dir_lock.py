"""The lock of a data folder: one holder, released when its process ends, waited for by upgrades."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from monitor.errors import ConfigError
from monitor.ops import data_dir_lock
from monitor.ops.data_dir_lock import lock_for_upgrade, take_lock


def test_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    first = take_lock(tmp_path)
    assert first is not None
    assert take_lock(tmp_path) is None
    os.close(first)
    second = take_lock(tmp_path)
    assert second is not None
    os.close(second)


def test_an_upgrade_waits_for_one_under_way_and_is_then_not_needed(tmp_path: Path) -> None:
    done, waiting = threading.Event(), threading.Event()
    needed: list[bool] = []

    def upgrade() -> None:
        def is_done() -> bool:
            waiting.set()
            return done.is_set()

        with lock_for_upgrade(tmp_path, is_done) as is_needed:
            needed.append(is_needed)

    with lock_for_upgrade(tmp_path, done.is_set) as is_needed:
        assert is_needed
        other = threading.Thread(target=upgrade)
        other.start()
        assert waiting.wait(60)
        done.set()
    other.join()
    assert needed == [False]


def test_an_upgrade_is_refused_while_a_monitor_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_dir_lock, "UPGRADE_S", 0.1)
    held = take_lock(tmp_path)
    assert held is not None
    with pytest.raises(ConfigError, match="older Copywatch is running"), lock_for_upgrade(tmp_path, lambda: False):
        pass
    os.close(held)
