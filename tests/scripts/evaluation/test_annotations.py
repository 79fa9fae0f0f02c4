"""Label files, small ones in the formats of the real ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evaluation.annotations import (
    AnnotationError,
    Annotations,
    LabelledPair,
    find_videos,
    read_fivr,
    read_vcdb,
)
from evaluation.scoring import TrueCopy

FILM, COPY, OTHER = "0056649006c7a250cb4174f1e924768ba2c9d599", "1357538fd1fd2975a8b3f750d5f6b13695aa4e28", "1f4f6311"


def write_vcdb(folder: Path) -> Path:
    labels = {f"{FILM}-{COPY}": [[21, 0, 39, 18], [43, 40, 45, 42]], f"{FILM}-{FILM}": [[0, 0, 72, 72]]}
    (folder / "label_file.json").write_text(json.dumps(labels))
    (folder / "pair_file.csv").write_text(f"query_id,reference_id\n{FILM},{FILM}\n{FILM},{COPY}\n{FILM},{OTHER}\n")
    return folder


def test_vcdb_gives_query_then_reference_for_start_and_for_end(tmp_path: Path) -> None:
    read = read_vcdb(write_vcdb(tmp_path))
    assert read.pairs[1] == LabelledPair(FILM, COPY, (((21.0, 39.0), (0.0, 18.0)), ((43.0, 45.0), (40.0, 42.0))))
    assert read.pairs[2] == LabelledPair(FILM, OTHER, ())  # a pair that shares nothing
    assert read.n_labels == 3
    assert read.videos == tuple(sorted([FILM, COPY, OTHER]))


def test_vcdb_by_its_json_file(tmp_path: Path) -> None:
    folder = write_vcdb(tmp_path)
    assert read_vcdb(folder / "label_file.json") == read_vcdb(folder)


def test_fivr_gives_the_query_first_and_a_full_second_where_start_is_end(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("k_NT43aJ_Jw;JqnG9AZHp58;0;6;4.754;13.761\nk_NT43aJ_Jw;JqnG9AZHp58;6;6;177.767;183.298\n")
    (pair,) = read_fivr(path).pairs
    assert pair.shared == (((0.0, 6.0), (4.754, 13.761)), ((6.0, 7.0), (177.767, 183.298)))
    assert read_fivr(tmp_path) == read_fivr(path)


def test_fivr_ids_may_begin_with_a_dash_and_labels_without_length_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "labels.txt"
    path.write_text("-l6Et4VdPOA;fJb9vJqPe-8;3;9;5;5\n-l6Et4VdPOA;fJb9vJqPe-8;9;3;5;11\n")
    read = read_fivr(path)
    assert read == Annotations((LabelledPair("-l6Et4VdPOA", "fJb9vJqPe-8", ()),), 2)


def test_a_pair_is_a_channel_of_its_own(tmp_path: Path) -> None:
    pair = read_vcdb(write_vcdb(tmp_path)).pairs[1]
    assert pair.truth()[0] == TrueCopy(f"{FILM}-{COPY}", COPY, 21.0, 39.0, 0.0, 18.0)


def test_pairs_without_both_videos_are_removed(tmp_path: Path) -> None:
    read = read_vcdb(write_vcdb(tmp_path)).among([FILM, OTHER])
    assert [pair.reference for pair in read.pairs] == [FILM, OTHER]


@pytest.mark.parametrize("line", ["a;b;0;6;4.7", "a;b;0;6;x;13", "a,b,0,6,4,13", "a;b;0;6;4;13;2"])
def test_an_invalid_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "labels.txt"
    path.write_text(f"a;b;0;6;4;13\n{line}\n")
    with pytest.raises(AnnotationError, match=r"labels\.txt:2: expected two ids and four numbers"):
        read_fivr(path)


@pytest.mark.parametrize("label", ["[[1, 2, 3]]", '[["a", 0, 1, 2]]', "[5]"])
def test_an_invalid_vcdb_label_is_named(tmp_path: Path, label: str) -> None:
    (tmp_path / "labels.json").write_text(f'{{"a-b": {label}}}')
    with pytest.raises(AnnotationError, match="a-b: expected four numbers"):
        read_vcdb(tmp_path)


def test_a_folder_without_labels_is_named(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match="expected one file"):
        read_fivr(tmp_path)
    with pytest.raises(AnnotationError, match="expected one file"):
        read_vcdb(tmp_path)


def test_videos_are_found_by_id_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in (f"{FILM}.mp4", f"deep/{COPY}.flv", "other.mp4", f"{OTHER}.txt"):
        (tmp_path / name).touch()
    found = find_videos(tmp_path, [FILM, COPY, OTHER])
    assert found == {FILM: tmp_path / f"{FILM}.mp4", COPY: tmp_path / "deep" / f"{COPY}.flv"}
