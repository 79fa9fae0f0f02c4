"""`copywatch check`: copies in recordings."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    JsonOption,
    clock,
    print_error,
    print_json,
    print_table,
    progress_bar,
    settings_of,
)
from reference_db.errors import CatalogError
from reference_db.store.disk import write_file


def check(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Recordings of a channel.")],
    channel: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="The channel's name; default: the file name without its extension."),
    ] = None,
    segments: Annotated[
        Path | None, typer.Option(metavar="OUT.jsonl", help="Write one JSON object per copy to this file.")
    ] = None,
    evidence: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Store the evidence of each copy in a folder of its own in this folder."),
    ] = None,
    fail_on_match: Annotated[bool, typer.Option(help="Exit with 1 when a copy is found.")] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Search recordings for copies with the pipeline of `serve`, as fast as possible."""
    if channel is not None and len(files) > 1:
        raise typer.BadParameter("--channel names one recording; check the files one by one.")
    if segments is not None and not segments.parent.is_dir():  # now, not after hours of work
        raise typer.BadParameter(f"there is no folder {segments.parent}; create it first.", param_hint="--segments")
    if evidence is not None:
        _create_folder(evidence)
    settings = settings_of(context, config_file, data_dir)
    from monitor.runtime.check import check_file

    found: list[dict[str, Any]] = []
    n_failed = 0
    for file in files:
        try:
            with progress_bar(file.name) as update:
                found += check_file(file, channel or file.stem, settings=settings, progress=update, evidence=evidence)
        except CatalogError as error:
            print_error(error)
            n_failed += 1
    if evidence is not None and (n_missing := sum(one["evidence"] is None for one in found)):
        print_error(f"The evidence of {n_missing} of {len(found)} copies could not be stored in {evidence}.")
        n_failed += n_missing
    if segments is not None:
        _write_lines(segments, found)
    if as_json:
        print_json(found)
    else:
        _print_segments(found)
    if n_failed or (fail_on_match and found):
        raise typer.Exit(FAILED)


def _create_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"cannot create the folder {folder}: {error.strerror}"
        raise typer.BadParameter(reason, param_hint="--evidence") from error


def _print_segments(found: list[dict[str, Any]]) -> None:
    if not found:
        typer.echo("no copy found")
        return
    rows = [
        (
            segment["channel"],
            f"{clock(segment['channel_start'])}-{clock(segment['channel_end'])}",
            segment["reference"],
            f"{clock(segment['reference_start'])}-{clock(segment['reference_end'])}",
            "-" if segment["speed"] is None else f"{segment['speed']:.2f}x",
            f"{segment['confidence']:.2f}",
            segment["licence"] or "-",
        )
        for segment in found
    ]
    print_table(("CHANNEL", "ON AIR", "REFERENCE", "IN REFERENCE", "SPEED", "CONFIDENCE", "LICENCE"), rows)


def _write_lines(path: Path, values: Iterable[object]) -> None:
    lines = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    write_file(path, lines.encode())
