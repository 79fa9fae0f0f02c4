"""ESLint over the dashboard's JavaScript, in the versions of lint/package-lock.json."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LINT = Path(__file__).parent / "lint"
SOURCES = ("monitor/web/dashboard", "tests/support/readable.js")
pytestmark = pytest.mark.system  # node and npm


def installed() -> Path:
    """A folder outside the repository with ESLint and its configuration, installed once per lock file."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    cache = base if base.is_absolute() else Path.home() / ".cache"
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(LINT.iterdir()))).hexdigest()[:16]
    folder = cache / "copywatch" / f"eslint-{digest}"
    if not folder.is_dir():
        unfinished = folder.with_name(f"{folder.name}-{os.getpid()}")
        shutil.copytree(LINT, unfinished)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], cwd=unfinished, check=True)
        unfinished.rename(folder)
    return folder


def lint(*arguments: str, source: str = "") -> subprocess.CompletedProcess[str]:
    folder = installed()
    eslint, config = str(folder / "node_modules/.bin/eslint"), str(folder / "eslint.config.js")
    return subprocess.run(
        [eslint, "--config", config, "--max-warnings", "0", *arguments],
        cwd=REPOSITORY,
        input=source,
        capture_output=True,
        text=True,
    )


def test_the_dashboard_has_no_findings() -> None:
    done = lint(*SOURCES)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


def test_an_unused_variable_is_found() -> None:
    done = lint("--stdin", source="const unused = 1;\n")
    assert done.returncode == 1
    assert "no-unused-vars" in done.stdout


def test_the_lock_file_names_no_registry() -> None:
    assert '"resolved"' not in (LINT / "package-lock.json").read_text()
