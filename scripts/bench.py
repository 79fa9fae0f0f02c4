#!/usr/bin/env python3
"""Prints what things cost, as ratios measured side by side in one run: an absolute time says little by itself.

    scripts/bench.py channels VIDEO     N live channels of this video against `ffmpeg -skip_frame nokey` on the same
    scripts/bench.py kafka              `copywatch match` against bare reading, and bare decoding and encoding
    scripts/bench.py registration VIDEO registering this video against bare decoding and encoding of it
    scripts/bench.py search VIDEOS      libraries of up to 10 million seconds: what is found, and what it costs
    scripts/bench.py stream             a day of one channel: does a second cost the same at the end of it?

Each part is a file in scripts/benches, and each prints one JSON object instead with --json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

# Modules with `add_arguments(parser)`, `run(args)` -> figures, and `lines(figures)`.
PARTS = ("channels", "kafka", "registration", "search", "stream")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when the part ran to its end; its figures are on stdout."""
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
