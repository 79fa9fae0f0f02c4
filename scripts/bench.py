#!/usr/bin/env python3
"""Benchmarks. Each compares two sides in one run and prints their ratio, which depends less on the machine than a time.

    scripts/bench.py channels VIDEO     N live channels of this video against `ffmpeg -skip_frame nokey` on the same
    scripts/bench.py decoder VIDEO      the decoding child in its sandbox against the same without it
    scripts/bench.py kafka              `copywatch match` against bare reading, and bare decoding and encoding
    scripts/bench.py registration VIDEO registration of this video against bare decoding and encoding
    scripts/bench.py search VIDEOS      recall and cost of search in libraries of up to 10 million seconds
    scripts/bench.py stream             a day of one channel: does a second cost the same at the end?

Each part is a file in scripts/benches; with --json it prints one JSON object instead of text.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# Modules with `add_arguments(parser)`, `run(args)` -> figures and `lines(figures)`.
PARTS = ("channels", "decoder", "kafka", "registration", "search", "stream")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one part and prints its figures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in PARTS:
        module = importlib.import_module(f"benches.{name}")
        one = parts.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        module.add_arguments(one)
        one.add_argument("--json", action="store_true", help="print one JSON object")
        one.set_defaults(run=module.run, lines=module.lines)
    args = parser.parse_args(arguments)
    figures = args.run(args)
    print(json.dumps(figures, indent=2) if args.json else "\n".join(args.lines(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
