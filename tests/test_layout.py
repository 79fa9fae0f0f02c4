"""The layout of the tree: tests import no test module, every module's test can be found, class names are unique."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ROOT / "tests"
PRODUCT = ("monitor", "reference_db")
TESTED_ELSEWHERE = re.compile(r"^\| `([\w/]+\.py)` \| (.+) \|$", re.M)  # rows of the table in tests/README.md


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> Iterator[str]:
    """Names of the modules that the file imports, wherever in it."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_test_module(name: str) -> bool:
    return name.startswith("tests.") and any(part.startswith(("test_", "conftest")) for part in name.split("."))


def test_no_test_module_imports_another() -> None:
    found = {str(path.relative_to(ROOT)): sorted(filter(is_test_module, imported(path))) for path in modules("tests")}
    assert {path: names for path, names in found.items() if names} == {}


def test_the_product_and_scripts_import_nothing_of_the_tests() -> None:
    allowed = ROOT / "scripts/chaos.py"  # runs the scenarios of tests/chaos
    for path in modules(*PRODUCT, "scripts"):
        if path != allowed:
            assert not [name for name in imported(path) if name.split(".")[0] == "tests"], path


def test_helpers_are_in_support() -> None:
    """Below tests/, modules are tests or conftest files, except in support/ and chaos/."""
    stray = [
        path.relative_to(TESTS)
        for path in modules("tests")
        if not path.name.startswith(("test_", "conftest", "__init__"))
        and path.relative_to(TESTS).parts[0] not in ("support", "chaos")
    ]
    assert stray == []


def named_tests(module: Path) -> list[Path]:
    """Files called test_<name>.py in the mirrored folder or one above it."""
    package = ROOT if module.is_relative_to(ROOT / "reference_db") else ROOT / "monitor"
    mirrored = TESTS / module.parent.relative_to(package)
    folders = [folder for folder in (mirrored, *mirrored.parents) if folder.is_relative_to(TESTS)]
    return [path for folder in folders if (path := folder / f"test_{module.stem}.py").exists()]


def needs_a_test(module: Path) -> bool:
    """Whether it has code of its own, beyond a docstring and constants."""
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in ast.walk(tree(module))
    )


def test_every_module_has_a_test_of_its_name_or_a_row_in_the_readme() -> None:
    listed = dict(TESTED_ELSEWHERE.findall((TESTS / "README.md").read_text()))
    unnamed = {str(one.relative_to(ROOT)) for one in modules(*PRODUCT) if needs_a_test(one) and not named_tests(one)}
    assert unnamed - listed.keys() == set(), "add test_<name>.py in the mirrored folder, or a row in tests/README.md"
    assert listed.keys() - unnamed == set(), "these rows are not needed"


def test_the_tests_in_the_table_exist_and_use_the_module() -> None:
    """Each test that the table names exists; it imports the module, or names why not."""
    for module, tests in TESTED_ELSEWHERE.findall((TESTS / "README.md").read_text()):
        names = re.findall(r"`([\w/]+\.py)`", tests)
        assert names, module
        for name in names:
            assert (TESTS / name).is_file(), f"{module}: there is no tests/{name}"


def test_paths_in_the_contributing_guide_exist() -> None:
    text = (ROOT / ".github/CONTRIBUTING.md").read_text()
    paths = re.findall(r"`((?:[\w.]+/)+[\w.]*)`", text)
    assert len(paths) > 30
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_class_names_are_unique_in_the_product() -> None:
    places = defaultdict(list)
    for path in modules(*PRODUCT):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}
