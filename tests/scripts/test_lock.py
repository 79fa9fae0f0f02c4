"""The lock file of the image: every library that it installs, in the tested version, with hashes of wheels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from lock import ALSO, APART, LOCK, dependencies, is_usable, pinned_versions

ROOT = Path(__file__).parent.parent.parent
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()


def locked() -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by name."""
    entries = re.findall(r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", LOCK.read_text(), re.M)
    return {name: (version, re.findall(r"[0-9a-f]{64}", hashes)) for name, version, hashes in entries}


def test_the_lock_has_exactly_what_the_image_needs_in_the_tested_versions() -> None:
    pins = pinned_versions((ROOT / "scripts/constraints.txt").read_text())
    wanted = {name: pins[name] for name in (dependencies() | ALSO) & pins.keys() - APART}
    assert {name: version for name, (version, _) in locked().items()} == wanted, "run scripts/lock.py"
    assert LOCK.read_text().count("==") == len(wanted)
    assert all(hashes == sorted(set(hashes)) for _, hashes in locked().values())


def test_the_image_installs_nothing_without_a_hash_but_torch() -> None:
    installs = re.findall(r"pip install((?:.*\\\n)*.*)", DOCKERFILE)
    assert len(installs) == 3
    assert ["--require-hashes" in one or "--no-index" in one for one in installs] == [True, True, True]
    assert "${TORCH_SHA256:+--require-hashes" in installs[1]


@pytest.mark.parametrize(("sha256", "line"), [("", "torch==V"), ("ab12", "torch==V --hash=sha256:ab12")])
def test_the_hash_of_torch_is_checked_if_it_is_given(sha256: str, line: str) -> None:
    (command,) = re.findall(r"&& (sed -n .*) > torch\.txt", DOCKERFILE)
    environment = {**os.environ, "TORCH_SHA256": sha256}
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
    assert re.sub(r"==\S+", "==V", done.stdout.strip()) == line


@pytest.mark.parametrize(
    ("file", "usable"),
    [
        ("a-1.0-py3-none-any.whl", True),
        ("a-1.0-cp311-cp311-manylinux_2_28_aarch64.whl", True),
        ("a-1.0-cp39-abi3-manylinux2014_x86_64.manylinux_2_17_x86_64.whl", True),
        ("a-1.1-py3-none-any.whl", False),
        ("a-1.0-cp311-cp311-win_amd64.whl", False),
        ("a-1.0-cp311-cp311-musllinux_1_2_x86_64.whl", False),
        ("a-1.0-cp39-cp39-manylinux_2_28_x86_64.whl", False),
        ("a-1.0.tar.gz", False),
    ],
)
def test_wheels_for_the_image(file: str, usable: bool) -> None:
    assert is_usable(file, "1.0") is usable


def test_it_asks_for_an_index() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts/lock.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage" in done.stderr
