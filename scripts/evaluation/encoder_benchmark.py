"""A benchmark of the frame encoder: edited pictures of unseen videos, searched among clean seconds of all videos."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference_db.features.encoder import FrameEncoder
from training.edits import (
    Blur,
    Crop,
    Edit,
    EditStep,
    Flip,
    Inset,
    Jpeg,
    Noise,
    Overlay,
    Recolour,
    Rescale,
    TextBox,
    Warp,
)
from training.encoder_heads import Head, pooled_rows, to_squares
from training.training_videos import ALIKE, CACHE_FPS, FLAT, Films


def benchmark_edits(backdrop: NDArray[np.uint8]) -> dict[str, Edit]:
    """Named edits of fixed strength; in training all parameters are random."""
    grey = (0.299, 0.587, 0.114, 0.0) * 3
    hue = (0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0)  # channels exchanged: a turn by 120 degrees
    dim = (0.6, 0.0, 0.0, -20.0, 0.0, 0.6, 0.0, -20.0, 0.0, 0.0, 0.6, -20.0)
    same = (1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0)
    white, red, clear = (255, 255, 255, 255), (200, 20, 30, 255), (20, 60, 160, 170)
    logo = TextBox((0.78, 0.05, 0.95, 0.17), "TV 9", red, white)
    ticker = TextBox((0.0, 0.9, 1.0, 1.0), "Breaking news: markets up, rain in the north, trains late", clear, white)
    subtitles = TextBox((0.15, 0.8, 0.85, 0.88), "I never said that it was me", None, white)
    banner = TextBox((0.05, 0.62, 0.95, 0.9), "LIVE from the city", clear, white)
    tilt = [(0.117, -0.06), (1.06, 0.117), (0.883, 1.06), (-0.06, 0.883)]  # some 10 degrees
    lean = [(0.07, 0.02), (0.95, 0.08), (1.04, 0.96), (-0.04, 1.03)]
    steps: dict[str, list[EditStep]] = {
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
class Benchmark:
    """Pooled activations of queries and gallery, from which any head can be scored."""

    edits: list[str]
    gallery: Tensor  # [g, 1280]
    gallery_film: NDArray[np.int64]  # [g]; -1: a video without queries
    gallery_s: NDArray[np.float32]
    queries: Tensor  # [edits, q, 1280]
    query_film: NDArray[np.int64]
    query_s: NDArray[np.float32]
    alike: NDArray[np.bool_]  # [q, g] nearly the same picture of the same video


def make_benchmark(encoder: FrameEncoder, films: Films, others: Films, every_s: int) -> Benchmark:
    """Queries of the videos, half a second out of phase, against all their seconds and some seconds of other videos."""
    film_of = films.film_of
    phase = np.arange(len(film_of)) - films.starts[film_of]
    useful = films.spread >= FLAT
    gallery = np.flatnonzero((phase % CACHE_FPS == 0) & useful)
    queries = np.flatnonzero(((phase - 2 - CACHE_FPS) % (CACHE_FPS * every_s) == 0) & useful)
    every = np.arange(0, len(others.seconds), 2 * CACHE_FPS)
    in_gallery = others.film_of[every] % 2 == 0  # the rest are backdrops, which a query would match
    distractors, backdrops = every[in_gallery], every[~in_gallery]
    rng = np.random.default_rng(0)
    clean = films.pictures[queries]
    edits = [benchmark_edits(others.pictures[k]) for k in rng.choice(backdrops, len(queries))]  # [query][name]
    names = list(edits[0])
    pooled = []
    for name in names:
        edited = np.stack([edit[name](picture, rng) for edit, picture in zip(edits, clean, strict=True)])
        pooled.append(pooled_rows(encoder, to_squares(edited)))
    pooled_gallery = [
        pooled_rows(encoder, to_squares(pictures))
        for pictures in (films.pictures[gallery], others.pictures[distractors])
    ]
    same = film_of[queries][:, None] == np.concatenate([film_of[gallery], np.full(len(distractors), -1)])
    greys = np.concatenate([films.greys[gallery], others.greys[distractors]])
    return Benchmark(
        names,
        torch.cat(pooled_gallery),
        np.concatenate([film_of[gallery], np.full(len(distractors), -1)]),
        np.concatenate([films.seconds[gallery], others.seconds[distractors]]),
        torch.stack(pooled),
        film_of[queries],
        films.seconds[queries],
        same & (films.greys[queries] @ greys.T > ALIKE),
    )


def score_head(benchmark: Benchmark, head: Head) -> dict[str, dict[str, float]]:
    """Per edit and for all: rank-1 shares (time, film) and recall at the threshold that 1 % of distractors pass."""
    with torch.inference_mode():
        gallery = head(benchmark.gallery)
        similarity = (head(benchmark.queries.flatten(0, 1)) @ gallery.T).numpy()
    n = len(benchmark.query_film)
    own = np.tile(benchmark.query_film[:, None] == benchmark.gallery_film, (len(benchmark.edits), 1))
    query_s, alike = (
        np.tile(benchmark.query_s, len(benchmark.edits)),
        np.tile(benchmark.alike, (len(benchmark.edits), 1)),
    )
    best = similarity.argmax(1)
    rows = np.arange(len(best))
    film = own[rows, best]
    on_time = film & ((np.abs(benchmark.gallery_s[best] - query_s) <= 1.5) | alike[rows, best])
    score = similarity[rows, best]
    distractor = np.where(own, -1.0, similarity).max(1)
    caught = film & (score > np.quantile(distractor, 0.99))
    order = np.argsort(-np.concatenate([score, distractor]), kind="stable")
    hit = np.concatenate([film, np.zeros(len(film), bool)])[order]
    precision = np.cumsum(hit) / np.arange(1, len(hit) + 1)
    table = {"all": {"time": on_time.mean(), "film": film.mean(), "recall": caught.mean()}}
    table["all"]["uap"] = float((precision * hit).sum() / len(film))
    for i, name in enumerate(benchmark.edits):
        part = slice(i * n, (i + 1) * n)
        table[name] = {"time": on_time[part].mean(), "film": film[part].mean(), "recall": caught[part].mean()}
    return {name: {k: round(float(v), 4) for k, v in row.items()} for name, row in table.items()}
