"""Uploads: registered as jobs, refused if invalid, and never left behind on disk."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from monitor.web import middleware
from monitor.web.auth.tokens import Tokens
from monitor.web.requests.jobs import RUNNING, Jobs, new_id
from monitor.web.requests.multipart import UploadPace
from monitor.web.requests.problems import Problem
from monitor.web.routes import references
from reference_db.library import ReferenceLibrary
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.recorded_channel import RecordedChannel
from tests.support.web_only import WebAppServer
from tests.support.web_server import Client, Reply

BOUNDARY = "----copywatch"
POLL_S = 0.2  # between two polls of a job: polling without a pause would slow it down
HEAD = (
    f"POST /api/v1/references HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
)


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    media.write_clip(path, ((n / 5, media.picture(3, n / 5)) for n in range(60)), fps=5)
    return path.read_bytes()


def form(content: bytes, name: str = "film.mp4", **fields: str | list[str]) -> bytes:
    """A multipart body."""
    parts = []
    for key, values in fields.items():
        for value in [values] if isinstance(values, str) else values:
            parts.append(f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{key}"\r\n\r\n{value}\r\n'.encode())
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n'
    parts.append(head.encode() + b"Content-Type: video/mp4\r\n\r\n" + content + b"\r\n")
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


def send(client: Client, body: bytes, path: str = "/api/v1/references") -> Reply:
    return client("POST", path, raw=body, headers={"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"})


def finished(client: Client, id: str) -> dict[str, Any]:
    """Waits for the job; its final state."""
    while (job := client.get(f"/jobs/{id}"))["state"] in ("waiting", "running"):
        time.sleep(POLL_S)  # as a client polls
    return dict(job)


def test_a_removal_during_a_write_becomes_a_job(
    tmp_path: Path, recorded: RecordedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "BUSY_S", 0.0)
    shutil.copytree(recorded.settings.data_dir, tmp_path / "data")
    with WebAppServer(tmp_path / "data") as server:
        client = server.client()
        with Catalog.open(tmp_path / "data", write=True):
            reply = client("DELETE", "/api/v1/references/harbour")
            job = reply.json["job"]
            assert (reply.status, job["kind"]) == (202, "remove")
            assert reply.headers["location"] == f"/api/v1/jobs/{job['id']}"
            assert client("GET", "/api/v1/references/harbour").status == 200
        done = finished(client, job["id"])
        assert (done["state"], done["result"]["reference"]) == ("done", "harbour")
        assert client("GET", "/api/v1/references/harbour").status == 404
        assert client("DELETE", "/api/v1/references/garden").status == 204
        with Catalog.open(tmp_path / "data", write=True):
            unknown = client("DELETE", "/api/v1/references/harbour").json["job"]["id"]
        assert finished(client, unknown)["state"] == "failed"


def leftover_uploads(server: WebAppServer) -> list[Path]:
    folder = server.context.settings.data_dir / "uploads"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def wait_until(condition: Callable[[], bool]) -> None:
    assert any(condition() for _ in range(1_000_000))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WebAppServer]:
    with WebAppServer(tmp_path) as opened:
        yield opened


def test_a_video_becomes_a_reference(server: WebAppServer, clip: bytes) -> None:
    client = server.client()
    accepted = send(client, form(clip, "..\\..\\<i>Evil Film.mp4", owner="ACME", tags=["territory=EU", "year=2026"]))
    assert accepted.status == 202
    job = accepted.json["job"]
    assert accepted.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert (job["kind"], job["result"]) == ("register", None)
    nice = set()
    while client.get(f"/jobs/{job['id']}")["state"] in ("waiting", "running"):
        nice |= set(_priorities("monitor.roles.registration_child"))
        time.sleep(POLL_S)  # as a client polls
    assert min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10) in nice  # lower priority than the channels
    done = finished(client, job["id"])
    assert (done["state"], done["message"]) == ("done", "added")
    assert (done["result"]["reference"], done["result"]["outcome"]) == ("i-Evil-Film", "added")
    shown = client.get("/references/i-Evil-Film")
    assert (shown["title"], shown["owner"], shown["seconds"]) == ("<i>Evil Film", "ACME", 12)
    assert shown["tags"] == {"territory": "EU", "year": "2026"}
    assert [one["id"] for one in client.get("/jobs")["items"]] == [job["id"]]
    assert leftover_uploads(server) == []
    entries = [one.as_dict() for one in server.context.audit.records()]
    asked, registered = [one for one in entries if one["details"].get("job") == job["id"]]
    assert (asked["action"], asked["status"], asked["via"]) == ("refs add", 202, "api")
    assert (registered["action"], registered["object"], registered["who"]) == ("refs add", "i-Evil-Film", "copywatch")


def _priorities(module: str) -> Iterator[int]:
    """The priorities of processes that run this module."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if module.encode() in (process / "cmdline").read_bytes():
                    yield os.getpriority(os.PRIO_PROCESS, int(process.name))


def test_a_file_that_is_not_a_video_is_refused_at_once(server: WebAppServer, clip: bytes) -> None:
    client = server.client()
    for content in (b"", b"hello", b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", clip[:200], os.urandom(10_000)):
        reply = send(client, form(content))
        assert reply.status == 422, content[:20]
        assert "film.mp4" in reply.json["detail"]
    assert client.get("/jobs")["items"] == []
    assert leftover_uploads(server) == []


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"nonsense", 400),
        (form(b"x")[:-20], 400),
        (f"--{BOUNDARY}--\r\n".encode(), 422),
        (form(b"x", id="../x"), 422),
        (form(b"x", id="a", title="\x07"), 422),
        (form(b"x", tags="novalue"), 422),
        (form(b"x", tags='{"a": 1}'), 422),
        (form(b"x", title=["a", "b"]), 422),
        (form(b"x", title="x" * 10_000), 422),
        (form(b"x", tags=["a=b"] * 200), 422),
    ],
)
def test_an_invalid_form_is_refused(server: WebAppServer, body: bytes, status: int) -> None:
    reply = send(server.client(), body)
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/problem+json"
    assert leftover_uploads(server) == []
    assert server.client()("POST", "/api/v1/references", {"file": "x"}).status == 415


def test_too_long_too_slow_and_interrupted_uploads(
    tmp_path: Path, clip: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 1.0)
    with WebAppServer(tmp_path, max_upload_bytes=100_000) as server:
        assert send(server.client(), form(b"x" * 100_001)).status == 413
        body = form(clip[:50_000])

        def connect(more: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
            connection.sendall(f"{HEAD}{server.bearer}{more}\r\n".encode())
            return connection

        with connect("Content-Length: 10000000000\r\n") as announced, announced.makefile("rb") as response:
            assert b" 413 " in response.readline()  # before any byte of the body
        with connect(f"Content-Length: {len(body)}\r\n") as stalled, stalled.makefile("rb") as response:
            stalled.sendall(body[:1000])
            wait_until(lambda: len(leftover_uploads(server)) == 1)
            assert b" 408 " in response.readline()
        with connect("Transfer-Encoding: chunked\r\n") as endless, endless.makefile("rb") as response:
            piece = b"x" * 60_000
            chunks = [body[:200], piece, piece]
            for chunk in chunks:
                endless.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            assert b" 413 " in response.readline()
        interrupted = connect(f"Content-Length: {len(body)}\r\n")
        interrupted.sendall(body[:1000])
        wait_until(lambda: len(leftover_uploads(server)) == 1)
        interrupted.close()
        wait_until(lambda: leftover_uploads(server) == [])
        assert server.client().get("/jobs")["items"] == []


def test_concurrent_uploads_are_limited(server: WebAppServer) -> None:
    uploads = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)]
    for one in uploads:
        one.sendall(f"{HEAD}{server.bearer}Content-Length: 10000\r\n\r\n".encode() + form(b"x" * 9000)[:500])
    wait_until(lambda: len(leftover_uploads(server)) == 4)
    assert send(server.client(), form(b"x")).status == 429
    for one in uploads:
        one.close()
    wait_until(lambda: leftover_uploads(server) == [])


def test_an_upload_that_would_fill_the_disk_is_refused_before_it_arrives(tmp_path: Path, clip: bytes) -> None:
    with WebAppServer(tmp_path, upload_reserve_bytes=1 << 60) as server:
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        with connection, connection.makefile("rb") as response:
            connection.sendall(f"{HEAD}{server.bearer}Content-Length: 1000000\r\n\r\n".encode())
            assert b" 507 " in response.readline()  # before any byte of the body
        connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
        with connection, connection.makefile("rb") as response:
            connection.sendall(f"{HEAD}{server.bearer}Transfer-Encoding: chunked\r\n\r\n".encode())
            assert b" 507 " in response.readline()
        assert leftover_uploads(server) == []


def test_uploads_have_quotas_in_all_and_by_token(tmp_path: Path) -> None:
    ada, bob = (Tokens(tmp_path).add(name, "write") for name in ("ada", "bob"))
    with (
        Catalog.open(tmp_path, write=True),  # so that the job waits
        WebAppServer(tmp_path, upload_quota_bytes=300_000, upload_token_quota_bytes=200_000) as server,
    ):
        request = {"reference": "film", "by": "ada", "n_bytes": 150_000}
        server.context.registrar.jobs.add(new_id(), "remove", request)
        body = form(b"x" * 80_000)
        reply = send(server.client(ada), body)
        assert (reply.status, reply.json["detail"]) == (
            429,
            "The uploads of ada that are not registered yet may have 200000 bytes; try again later.",
        )
        assert send(server.client(bob), body).status == 422  # received, and not a video
        reply = send(server.client(bob), form(b"x" * 160_000))
        assert (reply.status, reply.json["detail"][:11]) == (429, "All uploads")
        assert leftover_uploads(server) == []


def test_one_token_cannot_take_every_upload(tmp_path: Path) -> None:
    ada, bob = (Tokens(tmp_path).add(name, "write") for name in ("ada", "bob"))
    with WebAppServer(tmp_path) as server:
        uploads = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2)]
        for one in uploads:
            head = f"{HEAD}Authorization: Bearer {ada}\r\nContent-Length: 10000\r\n\r\n"
            one.sendall(head.encode() + form(b"x" * 9000)[:500])
        wait_until(lambda: len(leftover_uploads(server)) == 2)
        assert send(server.client(ada), form(b"x")).status == 429
        assert send(server.client(bob), form(b"x")).status == 422
        for one in uploads:
            one.close()
        wait_until(lambda: leftover_uploads(server) == [])


def test_the_pace_is_that_of_the_last_seconds() -> None:
    pace = UploadPace(max_s=3600.0, started_s=100.0)
    for second in range(10):
        pace.push(101.0 + second, 5_000_000)  # 50 MB at once earn no hours
    pace.push(125.0, 1)
    pace.push(135.0, 1)
    with pytest.raises(Problem, match="too slow"):
        pace.push(141.5, 1)


def test_an_upload_has_a_greatest_duration() -> None:
    pace = UploadPace(max_s=60.0, started_s=0.0)
    for second in range(1, 61):
        pace.push(float(second), 100_000)
    with pytest.raises(Problem, match="takes too long"):
        pace.push(61.0, 100_000)


@pytest.mark.slow
def test_an_accepted_upload_is_registered_after_a_crash(tmp_path: Path, clip: bytes) -> None:
    jobs = Jobs(tmp_path)
    ids = [new_id(), new_id()]  # one was running, one has lost its file
    (jobs.folder / ids[0]).mkdir(parents=True)
    (jobs.folder / ids[0] / "clip.mp4").write_bytes(clip)
    for id in ids:
        jobs.add(id, "register", {"id": None, "title": "Clip", "owner": "", "tags": {}, "name": "clip.mp4"})
    jobs.update(ids[0], RUNNING, "registering")
    (jobs.folder / "stray").mkdir()
    (jobs.folder / "stray" / "half.mp4").write_bytes(clip)
    with WebAppServer(tmp_path) as server:
        done = [finished(server.client(), id) for id in ids]
        assert [job["state"] for job in done] == ["done", "failed"]
        assert done[1]["message"] == "The uploaded file is missing; upload it again."
        assert [one["id"] for one in server.client().get("/references")["items"]] == ["clip"]
        assert leftover_uploads(server) == []


@pytest.mark.slow
def test_an_export_is_imported(server: WebAppServer, clip: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    video = elsewhere / "home.mp4"
    video.write_bytes(clip)
    library = ReferenceLibrary(elsewhere / "library")
    assert [one.error for one in library.add([video], title="At home")] == [None]
    client, content = server.client(), b"".join(library.open_export("home").pieces)
    reply = send(client, form(content, "home.copywatch"), "/api/v1/references/import")
    assert (reply.status, reply.json["reference"], reply.json["outcome"]) == (201, "home", "added")
    assert reply.headers["location"] == "/api/v1/references/home"
    assert client.get("/references/home")["has_thumbnails"] is False
    assert client("GET", "/api/v1/references/home/export").body[:8] == content[:8]
    assert send(client, form(content[:-5], "home.copywatch"), "/api/v1/references/import").status == 422
    assert send(client, form(clip), "/api/v1/references/import").status == 422
    assert client("DELETE", "/api/v1/references/home").status == 204
    assert client("DELETE", "/api/v1/references/home").status == 404
    assert leftover_uploads(server) == []
