#!/usr/bin/env python3
"""Trains the Mask-Step CNN, and optionally a sequence encoder with it, on edited copies of folders of videos.

    train_vsal.py VIDEOS OUT_DIR [--more-videos DIR] [--encoder PATH] [--cache DIR] [--recipe paper|copywatch]
        [--sequence-encoder on|off]

Every video is encoded once, clean and under many edits, into a feature table that is cached per encoder; pairs with
new temporal edits are drawn from it. One video in eight, chosen by the hash of its name, is held back for measuring. A
killed run resumes from its last checkpoint and ends with the same weights. OUT_DIR gets mask_step.safetensors (and
sequence_encoder.safetensors), checkpoint.pt and log.jsonl.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import save as safetensors_bytes
from torch import Tensor, nn

from monitor.matching.mask_step import MaskStepNet, save_mask_step
from reference_db.store.disk import atomic_file, write_file
from training.feature_table import CLEAN, EDITED, EncodedClip, EncodingPlan, FeatureTable, build_table
from training.losses import mask_loss, step_loss, vsal_loss
from training.sequence_encoder import LOOK_BACK_S, SequenceEncoder
from training.training_pairs import Batch, BroadcastProbabilities, Pair, batch_of, broadcast_pair, paper_pair

HELD_BACK_EVERY = 8  # one video in eight is never trained on
MEASURED_PAIRS = 768
CHECKPOINT_STEPS = 250
ALIKE_FROM, ALIKE_TO = 0.6, 0.9  # similarity of two seconds of one video, from different to the same


@dataclass(frozen=True, slots=True)
class Recipe:
    """All settings that decide the weights, besides the videos, the encoder and the seed."""

    name: str
    optimiser: str  # sgd or adamw
    learning_rate: float
    schedule: str  # drop: a tenth in the second half of the epochs; cosine: warm-up, then down to 1 %
    weight_decay: float
    epochs: int
    pairs_per_epoch: int
    batch_size: int
    sizes: tuple[tuple[int, int], ...]  # (live, ref) seconds of a matrix; one is drawn per batch
    paper_share: float  # of the batches that are the paper's anchor and positive; the rest are broadcast pairs
    step_weight: float = 1.0  # lambda
    path_weight: float = 1.0
    focus: float = 0.0
    lookalike_weight: float = 1.0  # of cells off the path whose moments look the same in the reference
    path_step_weight: float = 1.0  # of steps from cells on the path, so that right-down wins where there is no picture
    least_similarity: float = -1.0  # of an edited clip to the clean one; below it the clip is not recognisable
    roughness: float = 0.0  # how strongly similarities are changed to those of unseen videos: scaled, shifted, noisy


PAPER = Recipe("paper", "sgd", 5e-4, "drop", 1e-5, 8, 50_000, 64, ((16, 16),), 1.0)
COPYWATCH = Recipe(
    "copywatch",
    "adamw",
    3e-3,
    "cosine",
    1e-4,
    3,
    16_000,
    64,
    ((16, 16), (16, 32), (32, 32), (24, 48)),
    0.15,
    path_weight=2.0,
    lookalike_weight=0.05,
    path_step_weight=3.0,
    least_similarity=0.25,
    roughness=0.3,
)
RECIPES = {recipe.name: recipe for recipe in (PAPER, COPYWATCH)}


class Vsal(nn.Module):
    """The networks in training, and the rows of the feature table: batches -> similarities and label weights."""

    def __init__(self, rows: NDArray[np.float32], with_sequence_encoder: bool) -> None:
        super().__init__()
        self.rows = torch.from_numpy(rows)
        self.net = MaskStepNet()
        self.sequence_encoder = start_neutral(SequenceEncoder()) if with_sequence_encoder else None
        self.context = LOOK_BACK_S if with_sequence_encoder else 0

    def rows_of(self, indices: Tensor) -> Tensor:
        """Unit rows [B, M, 512] of one side; zeros for NO_PICTURE."""
        rows = self.rows[indices]
        if self.sequence_encoder is None:
            return rows
        encoded: Tensor = self.sequence_encoder(rows)
        return encoded[:, self.context :]

    def similarity(self, batch: Batch) -> Tensor:
        """S [B, 1, M, N]."""
        return (self.rows_of(batch.live) @ self.rows_of(batch.ref).transpose(1, 2))[:, None]

    def label_weight(self, batch: Batch, least: float) -> Tensor:
        """The weights of the labels of cells [B, M, N]: lower off the path where the reference looks the same.

        A still shot is the same picture at every second, so no network could know which of them was copied.
        """
        n = batch.ref.shape[1] - self.context
        alike = self.rows[batch.counterpart] @ self.rows[batch.ref[:, -n:]].transpose(1, 2)
        doubt = ((alike - ALIKE_FROM) / (ALIKE_TO - ALIKE_FROM)).clamp(0, 1)
        return torch.where(batch.on_path, 1.0, 1 - (1 - least) * doubt)


def start_neutral(sequence_encoder: SequenceEncoder) -> SequenceEncoder:
    """The encoder, set to return its input rows: from random weights it would first have to learn that."""
    for layer in (sequence_encoder.gather, sequence_encoder.narrow):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return sequence_encoder


def roughen(s: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Similarities as of videos that the encoder was not trained on: weaker, and with a noisier background."""
    per_pair = (len(s), 1, 1, 1)
    scale = 1 - amount * 0.35 * torch.rand(per_pair, generator=generator)
    lift = amount * (0.15 * torch.rand(per_pair, generator=generator) - 0.02)
    grain = amount * 0.08 * torch.rand(per_pair, generator=generator) * torch.randn(s.shape, generator=generator)
    return s * scale + lift + grain


def draw_batch(table: FeatureTable, recipe: Recipe, n_pairs: int, context: int, rng: np.random.Generator) -> Batch:
    """Pairs of one size: the paper's, or broadcast pairs."""
    if rng.random() < recipe.paper_share:
        return batch_of([paper_pair(rng, table, context=context) for _ in range(n_pairs)])
    height, width = recipe.sizes[rng.integers(len(recipe.sizes))]
    return batch_of([broadcast_pair(rng, table, height, width, context) for _ in range(n_pairs)])


def loss_of(vsal: Vsal, batch: Batch, recipe: Recipe, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Lm and Ls of a batch; with a generator, the similarities are roughened first."""
    s = vsal.similarity(batch)
    if generator is not None and recipe.roughness:
        s = roughen(s, recipe.roughness, generator)
    mask_logits, step_logits = vsal.net(s, batch.inside[:, None].to(s.dtype))
    label_weight = vsal.label_weight(batch, recipe.lookalike_weight)
    counted = batch.counted * label_weight
    lm = mask_loss(mask_logits, batch.on_path, counted, path_weight=recipe.path_weight, focus=recipe.focus)
    step_weight = torch.where(batch.on_path, recipe.path_step_weight, label_weight)[:, :-1, :-1]
    return lm, step_loss(step_logits, batch.step, step_weight)


def recognisable(table: FeatureTable, least_similarity: float) -> FeatureTable:
    """The table without clips that an edit made unrecognisable, and without videos that have no other edited clip."""
    clips = [clip for clip in table.clips if clip.kind == CLEAN or similarity_to_clean(table, clip) >= least_similarity]
    videos = {clip.video for clip in clips if clip.kind == EDITED}
    return FeatureTable(table.encoder_id, table.rows, [clip for clip in clips if clip.video in videos])


def similarity_to_clean(table: FeatureTable, clip: EncodedClip) -> float:
    clean = table.rows[table.clips_of(clip.video, CLEAN)[0].rows_at(clip.times_s)]
    edited = table.rows[clip.first_row : clip.first_row + len(clip.times_s)]
    return float((clean * edited).sum(axis=1).mean())


def is_held_back(video: str) -> bool:
    return hashlib.sha256(video.encode()).digest()[0] % HELD_BACK_EVERY == 0


def measure(vsal: Vsal, table: FeatureTable, n_pairs: int = MEASURED_PAIRS, seed: int = 99) -> dict[str, float]:
    """The accuracy of the maps on unseen videos; the pairs are the same in every run."""
    rng = np.random.default_rng(seed)
    scores, on_path, n_right, n_steps = [], [], 0.0, 0
    vsal.eval()
    with torch.inference_mode():
        for _ in range(math.ceil(n_pairs / 64)):
            pairs: list[Pair] = [broadcast_pair(rng, table, 32, 32, LOOK_BACK_S) for _ in range(64)]
            cut = LOOK_BACK_S - vsal.context  # every model is measured on the same pairs
            batch = batch_of([replace(pair, live=pair.live[cut:], ref=pair.ref[cut:]) for pair in pairs])
            s = vsal.similarity(batch)
            mask_logits, step_logits = vsal.net(s, batch.inside[:, None].to(s.dtype))
            counted = batch.counted & (vsal.label_weight(batch, 0.0) > 0.5)
            scores.append(torch.softmax(mask_logits, 1)[:, 1][counted].numpy())
            on_path.append(batch.on_path[counted].numpy())
            chosen = step_logits.argmax(1)[..., None]
            responsible = (batch.step.sum(-1) > 0) & batch.on_path[:, :-1, :-1]
            n_right += float((batch.step.gather(-1, chosen)[..., 0] > 0)[responsible].sum())
            n_steps += int(responsible.sum())
    vsal.train()
    t, truth = np.concatenate(scores), np.concatenate(on_path)
    return {
        "mask_ap": average_precision(t, truth),
        "mask_iou": float((truth & (t > 0.5)).sum() / (truth | (t > 0.5)).sum()),
        "mask_on_path": float(t[truth].mean()),
        "mask_off_path": float(t[~truth].mean()),
        "step_accuracy": n_right / max(1, n_steps),
    }


def average_precision(score: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    """The area under precision against recall."""
    ranked = truth[np.argsort(-score, kind="stable")]
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float(precision[ranked].mean())


def learning_rate(recipe: Recipe, step: int, n_steps: int) -> float:
    """The learning rate of one step."""
    if recipe.schedule == "drop":
        return recipe.learning_rate * (1.0 if step < n_steps / 2 else 0.1)
    warm = min(1.0, (step + 1) / min(200, n_steps / 10))
    return recipe.learning_rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / n_steps)))


def make_optimiser(vsal: Vsal, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(vsal.parameters(), recipe.learning_rate, 0.9, weight_decay=recipe.weight_decay)
    groups = [{"params": list(vsal.net.parameters()), "scale": 1.0}]
    if vsal.sequence_encoder is not None:  # a transformer layer needs smaller steps than 7,000 weights
        groups.append({"params": list(vsal.sequence_encoder.parameters()), "scale": 0.1})
    return torch.optim.AdamW(groups, recipe.learning_rate, weight_decay=recipe.weight_decay)


class VsalTraining:
    """The networks, the optimiser and the data of one training, and its files in `out`."""

    def __init__(
        self, table: FeatureTable, out: Path, recipe: Recipe, with_sequence_encoder: bool, seed: int, n_measured: int
    ) -> None:
        trained, held_back = split_videos(table.videos)
        self.out, self.recipe, self.seed, self.n_measured = out, recipe, seed, n_measured
        self.configuration: dict[str, object] = {
            "recipe": asdict(recipe) | {"sizes": [list(size) for size in recipe.sizes]},
            "broadcast": asdict(BroadcastProbabilities()),
            "sequence_encoder": with_sequence_encoder,
            "seed": seed,
            "encoder_id": table.encoder_id,
            "n_videos": len(trained),
            "held_back": held_back,
        }
        torch.manual_seed(seed)
        self.vsal = Vsal(table.rows, with_sequence_encoder)
        self.optimiser = make_optimiser(self.vsal, recipe)
        self.steps_per_epoch = max(1, recipe.pairs_per_epoch // recipe.batch_size)
        self.n_steps = recipe.epochs * self.steps_per_epoch
        self.seen = recognisable(table.restrict(trained), recipe.least_similarity)
        self.unseen = table.restrict(held_back)
        self.step = self._resume()
        self.losses: list[tuple[float, float]] = []  # mask and step, of the last steps

    def learn(self) -> None:
        """Makes one step."""
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.recipe, self.step, self.n_steps) * group.get("scale", 1.0)
        # Every step has its own random stream, so that a resumed run draws the same as an uninterrupted one.
        rng = np.random.default_rng([self.seed, self.step])
        batch = draw_batch(self.seen, self.recipe, self.recipe.batch_size, self.vsal.context, rng)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        lm, ls = loss_of(self.vsal, batch, self.recipe, generator)
        self.optimiser.zero_grad()
        vsal_loss(lm, ls, self.recipe.step_weight).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.vsal.parameters(), 5.0)
        self.optimiser.step()
        self.step += 1
        self.losses = [*self.losses[-199:], (lm.item(), ls.item())]

    @property
    def mean_losses(self) -> tuple[float, float]:
        mask, step = np.mean(self.losses, axis=0)
        return float(mask), float(step)

    @property
    def ends_epoch(self) -> bool:
        return self.step % self.steps_per_epoch == 0

    def measure(self) -> dict[str, float]:
        return measure(self.vsal, self.unseen, self.n_measured)

    def log_epoch(self, figures: dict[str, float]) -> str:
        """Adds the losses and figures of the epoch to log.jsonl; returns them as text."""
        mask, step = self.mean_losses
        line = {"epoch": self.step // self.steps_per_epoch, "mask_loss": mask, "step_loss": step} | figures
        with (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        return " ".join(f"{name} {value:.4g}" for name, value in line.items())

    def save_checkpoint(self) -> None:
        """Replaces the checkpoint; a kill leaves the old one or the new one."""
        state = {"step": self.step, "configuration": json.dumps(self.configuration, sort_keys=True)}
        state |= {"vsal": self.vsal.state_dict(), "optimiser": self.optimiser.state_dict()}
        with atomic_file(self.out / "checkpoint.pt") as file:
            torch.save(state, file)

    def _resume(self) -> int:
        """The step of the checkpoint, whose state is restored; 0 without a checkpoint."""
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return 0
        state = torch.load(path, weights_only=True)
        if state["configuration"] != json.dumps(self.configuration, sort_keys=True):
            sys.exit(f"{path} belongs to another configuration: name another OUT_DIR, or remove it to start fresh.")
        self.vsal.load_state_dict(state["vsal"])
        self.optimiser.load_state_dict(state["optimiser"])
        return int(state["step"])

    def save_weights(self) -> None:
        trained_on = str(self.configuration["encoder_id"])
        weights = self.out / "mask_step.safetensors"
        save_mask_step(self.vsal.net, weights, trained_on=trained_on, configuration=self.configuration)
        if self.vsal.sequence_encoder is not None:
            weights = self.out / "sequence_encoder.safetensors"
            save_sequence_encoder(self.vsal.sequence_encoder, weights, self.configuration)


def split_videos(videos: Sequence[str]) -> tuple[list[str], list[str]]:
    """The videos to train on and those held back; all of them twice where there are too few to hold any back."""
    held_back = [video for video in videos if is_held_back(video)]
    trained = [video for video in videos if not is_held_back(video)]
    return (trained, held_back) if held_back and trained else (list(videos), list(videos))


def train(
    table: FeatureTable,
    out: Path,
    recipe: Recipe,
    *,
    with_sequence_encoder: bool = False,
    seed: int = 1,
    stop_after: int | None = None,
    n_measured: int = MEASURED_PAIRS,
) -> dict[str, float]:
    """Trains, writes the networks to `out` and returns their figures; resumes from a checkpoint in `out`.

    After `stop_after` steps it writes a checkpoint and returns, so that a long training fits into short slots.
    """
    training = VsalTraining(table, out, recipe, with_sequence_encoder, seed, n_measured)
    n_steps, console = training.n_steps, Console(stderr=True)
    last = n_steps if stop_after is None else min(n_steps, training.step + stop_after)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    figures: dict[str, float] = {}
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=n_steps, completed=training.step)
        while training.step < last:
            training.learn()
            mask, step = training.mean_losses
            progress.update(bar, completed=training.step, description=f"mask {mask:.4f} step {step:.4f}")
            if training.ends_epoch:
                figures = training.measure()
                console.print(training.log_epoch(figures))
            if training.ends_epoch or training.step == last < n_steps or training.step % CHECKPOINT_STEPS == 0:
                training.save_checkpoint()
    if last < n_steps:
        return figures
    training.save_weights()
    return figures or training.measure()


def save_sequence_encoder(sequence_encoder: SequenceEncoder, path: Path, configuration: dict[str, object]) -> None:
    """Weights as fp16 with their configuration, and their SHA-256 in a file beside them."""
    tensors = {name: weight.detach().half().contiguous() for name, weight in sequence_encoder.state_dict().items()}
    notes = {"trained_on": str(configuration["encoder_id"]), "configuration": json.dumps(configuration, sort_keys=True)}
    content = safetensors_bytes(tensors, notes)
    digest = hashlib.sha256(content).hexdigest()
    for at, what in ((path, content), (path.with_suffix(".sha256"), f"{digest}  {path.name}\n".encode())):
        write_file(at, what)


def find_videos(folders: Sequence[Path]) -> list[Path]:
    """The .mp4 files of all folders by name; a name must not occur twice, as features are cached by it."""
    videos: dict[str, Path] = {}
    for folder in folders:
        found = sorted(folder.glob("*.mp4"))
        if not found:
            sys.exit(f"no .mp4 files in {folder}")
        for path in found:
            if path.stem in videos:
                sys.exit(f"two videos have the same name: {videos[path.stem]} and {path}; rename one of them")
            videos[path.stem] = path
    return [videos[name] for name in sorted(videos)]


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The named recipe with the options of the command line."""
    names = (
        "epochs",
        "pairs_per_epoch",
        "batch_size",
        "learning_rate",
        "path_weight",
        "focus",
        "lookalike_weight",
        "path_step_weight",
        "least_similarity",
        "roughness",
        "paper_share",
        "step_weight",
    )
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(RECIPES[args.recipe], **options)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, builds the feature table and trains."""
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("videos", type=Path, help="a folder of .mp4 files")
    arg.add_argument("out", type=Path)
    arg.add_argument("--more-videos", type=Path, nargs="*", default=[], help="more folders of .mp4 files")
    arg.add_argument("--encoder", type=Path, help="an ONNX or safetensors encoder (default: the shipped one)")
    arg.add_argument("--cache", type=Path, help="folder of feature tables (default: OUT_DIR/features)")
    arg.add_argument("--recipe", choices=RECIPES, default="paper")
    arg.add_argument("--sequence-encoder", choices=("on", "off"), default="off")
    arg.add_argument("--seed", type=int, default=1)
    arg.add_argument("--threads", type=int, default=1)
    arg.add_argument("--stop-after", type=int, metavar="STEPS", help="stop early; the same command resumes")
    arg.add_argument("--processes", type=int, default=1, help="processes that encode videos")
    arg.add_argument("--coverage", type=float, default=EncodingPlan().coverage, help="edited seconds per video second")
    arg.add_argument("--min-clips", type=int, default=EncodingPlan().min_clips, help="edited clips of a short video")
    arg.add_argument("--inside", type=float, default=0.25, help="share of edited clips inside another moving picture")
    for name, kind in (("epochs", int), ("pairs-per-epoch", int), ("batch-size", int)):
        arg.add_argument(f"--{name}", type=kind)
    for name in ("learning-rate", "path-weight", "path-step-weight", "lookalike-weight", "least-similarity", "focus"):
        arg.add_argument(f"--{name}", type=float)
    for name in ("roughness", "paper-share", "step-weight"):
        arg.add_argument(f"--{name}", type=float)
    args = arg.parse_args(argv)

    torch.set_num_threads(args.threads)
    videos = find_videos([args.videos, *args.more_videos])
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("encoding", total=len(videos))
        table = build_table(
            videos,
            args.cache or args.out / "features",
            args.encoder,
            EncodingPlan(coverage=args.coverage, min_clips=args.min_clips, inside=args.inside),
            n_processes=args.processes,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    print(
        f"{len(table.rows) - 1} rows of {len(table.videos)} videos in {time.monotonic() - start:.0f} s", file=sys.stderr
    )
    figures = train(
        table,
        args.out,
        recipe_from(args),
        with_sequence_encoder=args.sequence_encoder == "on",
        seed=args.seed,
        stop_after=args.stop_after,
    )
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
