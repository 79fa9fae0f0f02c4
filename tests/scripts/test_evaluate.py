"""The evaluation from end to end, on generated films with an encoder and a network that need no training."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

from evaluation.ablations import ROWS
from monitor.matching.mask_step import save_mask_step
from tests.support import media
from tests.support.onnx_encoders import write_grid
from tests.support.planted_features import plain_net

torch.set_num_threads(1)
SIDES = {"width": 160, "height": 96}
FPS = 4
FILM, COPY, OTHER = (
    "0056649006c7a250cb4174f1e924768ba2c9d599",
    "1357538fd1fd2975a8b3f750d5f6b13695aa4e28",
    "k_NT43aJ_Jw",
)


def load_script() -> Callable[[Sequence[str]], int]:
    """The `main` of scripts/evaluate.py, which is no module of the package."""
    path = Path(__file__).parents[2] / "scripts" / "evaluate.py"
    spec = importlib.util.spec_from_file_location("evaluate", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["evaluate"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    run: Callable[[Sequence[str]], int] = module.main
    return run


main = load_script()


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The options of every command: the encoder, the network and a cache of features."""
    folder = tmp_path_factory.mktemp("weights")
    write_grid(folder / "grid.onnx", around_mean=True)
    save_mask_step(plain_net(), folder / "net.safetensors", trained_on="grid", configuration={})
    return [
        *("--encoder", str(folder / "grid.onnx")),
        *("--mask-step", str(folder / "net.safetensors")),
        *("--cache", str(folder / "cache")),
        *("--sequence", str(folder / "nothing")),
        *("--threshold", "0.5"),
        *("--min-confidence", "0.5"),
    ]


def channel_pictures(parts: list[tuple[int, float, int]]) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """Pictures of a channel: sections of films, each by seed, first second and length."""
    number = 0
    for seed, start_s, length_s in parts:
        for n in range(length_s * FPS):
            yield number / FPS, media.picture(seed, start_s + n / FPS, **SIDES)
            number += 1


# ch0, seconds   0.......14.......32.......46
#                other 90 | film 1 from 10 | other 91
@pytest.fixture(scope="module")
def broadcast(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("broadcast")
    (folder / "references").mkdir()
    for seed in (1, 2):
        media.write_film(folder / "references" / f"film{seed}.mp4", seed, 40, fps=FPS, **SIDES)
    media.write_clip(folder / "ch0.ts", channel_pictures([(90, 0, 14), (1, 10, 18), (91, 0, 14)]), fps=FPS)
    truth = {
        "channel": "ch0",
        "reference": "film1",
        "channel_start": 14.0,
        "channel_end": 32.0,
        "reference_start": 10.0,
        "reference_end": 28.0,
        "edits": ["logo"],
    }
    (folder / "truth.jsonl").write_text(json.dumps(truth) + "\n")
    return folder


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main([*arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def rows_of(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["row"]: row for row in report["rows"]}


@pytest.mark.slow
def test_broadcast_has_every_row(broadcast: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    background = ["--background", str(broadcast / "references")]
    rows = rows_of(as_json(capsys, "broadcast", str(broadcast), *options, *background))
    assert list(rows) == [row.name for row in ROWS]
    for row in ROWS:
        if row.sequence:
            assert rows[row.name] == {"row": row.name, "missing": "no SE weights"}
        elif row.correction == "none":
            assert rows[row.name]["best"]["iou>0.5"]["f1"] == 1.0, row.name
    ours = rows["+refined = ours"]
    assert ours["own"]["iou>0.7"] == {"sp": 1.0, "sr": 1.0, "f1": 1.0}
    assert (ours["false_alarms"], ours["alerts_per_found_copy"]) == (0, 1.0)
    assert ours["recall_by_edit"] == {"logo": "1/1"}
    assert 2 <= ours["seconds_to_alert"]["median"] <= 14
    assert rows["HV"]["setting"] in (0.3, 0.4, 0.5, 0.6, 0.7)


def test_broadcast_prints_a_table_and_draws_plots(
    broadcast: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["broadcast", str(broadcast), *options, "--rows", "ours", "HV", "--plots", str(tmp_path / "plots")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "1 channels, 0.01 h, 2 references, 1 copies" in out
    assert "IoU > 0.5" in out
    assert "HV+SE                   no SE weights" in out
    assert "ours+norm in maps       no background videos" in out
    assert "recall by edit: logo 1/1" in out
    (plot,) = (tmp_path / "plots").glob("*.png")
    assert plot.name == "000-found-ch0-14-film1.png"
    assert len(np.unique(np.asarray(Image.open(plot)).reshape(-1, 3), axis=0)) > 20


def test_a_copy_that_was_missed_and_a_false_alarm_are_named(
    broadcast: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("references", "ch0.ts"):
        (tmp_path / name).symlink_to(broadcast / name)
    truth = json.loads((broadcast / "truth.jsonl").read_text()) | {"reference": "film2"}
    (tmp_path / "truth.jsonl").write_text(json.dumps(truth))
    assert main(["broadcast", str(tmp_path), *options, "--rows", "= ours"]) == 0
    out = capsys.readouterr().out
    assert "missed (0.000): ch0 14.0-32.0 film2 10.0-28.0 logo" in out
    assert "): ch0 14.0-32.0 film1 " in out.split("false (")[1]


def test_a_broadcast_without_copies_gives_false_alarms_per_hour(
    broadcast: Path, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("references", "ch0.ts"):
        (tmp_path / name).symlink_to(broadcast / name)
    (tmp_path / "truth.jsonl").write_text("")
    assert main(["broadcast", str(tmp_path), *options, "--rows", "= ours"]) == 0
    out = capsys.readouterr().out
    assert "per hour" in out
    assert "1 false alarms (78.26 per hour)" in out  # film1 is shown but not in the truth: 1 in 46 s


def test_what_alerts_state_is_counted(broadcast: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    (statements,) = as_json(capsys, "alerts", str(broadcast), *options).values()
    assert (statements["n_true"], statements["n_found"], statements["started_per_found"]) == (1, 1, 1.0)
    assert (statements["n_wrong"], statements["n_speeds_unlike_spans"]) == (0, 0)
    assert main(["alerts", str(broadcast), *options]) == 0
    assert "started per found        1.0" in capsys.readouterr().out


def test_airings_and_halves_of_films(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        media.write_film(tmp_path / f"film{seed}.mp4", seed, 24, fps=FPS, **SIDES)
    report = as_json(capsys, "airings", str(tmp_path), "film1", "--airings", "2", *options)
    assert (list(report), report["film1"]["n_true"], report["film1"]["n_wrong"]) == (["film1"], 2, 0)
    assert main(["airings", str(tmp_path), "nothing", *options]) == 1
    assert "no video nothing in" in capsys.readouterr().err
    report = as_json(capsys, "halves", str(tmp_path), *options)
    assert report["videos"] == 3


@pytest.mark.slow
def test_sensitivity_runs_every_value(broadcast: Path, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    rows = as_json(capsys, "sensitivity", str(broadcast), *options)["rows"]
    tried = [(letter, row[letter]) for row in rows for letter in ("tau", "sigma", "gamma") if letter in row]
    assert tried == [
        *(("tau", value) for value in (0.1, 0.2, 0.3, 0.4)),
        *(("sigma", value) for value in (0.1, 0.2, 0.3)),
        *(("gamma", value) for value in (10.0, 100.0, 500.0, 1000.0)),
    ]
    assert rows[2]["own"] == rows[4]["own"] == rows[8]["own"]  # the defaults, three times
    assert rows[2]["own"]["iou>0.5"]["f1"] == 1.0


@pytest.mark.slow
def test_reliability_counts_right_alerts_by_confidence(
    broadcast: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = as_json(capsys, "reliability", str(broadcast), *options)
    (ended,) = report["alert.ended"]["bins"]
    assert (ended["from"], ended["alerts"], ended["share_right"]) == (0.95, 1, 1.0)
    (started,) = report["alert.started"]["bins"]
    assert started["alerts"] == 1
    assert started["mean_confidence"] <= ended["mean_confidence"]
    assert main(["reliability", str(broadcast), *options]) == 0
    assert "alert.ended, calibration error 0.0" in capsys.readouterr().out


@pytest.mark.slow
def test_pairs_are_made_and_evaluated(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in range(3):
        media.write_film(tmp_path / f"film{seed}.mp4", seed, 24, fps=FPS, **SIDES)
    arguments = ["pairs", str(tmp_path), *options, "--per-video", "2", "--strength", "0", "--seed", "3"]
    report = as_json(capsys, *arguments)
    assert report["about"] == "9 pairs of 3 videos, 6 copies, 3 unrelated"
    rows = rows_of(report)
    assert list(rows) == [row.name for row in ROWS]
    assert rows["+refined = ours"]["true_copies"] == 6
    assert rows["+refined = ours"]["best"]["iou>0"]["f1"] > 0.5


def write_labelled_videos(folder: Path) -> Path:
    """Two videos by id: the second shows seconds 8 to 20 of the first from its second 10 on."""
    media.write_film(folder / f"{FILM}.mp4", 1, 30, fps=FPS, **SIDES)
    media.write_clip(folder / f"{COPY}.mkv", channel_pictures([(90, 0, 10), (1, 8, 12), (91, 0, 8)]), fps=FPS)
    return folder


def test_vcdb_labels(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    shared = {f"{COPY}-{FILM}": [[10, 8, 22, 20]], f"{FILM}-{FILM}": [[0, 0, 30, 30]], f"{FILM}-gone": [[0, 0, 5, 5]]}
    (labels / "label_file.json").write_text(json.dumps(shared))
    (labels / "pair_file.csv").write_text(f"query_id,reference_id\n{COPY},{FILM}\n{FILM},{FILM}\n{FILM},gone\n")
    videos = write_labelled_videos(tmp_path)
    report = as_json(capsys, "annotations", "vcdb", str(labels), str(videos), *options)
    assert report["missing_videos"] == ["gone"]
    assert "2 pairs, 2 labelled sections of 3" in report["about"]
    assert "1 of 3 videos are missing: gone" in report["about"]
    assert rows_of(report)["+refined = ours"]["own"]["iou>0.5"]["sr"] == 1.0


def test_fivr_labels(options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "labels.txt").write_text(f"{FILM};{COPY};8;20;10.2;22.1\n{FILM};{OTHER};3;3;1.5;2.75\n")
    videos = write_labelled_videos(tmp_path)
    media.write_film(videos / f"{OTHER}.mp4", 55, 12, fps=FPS, **SIDES)
    arguments = ["annotations", "fivr", str(tmp_path / "labels.txt"), str(videos), *options, "--all-pairs"]
    report = as_json(capsys, *arguments)
    assert report["missing_videos"] == []
    assert "3 pairs, 2 labelled sections of 2" in report["about"]  # the third pair is unrelated
    assert rows_of(report)["+refined = ours"]["own"]["iou>0.5"]["sr"] == 0.5


@pytest.mark.parametrize("command", [["broadcast"], ["sensitivity"], ["pairs"], ["annotations", "fivr", "missing"]])
def test_a_folder_without_videos_is_refused_in_one_sentence(
    command: list[str], options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, str(tmp_path), *options]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("evaluate: ")
