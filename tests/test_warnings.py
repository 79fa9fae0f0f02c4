"""A deprecated call that our code makes fails the test that makes it, in this process and in those that it starts."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest

from tests.support.child_warnings.sitecustomize import CATEGORIES, OURS

ROOT = Path(__file__).parents[1]
MODULES = ("monitor.web.app", "reference_db.library", "training.edits", "benches.kafka", "evaluate", "tests.test_x")
CALL = "import warnings; warnings.warn('old', {category})"


def call(module: str, category: str) -> None:
    """A deprecated call in a module of this name: libraries attribute such warnings to the module that calls them."""
    exec(CALL.format(category=category), {"__name__": module})


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("module", MODULES)
def test_a_deprecated_call_of_ours_is_an_error(module: str, category: type[Warning]) -> None:
    with pytest.raises(category, match="old"):
        call(module, category.__name__)


def test_a_deprecated_call_inside_a_library_is_a_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        for library in ("torch.nn", "monitoring", "testsuite.x"):
            call(library, "DeprecationWarning")
    assert len(caught) == 3


@pytest.mark.parametrize("category", [category.__name__ for category in CATEGORIES])
def test_it_is_an_error_in_a_child_process(category: str) -> None:
    for module, code in (("monitor.web.app", 1), ("__main__", 1), ("torch.nn", 0)):
        program = f"exec({CALL.format(category=category)!r}, {{'__name__': {module!r}}})"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        assert code == 0 or done.stderr.endswith(f"{category}: old\n")


def test_every_package_and_script_of_ours_is_named() -> None:
    filters = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters == [f"error::{category.__name__}:{OURS}" for category in CATEGORIES]
    scripts = {path.stem for path in (ROOT / "scripts").iterdir() if path.suffix == ".py" or path.is_dir()}
    names = set(OURS[1 : OURS.index(")")].split("|"))
    assert scripts - {"__pycache__"} | {"monitor", "reference_db", "tests", "__main__"} == names
