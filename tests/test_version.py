"""The version stands in one place, `monitor/__init__.py`; everything else reads or repeats it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from monitor import __version__

ROOT = Path(__file__).parents[1]
IMAGE = re.compile(r"\bcopywatch:(\d[\w.]*)")


def test_a_build_takes_the_version_from_the_package() -> None:
    program = (
        "from setuptools.config.pyprojecttoml import apply_configuration\n"
        "from setuptools.dist import Distribution\n"
        "print(apply_configuration(Distribution(), 'pyproject.toml').metadata.version)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == __version__


def test_the_package_alone_imports_no_library() -> None:
    program = "import sys; import monitor; print({name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "monitor" in done.stdout
    assert not any(f"'{name}'" in done.stdout for name in ("numpy", "pydantic", "reference_db"))


def test_the_images_of_the_deployment_have_this_version() -> None:
    files = [path for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    named = {(path.name, version) for path in files for version in IMAGE.findall(path.read_text(encoding="utf-8"))}
    assert named == {(name, __version__) for name in ("compose.yaml", "statefulset.yaml", "Dockerfile", "README.md")}
