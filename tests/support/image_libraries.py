"""What the image installs: Copywatch's libraries and theirs, by what each says it needs."""

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


def needed() -> dict[str, Distribution]:
    """All that pyproject.toml asks for, and what that needs in turn, as the tests' environment has it; by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, Distribution] = {}
    asked = [(Requirement(line), "") for line in project["dependencies"]]  # and for which extra
    seen = set[str]()
    while asked:
        requirement, extra = asked.pop()
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        found.setdefault(name, distribution(name))
        for wanted in ("", *requirement.extras):
            if (what := f"{name}[{wanted}]") not in seen:
                seen.add(what)
                asked += [(Requirement(line), wanted) for line in found[name].requires or ()]
    return found


def lend(site: Path) -> None:
    """Puts all that is needed, and nothing else, into the packages of an environment: by links where the disk has them.

    Only for want of time: a torch that is installed anew takes minutes. pip finds each of them in its right version.
    """
    made: set[Path] = set()
    for one in needed().values():
        for file in one.files or ():
            if file.parts[0] == ".." or "__pycache__" in file.parts:
                continue  # programs, which are not used, and what Python makes itself
            source, target = Path(str(file.locate())), site / file
            if target.parent not in made:
                target.parent.mkdir(parents=True, exist_ok=True)
                made.add(target.parent)
            try:
                os.link(source, target)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                shutil.copy(source, target)
