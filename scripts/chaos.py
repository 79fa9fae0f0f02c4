#!/usr/bin/env python3
"""Fault injection: breaks Copywatch on purpose, many times, and checks that its guarantees hold.

    scripts/chaos.py storage                 the library: kills, failing disks, power cuts, flipped bytes
    scripts/chaos.py --seed 7 --json storage
    scripts/chaos.py kafka                   a group of matchers: kills, zombies, rebalances, broker outages
    scripts/chaos.py streams                 channels: stream faults, bad media, hostile addresses
    scripts/chaos.py matching                random streams, cut and restarted anywhere, against the whole matrix
    scripts/chaos.py serve                   a running monitor: kills, full and failing disks, no descriptors, clocks
    scripts/chaos.py web                     the API: ten thousand generated calls

Each part prints its figures; the exit code is 0 only if every guarantee held. `scripts/test` runs a short sample of
each. Needs the packages of the tests (`scripts/test` installs them).
"""

import argparse
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

Say = Callable[[str], None]
MAX_MEMORY_MB = 1024  # of this process, which runs the sources of `streams`: more means that one leaks
Part = dict[str, Any]  # figures; `failures` counts violated guarantees


def storage(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """The library: every system call, every disk fault, random kills, power cuts, flipped bytes, incorrect writers."""
    from tests.chaos import disks, flips, power, random_kills, storage
    from tests.chaos.operations import INCORRECT, OPERATIONS

    if shutil.which("strace") is None:
        raise SystemExit("chaos: this needs strace; on Debian: apt-get install strace")
    sample = None if args.sample == 0 else args.sample
    parts: dict[str, Part] = {}

    def run(name: str, trial: Callable[[], Any]) -> None:
        began = time.monotonic()
        say(name)
        parts[name] = trial().figures()
        say(f"  {json.dumps(parts[name])}  ({time.monotonic() - began:.0f} s)")

    run("kill at every system call", lambda: storage.kill_points(OPERATIONS, sample, args.seed, say))
    run("disk fault at every call", lambda: storage.disk_faults(OPERATIONS, sample, args.seed, say))
    run("random kills", lambda: random_kills.random_kills(args.kills, args.seed))
    if os.geteuid() == 0:
        run("full and read-only disks", lambda: disks.fill_disks(range(200, 2000, 100)))
        run("disks without free inodes", lambda: disks.use_up_files(range(8, 60, 2)))
    else:
        say("full and read-only disks: skipped, only root may mount them")
    run("power cuts", lambda: power.cuts(OPERATIONS, args.cuts, args.seed))
    run("flipped bytes", lambda: flips.flip_bytes(args.flips, args.seed))
    for operation in INCORRECT:
        run(f"control: {operation.name}", lambda one=operation: storage.kill_points([one], None, args.seed))  # type: ignore[misc]
    for forgotten in power.FORGOTTEN:
        run(f"control: {forgotten}", lambda one=forgotten: power.cuts(OPERATIONS, args.cuts, args.seed, one))  # type: ignore[misc]
    return parts


def streams(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Channels: every stream fault beside a witness, days of clock wraps, bad media, hostile addresses."""
    from tests.chaos import corpus, hostile, streams

    parts: dict[str, Part] = {}

    def report(name: str, figures: Part) -> None:
        say(f"{name}: {json.dumps(figures)}")

    for repeat in range(args.repeats):
        long = streams.long_scenarios(args.away_for) if repeat == 0 and not args.short else {}
        scenarios = {**long, **streams.SCENARIOS}
        chosen = {name: scenario for name, scenario in scenarios.items() if args.only in name}
        if chosen:
            with tempfile.TemporaryDirectory() as folder:
                results = streams.run(chosen, Path(folder) / "clips", args.at_once, report)
            parts |= results if args.repeats == 1 else {f"{name} #{repeat + 1}": one for name, one in results.items()}
    if args.only in "bad media":
        parts["bad media"] = corpus.run(corpus.sample_of(args.seed, args.cases))
        report("bad media", parts["bad media"])
    if args.only in "hostile addresses":
        parts["hostile addresses"] = hostile.run()
        report("hostile addresses", parts["hostile addresses"])
    peak_mb = _peak_memory_mb()
    parts["memory"] = {"peak_mb": peak_mb, "failures": int(peak_mb > MAX_MEMORY_MB)}
    report("memory", parts["memory"])
    return parts


def _peak_memory_mb() -> int:
    """Peak memory of this process, without decoders."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def kafka(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """A group of matchers on a real broker: its alerts against those of an undisturbed run."""
    from tests.chaos import kafka
    from tests.support import broker
    from tests.support.killed_match import BROKEN, REFUSING

    parts: dict[str, Part] = {}

    def run(name: str, trial: Callable[[int], kafka.Trial], enough: Callable[[list[kafka.Trial]], bool]) -> None:
        began, trials = time.monotonic(), list[kafka.Trial]()
        while not enough(trials):
            trials.append(trial(args.seed + len(trials)))
            say(f"  {name} {len(trials)}: {trials[-1]}")
        if not trials:
            return
        parts[name] = kafka.figures(trials, baseline.alerts)
        say(f"{name}: {json.dumps(parts[name])}  ({time.monotonic() - began:.0f} s)")

    with tempfile.TemporaryDirectory() as folder:
        node = broker.start_broker(Path(folder) / "broker")
        try:
            say("an undisturbed run")
            baseline = kafka.Baseline.build(Path(folder) / "library", node, args.seed, args.channels, args.seconds)
            run(
                "kill -9 of matchers",
                lambda seed: kafka.kills(baseline, seed, args.kills_each),
                lambda trials: sum(trial.deaths.total() for trial in trials) >= args.kills,
            )
            run("zombies", lambda seed: kafka.zombies(baseline, seed, 3), lambda trials: len(trials) >= args.rounds)
            run(
                "broker outages",
                lambda seed: kafka.broker_faults(baseline, seed, 4),
                lambda trials: len(trials) >= args.rounds,
            )
            run(
                "snapshots refused",
                lambda seed: kafka.control(baseline, seed, REFUSING),
                lambda trials: len(trials) >= args.rounds,
            )
            run(
                "rebalance storm",
                lambda seed: kafka.storm(baseline, seed, 12),
                lambda trials: len(trials) >= args.rounds,
            )
            if args.rounds:
                parts["handover"] = kafka.handovers(baseline, args.seed, 3 * args.rounds)
                say(f"handover: {json.dumps(parts['handover'])}")
            for broken in BROKEN if args.rounds else ():
                run(f"control: {broken}", lambda seed, broken=broken: kafka.control(baseline, seed, broken), bool)  # type: ignore[misc]
        finally:
            node.stop()
    return parts


def serve(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """A running `serve`: kills at named points, full and failing disks, no file descriptors, clock changes."""
    from tests.chaos import serving

    scenarios = {name: scenario for name, scenario in serving.SCENARIOS.items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        return serving.run(
            scenarios, Path(folder), args.at_once, lambda name, figures: say(f"{name}: {json.dumps(figures)}")
        )


def web(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Every operation of the OpenAPI document: no server error, no response that the document does not allow."""
    from tests.chaos import web

    with tempfile.TemporaryDirectory() as folder:
        parts = {"generated calls": web.run(Path(folder), args.calls, args.seed)}
    figures = parts["generated calls"]
    statuses = ", ".join(f"{status}: {n}" for status, n in figures["statuses"].items())
    say(f"operations {figures['operations']}, calls {figures['calls']} ({statuses}), failures {figures['failures']}")
    for example in figures["examples"]:
        say(f"  {example}")
    return parts


def matching(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Random streams, cut and restarted anywhere: the alerts of each against its whole matrix."""
    began, place = time.monotonic(), Path(__file__).parents[1]
    share = -(-args.examples // args.at_once)

    def examples(seed: int) -> tuple[int, str]:
        """How many examples passed, and the output if one failed."""
        options = ["-q", "-x", "--timeout=0", f"--hypothesis-seed={seed}", "--hypothesis-show-statistics"]
        run = subprocess.run(
            [sys.executable, "-m", "pytest", *options, "tests/matching/test_streaming.py", "-k", "whole_matrix"],
            env={**os.environ, "PYTHONPATH": str(place), "COPYWATCH_TEST_EXAMPLES": str(share)},
            cwd=place,
            capture_output=True,
            text=True,
        )
        passed = max((int(found) for found in re.findall(r"(\d+) passing", run.stdout)), default=0)
        return passed, "" if run.returncode == 0 and passed >= share else run.stdout + run.stderr

    with ThreadPoolExecutor(args.at_once) as pool:
        ended = list(pool.map(examples, range(args.seed, args.seed + args.at_once)))
    failures = [output for _, output in ended if output]
    figures = {"examples": sum(passed for passed, _ in ended), "took_s": round(time.monotonic() - began)}
    for output in failures:
        say(output)
    say(f"streaming property: {json.dumps(figures)}")
    return {"streaming property": {**figures, "failures": len(failures)}}


def failed_parts(parts: dict[str, Part]) -> list[str]:
    """Parts with failures, and controls without: an incorrect writer that is not detected is a failure too."""
    return [name for name, part in parts.items() if bool(part["failures"]) != name.startswith("control: ")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else on stdout")
    parser.add_argument("--seed", type=int, default=0)
    commands = parser.add_subparsers(required=True, dest="command")
    library = commands.add_parser("storage", help="the library of references")
    library.add_argument("--sample", type=int, default=0, help="points per operation; 0 is all of them")
    library.add_argument("--kills", type=int, default=3000, help="random kills")
    library.add_argument("--cuts", type=int, default=100, help="power cuts per operation")
    library.add_argument("--flips", type=int, default=2000, help="flipped bytes")
    library.set_defaults(run=storage)
    channels = commands.add_parser("streams", help="channels: stream faults, bad media, hostile addresses")
    channels.add_argument("--repeats", type=int, default=1, help="runs of every scenario")
    channels.add_argument("--at-once", type=int, default=8, help="scenarios that run at the same time")
    channels.add_argument("--cases", type=int, default=10**6, help="number of bad files; by default all")
    channels.add_argument("--only", default="", help="only parts whose name contains this text")
    channels.add_argument("--short", action="store_true", help="without the scenarios that take minutes or an hour")
    channels.add_argument("--away-for", type=float, default=3600.0, help="seconds of the long outage")
    channels.set_defaults(run=streams)
    process = commands.add_parser("serve", help="a running monitor and its machine; needs root, strace and faketime")
    process.add_argument("--at-once", type=int, default=3, help="scenarios that run at the same time")
    process.add_argument("--only", default="", help="only scenarios whose name contains this text")
    process.set_defaults(run=serve)
    properties = commands.add_parser("matching", help="the streaming property, on many examples")
    properties.add_argument("--examples", type=int, default=20_000)
    properties.add_argument("--at-once", type=int, default=2, help="processes that share the examples")
    properties.set_defaults(run=matching)
    matchers = commands.add_parser("kafka", help="a group of matchers on a broker")
    matchers.add_argument("--kills", type=int, default=200, help="kills of matchers in total")
    matchers.add_argument("--kills-each", type=int, default=15, help="kills of matchers per trial")
    matchers.add_argument("--rounds", type=int, default=3, help="trials of each other kind; 0 for kills only")
    matchers.add_argument("--channels", type=int, default=6)
    matchers.add_argument("--seconds", type=int, default=240, help="length of each channel")
    matchers.set_defaults(run=kafka)
    api = commands.add_parser("web", help="the API")
    api.add_argument("--calls", type=int, default=150, help="calls of each operation, in each of two or three ways")
    api.set_defaults(run=web)
    args = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # the library logs every repair
    parts = args.run(args, lambda line: print(line, file=sys.stderr if args.json else sys.stdout, flush=True))
    if args.json:
        print(json.dumps(parts, indent=2))
    failed = failed_parts(parts)
    if failed:
        print(f"chaos: failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
