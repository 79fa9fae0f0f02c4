"""Uploads: a video or an exported reference comes in pieces, goes to a file of its own, and becomes a job.

The body is never in memory as a whole; it is counted as it comes, and refused once it is too long or too slow. Whatever
ends an upload early takes its file along. What came is looked at in the decoding child, which can crash or be killed
without touching anything else, before it is accepted; its own name is never a path.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import IO, Annotated, Any

from fastapi import FastAPI, Request, Response
from fastapi import Path as PathParameter
from pydantic import BaseModel, Field
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from monitor.web.context import AppContext
from monitor.web.requests.jobs import DONE, FAILED, IMPORT, REGISTER, REMOVE, Job, Jobs, Registrar, new_id
from monitor.web.requests.paging import Cursor, Limit, Page, cursor_of, number_of
from monitor.web.requests.problems import MAY_FAIL, Problem, not_found
from reference_db.library import MAX_EXPORT_BYTES, read_export
from reference_db.media.decoding import DecodingChild
from reference_db.registration import safe_id
from reference_db.store.references import MAX_TAGS, MAX_WORDS, check_id, check_words, showable

AT_ONCE = 4  # uploads
MAX_WAITING = 64  # jobs; each holds a file
SLOW_AFTER_S, SLOW_BYTES = 30.0, 1000  # after so long an upload has come at so many bytes a second, or is refused
MAX_FIELD_BYTES = 4 * MAX_WORDS + 100
MAX_FIELDS = MAX_TAGS + 8
IMPORT_S = 60.0  # an import that has not had its turn by then is told as a job
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
JobId = Annotated[str, PathParameter(pattern=r"^[0-9a-f]{24}$")]


class JobOut(BaseModel):
    """A registration, an import or a removal that was accepted."""

    id: str
    kind: str
    state: str = Field(description="waiting, running, done or failed.")
    done_s: int
    total_s: int | None
    message: str
    result: dict[str, Any] | None = Field(description="The reference's id, what came of it, and warnings.")
    created_at: str


class AcceptedOut(BaseModel):
    """What to ask for next."""

    job: JobOut


class ImportedOut(BaseModel):
    """An import that is done; or, where others were before it, the job."""

    reference: str | None
    outcome: str | None
    warnings: list[str]
    job: JobOut


@dataclass(slots=True)
class Upload:
    """What came: the file, the name that it had, and the fields beside it."""

    path: Path
    stem: str
    fields: list[tuple[str, str]] = field(default_factory=list)

    def one(self, name: str) -> str | None:
        """The field of this name; Problem where it is there twice. An empty one is none."""
        values = [value for key, value in self.fields if key == name]
        if len(values) > 1:
            raise Problem(422, f"The field {name} is there {len(values)} times.")
        return values[0] if values and values[0] else None

    def tags(self) -> dict[str, str]:
        """Each field `tags` is `key=value`, or one JSON object with all of them."""
        tags: dict[str, str] = {}
        for text in (value for key, value in self.fields if key == "tags" and value):
            if text.startswith("{"):
                with suppress(ValueError, RecursionError):
                    found = json.loads(text)
                    if all(isinstance(value, str) for value in found.values()):
                        tags |= found
                        continue
            key, equals, value = text.partition("=")
            if not equals or not key or text.startswith("{"):
                raise Problem(422, "A tag is key=value, or all of them are one JSON object.")
            tags[key] = value
        return tags


def add_uploads(api: FastAPI, station: AppContext, registrar: Registrar) -> None:
    jobs, counting = registrar.jobs, _AtOnce()
    form = _form(file="The video.", title="", owner="", id="", tags="key=value; may be there often.")

    @api.post("/api/v1/references", status_code=202, responses=MAY_FAIL, openapi_extra=form, tags=["references"])
    async def upload_reference(request: Request, response: Response) -> AcceptedOut:
        """Registers a video: it is looked at, then registered as a job whose progress can be asked for."""
        id = new_id()
        with counting.one(), _kept(jobs.folder / id) as folder:
            await _check_room(jobs)
            upload = await receive(request, folder, station.settings.web.max_upload_bytes)
            asked = {"id": upload.one("id"), "title": upload.one("title"), "owner": upload.one("owner") or ""}
            tags = upload.tags()
            if asked["id"] is not None:
                check_id(asked["id"])
            check_words(asked["title"] or "", asked["owner"] or "", tags)
            await asyncio.to_thread(_sniff, upload.path)
            title = asked["title"] or showable(upload.stem)
            values = {**asked, "title": title, "tags": tags, "name": upload.path.name}
            job = await asyncio.to_thread(jobs.add, id, REGISTER, values)
        registrar.ring()
        response.headers["Location"] = f"/api/v1/jobs/{id}"
        return AcceptedOut(job=_told(job))

    form = _form(file="A file that `refs export` wrote.", id="Another id than it has in the file.")

    @api.post(
        "/api/v1/references/import",
        status_code=201,
        responses={**MAY_FAIL, 202: {"model": ImportedOut, "description": "Others are before it: ask for the job."}},
        openapi_extra=form,
        tags=["references"],
    )
    async def import_reference(request: Request, response: Response) -> ImportedOut:
        """Takes a reference from a file that `refs export` wrote, here or elsewhere."""
        id = new_id()
        with counting.one(), _kept(jobs.folder / id) as folder:
            await _check_room(jobs)
            upload = await receive(request, folder, MAX_EXPORT_BYTES)
            wanted = upload.one("id")
            if wanted is not None:
                check_id(wanted)
            await asyncio.to_thread(read_export, upload.path)
            await asyncio.to_thread(jobs.add, id, IMPORT, {"id": wanted, "name": upload.path.name})
        registrar.ring()
        await registrar.wait_for(id, IMPORT_S)
        job = await asyncio.to_thread(jobs.get, id)
        assert job is not None
        if job.state == FAILED:
            conflict = (job.result or {}).get("kind") in ("ReferenceExists", "EncoderMismatch")
            raise Problem(409 if conflict else 422, job.message)
        result = job.result or {}
        response.headers["Location"] = f"/api/v1/references/{result['reference']}" if result else f"/api/v1/jobs/{id}"
        response.status_code = 201 if job.state == DONE else 202
        warnings = result.get("warnings", [])
        return ImportedOut(
            reference=result.get("reference"), outcome=result.get("outcome"), warnings=warnings, job=_told(job)
        )


def remove_later(registrar: Registrar, reference: str) -> AcceptedOut:
    """Has a reference removed once nobody else writes to the library."""
    job = registrar.jobs.add(new_id(), REMOVE, {"reference": reference})
    return AcceptedOut(job=_told(job))


def add_jobs(api: FastAPI, jobs: Jobs) -> None:
    @api.get("/api/v1/jobs", responses=MAY_FAIL, tags=["jobs"])
    def list_jobs(limit: Limit = 50, cursor: Cursor = None) -> Page[JobOut]:
        """The jobs, the newest first."""
        found = jobs.page(number_of(cursor), limit + 1)
        following = cursor_of(found[limit - 1].n) if len(found) > limit else None
        return Page(items=[_told(job) for job in found[:limit]], next=following)

    @api.get("/api/v1/jobs/{id}", responses=MAY_FAIL, tags=["jobs"])
    def show_job(id: JobId) -> JobOut:
        """One job and how far it is."""
        job = jobs.get(id)
        if job is None:
            raise not_found(f"job {id}")
        return _told(job)


async def receive(request: Request, folder: Path, max_bytes: int) -> Upload:
    """The one file of a multipart body, in this folder and on disk, and the fields beside it. Raises Problem."""
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    if kind != b"multipart/form-data" or not options.get(b"boundary"):
        raise Problem(415, "Send the file as multipart/form-data, as `curl -F file=@film.mp4` does.")
    too_long = Problem(413, f"The file is too long: {max_bytes} bytes are the most.")
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes + MAX_FIELDS * (MAX_FIELD_BYTES + 1000):
        raise too_long
    form = _Form(options[b"boundary"])
    began, n_bytes, out = time.monotonic(), 0, None
    path: Path | None = None
    try:
        async for piece in request.stream():
            form.feed(piece)
            for content in form.file_pieces():
                if out is None:
                    path = folder / _safe_name(form.file_name)
                    out = await asyncio.to_thread(_create, path)
                n_bytes += len(content)
                if n_bytes > max_bytes:
                    raise too_long
                await asyncio.to_thread(out.write, content)
            spent_s = time.monotonic() - began
            if spent_s > SLOW_AFTER_S and n_bytes < SLOW_BYTES * spent_s:
                raise Problem(408, f"The upload is too slow: {SLOW_BYTES} bytes a second are the least.")
        form.finish()
        if out is None or path is None:
            raise Problem(422, "There is no file in it: send one in the field `file`.")
        await asyncio.to_thread(_sync, out)
    except FormParserError:
        raise Problem(400, "The body is no multipart form, or it broke off.") from None
    except OSError as error:
        if error.errno in DISK_FULL:
            raise Problem(507, "There is no room for it on this machine's disk.") from error
        raise
    finally:
        if out is not None:
            out.close()
    return Upload(path, _stem(form.file_name), form.fields)


class _Form:
    """A multipart form as it is read: fields are kept, pieces of the one file are handed on."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: list[tuple[str, str]] = []
        self.file_name = ""
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._name, self._is_file, self._text = "", False, bytearray()
        self._has_file, self._is_whole, self._pieces = False, False, list[bytes]()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._on_header,
                "on_header_value": self._on_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers,
                "on_part_data": self._on_data,
                "on_part_end": self._end,
                "on_end": self._on_end,
            },
        )

    def feed(self, piece: bytes) -> None:
        self._parser.write(piece)

    def finish(self) -> None:
        """Raises FormParserError where the form broke off."""
        self._parser.finalize()
        if not self._is_whole:
            raise FormParserError("no end")

    def file_pieces(self) -> list[bytes]:
        """Those that came since the last call; an empty one where the file has just begun."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _begin(self) -> None:
        self._headers, self._name, self._is_file, self._text = {}, "", False, bytearray()

    def _on_header(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _on_headers(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options or self._name == "file"
        if not self._is_file:
            if len(self.fields) >= MAX_FIELDS:
                raise Problem(422, f"There are too many fields: {MAX_FIELDS} are the most.")
            return
        if self._has_file or self._name != "file":
            raise Problem(422, "One file at a time, in the field `file`.")
        self._has_file, self.file_name = True, options.get(b"filename", b"").decode("utf-8", "replace")
        self._pieces.append(b"")

    def _on_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
        else:
            self._text += data[start:end]
            if len(self._text) > MAX_FIELD_BYTES:
                raise Problem(422, f"The field {self._name[:40]!a} is too long.")

    def _on_end(self) -> None:
        self._is_whole = True

    def _end(self) -> None:
        if not self._is_file:
            self.fields.append((self._name, self._text.decode("utf-8", "replace")))


class _AtOnce:
    """Counts the uploads that are coming; on the loop only."""

    def __init__(self) -> None:
        self._n = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        if self._n >= AT_ONCE:
            raise Problem(429, f"{AT_ONCE} uploads are coming already; try again later.", {"Retry-After": "10"})
        self._n += 1
        try:
            yield
        finally:
            self._n -= 1


@contextmanager
def _kept(folder: Path) -> Iterator[Path]:
    """The folder of one upload, removed with all in it unless the block ends well."""
    try:
        folder.mkdir(parents=True, mode=0o700)
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


async def _check_room(jobs: Jobs) -> None:
    if len(await asyncio.to_thread(jobs.waiting)) >= MAX_WAITING:
        raise Problem(429, f"{MAX_WAITING} uploads wait to be registered; try again later.", {"Retry-After": "60"})


def _sniff(path: Path) -> None:
    """Has the decoding child look at the file; raises MediaError where it is no video that is read here."""
    with DecodingChild(str(path)) as child:
        child.info()


def _create(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _stem(name: str) -> str:
    """The name that a file had where it came from, without folders and ending."""
    last = PurePosixPath(PureWindowsPath(name).name or "upload").name
    return PurePosixPath(last).stem or "upload"


def _safe_name(name: str) -> str:
    ending = re.search(r"\.[A-Za-z0-9]{1,10}$", name)
    return f"{safe_id(_stem(name))}{ending.group().lower() if ending else ''}"


def _told(job: Job) -> JobOut:
    return JobOut(
        id=job.id,
        kind=job.kind,
        state=job.state,
        done_s=job.done_s,
        total_s=job.total_s,
        message=job.message,
        result=job.result if job.state == DONE else None,
        created_at=job.created_at,
    )


def _form(*, file: str, **fields: str) -> dict[str, Any]:
    """A multipart body in the words of OpenAPI."""
    properties: dict[str, Any] = {"file": {"type": "string", "format": "binary", "description": file}}
    for name, words in fields.items():
        text = {"type": "string", "maxLength": MAX_WORDS, "description": words}
        properties[name] = {"type": "array", "items": text, "description": words} if name == "tags" else text
    schema = {"type": "object", "required": ["file"], "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
