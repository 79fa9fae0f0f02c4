"""The data folder is for its owner only: permissions of everything in it, and locks that no other user can hold."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from monitor.alerting.outbox import Outbox
from monitor.config.config_file import add_channel
from monitor.config.settings import ChannelSettings
from monitor.errors import ConfigError
from monitor.evidence.store import EvidenceStore
from monitor.ops.data_dir_lock import take_lock
from monitor.rights.store import RightsStore
from monitor.web.auth.tokens import LOCK_FILE, Tokens
from reference_db.store import disk
from reference_db.store.catalog import Catalog
from reference_db.store.disk import lock_for_writing
from tests.support.sample_references import some_features, some_reference


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Another user's lock on a file or folder that it can open."""
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def test_only_the_owner_can_read_what_the_data_folder_contains(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Catalog.open(data, write=True) as catalog:
        catalog.add(some_reference(), some_features(10))
    Outbox.open(data, ()).close()
    RightsStore(data).add_licence(owner="ACME")
    Tokens(data).add("ada", "admin")
    EvidenceStore(data).write("a" * 24, {}, {}, last=True)
    modes = {path.relative_to(tmp_path): path.stat().st_mode & 0o777 for path in [data, *data.rglob("*")]}
    assert len(modes) > 8
    assert {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077} == {}


def test_locks_of_an_earlier_version_are_closed_to_other_users(tmp_path: Path) -> None:
    for name in ("writer.lock", "alerts.lock"):
        (tmp_path / name).touch(0o644)
    os.close(lock_for_writing(tmp_path))
    os.close(take_lock(tmp_path) or -1)
    for name in ("writer.lock", "alerts.lock"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


def test_a_lock_on_the_folder_does_not_stop_a_change_of_tokens(tmp_path: Path) -> None:
    with held(tmp_path):
        Tokens(tmp_path).add("ada", "admin")
        Tokens(tmp_path).remove("ada")
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o600


def test_waiting_for_a_lock_has_an_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "LOCK_TIMEOUT_S", 0.1)
    (tmp_path / LOCK_FILE).touch()
    started = time.monotonic()
    with held(tmp_path / LOCK_FILE), pytest.raises(ConfigError, match="locked by another process"):
        Tokens(tmp_path).add("ada", "admin")
    with held(tmp_path), pytest.raises(ConfigError, match="locked by another process"):
        add_channel(tmp_path / "c.yaml", ChannelSettings(name="one", url="http://example.org/a.ts"))
    assert time.monotonic() - started >= 0.2
