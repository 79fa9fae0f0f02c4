"""Uploaded files: the body arrives in chunks and goes to a file of its own.

The body is never in memory as a whole. Its bytes are counted as they arrive; an upload that is too long, too slow or
takes too long is refused, and so is one for which no space is reserved. The caller's file name is never used as a path.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import IO, Self

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from monitor.web.requests.problems import Problem
from monitor.web.requests.upload_space import Reservation
from reference_db.registration import safe_id
from reference_db.store.references import MAX_TAGS, MAX_TEXT_LENGTH

# In every window of this length an upload needs so many bytes per second; a poor mobile connection has more.
PACE_S, LEAST_BYTES_PER_S = 30.0, 10_000
MAX_FIELD_BYTES = 4 * MAX_TEXT_LENGTH + 100
MAX_FIELDS = MAX_TAGS + 8
MAX_PART_HEADER_BYTES = 1000  # of one field, for the check of Content-Length
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(slots=True)
class Upload:
    """A received file, the stem of its original name, and the form fields beside it."""

    path: Path
    stem: str
    fields: list[tuple[str, str]] = field(default_factory=list)

    def one(self, name: str) -> str | None:
        """The value of this field, None if empty or missing; Problem if it occurs twice."""
        values = [value for key, value in self.fields if key == name]
        if len(values) > 1:
            raise Problem(422, f"The field {name} occurs {len(values)} times.")
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
                raise Problem(422, "Write each tag as key=value, or all of them as one JSON object.")
            tags[key] = value
        return tags


async def receive(request: Request, folder: Path, max_bytes: int, max_s: float, reservation: Reservation) -> Upload:
    """Writes the one file of a multipart body to this folder, synced to disk. Raises Problem."""
    boundary, pace = _boundary(request), UploadPace(max_s, time.monotonic())
    with _upload_problems(), _ReceivedFile(folder, max_bytes, reservation) as file:
        form = _Form(boundary)
        async for chunk in request.stream():
            form.feed(chunk)
            for content in form.file_chunks():
                await file.write(form.file_name, content)
            pace.push(time.monotonic(), len(chunk))
        form.finish()
        path = await file.sync()
    return Upload(path, _stem(form.file_name), form.fields)


def _boundary(request: Request) -> bytes:
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise Problem(415, "Send the file as multipart/form-data, as `curl -F file=@film.mp4` does.")
    return boundary


def announced_bytes(request: Request, max_bytes: int) -> int | None:
    """The length that the request states, None if it states none; Problem if it is too long."""
    length = request.headers.get("content-length", "")
    if not length.isdigit():
        return None
    if int(length) > max_bytes + MAX_FIELDS * (MAX_FIELD_BYTES + MAX_PART_HEADER_BYTES):
        raise _too_long(max_bytes)
    return int(length)


class UploadPace:
    """Judges the duration of an upload, and its speed within the last seconds: a fast start earns no slow end."""

    def __init__(self, max_s: float, started_s: float) -> None:
        self._max_s, self._started_s = max_s, started_s
        self._chunks: deque[tuple[float, int]] = deque()  # of the last seconds: time and length
        self._n_bytes = 0  # of these

    def push(self, now_s: float, n_bytes: int) -> None:
        """Counts a chunk that has arrived; raises Problem 408 if the upload is too slow or takes too long."""
        if now_s - self._started_s > self._max_s:
            raise Problem(408, f"The upload takes too long: at most {self._max_s:.0f} s are allowed.")
        self._chunks.append((now_s, n_bytes))
        self._n_bytes += n_bytes
        while self._chunks[0][0] < now_s - PACE_S:
            self._n_bytes -= self._chunks.popleft()[1]
        if now_s - self._started_s > PACE_S and self._n_bytes < LEAST_BYTES_PER_S * PACE_S:
            raise Problem(408, f"The upload is too slow: at least {LEAST_BYTES_PER_S} bytes per second are required.")


def _too_long(max_bytes: int) -> Problem:
    return Problem(413, f"The file is too long; at most {max_bytes} bytes are accepted.")


@contextmanager
def _upload_problems() -> Iterator[None]:
    """Turns a broken form and a full disk into Problems."""
    try:
        yield
    except FormParserError:
        raise Problem(400, "The body is not a multipart form, or it is incomplete.") from None
    except OSError as error:
        if error.errno in DISK_FULL:
            raise Problem(507, "The server's disk is full.") from error
        raise


class _ReceivedFile:
    """The file on disk; created with its first bytes, when its name is known."""

    def __init__(self, folder: Path, max_bytes: int, reservation: Reservation) -> None:
        self._folder, self._max_bytes, self._reservation = folder, max_bytes, reservation
        self._path: Path | None = None
        self._out: IO[bytes] | None = None
        self.n_bytes = 0

    async def write(self, name: str, content: bytes) -> None:
        if self._out is None:
            self._path = self._folder / _safe_name(name)
            self._out = await asyncio.to_thread(_create, self._path)
        self.n_bytes += len(content)
        if self.n_bytes > self._max_bytes:
            raise _too_long(self._max_bytes)
        if self._reservation.is_full(len(content)):
            await asyncio.to_thread(self._reservation.extend)
        await asyncio.to_thread(self._out.write, content)
        self._reservation.n_written += len(content)

    async def sync(self) -> Path:
        """Its path, with all content on disk; raises Problem if there is no file."""
        if self._out is None or self._path is None:
            raise Problem(422, "The form contains no file: send one in the field `file`.")
        await asyncio.to_thread(_sync, self._out)
        return self._path

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._out is not None:
            self._out.close()


class _Form:
    """A multipart form as it is read: fields are collected, chunks of the one file are passed on."""

    def __init__(self, boundary: bytes) -> None:
        self.fields: list[tuple[str, str]] = []
        self.file_name = ""
        self._header, self._value, self._headers = b"", b"", dict[bytes, bytes]()
        self._name, self._is_file, self._text = "", False, bytearray()
        self._has_file, self._is_complete, self._chunks = False, False, list[bytes]()
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._on_part_begin,
                "on_header_field": self._on_header_field,
                "on_header_value": self._on_header_value,
                "on_header_end": self._on_header_end,
                "on_headers_finished": self._on_headers_finished,
                "on_part_data": self._on_part_data,
                "on_part_end": self._on_part_end,
                "on_end": self._on_end,
            },
        )

    def feed(self, chunk: bytes) -> None:
        self._parser.write(chunk)

    def finish(self) -> None:
        """Raises FormParserError if the form is incomplete."""
        self._parser.finalize()
        if not self._is_complete:
            raise FormParserError("no end")

    def file_chunks(self) -> list[bytes]:
        """The chunks of the file since the last call; the first one of a file is empty."""
        chunks, self._chunks = self._chunks, []
        return chunks

    def _on_part_begin(self) -> None:
        self._headers, self._name, self._is_file, self._text = {}, "", False, bytearray()

    def _on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _on_header_end(self) -> None:
        self._headers[self._header.lower()] = self._value
        self._header, self._value = b"", b""

    def _on_headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = b"filename" in options or self._name == "file"
        if not self._is_file:
            if len(self.fields) >= MAX_FIELDS:
                raise Problem(422, f"The form has too many fields; at most {MAX_FIELDS} are accepted.")
            return
        if self._has_file or self._name != "file":
            raise Problem(422, "Send one file at a time, in the field `file`.")
        self._has_file, self.file_name = True, options.get(b"filename", b"").decode("utf-8", "replace")
        self._chunks.append(b"")

    def _on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._chunks.append(data[start:end])
        else:
            self._text += data[start:end]
            if len(self._text) > MAX_FIELD_BYTES:
                raise Problem(422, f"The field {self._name[:40]!a} is too long.")

    def _on_end(self) -> None:
        self._is_complete = True

    def _on_part_end(self) -> None:
        if not self._is_file:
            self.fields.append((self._name, self._text.decode("utf-8", "replace")))


def _create(path: Path) -> IO[bytes]:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")


def _sync(out: IO[bytes]) -> None:
    out.flush()
    os.fsync(out.fileno())


def _stem(name: str) -> str:
    """The original name of a file, without folders and ending."""
    last = PurePosixPath(PureWindowsPath(name).name or "upload").name
    return PurePosixPath(last).stem or "upload"


def _safe_name(name: str) -> str:
    ending = re.search(r"\.[A-Za-z0-9]{1,10}$", name)
    return f"{safe_id(_stem(name))}{ending.group().lower() if ending else ''}"
