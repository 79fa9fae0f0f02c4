"""The demo's media, rendered once for all tests."""

from pathlib import Path

import pytest

from monitor.demo.media import Media, make_media


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `demo` of a data folder."""
    return tmp_path_factory.mktemp("data") / "demo"


@pytest.fixture(scope="session")
def made(home: Path) -> Media:
    return make_media(home)
