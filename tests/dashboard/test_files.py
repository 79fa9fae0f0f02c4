"""The dashboard's files: all are shipped, served unchanged, and under a policy that runs nothing else."""

from __future__ import annotations

import fnmatch
import re
import tomllib
from pathlib import Path

import pytest

from monitor.web.dashboard import FOLDER, KINDS, POLICY
from tests.support.web_server import MonitorServer

FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in KINDS)
PAGES = [path for path in FILES if path.suffix == ".js"]


def test_every_file_is_in_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["monitor.web.dashboard"]
    others = {path.name for path in FOLDER.iterdir() if path.is_file()} - {path.name for path in FILES}
    assert others <= {"__init__.py"}
    assert [path.name for path in FILES if not any(fnmatch.fnmatch(path.name, one) for one in patterns)] == []


@pytest.mark.slow
def test_files_are_served_unchanged_with_the_policy(hostile: MonitorServer) -> None:
    client = hostile.client()
    for path in FILES:
        reply = client("GET", "/" if path.name == "index.html" else f"/assets/{path.name}")
        assert reply.body == path.read_bytes()
        assert reply.headers["content-type"] == KINDS[path.suffix]
        assert reply.headers["content-security-policy"] == POLICY
        again = client("GET", f"/assets/{path.name}", headers={"If-None-Match": reply.headers["etag"]})
        assert (again.status, again.body) == (304, b"")


@pytest.mark.slow
def test_other_files_are_not_served(hostile: MonitorServer) -> None:
    names = ("__init__.py", "../api.py", "..%2fapi.py", "%2e%2e%2fapi.py", "nothing.js", ".", "")
    assert {hostile.client()("GET", f"/assets/{name}").status for name in names} == {404}


def test_text_never_becomes_markup() -> None:
    """The policy refuses it in the browser; the code does not even try."""
    markup = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc"
    )
    assert [path.name for path in PAGES if markup.search(path.read_text())] == []


def test_nothing_is_loaded_from_other_hosts() -> None:
    other_hosts = re.compile(r"https?://(?!www\.w3\.org/2000/svg|example\.org|…)")
    assert [path.name for path in FILES if other_hosts.search(path.read_text())] == []
