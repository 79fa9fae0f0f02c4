#!/usr/bin/env python3
"""Breaks Copywatch on purpose, over and over, and says whether it kept its promises.

    scripts/chaos.py storage                 the library: kills, failing disks, power cuts, flipped bytes
    scripts/chaos.py --seed 7 --json storage
    scripts/chaos.py kafka                   a group of matchers: kills, zombies, storms, a broker that goes away
    scripts/chaos.py streams                 channels: faults of streams, bad media, hostile addresses
    scripts/chaos.py matching                any stream, cut and restarted anywhere, against its whole matrix
    scripts/chaos.py serve                   a running monitor: kills, full and failing disks, no files, clocks
    scripts/chaos.py web                     the API: ten thousand calls that nobody would think of

Each part prints its figures and ends with 0 only if every promise held. `scripts/test` runs a short sample of each.
Needs what the tests need (`scripts/test` installs it) and, for the library, Debian's package strace.
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
MOST_MEMORY_MB = 1024  # of this process, in which the sources of `streams` live: more than that, and one keeps too much
Part = dict[str, Any]  # figures; `wrong` says how often a promise was broken, `caught` whether a wrong writer was seen


def storage(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """The library: every system call, every disk fault, random kills, power cuts, flipped bytes, wrong writers."""
    from tests.chaos import disks, flips, power, random_kills, storage
    from tests.chaos.operations import OPERATIONS, WRONG

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
        run("disks without room for a file", lambda: disks.use_up_files(range(8, 60, 2)))
    else:
        say("full and read-only disks: left out, only root may mount them")
    run("power cuts", lambda: power.cuts(OPERATIONS, args.cuts, args.seed))
    run("flipped bytes", lambda: flips.flip_bytes(args.flips, args.seed))
    for operation in WRONG:
        run(f"control: {operation.name}", lambda one=operation: storage.kill_points([one], None, args.seed))  # type: ignore[misc]
    for forgotten in power.FORGOTTEN:
        run(f"control: {forgotten}", lambda one=forgotten: power.cuts(OPERATIONS, args.cuts, args.seed, one))  # type: ignore[misc]
    return parts


def streams(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Channels: every fault of a stream beside a witness, days of clock wraps, bad media, hostile addresses."""
    from tests.chaos import corpus, hostile, streams

    parts: dict[str, Part] = {}

    def tell(name: str, figures: Part) -> None:
        say(f"{name}: {json.dumps(figures)}")

    for repeat in range(args.repeats):
        stories = {**(streams.long_stories(args.gone_for) if repeat == 0 and not args.short else {}), **streams.STORIES}
        chosen = {name: story for name, story in stories.items() if args.only in name}
        if chosen:
            with tempfile.TemporaryDirectory() as folder:
                told = streams.run(chosen, Path(folder) / "studio", args.at_once, tell)
            parts |= told if args.repeats == 1 else {f"{name} #{repeat + 1}": one for name, one in told.items()}
    if args.only in "bad media":
        parts["bad media"] = corpus.run(corpus.sample_of(args.seed, args.cases))
        tell("bad media", parts["bad media"])
    if args.only in "hostile addresses":
        parts["hostile addresses"] = hostile.run()
        tell("hostile addresses", parts["hostile addresses"])
    most_mb = _most_memory_mb()
    parts["memory"] = {"most_mb": most_mb, "wrong": int(most_mb > MOST_MEMORY_MB)}
    tell("memory", parts["memory"])
    return parts


def _most_memory_mb() -> int:
    """The most that this process had at once, decoders apart."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))


def kafka(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """A group of matchers on a real broker: what it tells in the end against an unbroken run."""
    from tests.chaos import kafka
    from tests.support import broker
    from tests.support.killed_match import REFUSING, WRONG

    parts: dict[str, Part] = {}

    def run(name: str, trial: Callable[[int], kafka.Trial], enough: Callable[[list[kafka.Trial]], bool]) -> None:
        began, trials = time.monotonic(), list[kafka.Trial]()
        while not enough(trials):
            trials.append(trial(args.seed + len(trials)))
            say(f"  {name} {len(trials)}: {trials[-1]}")
        if not trials:
            return
        parts[name] = kafka.figures(trials, stage.unbroken)
        say(f"{name}: {json.dumps(parts[name])}  ({time.monotonic() - began:.0f} s)")

    with tempfile.TemporaryDirectory() as folder:
        node = broker.begin(Path(folder) / "broker")
        try:
            say("an unbroken run")
            stage = kafka.Stage.build(Path(folder) / "house", node, args.seed, args.channels, args.seconds)
            run(
                "kill -9 of matchers",
                lambda seed: kafka.kills(stage, seed, args.kills_each),
                lambda trials: sum(trial.deaths.total() for trial in trials) >= args.kills,
            )
            run("zombies", lambda seed: kafka.zombies(stage, seed, 3), lambda trials: len(trials) >= args.rounds)
            run(
                "broker away",
                lambda seed: kafka.broker_faults(stage, seed, 4),
                lambda trials: len(trials) >= args.rounds,
            )
            run(
                "snapshots refused",
                lambda seed: kafka.control(stage, seed, REFUSING),
                lambda trials: len(trials) >= args.rounds,
            )
            run("rebalance storm", lambda seed: kafka.storm(stage, seed, 12), lambda trials: len(trials) >= args.rounds)
            if args.rounds:
                parts["handover"] = kafka.handovers(stage, args.seed, 3 * args.rounds)
                say(f"handover: {json.dumps(parts['handover'])}")
            for wrong in WRONG if args.rounds else ():
                run(f"control: {wrong}", lambda seed, wrong=wrong: kafka.control(stage, seed, wrong), bool)  # type: ignore[misc]
        finally:
            node.stop()
    return parts


def serve(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """A running `serve`: kills at named points of its code, full and failing disks, no files, a clock that is set."""
    from tests.chaos import serving

    stories = {name: story for name, story in serving.STORIES.items() if args.only in name}
    with tempfile.TemporaryDirectory() as folder:
        return serving.run(
            stories, Path(folder), args.at_once, lambda name, figures: say(f"{name}: {json.dumps(figures)}")
        )


def web(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Every operation of the OpenAPI document: no failure of the server, no answer that the document does not allow."""
    from tests.chaos import web

    with tempfile.TemporaryDirectory() as folder:
        parts = {"generated calls": web.run(Path(folder), args.calls, args.seed)}
    told = parts["generated calls"]
    statuses = ", ".join(f"{status}: {n}" for status, n in told["statuses"].items())
    say(f"operations {told['operations']}, calls {told['calls']} ({statuses}), wrong {told['wrong']}")
    for what in told["what"]:
        say(f"  {what}")
    return parts


def matching(args: argparse.Namespace, say: Say) -> dict[str, Part]:
    """Streams that nobody would think of: what each tells, cut and restarted anywhere, against its whole matrix."""
    began, place = time.monotonic(), Path(__file__).parents[1]
    share = -(-args.examples // args.at_once)

    def examples(seed: int) -> tuple[int, str]:
        """How many held, and what was said where one did not."""
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
    complaints = [words for _, words in ended if words]
    figures = {"examples": sum(passed for passed, _ in ended), "took_s": round(time.monotonic() - began)}
    for words in complaints:
        say(words)
    say(f"streaming property: {json.dumps(figures)}")
    return {"streaming property": {**figures, "wrong": len(complaints)}}


def broken(parts: dict[str, Part]) -> list[str]:
    """What did not go as promised; a control that nobody noticed is as bad as a promise that was broken."""
    return [name for name, part in parts.items() if bool(part["wrong"]) != name.startswith("control: ")]


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
    channels = commands.add_parser("streams", help="channels: faults of streams, bad media, hostile addresses")
    channels.add_argument("--repeats", type=int, default=1, help="times that every story is told")
    channels.add_argument("--at-once", type=int, default=8, help="stories that happen at the same time")
    channels.add_argument("--cases", type=int, default=10**6, help="bad files to try; all there are by default")
    channels.add_argument("--only", default="", help="parts whose name has these words")
    channels.add_argument("--short", action="store_true", help="without the stories that take minutes, or an hour")
    channels.add_argument("--gone-for", type=float, default=3600.0, help="seconds that the source is away for long")
    channels.set_defaults(run=streams)
    process = commands.add_parser("serve", help="a running monitor and its machine; needs root, strace and faketime")
    process.add_argument("--at-once", type=int, default=3, help="stories that happen at the same time")
    process.add_argument("--only", default="", help="stories whose name has these words")
    process.set_defaults(run=serve)
    properties = commands.add_parser("matching", help="the property that matters most, by many examples")
    properties.add_argument("--examples", type=int, default=20_000)
    properties.add_argument("--at-once", type=int, default=2, help="processes that share them, each with its own seed")
    properties.set_defaults(run=matching)
    matchers = commands.add_parser("kafka", help="a group of matchers on a broker")
    matchers.add_argument("--kills", type=int, default=200, help="of matchers, in all")
    matchers.add_argument("--kills-each", type=int, default=15, help="of matchers, in one trial")
    matchers.add_argument("--rounds", type=int, default=3, help="trials of each other kind; 0 for kills alone")
    matchers.add_argument("--channels", type=int, default=6)
    matchers.add_argument("--seconds", type=int, default=240, help="of each channel")
    matchers.set_defaults(run=kafka)
    api = commands.add_parser("web", help="the API")
    api.add_argument("--calls", type=int, default=150, help="of each operation, in each of two or three ways")
    api.set_defaults(run=web)
    args = parser.parse_args(arguments)
    logging.disable(logging.CRITICAL)  # what the library says of each repair is not news here
    parts = args.run(args, lambda line: print(line, file=sys.stderr if args.json else sys.stdout, flush=True))
    if args.json:
        print(json.dumps(parts, indent=2))
    wrong = broken(parts)
    if wrong:
        print(f"chaos: not as promised: {', '.join(wrong)}", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
