"""`copywatch doctor`: checks this machine and the configuration.

Each fault says how to fix it. Nothing is changed, except that a missing data folder is created.
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import typer

from monitor.commands.terminal import (
    FAILED,
    UNREACHABLE,
    ConfigOption,
    DataDirOption,
    JsonOption,
    print_json,
    print_table,
    settings_of,
)
from monitor.config.settings import ChannelSettings, Settings
from monitor.errors import MonitorError
from reference_db.errors import CatalogError, MediaError
from reference_db.media.addresses import DEFAULT_PORTS
from reference_db.store.disk import create_private_folder

CONNECT_TIMEOUT_S = 3.0
MAX_NAMED = 5  # references named in a finding
LEAST_FREE_BYTES = 1_000_000_000  # features and pictures take about 10 MB per hour of video


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    what: str
    found: str
    ok: bool = True
    unreachable: bool = False


def doctor(
    context: typer.Context,
    config_file: ConfigOption = None,
    data_dir: DataDirOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check this machine and the configuration; each fault says how to fix it."""
    findings = list(examine(settings_of(context, config_file, data_dir)))
    if as_json:
        print_json([dataclasses.asdict(finding) for finding in findings])
    else:
        print_table(("", "WHAT", "FOUND"), [("ok" if one.ok else "FAULT", one.what, one.found) for one in findings])
    faults = [finding for finding in findings if not finding.ok]
    if faults:
        raise typer.Exit(UNREACHABLE if all(fault.unreachable for fault in faults) else FAILED)


def examine(settings: Settings) -> Iterator[Finding]:
    """Every finding, fastest check first."""
    yield _libraries()
    yield from _sandbox()
    yield _data_dir(settings.data_dir)
    yield _web(settings.web.host, settings.web.port)
    yield from _models(settings)
    for channel in settings.channels:
        yield _channel(channel)


def _libraries() -> Finding:
    import apsw
    import av

    return Finding(
        "libraries", f"PyAV {av.__version__}, FFmpeg {av.ffmpeg_version_info}, SQLite {apsw.sqlite_lib_version()}"
    )


def _sandbox() -> Iterator[Finding]:
    """What confines a decoding child here; a system without one of the mechanisms still decodes."""
    from reference_db.media.decoding import sandbox_report

    try:
        mechanisms = sandbox_report()
    except MediaError as error:
        yield Finding("decoder sandbox", f"{error} Run `copywatch doctor` with COPYWATCH_LOG_LEVEL=debug", ok=False)
        return
    for one in mechanisms:
        found = f"in force ({one.detail})" if one.in_force else f"not available here: {one.detail}"
        yield Finding(f"decoder sandbox: {one.name}", found, ok=one.in_force or one.name != "seccomp")


def _data_dir(data_dir: Path) -> Finding:
    try:
        create_private_folder(data_dir)
        with tempfile.TemporaryFile(dir=data_dir):
            free = shutil.disk_usage(data_dir).free
    except OSError as error:
        fix = "make it writable or set COPYWATCH_DATA_DIR"
        return Finding("data folder", f"{data_dir} cannot be written ({error.strerror}); {fix}", ok=False)
    if free < LEAST_FREE_BYTES:
        return Finding("data folder", f"{data_dir} has only {free // 1_000_000} MB left; free some space", ok=False)
    shared = data_dir.stat().st_mode & 0o077
    advice = f"; other users may enter it: `chmod -R go= {data_dir}` keeps them out" if shared else ""
    return Finding("data folder", f"{data_dir}, {free / 1e9:.0f} GB free{advice}")


def _web(host: str, port: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            fix = "stop the program that listens there or set web.port"
            return Finding("web port", f"{host}:{port} is not available ({error.strerror}); {fix}", ok=False)
    return Finding("web port", f"{host}:{port} is free")


def _models(settings: Settings) -> Iterator[Finding]:
    import numpy as np

    from monitor.runtime.models import load_models
    from reference_db.search.index import ReferenceIndex
    from reference_db.store.catalog import Catalog

    try:
        models = load_models(settings)
    except (MonitorError, CatalogError) as error:
        yield Finding("models", str(error), ok=False)
        return
    picture = np.random.default_rng(0).integers(0, 255, (192, 341, 3), dtype=np.uint8)
    models.encoder.encode([picture])
    started_s = time.perf_counter()
    models.encoder.encode([picture])
    yield Finding("models", f"{models.name}, {1000 * (time.perf_counter() - started_s):.0f} ms per picture")
    try:
        with Catalog.open(settings.data_dir) as catalog:
            index = ReferenceIndex.build(catalog, models.encoder.encoder_id)
    except CatalogError as error:
        yield Finding("library", str(error), ok=False)
        return
    if index.damaged:
        names = ", ".join(list(index.damaged)[:MAX_NAMED])
        found = f"{len(index.damaged)} references are damaged and not searched ({names}); run `copywatch refs verify`"
        yield Finding("library", found, ok=False)
        return
    seconds = sum(reference.n_seconds for reference in index.references)
    yield Finding("library", f"{len(index.references)} references, {seconds / 3600:.1f} h")


def _channel(channel: ChannelSettings) -> Finding:
    what = f"channel {channel.name}"
    address = urlsplit(channel.url)
    if address.scheme in ("", "file"):
        path = Path(channel.url.removeprefix("file://"))
        if path.is_file():
            return Finding(what, f"{path} exists")
        return Finding(what, f"{path} does not exist", ok=False, unreachable=True)
    if address.scheme not in DEFAULT_PORTS:
        return Finding(what, f"{address.scheme} cannot be checked: datagrams are not answered")
    endpoint = (address.hostname or "", address.port or DEFAULT_PORTS[address.scheme])
    try:
        with socket.create_connection(endpoint, timeout=CONNECT_TIMEOUT_S):
            return Finding(what, f"{endpoint[0]}:{endpoint[1]} answers")
    except OSError as error:
        found = f"{endpoint[0]}:{endpoint[1]} does not answer ({error.strerror or error}); check url and network"
        return Finding(what, found, ok=False, unreachable=True)
