"""Fixtures that several folders share, markers, and the programs that a test may start.

tests/README.md explains the markers. A test without `broker`, `browser` or `system` runs with a PATH that has only the
programs of any Linux, so it fails where it starts one that a package of Debian brings.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from xdist.scheduler.loadfile import LoadFileScheduling

from monitor.demo.media import Media, render_media
from tests.support.broker import Broker, session_broker
from tests.support.recorded_channel import RecordedChannel, record_channel

ROOT = Path(__file__).parent.parent
MARKER_OF_FIXTURE = {"broker": "broker", "browser": "browser", "demo_media": "slow"}
NEEDS_PROGRAMS = ("broker", "browser", "system")
PROGRAMS = pytest.StashKey[str]()
CHILD_WARNINGS = Path(__file__).parent / "support/child_warnings"  # deprecated calls are errors in child processes too
# What a small Linux has: the shell, coreutils, and git, without which there is no clone to test.
ANY_LINUX = (
    *("bash", "cat", "chmod", "cp", "cut", "date", "dirname", "echo", "env", "false", "git", "grep", "head", "id"),
    *("kill", "ln", "ls", "mkdir", "mktemp", "mv", "nice", "readlink", "rm", "sed", "sh", "sha256sum", "sleep", "sort"),
    *("tail", "tar", "touch", "tr", "true", "uname", "wc"),
)

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedChannel:
    return record_channel(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `demo` of a data directory."""
    return tmp_path_factory.mktemp("data") / "demo"


@pytest.fixture(scope="session")
def demo_media(demo_folder: Path) -> Media:
    """The media of the demo; rendering them takes a quarter of a minute."""
    return render_media(demo_folder)


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """Apache Kafka, one for the whole run; a test that breaks it leaves it running."""
    broker = session_broker(tmp_path_factory.mktemp("broker"))
    yield broker
    if broker.folder:
        broker.stop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-kafka", action="store_true", help="leave out the tests that need a Kafka broker")
    parser.addoption("--whole-image", action="store_true", help="install the whole image from scratch: gigabytes")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by the markers that this adds
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in MARKER_OF_FIXTURE.keys() & getattr(item, "fixturenames", ()):
            item.add_marker(MARKER_OF_FIXTURE[fixture])
    if config.getoption("--no-kafka"):
        with_kafka = [item for item in items if item.get_closest_marker("broker")]
        config.hook.pytest_deselected(items=with_kafka)
        items[:] = [item for item in items if item not in with_kafka]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, a file stays in one, and all files that use the broker are in one."""
    scheduler = LoadFileScheduling(config, log)
    scheduler._split_scope = _process_of
    return scheduler


def _process_of(nodeid: str) -> str:
    file = nodeid.split("::", 1)[0]
    return "broker" if _uses_broker(file) else file


@cache
def _uses_broker(file: str) -> bool:
    return re.search(r"\bbroker: Broker\b", (ROOT / file).read_text()) is not None


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(tempfile.mkdtemp(prefix="copywatch-programs-"))
    config.add_cleanup(lambda: shutil.rmtree(folder))
    for name in ANY_LINUX:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    (folder / "python3").symlink_to(sys.executable)
    config.stash[PROGRAMS] = str(folder)
    python_path = [str(CHILD_WARNINGS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Hides the programs of packages from a test that is not marked to need them, and from its fixtures."""
    if any(item.get_closest_marker(marker) for marker in NEEDS_PROGRAMS):
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", item.config.stash[PROGRAMS])
        return (yield)
