"""The wheel: its content and metadata; and the pins of its dependencies."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from monitor import __version__
from tests.support.image_libraries import requirements

ROOT = Path(__file__).parent.parent
PACKAGES = ("monitor", "reference_db")
WEIGHTS = ("monitor/matching/weights", "reference_db/features/weights")
DASHBOARD = "monitor/web/dashboard"
INFO = f"copywatch-{__version__}.dist-info"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy of the whole tree, without the network."""
    folder = tmp_path_factory.mktemp("wheel")
    unwanted = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__", "node_modules")
    shutil.copytree(ROOT, folder / "tree", ignore=unwanted)
    build = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run([*build, "-w", folder, folder / "tree"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def metadata(wheel: zipfile.ZipFile) -> Message:
    return Parser().parsestr(wheel.read(f"{INFO}/METADATA").decode())


def files(folder: str, *patterns: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for pattern in patterns for path in (ROOT / folder).rglob(pattern)}


def test_it_has_both_packages_with_weights_and_dashboard_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    packed = {name for name in wheel.namelist() if not name.startswith(INFO)}
    code = files("monitor", "*.py") | files("reference_db", "*.py")
    weights = set().union(*(files(folder, "*") for folder in WEIGHTS))
    dashboard = files(DASHBOARD, "*.html", "*.css", "*.js", "*.svg")
    assert {"monitor/cli.py", "reference_db/library.py"} <= code
    assert {f"{DASHBOARD}/index.html", f"{DASHBOARD}/app.js"} <= dashboard
    assert all(any(name.endswith(".safetensors") for name in files(folder, "*")) for folder in WEIGHTS)
    assert packed == code | weights | dashboard


def test_training_evaluation_scripts_and_tests_stay_out(wheel: zipfile.ZipFile) -> None:
    assert {Path(name).parts[0] for name in wheel.namelist()} == {*PACKAGES, INFO}
    for word in ("training", "evaluation", "benches", "scripts", "tests"):
        assert not [name for name in wheel.namelist() if word in Path(name).parts], word


def test_its_metadata_has_the_version_the_system_and_addresses(wheel: zipfile.ZipFile) -> None:
    about = metadata(wheel)
    assert about["Version"] == __version__
    classifiers = about.get_all("Classifier") or []
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert any(one.startswith("Topic :: ") for one in classifiers)
    assert about["Keywords"]
    assert {line.split(",")[0] for line in about.get_all("Project-URL") or []} == {"Homepage", "Issues"}
    assert wheel.read(f"{INFO}/entry_points.txt").decode().split() == [
        "[console_scripts]",
        "copywatch",
        "=",
        "monitor.cli:main",
    ]


def test_every_dependency_is_pinned_in_its_installed_version() -> None:
    lines = (ROOT / "scripts/constraints.txt").read_text().splitlines()
    pins = dict(line.split("#")[0].strip().split("==") for line in lines if not line.startswith("#"))
    pinned: dict[str, str] = {canonicalize_name(name): version for name, version in pins.items()}
    installed = {name: one.version.split("+")[0] for name, one in requirements("dev", "train").items()}
    of_gpus = ("nvidia-", "cuda-", "triton")  # those that torch names
    unpinned = {name: one for name, one in installed.items() if pinned.get(name) != one}
    assert {name: one for name, one in unpinned.items() if not name.startswith(of_gpus)} == {}
