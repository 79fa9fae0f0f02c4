#!/usr/bin/env python3
"""Fits the confidence of alerts on training films and writes its weights.

    fit_confidence.py FOLDER... [--halves VIDEOS...] [--out FILE]

A FOLDER is a broadcast (ch*.ts, references/, truth.jsonl) of training films. With --halves, the second halves of the
videos air while their first halves are registered: nothing of it is a copy, and much looks alike. Every event of an
alert is a sample; the weights maximise the likelihood of which were right, and none may be negative. A sample of halves
counts less: look-alikes are a part of what airs, not most of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from evaluate import default_cache, read_broadcast, report_progress, videos_in
from numpy.typing import NDArray

from evaluation.ablations import index_of
from evaluation.alert_samples import AlertSample, SampledChannel
from evaluation.alert_statements import first_and_second_halves
from evaluation.recordings import Recording, RecordingCache
from evaluation.reliability import calibration_error, reliability
from evaluation.scoring import TrueCopy
from monitor.config.settings import Settings
from monitor.matching.confidence import SHIPPED_WEIGHTS, ConfidenceModel, logit
from monitor.matching.mask_step import TileReader, load_mask_step
from monitor.runtime.channel_monitor import match_parameters
from reference_db.features.encoder import load_encoder
from reference_db.search.index import ReferenceIndex

SCORES = (0.03, 0.08, 0.12, 0.25)  # from which alert books alert, so that starts of any score occur
RIDGE = 0.05  # pulls weights towards 0 by so much: some hundred samples do not separate two quantities well
HALVES_WEIGHT = 0.2  # of a sample of halves
STEPS = 50  # of Newton's method; it converges in about ten


def main(argv: Sequence[str] | None = None) -> int:
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arg.add_argument("folders", nargs="+", type=Path, help="broadcasts of training films")
    arg.add_argument("--halves", nargs="*", type=Path, default=[], help="folders of training films to cut into halves")
    arg.add_argument("--out", type=Path, default=SHIPPED_WEIGHTS, help="file of the weights (%(default)s)")
    arg.add_argument("--cache", type=Path, default=default_cache(), help="folder of stored features (%(default)s)")
    args = arg.parse_args(argv)
    torch.set_num_threads(1)
    cache = RecordingCache(load_encoder(None), args.cache, report_progress)
    aired, halved = of_broadcasts(args.folders, cache), of_halves(args.halves, cache)
    samples = [*aired, *halved]
    model = fit(samples, [1.0] * len(aired) + [HALVES_WEIGHT] * len(halved))
    n_right = sum(sample.is_right for sample in samples)
    model.save(
        args.out,
        {
            "about": "Weights of monitor/matching/confidence.py, by scripts/fit_confidence.py on training films.",
            "samples": len(samples),
            "right": n_right,
            "samples_of_halves": len(halved),
        },
    )
    print(f"{len(samples)} samples, {n_right} right: {model}")
    print(f"calibration error on broadcasts: {calibration_error(reliability(restated(aired, model))):.3f}")
    return 0


def of_broadcasts(folders: Sequence[Path], cache: RecordingCache) -> list[AlertSample]:
    """The samples of broadcasts with their truth."""
    samples = []
    for broadcast in (read_broadcast(folder, cache) for folder in folders):
        samples += collect(broadcast.channels, index_of(broadcast.references), broadcast.truth)
    return samples


def of_halves(folders: Sequence[Path], cache: RecordingCache) -> list[AlertSample]:
    """The samples of films whose first half is registered and whose second half airs: none is right."""
    if not folders:
        return []
    first, second = first_and_second_halves([cache.get(path) for folder in folders for path in videos_in(folder)])
    return collect(second, index_of([film for film in first if film.informative.any()]), [])


def collect(channels: Sequence[Recording], index: ReferenceIndex, truth: Sequence[TrueCopy]) -> list[AlertSample]:
    matching, read = match_parameters(Settings()), TileReader(load_mask_step()).read
    samples = []
    for channel in channels:
        report_progress(f"matching {channel.name}: {len(channel.rows)} s")
        sampled = SampledChannel(channel, index, read, matching, lambda view: view.score, SCORES)
        samples += sampled.samples(truth)
    return samples


def fit(samples: Sequence[AlertSample], sample_weights: Sequence[float] | None = None) -> ConfidenceModel:
    """The model with the highest likelihood; a weight that would be negative is 0."""
    inputs = np.array(
        [(1.0, logit(one.score), one.change or 0.0, 1.0 if one.change is None else 0.0) for one in samples]
    )
    is_right = np.array([sample.is_right for sample in samples], np.float64)
    counts = np.ones(len(samples)) if sample_weights is None else np.asarray(sample_weights)
    used = np.ones(inputs.shape[1], np.bool_)
    weights = np.zeros(inputs.shape[1])
    while True:
        weights[:] = 0.0
        weights[used] = _newton(inputs[:, used], is_right, counts)
        negative = weights < 0
        negative[0] = False  # the intercept
        if not negative.any():
            break
        used &= ~negative
    intercept, score, change, still = (float(weight) for weight in weights)
    worth = min(1.0, still / change) if change else 0.0
    return ConfidenceModel(*(round(weight, 4) for weight in (intercept, score, change, worth)))


def _newton(
    inputs: NDArray[np.float64], is_right: NDArray[np.float64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Logistic regression with a ridge on all but the intercept; each sample counts so often."""
    weights = np.zeros(inputs.shape[1])
    ridge = np.diag([0.0, *[RIDGE * counts.sum() / 100] * (inputs.shape[1] - 1)])
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-inputs @ weights))
        gradient = inputs.T @ (counts * (is_right - chance)) - ridge @ weights
        curvature = (inputs * (counts * chance * (1 - chance))[:, None]).T @ inputs + ridge
        weights = weights + np.linalg.solve(curvature + 1e-9 * np.eye(len(weights)), gradient)
    return weights


def restated(samples: Sequence[AlertSample], model: ConfidenceModel) -> list[AlertSample]:
    """The samples with the confidence that this model gives them."""
    return [replace(sample, confidence=model.of(sample)) for sample in samples]


if __name__ == "__main__":
    sys.exit(main())
