"""What tests of several rooms share; made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.demo.media import Media, make_media
from tests.broker import Broker, session_broker
from tests.studio import Studio, build


@pytest.fixture(scope="session")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Studio:
    return build(tmp_path_factory.mktemp("studio"))


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `demo` of a data folder."""
    return tmp_path_factory.mktemp("data") / "demo"


@pytest.fixture(scope="session")
def made(home: Path) -> Media:
    """The demo's media."""
    return make_media(home)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Apache Kafka, one for the whole run; a test that breaks it leaves it running."""
    broker = session_broker(tmp_path_factory.mktemp("broker"))
    yield broker
    if broker.folder:
        broker.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-kafka", action="store_true", help="leave out the tests that need a Kafka broker")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--no-kafka"):
        return
    left_out = [item for item in items if "broker" in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
