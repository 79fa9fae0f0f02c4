"""Uploads: registered as jobs, refused when they are not what they should be, and never left lying about."""

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
from monitor.web.requests.jobs import RUNNING, Jobs, new_id
from monitor.web.routes import references
from reference_db.library import ReferenceLibrary
from reference_db.store.catalog import Catalog
from tests.support import media
from tests.support.recorded_channel import RecordedChannel
from tests.support.web_only import Door
from tests.support.web_server import Client, Reply

BOUNDARY = "----copywatch"
POLL_S = 0.2  # between two looks at a job: whoever asks without a pause keeps it from its work
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


def over(client: Client, id: str) -> dict[str, Any]:
    """The job, once it is over."""
    while (job := client.get(f"/jobs/{id}"))["state"] in ("waiting", "running"):
        time.sleep(POLL_S)  # between two questions, as a client asks
    return dict(job)


def test_a_removal_while_somebody_writes_is_done_after_it(
    tmp_path: Path, recorded: RecordedChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "BUSY_S", 0.0)
    shutil.copytree(recorded.settings.data_dir, tmp_path / "data")
    with Door(tmp_path / "data") as door:
        client = door.client()
        with Catalog.open(tmp_path / "data", write=True):
            later = client("DELETE", "/api/v1/references/harbour")
            job = later.json["job"]
            assert (later.status, job["kind"]) == (202, "remove")
            assert later.headers["location"] == f"/api/v1/jobs/{job['id']}"
            assert client("GET", "/api/v1/references/harbour").status == 200
        done = over(client, job["id"])
        assert (done["state"], done["result"]["reference"]) == ("done", "harbour")
        assert client("GET", "/api/v1/references/harbour").status == 404
        assert client("DELETE", "/api/v1/references/garden").status == 204
        with Catalog.open(tmp_path / "data", write=True):
            nothing = client("DELETE", "/api/v1/references/harbour").json["job"]["id"]
        assert over(client, nothing)["state"] == "failed"


def left_lying(door: Door) -> list[Path]:
    folder = door.context.settings.data_dir / "uploads"
    return sorted(folder.iterdir()) if folder.is_dir() else []


def wait_until(is_so: Callable[[], bool]) -> None:
    assert any(is_so() for _ in range(1_000_000))


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    with Door(tmp_path) as opened:
        yield opened


def test_a_video_becomes_a_reference(door: Door, clip: bytes) -> None:
    client = door.client()
    accepted = send(client, form(clip, "..\\..\\<i>Evil Film.mp4", owner="ACME", tags=["territory=EU", "year=2026"]))
    assert accepted.status == 202
    job = accepted.json["job"]
    assert accepted.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert (job["kind"], job["result"]) == ("register", None)
    nice = set()
    while client.get(f"/jobs/{job['id']}")["state"] in ("waiting", "running"):
        nice |= set(_priorities("monitor.roles.registration_child"))
        time.sleep(POLL_S)  # between two questions, as a client asks
    assert 10 in nice  # it gives way to the channels
    done = over(client, job["id"])
    assert (done["state"], done["message"]) == ("done", "added")
    assert (done["result"]["reference"], done["result"]["outcome"]) == ("i-Evil-Film", "added")
    shown = client.get("/references/i-Evil-Film")
    assert (shown["title"], shown["owner"], shown["seconds"]) == ("<i>Evil Film", "ACME", 12)
    assert shown["tags"] == {"territory": "EU", "year": "2026"}
    assert [one["id"] for one in client.get("/jobs")["items"]] == [job["id"]]
    assert left_lying(door) == []


def _priorities(module: str) -> Iterator[int]:
    """Of the processes that run this module."""
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            with suppress(OSError):
                if module.encode() in (process / "cmdline").read_bytes():
                    yield os.getpriority(os.PRIO_PROCESS, int(process.name))


def test_what_is_no_video_is_refused_at_once(door: Door, clip: bytes) -> None:
    client = door.client()
    for content in (b"", b"hello", b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", clip[:200], os.urandom(10_000)):
        reply = send(client, form(content))
        assert reply.status == 422, content[:20]
        assert "film.mp4" in reply.json["detail"]
    assert client.get("/jobs")["items"] == []
    assert left_lying(door) == []


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
def test_a_form_that_is_wrong_is_refused(door: Door, body: bytes, status: int) -> None:
    reply = send(door.client(), body)
    assert reply.status == status, reply.body
    assert reply.headers["content-type"] == "application/problem+json"
    assert left_lying(door) == []
    assert door.client()("POST", "/api/v1/references", {"file": "x"}).status == 415


def test_too_long_too_slow_and_broken_off(tmp_path: Path, clip: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "BODY_S", 1.0)
    with Door(tmp_path, max_upload_bytes=100_000) as door:
        assert send(door.client(), form(b"x" * 100_001)).status == 413
        body = form(clip[:50_000])

        def opened(more: str) -> socket.socket:
            connection = socket.create_connection(("127.0.0.1", door.port), timeout=60)
            connection.sendall(f"{HEAD}{more}\r\n".encode())
            return connection

        with opened("Content-Length: 10000000000\r\n") as told, told.makefile("rb") as answer:
            assert b" 413 " in answer.readline()  # before a byte of it came
        with opened(f"Content-Length: {len(body)}\r\n") as stalled, stalled.makefile("rb") as answer:
            stalled.sendall(body[:1000])
            wait_until(lambda: len(left_lying(door)) == 1)
            assert b" 408 " in answer.readline()
        with opened("Transfer-Encoding: chunked\r\n") as endless, endless.makefile("rb") as answer:
            piece = b"x" * 60_000
            chunks = [body[:200], piece, piece]
            for chunk in chunks:
                endless.sendall(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            assert b" 413 " in answer.readline()
        broken = opened(f"Content-Length: {len(body)}\r\n")
        broken.sendall(body[:1000])
        wait_until(lambda: len(left_lying(door)) == 1)
        broken.close()
        wait_until(lambda: left_lying(door) == [])
        assert door.client().get("/jobs")["items"] == []


def test_not_more_uploads_than_can_be_taken(door: Door) -> None:
    coming = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(4)]
    for one in coming:
        one.sendall(f"{HEAD}Content-Length: 10000\r\n\r\n".encode() + form(b"x" * 9000)[:500])
    wait_until(lambda: len(left_lying(door)) == 4)
    assert send(door.client(), form(b"x")).status == 429
    for one in coming:
        one.close()
    wait_until(lambda: left_lying(door) == [])


@pytest.mark.slow
def test_what_was_accepted_is_done_after_a_crash(tmp_path: Path, clip: bytes) -> None:
    jobs = Jobs(tmp_path)
    ids = [new_id(), new_id()]  # one was being worked on, one has lost its file
    (jobs.folder / ids[0]).mkdir(parents=True)
    (jobs.folder / ids[0] / "clip.mp4").write_bytes(clip)
    for id in ids:
        jobs.add(id, "register", {"id": None, "title": "Clip", "owner": "", "tags": {}, "name": "clip.mp4"})
    jobs.update(ids[0], RUNNING, "registering")
    (jobs.folder / "stray").mkdir()
    (jobs.folder / "stray" / "half.mp4").write_bytes(clip)
    with Door(tmp_path) as door:
        done = [over(door.client(), id) for id in ids]
        assert [job["state"] for job in done] == ["done", "failed"]
        assert done[1]["message"] == "The uploaded file is missing; upload it again."
        assert [one["id"] for one in door.client().get("/references")["items"]] == ["clip"]
        assert left_lying(door) == []


@pytest.mark.slow
def test_an_export_is_imported(door: Door, clip: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    video = elsewhere / "home.mp4"
    video.write_bytes(clip)
    library = ReferenceLibrary(elsewhere / "library")
    assert [one.error for one in library.add([video], title="At home")] == [None]
    client, content = door.client(), library.exported("home")
    reply = send(client, form(content, "home.copywatch"), "/api/v1/references/import")
    assert (reply.status, reply.json["reference"], reply.json["outcome"]) == (201, "home", "added")
    assert reply.headers["location"] == "/api/v1/references/home"
    assert client.get("/references/home")["has_thumbnails"] is False
    assert client("GET", "/api/v1/references/home/export").body[:8] == content[:8]
    assert send(client, form(content[:-5], "home.copywatch"), "/api/v1/references/import").status == 422
    assert send(client, form(clip), "/api/v1/references/import").status == 422
    assert client("DELETE", "/api/v1/references/home").status == 204
    assert client("DELETE", "/api/v1/references/home").status == 404
    assert left_lying(door) == []
