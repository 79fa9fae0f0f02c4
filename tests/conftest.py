"""What tests of several rooms share; made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monitor.demo.media import Media, make_media
from tests.support.broker import Broker, session_broker
from tests.support.recorded_channel import RecordedChannel, record_channel


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedChannel:
    return record_channel(tmp_path_factory.mktemp("recorded"))


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
    parser.addoption("--whole-image", action="store_true", help="install all of the image anew: gigabytes, minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    with_kafka = [item for item in items if "broker" in getattr(item, "fixturenames", ())]
    if config.getoption("--no-kafka"):
        config.hook.pytest_deselected(items=with_kafka)
        items[:] = [item for item in items if item not in with_kafka]
    for item in items:  # side by side, a file stays in one process, and all that share the broker in one
        item.add_marker(pytest.mark.xdist_group("kafka" if item in with_kafka else str(item.path)))
