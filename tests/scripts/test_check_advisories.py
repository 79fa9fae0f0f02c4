"""The check of pinned versions against advisories: found, none, pages, and a source that does not answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from check_advisories import ACCEPTED, AFFECTED, CONSTRAINTS, OK, UNREACHABLE, main, pinned_versions

ADVISORIES = {("jinja2", "2.4.1"): ["PYSEC-1", "GHSA-2", "PYSEC-3"]}
PAGE = 2


class _Source(BaseHTTPRequestHandler):
    """A source of advisories with the API of OSV and two advisories on a page."""

    def do_POST(self) -> None:
        queries = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        body = json.dumps({"results": [self._result(query) for query in queries]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def _result(self, query: dict[str, Any]) -> dict[str, Any]:
        ids = ADVISORIES.get((query["package"]["name"], query["version"]), [])
        first = int(query.get("page_token", 0))
        page: dict[str, Any] = {"vulns": [{"id": id} for id in ids[first : first + PAGE]]} if ids else {}
        return page | ({"next_page_token": str(first + PAGE)} if len(ids) > first + PAGE else {})

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def source() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Source)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def pins(tmp_path: Path, text: str) -> str:
    path = tmp_path / "constraints.txt"
    path.write_text(text)
    return str(path)


def test_an_affected_version_is_named(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = pins(tmp_path, "# words\nanyio==4.0  # a reason\njinja2==2.4.1\n")
    assert main(["--source", source, "--constraints", file]) == AFFECTED
    assert capsys.readouterr().out == (
        "jinja2 2.4.1: GHSA-2, PYSEC-1, PYSEC-3\nAdvisories: 1 of 2 pinned packages are affected.\n"
    )


def test_an_accepted_advisory_is_no_fault(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for id in ("PYSEC-1", "GHSA-2", "PYSEC-3"):
        monkeypatch.setitem(ACCEPTED, id, "the function is not called")
    assert main(["--source", source, "--constraints", pins(tmp_path, "jinja2==2.4.1\n")]) == OK


def test_the_versions_of_this_repository_are_sent(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--source", source, "--json"]) == OK
    assert json.loads(capsys.readouterr().out)["checked"] == len(pinned_versions(CONSTRAINTS.read_text())) > 50


def test_a_source_that_does_not_answer_is_said_clearly(tmp_path: Path) -> None:
    script = Path(CONSTRAINTS).with_name("check_advisories.py")
    done = subprocess.run([sys.executable, script, "--source", "http://127.0.0.1:9"], capture_output=True, text=True)
    assert done.returncode == UNREACHABLE
    assert "Advisories: NOT CHECKED, http://127.0.0.1:9 does not answer (" in done.stderr


def test_pins_are_read_without_comments_and_local_versions() -> None:
    assert pinned_versions("a==1.0  # x\n# b==2\nc.d-e==3.0+cpu\nf>=4\n") == {"a": "1.0", "c.d-e": "3.0"}
