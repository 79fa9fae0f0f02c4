"""The main shard on disk: used only if its hashes match, and replaced atomically."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reference_db.search.index_shards import CodedShard
from reference_db.search.shard_files import ShardFiles
from tests.chaos.operations import Ack
from tests.chaos.storage import in_child
from tests.support.indexed_films import add, found, keeper


def flips(folder: Path) -> Iterator[tuple[Path, int]]:
    rng = np.random.default_rng(4)
    for path in sorted((folder / "index").iterdir()):
        size = path.stat().st_size
        for at in [0, size - 1, *rng.integers(0, max(1, size), 20).tolist()] if size else []:
            yield path, at


def test_a_shard_with_one_flipped_byte_is_never_searched_but_rebuilt(
    eight: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = found(keeper(eight).refresh(), *range(8))
    files = ShardFiles(eight / "index", "enc-1")
    assert files.read() is not None
    for path, at in flips(eight):
        content = path.read_bytes()
        path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
        assert files.read() is None, (path, at)
        path.write_bytes(content)
    damaged = next((eight / "index").glob("main.*.faiss"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    caplog.clear()
    assert found(keeper(eight).refresh(), *range(8)) == wanted
    assert "rebuilding it from the features" in caplog.text
    assert files.read() is not None
    assert ShardFiles(eight / "index", "enc-2").read() is None  # of another encoder


KILLED_AT = [
    *(("fsync", n) for n in (1, 2, 3)),
    *(("rename", n) for n in (1, 2)),
    *(("write", n) for n in (1, 2, 5, 20)),
    ("unlink", 1),
]


def killed_while_reindexing(folder: Path, call: str, n: int) -> bool:
    def work(data_dir: Path, ack: Ack) -> None:
        keeper(data_dir).reindex()
        ack()

    return in_child(work, folder, ["-f", "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={n}"]).killed


@pytest.mark.system
@pytest.mark.parametrize(("call", "n"), KILLED_AT)
def test_a_killed_rebuild_leaves_the_old_shard_or_the_new_one(eight: Path, tmp_path: Path, call: str, n: int) -> None:
    folder = tmp_path / "library"
    shutil.copytree(eight, folder)
    before = found(keeper(folder).refresh(), *range(8))
    old = ShardFiles(folder / "index", "enc-1").read()
    add(folder, 8)  # so that the new one differs
    assert killed_while_reindexing(folder, call, n)
    remaining = ShardFiles(folder / "index", "enc-1").read()
    assert old is not None
    assert remaining is not None, "there is no shard any more"
    assert len(remaining.keys) in (len(old.keys), len(old.keys) + 1)
    index = keeper(folder).refresh()
    assert [row[0] for row in found(index, *range(8))] == [row[0] for row in before]
    assert {row[0][0] for row in found(index, 8)} == {"film-8"}
    again = keeper(folder).reindex()
    assert len(again.shards) == 1
    assert len(list((folder / "index").glob("main.*.faiss"))) == 1  # the killed one left nothing


def test_an_index_that_cannot_be_stored_is_used_nevertheless(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    add(tmp_path, *range(5))
    (tmp_path / "index").write_text("not a folder")
    index = keeper(tmp_path).refresh()
    assert isinstance(index.shards[0], CodedShard)
    assert found(index, 2)[0][0][:2] == ("film-2", 30)
    assert "could not store the index" in caplog.text
