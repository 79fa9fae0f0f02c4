"""`copywatch refs`: the library of references on the command line, with the words of `ReferenceLibrary`."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from monitor.commands.audited import audited
from monitor.commands.terminal import (
    FAILED,
    ConfigOption,
    DataDirOption,
    IdArgument,
    JsonOption,
    NoteOption,
    clock,
    print_error,
    print_json,
    print_table,
    printable,
    progress_bar,
    settings_of,
)
from monitor.ops.memory_cap import capped_memory, registration_bytes
from reference_db.errors import CatalogError, StorageError
from reference_db.library import AddResult, FoundVideos, ReferenceLibrary, find_videos

if TYPE_CHECKING:
    from monitor.config.settings import Settings
    from reference_db.registration import Registration
    from reference_db.store.verification import Repair, Verification

app = typer.Typer(no_args_is_help=True, help="The library of references.")


def _library(
    context: typer.Context, config_file: Path | None, data_dir: Path | None
) -> tuple[ReferenceLibrary, Settings]:
    from monitor.runtime.findability_meter import FindabilityMeter

    settings = settings_of(context, config_file, data_dir)
    threads, meter = settings.compute.threads, FindabilityMeter(settings)
    return ReferenceLibrary(settings.data_dir, settings.encoder, threads=threads, findability=meter), settings


# --- add -------------------------------------------------------------------------------------------------------------


@app.command("add")
def add(
    context: typer.Context,
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Videos, folders of videos, or - for a list on stdin.")
    ],
    reference_id: Annotated[
        str | None, typer.Option("--id", help="Id of the reference; default: the file name without its extension.")
    ] = None,
    title: Annotated[str | None, typer.Option(help="Title to show.")] = None,
    owner: Annotated[str, typer.Option(help="Owner of the rights.")] = "",
    tag: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A tag; repeatable.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Register videos: decode, encode, store. A file is registered once; an interrupted run can be repeated."""
    tags = _tags(tag or [])
    library, settings = _library(context, config_file, data_dir)
    found = find_videos(_with_stdin(paths))
    if len(found.videos) > 1 and (reference_id or title):
        raise typer.BadParameter("--id and --title name one video; register the files one by one.")
    results: list[dict[str, object]] = []
    failed: list[AddResult] = []
    memory_bytes = registration_bytes(settings.registration.memory_bytes, library.n_seconds())
    with (
        audited(settings.data_dir, "refs add", files=len(found.videos)) as recording,
        _AddProgress(found) as bar,
        capped_memory(memory_bytes),
    ):
        outcomes = library.add(
            found,
            id=reference_id,
            title=title,
            owner=owner,
            tags=tags,
            thumbnails=settings.registration.thumbnails,
            on_file=bar.start,
            progress=bar.update,
        )
        for done in outcomes:
            if done.registration is None:
                failed.append(done)
                recording.failed = True
                results.append({"file": str(done.path), "error": str(done.error)})
                continue
            results.append({"file": str(done.path), **_as_dict(done.registration)})
            if not done.registration.already_there:
                recording.add(done.registration.reference.id, outcome=done.registration.outcome)
            if not as_json:
                _print_registration(done.registration)
    if as_json:
        print_json(results)
    _print_failures(found, failed)


def _with_stdin(paths: Sequence[Path]) -> Iterator[Path]:
    """The paths, with `-` replaced by those on stdin: one per line, or separated by NUL."""
    for path in paths:
        if str(path) != "-":
            yield path
            continue
        lines = sys.stdin.buffer.read()
        for line in lines.split(b"\0" if b"\0" in lines else b"\n"):
            if line.strip():
                yield Path(line.rstrip(b"\r").decode(errors="surrogateescape"))


def _as_dict(done: Registration) -> dict[str, object]:
    return {"outcome": done.outcome, "already_there": done.already_there, **dataclasses.asdict(done)}


def _print_registration(done: Registration) -> None:
    reference = done.reference
    blank = f", {reference.n_uninformative} s of them black or flat" if reference.n_uninformative else ""
    shortest_s = None if done.report is None else done.report.shortest_findable_s
    found = "" if shortest_s is None else f"; copies are found from {shortest_s} s on"
    typer.echo(f"{done.outcome}: {reference.id} ({reference.n_seconds} s{blank}{found})")
    for warning in done.report.warnings if done.report else ():
        typer.echo(f"  note: {warning}")


def _print_failures(found: FoundVideos, failed: Sequence[AddResult]) -> None:
    """Prints the failed files last, where they are seen; exits with 1 if there are any."""
    for one in failed:
        print_error(one.error)
    n_files = len(found.videos) + len(found.errors)
    if failed and n_files > 1:
        print_error(f"{len(failed)} of {n_files} files were not registered.")
    if found.n_skipped:
        print_error(f"Skipped {found.n_skipped} files in folders: their names have no video extension.")
    if failed:
        raise typer.Exit(FAILED)
    if not n_files:
        print_error("No video found.")
        raise typer.Exit(FAILED)


def _tags(pairs: Sequence[str]) -> dict[str, str]:
    tags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}.", param_hint="--tag")
        tags[key] = value
    return tags


class _Speed(ProgressColumn):
    """Speed: as a multiple of real time for one video, in bytes per second for all."""

    def render(self, task: Task) -> Text:
        speed = task.completed / task.elapsed if task.elapsed else 0.0
        return Text(f"{speed:.1f}x" if task.fields["unit"] == "s" else f"{speed / 1e6:.1f} MB/s")


class _AddProgress:
    """Bars on stderr for the current video and for all, with speed and time left; only on a terminal."""

    def __init__(self, found: FoundVideos) -> None:
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            _Speed(),
        )
        self._progress = Progress(
            *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._sizes = {path: path.stat().st_size if path.is_file() else 0 for path in found.videos}
        self._n_files, self._n_started = len(found.videos), 0
        self._bytes_before, self._size = 0, 0
        many = self._n_files > 1
        self._all = self._progress.add_task("all", total=found.n_bytes, unit="B", done="") if many else None
        self._one = self._progress.add_task("", total=None, unit="s", done="")

    def __enter__(self) -> _AddProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, path: Path) -> None:
        """The next video."""
        self._bytes_before += self._size
        self._size = self._sizes[path]
        self._n_started += 1
        # All fields are passed: `reset` clears those that are not.
        self._progress.reset(self._one, total=None, description=path.name, unit="s", done="")
        self._show_all(0.0)

    def update(self, done_s: int, total_s: int | None) -> None:
        """Seconds done of the current video."""
        done = f"{clock(done_s)} of {clock(total_s)}" if total_s else clock(done_s)
        self._progress.update(self._one, completed=done_s, total=total_s, done=done)
        self._show_all(done_s / total_s if total_s else 0.0)

    def _show_all(self, share: float) -> None:
        if self._all is not None:
            done = self._bytes_before + share * self._size
            self._progress.update(self._all, completed=done, done=f"{self._n_started} of {self._n_files} videos")


# --- list, show, rm --------------------------------------------------------------------------------------------------


@app.command("list")
def list_(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the references; damaged ones are listed on stderr."""
    contents = _library(context, config_file, data_dir)[0].list()
    if as_json:
        print_json([dataclasses.asdict(reference) for reference in contents.references])
    else:
        rows = [
            (one.id, clock(one.n_seconds), one.owner, one.title, printable(one.added_at)) for one in contents.references
        ]
        print_table(("ID", "LENGTH", "OWNER", "TITLE", "ADDED"), rows)
    for id, what in contents.damaged.items():
        print_error(f"{id} is damaged and not searched: {what}; run `copywatch refs verify`.")
    if contents.problem:
        print_error(f"The catalogue is damaged: {contents.problem}; run `copywatch refs verify --repair`.")


@app.command("show")
def show(
    context: typer.Context,
    reference_id: IdArgument,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one reference, and how well it can be recognised and distinguished from the others."""
    found = _library(context, config_file, data_dir)[0].show(reference_id)
    if as_json:
        print_json({**dataclasses.asdict(found.reference), "report": dataclasses.asdict(found.report)})
        return
    for name, value in dataclasses.asdict(found.reference).items():
        value = ", ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else value
        typer.echo(f"{name:19} {printable(value)}")
    for name in ("longest_static_s", "still_share", "repeated_share", "shortest_findable_s"):
        value = getattr(found.report, name)
        typer.echo(f"{name:19} {round(value, 2) if isinstance(value, float) else printable(value)}")
    for warning in found.report.warnings:
        typer.echo(f"note: {warning}")


@app.command("rm")
def rm(
    context: typer.Context,
    reference_ids: Annotated[list[str], typer.Argument(metavar="ID...")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Remove references; running monitors drop them within seconds and end their alerts."""
    library, settings = _library(context, config_file, data_dir)
    n_failed = 0
    for reference_id in reference_ids:
        try:
            with audited(settings.data_dir, "refs rm", reference_id):
                library.rm(reference_id)
            typer.echo(f"removed: {reference_id}")
        except StorageError:
            raise
        except CatalogError as error:
            print_error(error)
            n_failed += 1
    if n_failed:
        raise typer.Exit(FAILED)


# --- verify ----------------------------------------------------------------------------------------------------------


@app.command("verify")
def verify(
    context: typer.Context,
    repair: Annotated[
        bool, typer.Option("--repair", help="First rebuild a damaged catalogue from the feature files.")
    ] = False,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check every byte of the library against its hash; exit 1 if anything is damaged."""
    library, settings = _library(context, config_file, data_dir)
    repaired = None
    if repair:
        with audited(settings.data_dir, "refs verify", "--repair"):
            repaired = library.repair()
    with progress_bar("references", unit="") as step:
        found = library.verify(progress=step)
    if as_json:
        done = None if repaired is None else dataclasses.asdict(repaired)
        print_json({"whole": found.is_whole, **dataclasses.asdict(found), "repair": done})
    else:
        if repaired is not None:
            _print_repair(repaired)
        _print_verification(found)
    if not found.is_whole:
        raise typer.Exit(FAILED)


def _print_repair(done: Repair) -> None:
    restored = ", ".join(done.restored) or "nothing"
    typer.echo(f"restored from feature files: {restored}; the previous catalogue is {done.backup}")
    if not done.is_certain and done.restored:
        typer.echo("  note: the checksum was damaged too, so removed references may be among them.")
    if done.n_lost:
        typer.echo(f"  note: {done.n_lost} references have lost both row and file; register their videos again.")


def _print_verification(found: Verification) -> None:
    for id, what in found.damaged.items():
        typer.echo(f"damaged: {id}: {what}; not searched. Register its video again, or run `copywatch refs rm {id}`.")
    for id, what in found.without_thumbnails.items():
        typer.echo(f"no pictures: {id}: {what}; searched, but evidence has no pictures of it.")
    for id in found.released:
        typer.echo(f"OK again: {id}")
    for problem in found.problems:
        typer.echo(f"fault: {problem}")
    state = "OK" if found.is_whole else "DAMAGED"
    typer.echo(f"{state}: {found.n_references} references, {found.n_bytes / 1e6:.1f} MB read")


@app.command("reindex")
def reindex(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the index from the features. A damaged index is rebuilt without this command."""
    index = _library(context, config_file, data_dir)[0].reindex()
    if as_json:
        print_json(dataclasses.asdict(index))
    else:
        typer.echo(f"indexed: {index.n_references} references, {index.n_seconds} s")
    for id, what in index.damaged.items():
        print_error(f"{id} is damaged and not searched: {what}; run `copywatch refs verify`.")
    if index.damaged:
        raise typer.Exit(FAILED)


# --- export, import --------------------------------------------------------------------------------------------------


@app.command("export")
def export(
    context: typer.Context,
    reference_id: IdArgument,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="File or folder; default: ID.copywatch.")
    ] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Write one reference to a file: features only, not the video."""
    path = _library(context, config_file, data_dir)[0].export(reference_id, output)
    typer.echo(f"exported: {path} ({path.stat().st_size / 1000:.0f} kB)")


@app.command("import")
def import_(
    context: typer.Context,
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files that `refs export` wrote.")],
    reference_id: Annotated[str | None, typer.Option("--id", help="Import it under this id.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Import references from files that `refs export` wrote."""
    if len(files) > 1 and reference_id:
        raise typer.BadParameter("--id names one reference; import the files one by one.")
    library, settings = _library(context, config_file, data_dir)
    memory_bytes = registration_bytes(settings.registration.memory_bytes, library.n_seconds())
    results: list[dict[str, object]] = []
    n_failed = 0
    for file in files:
        try:
            with (
                audited(settings.data_dir, "refs import", reference_id) as recording,
                capped_memory(memory_bytes),
            ):
                done = library.import_(file, id=reference_id)
                recording.object, recording.details = done.reference.id, {"outcome": done.outcome}
        except StorageError:
            raise
        except CatalogError as error:
            print_error(error)
            n_failed += 1
            continue
        results.append({"file": str(file), **_as_dict(done)})
        if not as_json:
            _print_registration(done)
    if as_json:
        print_json(results)
    if n_failed:
        raise typer.Exit(FAILED)


# --- exclude, exclusions, include ------------------------------------------------------------------------------------


@app.command("exclude")
def exclude(
    context: typer.Context,
    reference: IdArgument,
    start: Annotated[str, typer.Argument(metavar="START", help="Seconds, or hours:minutes:seconds.")],
    end: Annotated[str, typer.Argument(metavar="END")],
    note: NoteOption = "",
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Exclude a span of a reference from alerts, such as an ident or end credits."""
    from monitor.rights.store import RightsStore
    from reference_db.store.catalog import Catalog, check_id

    start_s, end_s = _seconds(start), _seconds(end)
    folder = settings_of(context, config_file, data_dir).data_dir
    with Catalog.open(folder) as catalog:
        catalog.get(check_id(reference))  # a misspelt id would silently exclude nothing
    with audited(folder, "refs exclude", reference) as recording:
        exclusion = RightsStore(folder).exclude(reference, start_s, end_s, note)
        recording.object, recording.details = f"{reference}/{exclusion.id}", {"span": exclusion.span}
    if as_json:
        print_json(exclusion.as_dict())
    else:
        typer.echo(f"{exclusion.id}: {clock(start_s)}-{clock(end_s)} of {reference} is excluded from alerts")


def _seconds(text: str) -> float:
    """Seconds from 90, 1:30 or 0:01:30."""
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", text):
        raise typer.BadParameter(f"expected seconds or hours:minutes:seconds, got {text!r}.")
    seconds = 0.0
    for part in text.split(":"):
        seconds = 60 * seconds + float(part)
    return seconds


@app.command("exclusions")
def exclusions(
    context: typer.Context,
    reference: Annotated[str | None, typer.Argument(metavar="[ID]", help="Only of this reference.")] = None,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """List the excluded spans."""
    from monitor.rights.store import RightsStore

    found = RightsStore(settings_of(context, config_file, data_dir).data_dir).exclusions(reference)
    if as_json:
        print_json([exclusion.as_dict() for exclusion in found])
        return
    rows = [(one.id, one.reference, f"{clock(one.start_s)}-{clock(one.end_s)}", one.note) for one in found]
    print_table(("N", "REFERENCE", "IN REFERENCE", "NOTE"), rows)


@app.command("include")
def include(
    context: typer.Context,
    reference: IdArgument,
    number: Annotated[int, typer.Argument(metavar="N", help="Number shown by `refs exclusions`.")],
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
) -> None:
    """Remove an exclusion; the span alerts again."""
    from monitor.rights.store import RightsStore

    folder = settings_of(context, config_file, data_dir).data_dir
    with audited(folder, "refs include", f"{reference}/{number}"):
        RightsStore(folder).remove_exclusion(reference, number)
    typer.echo(f"removed: exclusion {number} of {reference}")
