#!/usr/bin/env python
"""Trains the frame encoder on folders of videos and stills: train_encoder.py VIDEOS OUT.safetensors [--stills DIR]

Two differently edited views of one moment shall give the same feature row, and other moments other rows: symmetric
InfoNCE over both views and a KoLeo term that spreads rows over the sphere. A still gives two edits of one picture.
Training starts from ImageNet's weights of EfficientNet-Lite0, or from trained ones (--start). A killed run resumes from
its last checkpoint and ends with the same weights. The learning rate is constant and falls over the last --decay share
of the steps, so --steps may be changed between runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from evaluation.encoder_benchmark import make_benchmark, score_head
from reference_db.features.encoder import normalise_pixels
from reference_db.features.encoder_weights import PICTURE_SIDE
from reference_db.store.disk import atomic_file
from reference_db.store.references import FEATURE_SIZE
from training.edits import draw_edit
from training.encoder_heads import (
    IMAGENET,
    Head,
    export,
    fit_heads,
    interpolate_trunk,
    pooled_rows,
    select_fit_pictures,
    start_encoder,
    whiten,
)
from training.training_videos import (
    ALIKE,
    CACHE_FPS,
    FLAT,
    Films,
    is_held_back,
    join_films,
    load_films,
    load_stills,
    resize_pictures,
)

log = logging.getLogger("train_encoder")

NEAR_S = 2.0  # moments of one video nearer than this are no negatives of each other
ALIKE_SAME_FILM = 0.96  # correlation above which two moments of one video are no negatives, as ALIKE for any two
SAME_SHOT = 0.7  # correlation below which a neighbour picture belongs to another shot
N_FROZEN = 3  # the stem and blocks 0-2 stay ImageNet's: training them costs a quarter of the time and changes little
WEAK = 0.3  # strength of weak edits
STRENGTHS = (0.4, 1.0)  # of strong edits; at full strength only, the network learns to ignore detail
N_PARTS = 4  # a batch passes the trunk in parts, so that threads wait for each other twice a step, not at every layer


@dataclass(frozen=True, slots=True)
class Config:
    """All settings that decide the weights, besides the videos; stored in every checkpoint."""

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
    stills: int = 0  # in a batch
    weak: float = 0.5
    inside: float = 0.0
    start: str = IMAGENET
    warm_up: int = 40
    weight_decay: float = 0.02
    clip: float = 5.0


# --- the batches ------------------------------------------------------------------------------------------------------


class Batches(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Batch number -> two views [n, side, side, 3] each, and which pairs are allowed as negatives [n, n].

    A batch depends on the seed and its number only, so any worker may make it, and a resumed run gets the same ones.
    """

    def __init__(self, films: Films, config: Config, side: int) -> None:
        self.films, self.config, self.side = films, config, side
        self.film_of = films.film_of
        self.group_of = np.unique(films.groups, return_inverse=True)[1][self.film_of]
        useful = films.spread >= FLAT
        self.choices = [  # pictures to train on, by video
            np.flatnonzero(useful[a:b]) + a
            for name, a, b in zip(films.names, films.starts[:-1], films.starts[1:], strict=True)
            if not is_held_back(name, config.held_back)
        ]
        self.stills = np.concatenate([np.empty(0, np.int64), *(c for c in self.choices if len(c) == 1)])
        self.choices = [c for c in self.choices if len(c) >= 2]
        self.weights = np.sqrt([len(c) for c in self.choices])
        needed = config.frames_per_film * NEAR_S * CACHE_FPS
        self.long = self.weights * [len(c) >= needed for c in self.choices]  # short ones have no negatives of their own
        self.long = self.long if self.long.any() else self.weights

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Tensor]:
        rng = np.random.default_rng([self.config.seed, number])
        chosen = self._choose(rng)
        views = [np.empty((len(chosen), self.side, self.side, 3), np.uint8) for _ in range(2)]
        for i, picture in enumerate(chosen):
            weak = rng.random() < self.config.weak
            views[0][i] = self._weak_view(rng, picture) if weak else self._strong_view(rng, picture)
            views[1][i] = self._strong_view(rng, self._neighbour(rng, picture))
        return torch.from_numpy(views[0]), torch.from_numpy(views[1]), torch.from_numpy(self._negatives(chosen))

    def _choose(self, rng: np.random.Generator) -> NDArray[np.int64]:
        """Several videos with many moments each, half of them close together, single moments of any, and stills."""
        c = self.config
        chosen: list[int] = []
        n_films = min(c.films, int(np.count_nonzero(self.long)))
        for film in rng.choice(len(self.choices), n_films, replace=False, p=self.long / self.long.sum()):
            pool = self.choices[film]
            if rng.random() < 0.5:
                window = c.frames_per_film * CACHE_FPS * 4
                start = rng.integers(0, max(1, len(pool) - window + 1))
                pool = pool[start : start + window]
            chosen += rng.choice(pool, min(c.frames_per_film, len(pool)), replace=False).tolist()
        for film in rng.choice(len(self.choices), c.others, p=self.weights / self.weights.sum()):
            chosen.append(int(rng.choice(self.choices[film])))
        chosen += rng.choice(self.stills, min(c.stills, len(self.stills)), replace=False).tolist()
        return np.array(chosen)

    def _neighbour(self, rng: np.random.Generator, picture: int) -> int:
        """A moment up to half a second away, of the same shot."""
        other = picture + int(rng.integers(-2, 3))
        if not 0 <= other < len(self.film_of) or self.film_of[other] != self.film_of[picture]:
            return picture
        return other if self.films.greys[other] @ self.films.greys[picture] > SAME_SHOT else picture

    def _weak_view(self, rng: np.random.Generator, picture: int) -> NDArray[np.uint8]:
        return self._square(draw_edit(rng, WEAK, self._backdrop(rng))(self.films.pictures[picture], rng))

    def _strong_view(self, rng: np.random.Generator, picture: int) -> NDArray[np.uint8]:
        edit = draw_edit(rng, rng.uniform(*STRENGTHS), self._backdrop(rng), self.config.inside)
        return self._square(edit(self.films.pictures[picture], rng))

    def _backdrop(self, rng: np.random.Generator) -> NDArray[np.uint8]:
        """Any picture: a still as often as batches have them."""
        c = self.config
        n_moments = c.films * c.frames_per_film + c.others
        if len(self.stills) and rng.random() < c.stills / (c.stills + n_moments):
            return self.films.pictures[int(rng.choice(self.stills))]
        return self.films.pictures[int(rng.choice(self.choices[rng.integers(len(self.choices))]))]

    def _square(self, picture: NDArray[np.uint8]) -> NDArray[np.uint8]:
        image = Image.fromarray(picture).resize((self.side, self.side), Image.Resampling.BILINEAR)
        return np.asarray(image, dtype=np.uint8)

    def _negatives(self, chosen: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[n, n]: not near or alike moments of one video, not other videos and stills of its group, not look-alikes."""
        alike = self.films.greys[chosen] @ self.films.greys[chosen].T
        same = self.film_of[chosen][:, None] == self.film_of[chosen]
        seconds = self.films.seconds[chosen]
        near = np.abs(seconds[:, None] - seconds) <= NEAR_S
        related = ~same & (self.group_of[chosen][:, None] == self.group_of[chosen])
        negatives: NDArray[np.bool_] = ~((same & (near | (alike > ALIKE_SAME_FILM))) | related | (alike > ALIKE))
        return negatives


# --- the loss ---------------------------------------------------------------------------------------------------------


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


class EncoderTraining:
    """The networks, the optimiser and the step of one training, and its checkpoints."""

    def __init__(self, films: Films, config: Config, n_threads: int = 1) -> None:
        self.config = config
        self.threads = ThreadPoolExecutor(n_threads)
        torch.manual_seed(config.seed)
        self.encoder = start_encoder(config.start)
        if config.start == IMAGENET:
            self._start_projection(films)
        self.norm = nn.BatchNorm1d(FEATURE_SIZE, affine=False, momentum=0.02)  # without it all rows become similar
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
        """PCA whitening of clean pictures: a far better start than random weights."""
        rng = np.random.default_rng(self.config.seed)
        chosen = np.sort(rng.choice(len(films.pictures), min(1500, len(films.pictures)), replace=False))
        rows = pooled_rows(self.encoder, resize_pictures(films.pictures[chosen], self.config.side))
        if len(rows) > FEATURE_SIZE:
            weight, bias = whiten(rows, 0.02)
            self.encoder.project.weight.data, self.encoder.project.bias.data = weight.clone(), bias.clone()

    def rate(self) -> float:
        """Share of the full learning rate at this step: warm-up, plateau, then down to 2 %."""
        c = self.config
        left = (c.steps - self.step) / max(1.0, c.decay * c.steps)
        return min(1.0, (self.step + 1) / c.warm_up, 0.02 + 0.98 * left)

    def learn(self, one: Tensor, two: Tensor, allowed: Tensor) -> tuple[float, float]:
        """Makes one step; returns the loss and accuracy of the batch."""
        for group, full in zip(self.optimizer.param_groups, self.full_rates, strict=True):
            group["lr"] = full * self.rate()
        parts = torch.cat([one, two]).chunk(N_PARTS)
        pooled = list(self.threads.map(lambda part: self.encoder.pooled(normalise_pixels(part), N_FROZEN), parts))
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
        retained = min(self.config.ema, self.step / (self.step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.average.parameters()), list(self.encoder.parameters()), 1 - retained)
        return float(loss.detach()), float(accuracy)

    def save(self, path: Path) -> None:
        """Replaces the checkpoint."""
        state = {
            "config": asdict(self.config),
            "step": self.step,
            "encoder": self.encoder.state_dict(),
            "average": self.average.state_dict(),
            "norm": self.norm.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "torch_rng": torch.get_rng_state(),
        }
        with atomic_file(path) as file:
            torch.save(state, file)

    def resume(self, path: Path) -> None:
        """Restores the checkpoint; only --steps and --decay may differ from those of its run."""
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        ours, theirs = asdict(self.config), dict(state["config"])
        changed = {k for k in ours if ours[k] != theirs.get(k)} - {"steps", "decay"}
        if changed:
            raise SystemExit(f"{path} has other settings: {', '.join(sorted(changed))}; choose another --work")
        self.encoder.load_state_dict(state["encoder"])
        self.average.load_state_dict(state["average"])
        self.norm.load_state_dict(state["norm"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch_rng"])
        self.step = int(state["step"])


def held_back_accuracy(training: EncoderTraining, films: Films, most: int = 240) -> float:
    """Share of strongly edited pictures of held-back videos whose nearest clean picture is correct to 1.5 s."""
    film_of = films.film_of
    held_back = np.array([is_held_back(name, training.config.held_back) for name in films.names])
    pool = np.flatnonzero(held_back[film_of] & (films.spread >= FLAT))[::CACHE_FPS]
    if len(pool) < 2:
        return math.nan
    pool = pool[:: max(1, -(-len(pool) // most))]
    rng = np.random.default_rng(1)
    clean = films.pictures[pool]
    edited = np.stack([draw_edit(rng, 1.0, clean[(i + 7) % len(clean)])(p, rng) for i, p in enumerate(clean)])
    rows = [encode_average(training, resize_pictures(p, training.config.side)) for p in (clean, edited)]
    best = pool[(rows[1] @ rows[0].T).argmax(1).numpy()]
    correct = (film_of[best] == film_of[pool]) & (np.abs(films.seconds[best] - films.seconds[pool]) <= 1.5)
    return float(correct.mean())


@torch.inference_mode()
def encode_average(training: EncoderTraining, pictures: NDArray[np.uint8]) -> Tensor:
    """Unit rows by the averaged weights, normalised by the mean and variance of these pictures."""
    rows = training.average.project(pooled_rows(training.average, pictures))
    return F.normalize((rows - rows.mean(0)) / (rows.std(0) + 1e-3), dim=-1)


def train(
    films: Films, config: Config, work: Path, *, workers: int, threads: int, checkpoint_every: int, report_every: int
) -> EncoderTraining:
    """The finished training; checkpoints are written to `work`."""
    training = EncoderTraining(films, config, threads)
    checkpoint = work / "checkpoint.pt"
    if checkpoint.exists():
        training.resume(checkpoint)
        log.info("resumed at step %d", training.step)
    start, first = time.monotonic(), training.step
    losses: list[tuple[float, float]] = []
    decay_start = int(config.steps * (1 - config.decay))
    for side, until in ((config.side, decay_start), (config.last_side, config.steps)):
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
            if training.step % checkpoint_every == 0 or training.step == config.steps:
                training.save(checkpoint)
                log.info("saved step %d", training.step)
            if training.step % 20 == 0:
                loss, accuracy = np.mean(losses[-20:], axis=0)
                pace = (time.monotonic() - start) / (training.step - first)
                held = (
                    f" held back {held_back_accuracy(training, films):.3f}" if training.step % report_every == 0 else ""
                )
                log.info(
                    "step %d/%d side %d loss %.3f accuracy %.3f%s  %.2f s/step, %.0f min left",
                    *(training.step, config.steps, side, loss, accuracy, held, pace),
                    pace * (config.steps - training.step) / 60,
                )
    return training


def print_table(name: str, table: dict[str, dict[str, float]]) -> None:
    print(f"{name}: {table['all']}")
    inside = [row for edit, row in table.items() if edit.startswith(("inset", "split"))]
    print("  insets and splits:", {key: round(sum(row[key] for row in inside) / len(inside), 4) for key in inside[0]})
    for edit, row in table.items():
        print(f"  {edit:20s} time {row['time']:.3f}  film {row['film']:.3f}  recall at 1 % FA {row['recall']:.3f}")


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--more-videos", type=Path, nargs="*", default=[], help="more folders to train on")
    parser.add_argument("--stills", type=Path, help="folder of stills with a manifest.tsv (columns file, group)")
    parser.add_argument("--work", type=Path, default=Path("train_encoder.work"), help="folder of checkpoints")
    parser.add_argument("--cache", type=Path, help="folder of decoded pictures; default: inside --work")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--side", type=int, default=160)
    parser.add_argument("--last-side", type=int, default=PICTURE_SIDE, help="picture side while the rate decays")
    parser.add_argument("--decay", type=float, default=0.3, help="share of the steps over which the rate falls")
    parser.add_argument("--films", type=int, default=4)
    parser.add_argument("--frames-per-film", type=int, default=6)
    parser.add_argument("--others", type=int, default=24)
    parser.add_argument("--stills-per-batch", type=int, default=16)
    parser.add_argument("--weak", type=float, default=0.5, help="share of first views that are edited weakly")
    parser.add_argument("--inside", type=float, default=0.5, help="share of insets, splits, screens in strong edits")
    parser.add_argument("--start", default=IMAGENET, help="imagenet, shipped, or a .safetensors file of this script")
    parser.add_argument("--trunk-rate", type=float, default=3e-4)
    parser.add_argument("--head-rate", type=float, default=5e-4)
    parser.add_argument("--temperature", type=float, default=0.05)
    parser.add_argument("--koleo", type=float, default=1.0)
    parser.add_argument("--ema", type=float, default=0.995)
    parser.add_argument("--held-back", type=float, default=0.04)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--checkpoint-every", type=int, default=50)
    parser.add_argument("--report-every", type=int, default=200)
    parser.add_argument(
        "--trained-share", type=float, default=0.5, help="0: the trunk of the start, 1: the trained one"
    )
    parser.add_argument("--fit-pictures", type=int, default=2000, help="pictures on which whitening is fitted")
    parser.add_argument("--shrinkage", type=float, nargs="*", default=[0.03, 0.1, 0.3], help="one whitening each")
    parser.add_argument("--head", help='as "whitened 0.03"; default: the best in the benchmark, else plain')
    parser.add_argument("--benchmark", type=Path, help="folder of other videos on which heads are compared")
    parser.add_argument("--benchmark-every", type=int, default=6, help="seconds between pictures of the benchmark")
    parser.add_argument(
        "--export-now", choices=["checkpoint", "start"], help="do not train; export the checkpoint or the start"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.work.mkdir(parents=True, exist_ok=True)
    films = load_pictures(options)
    log.info("%d films and stills, %d pictures", len(films.names), len(films.pictures))
    known = {name: getattr(options, name) for name in Config.__dataclass_fields__ if hasattr(options, name)}
    config = Config(**known | {"stills": options.stills_per_batch if options.stills else 0})
    if options.export_now:
        training = EncoderTraining(films, config)
        if options.export_now == "checkpoint":
            training.resume(options.work / "checkpoint.pt")
    else:
        training = train(
            films,
            config,
            options.work,
            workers=options.workers,
            threads=options.threads,
            checkpoint_every=options.checkpoint_every,
            report_every=options.report_every,
        )
    export_head(training, films, options)


def load_pictures(options: argparse.Namespace) -> Films:
    """All pictures to train on."""
    cache = options.cache or options.work / "cache"
    parts = [load_films(folder, cache) for folder in (options.videos, *options.more_videos)]
    return join_films([*parts, load_stills(options.stills, cache)] if options.stills else parts)


def export_head(training: EncoderTraining, films: Films, options: argparse.Namespace) -> None:
    """Fits the heads and exports --head, else the best one in the benchmark, else the plain one.

    With --export-now start, the head of the file that was started from is measured too, as "unchanged".
    """
    encoder = interpolate_trunk(start_encoder(training.config.start), training.average, options.trained_share)
    clean, edited = select_fit_pictures(films, options.fit_pictures, training.config.seed)
    fitted = fit_heads(encoder, pooled_rows(encoder, clean), pooled_rows(encoder, edited), options.shrinkage)
    if options.export_now == "start" and training.config.start != IMAGENET:
        fitted.append(Head("unchanged", encoder.project.weight.detach(), encoder.project.bias.detach()))
    heads = {head.name: head for head in fitted}
    tables: dict[str, dict[str, dict[str, float]]] = {}
    if options.benchmark:
        cache = options.cache or options.work / "cache"
        queried, others = (load_films(folder, cache) for folder in (options.benchmark, options.videos))
        benchmark = make_benchmark(encoder, queried, others, options.benchmark_every)
        tables = {name: score_head(benchmark, head) for name, head in heads.items()}
        for name, table in tables.items():
            print(f"{name:16s} {table['all']}")
    best = options.head or max(tables, key=lambda name: tables[name]["all"]["recall"], default="plain")
    if best not in heads:
        raise SystemExit(f"--head {best}: expected one of {', '.join(heads)}")
    if best in tables:
        print_table(best, tables[best])
    notes = asdict(training.config) | {
        "step": training.step,
        "trained_share": options.trained_share,
        "head": best,
        "benchmark": tables[best]["all"] if best in tables else None,
    }
    digest = export(encoder, heads[best], options.out, {"config": json.dumps(notes)})
    print(f"{options.out}: step {training.step}, head {best}, SHA-256 {digest}")


if __name__ == "__main__":
    main()
