"""Recordings: videos as feature rows, encoded once and cached, so that every run of an evaluation only matches.

The cache is keyed by the content of the file and the encoder's id.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from reference_db.features.picture_detail import is_informative
from reference_db.media.decoding import decode_file
from reference_db.media.frames import Frame, Mode
from reference_db.store.disk import atomic_file
from reference_db.store.references import FEATURE_SIZE

BATCH = 16  # pictures per call of the encoder
HELD = ("held", "ages_s")  # further columns of a recording whose key frames alone were decoded


class PictureEncoder(Protocol):
    """Encodes pictures as rows, such as `reference_db.features.encoder.Encoder`."""

    @property
    def encoder_id(self) -> str: ...

    def encode(self, pictures: Sequence[NDArray[np.uint8]]) -> NDArray[np.float32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A video, second by second; a missing second is a row of zeros and not informative."""

    name: str
    rows: NDArray[np.float32]  # [seconds, 512]
    informative: NDArray[np.bool_]  # [seconds]
    held: NDArray[np.bool_] | None = None  # [seconds]: repeated, since only key frames were decoded
    ages_s: NDArray[np.float64] | None = None  # [seconds]: age of a held picture

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.informative.shape != self.rows.shape[:1]:
            raise ValueError(f"rows must be [n, size], informative [n]: {self.rows.shape}, {self.informative.shape}")
        self.rows.flags.writeable = False
        self.informative.flags.writeable = False

    @property
    def seen(self) -> NDArray[np.bool_]:
        seen: NDArray[np.bool_] = np.any(self.rows != 0, axis=1)
        return seen

    @property
    def hours(self) -> float:
        return len(self.rows) / 3600

    def with_all_informative(self) -> Recording:
        """The recording with every known second as informative."""
        return replace(self, informative=self.seen)

    def is_held(self, second: int) -> bool:
        return self.held is not None and bool(self.held[second])

    def age_s(self, second: int) -> float:
        return 0.0 if self.ages_s is None else float(self.ages_s[second])


class RecordingCache:
    """Recordings of files, cached in a folder per encoder."""

    def __init__(
        self, encoder: PictureEncoder, folder: Path, report: Callable[[str], None] = lambda line: None
    ) -> None:
        self.encoder = encoder
        self._folder = folder / "".join(c if c.isalnum() else "_" for c in encoder.encoder_id)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._report = report

    def get(self, path: Path, mode: Mode = "exact") -> Recording:
        """The recording of a file, named by its stem; raises MediaError when it must be decoded and cannot."""
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()[:32]
        cached = self._folder / f"{content}{'' if mode == 'exact' else f'-{mode}-aged'}.npz"
        if cached.exists():
            with np.load(cached, allow_pickle=False) as stored:
                columns = (stored[name] for name in ("rows", "informative", *HELD) if name in stored)
                return Recording(path.stem, *columns)
        self._report(f"encoding {path.name}")
        recording = record(path, self.encoder, mode)
        held = {name: column for name in HELD if (column := getattr(recording, name)) is not None}
        with atomic_file(cached) as file:
            np.savez(file, allow_pickle=False, rows=recording.rows, informative=recording.informative, **held)
        return recording


def record(path: Path, encoder: PictureEncoder, mode: Mode = "exact") -> Recording:
    """The recording of a file, sampled by the mode."""
    rows: dict[int, NDArray[np.float32]] = {}
    informative: dict[int, bool] = {}
    held: set[int] = set()
    ages_s: dict[int, float] = {}
    batch: list[Frame] = []

    def encode() -> None:
        for frame, row in zip(batch, encoder.encode([frame.picture for frame in batch]), strict=True):
            rows[frame.second], informative[frame.second] = row, is_informative(frame.picture)
            ages_s[frame.second] = frame.age_s
            if frame.held:
                held.add(frame.second)
        batch.clear()

    for frame in decode_file(path, mode=mode):
        batch.append(frame)
        if len(batch) == BATCH:
            encode()
    if batch:
        encode()
    n_seconds = max(rows, default=-1) + 1
    zeros, seconds = np.zeros(FEATURE_SIZE, np.float32), range(n_seconds)
    return Recording(
        path.stem,
        np.array([rows.get(second, zeros) for second in seconds], np.float32).reshape(-1, FEATURE_SIZE),
        np.array([informative.get(second, False) for second in seconds], bool),
        None if mode == "exact" else np.array([second in held for second in seconds], bool),
        None if mode == "exact" else np.array([ages_s.get(second, 0.0) for second in seconds]),
    )


def apply_sequence_encoder(recording: Recording, sequence_encoder: nn.Module) -> Recording:
    """The recording with rows of a sequence encoder; missing seconds stay zeros."""
    with torch.inference_mode():
        rows = sequence_encoder(torch.from_numpy(recording.rows.copy())[None])[0].numpy()
    return replace(recording, rows=rows * recording.seen[:, None])
