"""The main shard of an index on disk: a cache, used only if its hashes match.

    index/main.HASH.faiss     codes of most of the library's seconds, with their code book
    index/main.json           manifest: the name of that file, its SHA-256 and its references, after a hash of all that
    index/keeper.lock         locked by the one process that writes here

Files are written, synced and renamed, the manifest last, so that a reader finds the old shard or the new one. FAISS
loads many damaged files without an error, so a file's SHA-256 is verified first.
"""

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
from reference_db.store.disk import PRIVATE_FILE, create_private_folder, try_lock, write_file
from reference_db.store.references import ReferenceId

logger = logging.getLogger(__name__)

FORMAT = "copywatch-index-1"
MANIFEST = "main.json"


class ShardFiles:
    """The folder with a library's main shard."""

    def __init__(self, folder: Path, encoder_id: str) -> None:
        self.folder = folder
        self._version = {"format": FORMAT, "encoder_id": encoder_id, "faiss": faiss.__version__}

    def read(self) -> CodedShard | None:
        """The shard as it was written; None if there is none or it is damaged."""
        try:
            manifest = _unseal((self.folder / MANIFEST).read_bytes())
            if {name: manifest[name] for name in self._version} != self._version:
                logger.info("the index in %s belongs to another encoder or version; rebuilding it", self.folder)
                return None
            with (self.folder / manifest["file"]).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != manifest["sha256"]:
                    raise ValueError("its content does not match its SHA-256")
                index: Any = faiss.read_index(f"/proc/self/fd/{file.fileno()}")  # the file that was verified
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            logger.error("the index in %s is damaged (%s); rebuilding it from the features", self.folder, error)
            return None
        keys = tuple(None if key is None else (ReferenceId(key[0]), key[1]) for key in manifest["keys"])
        return CodedShard(CodeBook(faiss.downcast_index(index.quantizer), index), keys, index)

    def write(self, shard: CodedShard) -> CodedShard:
        """Stores the shard and reads it back; the given one if the disk fails."""
        try:
            self._write(shard)
        except (OSError, RuntimeError) as error:
            logger.warning("could not store the index in %s (%s); the next start rebuilds it", self.folder, error)
            return shard
        return self.read() or shard

    @contextmanager
    def locked(self) -> Iterator[bool]:
        """Whether this process may write here; True if the folder cannot be used, since no process can write then."""
        try:
            create_private_folder(self.folder)
            handle = try_lock(self.folder / "keeper.lock")
        except OSError:
            yield True
            return
        try:
            yield handle is not None
        finally:
            if handle is not None:
                os.close(handle)

    def _write(self, shard: CodedShard) -> None:
        create_private_folder(self.folder)
        temporary = self.folder / "main.part"  # not `atomic_file`: the name is known only once the content is
        faiss.write_index(shard.index, str(temporary))
        with temporary.open("r+b") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            os.fchmod(file.fileno(), PRIVATE_FILE)
            os.fsync(file.fileno())
        name = f"main.{sha256[:16]}.faiss"
        temporary.rename(self.folder / name)
        manifest: dict[str, object] = {**self._version, "file": name, "sha256": sha256, "keys": shard.keys}
        write_file(self.folder / MANIFEST, _seal(manifest), mode=PRIVATE_FILE)
        for old in self.folder.glob("main.*.faiss"):
            if old.name != name:
                old.unlink()


def _seal(manifest: dict[str, object]) -> bytes:
    content = json.dumps(manifest, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest().encode() + b"\n" + content + b"\n"


def _unseal(text: bytes) -> dict[str, Any]:
    digest, _, content = text.partition(b"\n")
    if not content.endswith(b"\n") or hashlib.sha256(content[:-1]).hexdigest().encode() != digest:
        raise ValueError("its manifest has changed on disk")
    manifest: dict[str, Any] = json.loads(content)
    return manifest
