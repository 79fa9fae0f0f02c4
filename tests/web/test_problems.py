"""Problems: what an error of ours tells a client."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from monitor.web.requests.problems import hide_paths
from tests.support.web_only import WebAppServer


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            "/var/lib/copywatch/rights.sqlite cannot be used (disk I/O error)",
            "rights.sqlite cannot be used (disk I/O error)",
        ),
        ("The library in /data cannot be used; set data_dir.", "The library in data cannot be used; set data_dir."),
        ("/config/copywatch.yaml:3: unknown key", "copywatch.yaml:3: unknown key"),
        ("http://host/a/b answers 404", "http://host/a/b answers 404"),
        ("read /api/v1/channels and/or wait 1/2 s", "read /api/v1/channels and/or wait 1/2 s"),
    ],
)
def test_paths_of_the_machine_are_cut_to_their_last_part(text: str, shown: str) -> None:
    assert hide_paths(text) == shown


def test_a_failing_disk_is_reported_without_its_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with WebAppServer(tmp_path) as server, caplog.at_level(logging.WARNING):
        (tmp_path / "rights.sqlite").mkdir()
        reply = server.client()("POST", "/api/v1/licences", {"owner": "ACME"})
    assert reply.status == 503
    assert "rights.sqlite" in reply.json["detail"]
    assert str(tmp_path) not in str(reply.json)
    assert str(tmp_path / "rights.sqlite") in caplog.text
