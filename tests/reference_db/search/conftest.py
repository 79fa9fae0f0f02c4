"""A library of eight films, large enough for a coded index."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.indexed_films import add


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eight")
    add(folder, *range(8))
    return folder
