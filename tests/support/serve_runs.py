"""Runs of a real `copywatch serve` that can be killed: a library, and a recording that contains parts of its film."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from monitor.demo.films import Film
from reference_db.features.encoder import load_encoder
from reference_db.registration import register
from reference_db.store.catalog import Catalog
from tests.support import media

FPS = 4
FILM = Film("film", "The Film", 77, ("hills", "face", "city", "card"), 40.0)
OTHER = Film("other", "Other", 88, ("marble", "wheel", "patchwork", "cells"), 3600.0)
TIMEOUT_S = 300.0


@dataclass(frozen=True)
class SampleLibrary:
    """A library with one film, and a recording with two parts of it."""

    library: Path
    recording: Path

    def config(self, folder: Path, url: str, *, data: Path | None = None) -> Path:
        """Writes a configuration for one channel, with this library, or with a copy of it in `data`."""
        folder.mkdir(parents=True, exist_ok=True)
        if data is not None:
            shutil.copytree(self.library, data, dirs_exist_ok=True)
        else:
            data = folder / "data"
            data.mkdir()
            for part in self.library.iterdir():
                (data / part.name).symlink_to(part)
        config = folder / "copywatch.yaml"
        config.write_text(
            f"data_dir: {data.absolute()}\nalerting: {{output: alerts.jsonl}}\nweb: {{port: 0}}\n"
            f'channels: [{{name: ch5, url: "{url}", mode: exact}}]\n'
        )
        return config


def build_sample_library(folder: Path) -> SampleLibrary:
    """Registers the film and writes the recording."""
    film = media.write_clip(folder / "film.mp4", media.pieces(FPS, (FILM, 0, 40)), fps=FPS)
    with Catalog.open(folder / "library", write=True) as catalog:
        register(film, catalog, load_encoder())
    air = media.pieces(FPS, (OTHER, 0, 10), (FILM, 6.3, 16), (OTHER, 100, 20), (FILM, 20.2, 14), (OTHER, 200, 20))
    clip = media.write_clip(folder / "air.ts", air, fps=FPS)
    return SampleLibrary(folder / "library", clip)


class ServeRun:
    """One run of `serve`, killed at a named point if one is given."""

    def __init__(
        self,
        config: Path,
        point: str = "none",
        count: int = 1,
        *,
        under: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        known = {name: value for name, value in os.environ.items() if not name.startswith("COPYWATCH_")}
        self.process = subprocess.Popen(
            [
                *under,
                sys.executable,
                "-m",
                "tests.support.killed_serve",
                point,
                str(count),
                "serve",
                "--config",
                str(config),
            ],
            stderr=subprocess.PIPE,
            text=True,
            env={**known, **(environment or {})},
        )
        self.log: list[str] = []
        self._log_grew = threading.Condition()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stderr
        for line in self.process.stderr:
            with self._log_grew:
                self.log.append(line)
                self._log_grew.notify_all()

    def wait_for(self, text: str) -> None:
        with self._log_grew:
            found = self._log_grew.wait_for(lambda: any(text in line for line in self.log), TIMEOUT_S)
        assert found, f"no {text!r} in the log:\n{''.join(self.log)}"

    def end(self, number: int = signal.SIGKILL) -> int:
        """Sends the signal; returns the exit code."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT_S)


def alert_lines(config: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (config.parent / "alerts.jsonl").read_text().splitlines()]
