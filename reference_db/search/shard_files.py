"""The large part of an index on disk: a cache, believed only where its hashes are right.

    index/main.HASH.faiss     codes of most of the library's seconds, with their code book
    index/main.json           which file that is, its SHA-256, and which references are in it; its own hash first
    index/keeper.lock         held by the one process that writes here

Written aside, synced and renamed, the list last, so that whoever reads finds the old part or the new one. FAISS takes
many a damaged file for a good one, so none is handed to it before its SHA-256 was found right.
"""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import faiss

from reference_db.search.index_shards import CodeBook, CodedShard
from reference_db.store.disk import write_file
from reference_db.store.references import ReferenceId

logger = logging.getLogger(__name__)

FORMAT = "copywatch-index-1"
LIST = "main.json"


class ShardFiles:
    """The folder in which a library keeps its large part."""

    def __init__(self, folder: Path, encoder_id: str) -> None:
        self.folder = folder
        self._made_by = {"format": FORMAT, "encoder_id": encoder_id, "faiss": faiss.__version__}

    def read(self) -> CodedShard | None:
        """The part as it was written; None where there is none, or a byte of it has changed."""
        try:
            told = _unsealed((self.folder / LIST).read_bytes())
            if {name: told[name] for name in self._made_by} != self._made_by:
                logger.info("the index in %s is another encoder's or another version's", self.folder)
                return None
            with (self.folder / told["file"]).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != told["sha256"]:
                    raise ValueError("its bytes are not those that were written")
                index: Any = faiss.read_index(f"/proc/self/fd/{file.fileno()}")  # the very file that was verified
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            logger.error("the index in %s is damaged (%s); it is made again from the features", self.folder, error)
            return None
        keys = tuple(None if key is None else (ReferenceId(key[0]), key[1]) for key in told["keys"])
        return CodedShard(CodeBook(faiss.downcast_index(index.quantizer), index), keys, index)

    def write(self, part: CodedShard) -> CodedShard:
        """The part as it is read from disk again; as it was given, where the disk does not take it."""
        try:
            self._write(part)
        except (OSError, RuntimeError) as error:
            logger.warning(
                "the index cannot be kept in %s (%s); it is made again at the next start", self.folder, error
            )
            return part
        return self.read() or part

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process may write here; where the folder cannot be used at all, nobody else does either."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.folder / "keeper.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:
            yield True
            return
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield True
        except BlockingIOError:
            yield False
        finally:
            os.close(handle)

    def _write(self, part: CodedShard) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / "main.part"
        faiss.write_index(part.index, str(aside))
        with aside.open("r+b") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        name = f"main.{sha256[:16]}.faiss"
        aside.rename(self.folder / name)
        write_file(self.folder / LIST, _sealed({**self._made_by, "file": name, "sha256": sha256, "keys": part.keys}))
        for old in self.folder.glob("main.*.faiss"):
            if old.name != name:
                old.unlink()


def _sealed(told: dict[str, object]) -> bytes:
    content = json.dumps(told, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content + b"\n"


def _unsealed(text: bytes) -> dict[str, str]:
    seal, _, content = text.partition(b"\n")
    if not content.endswith(b"\n") or hashlib.sha256(content[:-1]).hexdigest().encode() != seal:
        raise ValueError("its list of references has changed on disk")
    told: dict[str, str] = json.loads(content)
    return told
