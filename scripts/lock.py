"""Writes deploy/requirements.txt: what the image installs besides torch, with the hashes of its wheels.

    python scripts/lock.py INDEX

INDEX is the address of a package index (PEP 503), as pip's --index-url. Run it in the environment of the tests after a
change of scripts/constraints.txt. Wheels for Linux on x86-64 and aarch64 and for Python 3.11 to 3.13 are listed. torch
is not: its wheel without GPU libraries has an index and hashes of its own.
"""

from __future__ import annotations

import argparse
import re
import sys
import tomllib
import urllib.request
from html.parser import HTMLParser
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).parent.parent
LOCK = ROOT / "deploy/requirements.txt"
APART, ALSO = {"torch"}, {"setuptools"}  # installed from its own index; builds Copywatch itself
PYTHONS = {"py3", "cp311", "cp312", "cp313"}
HEAD = """\
# What the image installs besides torch, with the hashes of the wheels. Written by scripts/lock.py; do not edit.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Write deploy/requirements.txt.")
    parser.add_argument("index", help="address of a package index, as pip's --index-url")
    index = parser.parse_args().index
    pins = pinned_versions((ROOT / "scripts/constraints.txt").read_text())
    names = sorted((dependencies() | ALSO) & pins.keys() - APART)  # the GPU libraries of torch are not pinned
    lines = [HEAD]
    for name in names:
        hashes = wheel_hashes(index, name, pins[name])
        if not hashes:
            sys.exit(f"{name} {pins[name]} has no wheel in this index.")
        lines.append(" \\\n    ".join([f"{name}=={pins[name]}", *(f"--hash=sha256:{one}" for one in hashes)]) + "\n")
    LOCK.write_text("".join(lines))


def pinned_versions(constraints: str) -> dict[str, str]:
    """Versions by name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", constraints, re.M)
    return {canonicalize_name(name): version for name, version in found}


def dependencies() -> set[str]:
    """All direct and indirect dependencies of Copywatch on Linux, as this environment has them."""
    lines = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    pending, seen = [(Requirement(line), "") for line in lines], set[str]()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (what := f"{name}[{wanted}]") not in seen:
                seen.add(what)
                pending += [(Requirement(line), wanted) for line in distribution(name).requires or ()]
    return {what.partition("[")[0] for what in seen}


def wheel_hashes(index: str, name: str, version: str) -> list[str]:
    """SHA-256 of the wheels that the image may install, sorted."""
    with urllib.request.urlopen(f"{index.rstrip('/')}/{name}/", timeout=60) as reply:
        page = _Links()
        page.feed(reply.read().decode())
    found = set()
    for link in page.links:
        file, _, digest = unquote(link.rpartition("/")[2]).partition("#sha256=")
        if file.endswith(".whl") and digest and is_usable(file, version):
            found.add(digest)
    return sorted(found)


def is_usable(file: str, version: str) -> bool:
    """Whether a wheel is of this version and for a Python and a machine of the image."""
    try:
        _, found, _, tags = parse_wheel_filename(file)
    except ValueError:
        return False
    return str(found) == version and any(
        (tag.interpreter in PYTHONS or tag.abi == "abi3")
        and (tag.platform == "any" or re.match(r"manylinux.*_(x86_64|aarch64)$", tag.platform))
        for tag in tags
    )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.links += [value for name, value in attributes if tag == "a" and name == "href" and value]


if __name__ == "__main__":
    main()
