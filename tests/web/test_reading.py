"""The API of a running monitor: system, channels, references, alerts."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import zipfile

import pytest

from monitor.alerting.alerts import Alert
from monitor.web.alert_views import AlertOut
from tests.support.web_server import Client

RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")


def test_system(client: Client) -> None:
    system = client.get("/system")
    assert system["references"] == 2
    assert system["reference_seconds"] == 80
    assert system["index"]["kind"] == "exact"
    assert system["index"]["seconds"] > 70
    assert system["problems"] == {}
    assert system["channels"]["ended"] == 1  # the recording
    assert sum(system["channels"].values()) == 2
    assert system["backlog"]["log"] == 0
    assert 4 <= system["metrics"]["detection_latency_p95_s"] <= 60
    assert RFC3339.fullmatch(system["started_at"])
    assert RFC3339.fullmatch(system["index"]["refreshed_at"])


def test_channels_are_shown_without_their_credentials(client: Client) -> None:
    broken, works = client.get("/channels")["items"]
    assert (broken["name"], works["name"]) == ("broken", "works")
    assert broken["url"] == "http://***@127.0.0.1:9/nothing.m3u8?token=***"
    assert broken["state"] in ("starting", "failed")
    assert works["state"] == "ended"
    assert RFC3339.fullmatch(works["last_second_at"])
    assert client.get("/channels/works")["name"] == "works"
    assert client("GET", "/api/v1/channels/nobody").status == 404


def test_lists_are_paged(client: Client) -> None:
    first = client.get("/references?limit=1")
    second = client.get(f"/references?limit=1&cursor={first['next']}")
    assert [one["id"] for one in first["items"] + second["items"]] == ["garden", "harbour"]
    assert second["next"] is None
    assert client("GET", "/api/v1/references?cursor=%00").status == 400
    assert client("GET", "/api/v1/alerts?cursor=aGFsbG8").status == 400
    assert client("GET", "/api/v1/alerts?limit=0").status == 422


def test_references_are_searched_and_shown(client: Client) -> None:
    assert [one["id"] for one in client.get("/references?q=HARB")["items"]] == ["harbour"]
    assert client.get("/references?owner=nobody")["items"] == []
    assert client.get("/references?tag=nothing")["items"] == []
    while (harbour := client.get("/references/harbour"))["shortest_findable_s"] is None:
        assert "still being searched" in harbour["warnings"][0]  # a busy machine takes longer than a request waits
    assert harbour["seconds"] == 40
    assert harbour["state"] == "ready"
    assert harbour["has_thumbnails"]
    assert 0 <= harbour["low_information_share"] < 1
    assert 2 <= harbour["shortest_findable_s"] <= 12
    assert 0 <= harbour["still_share"] <= 1
    assert 0 <= harbour["repeated_share"] <= 1
    picture = client("GET", "/api/v1/references/harbour/thumbnails/7")
    assert picture.headers["content-type"] == "image/jpeg"
    assert picture.body.startswith(b"\xff\xd8")
    assert client("GET", "/api/v1/references/harbour/thumbnails/40").status == 404


def test_alerts_newest_first_with_their_story(client: Client) -> None:
    newest, oldest = client.get("/alerts")["items"]
    assert (oldest["reference"], newest["reference"]) == ("harbour", "garden")
    assert newest["status"] == "ended"
    assert newest["channel_start"] == pytest.approx(50.3, abs=2)
    story = client.get(f"/alerts/{newest['id']}")
    assert story["reference_seconds"] == 40
    assert story["events"][0]["type"] == "alert.started"
    assert [one["seq"] for one in story["events"]] == list(range(1, len(story["events"]) + 1))
    assert client("GET", "/api/v1/alerts/" + 24 * "0").status == 404


@pytest.mark.parametrize(
    ("filters", "n"),
    [
        ("channel=works", 2),
        ("channel=other", 0),
        ("reference=harbour", 1),
        ("owner=nobody", 0),
        ("status=ended", 2),
        ("status=open", 0),
        ("status=retracted", 0),
        ("licensed=true", 0),
        ("licensed=false", 2),
        ("min_confidence=0.0", 2),
        ("min_confidence=1", 0),
        ("since=2020-01-01T00:00:00Z", 2),
        ("until=2020-01-01T00:00:00%2B02:00", 0),
        ("limit=1&status=ended", 1),
    ],
)
def test_alerts_are_filtered(client: Client, filters: str, n: int) -> None:
    assert len(client.get(f"/alerts?{filters}")["items"]) == n


def test_an_alert_is_shown_with_all_its_fields() -> None:
    names = {field.name for field in dataclasses.fields(Alert)}
    assert names <= AlertOut.model_fields.keys()


def test_every_error_is_a_problem(client: Client) -> None:
    for path in ("/api/v1/nothing", "/api/v1/alerts/xyz", "/api/v1/references/nobody", "/api/v1/alerts?status=odd"):
        reply = client("GET", path)
        assert reply.headers["content-type"] == "application/problem+json"
        problem = reply.json
        assert problem["status"] == reply.status
        assert problem["instance"] == path.partition("?")[0]
        assert problem["detail"].endswith(".")
    assert client("POST", "/api/v1/alerts").status == 405


def test_an_archive_carries_the_requested_time_zone(client: Client) -> None:
    id = client.get("/alerts")["items"][0]["id"]
    with zipfile.ZipFile(io.BytesIO(client("GET", f"/api/v1/alerts/{id}/export?time_zone=Asia/Tokyo").body)) as archive:
        assert json.loads(archive.read(f"{id}/manifest.json"))["viewer"]["time_zone"] == "Asia/Tokyo"
    for zone in ("Mars/Olympus", "Europe", "../../etc/passwd", "/etc/localtime", "a%00b", "%F0%9F%95%92"):
        reply = client("GET", f"/api/v1/alerts/{id}/export?time_zone={zone}")
        assert (reply.status, reply.headers["content-type"]) == (400, "application/problem+json"), zone
        assert reply.json["detail"] == "Unknown time zone; use a name like `Europe/Berlin`."
    assert client("GET", f"/api/v1/alerts/{id}/export?time_zone={'x' * 65}").status == 422


def test_security_headers(client: Client) -> None:
    headers = client("GET", "/api/v1/system").headers
    assert "default-src 'self'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
