"""A process is known by more than its number."""

from __future__ import annotations

import subprocess
import sys

import pytest

from monitor.ops import process_identity as process_identity_module
from monitor.ops.process_identity import is_gone, process_identity


def test_this_process_is_not_gone() -> None:
    assert is_gone(process_identity()) is False
    assert process_identity() == process_identity()


def test_a_process_that_ended_is_gone() -> None:
    program = "from monitor.ops.process_identity import process_identity; print(process_identity(), end='')"
    identity = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert identity.split(" ")[:2] == process_identity().split(" ")[:2]
    assert is_gone(identity) is True


def test_a_process_that_is_hidden_but_exists_cannot_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_identity_module, "_start_time", lambda pid: None)  # as /proc of another user
    boot, namespace, pid, _ = process_identity().split(" ")
    assert is_gone(f"{boot} {namespace} {pid} 1") is None


def test_a_reused_number_is_another_process() -> None:
    boot, namespace, pid, started = process_identity().split(" ")
    assert is_gone(f"{boot} {namespace} {pid} {int(started) - 1}") is True


def test_another_boot_is_gone_and_another_container_cannot_be_seen() -> None:
    boot, namespace, pid, started = process_identity().split(" ")
    assert is_gone(f"another-boot {namespace} {pid} {started}") is True
    assert is_gone(f"{boot} 1 {pid} {started}") is None
