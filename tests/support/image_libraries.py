"""The libraries that the image installs: dependencies of Copywatch and their dependencies."""

from __future__ import annotations

import errno
import os
import shutil
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.promql_queries import ROOT


def requirements(*extras: str) -> dict[str, Distribution]:
    """All direct and indirect dependencies in pyproject.toml, as installed in the environment of the tests; by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, Distribution] = {}
    lines = [*project["dependencies"], *(one for extra in extras for one in project["optional-dependencies"][extra])]
    pending = [(Requirement(line), "") for line in lines]  # with the extra that needs it
    seen = set[str]()
    while pending:
        requirement, extra = pending.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, distribution(name))
        for wanted in ("", *requirement.extras):
            if (what := f"{name}[{wanted}]") not in seen:
                seen.add(what)
                pending += [(Requirement(line), wanted) for line in found[name].requires or ()]
    return found


def link_into(site: Path) -> None:
    """Puts exactly the requirements into the site-packages of an environment, by hard links where possible.

    This saves minutes of installing torch. pip then finds each of them in its pinned version.
    """
    created: set[Path] = set()
    for one in requirements().values():
        for file in one.files or ():
            if file.parts[0] == ".." or "__pycache__" in file.parts:
                continue  # unused programs, and bytecode
            source, target = Path(str(file.locate())), site / file
            if target.parent not in created:
                target.parent.mkdir(parents=True, exist_ok=True)
                created.add(target.parent)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                shutil.copy(source, target)
