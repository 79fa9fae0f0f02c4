#!/usr/bin/env python3
"""Compares the pinned versions of scripts/constraints.txt with published security advisories.

    scripts/check_advisories.py [--source URL] [--constraints FILE] [--json]

The source speaks the API of OSV, which includes the advisories of PyPI and GitHub. Nothing is sent but the names and
versions of the public packages. Exit codes: 0 no advisory, 1 an advisory affects a pinned version, 2 invalid usage,
4 the source does not answer, so nothing was checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SOURCE = "https://api.osv.dev/v1"
CONSTRAINTS = Path(__file__).parent / "constraints.txt"
PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", re.M)
TIMEOUT_S = 20.0
MAX_PAGES = 20  # of one answer; no package has that many advisories
# Advisories that do not affect Copywatch, each with the reason.
ACCEPTED: dict[str, str] = {}
OK, AFFECTED, UNREACHABLE = 0, 1, 4


def pinned_versions(text: str) -> dict[str, str]:
    """Package -> version. A local version such as 2.9.0+cpu is compared as 2.9.0."""
    return {name: version.partition("+")[0] for name, version in PIN.findall(text)}


def advisories(source: str, pins: Mapping[str, str]) -> dict[str, list[str]]:
    """The ids of the advisories that affect each pinned version. Raises OSError and ValueError."""
    found: dict[str, list[str]] = {name: [] for name in pins}
    queries: list[dict[str, Any]] = [
        {"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pins.items()
    ]
    for _ in range(MAX_PAGES):
        results = _ask(f"{source}/querybatch", queries)
        following = []
        for query, result in zip(queries, results, strict=True):
            found[query["package"]["name"]] += [vulnerability["id"] for vulnerability in result.get("vulns", ())]
            if token := result.get("next_page_token"):
                following.append({**query, "page_token": token})
        if not following:
            break
        queries = following
    return {name: sorted(set(ids)) for name, ids in found.items() if ids}


def _ask(url: str, queries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
        results = json.load(reply)["results"]
    if not isinstance(results, list) or len(results) != len(queries):
        raise ValueError("the answer does not have one result for each package")
    return results


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the result; returns the exit code."""
    parser = argparse.ArgumentParser(description="Compares the pinned versions with published security advisories.")
    parser.add_argument("--source", default=SOURCE, metavar="URL", help=f"default: {SOURCE}")
    parser.add_argument("--constraints", type=Path, default=CONSTRAINTS, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(arguments)
    pins = pinned_versions(options.constraints.read_text(encoding="utf-8"))
    if not pins:
        parser.error(f"{options.constraints} pins no version")
    try:
        found = advisories(options.source, pins)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = getattr(error, "reason", None) or error
        print(f"Advisories: NOT CHECKED, {options.source} does not answer ({reason}).", file=sys.stderr)
        print("Run this check on a machine with access to it before a release.", file=sys.stderr)
        return UNREACHABLE
    open_ones = {name: [id for id in ids if id not in ACCEPTED] for name, ids in found.items()}
    open_ones = {name: ids for name, ids in open_ones.items() if ids}
    if options.json:
        print(json.dumps({"checked": len(pins), "affected": open_ones, "accepted": ACCEPTED}, indent=2))
    else:
        for name, ids in open_ones.items():
            print(f"{name} {pins[name]}: {', '.join(ids)}")
        print(f"Advisories: {len(open_ones)} of {len(pins)} pinned packages are affected.")
    return AFFECTED if open_ones else OK


if __name__ == "__main__":
    sys.exit(main())
