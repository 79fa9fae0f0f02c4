"""Quality reports: computed by a child process, once for a generation of the library."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from monitor.web import quality_reports
from reference_db.store.catalog import Catalog, ReferenceId
from tests.support.long_reference import add_long_reference
from tests.support.web_only import WebAppServer
from tests.support.web_server import TIMEOUT_S

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WebAppServer]:
    monkeypatch.setattr(quality_reports, "WAIT_S", TIMEOUT_S)  # a busy machine takes longer than a request waits
    add_long_reference(tmp_path, "enc-1", "film", 60, seed=1)
    with WebAppServer(tmp_path) as opened:
        yield opened


def overlaps(shown: dict[str, Any]) -> list[str]:
    return [warning for warning in shown["warnings"] if "look like" in warning]


def test_overlaps_follow_the_library(server: WebAppServer, tmp_path: Path) -> None:
    client = server.client()
    with ThreadPoolExecutor(4) as pool:  # these share one report
        shown = list(pool.map(lambda _: client.get("/references/film"), range(4)))
    assert [overlaps(one) for one in shown] == [[]] * 4
    add_long_reference(tmp_path, "enc-1", "copy", 40, seed=1)
    assert overlaps(client.get("/references/film")) == [
        "67% of its seconds look like copy; a copy of one may raise alerts for both."
    ]
    assert overlaps(client.get("/references/copy")) == [
        "100% of its seconds look like film; a copy of one may raise alerts for both."
    ]
    with Catalog.open(tmp_path, write=True) as catalog:
        catalog.remove(ReferenceId("copy"))
    assert overlaps(client.get("/references/film")) == []


def test_a_report_that_takes_long_is_announced_and_comes_later(
    server: WebAppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality_reports, "WAIT_S", 0.0)
    client = server.client()
    first = client.get("/references/film")
    assert first["warnings"][0].startswith("Overlaps with other references are still being searched")
    assert (first["state"], first["longest_static_s"]) == ("ready", 1)
    monkeypatch.setattr(quality_reports, "WAIT_S", TIMEOUT_S)
    assert client.get("/references/film")["warnings"] == []


def test_a_reference_is_shown_even_if_the_child_fails(server: WebAppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHOME", "/missing")  # with which no interpreter starts
    shown = server.client().get("/references/film")
    assert (shown["state"], shown["warnings"]) == ("ready", ["Overlaps with other references could not be searched."])
    monkeypatch.delenv("PYTHONHOME")
    assert server.client().get("/references/film")["warnings"] == []


def test_a_damaged_reference_is_shown_as_quarantined(server: WebAppServer, tmp_path: Path) -> None:
    add_long_reference(tmp_path, "enc-1", "other", 40, seed=2)
    with Catalog.open(tmp_path) as catalog:
        path = catalog.features_path(catalog.get(ReferenceId("film")))
    path.write_bytes(b"damaged")
    assert server.client().get("/references/film")["state"] == "quarantined"
    assert server.client().get("/references/other")["warnings"] == [
        "Reference film is damaged and was not compared: its feature file has changed on disk."
    ]
