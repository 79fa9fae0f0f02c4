#!/usr/bin/env python3
"""Trains the Mask-Step CNN, and the sequence encoder with it if asked, on edited copies of a folder of videos.

    train_vsal.py VIDEOS OUT_DIR [--encoder PATH] [--cache DIR] [--recipe paper|copywatch] [--sequence-encoder on|off]

Every video is encoded once, clean and under many edits, into a bank that is kept in the cache for that encoder; pairs
with fresh temporal edits are then drawn from it. Videos whose name hashes to it are held back for measuring. A run that
was killed goes on where its last checkpoint left it, and ends with the same weights. OUT_DIR gets
mask_step.safetensors (and sequence_encoder.safetensors), checkpoint.pt and log.jsonl.
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
from training.feature_bank import CLEAN, EDITED, BankPlan, FeatureBank, Take, build_bank
from training.losses import mask_loss, step_loss, vsal_loss
from training.sequence_encoder import LOOK_BACK_S, SequenceEncoder
from training.training_pairs import AirChances, Batch, Pair, batch_of, broadcast_pair, paper_pair

HELD_BACK_SHARE = 8  # one video in so many is never trained on
MEASURED_PAIRS = 768
CHECKPOINT_STEPS = 250
ALIKE_FROM, ALIKE_TO = 0.6, 0.9  # similarity of two seconds of one film, from different to the same


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides what is learnt, beside the videos, the encoder and the seed."""

    name: str
    optimiser: str  # sgd or adamw
    learning_rate: float
    schedule: str  # drop: a tenth for the second half of the epochs; cosine: warm up, then down to 1 %
    weight_decay: float
    epochs: int
    pairs_per_epoch: int
    batch_size: int
    sizes: tuple[tuple[int, int], ...]  # (live, ref) seconds of a matrix; one is drawn for each batch
    paper_share: float  # of the batches that are the paper's anchor and positive; the rest is air
    step_weight: float = 1.0  # lambda
    path_weight: float = 1.0
    focus: float = 0.0
    lookalike_weight: float = 1.0  # of cells off the path whose moments look alike in the reference itself
    path_step_weight: float = 1.0  # of steps from cells on the path, so that right-down wins where nothing is seen
    least_similarity: float = -1.0  # of an edited take to the clean one; below it nobody could tell
    roughness: float = 0.0  # how much the similarities of unseen films are imitated: scaled, lifted, noisy


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
    """Bank rows of a batch -> mask and step logits."""

    def __init__(self, rows: NDArray[np.float32], with_sequence_encoder: bool) -> None:
        super().__init__()
        self.rows = torch.from_numpy(rows)
        self.net = MaskStepNet()
        self.sequence_encoder = changing_nothing(SequenceEncoder()) if with_sequence_encoder else None
        self.context = LOOK_BACK_S if with_sequence_encoder else 0

    def side(self, indices: Tensor) -> Tensor:
        """Unit rows [B, M, 512] of one side; where nothing is shown, zeros."""
        rows = self.rows[indices]
        if self.sequence_encoder is None:
            return rows
        encoded: Tensor = self.sequence_encoder(rows)
        return encoded[:, self.context :]

    def similarity(self, batch: Batch) -> Tensor:
        """S [B, 1, M, N]."""
        return (self.side(batch.live) @ self.side(batch.ref).transpose(1, 2))[:, None]

    def trust(self, batch: Batch, least: float) -> Tensor:
        """How much the labels of cells [B, M, N] count: less off the path where the reference itself looks alike.

        A still shot is the same picture at every second, and no network could tell which of them is the copy's.
        """
        n = batch.ref.shape[1] - self.context
        alike = self.rows[batch.twin] @ self.rows[batch.ref[:, -n:]].transpose(1, 2)
        doubt = ((alike - ALIKE_FROM) / (ALIKE_TO - ALIKE_FROM)).clamp(0, 1)
        return torch.where(batch.on_path, 1.0, 1 - (1 - least) * doubt)


def changing_nothing(sequence_encoder: SequenceEncoder) -> SequenceEncoder:
    """The encoder with nothing added to its rows yet: from a random start it first has to learn what they knew."""
    for layer in (sequence_encoder.gather, sequence_encoder.narrow):
        nn.init.zeros_(layer.weight)
        nn.init.zeros_(layer.bias)
    return sequence_encoder


def roughened(s: Tensor, amount: float, generator: torch.Generator) -> Tensor:
    """Similarities as films give them that the encoder was not trained on: weaker, and with a livelier background."""
    per_pair = (len(s), 1, 1, 1)
    scale = 1 - amount * 0.35 * torch.rand(per_pair, generator=generator)
    lift = amount * (0.15 * torch.rand(per_pair, generator=generator) - 0.02)
    grain = amount * 0.08 * torch.rand(per_pair, generator=generator) * torch.randn(s.shape, generator=generator)
    return s * scale + lift + grain


def draw_batch(bank: FeatureBank, recipe: Recipe, n_pairs: int, context: int, rng: np.random.Generator) -> Batch:
    """Pairs of one size: the paper's, or stretches of air."""
    if rng.random() < recipe.paper_share:
        return batch_of([paper_pair(rng, bank, context=context) for _ in range(n_pairs)])
    height, width = recipe.sizes[rng.integers(len(recipe.sizes))]
    return batch_of([broadcast_pair(rng, bank, height, width, context) for _ in range(n_pairs)])


def loss_of(vsal: Vsal, batch: Batch, recipe: Recipe, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Lm and Ls of a batch; a generator roughens the similarities first."""
    s = vsal.similarity(batch)
    if generator is not None and recipe.roughness:
        s = roughened(s, recipe.roughness, generator)
    mask_logits, step_logits = vsal.net(s, batch.inside[:, None].to(s.dtype))
    trust = vsal.trust(batch, recipe.lookalike_weight)
    counted = batch.counted * trust
    lm = mask_loss(mask_logits, batch.on_path, counted, path_weight=recipe.path_weight, focus=recipe.focus)
    step_weight = torch.where(batch.on_path, recipe.path_step_weight, trust)[:, :-1, :-1]
    return lm, step_loss(step_logits, batch.step, step_weight)


def visible(bank: FeatureBank, least_similarity: float) -> FeatureBank:
    """The bank without the takes whose edit left nothing to recognise, nor the videos that have no other."""
    takes = [take for take in bank.takes if take.kind == CLEAN or similarity_to_clean(bank, take) >= least_similarity]
    shown = {take.video for take in takes if take.kind == EDITED}
    return FeatureBank(bank.encoder_id, bank.rows, [take for take in takes if take.video in shown])


def similarity_to_clean(bank: FeatureBank, take: Take) -> float:
    clean = bank.rows[bank.of(take.video, CLEAN)[0].rows_at(take.times_s)]
    edited = bank.rows[take.first_row : take.first_row + len(take.times_s)]
    return float((clean * edited).sum(axis=1).mean())


def is_held_back(video: str) -> bool:
    return hashlib.sha256(video.encode()).digest()[0] % HELD_BACK_SHARE == 0


def measure(vsal: Vsal, bank: FeatureBank, n_pairs: int = MEASURED_PAIRS, seed: int = 99) -> dict[str, float]:
    """How well the maps of unseen videos are read, on pairs that are the same for every run."""
    rng = np.random.default_rng(seed)
    chances, on_path, right, n_steps = [], [], 0.0, 0
    vsal.eval()
    with torch.inference_mode():
        for _ in range(math.ceil(n_pairs / 64)):
            pairs: list[Pair] = [broadcast_pair(rng, bank, 32, 32, LOOK_BACK_S) for _ in range(64)]
            cut = LOOK_BACK_S - vsal.context  # every model is measured on the same pairs
            batch = batch_of([replace(pair, live=pair.live[cut:], ref=pair.ref[cut:]) for pair in pairs])
            s = vsal.similarity(batch)
            mask_logits, step_logits = vsal.net(s, batch.inside[:, None].to(s.dtype))
            counted = batch.counted & (vsal.trust(batch, 0.0) > 0.5)
            chances.append(torch.softmax(mask_logits, 1)[:, 1][counted].numpy())
            on_path.append(batch.on_path[counted].numpy())
            chosen = step_logits.argmax(1)[..., None]
            responsible = (batch.step.sum(-1) > 0) & batch.on_path[:, :-1, :-1]
            right += float((batch.step.gather(-1, chosen)[..., 0] > 0)[responsible].sum())
            n_steps += int(responsible.sum())
    vsal.train()
    t, truth = np.concatenate(chances), np.concatenate(on_path)
    return {
        "mask_ap": average_precision(t, truth),
        "mask_iou": float((truth & (t > 0.5)).sum() / (truth | (t > 0.5)).sum()),
        "mask_on_path": float(t[truth].mean()),
        "mask_off_path": float(t[~truth].mean()),
        "step_accuracy": right / max(1, n_steps),
    }


def average_precision(score: NDArray[np.float32], truth: NDArray[np.bool_]) -> float:
    """The area under precision against recall."""
    ranked = truth[np.argsort(-score, kind="stable")]
    precision = np.cumsum(ranked) / np.arange(1, len(ranked) + 1)
    return float(precision[ranked].mean())


def learning_rate(recipe: Recipe, step: int, n_steps: int) -> float:
    """The rate for one step of all."""
    if recipe.schedule == "drop":
        return recipe.learning_rate * (1.0 if step < n_steps / 2 else 0.1)
    warm = min(1.0, (step + 1) / min(200, n_steps / 10))
    return recipe.learning_rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / n_steps)))


def optimiser_of(vsal: Vsal, recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimiser == "sgd":
        return torch.optim.SGD(vsal.parameters(), recipe.learning_rate, 0.9, weight_decay=recipe.weight_decay)
    groups = [{"params": list(vsal.net.parameters()), "scale": 1.0}]
    if vsal.sequence_encoder is not None:  # a transformer layer takes no such steps as 7,000 weights do
        groups.append({"params": list(vsal.sequence_encoder.parameters()), "scale": 0.1})
    return torch.optim.AdamW(groups, recipe.learning_rate, weight_decay=recipe.weight_decay)


def train(
    bank: FeatureBank,
    out: Path,
    recipe: Recipe,
    *,
    with_sequence_encoder: bool = False,
    seed: int = 1,
    stop_after: int | None = None,
    n_measured: int = MEASURED_PAIRS,
) -> dict[str, float]:
    """The figures of the trained networks, which are left in `out`; goes on from a checkpoint that is there.

    `stop_after` steps a checkpoint is written and nothing else, so that a long training fits into short slots.
    """
    held_back = [video for video in bank.videos if is_held_back(video)]
    kept = [video for video in bank.videos if not is_held_back(video)]
    if not held_back or not kept:
        kept = held_back = list(bank.videos)  # too few videos to hold any back
    configuration = {
        "recipe": asdict(recipe) | {"sizes": [list(size) for size in recipe.sizes]},
        "air": asdict(AirChances()),
        "sequence_encoder": with_sequence_encoder,
        "seed": seed,
        "encoder_id": bank.encoder_id,
        "n_videos": len(kept),
        "held_back": held_back,
    }
    torch.manual_seed(seed)
    vsal = Vsal(bank.rows, with_sequence_encoder)
    optimiser = optimiser_of(vsal, recipe)
    steps_per_epoch = max(1, recipe.pairs_per_epoch // recipe.batch_size)
    n_steps = recipe.epochs * steps_per_epoch
    first = resume(out / "checkpoint.pt", vsal, optimiser, configuration)
    training, unseen = visible(bank.only(kept), recipe.least_similarity), bank.only(held_back)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    figures: dict[str, float] = {}
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=n_steps, completed=first)
        recent: list[tuple[float, float]] = []
        for step in range(first, n_steps):
            for group in optimiser.param_groups:
                group["lr"] = learning_rate(recipe, step, n_steps) * group.get("scale", 1.0)
            # Every step has a stream of its own, so that a resumed run draws what an unbroken one would have.
            rng = np.random.default_rng([seed, step])
            batch = draw_batch(training, recipe, recipe.batch_size, vsal.context, rng)
            lm, ls = loss_of(vsal, batch, recipe, torch.Generator().manual_seed(seed * 1_000_003 + step))
            optimiser.zero_grad()
            vsal_loss(lm, ls, recipe.step_weight).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(vsal.parameters(), 5.0)
            optimiser.step()
            recent = [*recent[-199:], (lm.item(), ls.item())]
            mean_lm, mean_ls = np.mean(recent, axis=0)
            progress.update(bar, completed=step + 1, description=f"mask {mean_lm:.4f} step {mean_ls:.4f}")
            ends_epoch = (step + 1) % steps_per_epoch == 0
            if ends_epoch:
                figures = measure(vsal, unseen, n_measured)
                line = {"epoch": (step + 1) // steps_per_epoch, "mask_loss": mean_lm, "step_loss": mean_ls} | figures
                with (out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(line) + "\n")
                console.print(" ".join(f"{k} {v:.4g}" for k, v in line.items()))
            stops = stop_after is not None and first + stop_after <= step + 1 < n_steps
            if ends_epoch or stops or (step + 1) % CHECKPOINT_STEPS == 0:
                checkpoint(out / "checkpoint.pt", vsal, optimiser, configuration, step + 1)
            if stops:
                return figures
    if not figures:
        figures = measure(vsal, unseen, n_measured)
    save_mask_step(vsal.net, out / "mask_step.safetensors", trained_on=bank.encoder_id, configuration=configuration)
    if vsal.sequence_encoder is not None:
        save_sequence_encoder(vsal.sequence_encoder, out / "sequence_encoder.safetensors", configuration)
    return figures


def save_sequence_encoder(sequence_encoder: SequenceEncoder, path: Path, configuration: dict[str, object]) -> None:
    """Weights as fp16 with their configuration, and their SHA-256 in a file beside them."""
    tensors = {name: weight.detach().half().contiguous() for name, weight in sequence_encoder.state_dict().items()}
    notes = {"trained_on": str(configuration["encoder_id"]), "configuration": json.dumps(configuration, sort_keys=True)}
    content = safetensors_bytes(tensors, notes)
    digest = hashlib.sha256(content).hexdigest()
    for at, what in ((path, content), (path.with_suffix(".sha256"), f"{digest}  {path.name}\n".encode())):
        write_file(at, what)


def checkpoint(
    path: Path, vsal: Vsal, optimiser: torch.optim.Optimizer, configuration: dict[str, object], step: int
) -> None:
    """Writes a checkpoint; a kill leaves the old one or the new one."""
    state = {"step": step, "configuration": json.dumps(configuration, sort_keys=True)}
    with atomic_file(path) as file:
        torch.save(state | {"vsal": vsal.state_dict(), "optimiser": optimiser.state_dict()}, file)


def resume(path: Path, vsal: Vsal, optimiser: torch.optim.Optimizer, configuration: dict[str, object]) -> int:
    """The step to go on from; 0 without a checkpoint."""
    if not path.exists():
        return 0
    state = torch.load(path, weights_only=True)
    if state["configuration"] != json.dumps(configuration, sort_keys=True):
        sys.exit(f"{path} belongs to another configuration: name another OUT_DIR, or remove it to begin anew.")
    vsal.load_state_dict(state["vsal"])
    optimiser.load_state_dict(state["optimiser"])
    return int(state["step"])


def recipe_from(args: argparse.Namespace) -> Recipe:
    """The named recipe with what was asked for otherwise."""
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
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(RECIPES[args.recipe], **asked)


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the command line, builds the bank, trains."""
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("videos", type=Path, help="a folder of .mp4 files")
    arg.add_argument("out", type=Path)
    arg.add_argument("--encoder", type=Path, help="an ONNX or safetensors encoder (default: the shipped one)")
    arg.add_argument("--cache", type=Path, help="where banks are kept (default: OUT_DIR/bank)")
    arg.add_argument("--recipe", choices=RECIPES, default="paper")
    arg.add_argument("--sequence-encoder", choices=("on", "off"), default="off")
    arg.add_argument("--seed", type=int, default=1)
    arg.add_argument("--threads", type=int, default=1)
    arg.add_argument("--stop-after", type=int, metavar="STEPS", help="end so early; the same command goes on later")
    arg.add_argument("--processes", type=int, default=1, help="that encode the bank")
    arg.add_argument("--coverage", type=float, default=BankPlan().coverage, help="edited seconds a second of video")
    arg.add_argument("--least-takes", type=int, default=BankPlan().least_takes, help="edited takes of a short video")
    for name, kind in (("epochs", int), ("pairs-per-epoch", int), ("batch-size", int)):
        arg.add_argument(f"--{name}", type=kind)
    for name in ("learning-rate", "path-weight", "path-step-weight", "lookalike-weight", "least-similarity", "focus"):
        arg.add_argument(f"--{name}", type=float)
    for name in ("roughness", "paper-share", "step-weight"):
        arg.add_argument(f"--{name}", type=float)
    args = arg.parse_args(argv)

    torch.set_num_threads(args.threads)
    videos = sorted(args.videos.glob("*.mp4"))
    if not videos:
        sys.exit(f"no .mp4 files in {args.videos}")
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("encoding", total=len(videos))
        bank = build_bank(
            videos,
            args.cache or args.out / "bank",
            args.encoder,
            BankPlan(coverage=args.coverage, least_takes=args.least_takes),
            n_processes=args.processes,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    print(
        f"{len(bank.rows) - 1} rows of {len(bank.videos)} videos in {time.monotonic() - began:.0f} s", file=sys.stderr
    )
    figures = train(
        bank,
        args.out,
        recipe_from(args),
        with_sequence_encoder=args.sequence_encoder == "on",
        seed=args.seed,
        stop_after=args.stop_after,
    )
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
