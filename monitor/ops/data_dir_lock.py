"""The lock of a data folder: one monitor at a time, and no upgrade of a file while an older monitor uses it.

The lock is held on `alerts.lock` and goes with the process that holds it. The name is that of the first version, so
that monitors of every version exclude each other.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from monitor.errors import ConfigError
from reference_db.store.disk import try_lock

FILE = "alerts.lock"
UPGRADE_S = 5.0  # an upgrade takes milliseconds; a lock held for longer than this is a running monitor's
RETRY_S = 0.02


def take_lock(data_dir: Path) -> int | None:
    """An open descriptor that holds the lock until it is closed; None if another process has it. Raises OSError."""
    return try_lock(data_dir / FILE)


@contextmanager
def lock_for_upgrade(data_dir: Path, is_done: Callable[[], bool]) -> Iterator[bool]:
    """Holds the lock; yields False if another process has done the upgrade meanwhile.

    Raises ConfigError while a monitor of an older version runs on the folder, OSError where the disk fails.
    """
    until = time.monotonic() + UPGRADE_S
    while (descriptor := take_lock(data_dir)) is None:
        if is_done():
            yield False
            return
        if time.monotonic() > until:
            raise ConfigError(
                f"A monitor of an older Copywatch is running on {data_dir}; stop it, then start this version."
            )
        time.sleep(RETRY_S)
    try:
        yield not is_done()
    finally:
        os.close(descriptor)
