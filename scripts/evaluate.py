#!/usr/bin/env python3
"""Prints the accuracy tables: the paper's ablation, our own additions, and the effect of each.

    evaluate.py pairs VIDEOS            edited clips of the videos against the full videos
    evaluate.py broadcast FOLDER        ch*.ts, references/ and truth.jsonl, through the live matcher
    evaluate.py sensitivity FOLDER      the same with other values of tau, sigma and gamma
    evaluate.py alerts FOLDER...        what alerts state on a broadcast: one per copy, place, speed, reasons
    evaluate.py airings VIDEOS FILM...  the same for many airings of single films, such as still or repeating ones
    evaluate.py evidence-pairs FOLDER   how far the paired pictures of alerts are from the true partner
    evaluate.py halves VIDEOS           the first half of every video registered, the second half aired
    evaluate.py reliability FOLDER...   of alerts that state a confidence, the share that is right
    evaluate.py annotations vcdb|fivr LABELS VIDEOS
                                        published label files, with the videos named by their id

Every video is encoded once and its features are stored in --cache. The `best` figures of a row are at the score
threshold with the highest F1, `own` at the product's. A baseline's own setting is tuned for it. A broadcast without
copies (an empty truth.jsonl) gives false alarms per hour.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from evaluation.ablations import OURS, ROWS, SCORE_THRESHOLD, AblationRunner, Background, Networks, Row, index_of
from evaluation.alert_samples import SampledChannel
from evaluation.alert_statements import Statements, first_and_second_halves
from evaluation.annotations import AnnotationError, LabelledPair, find_videos, read_fivr, read_vcdb
from evaluation.evidence_pairs import JudgedPair, figures, judged_pairs, register_references
from evaluation.full_matrix import compare, crop, read_maps, walk
from evaluation.plots import draw_alignment
from evaluation.recordings import Recording, RecordingCache
from evaluation.reliability import Bin, calibration_error, reliability
from evaluation.scoring import LEVELS, Copy, FoundCopy, Score, TrueCopy, overlap, read_truth, score
from evaluation.synthetic_pairs import make_airings, make_pairs
from monitor.alerting.alerts import ENDED, STARTED, Alert
from monitor.config.settings import Settings
from monitor.errors import MonitorError
from monitor.matching.confidence import confidence
from monitor.matching.mask_step import SHIPPED_WEIGHTS, TileReader, load_mask_step
from monitor.matching.matcher import MatchParameters
from monitor.runtime.channel_monitor import match_parameters
from reference_db.errors import CatalogError, MediaError
from reference_db.features.encoder import load_encoder
from reference_db.media.frames import Mode
from training.sequence_encoder import SequenceEncoder

VIDEO_FILES = ("*.mp4", "*.mkv", "*.webm", "*.mov", "*.ts")
MIN_VIDEO_S = 12  # shorter videos are skipped
TAUS, SIGMAS, GAMMAS = (0.1, 0.2, 0.3, 0.4), (0.1, 0.2, 0.3), (10.0, 100.0, 500.0, 1000.0)
PLOT_MARGIN_S = 12  # around a true copy

Run = Callable[[Row, float], list[FoundCopy]]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one row, or why it could not be run."""

    row: Row
    setting: float
    threshold: float
    found: tuple[FoundCopy, ...]
    score: Score | None
    missing: str | None = None

    def as_dict(self) -> dict[str, object]:
        if self.score is None:
            return {"row": self.row.name, "missing": self.missing}
        tuned = {"setting": self.setting} if len(self.row.settings) > 1 else {}
        return {"row": self.row.name} | tuned | self.score.as_dict()


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast:
    """The recordings and the truth of a folder with `ch*.ts`, `references/` and `truth.jsonl`."""

    channels: tuple[Recording, ...]
    references: tuple[Recording, ...]
    truth: tuple[TrueCopy, ...]

    @property
    def hours(self) -> float:
        return sum(channel.hours for channel in self.channels)


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and prints one table, or one JSON object."""
    args = parser().parse_args(argv)
    try:
        report = args.command(args)
    except (MonitorError, CatalogError, AnnotationError, NotADirectoryError, FileNotFoundError) as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report))
    return 0


def parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    common.add_argument("--cache", type=Path, default=default_cache(), help="folder of stored features (%(default)s)")
    common.add_argument("--encoder", type=Path, help="another frame encoder than the shipped one")
    common.add_argument("--mask-step", type=Path, help="other Mask-Step weights than the shipped ones")
    common.add_argument("--sequence", type=Path, metavar="DIR", help="sequence_encoder and mask_step trained together")
    common.add_argument("--background", type=Path, metavar="VIDEOS", help="unrelated videos for score normalisation")
    common.add_argument("--rows", nargs="+", metavar="NAME", help="only rows whose names contain one of these")
    common.add_argument(
        "--mode", choices=("exact", "economy", "auto"), default="exact", help="how channels are sampled"
    )
    common.add_argument("--min-confidence", type=float, help="of alerts (default: that of the settings)")
    common.add_argument(
        "--threshold", type=float, default=SCORE_THRESHOLD, help="minimum score of baselines (%(default)s)"
    )
    for name in ("tau", "sigma", "gamma"):
        common.add_argument(f"--{name}", type=float, help="default: that of the settings")
    arg = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = arg.add_subparsers(required=True)

    pairs = commands.add_parser("pairs", parents=[common], help="synthetic pairs of a folder of videos")
    pairs.add_argument("videos", type=Path)
    pairs.add_argument("--per-video", type=int, default=4, help="copies of each video")
    pairs.add_argument("--strength", type=float, default=0.8, help="strength of the spatial edits, 0 to 1")
    pairs.add_argument("--seed", type=int, default=1)
    pairs.set_defaults(command=evaluate_pairs)

    broadcast = commands.add_parser("broadcast", parents=[common], help="a broadcast with its truth")
    broadcast.add_argument("folder", type=Path)
    broadcast.add_argument("--plots", type=Path, metavar="DIR", help="draw matrix, mask, steps and path of each copy")
    broadcast.add_argument("--max-plots", type=int, default=40)
    broadcast.set_defaults(command=evaluate_broadcast)

    sensitivity = commands.add_parser("sensitivity", parents=[common], help="tau, sigma and gamma on a broadcast")
    sensitivity.add_argument("folder", type=Path)
    sensitivity.set_defaults(command=evaluate_sensitivity)

    alerts = commands.add_parser("alerts", parents=[common], help="what alerts state on a broadcast")
    alerts.add_argument("folders", type=Path, nargs="+", metavar="FOLDER")
    alerts.set_defaults(command=evaluate_alerts)

    airings = commands.add_parser("airings", parents=[common], help="many airings of single films")
    airings.add_argument("videos", type=Path, help="folder of videos; the others are aired in between")
    airings.add_argument("films", nargs="+", metavar="FILM", help="names of the videos to register and air")
    airings.add_argument("--airings", type=int, default=25, help="of each film")
    airings.add_argument("--seed", type=int, default=1)
    airings.set_defaults(command=evaluate_airings)

    evidence = commands.add_parser("evidence-pairs", parents=[common], help="paired pictures of alerts on a broadcast")
    evidence.add_argument("folder", type=Path)
    evidence.add_argument("--evidence", type=Path, metavar="DIR", help="keep the pictures in this folder")
    evidence.set_defaults(command=evaluate_evidence_pairs)

    halves = commands.add_parser("halves", parents=[common], help="alerts on the unregistered halves of videos")
    halves.add_argument("videos", type=Path, nargs="+")
    halves.set_defaults(command=evaluate_halves)

    trusted = commands.add_parser("reliability", parents=[common], help="confidence against the share of right alerts")
    trusted.add_argument("folders", nargs="+", type=Path)
    trusted.set_defaults(command=evaluate_reliability)

    annotations = commands.add_parser("annotations", parents=[common], help="VCDB or FIVR-200k-PVCD labels")
    annotations.add_argument("kind", choices=("vcdb", "fivr"))
    annotations.add_argument("labels", type=Path, help="the label file, or its folder")
    annotations.add_argument("videos", type=Path, help="folder of videos named by their id")
    annotations.add_argument("--all-pairs", action="store_true", help="also pairs without a label, as unrelated ones")
    annotations.set_defaults(command=evaluate_annotations)
    return arg


# --- commands ---------------------------------------------------------------------------------------------------------


def evaluate_pairs(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, rows = prepare(args)
    paths = videos_in(args.videos)
    recordings = [cache.get(path) for path in paths]
    usable = [(p, r) for p, r in zip(paths, recordings, strict=True) if len(r.rows) >= MIN_VIDEO_S]
    pairs = make_pairs(
        [path for path, _ in usable],
        [recording for _, recording in usable],
        cache.encoder,
        per_video=args.per_video,
        strength=args.strength,
        seed=args.seed,
        progress=lambda done, total: report_progress(f"pairs of {done}/{total} videos"),
    )
    truth = [true for pair in pairs for true in pair.truth]
    hours = sum(pair.live.hours for pair in pairs)

    def run(row: Row, setting: float) -> list[FoundCopy]:
        return [copy for pair in pairs for copy in runner.on_pair(row, setting, pair.live, pair.ref)]

    about = f"{len(pairs)} pairs of {len(usable)} videos, {len(truth)} copies, {len(pairs) - len(truth)} unrelated"
    results = run_rows(runner, rows, run, truth, hours, print_head(args, about, truth))
    return report(args, "pairs", about, results, truth)


def evaluate_broadcast(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, rows = prepare(args)
    broadcast = read_broadcast(args.folder, cache, args.mode)
    about = (
        f"{len(broadcast.channels)} channels, {broadcast.hours:.2f} h, {len(broadcast.references)} references, "
        f"{len(broadcast.truth)} copies"
    )
    show = print_head(args, about, broadcast.truth)
    results = run_rows(runner, rows, on_channels(runner, broadcast), broadcast.truth, broadcast.hours, show)
    ours = our_own(results)
    if args.plots and ours:
        draw_plots(args.plots, args.max_plots, runner, broadcast, ours.found)
    return report(args, "broadcast", about, results, broadcast.truth)


def evaluate_sensitivity(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, _ = prepare(args)
    broadcast = read_broadcast(args.folder, cache, args.mode)
    table: list[dict[str, object]] = []
    for letter, values in (("tau", TAUS), ("sigma", SIGMAS), ("gamma", GAMMAS)):
        for value in values:
            report_progress(f"{letter} = {value:g}")
            matching = with_letter(runner.matching, letter, value)
            changed = AblationRunner(runner.networks, matching, runner.min_confidence)
            found = on_channels(changed, broadcast)(OURS, 0.0)
            scored = score(found, broadcast.truth, runner.min_confidence, broadcast.hours)
            table.append({letter: value} | scored.as_dict())
            if not args.json:
                print_sensitivity(letter, value, scored, first=len(table) == 1)
    return {"command": "sensitivity", "rows": table}


def evaluate_alerts(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, _ = prepare(args)
    events: list[Alert] = []
    truth: list[TrueCopy] = []
    for folder in args.folders:
        broadcast = read_broadcast(folder, cache, args.mode)
        for channel in broadcast.channels:
            events += [_named(event, folder) for event in runner.events(channel, broadcast.references)]
        truth += [replace(true, channel=f"{folder.name} {true.channel}") for true in broadcast.truth]
    return show_statements(args, ", ".join(folder.name for folder in args.folders), Statements.of(events, truth))


def _named(event: Alert, folder: Path) -> Alert:
    """The event with its broadcast in the names of channel and alert, which several broadcasts share."""
    return replace(event, channel=f"{folder.name} {event.channel}", id=f"{folder.name} {event.id}")


def evaluate_airings(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, _ = prepare(args)
    paths = {path.stem: path for path in videos_in(args.videos)}
    if unknown := [film for film in args.films if film not in paths]:
        raise FileNotFoundError(f"no video {', '.join(unknown)} in {args.videos}")
    references = [cache.get(paths[film]) for film in args.films]
    others = [cache.get(path) for name, path in paths.items() if name not in args.films]
    rows: dict[str, object] = {}
    for film, ref in zip(args.films, references, strict=True):
        options = {"airings": args.airings, "seed": args.seed}
        channel, truth = make_airings(paths[film], ref, others, cache.encoder, **options)
        rows |= show_statements(args, film, Statements.of(runner.events(channel, references), truth))
    return rows


def evaluate_evidence_pairs(args: argparse.Namespace) -> dict[str, object]:
    torch.set_num_threads(1)
    encoder = load_encoder(args.encoder)
    library = args.cache / "evidence-pairs" / "".join(c if c.isalnum() else "_" for c in encoder.encoder_id)
    register_references(args.folder, library / args.folder.name, encoder, report_progress)
    settings = Settings(data_dir=library / args.folder.name)
    with tempfile.TemporaryDirectory() as temporary:
        evidence = args.evidence or Path(temporary)
        evidence.mkdir(parents=True, exist_ok=True)
        truth = read_truth(args.folder / "truth.jsonl")
        pairs = judged_pairs(args.folder, settings, evidence, truth, report_progress)
    found = figures(pairs)
    if not args.json:
        for pair in pairs:
            if not pair.is_right:
                print_wrong_pair(pair)
        for name, value in found.items():
            print(f"{name.replace('_', ' '):24}{value}")
    return {"command": "evidence-pairs", "folder": args.folder.name} | found


def evaluate_halves(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, _ = prepare(args)
    first, second = first_and_second_halves([cache.get(path) for folder in args.videos for path in videos_in(folder)])
    alerts = []
    for channel in second:
        report_progress(channel.name)
        alerts += [event for event in runner.events(channel, first) if event.type == ENDED]
    if not args.json:
        for alert in alerts:
            on_air, in_film = (alert.channel_start, alert.channel_end), (alert.reference_start, alert.reference_end)
            place = f"{on_air[0]:6.1f}-{on_air[1]:6.1f} as {in_film[0]:6.1f}-{in_film[1]:6.1f}"
            uncertain = "  place uncertain" if alert.ambiguous else ""
            print(f"{alert.channel:40} {alert.reference:40} {place}  confidence {alert.confidence or 0:.2f}{uncertain}")
        print(f"{len(alerts)} alerts in the second halves of {len(second)} videos")
    return {"command": "halves", "videos": len(second), "alerts": [alert.as_dict() for alert in alerts]}


def show_statements(args: argparse.Namespace, name: str, statements: Statements) -> dict[str, object]:
    """Prints what alerts state, unless JSON is wanted, and returns it under its name."""
    if not args.json:
        print(name)
        for key, value in statements.as_dict().items():
            print(f"    {key.replace('_', ' '):24} {value}")
    return {name: statements.as_dict()}


def evaluate_reliability(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, _ = prepare(args)
    read, samples = TileReader(runner.networks.net).read, []
    for folder in args.folders:
        broadcast = read_broadcast(folder, cache)
        index = index_of(broadcast.references)
        for channel in broadcast.channels:
            report_progress(f"matching {folder.name}/{channel.name}")
            sampled = SampledChannel(channel, index, read, runner.matching, confidence, [runner.min_confidence])
            samples += sampled.samples(broadcast.truth)
    report: dict[str, object] = {"command": "reliability", "min_confidence": runner.min_confidence}
    for stage in (STARTED, ENDED):
        bins = reliability([sample for sample in samples if sample.stage == stage])
        report[stage] = {"bins": [one.as_dict() for one in bins], "calibration_error": calibration_error(bins)}
        if not args.json:
            print_reliability(stage, bins)
    return report


def evaluate_annotations(args: argparse.Namespace) -> dict[str, object]:
    cache, runner, rows = prepare(args)
    labels = (read_vcdb if args.kind == "vcdb" else read_fivr)(args.labels)
    files = find_videos(args.videos, labels.videos)
    missing = [video for video in labels.videos if video not in files]
    recordings: dict[str, Recording] = {}
    for video, path in files.items():
        try:
            recordings[video] = cache.get(path)
        except MediaError as error:
            report_progress(f"{path.name}: {error}")
            missing.append(video)
    available = labels.among(recordings)
    pairs = list(available.pairs)
    if args.all_pairs:
        pairs += unlabelled_pairs(available.pairs, sorted(recordings))
    truth = [true for pair in pairs for true in pair.truth()]

    def run(row: Row, setting: float) -> list[FoundCopy]:
        found = []
        for pair in pairs:
            live, ref = recordings[pair.query], recordings[pair.reference]
            found += [replace(copy, channel=pair.name) for copy in runner.on_pair(row, setting, live, ref)]
        return found

    about = (
        f"{len(pairs)} pairs, {len(truth)} labelled sections of {labels.n_labels} ({labels.n_without_length} more "
        f"have no length); {len(missing)} of {len(labels.videos)} videos are missing"
    )
    about += f": {', '.join(missing[:20])}{' ...' if len(missing) > 20 else ''}" if missing else ""
    results = run_rows(runner, rows, run, truth, None, print_head(args, about, truth))
    return report(args, f"annotations {args.kind}", about, results, truth) | {"missing_videos": missing}


# --- shared by the commands -------------------------------------------------------------------------------------------


def prepare(args: argparse.Namespace) -> tuple[RecordingCache, AblationRunner, list[Row]]:
    """The cache of features, the runner and the chosen rows."""
    torch.set_num_threads(1)
    settings = Settings()
    cache = RecordingCache(load_encoder(args.encoder), args.cache, report_progress)
    matching = match_parameters(settings)
    for letter in ("tau", "sigma", "gamma"):
        if getattr(args, letter) is not None:
            matching = with_letter(matching, letter, getattr(args, letter))
    min_confidence = settings.alerting.min_confidence if args.min_confidence is None else args.min_confidence
    background = None
    if args.background:
        background = Background([cache.get(path) for path in videos_in(args.background)])
    networks = load_networks(args)
    if networks.net.trained_on != cache.encoder.encoder_id:
        report_progress(f"Mask-Step weights are for {networks.net.trained_on}, features of {cache.encoder.encoder_id}")
    wanted = args.rows or [""]
    rows = [row for row in ROWS if any(part in row.name for part in wanted)]
    return cache, AblationRunner(networks, matching, min_confidence, background, args.threshold), rows


def load_networks(args: argparse.Namespace) -> Networks:
    net = load_mask_step(args.mask_step)
    folder = args.sequence or SHIPPED_WEIGHTS.parent
    weights = folder / "sequence_encoder.safetensors"
    if not weights.exists():
        return Networks(net)
    sequence_encoder = SequenceEncoder()
    sequence_encoder.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    beside = folder / ("mask_step.safetensors" if args.sequence else "sequence_mask_step.safetensors")
    return Networks(net, sequence_encoder.eval(), load_mask_step(beside) if beside.exists() else None)


def with_letter(matching: MatchParameters, letter: str, value: float) -> MatchParameters:
    if letter == "gamma":
        return replace(matching, scoring=replace(matching.scoring, gamma=value))
    return replace(matching, tau=value) if letter == "tau" else replace(matching, sigma=value)


def run_rows(
    runner: AblationRunner,
    rows: Sequence[Row],
    run: Run,
    truth: Sequence[TrueCopy],
    hours: float | None,
    show: Callable[[Result], None],
) -> list[Result]:
    """Every row at its best setting, by F1 at any threshold and level 0; each is printed when it is done."""
    results = []
    for row in rows:
        if missing := runner.missing(row):
            results.append(Result(row, 0.0, runner.threshold_of(row), (), None, missing))
            show(results[-1])
            continue
        candidates = []
        for setting in row.settings:
            report_progress(f"{row.name}{f' at {setting:g}' if len(row.settings) > 1 else ''}")
            found = run(row, setting)
            scored = score(found, truth, runner.threshold_of(row), hours)
            candidates.append(Result(row, setting, runner.threshold_of(row), tuple(found), scored))
        results.append(max(candidates, key=_merit))
        show(results[-1])
    return results


def _merit(result: Result) -> tuple[float, int]:
    assert result.score is not None
    return result.score.best[0.0].rates.f1, -result.score.false_alarms


def our_own(results: Sequence[Result]) -> Result | None:
    """The row of the product, or the nearest to it among the results."""
    return next((result for result in reversed(results) if result.score and result.row.correction == "none"), None)


def on_channels(runner: AblationRunner, broadcast: Broadcast) -> Run:
    def run(row: Row, setting: float) -> list[FoundCopy]:
        return [
            copy
            for channel in broadcast.channels
            for copy in runner.on_channel(row, setting, channel, broadcast.references)
        ]

    return run


def read_broadcast(folder: Path, cache: RecordingCache, mode: Mode = "exact") -> Broadcast:
    channels = sorted(folder.glob("ch*.ts"))
    if not channels:
        raise FileNotFoundError(f"no channels ch*.ts in {folder}")
    return Broadcast(
        tuple(cache.get(path, mode) for path in channels),
        tuple(cache.get(path) for path in videos_in(folder / "references")),
        tuple(read_truth(folder / "truth.jsonl")),
    )


def videos_in(folder: Path) -> list[Path]:
    found = sorted({path for pattern in VIDEO_FILES for path in folder.glob(pattern)})
    if not found:
        raise FileNotFoundError(f"no videos in {folder}")
    return found


def unlabelled_pairs(pairs: Sequence[LabelledPair], videos: Sequence[str]) -> list[LabelledPair]:
    """All pairs of the videos without a label."""
    labelled = {frozenset((pair.query, pair.reference)) for pair in pairs}
    every = ((a, b) for n, a in enumerate(videos) for b in videos[n + 1 :])
    return [LabelledPair(a, b, ()) for a, b in every if frozenset((a, b)) not in labelled]


def draw_plots(
    folder: Path, at_most: int, runner: AblationRunner, broadcast: Broadcast, found: Sequence[FoundCopy]
) -> None:
    """Writes one PNG for each true copy, the missed ones first."""
    folder.mkdir(parents=True, exist_ok=True)
    alerts = [copy for copy in found if copy.strength >= runner.min_confidence]
    channels = {channel.name: channel for channel in broadcast.channels}
    references = {reference.name: reference for reference in broadcast.references}
    is_found = {true: any(overlap(copy, true) > 0 for copy in alerts) for true in broadcast.truth}
    for number, true in enumerate(sorted(broadcast.truth, key=lambda t: is_found[t])[:at_most]):
        channel, reference = channels[true.channel], references[true.reference]
        first, last = int(true.channel_start) - PLOT_MARGIN_S, int(true.channel_end) + PLOT_MARGIN_S
        rows = slice(max(0, first), min(len(channel.rows), last))
        section = Recording(channel.name, channel.rows[rows], channel.informative[rows])
        full = compare(section, reference)
        columns = slice(max(0, int(true.reference_start) - PLOT_MARGIN_S), int(true.reference_end) + PLOT_MARGIN_S)
        part, maps = crop(full, read_maps(runner.networks.net, full.similarity), slice(None), columns)
        box = (
            true.channel_start - rows.start,
            true.reference_start - columns.start,
            true.channel_end - rows.start,
            true.reference_end - columns.start,
        )
        outcome = "found" if is_found[true] else "missed"
        title = f"{outcome}: {true.channel} {true.channel_start:.0f} s, {true.reference} {' '.join(true.edits)}"
        sheet = draw_alignment(part, maps, walk(part, maps, runner.matching), box, title)
        sheet.save(folder / f"{number:03d}-{outcome}-{true.channel}-{int(true.channel_start)}-{true.reference}.png")
    report_progress(f"plots in {folder}")


# --- printing ---------------------------------------------------------------------------------------------------------


def print_head(args: argparse.Namespace, about: str, truth: Sequence[TrueCopy]) -> Callable[[Result], None]:
    """Prints the head of a table and returns the function that prints its lines; with --json, neither prints."""
    if args.json:
        return lambda result: None
    print(about)
    if not truth:
        print(f"\n{'row':22}{'false alarms':>14}{'per hour':>10}{'strongest':>11}", flush=True)
        return print_false_alarms
    print(f"\n{'':22}" + "".join(f"{f'IoU > {level:g}':^32}" for level in LEVELS))
    print(f"{'row':22}" + f"{'SP':>8}{'SR':>8}{'F1':>8}{'own F1':>8}" * len(LEVELS), flush=True)
    return print_rates


def report(
    args: argparse.Namespace, command: str, about: str, results: Sequence[Result], truth: Sequence[TrueCopy]
) -> dict[str, object]:
    """The results as one object; prints the details of our own row below the table."""
    ours = our_own(results)
    if ours and not args.json:
        print_details(ours, truth)
    return {"command": command, "about": about, "rows": [result.as_dict() for result in results]}


def print_rates(result: Result) -> None:
    if result.score is None:
        print(f"{result.row.name:22}  {result.missing}")
        return
    cells = []
    for level in LEVELS:
        best, own = result.score.best[level].rates, result.score.own[level]
        cells += [best.sp, best.sr, best.f1, own.f1]
    tuned = f"  at {result.setting:g}" if len(result.row.settings) > 1 else ""
    print(f"{result.row.name:22}" + "".join(f"{cell:8.4f}" for cell in cells) + tuned, flush=True)


def print_false_alarms(result: Result) -> None:
    if result.score is None:
        print(f"{result.row.name:22}  {result.missing}")
        return
    strongest = max((copy.strength for copy in result.found), default=0.0)
    per_hour = result.score.false_alarms_per_hour or 0.0
    print(f"{result.row.name:22}{result.score.false_alarms:14d}{per_hour:10.2f}{strongest:11.4f}", flush=True)


def print_details(result: Result, truth: Sequence[TrueCopy]) -> None:
    """Prints the figures of a row that are not in the table, at our own threshold."""
    assert result.score is not None
    scored = result.score
    alarms = f"{scored.false_alarms} false alarms"
    if scored.false_alarms_per_hour is not None:
        alarms += f" ({scored.false_alarms_per_hour:.2f} per hour)"
    print(f"\n{result.row.name}: {scored.n_found} alerts for {scored.n_true} copies, {alarms}")
    if scored.alerts_per_copy is not None:
        print(f"alerts per found copy: {scored.alerts_per_copy:.3f}")
    if scored.seconds_to_alert is not None:
        print(f"seconds to alert: median {scored.seconds_to_alert.median:.1f}, p95 {scored.seconds_to_alert.p95:.1f}")
    if scored.recall_by_edit:
        print("recall by edit: " + ", ".join(f"{edit} {hit}/{n}" for edit, (hit, n) in scored.recall_by_edit.items()))
    for true in truth:
        hits = [copy for copy in result.found if overlap(copy, true) > 0]
        if not any(copy.strength >= result.threshold for copy in hits):
            strongest = max((copy.strength for copy in hits), default=0.0)
            print(f"  missed ({strongest:.3f}): {line_of(true)} {' '.join(true.edits)}")
    for copy in result.found:
        if copy.strength >= result.threshold and not any(overlap(copy, true) > 0 for true in truth):
            print(f"  false ({copy.strength:.3f}): {line_of(copy)}")


def line_of(copy: Copy) -> str:
    return (
        f"{copy.channel} {copy.channel_start:.1f}-{copy.channel_end:.1f} "
        f"{copy.reference} {copy.reference_start:.1f}-{copy.reference_end:.1f}"
    )


def print_sensitivity(letter: str, value: float, scored: Score, *, first: bool) -> None:
    if first:
        print(f"{'':16}{'F1':>9}{'F1 > .5':>9}{'own F1':>9}{'own > .5':>9}{'false alarms':>14}")
    figures = (scored.best[0.0].rates.f1, scored.best[0.5].rates.f1, scored.own[0.0].f1, scored.own[0.5].f1)
    print(f"{f'{letter} = {value:g}':16}" + "".join(f"{f1:9.4f}" for f1 in figures) + f"{scored.false_alarms:14d}")


def print_reliability(stage: str, bins: Sequence[Bin]) -> None:
    print(f"\n{stage}, calibration error {calibration_error(bins):.3f}")
    print(f"{'confidence':14}{'alerts':>8}{'stated':>9}{'right':>9}   true share, 95 %")
    for one in bins:
        low, high = one.interval
        span = f"{one.low:g} to {one.high:g}"
        print(f"{span:14}{one.n:8d}{one.mean_confidence:9.3f}{one.share_right:9.3f}   {low:.2f} to {high:.2f}")


def print_wrong_pair(pair: JudgedPair) -> None:
    away = "no copy there" if pair.true_s is None else f"{pair.ref_s - pair.true_s:+.2f} s from its partner"
    line = "" if pair.true_s is None else f", the alert's line {pair.line_s - pair.true_s:+.2f} s"
    notes = f"{', looks right' if pair.looks_right else ''}{', ambiguous' if pair.is_ambiguous else ''}"
    edits = " ".join(pair.edits)
    print(f"  {pair.channel} {pair.stream_s:.1f} {pair.reference} {pair.ref_s:.1f} {edits}: {away}{line}{notes}")


def report_progress(line: str) -> None:
    print(line, file=sys.stderr)


def default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base else Path.home() / ".cache") / "copywatch" / "evaluate"


if __name__ == "__main__":
    sys.exit(main())
