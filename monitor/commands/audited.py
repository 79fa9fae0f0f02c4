"""Changes by the command line in the audit log: recorded before they are made, and completed with their result."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monitor.audit.log import Actor, AuditLog, Change, Value


@dataclass
class Recording:
    """The entry of a command that runs; the command adds what it knows only afterwards."""

    _log: AuditLog
    _change: Change
    object: str | None
    details: dict[str, Value] = field(default_factory=dict)
    failed: bool = False
    _has_entries: bool = False

    def add(self, object: str, **details: Value) -> None:
        """Records one of several changes at once; the command then needs no entry of its own."""
        self._log.append(replace(self._change, object=object, details=details))
        self._has_entries = True


@contextmanager
def audited(
    data_dir: Path,
    action: str,
    object: str | None = None,
    *,
    about: str | None = None,
    alerts: Sequence[str] = (),
    **details: Value,
) -> Iterator[Recording]:
    """Records the change that the block makes. Raises AuditFailed, before the block runs, if it cannot be recorded."""
    from monitor.audit.log import DONE, FAILED, AuditLog, Change

    log = AuditLog(data_dir)
    change = Change(
        action=action, actor=this_user(), object=object, about=about, alerts=tuple(alerts), details={**details}
    )
    pending = log.begin(change)
    recording = Recording(log, change, object, {**details})
    try:
        yield recording
    except BaseException:
        log.finish(pending, replace(change, object=recording.object, details=recording.details, result=FAILED))
        raise
    if recording._has_entries:
        log.discard(pending)
    else:
        result = FAILED if recording.failed else DONE
        log.finish(pending, replace(change, object=recording.object, details=recording.details, result=result))


def this_user() -> Actor:
    """The user of the system who runs the command; under sudo, the one who called it."""
    from monitor.audit.log import Actor

    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # as in a container
        name = f"uid {os.getuid()}"
    if os.getuid() == 0:
        name = os.environ.get("SUDO_USER") or name
    return Actor(name, "local", "cli")
